from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from mor_kernels.train import Loader, Tokens, load_tokenizer, prepare, train_tokenizer, unigram_entropy
from mor_kernels.train import data as data_module
from mor_kernels.train import text as text_module
from mor_kernels.train.checkpoint import file_hash
from mor_kernels.train.text import documents

# Sources


def test_folder_of_text_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo\n<|endoftext|>\nthree<|endoftext|>four\n<|endoftext|>\n\n")
    (tmp_path / "b" / "c.md").write_text("# five\n")
    (tmp_path / "b" / "d.jsonl").write_text('{"text": "six\\nseven"}\n\n{"text": ""}\n{"text": "eight", "id": 1}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    expected = ["one\ntwo", "three", "four", "# five", "six\nseven", "eight"]
    assert list(documents(tmp_path)) == expected
    assert list(documents([tmp_path / "a.txt", tmp_path / "b"])) == expected


def test_suffixes(tmp_path):
    (tmp_path / "A.TXT").write_text("one")
    (tmp_path / "B.JSONL").write_text('{"text": "two"}')
    (tmp_path / "c.rst").write_text("three")
    assert list(documents(tmp_path)) == ["one", "two"]
    assert list(documents(tmp_path / "B.JSONL")) == ["two"]
    assert list(documents(tmp_path / "c.rst")) == ["three"]  # named explicitly


def test_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "two"}', encoding="utf-8")
    assert list(documents(tmp_path)) == ["one", "two"]


def test_python_docs():
    texts = list(documents("python-docs"))
    assert sum(map(len, texts)) > 300_000 and any("assert" in text for text in texts)


@pytest.mark.parametrize("content, name, message", [
    ('{"text": "a"}\nnot json\n', "x.jsonl", r"x\.jsonl:2: expected a JSON object .* got not json"),
    ('{"text": 1}\n', "x.jsonl", r'x\.jsonl:1: expected a JSON object with a string "text", got {"text": 1}'),
    ('["text"]\n', "x.jsonl", r"x\.jsonl:1: expected a JSON object"),
    ('{"text": "a"}\n{"text": "b\\udc00"}\n', "x.jsonl",
     r"x\.jsonl:2: expected text, got half a surrogate pair, \\udc00"),
    (b"\xff\xfe", "x.txt", r"x\.txt: expected UTF-8"),
    (b"\x7fELF\xff", "x", r"x: expected UTF-8"),
])
def test_unreadable_files(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(documents(tmp_path / name))


def test_any_sequence_is_several_sources(tmp_path):
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(f"{name} says something")
    assert list(documents(deque([tmp_path / "b.txt", str(tmp_path / "a.txt")]))) == [
        "b says something", "a says something"]


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: not found; a source is a file"):
        list(documents(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="expected .txt, .md or .jsonl files, found none"):
        list(documents(tmp_path))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="expected text, found none"):
        prepare(tmp_path, tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize("source, expected", [
    ("hf:a/b", ("a/b", None, "train")),
    ("hf:a/b:small", ("a/b", "small", "train")),
    ("hf:a/b:small:test", ("a/b", "small", "test")),
    ("hf:a/b::test", ("a/b", None, "test")),
])
def test_hugging_face_source_is_streamed(monkeypatch, source, expected):
    calls = []

    def load_dataset(name, subset, *, split, streaming):
        calls.append((name, subset, split))
        assert streaming
        return iter([{"text": "one"}, {"text": ""}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(documents(source)) == ["one", "two"]
    assert calls == [expected]


def test_hugging_face_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: [{"body": "x"}]))
    with pytest.raises(ValueError, match=r"hf:a.*expected a column \"text\", found \['body'\]"):
        list(documents("hf:a"))
    with pytest.raises(ValueError, match=r'expected "hf:NAME\[:SUBSET\]\[:SPLIT\]", got "hf:a:b:c:d"'):
        list(documents("hf:a:b:c:d"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the package `datasets`: pip install mor-kernels\[datasets\]"):
        list(documents("hf:a"))


def test_hugging_face_local_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(documents(f"hf:{tmp_path / 'set'}")) == ["one", "two"]


# Tokenizers


def test_trained_tokenizer_is_lossless(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the cat sat\n" * 50)
    tokenizer = train_tokenizer(tmp_path, 280)
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert 257 < tokenizer.get_vocab_size() <= 280
    text = " unseen: é 日本\n\n\ttabs "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(ValueError, match="vocab_size: expected at least 257 .* got 256"):
        train_tokenizer(tmp_path, 256)


def test_tokenizer_is_trained_on_a_sample_only(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa " * 200 + "<|endoftext|>" + "zzzz " * 200)
    merged = train_tokenizer(tmp_path, 270, sample_chars=1000).get_vocab()
    assert "aa" in merged and "zz" not in merged


@pytest.mark.parametrize("letters", ["a", " ", "abcdefgh"])
def test_text_without_gaps_trains_in_linear_time(tmp_path, letters):
    # 2 s at most; without the cuts, the square of a million: hours.
    (tmp_path / "a.txt").write_text("x" + "".join(np.random.RandomState(0).choice(list(letters), 1_000_000)) + "x")
    program = f"from mor_kernels.train import train_tokenizer; train_tokenizer({str(tmp_path)!r}, 300)"
    # A process of its own, since nothing else can stop a training that hangs.
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_only_long_runs_are_cut(monkeypatch):
    monkeypatch.setattr(text_module, "_WORD", 5)
    for text, pieces in (("abcde fghij\n", ["abcde fghij\n"]),
                         ("ab cdefghijklmnopq r", ["ab cdefg", "hijkl", "mnopq r"]),
                         ("a       b", ["a     ", "  b"]), ("", [""])):
        assert list(text_module._cut_words(text)) == pieces


def test_long_documents_are_cut_where_it_does_not_show(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_PIECE", 101)
    text = "\n".join(f"Line {i}  of a  text\n\n   with   gaps." for i in range(60))
    pieces = text_module.pieces(text)
    assert "".join(pieces) == text and len(pieces) > 10 and max(map(len, pieces)) <= 101
    tokenizer = train_tokenizer("python-docs", 400, sample_chars=20_000)
    cut = [token for piece in pieces for token in tokenizer.encode(piece).ids]
    assert cut == tokenizer.encode(text).ids
    assert text_module.pieces("x" * 250) == ["x" * 101, "x" * 101, "x" * 48]


def test_given_tokenizer(tmp_path):
    tokenizer = train_tokenizer("python-docs", 300, sample_chars=10_000)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "given.json"))
    (tmp_path / "a.txt").write_text("abc def<|endoftext|>ghi")
    tokens = prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "given.json")
    opened = load_tokenizer(tokens.tokenizer_file)
    pieces = "".join("|" if i == 0 else opened.decode([i]) for i in tokens[:])
    assert pieces == "abc def|ghi|"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "given.json").read_bytes()


def test_tokenizer_errors(tmp_path):
    from tokenizers import Tokenizer, models

    with pytest.raises(FileNotFoundError, match="none.json: not found, expected a tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json: not a tokenizer.json"):
        load_tokenizer(tmp_path / "bad.json")
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "word.json"))
    with pytest.raises(ValueError, match=r"expected a token <\|endoftext\|> or one of .*</s>.* found none"):
        prepare("python-docs", tmp_path / "out", tokenizer=tmp_path / "word.json")


def test_vocabulary_with_gaps_and_uint32(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"</s>": 7, "a": 70_000, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "word.json"))
    (tmp_path / "a.txt").write_text("a b a")
    tokens = prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "word.json")
    assert tokens.vocab_size == 70_001 and tokens[:].tolist() == [70_000, 1, 70_000, 7]
    assert np.load(tmp_path / "out" / "tokens-00000.npy").dtype == np.uint32


# Shards


def test_shards_hold_the_text(data):
    tokens = Tokens(data)
    assert len(tokens.shards) > 3 and {count for _, count, *_ in tokens.shards[:-1]} == {50_000}
    assert np.load(data / "tokens-00000.npy").dtype == np.uint16
    texts = list(documents("python-docs"))
    parts = np.split(tokens[:], np.flatnonzero(tokens[:] == 0) + 1)
    assert len(parts) == len(texts) + 1 and not len(parts[-1])
    opened = load_tokenizer(tokens.tokenizer_file)
    for i in (0, 40, -1):
        assert opened.decode(parts[:-1][i].tolist()) == texts[i]
    # A slice over the end of a shard.
    assert np.array_equal(tokens[49_990:100_010], tokens[:][49_990:100_010])


def test_shard_size_does_not_change_the_tokens(data, tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "_BATCH", 10_000)
    tokens = prepare("python-docs", tmp_path / "a", tokenizer=data / "tokenizer.json", shard_tokens=7_001,
                     max_tokens=30_000)
    assert [count for _, count, *_ in tokens.shards] == [7_001] * 4 + [30_000 - 4 * 7_001]
    assert np.array_equal(tokens[:], Tokens(data)[:30_000])
    assert tokens.fingerprint != Tokens(data).fingerprint


@pytest.mark.parametrize("name", ["max_tokens", "shard_tokens"])
@pytest.mark.parametrize("value", [0, -5])
def test_numbers_of_tokens_out_of_range(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got {value}"):
        prepare("python-docs", tmp_path / "out", vocab_size=300, **{name: value})
    assert not (tmp_path / "out").exists()


def test_index_tells_what_the_tokens_were_made_of(data, tmp_path):
    meta = json.loads((data / "meta.json").read_text())
    assert (meta["source"], meta["max_tokens"], meta["given_tokenizer_sha256"]) == ("python-docs", None, None)
    prepare("python-docs", tmp_path / "out", tokenizer=data / "tokenizer.json", max_tokens=1000)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["max_tokens"] == 1000
    assert meta["given_tokenizer_sha256"] == meta["tokenizer_sha256"] == file_hash(data / "tokenizer.json")
    expected = Tokens(tmp_path / "out").fingerprint
    del meta["max_tokens"], meta["given_tokenizer_sha256"]  # as earlier versions wrote it
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta))
    assert Tokens(tmp_path / "out").fingerprint == expected


def test_prepared_folder_is_not_overwritten(data):
    with pytest.raises(FileExistsError, match="holds prepared tokens already"):
        prepare("python-docs", data)


def damaged(change):
    """What opening and verifying a copy of the folder does after `change(folder)`."""
    return pytest.param(change, id=change.__name__)


def shard_missing(folder):
    (folder / "tokens-00001.npy").unlink()
    return FileNotFoundError, r"tokens-00001\.npy: not found, expected a shard of 50000 tokens"


def shard_truncated(folder):
    with open(folder / "tokens-00001.npy", "r+b") as file:
        file.truncate(1000)
    return ValueError, r"tokens-00001\.npy: truncated, expected 100128 bytes, found 1000"


def shard_longer(folder):
    with open(folder / "tokens-00001.npy", "ab") as file:
        file.write(b"more")
    return ValueError, r"tokens-00001\.npy: damaged, expected 100128 bytes, found 100132"


def header_damaged(folder):
    with open(folder / "tokens-00001.npy", "r+b") as file:
        file.write(b"damaged!")
    return ValueError, r"tokens-00001\.npy: damaged, expected a \.npy file"


def other_type(folder):
    np.save(folder / "tokens-00001.npy", np.zeros(25_000, np.uint32))
    return ValueError, r"tokens-00001\.npy: damaged, expected 50000 tokens of uint16, found \(25000,\) of uint32"


def content_changed(folder):
    with open(folder / "tokens-00001.npy", "r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")
    return ValueError, r"tokens-00001\.npy: damaged, expected SHA-256 \w+, found \w+"


def index_missing(folder):
    (folder / "meta.json").unlink()
    return FileNotFoundError, r"meta\.json: not found; the folder was never prepared, or .* interrupted"


def index_damaged(folder):
    (folder / "meta.json").write_text('{"shards": [')
    return ValueError, r"meta\.json: damaged, expected the index"


def index_incomplete(folder):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["vocab_size"]
    (folder / "meta.json").write_text(json.dumps(meta))
    return ValueError, r"meta\.json: damaged, .*vocab_size"


def index_a_list(folder):
    (folder / "meta.json").write_text("[]")
    return ValueError, r"meta\.json: damaged, expected the index"


def index_empty(folder):
    (folder / "meta.json").write_text("{}")
    return ValueError, r"meta\.json: damaged, expected the index"


def no_shards(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "shards": []}))
    return ValueError, r"meta\.json: damaged, .*no shards"


def other_tokenizer(folder):
    train_tokenizer("python-docs", 300, sample_chars=10_000).save(str(folder / "tokenizer.json"))
    return ValueError, r"tokenizer\.json: not the tokenizer of these tokens, expected SHA-256"


def tokenizer_missing(folder):
    (folder / "tokenizer.json").unlink()
    return FileNotFoundError, r"tokenizer\.json: not found, expected the tokenizer"


@pytest.mark.parametrize("change", [damaged(change) for change in (
    shard_missing, shard_truncated, shard_longer, header_damaged, other_type, content_changed, index_missing,
    index_damaged, index_incomplete, index_a_list, index_empty, no_shards, other_tokenizer, tokenizer_missing)])
def test_damaged_folder(data, tmp_path, change):
    folder = tmp_path / "copy"
    shutil.copytree(data, folder)
    Tokens(folder).verify()
    kind, message = change(folder)
    with pytest.raises(kind, match=message):
        Tokens(folder).verify()


def test_model_vocabulary(data):
    Tokens(data).check_vocab(512)
    with pytest.raises(ValueError, match=r"model vocab_size: expected at least 512, .*tokenizer\.json, got 500"):
        Tokens(data).check_vocab(500)


def test_split_holds_out_the_end(data):
    tokens = Tokens(data)
    train, validation = tokens.split(0.1)
    assert len(validation) == pytest.approx(0.1 * len(tokens), abs=1)
    assert np.array_equal(np.concatenate([train[:], validation[:]]), tokens[:])
    with pytest.raises(ValueError, match=r"validation: expected a share in \(0, 1\), got 1"):
        tokens.split(1)


def test_unigram_entropy(data, tmp_path):
    counts = np.bincount(Tokens(data)[:])
    shares = torch.tensor(counts[counts > 0] / counts.sum())
    assert unigram_entropy(Tokens(data)) == pytest.approx(torch.distributions.Categorical(shares).entropy().item())


# Batches


def samples(loader, steps):
    return [row.tolist() for step in range(steps) for micro in range(loader.accumulation)
            for row in loader.batch(step, micro)[0]]


def test_batch_is_a_pure_function_of_its_arguments(data):
    tokens = Tokens(data)
    first, second = (Loader(tokens, 32, 4, seed=3) for _ in range(2))
    in_order = [first.batch(step) for step in range(20)]
    for step in (19, 3, 7, 3):
        inputs, targets = second.batch(step)
        assert torch.equal(inputs, in_order[step][0]) and torch.equal(targets, in_order[step][1])
    assert inputs.shape == targets.shape == (4, 32) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(Loader(tokens, 32, 4, seed=4).batch(0)[0], in_order[0][0])


def test_order_is_pinned():
    # A resumed run goes on in the same order with any version of NumPy.
    loader = Loader(np.arange(201), 20, 1, seed=1)
    assert [int(loader.batch(step)[0][0, 0]) // 20 for step in range(10)] == [2, 0, 1, 4, 5, 6, 7, 8, 3, 9]


def test_an_epoch_covers_every_window_once(data):
    tokens = Tokens(data).split(0.99)[0]
    loader = Loader(tokens, 16, 3, seed=1)
    count = loader.windows
    rows = samples(loader, -(-2 * count // 3))
    expected = sorted(tokens[i * 16:i * 16 + 16].tolist() for i in range(count))
    assert sorted(rows[:count]) == expected and sorted(rows[count:2 * count]) == expected
    assert rows[:count] != rows[count:2 * count]
    assert count * 16 + 1 <= len(tokens) < (count + 1) * 16 + 1


@pytest.mark.parametrize("batch_size, accumulation, world_size", [(12, 1, 1), (3, 4, 1), (3, 1, 4), (2, 3, 2)])
def test_samples_of_a_step_do_not_depend_on_their_division(data, batch_size, accumulation, world_size):
    tokens = Tokens(data)
    whole = samples(Loader(tokens, 16, 12), 5)
    loaders = [Loader(tokens, 16, batch_size, accumulation=accumulation, rank=rank, world_size=world_size)
               for rank in range(world_size)]
    divided = [row.tolist() for step in range(5) for micro in range(accumulation) for loader in loaders
               for row in loader.batch(step, micro)[0]]
    assert divided == whole


def test_windows_of_a_length_that_is_a_multiple():
    loader = Loader(np.arange(200), 20, 1)  # the last target of a tenth window would be token 200
    assert loader.windows == 9
    assert {int(loader.batch(step)[1][0, -1]) for step in range(9)} == set(range(20, 200, 20))
    assert Loader(np.arange(201), 20, 1).windows == 10


def test_too_few_tokens(data):
    with pytest.raises(ValueError, match=r"sequence_length: expected at least 1000001 tokens .* found 2\d{5} in"):
        Loader(Tokens(data), 1_000_000, 1)
    for part, name in zip(Tokens(data).split(0.5), ("training", "validation")):
        with pytest.raises(ValueError, match=rf"found 1\d{{5}} in the {name} share of "):
            Loader(part, 1_000_000, 1)
