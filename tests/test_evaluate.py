"""Losses and accuracies, against the reference, and against what can be worked out by hand."""

from __future__ import annotations

import gzip
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mor_kernels import evaluate
from mor_kernels.__main__ import main
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train import train_tokenizer
from reference.model import ReferenceMoR, random_state

TEXT = "The quick brown fox jumps over the lazy dog, and the dog looks up – naïvely – at the fox. " * 20
SIZES = {"vocab_size": 320, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}  # fmt: skip
DEEP = {"num_recursions": 3, "num_hidden_layers": 8}
ROUTERS = {"dense": {"num_hidden_layers": 3}, "expert": {**DEEP, "router": "expert_choice"},
           "shared": {**DEEP, "router": "expert_choice", "kv": "shared"},
           "token": {**DEEP, "router": "token_choice", "kv": "hybrid"}}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "fox.txt"
    file.write_text(TEXT, encoding="utf-8")
    return train_tokenizer(file, 320)


def make(router, seed=0):
    """A model in fp64 whose weights are large enough that tokens differ in depth, and its reference."""
    fields = {**SIZES, **ROUTERS[router]}
    state = {name: t.double() for name, t in random_state(fields, seed).items()}
    model = MoR(MoRConfig(**fields)).double().eval()
    model.load_checked(state, "random")
    return model, ReferenceMoR(fields, state)


def ragged(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    return [(row[: 1 + i % 3], row[1 + i % 3 :]) for i, row in enumerate(rows)]


@pytest.mark.parametrize("mode", ["threshold", "topk"])
@pytest.mark.parametrize("router", ROUTERS)
def test_scores_are_the_references_alone_and_in_a_padded_batch(router, mode, monkeypatch):
    monkeypatch.setattr(evaluate, "LOGITS_AT_ONCE", 5 * SIZES["vocab_size"])  # several chunks of logits
    model, oracle = make(router)
    requests = ragged([9, 23, 4, 17, 9, 12])
    alone = evaluate.score(model, requests, mode=mode, batch_tokens=1)
    together = evaluate.score(model, requests, mode=mode, batch_tokens=1000)
    for i, (context, continuation) in enumerate(requests):
        read = torch.tensor([[*context, *continuation][:-1]])
        found = oracle.forward(read, mode=mode)
        logits = found.logits[0, len(context) - 1 :].log_softmax(-1)
        want = logits.gather(1, torch.tensor(continuation)[:, None]).sum().item()
        for got in (alone[i], together[i]):  # fp64 sums in different orders
            assert got.log_likelihood == pytest.approx(want, rel=1e-9)
            assert got.depth == pytest.approx(found.depths.double().mean().item())
    depths = [score.depth for score in alone]
    assert len(set(depths)) > 1 or router == "dense"


def test_a_batch_never_holds_more_tokens_than_asked_for():
    lengths = [3, 30, 7, 7, 12, 1, 30]
    for padded in (True, False):
        batches = evaluate._batches(lengths, 40, padded)
        assert sorted(i for batch in batches for i in batch) == list(range(7)) and batches[0][0] == 1
        assert all(len(batch) == 1 or len(batch) * lengths[batch[0]] <= 40 for batch in batches)
        assert padded or all(len({lengths[i] for i in batch}) == 1 for batch in batches)
    assert len(evaluate._batches(lengths, 1000, True)) == 1


def test_a_long_context_loses_its_beginning():
    model, _ = make("expert")
    ((_, row),) = ragged([60])
    whole, cut = evaluate.score(model, [(row[:50], row[50:55]), (row[22:50], row[50:55])])
    assert whole == cut  # 33 tokens, of which the last isn't read
    assert whole != evaluate.score(model, [(row[23:50], row[50:55])])[0]
    for context, continuation in ((row, row[:33]), ([], row[:2]), (row, [])):
        with pytest.raises(ValueError, match=r"requests\[0\]: expected .* continuation of 1 to 32.*got \d+ and \d+"):
            evaluate.score(model, [(context, continuation)])


def test_greedy_means_all_of_the_continuation():
    model, _ = make("token")
    tokens = [5, 9, 2]
    for _ in range(4):
        tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    other = (tokens[4] + 1) % 320
    requests = [(tokens[:3], tokens[3:]), (tokens[:3], [tokens[3], other, *tokens[5:]]), (tokens[:3], tokens[3:4])]
    assert [found.greedy for found in evaluate.score(model, requests)] == [True, False, True]


@pytest.mark.parametrize(("window", "stride"), [(None, None), (8, None), (8, 3), (8, 1)])
def test_text_loss_predicts_each_token_once(tokenizer, window, stride):
    model, _ = make("expert")
    texts = ["The quick brown fox – naïvely.", "The dog.", TEXT[:90]]
    got = evaluate.text_loss(model, tokenizer, iter(texts), window=window, stride=stride)
    window, total, count = window or 32, 0.0, 0
    for text in texts:
        row = [0, *tokenizer.encode(text).ids]
        for i in range(1, len(row)):
            # the window that predicts place i begins `window` before its end; by strides after the first window
            past = max(0, math.ceil((i - window) / (stride or window)))
            end = min(window + past * (stride or window), len(row) - 1)
            read = torch.tensor([row[max(0, end - window) : end]])
            logits = model(read).logits[0, i - 1 - max(0, end - window)]
            total, count = total - logits.log_softmax(-1)[row[i]].item(), count + 1
    size = sum(len(text.encode()) for text in texts)
    assert got["tokens"] == count and got["documents"] == 3 and got["bytes"] == size
    assert got["nats_per_token"] == pytest.approx(total / count, rel=1e-9)
    assert got["perplexity"] == pytest.approx(math.exp(total / count))
    assert got["bits_per_byte"] == pytest.approx(total / size / math.log(2))
    assert 1 < got["depth"] < 3 and got["window"] == window and got["stride"] == (stride or window)
    assert evaluate.text_loss(model, tokenizer, texts, limit=1)["documents"] == 1


def test_text_loss_errors(tokenizer):
    model, _ = make("dense")
    for options, message in (({"window": 33}, "window: expected 1 to 32, got 33"),
                             ({"window": 8, "stride": 9}, "stride: expected 1 to 8, got 9")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            evaluate.text_loss(model, tokenizer, ["The"], **options)
    with pytest.raises(ValueError, match="documents: expected text"):
        evaluate.text_loss(model, tokenizer, [])


def test_white_space_goes_to_the_continuation(tokenizer):
    encode = tokenizer.encode
    assert evaluate.encode_pair(tokenizer, "The quick ", "fox") == evaluate.encode_pair(tokenizer, "The quick", " fox")
    context, continuation = evaluate.encode_pair(tokenizer, "The quick", " fox jumps")
    assert context == encode("The quick").ids and context + continuation == encode("The quick fox jumps").ids
    assert evaluate.encode_pair(tokenizer, "", "The dog") == ([0], encode("The dog").ids)
    assert evaluate.encode_pair(tokenizer, " ", "dog") == ([0], encode(" dog").ids)


class Unigrams:
    """Stands for a model: every token has a likelihood of its own, whatever the context."""

    def __init__(self, likelihoods):
        self.logits = torch.log(torch.tensor(likelihoods, dtype=torch.float64))
        self.embed_tokens = SimpleNamespace(weight=self.logits)
        self.config = SimpleNamespace(max_position_embeddings=16)

    def __call__(self, ids, attention_mask=None, mode=None):
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, -1), depths=torch.ones_like(ids))


def test_accuracies(tokenizer):
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    likelihoods = [0.1 / 318] * 320
    likelihoods[a], likelihoods[b] = 0.2, 0.7
    # log 0.2 = -1.61, log 0.7 = -0.36: " " costs log(0.1 / 318) = -8.06 and no byte
    examples = [
        {"choices": [["b:", "a"], ["b:", "bb"], ["b:", "ba"]], "gold": 1},  # likeliest, also for each byte
        {"choices": [["b:", "a"], ["b:", "aba"]], "gold": 1},  # -1.61 against -3.58; for each byte -1.61 and -1.19
        {"choices": [["a:", "b"], ["b:", "b"]], "gold": 1},  # a tie, which the first wins
        {"choices": [["b:", " ab"], ["b:", "aaa"]], "gold": 0},  # -10.0 and -4.8; for each byte -5.0 and -1.6
        {"choices": [["b:", " z"], ["b:", "x"]], "gold": 1},  # -16.1 and -8.06, a byte each
    ]
    got = evaluate.task_accuracy(Unigrams(likelihoods), tokenizer, examples)
    assert got == {"acc": 0.4, "acc_norm": 0.6, "examples": 5, "acc_stderr": pytest.approx(math.sqrt(0.24 / 4)),
                   "acc_norm_stderr": pytest.approx(math.sqrt(0.24 / 4))}  # fmt: skip
    alone = [{"choices": [["a:", "bb"]], "gold": ["bb"]}, {"choices": [["a:", "ba"]]}]
    got = evaluate.task_accuracy(Unigrams(likelihoods), tokenizer, alone)
    assert got["acc"] == 0.5 and "acc_norm" not in got
    assert got["perplexity"] == pytest.approx(1 / math.sqrt(0.7**3 * 0.2))


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"gold": 0}', '{"choices": [], "gold": 0}', '{"choices": [["a", "b"], ["a", "c"]]}',
     '{"choices": [["a", "b"], ["a", "c"]], "gold": 2}', '{"choices": [["a", "b"], ["a", "c"]], "gold": true}',
     '{"choices": [["a", " "]], "gold": 0}', '{"choices": [["a", 1]], "gold": 0}', '{"choices": [["a"]], "gold": 0}'],
)  # fmt: skip
def test_a_wrong_line_of_a_task_is_named(tmp_path, line):
    file = tmp_path / "task.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.write('{"choices": [["a", "b"]]}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"task.jsonl.gz:2: expected .*choices.*, got {re.escape(line[:10])}"):
        evaluate.read_task(file)
    assert len(evaluate.read_task(file, 1)) == 1


def test_the_command(tokenizer, tmp_path, capsys):
    folder, text, task = tmp_path / "model", tmp_path / "fox.txt", tmp_path / "fox.jsonl"
    torch.manual_seed(0)
    model = MoR(MoRConfig(**SIZES, **ROUTERS["expert"], initializer_range=0.3)).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    text.write_text("The quick brown fox.<|endoftext|>The lazy dog looks up.", encoding="utf-8")
    line = json.dumps({"choices": [["The", " dog"], ["The", " fox"]], "gold": 1}) + "\n\n"
    task.write_text(line + line.replace("1", "0"))
    arguments = ["eval", str(folder), "--device", "cpu"]
    more = ["--text", str(text), "--task", str(task), "--limit", "1", "--window", "9", "--stride", "4"]
    for mode in ("threshold", "topk"):
        assert main([*arguments, *more, "--mode", mode, "--json", str(tmp_path / "eval.json")]) == 0
        printed = capsys.readouterr().out
        got = json.loads((tmp_path / "eval.json").read_text())
        options = {"window": 9, "stride": 4, "mode": mode}
        want = evaluate.text_loss(model, tokenizer, ["The quick brown fox."], **options)
        assert got["text"] == {str(text): want} and got["mode"] == mode
        examples = evaluate.read_task(task)
        assert len(examples) == 2
        assert got["tasks"] == {"fox": evaluate.task_accuracy(model, tokenizer, examples[:1], mode=mode)}
        assert got["parameters"] == sum(p.numel() for p in model.parameters())
        assert re.search(r"fox.txt: \d\.\d{4} nats a token, .* a window moving by 4 of 9\)\n", printed)
        assert re.search(r"fox: acc [01]\.0000 ± 0.0000, acc_norm [01]\.0000 ± 0.0000 \(1 examples\)", printed)
    mistakes = (([], "--text, --task: expected at least one"), (["--task", str(text)], "fox.txt:1: expected"),
                (["--task", str(task), "--limit", "0"], "--limit: expected at least 1, got 0"),
                (["--task", str(task)] * 2, "fox twice"))  # fmt: skip
    for wrong, message in mistakes:
        assert main([*arguments, *wrong]) == 1 and message in capsys.readouterr().err


def test_the_loss_is_the_models(tokenizer):
    """The same number as the training loop's, for the same tokens."""
    model, _ = make("token")
    ids = tokenizer.encode(TEXT[:60]).ids
    read = torch.tensor([[0, *ids[:-1]]])
    want = F.cross_entropy(model(read).logits[0], torch.tensor(ids)).item()
    assert evaluate.text_loss(model, tokenizer, [TEXT[:60]])["nats_per_token"] == pytest.approx(want, rel=1e-9)
    assert model(read, targets=torch.tensor([ids])).losses["lm"].item() == pytest.approx(want, rel=1e-9)
