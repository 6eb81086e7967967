"""Verify, then time: what all benchmarks share.

A benchmark is a list of :class:`Case`; each holds our implementation and its rivals. Every implementation is compared
with an independent computation, mostly in float64, before it is timed. All are timed alike: R calls on R different
input sets in one CUDA graph, so that no call finds its inputs in the L2 cache and launch gaps count for nobody. Those
of a case take turns, in another order each time: a card at its power limit slows down, by a tenth and more, and not
when one expects.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from mor_kernels import doctor
from mor_kernels.model import MoRConfig
from mor_kernels.ops import _dispatch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
TURNS = 3
REPLAYS, QUICK_REPLAYS = 20, 5  # in a turn
MIN_SETS, MAX_SETS = 8, 512  # eight calls hide the start of a graph; 512 keep it small where the inputs are tiny
ROUNDOFF = 2.0**-8  # of bf16: the largest relative error of rounding once
COMPILE = functools.partial(torch.compile, dynamic=False, fullgraph=True)  # what makes the compiled rivals


class Mismatch(AssertionError):
    """An implementation's output isn't what it should be."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Mismatch(what)


def close(what: str, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | float) -> float:
    """The largest ``|got - want| / allowed``; a :class:`Mismatch` if it is over 1 or not a number."""
    require(got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if got.numel() == 0:
        return 0.0
    worst = ((got.double() - want).abs() / (allowed + 1e-30)).max().item()
    require(worst <= 1, f"{what}: the error is {worst:.3g} times what is allowed")
    return worst


@dataclass(frozen=True)
class Implementation:
    """``prepare(inputs)`` does what isn't timed (the forward pass of a backward, say) and returns what is."""

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    ours: bool = False


@dataclass(frozen=True)
class Case:
    """``make(seed)`` gives the same inputs each time; ``check(inputs, outputs, ours)`` raises :class:`Mismatch` or
    returns the largest error as a share of what is allowed, and sees inputs that no implementation has touched."""

    op: str
    name: str
    nbytes: int  # what must be read and written, at the least
    make: Callable[[int], Any]
    check: Callable[[Any, Any, bool], float]
    implementations: tuple[Implementation, ...]  # rivals first: our row is then printed beside the best of them
    flops: int | None = None  # what matrix products must compute, where that may take longer than the bytes


@dataclass(frozen=True)
class Timing:
    ms: float
    p20: float
    p80: float
    how: str  # "graph", or "events": plain calls with the cache flushed between them

    @classmethod
    def of(cls, samples: list[float], how: str) -> Timing:
        p20, _, _, p80 = statistics.quantiles(samples, n=5)
        return cls(statistics.median(samples), p20, p80, how)


def our_backends(op: str, device: str) -> dict[str, str]:
    """Our backends by what their rows are called: those with kernels, or what the device has in their place."""
    native = [b for b in ("cuda", "triton") if device == "cuda" and not _dispatch.unavailable(b, op, "cuda")]
    return {name: name for name in native} or {"ours, eager": "eager"}


def paper_config(size: str, **changes: Any) -> MoRConfig:
    """The paper's model of a size, with as many layers more as its recursions need to share them, as there."""
    layers = MoRConfig.from_size(size).num_hidden_layers
    layers += (2 - layers) % changes.get("num_recursions", 1)  # the first and the last aren't shared
    return MoRConfig.from_size(size, num_hidden_layers=layers, **changes)


def sets_needed(nbytes: int, l2_bytes: int) -> int:
    """Input sets to rotate over, so that four times the L2 cache passes before a set comes round again."""
    return min(MAX_SETS, max(MIN_SETS, math.ceil(4 * l2_bytes / nbytes)))


def verify(case: Case, implementation: Implementation, seed: int = 0) -> float:
    outputs = implementation.prepare(case.make(seed))()
    return case.check(case.make(seed), outputs, implementation.ours)


def elapsed(run: Callable[[], Any], times: int, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Milliseconds of each of ``times`` runs on the current stream."""
    events = []
    for _ in range(times):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 1 GiB."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    elapsed(lambda: target.copy_(source), 5)
    return 2 * 2**30 / (statistics.median(elapsed(lambda: target.copy_(source), 30)) / 1e3)


def matmul_flops_per_second() -> float:
    """Of a bf16 product of 8192 x 8192 matrices: what products can reach on this card."""
    a, b, product = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    elapsed(lambda: torch.mm(a, b, out=product), 5)
    return 2 * 8192**3 / (statistics.median(elapsed(lambda: torch.mm(a, b, out=product), 30)) / 1e3)


@dataclass(frozen=True)
class Samples:
    """Of one turn: milliseconds a call, how they were measured, and the error of what was computed meanwhile."""

    ms: list[float]
    how: str
    error: float = 0.0
    facts: dict = field(default_factory=dict)  # more for the row, of the first turn


def sample_on_gpu(case: Case, implementation: Implementation, replays: int) -> Samples:
    """Time on the current stream, which must not be the default one.

    The outputs of all calls stay alive during the capture, so that they are written to cold lines too; temporaries
    are reused within the graph's pool.
    """
    l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    sets = [case.make(seed) for seed in range(sets_needed(case.nbytes, l2_bytes))]
    calls = [implementation.prepare(inputs) for inputs in sets]
    for _ in range(3):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = [call() for call in calls]
    except Exception as error:
        print(f"  {implementation.name} can't be captured ({reason(error)}); plain calls are timed", flush=True)
        torch.cuda.synchronize()
        turn = iter(calls * replays)
        flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device="cuda")
        return Samples(elapsed(lambda: next(turn)(), replays, before=lambda: flush.fill_(1)), "events")
    graph.replay()
    # the last set was not warmed up on, so that an op in place has worked on it exactly once
    error = case.check(case.make(len(sets) - 1), outputs[-1], implementation.ours)
    warm = elapsed(graph.replay, 3)
    replays = min(replays, max(QUICK_REPLAYS, int(200 / warm[-1])))  # about 0.2 s, where calls are long
    return Samples([ms / len(calls) for ms in elapsed(graph.replay, replays)], "graph", error)


def reason(error: BaseException) -> str:
    """What a row says of a failure: the first line of the error."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]


def measure(case: Case, result: dict, sample: Callable[[Case, Implementation], Samples]) -> list[dict]:
    """A row an implementation, all timed in turns; ``failed`` holds the reason if the check or the timing failed."""
    floor = case.nbytes / result["copy_bandwidth"]
    if case.flops:
        floor = max(floor, case.flops / result["matmul_flops_per_second"])
    rows = [
        {
            "case": case.name, "op": case.op, "impl": implementation.name, "ours": implementation.ours,
            "bytes": case.nbytes, **({"flops": case.flops} if case.flops else {}), "floor_ms": floor * 1e3,
            "ms": None, "p20": None, "p80": None, "timing": None, "error": None, "failed": None,
        }
        for implementation in case.implementations
    ]  # fmt: skip
    samples: list[list[Samples]] = [[] for _ in rows]

    def attempt(i: int, step: Callable[[Case, Implementation], Any]) -> Any:
        if not rows[i]["failed"]:
            try:
                return step(case, case.implementations[i])
            except Exception as error:
                rows[i]["failed"] = reason(error)
                traceback.print_exc()

    errors = [attempt(i, verify) for i in range(len(rows))]
    for turn in range(TURNS):
        for i in random.Random(turn).sample(range(len(rows)), len(rows)):
            samples[i].append(attempt(i, sample))
    for row, error, turns in zip(rows, errors, samples):
        if not row["failed"]:
            timing = Timing.of([ms for turn in turns for ms in turn.ms], turns[0].how)
            row |= {"ms": timing.ms, "p20": timing.p20, "p80": timing.p80, "timing": timing.how}
            row["error"] = max(error, *(turn.error for turn in turns))
            row |= turns[0].facts
    return rows


def best_rival(rows: list[dict], op: str, case: str) -> dict | None:
    """The fastest of the measured rivals."""
    rivals = [r for r in rows if (r["op"], r["case"]) == (op, case) and not r["ours"] and not r["failed"]]
    return min(rivals, key=lambda r: r["ms"], default=None)


def against_each(rows: list[dict], op: str, case: str) -> str:
    """How many times as fast as each rival our rows are: a line each."""
    group = [row for row in rows if (row["op"], row["case"]) == (op, case) and not row["failed"]]
    lines = []
    for own in (row for row in group if row["ours"]):
        times = [f"{row['impl']} {row['ms'] / own['ms']:.2f}" for row in group if not row["ours"]]
        lines.append(f"  {own['impl']}, times as fast as {', '.join(times) or 'nothing: no rival was measured'}")
    return "\n".join(lines) or "  ours was not measured"


COLUMNS = (("op", -22), ("case", -24), ("implementation", -21), ("ms", 9), ("p20", 9), ("p80", 9), ("floor ms", 9),
           ("x floor", 8), ("% floor", 8), ("GB/s", 7), ("x rival", 8), ("error", 6), ("timing", 7))  # fmt: skip
# where operations are counted; the names of its cases are longer
FLOPS_COLUMNS = tuple(
    {"case": ("case", -26), "% floor": ("% matmul", 8), "GB/s": ("TFLOP/s", 7)}.get(name, (name, width))
    for name, width in COLUMNS
)


def format_cells(cells: list[str], columns: tuple = COLUMNS) -> str:
    """Cells in their columns; a negative width aligns to the left."""
    pairs = zip(cells, (width for _, width in columns))
    return " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in pairs).rstrip()


def tflops(row: dict) -> float:
    return row["flops"] / row["ms"] / 1e9


def format_row(row: dict, rival: dict | None = None, matmul: float | None = None) -> str:
    """A line of the table; ``rival`` is what our row is compared with (x rival: how many times faster), ``matmul`` the
    rate that operations are compared with."""
    columns = FLOPS_COLUMNS if matmul else COLUMNS
    names = [row["op"], row["case"], row["impl"]]
    if row["failed"]:
        return format_cells([*names, f"FAILED {row['failed']}"], columns)
    ms, floor = row["ms"], row["floor_ms"]
    numbers = [f"{value:.4f}" for value in (ms, row["p20"], row["p80"], floor)]
    rates = [f"{100 * floor / ms:.1f}", f"{row['bytes'] / ms / 1e6:.0f}"]
    if matmul:
        rates = [f"{1e14 * tflops(row) / matmul:.1f}", f"{tflops(row):.0f}"] if row.get("flops") else ["-", "-"]
    ratios = [f"{ms / floor:.2f}", *rates]
    against = f"{rival['ms'] / ms:.2f}" if rival and row["ours"] else "-"
    return format_cells([*names, *numbers, *ratios, against, f"{row['error']:.2f}", row["timing"]], columns)


def environment(commit: str | None = None) -> dict:
    """Where and with what the numbers were made. ``commit`` stands in for git where the copy has no history."""

    def output(*command):
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    changes = None if commit else output("git", "status", "--porcelain", "--untracked-files=no")
    facts = doctor.report()
    drivers = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": facts["torch"],
        "triton": facts["packages"]["triton"],
        "cuda": facts["cuda"],
        "driver": drivers.splitlines()[0] if drivers else None,
        "python": facts["python"],
        "commit": commit or output("git", "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def result_path(folder: Path, result: dict, partial: object) -> Path:
    """Where a result goes, one file a card and variant; a partial one doesn't replace a full one."""
    parts = [result["benchmark"], result.get("variant", ""), result["environment"]["card"], "partial" * bool(partial)]
    return folder / (re.sub(r"[^a-z0-9._]+", "-", " ".join(filter(None, parts)).lower()) + ".json")


def write(result: dict, path: Path) -> None:
    """Written aside and renamed: a run that is killed leaves the cases measured so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def run(cases: list[Case], result: dict, path: Path, sample: Callable[[Case, Implementation], Samples]) -> int:
    """Measure all cases into ``result`` and ``path``.

    Returns:
        The number of rows that failed.
    """
    matmul = result.get("matmul_flops_per_second")
    columns = FLOPS_COLUMNS if matmul else COLUMNS
    print(format_cells([name for name, _ in columns], columns), flush=True)
    for case in cases:
        torch._dynamo.reset()  # else one function compiled for many shapes reaches the limit and runs uncompiled
        rows = measure(case, result, sample)
        result["rows"] += rows
        write(result, path)
        rival = best_rival(rows, case.op, case.name)
        for row in rows:
            print(format_row(row, rival, matmul), flush=True)
        if case.flops:
            print(against_each(result["rows"], case.op, case.name), flush=True)
    result["complete"] = True
    write(result, path)
    return sum(row["failed"] is not None for row in result["rows"])


# distinct without colour vision: ours by colour, rivals by their markers alone
OURS = tuple(zip(("#d55e00", "#0072b2", "#009e73", "#cc79a7"), "oDsP"))
RIVALS = "x+^v<>*phd"
FARTHEST = 200  # times the floor; what takes longer is drawn there, since a floor of nanoseconds says nothing


def new_figure(width: float, height: float):
    """An empty figure, in inches. Needs matplotlib."""
    from matplotlib.figure import Figure  # not pyplot: draws with Agg, whatever the display

    return Figure(figsize=(width, height), layout="constrained")


def chart(result: dict, path: Path) -> None:
    """A line for each case: time as a multiple of the floor, ours and the rivals'; and our best in milliseconds."""
    rows = [row for row in result["rows"] if not row["failed"]]
    styles = {}
    for row in sorted(rows, key=lambda row: not row["ours"]):
        if row["impl"] not in styles:
            count = sum((style["zorder"] == 3) == row["ours"] for style in styles.values())
            color, marker = OURS[count % len(OURS)] if row["ours"] else ("dimgray", RIVALS[count % len(RIVALS)])
            styles[row["impl"]] = {"c": color, "marker": marker, "zorder": 3 if row["ours"] else 2}
    points, labels, values = {impl: ([], []) for impl in styles}, [], [1.0]
    y = 0
    for op in dict.fromkeys(row["op"] for row in rows):
        labels.append((y, op, "bold", ""))
        for case in dict.fromkeys(row["case"] for row in rows if row["op"] == op):
            y += 1
            bars = [row for row in rows if (row["op"], row["case"]) == (op, case)]
            own = min((row["ms"] for row in bars if row["ours"]), default=None)
            labels.append((y, case, "normal", "" if own is None else f"{own:.3g} ms"))
            for row in bars:
                values.append(min(row["ms"] / row["floor_ms"], FARTHEST))
                points[row["impl"]][0].append(values[-1])
                points[row["impl"]][1].append(y)
        y += 1.5
    figure = new_figure(9, 1.8 + 0.2 * y)
    axes = figure.subplots()
    for impl, (x, where) in points.items():
        axes.scatter(x, where, s=36, alpha=0.9, label=impl, **styles[impl])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    least, most = 0.93 * min(values), 1.15 * max(values)
    axes.set_xlim(least, most)
    ticks = [tick for tick in (0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, FARTHEST) if least <= tick <= most]
    axes.set_xticks(ticks, [f"{tick:g}" if tick < FARTHEST else f"≥ {FARTHEST}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([place for place, *_ in labels], [label for _, label, *_ in labels], fontsize=8)
    for label, (_, _, weight, _) in zip(axes.get_yticklabels(), labels):
        label.set_fontweight(weight)
    for place, _, _, best in labels:
        axes.text(1.01, place, best, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(color="#ddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylim(y - 0.5, -0.7)
    floor = "bytes that must move / copy bandwidth"
    if "matmul_flops_per_second" in result:
        floor += ", or operations / rate of a matrix product"
    axes.set_xlabel(f"time / floor ({floor}); on the right our best time", fontsize=9)
    figure.suptitle(title(result), fontsize=10)
    if styles:
        figure.legend(loc="outside lower center", ncols=min(len(styles), 6), frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def title(result: dict) -> str:
    where = result["environment"]
    line = ", ".join(filter(None, [result.get("variant"), where["card"]]))
    line += f", torch {where['torch']}, Triton {where['triton']}"
    if "copy_bandwidth" in result:
        line += f", copy {bandwidth(result)}"
    if matmul := result.get("matmul_flops_per_second"):
        line += f", matrix product {matmul / 1e12:.0f} TFLOP/s"
    return line


def save_bars(figure, names: list[str], label: str, result: dict, path: Path) -> None:
    """Names and finishes the one chart of a figure, whose horizontal bars are at 0, 1, 2, ... from the top."""
    (axes,) = figure.axes
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title(result), fontsize=10)
    figure.savefig(path, dpi=110)


def bandwidth(result: dict) -> str:
    return f"{result['copy_bandwidth'] / 1e12:.2f} TB/s"


def variant_of(parser: argparse.ArgumentParser, options: argparse.Namespace, names: list[str]) -> str:
    """Those of the options that aren't what they are by default."""
    values = ((name, getattr(options, name)) for name in names if getattr(options, name) != parser.get_default(name))
    return ", ".join(f"{name} {' '.join(v) if isinstance(v, list) else v}" for name, v in values)


def command_line(benchmark: str, doc: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share; ``doc`` is the script's docstring."""
    parser = argparse.ArgumentParser(prog=f"bench/{benchmark}.py", description=doc.partition("\n")[0])
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--commit", help="the commit measured, where the copy has no git history")
    return parser


def command_line_of_cases(benchmark: str, doc: str) -> argparse.ArgumentParser:
    """These, and those of benchmarks that are a list of cases."""
    parser = command_line(benchmark, doc)
    parser.add_argument("--quick", action="store_true", help="fewer replays")
    parser.add_argument("--only", metavar="SUBSTRING", default="", help='cases whose "op case" contains this')
    return parser


def lacks_gpu() -> bool:
    """Whether there is no GPU; says so then."""
    if torch.cuda.is_available():
        return False
    print("No CUDA device is visible: a benchmark needs a GPU. Nothing was measured or written.", file=sys.stderr)
    return True


def main(benchmark: str, doc: str, make_cases: Callable[[], list[Case]], argv: list[str] | None = None) -> int:
    """The command line of a benchmark without options of its own; ``doc`` is its docstring.

    Returns:
        0; 1 if one of our rows failed; 2 without a GPU or without a case.
    """
    options = command_line_of_cases(benchmark, doc).parse_args(argv)
    return 2 if lacks_gpu() else on_gpu(benchmark, make_cases, options)


def on_gpu(
    benchmark: str,
    make_cases: Callable[[], list[Case]],
    options: argparse.Namespace,
    partial: bool = False,
    sample: Callable[[Case, Implementation], Samples] | None = None,
    variant: str = "",
) -> int:
    """Measure, write and draw; ``partial`` where the cases aren't all that the full result has. ``sample`` stands in
    for :func:`sample_on_gpu`; ``variant`` says what is other than by default. Returns as ``main``."""
    began = time.perf_counter()
    torch._functorch.config.donated_buffer = False  # a compiled backward refuses retain_graph=True otherwise
    cases = [case for case in make_cases() if options.only in f"{case.op} {case.name}"]
    if not cases:
        print(f"--only {options.only}: no such case", file=sys.stderr)
        return 2
    with torch.cuda.stream(torch.cuda.Stream()):
        result = {
            "benchmark": benchmark,
            "variant": variant,
            "environment": environment(options.commit),
            "copy_bandwidth": copy_bandwidth(),
            **({"matmul_flops_per_second": matmul_flops_per_second()} if any(case.flops for case in cases) else {}),
            "complete": False,
            "rows": [],
        }
        torch.cuda.empty_cache()
        path = result_path(options.out, result, partial or options.quick or options.only)
        print(title(result), flush=True)
        replays = QUICK_REPLAYS if options.quick else REPLAYS

        def by_graph(case: Case, implementation: Implementation) -> Samples:
            return sample_on_gpu(case, implementation, replays)

        failed = run(cases, result, path, sample or by_graph)
    chart(result, path.with_suffix(".png"))
    print(f"copy bandwidth {bandwidth(result)}; {time.perf_counter() - began:.0f} s; written to {path}")
    if failed:
        print(f"{failed} rows FAILED", file=sys.stderr)
    return int(any(row["ours"] and row["failed"] for row in result["rows"]))
