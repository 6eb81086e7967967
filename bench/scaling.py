"""Tokens a second of training on 1, 2, 4, ... GPUs of a machine: the whole loop, under torchrun.

    python bench/scaling.py [--gpus 1 2 4] [--preset 360M] [--batch 16] [--steps 40] [--only token] [--out DIR]

Each GPU gets the same batch (weak scaling), so that N GPUs should train N times as many tokens a second. A run is the
`train` command on a text that every Python has; its speed is the median of its log lines but for the first two, which
compile and allocate. One GPU has nobody to share with and is measured once, for "ddp" and "fsdp" alike.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.harness import (
    ROOT,
    command_line,
    environment,
    new_figure,
    require,
    result_path,
    save_bars,
    variant_of,
    write,
)

CASES = {  # equal loads on all GPUs, and unequal ones
    "mor-3": ["num_recursions=3", "router=expert_choice"],
    "mor-3-token": ["num_recursions=3", "router=token_choice"],
}
LOG_EVERY, SKIPPED = 5, 2


def command(folder: Path, gpus: int, options: argparse.Namespace, model: list[str], parallel: str) -> list[str]:
    settings = [f"steps={options.steps}", f"batch_size={options.batch}", f"sequence_length={options.length}",
                f"log_every={LOG_EVERY}", "eval_every=0", f"checkpoint_every={options.steps}", "progress=false",
                f"parallel={parallel}", *options.train]  # fmt: skip
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    preset = ["--preset", options.preset, *(["--model", *fields] if (fields := [*options.model, *model]) else [])]
    return [*start, "-m", "mor_kernels", "train", str(folder), *preset, "--train", *settings]


def speeds(metrics: Path, steps: int) -> list[float]:
    """Tokens a second of a finished run's log lines; a Mismatch where it didn't learn."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    logged = [line for line in lines if "tokens_per_second" in line]
    require(logged and logged[-1]["step"] == steps, f"expected {steps} steps, found {logged[-1:]}")
    losses = [line["lm"] for line in logged]
    require(all(map(math.isfinite, losses)) and losses[-1] < losses[0], f"the loss did not fall: {losses}")
    return [line["tokens_per_second"] for line in logged[SKIPPED:]]


def measure(case: str, gpus: int, parallel: str, options: argparse.Namespace, data: Path) -> dict:
    row = {"case": case, "gpus": gpus, "parallel": parallel, "failed": None}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        if data.exists():  # the tokens of an earlier run
            shutil.copytree(data, folder / "data")
        arguments = command(folder, gpus, options, CASES[case], parallel)
        result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        try:
            require(result.returncode == 0, (result.stderr or result.stdout)[-2000:])
            found = speeds(folder / "metrics.jsonl", options.steps)
        except AssertionError as error:
            return row | {"failed": str(error)}
        if not data.exists():
            shutil.copytree(folder / "data", data)
    p20, _, _, p80 = statistics.quantiles(found, n=5)
    return row | {"tokens_per_second": statistics.median(found), "p20": p20, "p80": p80}


def compare(rows: list[dict]) -> None:
    """Puts into each row what share it has of as many times the speed of one GPU."""
    alone = {row["case"]: row["tokens_per_second"] for row in rows if row["gpus"] == 1 and not row["failed"]}
    for row in rows:
        if not row["failed"] and row["case"] in alone:
            row["efficiency"] = row["tokens_per_second"] / row["gpus"] / alone[row["case"]]


def chart(result: dict, path: Path) -> None:
    """Bars of tokens a second by model, GPUs and kind of parallelism, and marks at as many times one GPU's."""
    rows = [row for row in result["rows"] if not row["failed"]]
    names = [f"{row['case']}, {row['gpus']} GPU" + f"s, {row['parallel']}" * (row["gpus"] > 1) for row in rows]
    figure = new_figure(9, 1.5 + 0.3 * len(rows))
    axes = figure.subplots()
    colors = ["silver" if row["gpus"] == 1 else "#0072b2" if row["parallel"] == "ddp" else "#56b4e9" for row in rows]
    for y, (row, color) in enumerate(zip(rows, colors)):
        speed, share = row["tokens_per_second"], ""
        axes.barh(y, speed, height=0.75, color=color)
        if row["gpus"] > 1 and "efficiency" in row:
            linear = speed / row["efficiency"]
            axes.plot([linear, linear], [y - 0.375, y + 0.375], color="black")
            share = f", {row['efficiency']:.0%} of linear"
        axes.text(speed, y, f"{speed:,.0f}{share} ", va="center", ha="right", fontsize=8,
                  color="black" if color != "#0072b2" else "white")  # fmt: skip
    save_bars(figure, names, "tokens a second; line: as many times one GPU's", result, path)


def main(argv: list[str] | None = None) -> int:
    parser = command_line("scaling", __doc__)
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="default: 1, 2, 4, ... of those there are")
    parser.add_argument("--preset", default="360M")
    parser.add_argument("--batch", type=int, default=16, help="sequences a GPU and step")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", nargs="*", default=[], metavar="FIELD=VALUE", help="of MoRConfig, for all cases")
    parser.add_argument("--train", nargs="*", default=[], metavar="FIELD=VALUE", help="of TrainConfig")
    parser.add_argument("--only", metavar="SUBSTRING", default="", help="cases whose name contains this")
    options = parser.parse_args(argv)
    if options.steps < LOG_EVERY * (SKIPPED + 2):
        parser.error(f"--steps: expected at least {LOG_EVERY * (SKIPPED + 2)}, got {options.steps}")
    count = torch.cuda.device_count()
    gpus = options.gpus or [2**i for i in range(count.bit_length())]
    if count < max(gpus, default=2):
        print(f"{count} CUDA devices are visible, of {max(gpus, default=2)}. Nothing was measured or written.",
              file=sys.stderr)  # fmt: skip
        return 2
    variant = variant_of(parser, options, ["preset", "batch", "length", "model", "train"])
    result = {"benchmark": "scaling", "variant": variant, "environment": environment(options.commit),
              "preset": options.preset, "sequences_per_gpu": options.batch, "sequence_length": options.length,
              "train": options.train, "model": options.model, "complete": False, "rows": []}  # fmt: skip
    path = result_path(options.out, result, options.only)
    with tempfile.TemporaryDirectory() as scratch:
        for case in (name for name in CASES if options.only in name):
            for number in sorted(gpus):
                for parallel in ("ddp", "fsdp")[: 1 if number == 1 else 2]:
                    row = measure(case, number, parallel, options, Path(scratch) / "data")
                    result["rows"].append(row)
                    compare(result["rows"])
                    write(result, path)
                    what = row["failed"] or f"{row['tokens_per_second']:>12,.0f} tokens/s"
                    share = f"{row['efficiency']:8.1%}" if "efficiency" in row else ""
                    print(f"{case:12} {number:2} {parallel:5} {what}{share}", flush=True)
    result["complete"] = True
    write(result, path)
    print(f"written to {path}")
    return int(any(row["failed"] for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
