"""The runs of docs/runs train equally long, and the report says what their folders hold."""

from __future__ import annotations

import json
import re

import pytest

from bench import training_runs
from mor_kernels.model import MoRConfig
from mor_kernels.train.command import read_config

SMALL = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 2}  # fmt: skip
EXPERT = {"num_recursions": 2, "router": "expert_choice"}
PATHS = sorted(training_runs.PLANS.glob("*.json"))


def test_plans_are_up_to_date():
    assert len(PATHS) == 16 and training_runs.main(["--check"]) == 0


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_plans_take_equal_operations(path):
    """Counted anew from what the files say: sequences, each with the operations of its length."""
    assert read_config(path).keys() <= {"model", "train", "init"}  # no path of this machine
    vanilla = training_runs.plan(training_runs.PLANS / "vanilla.json")
    totals = []
    for config, train in (vanilla, training_runs.plan(path)):
        sequences = train["steps"] * train["batch_size"] * train.get("accumulation", 1)
        totals.append(sequences * config.flops(train["sequence_length"], training=True))
        assert sequences * train["sequence_length"] < 91e6  # the tokens that there are, once
    if not path.stem.startswith("uptrain"):
        assert totals[1] == pytest.approx(totals[0], rel=0.5 / vanilla[1]["steps"])  # half a step
        assert train["learning_rate"] == vanilla[1]["learning_rate"]


def test_steps_make_up_for_a_capacity_warm_up():
    train = {"batch_size": 3, "sequence_length": 64}
    config = MoRConfig(**SMALL, **EXPERT, cap_warmup_steps=10)
    budget = 3 * sum(config.flops(64, config.kept(64, step), training=True) for step in range(40))
    assert training_runs.operations(config, train, 40) == budget
    assert training_runs.equal_steps(config, train, budget) == 40
    assert training_runs.equal_steps(MoRConfig(**SMALL, **EXPERT), train, budget) > 40


MADE = {"device": "A Card", "torch": "2.11", "triton": "3.6"}


def write(folder, name, losses, model=None, mix=(1.0,), tasks=None, seed=0, **record):
    """A run of 20 steps of 2 x 2 sequences of 8 tokens on 3 processes."""
    out = folder / name
    out.mkdir()
    config = MoRConfig(**SMALL, **(model or {}))
    record = {"processes": 3, "model": config.to_dict(), "train": {"steps": 20, "batch_size": 2, "accumulation": 2,
              "sequence_length": 8, "learning_rate": 0.001, "seed": seed}, **record}  # fmt: skip
    (out / "run.json").write_text(json.dumps(record))
    metrics = {"sampling_accuracy": 0.9, "dead_token_ratio": 0.25} if config.router == "expert_choice" else {}
    metrics = {"max_vio": 0.5, "entropy": 0.6} if config.router == "token_choice" else metrics
    lines = [{"step": 0, "parameters": 1234567, **MADE}]
    for step in range(1, 21):
        late = {key: value + (step == 19) - (step < 19) for key, value in metrics.items()}  # of steps 19 and 20: + 0.5
        lines.append({"step": step, "depth_mix": mix, "tokens_per_second": 1000.0 * step, **late})
    for step, loss in zip((10, 20), losses):
        more = {"validation_loss_topk": loss - 0.125} if config.router == "expert_choice" else {}
        lines.append({"step": step, "validation_loss": loss, **more})
    lines.sort(key=lambda line: line["step"])
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tasks:
        found = evaluate(out, tasks)
        (out / "eval-topk.json").write_text(json.dumps({**found, "mode": "topk", "tasks": {"piqa": {"acc_norm": 1.0}}}))
    return out


def evaluate(folder, tasks):
    found = {"mode": "threshold", "parameters": 7654321, "tasks": tasks,
             "text": {"x/held-out.txt": {"bits_per_byte": 1.0625}}}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "eval.json").write_text(json.dumps(found))
    return found


def test_a_run_is_read_from_its_folder(tmp_path):
    tasks = {"piqa": {"acc": 0.5, "acc_norm": 0.625, "acc_norm_stderr": 0.0625}}
    run = training_runs.read_run(write(tmp_path, "a", (4.0, 3.5), EXPERT, mix=(0.75, 0.25), tasks=tasks))
    config = MoRConfig(**SMALL, **EXPERT)
    assert run["flops"] == 20 * 12 * config.flops(8, (8, 2), training=True)  # a quarter took both recursions
    assert run["points"] == [(run["flops"] / 2, 4.0), (run["flops"], 3.5)] and not run["unfinished"]
    assert run["tokens"] == 20 * 12 * 8 and run["parameters"] == 1234567 and run["speed"] == 11000.0
    assert run["sampling_accuracy"] == pytest.approx(1.4) and run["max_vio"] is None
    assert (run["loss"], run["loss_topk"]) == (3.5, 3.375) and run["tasks"] == tasks


@pytest.fixture
def page(tmp_path, monkeypatch):
    page = tmp_path / "training.md"
    sections = "".join(f"<!-- runs:{name} -->\n{training_runs.NONE}<!-- /runs -->\n" for name in ("plans", "results"))
    page.write_text(f"above\n{sections}below\n")
    monkeypatch.setattr(training_runs, "PAGE", page)
    monkeypatch.setattr(training_runs, "RECORD", tmp_path / "results" / "training_runs.json")
    return page


def test_the_page_says_what_the_folders_hold(tmp_path, page):
    tasks = {"lambada": {"acc": 0.25, "acc_stderr": 0.03125}, "mine": {"acc": 0.5, "acc_stderr": 0.125}}
    runs = [
        write(tmp_path, "vanilla", (4.0, 3.0)),
        write(tmp_path, "recursive-2", (4.0, 3.25), {"num_recursions": 2}, (0.0, 1.0)),
        write(tmp_path, "expert-2", (4.0, 3.03), EXPERT, (0.5, 0.5), tasks),
        write(tmp_path, "expert-2-shared", (4.0, 3.3), {**EXPERT, "kv": "shared"}, (0.5, 0.5)),
        write(tmp_path, "token-2", (4.0, 2.95), {"num_recursions": 2, "router": "token_choice"}, (0.5, 0.5)),
        write(tmp_path, "up-dense", (4.0, 2.375), init="/x:stepwise"),
        write(tmp_path, "up-upper", (4.0, 2.5), {"num_recursions": 2}, (0.0, 1.0), init="/x:upper"),
        write(tmp_path, "up-stepwise", (4.0, 2.25), {"num_recursions": 2}, (0.0, 1.0), init="/x:stepwise"),
    ]
    evaluate(tmp_path / "dense", {"lambada": {"acc": 0.75, "acc_stderr": 0.0625}})
    assert training_runs.main([*map(str, runs[:3]), "--commit", "0123456789abcdef"]) == 0
    assert training_runs.main([*map(str, runs[3:]), str(tmp_path / "dense")]) == 0  # adds to what is recorded
    text = page.read_text()
    assert text.startswith("above\n<!-- runs") and text.endswith("<!-- /runs -->\nbelow\n")
    assert training_runs.NONE not in text and (tmp_path / "training.png").stat().st_size > 1000
    card = "A Card, torch 2.11, Triton 3.6, commit"
    assert f"Made on {card} 0123456, unknown.\n" in text
    row = "| expert-2 | MoR, expert-choice, Nr 2, recursion_wise | 1.2 | 0.001 | 0.0 | 0.00 | 3.030 | 2.905 | 11 |"
    assert row in text and "| expert-2 | 1.062 | 25.0 ± 3.1 | 50.0 ± 12.5 |" in text
    assert "| dense, untrained here | 1.062 | 75.0 ± 6.2 | - |" in text and "bits a byte | LD | mine |" in text

    def verdict(better, worse):
        (line,) = re.findall(rf"^- {better} .* {worse} .*$", text, re.M)
        return line

    assert verdict("vanilla", "recursive-2").endswith("recursive-2 3.250: as in the paper.")
    assert "as in the paper" in verdict("expert-2", "recursive-2") and "**" not in verdict("expert-2", "recursive-2")
    assert "no more than 0.04 above vanilla 3.000: as in the paper; it took -" in verdict("expert-2", "vanilla")
    assert "as in the paper by top-k, **not by threshold**" in verdict("expert-2-shared", "recursive-2")
    assert "as in the paper by top-k, **not by threshold**" in verdict("expert-2", "token-2")
    assert verdict("expert-2", "expert-2-shared").endswith("(top-k 3.175): as in the paper.")
    assert verdict("up-upper", "up-stepwise").endswith("**not as in the paper**.")
    assert "as in the paper" in verdict("up-dense", "up-upper") and "**" in verdict("up-dense", "up-stepwise")
    assert "operations" not in verdict("up-dense", "up-upper")  # equal tokens, not operations
    assert len(re.findall("^- ", text, re.M)) == 10  # expert-2-shared has no token-choice of its kind beside it

    assert training_runs.main(["--check"]) == 0
    page.write_text(text.replace("3.030", "3.031"))
    assert training_runs.main(["--check"]) == 1


def test_seeds_are_one_line_and_a_run_replaces_one_of_its_name(tmp_path, page):
    tasks = [{"piqa": {"acc_norm": share, "acc_norm_stderr": 0.0625}} for share in (0.5, 0.75)]
    first, second = (
        write(tmp_path, f"expert-2{name}", (4.0, loss), EXPERT, (0.5, 0.5), found, seed=seed)
        for name, loss, found, seed in (("", 3.0, tasks[0], 0), ("-again", 3.5, tasks[1], 1))
    )
    other = write(tmp_path, "expert-2-shared", (4.0, 3.2), {**EXPERT, "kv": "shared"}, (0.5, 0.5))
    dense = [str(write(tmp_path, f"vanilla-{seed}", (4.0, 3.75 + seed), seed=seed)) for seed in (0, 1)]
    assert training_runs.main([str(first), str(second), str(other), *dense]) == 0
    text = page.read_text()
    assert "| 3.750, 4.750 | - |" in text  # top-k is expert-choice's alone
    assert "| 3.000, 3.500 | 2.875, 3.375 |" in text and "| expert-2 | 1.062 | 62.5 ± 6.2 |" in text
    assert "again" not in text
    assert "expert-2 3.000, 3.500 (top-k 2.875, 3.375), expected below expert-2-shared 3.200" in text
    assert "**not as in the paper**" in text  # the mean is 3.25
    (second / "metrics.jsonl").write_text((second / "metrics.jsonl").read_text().replace("3.5", "3.25"))
    assert training_runs.main([str(second)]) == 0 and "| 3.000, 3.250 |" in page.read_text()

    before = training_runs.RECORD.read_text(), page.read_text()
    (other / "metrics.jsonl").write_text((other / "metrics.jsonl").read_text().replace('"device": "A Card", ', ""))
    assert training_runs.main(["--check", str(other)]) == 0  # writes nothing
    assert (training_runs.RECORD.read_text(), page.read_text()) == before
    assert training_runs.main([str(other)]) == 0
    assert "; unknown, torch 2.11, Triton 3.6, commit unknown." in page.read_text()


def test_runs_of_other_rates_are_lines_of_their_own_and_compared_with_none(tmp_path, page):
    runs = [write(tmp_path, name, (4.0, loss)) for name, loss in (("vanilla", 3.0), ("vanilla-fast", 3.5))]
    runs.append(write(tmp_path, "expert-2", (4.0, 3.4), EXPERT, (0.5, 0.5)))
    record = json.loads((runs[1] / "run.json").read_text())
    record["train"]["learning_rate"] = 0.004
    (runs[1] / "run.json").write_text(json.dumps(record))
    assert training_runs.main([str(run) for run in runs]) == 0
    text = page.read_text()
    assert "| vanilla | vanilla | 1.2 | 0.001 |" in text and "| vanilla-fast | vanilla | 1.2 | 0.004 |" in text
    assert "above vanilla 3.000: **not" in text and "above vanilla-fast" not in text


def test_without_runs_and_with_half_a_run(tmp_path):
    assert training_runs.results_section(tmp_path / "absent.json") == training_runs.NONE
    out = write(tmp_path, "a", (4.0, 3.5))
    (out / "metrics.jsonl").write_text('{"step": 0, "parameters": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl: expected logged steps and a validation loss"):
        training_runs.read_run(out)
    with pytest.raises(ValueError, match="expected <!-- runs:results"):
        training_runs.replaced("nothing", "results", "x")
