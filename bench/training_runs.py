"""Training runs: how long each trains, and what came of them, as the tables of docs/training.md.

python bench/training_runs.py --steps      # set "steps" in docs/runs, for as many operations as vanilla.json takes
python bench/training_runs.py RUN ... [--commit HASH]   # record runs, and write table, comparison and chart anew
python bench/training_runs.py --check      # exits with 1 if steps or tables aren't what they should be

Of a run's folder, run.json, metrics.jsonl and eval*.json (mor-kernels eval --json) are read, and nothing else; a folder
with an evaluation alone is a model as it was before any training. What is recorded goes into
bench/results/training_runs.json, in place of an earlier run of the same name. Runs that differ by their seed alone are
one line.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import RESULTS, ROOT, new_figure, write
from bench.report import markdown
from mor_kernels.model import MoRConfig
from mor_kernels.model.config import SIZES

PAGE, PLANS = ROOT / "docs" / "training.md", ROOT / "docs" / "runs"
RECORD = RESULTS / "training_runs.json"
SECTION = r"(<!-- runs:{} -->\n).*?(<!-- /runs -->)"
NONE = "No result has been recorded yet.\n"
# the paper's columns: byte-normalised but for LAMBADA and WinoGrande
TASKS = {
    "lambada": ("LD", "acc"), "hellaswag": ("HS", "acc_norm"), "piqa": ("PQ", "acc_norm"), "winogrande": ("WG", "acc"),
    "arc_easy": ("ARC-E", "acc_norm"), "arc_challenge": ("ARC-C", "acc_norm"),
}  # fmt: skip
ROUTERS = {"expert_choice": "MoR, expert-choice", "token_choice": "MoR, token-choice"}
NEAR = 0.04  # nats: the most by which an expert-choice model of the paper's main table is behind vanilla


# Plans


def plan(path: Path) -> tuple[MoRConfig, dict]:
    """Model and settings of a file of docs/runs; what starts from a checkpoint is taken to be SmolLM2-135M."""
    found = json.loads(path.read_text(encoding="utf-8"))
    sizes = SIZES["135M"] if "init" in found else {}
    return MoRConfig.from_dict({**sizes, **found["model"]}), found["train"]


def operations(config: MoRConfig, train: dict, steps: int) -> int:
    """Of a whole training: the capacity warm-up keeps more tokens at first."""
    length, sequences = train["sequence_length"], train["batch_size"] * train.get("accumulation", 1)
    warm = min(steps, config.cap_warmup_steps)
    first = sum(config.flops(length, config.kept(length, step) or None, training=True) for step in range(warm))
    return sequences * (first + (steps - warm) * config.flops(length, training=True))


def equal_steps(config: MoRConfig, train: dict, budget: int) -> int:
    """The number of steps that takes nearest to ``budget`` operations."""
    each = operations(config, train, config.cap_warmup_steps + 1) - operations(config, train, config.cap_warmup_steps)
    warm = operations(config, train, config.cap_warmup_steps)
    return round(config.cap_warmup_steps + (budget - warm) / each)


def planned_steps(folder: Path = PLANS) -> dict[Path, int]:
    """For each run from scratch, the steps that take as many operations as vanilla.json's."""
    config, train = plan(folder / "vanilla.json")
    budget = operations(config, train, train["steps"])
    paths = [path for path in sorted(folder.glob("*.json")) if "init" not in json.loads(path.read_text())]
    return {path: equal_steps(*plan(path), budget) for path in paths}


def set_steps(folder: Path = PLANS) -> None:
    for path, steps in planned_steps(folder).items():
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'("steps": )\d+', rf"\g<1>{steps}", text, count=1), encoding="utf-8")


def parameters(config: MoRConfig) -> int:
    import torch

    from mor_kernels.model import MoR

    with torch.device("meta"):
        return sum(p.numel() for p in MoR(config).parameters())


def plans_section(folder: Path = PLANS) -> str:
    lines = []
    for path in sorted(folder.glob("*.json"), key=lambda path: ("uptrain" in path.stem, path.stem)):
        config, train = plan(path)
        tokens = train["steps"] * train["batch_size"] * train.get("accumulation", 1) * train["sequence_length"]
        total = operations(config, train, train["steps"])
        lines.append((f"[{path.stem}](runs/{path.name})", _millions(parameters(config)), f"{total / tokens / 1e6:.1f}",
                      f"{train['steps']:,}", _millions(tokens), f"{total / 1e15:.2f}"))  # fmt: skip
    header = ("run", "parameters, M", "MFLOP a token", "steps", "tokens, M", "PFLOP")
    return "\n".join(markdown(header, lines)) + "\n"


# Results


def read_run(folder: Path) -> dict:
    """What the report needs of a run's folder, as JSON can hold it."""
    evaluations = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("eval*.json"))]
    causal = [found for found in evaluations if found["mode"] == "threshold"]
    scores = {
        "tasks": {name: task for found in causal for name, task in found["tasks"].items()},
        "texts": {Path(name).stem: text for found in causal for name, text in found["text"].items()},
    }
    if causal and not (folder / "run.json").exists():
        return {"name": folder.name, "parameters": causal[0]["parameters"], **scores}
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    config, train = MoRConfig.from_dict(record["model"]), record["train"]
    sequences = train["batch_size"] * train["accumulation"] * record["processes"]
    length, step, total, points = train["sequence_length"], 0, 0, []
    for line in lines:
        if "depth_mix" in line:  # of the steps since the last such line
            mix = line["depth_mix"]
            kept = [min(length, length * sum(mix[r:])) for r in range(len(mix))]
            total += (line["step"] - step) * sequences * config.flops(length, kept, training=True)
            step = line["step"]
        if "validation_loss" in line:
            points.append((total, line["validation_loss"]))
    logged = [line for line in lines if "depth_mix" in line]
    if not logged or not points:
        raise ValueError(f"{folder / 'metrics.jsonl'}: expected logged steps and a validation loss, found none")
    ending = [line for line in logged if line["step"] > 0.9 * step]
    last = [line for line in lines if "validation_loss" in line][-1]
    first = next(line for line in lines if "parameters" in line)

    def late(name):
        values = [line[name] for line in ending if name in line]
        return statistics.mean(values) if values else None

    return {
        "name": folder.name, "model": record["model"], "train": train,
        "how": record.get("init", "").rpartition(":")[2] or None,
        "where": {name: first.get(name) for name in ("device", "torch", "triton")},
        "parameters": first["parameters"], "flops": total, "tokens": step * sequences * length,
        "unfinished": step < train["steps"], "points": points,
        "loss": last["validation_loss"], "loss_topk": last.get("validation_loss_topk"),
        # the first line has the start in it
        "speed": statistics.median([line["tokens_per_second"] for line in logged[1:] or logged]),
        **{name: late(name) for name in ("sampling_accuracy", "dead_token_ratio", "max_vio", "entropy")}, **scores,
    }  # fmt: skip


def record(folders: list[Path], commit: str | None, path: Path) -> None:
    """Adds the runs of `folders` to the file, in place of those of the same names."""
    new = [{**read_run(folder), "commit": commit} for folder in folders]
    names = {run["name"] for run in new}
    runs = [run for run in _recorded(path) if run["name"] not in names] + new
    write({"benchmark": "training_runs", "runs": sorted(runs, key=lambda run: run["name"])}, path)


def _recorded(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def recorded(path: Path) -> tuple[list[dict], list[dict]]:
    """Runs, those that differ by their seed alone as one (means, and the losses of each), and models as they were."""
    groups: dict[str, list[dict]] = {}
    untrained = []
    for run in _recorded(path):
        if "model" not in run:
            untrained.append(run)
            continue
        settings = {name: value for name, value in run["train"].items() if name != "seed"}
        groups.setdefault(json.dumps([run["model"], run["how"], settings], sort_keys=True), []).append(run)
    return [_mean(group) for group in groups.values()], untrained


def _mean(runs: list[dict]) -> dict:
    def mean(values):
        first = values[0]
        if isinstance(first, dict):  # of what all of them were asked
            return {name: mean([value[name] for value in values]) for name in first if all(name in v for v in values)}
        return statistics.mean(values) if isinstance(first, float) and None not in values else first

    names = ("flops", "loss", "loss_topk", "speed", "sampling_accuracy", "dead_token_ratio", "max_vio", "entropy",
             "tasks", "texts")  # fmt: skip
    return {
        **runs[0], **{name: mean([run[name] for run in runs]) for name in names},
        "config": MoRConfig.from_dict(runs[0]["model"]), "unfinished": any(run["unfinished"] for run in runs),
        "curves": [run["points"] for run in runs],
        **{f"{name}_of_each": [run[name] for run in runs] for name in ("loss", "loss_topk")},
        "made": {(*run["where"].values(), run["commit"]) for run in runs},
    }  # fmt: skip


def title(run: dict) -> str:
    config = run["config"]
    if config.router == "none":
        kind = "recursive" if config.num_recursions > 1 else "vanilla"
    else:
        kind = ROUTERS[config.router]
    depth = f", Nr {config.num_recursions}" if config.num_recursions > 1 else ""
    kv = f", {config.kv}" if config.router != "none" else ""
    how = f", from dense by {run['how']}" if run["how"] and config.num_recursions > 1 else ""
    return kind + depth + kv + (how or (", continued" if run["how"] else ""))


def results_table(runs: list[dict]) -> list[str]:
    lines = [
        (
            f"{run['name']}{' (unfinished)' * run['unfinished']}", title(run), _millions(run["parameters"]),
            f"{run['train']['learning_rate']:g}", _millions(run["tokens"]), f"{run['flops'] / 1e15:.2f}",
            _each(run, "loss"), _each(run, "loss_topk"), f"{run['speed'] / 1e3:,.0f}",
            _percent(run["sampling_accuracy"]), _percent(run["dead_token_ratio"]),
            _number(run["max_vio"]), _number(run["entropy"]),
        )
        for run in runs
    ]  # fmt: skip
    header = ("run", "model", "parameters, M", "learning rate", "tokens, M", "PFLOP", "loss, threshold", "loss, top-k",
              "1000 tokens/s", "sampling accuracy, %", "dead tokens, %", "MaxVio", "entropy")  # fmt: skip
    return markdown(header, lines)


def tasks_table(runs: list[dict]) -> list[str]:
    """What `mor-kernels eval` found, also of models that were not trained here."""
    runs = [run for run in runs if run["tasks"]]
    texts = list(dict.fromkeys(text for run in runs for text in run["texts"]))
    tasks = list(dict.fromkeys([*(t for t in TASKS if any(t in run["tasks"] for run in runs)),
                                *(t for run in runs for t in run["tasks"])]))  # fmt: skip
    lines = []
    for run in runs:
        scores = []
        for task in tasks:
            found = run["tasks"].get(task, {})
            key = TASKS[task][1] if task in TASKS else "acc_norm" if "acc_norm" in found else "acc"
            scores.append(f"{100 * found[key]:.1f} ± {100 * found[f'{key}_stderr']:.1f}" if key in found else "-")
        bits = (_number(run["texts"].get(text, {}).get("bits_per_byte")) for text in texts)
        lines.append((run["name"] + ("" if "config" in run else ", untrained here"), *bits, *scores))
    header = ("run", *(f"{text}, bits a byte" for text in texts),
              *(TASKS[task][0] if task in TASKS else task for task in tasks))  # fmt: skip
    return markdown(header, lines) if lines else []


def comparison(runs: list[dict]) -> list[str]:
    """What the paper found, and whether these runs agree: a line for each pair of runs that tells of it. Runs from
    scratch are compared with those of the same learning rate."""

    def find(router, recursions=None, kv=None, how=False, scratch=True, rate=None):
        return [run for run in runs if run["config"].router == router and bool(run["how"]) != scratch
                and recursions in (None, run["config"].num_recursions) and kv in (None, run["config"].kv)
                and how in (False, run["how"]) and rate in (None, run["train"]["learning_rate"])]  # fmt: skip

    lines = []
    for better in find("none") + find("expert_choice"):
        config, rate = better["config"], better["train"]["learning_rate"]
        count, kv = config.num_recursions, config.kv
        if config.router == "none":
            if count == 1:
                recursive = [other for other in find("none", rate=rate) if other["config"].num_recursions > 1]
                lines += [_verdict(better, other) for other in recursive]
            continue
        lines += [_verdict(better, other) for other in find("none", count, rate=rate)]
        lines += [_verdict(better, other, NEAR) for other in find("none", 1, rate=rate)]
        lines += [_verdict(better, other) for other in find("token_choice", count, kv, rate=rate)]
        if kv == "recursion_wise":
            lines += [_verdict(better, other) for other in find("expert_choice", count, "shared", rate=rate)]
    for better in find("none", scratch=False):
        if better["config"].num_recursions == 1:
            worse = [other for other in find("none", scratch=False) if other["config"].num_recursions > 1]
        else:
            alike = find("none", better["config"].num_recursions, how="stepwise", scratch=False)
            worse = alike if better["how"] == "upper" else []
        lines += [_verdict(better, other) for other in worse]
    return lines


def _verdict(better: dict, worse: dict, slack: float = 0.0) -> str:
    """Whether ``better``, as the paper has it, has the lower loss here: as decoding routes, and looking ahead."""
    found = {"threshold": better["loss"] <= worse["loss"] + slack}
    if better["loss_topk"] is not None:
        other = worse["loss"] if worse["loss_topk"] is None else worse["loss_topk"]
        found["top-k"] = better["loss_topk"] <= other + slack
    yes, no = ([how for how, agrees in found.items() if agrees is wanted] for wanted in (True, False))
    if not no:
        words = "as in the paper"
    elif not yes:
        words = "**not as in the paper**"
    else:
        words = f"as in the paper by {yes[0]}, **not by {no[0]}**"

    def losses(run):
        topk = f" (top-k {_each(run, 'loss_topk')})" if run["loss_topk"] is not None else ""
        return _each(run, "loss") + topk

    expected = f"no more than {slack} above" if slack else "below"
    ratio = better["flops"] / worse["flops"] - 1
    unequal = f"; it took {100 * ratio:+.0f} % operations" if abs(ratio) > 0.02 and not better["how"] else ""
    return (f"- {better['name']} {losses(better)}, expected {expected} {worse['name']} {losses(worse)}: "
            f"{words}{unequal}.")  # fmt: skip


def results_section(path: Path) -> str:
    runs, untrained = recorded(path)
    if not runs:
        return NONE
    runs.sort(key=lambda run: (bool(run["how"]), run["name"]))
    parts = [
        "Made on " + "; ".join(_machines(made for run in runs for made in run["made"])) + ".",
        "\n".join(results_table(runs)),
        "![Validation loss](training.png)",
        "\n".join(tasks_table(runs + untrained)),
    ]
    if lines := comparison(runs):
        parts += ["The paper's ordering, pair by pair:", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


# that stay apart without colour vision (Okabe and Ito)
COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#999999")


def chart(runs: list[dict], image: Path) -> None:
    """Validation loss (threshold) over training operations. Needs matplotlib.

    A colour is a router and a number of recursions, a line's style what keys and values are; a legend is in the order
    of the last losses.
    """
    groups = [[run for run in runs if bool(run["how"]) == how] for how in (False, True)]
    groups = [group for group in groups if group]
    figure = new_figure(8 * len(groups), 5)
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups):
        kinds = sorted({(run["config"].router, run["config"].num_recursions) for run in group})
        looks: Counter = Counter()
        for run in sorted(group, key=lambda run: -run["curves"][0][-1][1]):
            config = run["config"]
            color = COLORS[kinds.index((config.router, config.num_recursions)) % len(COLORS)]
            style = "--" if config.kv == "shared" else ":" if config.router == "none" else "-"
            marker = ".x+^sv"[looks[color, style] % 6]  # of runs that differ in something else
            looks[color, style] += 1
            for i, points in enumerate(run["curves"]):
                line = zip(*((flops / 1e15, loss) for flops, loss in points))
                axes.plot(*line, style, color=color, marker=marker, label="_" * bool(i) + run["name"])
        axes.set_xlabel("training operations (PFLOP)")
        axes.set_ylabel("validation loss (nats), threshold routing")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(image, format="png", dpi=120)


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _each(run: dict, name: str) -> str:
    """The losses of all seeds."""
    found = [value for value in run[f"{name}_of_each"] if value is not None]
    return ", ".join(_number(value) for value in found) or "-"


def _machines(made: Iterable[tuple]) -> list[str]:
    """Each machine with the commits that ran there."""
    commits: dict[str, set[str]] = {}
    for facts in made:
        device, torch, triton, commit = (fact or "unknown" for fact in facts)
        commits.setdefault(f"{device}, torch {torch}, Triton {triton}", set()).add(commit[:7])
    return [f"{machine}, commit {', '.join(sorted(of))}" for machine, of in sorted(commits.items())]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name``, which it must have."""
    found, count = re.subn(SECTION.format(name), lambda match: match[1] + content + match[2], text, flags=re.S)
    if not count:
        raise ValueError(f"{PAGE}: expected <!-- runs:{name} --> ... <!-- /runs -->, found none")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/training_runs.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs to record")
    parser.add_argument("--commit", help="that the runs were made with")
    parser.add_argument("--steps", action="store_true", help='set "steps" in docs/runs')
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    options = parser.parse_args(argv)
    if not options.check:
        if options.steps:
            set_steps(PLANS)
        if options.runs:
            record(options.runs, options.commit, RECORD)
    text = PAGE.read_text(encoding="utf-8")
    fresh = replaced(replaced(text, "plans", plans_section(PLANS)), "results", results_section(RECORD))
    if options.check:
        wrong = [path.name for path, steps in planned_steps(PLANS).items() if plan(path)[1]["steps"] != steps]
        if wrong or fresh != text:
            print(f"out of date: run python bench/training_runs.py --steps ({', '.join(wrong) or PAGE.name})",
                  file=sys.stderr)  # fmt: skip
            return 1
        return 0
    PAGE.write_text(fresh, encoding="utf-8")
    if runs := recorded(RECORD)[0]:
        chart(runs, PAGE.with_name("training.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
