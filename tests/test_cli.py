"""The command, run as a user runs it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from mor_kernels.__main__ import main
from mor_kernels.model import MoR

MODEL = ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=5", "num_attention_heads=2", "head_dim=8",
         "num_key_value_heads=1", "max_position_embeddings=64", "num_recursions=3", "vocab_size=300"]  # fmt: skip
TRAIN = ["steps=3", "batch_size=2", "sequence_length=16", "log_every=1", "eval_every=3", "eval_batches=1",
         "checkpoint_every=2", "validation=0.1", "progress=false"]  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog, and the dog looks up – naïvely – at the fox. " * 40


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "fox.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    """A finished run."""
    out = tmp_path_factory.mktemp("run") / "run"
    model = [*MODEL, "router=token_choice"]
    assert main(["train", str(out), "--source", str(text), "--model", *model, "--train", *TRAIN]) == 0
    return out


def test_train_leaves_everything_in_its_place(run):
    assert {p.name for p in run.iterdir()} == {"data", "checkpoints", "model", "metrics.jsonl", "curves.png"}
    model = MoR.from_pretrained(run / "model")
    assert model.config.router == "token_choice" and model.config.vocab_size == 300
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lm" in line] == [1, 2, 3]


def test_the_same_command_goes_on(run, text, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    arguments = ["train", str(out), "--source", str(text), "--model", *MODEL, "router=token_choice", "--train", *TRAIN]
    assert main([*arguments, "steps=5"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lm" in line] == [1, 2, 3, 4, 5]
    printed = capsys.readouterr().out
    assert re.search(r"training loss \d\.\d+ .* held-out loss \d\.\d+ .* unigram entropy \d\.\d+", printed)

    assert main([*arguments, "--fresh"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lm" in line] == [1, 2, 3]


def test_generate(run, capsys):
    arguments = ["generate", str(run), "--prompt", "The quick", "--max-tokens", "12", "--seed", "3", "--device", "cpu"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("The quick")
    assert main([*arguments, "--depth", "--color", "always"]) == 0
    colored = capsys.readouterr().out
    assert "\033[38;5;" in colored and "3 recursions" in colored
    without = re.sub(r"\033\[[\d;]*m", "", colored)
    assert without.startswith(plain.rstrip("\n"))  # colours change nothing else, and the seed repeats the text
    assert main(["generate", str(run / "model"), "--max-tokens", "2"]) == 0
    assert (
        main(["generate", str(run), "--prompt", "a", "--prompt", "b", "--max-tokens", "2", "--temperature", "0"]) == 0
    )


def test_generate_from_a_checkpoint_of_an_unfinished_run(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    assert main(["generate", str(tmp_path / "run"), "--max-tokens", "2"]) == 0


def test_depth(run, tmp_path, capsys):
    page = tmp_path / "depth.html"
    text = "The fox looks up – naïvely <b>&."
    assert main(["depth", str(run), text, "--html", str(page), "--color", "never"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(text + "\n")
    shown = page.read_text(encoding="utf-8")
    pieces = re.findall(r'<span class="d(\d)" title="\d recursions?">(.*?)</span>', shown, re.S)
    import html

    assert html.unescape("".join(piece for _, piece in pieces)) == text
    ids = __import__("tokenizers").Tokenizer.from_file(str(run / "model" / "tokenizer.json")).encode(text).ids
    depths = MoR.from_pretrained(run / "model").eval()(torch.tensor([ids])).depths[0].tolist()
    assert [int(depth) for depth, _ in pieces] == depths
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    assert main(["depth", str(run), "--file", str(file), "--color", "never"]) == 0
    assert capsys.readouterr().out == printed.replace(f"page in {page}\n", "")


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"eager backend\s+works", printed) and re.search(r"cuda backend\s+\S", printed)


def broken(run, tmp_path, file, change):
    out = tmp_path / "broken"
    shutil.copytree(run, out)
    path = next(out.glob(file))
    change(path)
    return out


def test_clear_errors(run, text, tmp_path, capsys):
    train = ["train", str(tmp_path / "new"), "--source", str(text), "--train", *TRAIN]
    cut = broken(run, tmp_path, "data/tokens-*.npy", lambda p: p.write_bytes(p.read_bytes()[:-8]))
    cases = [
        (["generate", str(tmp_path / "nowhere")], r"nowhere: expected the folder of a run or of a model, found none"),
        (["generate", str(tmp_path)], r"expected config.json, model/config.json or a checkpoint, found none"),
        (["generate", str(run), "--temperature", "-1"], r"temperature: expected a number of at least 0, got -1.0"),
        (["generate", str(run), "--prompt", "x " * 90], r"prompt: expected at most 64 tokens"),
        (["depth", str(run), ""], r"text: expected at least one token, got none"),
        ([*train, "--model", "depth=3"], r"--model: expected FIELD=VALUE with a field of .*, got 'depth=3'"),
        ([*train, "--model", *MODEL, "num_recursions=4"], r"num_hidden_layers: expected a depth .* nearest 6, got 5"),
        ([*train, "--model", *MODEL, "router=expert_choice", "capacities=[1,0.5,0.7]"], r"capacities\[2\]: exp"),
        ([*train, "--model", *MODEL, "sharing=all"], r"sharing: expected one of cycle"),
        ([*train, "steps=0"], r"steps: expected at least 1, got 0"),
        (["train", str(tmp_path / "new"), "--source", str(tmp_path / "no.txt")], r"no.txt: not found"),
        (["train", str(cut), "--model", *MODEL, "--train", *TRAIN], r"tokens-00000.npy: truncated, expected \d+ bytes"),
        (["train", str(run), "--source", "python-docs", "--model", *MODEL], r"--source: expected \['.*fox.txt'\]"),
        (["train", str(run), "--model", *MODEL, "vocab_size=299", "--train", *TRAIN], r"vocab_size: expected at least"),
        (["train", str(run), "--model", *MODEL, "--train", *TRAIN, "steps=9"], r"router"),
    ]  # fmt: skip
    for arguments, message in cases:
        assert main(arguments) == 1, arguments
        printed = capsys.readouterr().err
        assert re.search(rf"mor-kernels {arguments[0]}: .*{message}", printed), (arguments, printed)
    assert not (tmp_path / "new" / "checkpoints").exists()
