"""Files that nobody vouches for: each loads right or says what is wrong with it, and then nothing has changed."""

from __future__ import annotations

import copy
import gzip
import json
import math
import os
import random
import re
import shutil
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import SMALL, TOKEN

from mor_kernels.__main__ import main
from mor_kernels.evaluate import encode_pair, read_task
from mor_kernels.files import file_hash
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.authors import authors_config, is_authors
from mor_kernels.model.convert import CONVERT, separate
from mor_kernels.train import (
    Tokens,
    TrainConfig,
    Trainer,
    checkpoint,
    load_tokenizer,
    plot_curves,
    prepare,
    train_tokenizer,
)
from mor_kernels.train.command import read_config
from mor_kernels.train.metrics import read_metrics
from mor_kernels.train.text import documents

LLAMA = {"model_type": "llama", "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": True,
         **{name: size for name, size in SMALL.items() if name != "num_recursions"}}  # fmt: skip
THEIRS = {"recursive": {"enable": True, "num_recursion": 2, "sharing": "middle_cycle", "ln_share": True},
          "mor": {"enable": True, "type": "expert", "capacity": "1,0.5", "router_type": "linear", "temp": 1.0,
                  "expert": {"cap_warmup_step": 4, "router_func": "sigmoid", "alpha": 0.1, "coeff": 0.01}},
          "gradient_accumulation_steps": 2, "max_length": 64, "model_config": {}}  # fmt: skip
CONFIG = {"preset": "demo", "source": ["a.txt"], "tokenizer": "tokenizer.json", "max_tokens": 9, "init": "dense:upper",
          "model": {"num_recursions": 3, "alpha": 0.5, "capacities": [1, 0.5, 0.25]},
          "train": {"steps": 4, "betas": [0.9, 0.95], "clip": 1.0, "device": "cpu"}, "processes": 1}  # fmt: skip
LINES = {
    "metrics.jsonl": {"step": 1, "loss": 2.5, "depth_mix": [0.5, 0.5], "learning_rate": 1e-3, "device": "CPU"},
    "text.jsonl": {"text": "a text"},
    "task.jsonl": {"choices": [["The", " cat"], ["The", " dog"]], "gold": 1},
}
TEXT = "The quick brown fox jumps over the lazy dog. "


def write(path, value):
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A folder with one file, or folder, of each kind."""
    folder = tmp_path_factory.mktemp("valid")
    torch.manual_seed(0)
    model = MoR(MoRConfig(**{**SMALL, **TOKEN}))
    model.save_pretrained(folder / "model")
    ids = torch.arange(32).view(2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids, targets=ids).loss.backward()
    optimizer.step()
    state = {"data": {"tokens": "x"}, "names": ["a"]}
    checkpoint.save(folder / "checkpoints", 5, model, optimizer, state, {"window": torch.ones(2, 1)})
    for kind in ("dense", "theirs"):
        (folder / kind).mkdir()
        write(folder / kind / "config.json", LLAMA)
    dense = MoR(MoRConfig.from_llama(LLAMA))
    tensors = {
        f"model.{name}": tensor.contiguous() for name, tensor in separate(dense.state_dict(), dense.config).items()
    }
    save_file(tensors, folder / "dense" / "model.safetensors")
    write(folder / "theirs" / "run.json", THEIRS)
    (folder / "theirs" / "run.yaml").write_text(json.dumps(THEIRS, indent=1))
    (folder / "a.txt").write_text(TEXT * 40)
    train_tokenizer(folder / "a.txt", 280).save(str(folder / "tokenizer.json"))
    prepare(folder / "a.txt", folder / "tokens", tokenizer=folder / "tokenizer.json", shard_tokens=200)
    write(folder / "run.json", CONFIG)
    for name, line in LINES.items():
        (folder / name).write_text(f"{json.dumps(line)}\n" * 3)
    (folder / "task.jsonl.gz").write_bytes(gzip.compress((folder / "task.jsonl").read_bytes(), mtime=0))
    return folder


def sealed(folder):
    """Makes sizes and hashes in an index be those of the files, as whoever writes a folder can."""
    for index, key in (("checkpoint.json", "files"), ("meta.json", "shards")):
        try:
            found = json.loads((folder / index).read_text())
            entries = found[key].items() if index == "checkpoint.json" else [(s["file"], s) for s in found[key]]
            for name, entry in entries:
                file = folder / name
                entry |= {"bytes": file.stat().st_size, "sha256": file_hash(file)}
            if "tokenizer_sha256" in found:
                found["tokenizer_sha256"] = file_hash(folder / "tokenizer.json")
            write(folder / index, found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # the index itself is what was changed


class Loaded:
    """A model, an optimizer and the generators, as they were, to be compared with what they are."""

    def __init__(self):
        torch.manual_seed(7)
        self.model = MoR(MoRConfig(**{**SMALL, **TOKEN}))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.before = self.state()

    def state(self):
        _, keys, *rest = np.random.get_state()
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return state, copy.deepcopy(self.optimizer.state_dict()), random.getstate(), keys, rest, torch.get_rng_state()

    def assert_unchanged(self):
        now = self.state()
        assert all(torch.equal(self.before[0][name], tensor) for name, tensor in now[0].items())
        assert now[1:3] == self.before[1:3] and now[4] == self.before[4]
        assert np.array_equal(now[3], self.before[3]) and torch.equal(now[5], self.before[5])


def load_checkpoint(path):
    loaded = Loaded()
    try:
        checkpoint.load(path, loaded.model, loaded.optimizer)
    except BaseException:
        loaded.assert_unchanged()
        raise
    loaded.optimizer.zero_grad()
    ids = torch.arange(32).view(2, 16)
    loaded.model(ids, targets=ids).loss.backward()
    loaded.optimizer.step()


def load_tokens(folder):
    tokens = Tokens(folder)
    tokens.verify()
    assert tokens[:].min() >= 0 and tokens[:].max() < tokens.vocab_size


def load_theirs(folder, file="run.json"):
    authors_config(folder / file, folder)
    is_authors(folder)


def load_tokenizer_and_encode(path):
    load_tokenizer(path).decode(load_tokenizer(path).encode(TEXT).ids)


def load_config(path):
    found = read_config(path)
    MoRConfig(**found.get("model", {}))
    TrainConfig(data="", out="", **found.get("train", {}))


LOADERS = {
    "model/config.json": lambda f: MoR.from_pretrained(f / "model"),
    "model/model.safetensors": lambda f: MoR.from_pretrained(f / "model"),
    "dense/config.json": lambda f: MoR.from_dense(f / "dense", MoRConfig.from_llama(f / "dense", sharing="cycle")),
    "dense/model.safetensors": lambda f: MoR.from_dense(f / "dense", MoRConfig.from_llama(LLAMA, num_recursions=2)),
    "theirs/config.json": lambda f: load_theirs(f / "theirs"),
    "theirs/run.json": lambda f: load_theirs(f / "theirs"),
    "theirs/run.yaml": lambda f: load_theirs(f / "theirs", "run.yaml"),
    **{f"checkpoints/step-00000005/{name}": lambda f: load_checkpoint(f / "checkpoints" / "step-00000005")
       for name in ("checkpoint.json", "config.json", "model.safetensors", "trainer.json", "trainer.safetensors")},
    **{f"tokens/{name}": lambda f: load_tokens(f / "tokens")
       for name in ("meta.json", "tokens-00000.npy", "tokenizer.json")},
    "tokenizer.json": lambda f: load_tokenizer_and_encode(f / "tokenizer.json"),
    "run.json": lambda f: load_config(f / "run.json"),
    "metrics.jsonl": lambda f: read_metrics(f / "metrics.jsonl"),
    "text.jsonl": lambda f: list(documents(f / "text.jsonl")),
    "task.jsonl": lambda f: read_task(f / "task.jsonl"),
    "task.jsonl.gz": lambda f: read_task(f / "task.jsonl.gz"),
}  # fmt: skip

# Texts in the place of a value
HOSTILE = ("null", "true", "0", "-1", "3", "0.5", "1e999", "-Infinity", "NaN", "1000000000", "1000000000000",
           "9" * 200, "9" * 400, "9" * 5000, '"x"', '"1"', '""', '"../../x"', '"/etc/passwd"', '"a\\u0000b"',
           '"\\ud800"',
           "[]", "{}", '[[], {"a": 1}]', "[" * 90 + "]" * 90, "[" * 900 + "]" * 900, "[" * 100_000, '{"a": ' * 50_000,
           '{"a": 1, "a": 1}', '"uint32"', '"F64"', '"I32"', '"token_choice"', '"mlp"', "[0, 4]",
           "[4611686018427387904, 4611686018427387904]", "[0, 9223372036854775808]")  # fmt: skip


def splice(draw, text, longest=10**6):
    """A JSON text with a value of it replaced, removed, added or there twice."""
    value = whole = json.loads(text)
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return text
        key = draw(st.sampled_from(keys))
        if not isinstance(value[key], (dict, list)) or draw(st.booleans()):
            break
        value = value[key]
    how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "swap"]))
    if how == "remove":
        del value[key]
    elif how == "swap":
        other = draw(st.sampled_from(keys))
        value[key], value[other] = value[other], value[key]
    elif how == "add" and isinstance(value, dict):
        value["@" + key] = value[key]
    else:
        value[key] = "@@"
    text = json.dumps(whole).replace('"@@"', draw(st.sampled_from([text for text in HOSTILE if len(text) <= longest])))
    return text.replace('"@', '"') if draw(st.booleans()) else text


def mutate(draw, content, name):
    kind = draw(st.sampled_from(["bytes", "splice", "splice"]))
    if kind == "splice" and name.endswith(".safetensors"):
        size = int.from_bytes(content[:8], "little")
        header = splice(draw, content[8 : 8 + size].decode()).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    if kind == "splice" and name.endswith("jsonl"):
        lines = content.decode().splitlines()
        return "\n".join([lines[0], splice(draw, lines[1]), *lines[2:]]).encode()
    if kind == "splice" and name.endswith(("json", "yaml")):  # PyYAML takes seconds for what is deep
        return splice(draw, content.decode(), 200 if name.endswith("yaml") else 10**6).encode()
    for _ in range(draw(st.integers(1, 3))):
        # where a header is more often than anywhere
        most = draw(st.sampled_from([16, 200, len(content)]))
        start, length = draw(st.integers(0, min(most, len(content)))), draw(st.integers(1, 40))
        how = draw(st.sampled_from(["cut", "flip", "insert", "double", "remove"]))
        piece = content[start : start + length]
        if how == "cut":
            content = content[:start]
        elif how == "flip":
            content = (
                content[:start] + bytes(byte ^ draw(st.integers(1, 255)) for byte in piece[:4]) + content[start + 4 :]
            )
        elif how == "insert":
            content = content[:start] + draw(st.binary(min_size=1, max_size=8)) + content[start:]
        else:
            content = content[:start] + piece * 2 * (how == "double") + content[start + length :]
    return content


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(data=st.data())
def test_mutations(valid, tmp_path, name, data):
    """Whatever is done to a file, it loads or there is an error of a documented type that names a file."""
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    top = name.split("/")[0]
    shutil.rmtree(tmp_path / top, ignore_errors=True)
    shutil.copytree(valid / top, tmp_path / top) if (valid / top).is_dir() else shutil.copy(valid / top, tmp_path)
    file = tmp_path / name
    file.write_bytes(mutate(data.draw, file.read_bytes(), name))
    if data.draw(st.integers(0, 3)):
        sealed(file.parent)
    before = contents(tmp_path)
    try:
        LOADERS[name](tmp_path)
    except (ValueError, OSError) as error:
        # what options of the command line may override is called by its own name
        assert str(tmp_path) in str(error) or name == "run.json" and re.match(r"[a-z_]+.*: expected", str(error)), error
        assert len(str(error)) < 10_000
    assert contents(tmp_path) == before


# One by one: what chance would hardly find


@pytest.fixture
def folder(valid, tmp_path):
    """A copy of the valid folder, to be spoilt."""
    shutil.copytree(valid, tmp_path / "copy")
    return tmp_path / "copy"


def change(path, **fields):
    write(path, {**json.loads(path.read_text()), **fields})


def with_header(path, header, size=None):
    content = path.read_bytes()
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + content[-8:])


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (b"{}", 2**63, f"with a header of at most {4 << 20} bytes, got one of {2**63}"),
        (b"{}", 5 << 20, f"got one of {5 << 20}"),
        (b"{", None, "got a corrupt one: "),
        (b'{"a": ' + b"[" * 100_000, None, "got a corrupt one: "),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, None, "got a corrupt one: "),
        ({"a": entry([3], 0, 12)}, None, "got a corrupt one: "),
        ({"a": entry([2**62, 2**62], 0, 8)}, None, "got a corrupt one: "),
        ({"a": entry([0, 2**63], 0, 0), "b": entry([2], 0, 8)}, None, "got a corrupt one: "),
        ({"a": entry([2], 0, 8, "I32")}, None, "a: expected torch.float32, torch.bfloat16, .*got torch.int32"),
        ({"a": entry([2], 0, 8)}, None, r"expected the tensors of 3 layers, got 1"),
    ],
)
def test_headers_of_tensors(folder, header, size, message):
    file = folder / "model" / "model.safetensors"
    with_header(file, header, size)
    with pytest.raises(ValueError, match=rf"model/model\.safetensors: .*{message}"):
        MoR.from_pretrained(folder / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**12}, r"config.json: vocab_size: expected an integer of at most 2147483647, got 10{12}$"),
        ({"num_hidden_layers": 10**9}, r"config.json: num_hidden_layers: expected an integer of at most 10000, got"),
        ({"num_hidden_layers": 9_998}, r"model.safetensors: expected the tensors of 5000 layers, got 31$"),
        ({"num_hidden_layers": 9_998, "num_recursions": 9_996}, r"router_bias: expected shape \(9996,\), got \(2,\)"),
        ({"vocab_size": 2**31 - 1}, r"embed_tokens.weight: expected shape \(2147483647, 32\), got \(512, 32\)"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "expected a model's tensors, but of its configuration: "),
        ({"rope_theta": 10**299 * 10**10}, "config.json: .*an integer of 310 digits"),
    ],
)
def test_a_file_has_what_the_configuration_says_before_memory_is_taken(folder, changes, message):
    """Hundreds of gigabytes, which no machine of ours has, would be another error."""
    for kind in ("model", "dense"):
        change(folder / kind / "config.json", **{**changes, "sharing": "middle_cycle"} if kind == "model" else changes)
    with pytest.raises(ValueError, match=message):
        MoR.from_pretrained(folder / "model")
    with pytest.raises(ValueError, match=f"{folder / 'dense'}"):
        MoR.from_dense(folder / "dense", MoRConfig.from_llama(folder / "dense"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' * 100_000, "more than 100 levels"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 100 levels"),
        (b'{"a": [' + b"0," * 10**6 + b"0]}", "more than 1000000 values"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        (b'{"a": "\xff"}', "invalid start byte"),
        (b" " * ((16 << 20) + 1), f"more than {16 << 20} bytes"),
        (b"[]", "list"),
        (b"", "Expecting value"),
    ],
)
def test_texts_of_json(folder, content, message):
    files = ["model/config.json", "dense/config.json", "tokens/meta.json", "checkpoints/step-00000005/checkpoint.json",
             "run.json", "theirs/run.json"]  # fmt: skip
    for name in files if len(content) < 10**6 else files[:1]:
        file = folder / name
        file.write_bytes(content)
        load = {"dense": MoRConfig.from_llama, "checkpoints": load_checkpoint, "theirs": load_theirs}
        load = load.get(name.split("/")[0], LOADERS[name])
        with pytest.raises(ValueError, match=rf"{file}: .*{message}"):
            load(folder if load is LOADERS[name] else file.parent)


def test_a_byte_order_mark_is_none_of_the_text(folder):
    file = folder / "model" / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    MoR.from_pretrained(folder / "model")


def test_files_that_are_none(folder):
    """A pipe would be waited at for ever."""
    for name, load in LOADERS.items():
        if name.endswith(("safetensors", "json", "npy")):
            file = folder / name
            content = file.read_bytes()
            file.unlink()
            os.mkfifo(file)
            with pytest.raises((ValueError, FileNotFoundError), match=f"{file}: "):
                load(folder)
            file.unlink()
            file.write_bytes(content)


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/passwd", "tokens-00001.npy", "tokens-00000.npy/../../a.txt"])
def test_names_of_files_stay_in_their_folder(folder, name):
    shutil.copy(folder / "tokens" / "tokens-00000.npy", folder / "secret.npy")
    shards = json.loads((folder / "tokens" / "meta.json").read_text())["shards"]
    change(folder / "tokens" / "meta.json", shards=[{**shards[0], "file": name}, *shards[1:]])
    with pytest.raises(ValueError, match=r"meta.json: damaged, .*shard 0 isn't .* of tokens-00000.npy"):
        Tokens(folder / "tokens")
    path = folder / "checkpoints" / "step-00000005"
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    change(path / "checkpoint.json", files={**files, name: files["config.json"]})
    with pytest.raises(ValueError, match=rf"checkpoint.json: damaged, .*unknown '{re.escape(name)}'"):
        load_checkpoint(path)


def test_an_index_of_shards_is_not_followed(folder):
    for weight_map in ({"model.norm.weight": "../model/model.safetensors"}, {"model.norm.weight": "/etc/passwd"}, [[]]):
        write(folder / "dense" / "model.safetensors.index.json", {"weight_map": weight_map})
        MoR.from_dense(folder / "dense", MoRConfig.from_llama(folder / "dense"))
    save_file({"norm.weight": torch.ones(32)}, folder / "dense" / "more.safetensors")
    with pytest.raises(ValueError, match=r"dense: expected a tensor by one name, got norm.weight and model.no"):
        MoR.from_dense(folder / "dense", MoRConfig.from_llama(folder / "dense"))
    save_file({"model.norm.weight": torch.ones(32)}, folder / "dense" / "more.safetensors")
    message = r"more.safetensors: model.norm.weight: expected each tensor in one file, got it also in .*dense/model"
    with pytest.raises(ValueError, match=message):
        MoR.from_dense(folder / "dense", MoRConfig.from_llama(folder / "dense"))


def test_links_are_replaced_not_written_through(folder):
    mine = folder / "mine"
    mine.write_text("mine")
    model = MoR.from_pretrained(folder / "model")
    for name in ("config.json", ".tmp-config.json", ".tmp-model.safetensors", "modeling_mor.py"):
        (folder / "model" / name).unlink(missing_ok=True)
        (folder / "model" / name).symlink_to(mine)
    model.save_pretrained(folder / "model")
    assert mine.read_text() == "mine" and not any(file.is_symlink() for file in (folder / "model").iterdir())
    MoR.from_pretrained(folder / "model")


def test_a_pickle_of_weights_is_not_opened_but_can_be_converted(folder, monkeypatch):
    file = folder / "dense" / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    torch.save(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, folder / "dense" / "pytorch_model.bin"
    )
    config = MoRConfig.from_llama(folder / "dense")
    with pytest.raises(FileNotFoundError, match=r"found \*.bin files only, pickles, which aren't .*: python -c"):
        MoR.from_dense(folder / "dense", config)
    monkeypatch.chdir(folder / "dense")
    monkeypatch.setattr("sys.argv", ["-c", "pytorch_model.bin"])
    exec(CONVERT.split('"')[1], {})
    assert torch.equal(MoR.from_dense(folder / "dense", config).norm.weight, weights["model.norm.weight"])


def test_weights_that_are_no_numbers_are_loaded(folder):
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["norm.weight"][:2] = torch.tensor([torch.nan, torch.inf])
    save_file(weights, file)
    assert torch.equal(MoR.from_pretrained(folder / "model").norm.weight.isfinite(), torch.arange(32) > 1)


def spoil(path, change_trainer=lambda trainer: None, **tensors):
    trainer = json.loads((path / "trainer.json").read_text())
    change_trainer(trainer)
    write(path / "trainer.json", trainer)
    found = {**load_file(path / "trainer.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path / "trainer.safetensors")
    sealed(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.0.exp_avg": None}, "trainer.safetensors: .*expected optimizer.0.exp_avg, of shape"),
        ({"optimizer.0.exp_avg": torch.ones(3)}, r"optimizer.0.exp_avg: expected a number, or shape \(512, 32\), got"),
        ({"optimizer.0.step": torch.ones(512, 32)}, "expected optimizer.0.step, a number"),
        ({"optimizer.0.exp_avg": torch.ones(512, 32, dtype=torch.complex64)}, "got torch.complex64"),
        ({"optimizer.99.exp_avg": torch.ones(3)}, "expected a state of one of 21 parameters, got 99.exp_avg"),
        ({"optimizer.-1.step": torch.ones(())}, "expected a state of one of 21 parameters, got -1.step"),
        (
            {"else": torch.ones(())},
            "trainer.safetensors: else: expected a name that begins with optimizer, rng, tensors",
        ),
        (
            {"rng.cpu": torch.ones(())},
            r"expected rng.torch, and rng.cuda.0 and so on, got \['cpu', ('cuda.0', )?'torch'\]",
        ),
        ({"rng.torch": torch.ones(8)}, "step-00000005: damaged, expected states of random number generators"),
        (
            lambda trainer: trainer["rng"]["numpy"].__setitem__(2, 10**6),
            "random number generators, got: numpy: 'MT19937'",
        ),
        (
            lambda trainer: trainer["rng"]["python"].__setitem__(0, 2),
            "random number generators, got: python: version 2",
        ),
        (
            lambda trainer: trainer["rng"]["python"][1].__setitem__(624, -1),
            "expected states of random number generators",
        ),
        (lambda trainer: trainer.update(step=-1), "trainer.json: damaged, expected what `save` writes"),
        (lambda trainer: trainer.update(more=1), "trainer.json: damaged, expected what `save` writes"),
        (
            lambda trainer: trainer["optimizer"].update(groups=[21, 0]),
            r"expected groups of \[21\] parameters, got \[21, 0\]",
        ),
        (
            lambda trainer: trainer["optimizer"].update(numbers={"0": {"step": 1}}),
            "0.step: expected a number of its own",
        ),
    ],
)
def test_states_of_training(folder, changes, message):
    path = folder / "checkpoints" / "step-00000005"
    spoil(path, **changes) if isinstance(changes, dict) else spoil(path, changes)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_a_round_trip_is_exact(tmp_path):
    """Of numbers and tensors of any kind, and of an optimizer that isn't Adam."""
    loaded = Loaded()
    optimizer = torch.optim.SGD(loaded.model.parameters(), lr=0.1, momentum=0.9)
    ids = torch.arange(32).view(2, 16)
    loaded.model(ids, targets=ids).loss.backward()
    optimizer.step()
    first = next(iter(optimizer.state.values()))
    first |= {"count": 3, "rate": 0.1, "none": None, "norm": torch.tensor(0.1, dtype=torch.float64)}
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {str(dtype): torch.arange(6).view(2, 3).T.to(dtype) for dtype in dtypes}
    tensors |= {"number": torch.tensor(-0.0), "none": torch.empty(0, 5), "nan": torch.tensor([torch.nan, -torch.inf])}
    path = checkpoint.save(tmp_path, 1, loaded.model, optimizer, {"a": [1, None]}, tensors)
    other = torch.optim.SGD(Loaded().model.parameters(), lr=0.1, momentum=0.9)
    _, state, found = checkpoint.load(path, loaded.model, other)
    assert state == {"a": [1, None]} and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name
    ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert ours.keys() == theirs.keys() and theirs[0].items() >= {"count": 3, "rate": 0.1, "none": None}.items()
    assert all(torch.equal(ours[i]["momentum_buffer"], theirs[i]["momentum_buffer"]) for i in ours)


def test_a_run_takes_nothing_over_from_what_is_not_its_own(folder, tmp_path):
    config = TrainConfig(str(folder / "tokens"), str(tmp_path / "run"), steps=2, batch_size=2, sequence_length=16,
                         eval_every=0, progress=False, device="cpu")  # fmt: skip
    trainer = Trainer(Loaded().model, config)
    trainer.run()
    path = checkpoint.latest(trainer.checkpoints)
    state = json.loads((path / "trainer.json").read_text())["state"]
    for fields, tensors in ({"names": 3}, {}), ({}, {"tensors.depths": torch.ones(9)}), ({"data": {}}, {}):
        spoil(path, lambda trainer, fields=fields: trainer.update(state={**state, **fields}), **tensors)
        loaded = Loaded()
        with pytest.raises(
            ValueError, match=r"step-00000002: (expected the state and tensors of a run|trained on other)"
        ):
            Trainer(loaded.model, config)
        loaded.assert_unchanged()


def test_metrics_are_drawn_whatever_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0, "depth_mix": [0.5, 0.5], "learning_rate": 0.1},
             {"step": 3, "lm": 2.0}, {"step": 3, "loss": 1.0, "depth_mix": "x", "learning_rate": {}}, {"step": "x"},
             {"step": 4, "lm": [[]]},
             {"step": 5, "loss": 1.0, "depth_mix": [0.5], "learning_rate": 0.1}, {"step": 6, "lm": "x"},
             {"step": 7, "loss": "x", "depth_mix": 3, "learning_rate": [1]}, {"step": 10**200, "lm": 1.0},
             {"step": 9, "lm": math.nan, "validation_loss": math.inf, "unigram_entropy": math.inf}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), "[" * 100_000]))
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_indices_of_tokens(folder):
    meta = folder / "tokens" / "meta.json"
    before = meta.read_text()
    for fields, message in (
        ({"format": 2, "new": 1}, "written by a newer version of mor-kernels, expected format 1, got 2"),
        ({"new": 1}, "unknown 'new'"),
        ({"vocab_size": -280}, "vocab_size, separator or dtype out"),
        ({"separator": 280}, "separator or dtype out"),
        ({"dtype": "O"}, "dtype out of range"),
    ):
        change(meta, **fields)
        with pytest.raises(ValueError, match=f"{meta}: .*{message}"):
            Tokens(folder / "tokens")
        meta.write_text(before)


def test_shards_of_tokens(folder):
    shard = folder / "tokens" / "tokens-00000.npy"
    tokens = np.load(shard)

    def fails(message):
        sealed(folder / "tokens")
        with pytest.raises(ValueError, match=f"{shard}: {message}"):
            load_tokens(folder / "tokens")

    tokens[7] = 280
    np.save(shard, tokens)
    fails("expected tokens below 280, found 280")
    np.save(shard, np.array([random.Random(0)] * 200))
    fails(r"damaged, expected a \.npy file: ")
    with open(shard, "wb") as file:
        np.savez(file, tokens)
    fails(r"damaged, expected a \.npy file: ")


def test_tokenizers_and_the_vocabulary_of_a_model(folder, capsys):
    from tokenizers import Tokenizer, models

    for token, number, message in (
        ("</s>", 512, "expected a vocabulary of at least 513, which its tokenizer has, got 512"),
        ("<other>", 5, "expected a token <|endoftext|> or one of"),
    ):
        words = Tokenizer(models.WordLevel({token: number, "The": 1, "[UNK]": 2}, unk_token="[UNK]"))
        words.save(str(folder / "model" / "tokenizer.json"))
        assert main(["generate", str(folder / "model"), "--prompt", "The", "--max-tokens", "1"]) == 1
        assert message in capsys.readouterr().err
    Tokenizer(models.WordLevel({"The": 1, "</s>": 2})).save(str(folder / "words.json"))
    with pytest.raises(ValueError, match="tokenizer: expected one that can encode the source, got: .*UNK"):
        prepare(folder / "a.txt", folder / "out", tokenizer=folder / "words.json")
    with pytest.raises(ValueError, match="tokenizer: expected one that can encode the text, got: .*UNK"):
        encode_pair(load_tokenizer(folder / "words.json"), "The", " cat")


@pytest.mark.parametrize(
    ("model", "template", "message"),
    [
        ({"merges": [["a", "b"]], "continuing_subword_prefix": "##"}, [], ""),
        ({"merges": [["a", "é"]], "continuing_subword_prefix": "#"}, [], "invalid start byte"),
        ({"merges": ["a é"], "continuing_subword_prefix": "#"}, [], "invalid start byte"),
        ({}, [{"SpecialToken": {"id": "b", "type_id": 0}}], ""),
    ],
)
def test_what_the_package_of_tokenizers_panics_at(tmp_path, model, template, message):
    """The second and third would end the process. What it says of the others is its own."""
    file = tmp_path / "tokenizer.json"
    after = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": {}} if template else None
    vocabulary = {"type": "BPE", "vocab": {"a": 0, "b": 1, "é": 2}, "merges": [], **model}
    write(file, {"added_tokens": [], "model": vocabulary, "post_processor": after})
    with pytest.raises(ValueError, match=f"{file}: not a tokenizer.json that .*: .*{message}"):
        load_tokenizer(file)


def test_yaml_of_the_authors(folder):
    pytest.importorskip("yaml")
    file = folder / "theirs" / "run.yaml"
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    for text, message in (
        (f"recursive: !!python/object/apply:os.mkdir ['{folder / 'run'}']", "could not determine"),
        (bomb, "more than 1000000 values"),
        ("a: &a [*a]", "more than 100 levels"),
        ("- " * 2000, "recursion"),
        ("a: !!timestamp x", "NoneType"),
        ("# " * 200_000, "characters"),
        ("model_config: {hidden_size: 8, num_attention_heads: 0}", "model_config.num_attention_heads"),
        ("model_config: 3", "model_config: expected a mapping, got int"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"{file}: .*{message}"):
            authors_config(folder / "theirs")
    assert not (folder / "run").exists()


def test_archives_of_tasks(folder):
    file = folder / "task.jsonl.gz"
    whole = file.read_bytes()
    for content, message in (
        (whole[:-12], "in gzip"),
        (b"no gzip", "in gzip"),
        (whole[:20] + b"\0" + whole[20:], "in gzip"),
        (gzip.compress(b"\xff"), "UTF-8"),
        (gzip.compress(b" " * (1 << 24) + b" "), "at most 16777216 char"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file}.*{message}"):
            read_task(file)
