"""The command, run as a user runs it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mor_kernels.__main__ import main
from mor_kernels.decode import Engine
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train import Tokens, load_tokenizer
from mor_kernels.train.command import PRESETS

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
    assert {p.name for p in run.iterdir()} == {"data", "checkpoints", "model", "metrics.jsonl", "curves.png",
                                               "run.json"}  # fmt: skip
    model = MoR.from_pretrained(run / "model")
    assert model.config.router == "token_choice" and model.config.vocab_size == 300
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lm" in line] == [1, 2, 3]


def test_help_has_every_setting_with_its_default_and_what_else_it_can_be(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    assert '  router="none"  (one of none, expert_choice, token_choice)\n' in printed
    assert "  clip=1.0\n" in printed and "vocab_size=49152" in printed
    assert f"  --preset {{{','.join(PRESETS)}}}\n" in printed
    for command in ("eval", "generate", "depth", "scores", "serve"):  # a % in a help text would be a fault
        with pytest.raises(SystemExit) as error:
            main([command, "--help"])
        assert error.value.code == 0


def test_the_same_command_goes_on(run, text, tmp_path, capsys):
    """In a process, on a GPU, whose graphs had no workspace for cuBLAS and now have one: the fixture comes before
    deterministic mode, see mor_kernels.graphs."""
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


def test_generate_from_a_checkpoint_of_an_unfinished_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    assert main(["generate", str(tmp_path / "run"), "--max-tokens", "2"]) == 0


def test_depth(run, tmp_path, capsys):
    page = tmp_path / "depth.html"
    text = "The fox looks up – naïvely <b>&."
    assert main(["depth", str(run), text, "--html", str(page), "--color", "never"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(text + "\n")
    shown = page.read_text(encoding="utf-8")
    pieces = re.findall(r'<span class="d(\d)" title="[^"]*">(.*?)</span>', shown, re.S)
    assert html.unescape("".join(piece for _, piece in pieces)) == text and "<b>" not in shown
    ids = load_tokenizer(run / "model" / "tokenizer.json").encode(text).ids
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
        (["generate", str(tmp_path)], r"expected config.json, model/config.json or a whole checkpoint"),
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


def test_fresh_removes_only_what_a_run_wrote(run, text, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    mine = [out / "data" / "precious.csv", out / "model" / "net.py", out / "notes.txt"]
    for file in mine:
        file.write_text("mine")
    before = sorted(out.rglob("*"))
    for wrong in (["--source", "typo.txt"], ["--source", str(text), "--tokenizer", "typo.json"], ["--init", "typo"]):
        assert main(["train", str(out), "--fresh", *wrong, "--model", *MODEL, "--train", *TRAIN]) == 1
        assert "typo" in capsys.readouterr().err and sorted(out.rglob("*")) == before
    assert main(["train", str(out), "--fresh", "--source", str(text), "--model", *MODEL, "--train", *TRAIN]) == 0
    assert all(file.read_text() == "mine" for file in mine)
    assert MoR.from_pretrained(out / "model").config.router == "none"


def test_every_option_of_train_reaches_its_place(run, text, tmp_path):
    dense = MoR(
        MoRConfig(**{name: int(value) for name, value in (f.split("=") for f in MODEL)} | {"num_recursions": 1})
    )
    dense.save_pretrained(tmp_path / "dense")
    tokenizer = run / "model" / "tokenizer.json"
    arguments = ["--source", str(text), "--tokenizer", str(tokenizer), "--max-tokens", "900", "--init",
                 f"{tmp_path / 'dense'}:upper", "--model", *MODEL, "--model", "router=token_choice", "--train", *TRAIN,
                 "--train", "learning_rate=1e-30", "weight_decay=.0"]  # fmt: skip
    for out in ("a", "b"):
        assert main(["train", str(tmp_path / out), *arguments]) == 0
    tokens, model = Tokens(tmp_path / "a" / "data"), MoR.from_pretrained(tmp_path / "a" / "model")
    assert len(tokens) == 900 and tokens.tokenizer_file.read_bytes() == tokenizer.read_bytes()
    assert torch.equal(model.layers[1].mlp.gate_up_proj.weight, dense.layers[3].mlp.gate_up_proj.weight)
    again = MoR.from_pretrained(tmp_path / "b" / "model").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())  # seeded


def test_every_option_of_generate_reaches_its_place(run, monkeypatch, capsys):
    seen = []
    stream = Engine.stream

    def spy(engine, prompt, params):
        seen.append((engine, prompt, params))
        return stream(engine, prompt, params)

    monkeypatch.setattr(Engine, "stream", spy)
    options = {"max_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "seed": 9}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["generate", str(run), "--prompt", "The", *flags, "--stop", "dog", "--stop", "fox"]) == 0
    ((engine, prompt, params),) = seen
    assert prompt == "The" and {name: getattr(params, name) for name in options} == options
    assert params.stop == ("dog", "fox") and engine.eos_token_id == 0
    # a refused prompt isn't printed, and a checkpoint's own folder does as well
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "x " * 90]) == 1 and capsys.readouterr().out == ""
    (last,) = (run / "checkpoints").glob("step-*3")
    assert main(["generate", str(last), "--max-tokens", "2"]) == 0


def test_two_processes_prepare_once(run, text, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "-m", "mor_kernels", "train", str(tmp_path / "run"), "--source", str(text), "--fresh",
               "--model", *MODEL, "--train", *TRAIN, "device=cpu"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("preparing") == 1 and done.stdout.count("unigram entropy") == 1


def config_file(folder, **changes):
    """The same run as the fixture's, as a file beside its text."""
    split = dict(field.split("=") for field in MODEL)
    found = {"source": ["fox.txt"], "model": {**{name: int(value) for name, value in split.items()},
             "router": "token_choice"}, "train": {name: json.loads(value) for name, value in
             (field.split("=") for field in TRAIN)}, **changes}  # fmt: skip
    (folder / "fox.txt").write_text(TEXT, encoding="utf-8")
    (folder / "run-of-mine.json").write_text(json.dumps(found))
    return folder / "run-of-mine.json"


def weights(out):
    return MoR.from_pretrained(out / "model").state_dict()


def test_a_config_file_does_what_options_do(run, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    file = config_file(tmp_path / "configs", preset=None, max_tokens=None)
    monkeypatch.chdir(tmp_path / "elsewhere")  # its paths start at its own folder
    assert main(["train", "out", "--config", str(file)]) == 0
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(Path("out")).items())
    # options of the command line come first, field by field
    assert main(["train", "other", "--config", str(file), "--train", "steps=2", "--model", "router=none"]) == 0
    record = json.loads(Path("other/run.json").read_text())
    assert record["train"]["steps"] == 2 and record["train"]["batch_size"] == 2
    assert record["model"]["router"] == "none" and record["model"]["num_recursions"] == 3


def test_a_run_can_be_repeated_from_its_record(run, text, tmp_path, monkeypatch, capsys):
    record = json.loads((run / "run.json").read_text())
    assert record["source"] == [str(text)] and record["processes"] == 1 and record["tokenizer"] is None
    assert record["model"] == MoR.from_pretrained(run / "model").config.to_dict()
    assert {field.split("=")[0] for field in TRAIN} <= record["train"].keys() and "out" not in record["train"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "again", "--config", str(run / "run.json")]) == 0
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(Path("again")).items())
    again = json.loads(Path("again/run.json").read_text())
    assert again == record
    # in its own folder it goes on, and one that doesn't fit leaves the record as it was
    capsys.readouterr()
    assert main(["train", "again", "--config", "again/run.json", "--model", "hidden_size=20"]) == 1
    assert json.loads(Path("again/run.json").read_text()) == record
    assert main(["train", "again", "--config", "again/run.json", "--train", "steps=4"]) == 0
    assert json.loads(Path("again/run.json").read_text())["train"]["steps"] == 4
    assert main(["train", "again", "--config", "again/run.json", "--fresh", "--train", "steps=3"]) == 0
    assert json.loads(Path("again/run.json").read_text()) == record
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(Path("again")).items())


def test_a_dense_checkpoint_in_a_config_file(run, tmp_path, monkeypatch, capsys):
    sizes = {name: int(value) for name, value in (f.split("=") for f in MODEL)}
    dense = MoR(MoRConfig(**{**sizes, "num_recursions": 1}))
    dense.save_pretrained(tmp_path / "dense")
    shutil.copy(run / "data" / "tokenizer.json", tmp_path / "dense")
    file = config_file(tmp_path, init=":upper", model={"num_recursions": 3}, max_tokens=900)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "out", "--config", str(file)]) == 1
    assert "--init: expected FOLDER:upper, got no folder" in capsys.readouterr().err
    still = ["--train", "learning_rate=1e-30", "weight_decay=0.0"]
    for out, init in (("a", "dense"), ("b", "dense:lower")):
        assert main(["train", out, "--config", str(file), "--init", init, *still]) == 0
    assert len(Tokens(Path("a/data"))) == 900
    ups = [dense.layers[i].mlp.gate_up_proj.weight for i in (1, 3)]
    assert torch.equal(weights(Path("a"))["layers.1.mlp.gate_up_proj.weight"], ups[1])
    assert torch.equal(weights(Path("b"))["layers.1.mlp.gate_up_proj.weight"], ups[0])
    assert json.loads(Path("b/run.json").read_text())["init"] == f"{tmp_path / 'dense'}:lower"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {}}, r"run-of-mine.json: expected keys among .*model.*, got 'modle'"),
        ({"model": {"width": 3}}, r"run-of-mine.json: model: expected keys among .*hidden_size.*, got 'width'"),
        ({"train": {"out": "x"}}, r"run-of-mine.json: train: expected keys among .*steps.*, got 'out'"),
        ({"train": 3}, r"run-of-mine.json: train: expected dict, got 3"),
        ({"source": [1]}, r"run-of-mine.json: source: expected list of str, got \[1\]"),
        ({"preset": "7B"}, r"run-of-mine.json: preset: expected one of demo, 135M.*, got '7B'"),
        ({"max_tokens": True}, r"run-of-mine.json: max_tokens: expected int, got True"),
        ({"processes": 2}, r"processes: expected torchrun with 2, as .*run-of-mine.json says, got 1"),
        ({"source": "no.txt"}, r"no.txt: not found"),
        ({"train": {"steps": 0}}, r"steps: expected at least 1, got 0"),
    ],
)
def test_mistakes_in_a_config_file(tmp_path, capsys, change, message):
    assert main(["train", str(tmp_path / "out"), "--config", str(config_file(tmp_path, **change))]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out" / "data" / "meta.json").exists()


def test_a_config_file_that_is_no_json(tmp_path, capsys):
    for content, message in (("{", "bad.json: expected a JSON object, got: Expecting"),
                             ("[]", "bad.json: expected a JSON object, got: list")):  # fmt: skip
        (tmp_path / "bad.json").write_text(content)
        assert main(["train", str(tmp_path / "out"), "--config", str(tmp_path / "bad.json")]) == 1
        assert message in capsys.readouterr().err
    assert main(["train", str(tmp_path / "out"), "--config", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_fresh_leaves_tokens_of_another_run(run, text, tmp_path):
    shutil.copytree(run, tmp_path / "first")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "data").symlink_to(tmp_path / "first" / "data")
    arguments = ["--source", str(text), "--model", *MODEL, "router=token_choice", "--train", *TRAIN]
    assert main(["train", str(tmp_path / "second"), *arguments]) == 0
    assert (tmp_path / "second" / "data").is_symlink()
    assert main(["train", str(tmp_path / "second"), *arguments, "--fresh"]) == 0
    assert not (tmp_path / "second" / "data").is_symlink()
    Tokens(tmp_path / "first" / "data").verify()
