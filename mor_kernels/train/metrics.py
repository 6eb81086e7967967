"""A run's record, metrics.jsonl: a line of JSON for each time that something was measured; and its curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files import parse_json, write_atomic, write_text


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Its lines, in their order; what isn't one is passed over, such as a line that a crash cut short."""
    lines: list[dict[str, Any]] = []
    if not path.is_file():
        return lines
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "step" in line and all(_is_metric(*item) for item in line.items()):
                lines.append(line)
    return lines


def _is_metric(name: str, value: object) -> bool:
    """Whether it is what `Trainer` writes by this name."""
    if name == "step":
        return type(value) is int and 0 <= value < 1 << 53
    if name in ("device", "torch", "triton"):
        return value is None or isinstance(value, str)
    if name == "kept" or "depth_mix" in name:
        return isinstance(value, list) and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line."""
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def drop_after(path: Path, step: int) -> None:
    """Leaves the lines up to a step, from which a run goes on. Makes the file if there is none."""
    kept = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    write_text(path, "".join(kept))


def plot_curves(metrics: str | Path, image: str | Path) -> None:
    """Draws losses, depth mix and learning rate of a metrics.jsonl into a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure  # not pyplot: draws with Agg, whatever the display

    lines = read_metrics(Path(metrics))
    logged = [line for line in lines if {"loss", "depth_mix", "learning_rate"} <= line.keys()]
    steps = [line["step"] for line in logged]
    figure = Figure(figsize=(8, 9), layout="constrained")
    loss, depth, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1))
    for name, label, marker in (("lm", "training", ""), ("validation_loss", "validation", "."),
                                ("validation_loss_topk", "validation, top-k (looks ahead)", ".")):  # fmt: skip
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            loss.plot(*zip(*points), label=label, marker=marker)
    for line in lines:
        if "unigram_entropy" in line:
            loss.axhline(line["unigram_entropy"], color="grey", linestyle=":", label="unigram entropy")
    loss.set_ylabel("loss (nats)")
    loss.legend()
    if logged:
        shares = list(zip(*(line["depth_mix"] for line in logged)))
        depth.stackplot(steps, *shares, labels=[f"depth {r + 1}" for r in range(len(shares))])
        depth.legend(loc="lower right")
        rate.plot(steps, [line["learning_rate"] for line in logged])
    depth.set_ylabel("share of tokens")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    write_atomic(image, lambda file: figure.savefig(file, format="png", dpi=120))
