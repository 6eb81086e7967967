"""Write the tables of README.md and docs/speed.md, and the charts, from the JSON in bench/results.

python bench/report.py           # writes
python bench/report.py --check   # exits with 1 if a page isn't what it would write
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import decode, numerics, scaling, serve
from bench.harness import RESULTS, ROOT, best_rival, chart, tflops, title

PAGES = (ROOT / "README.md", ROOT / "docs" / "speed.md")
SECTION = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.S)
# columns of rivals, and what is in the names of their rows
FAMILIES = {"FlexAttention": "flex", "cuDNN": "cudnn", "FA2": "FA2", "FA4": "fa4"}
NONE = "No result has been recorded yet."
HEADER = ("operator", "case", "ours, ms", "floor, ms", "x floor", "best eager, ms", "compiled, ms", "faster by")

# README.md's table: what a line says, and where it stands (benchmark, variant, operator or model, case)
CARD = "NVIDIA H200"
SUMMARY = (
    ("attention of kept tokens over all keys", "attn_flops", "", "subset forward", "B32 H15/5 d64 N2048 k1365"),
    ("its backward", "attn_flops", "", "subset backward", "B32 H15/5 d64 N2048 k1365"),
    ("attention of kept tokens over all keys", "attn_flops", "", "subset forward", "B4 H16/8 d128 N8192 k4096"),
    ("its backward", "attn_flops", "", "subset backward", "B4 H16/8 d128 N8192 k4096"),
    ("router, top-k and gather", "routing", "", "route", "B32 N2048 D960 k1365"),
    ("their backward", "routing", "", "route backward", "B32 N2048 D960 k1365"),
    ("scatter-back", "routing", "", "scatter_back", "B32 N2048 D960 k1365"),
    ("SwiGLU and its projection, both ways", "layer", "", "swiglu_linear fwd+bwd", "n32768 F2560 D960"),
    ("attention over pages while decoding", "kv", "", "decode", "B128 mean 2048, page 16"),
    ("training step, 360M", "train", "", "train step", "mor-3"),
    ("training step, 1.7B", "train", "size 1.7B", "train step", "mor-3"),
    ("decoding, 360M", "decode", "", "mor-3", "32 sequences"),
    ("decoding, 360M", "decode", "", "mor-3", "same bytes"),
    ("decoding, 360M", "decode", "", "vanilla-32", "32 sequences"),
)
RIVALS = {"fa4": "FlashAttention-4", "compile": "`torch.compile`", "plain": "plain PyTorch, compiled"}


def results(benchmark: str, folder: Path) -> dict[Path, dict]:
    """The full results, one a card; quick and filtered runs don't count."""
    paths = [path for path in sorted(folder.glob(f"{benchmark}-*.json")) if not path.stem.endswith("-partial")]
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def cases_of(result: dict) -> Iterator[tuple[str, str, list[dict], dict | None]]:
    """Operator, case, its rows, and the fastest of our kernels among them; "default" is one of these once more."""
    rows = result["rows"]
    for op, case in dict.fromkeys((row["op"], row["case"]) for row in rows):
        group = [row for row in rows if (row["op"], row["case"]) == (op, case)]
        ours = [row for row in group if row["ours"] and row["impl"] != "default"]
        yield op, case, group, min(ours, key=lambda row: row["ms"] or math.inf, default=None)


def markdown(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *lines)]


def table(result: dict, library: str | None = None) -> list[str]:
    """A Markdown table with a line for each (operator, case); ``library``, a rival, has a column of its own."""
    lines = []
    for op, case, group, own in cases_of(result):
        eager = best_rival([row for row in group if row["impl"] not in ("compile", library)], op, case)
        compiled = best_rival([row for row in group if row["impl"] == "compile"], op, case)
        shown = [eager, compiled]
        if library:
            shown.append(next((row for row in group if row["impl"] == library), None))
        times = f"{own['ms'] / own['floor_ms']:.2f}" if own and not own["failed"] else "-"
        floor = f"{group[0]['floor_ms']:.3g}"
        lines.append((op, case, _own(own), floor, times, *map(_ms, shown), _faster(own, best_rival(group, op, case))))
    return markdown((*HEADER[:-1], *([f"{library}, ms"] if library else []), HEADER[-1]), lines)


def flops_table(result: dict) -> list[str]:
    """The same where operations are counted: TFLOP/s of our kernels, of what is called by default, and of rivals. The
    share of the matrix product's, and how much faster than rivals, are the better kernel's."""
    lines = []
    for op, case, group, own in cases_of(result):
        triton, hopper, default = (
            next((row for row in group if row["impl"] == name), None) for name in ("triton", "hopper", "default")
        )
        rivals = {
            family: [row for row in group if part in row["impl"] and "+" not in row["impl"]]  # + mask is another matter
            for family, part in FAMILIES.items()
        }
        best = {family: best_rival(rows, op, case) for family, rows in rivals.items()}
        done = own and not own["failed"]
        share = f"{1e14 * tflops(own) / result['matmul_flops_per_second']:.0f}" if done else "-"
        shown = [_tflops(best[family] or next(iter(rows), None)) for family, rows in rivals.items()]
        against = [_faster(own, rival) for rival in (best["FlexAttention"], best_rival(group, op, case))]
        lines.append((op, case, _tflops(triton), _tflops(hopper), share, _tflops(default), *shown, *against))
    header = ("operator", "case", "triton, TFLOP/s", "hopper", "% of matmul", "default", *FAMILIES, "x Flex", "x best")
    return markdown(header, lines)


def bytes_table(result: dict) -> list[str]:
    """The same where a library is among the rivals, with the share of the copy's bandwidth that ours reaches."""
    lines = []
    for op, case, group, own in cases_of(result):
        best = {
            name: best_rival([row for row in group if name in row["impl"]], op, case)
            for name in ("eager", "compile", "FlashInfer")
        }
        rate = share = "-"
        if own and not own["failed"]:
            rate = f"{own['bytes'] / own['ms'] / 1e6:.0f}"
            share = f"{100 * own['floor_ms'] / own['ms']:.0f}"
        rival = _faster(own, best_rival(group, op, case))
        shown = [_ms(best[name]) for name in best]
        lines.append((op, case, _own(own), f"{group[0]['floor_ms']:.3g}", rate, share, *shown, rival))
    header = ("operator", "case", "ours, ms", "floor, ms", "GB/s", "% of copy", "eager, ms", "compiled, ms",
              "FlashInfer, ms", "x best")  # fmt: skip
    return markdown(header, lines)


def train_table(result: dict) -> list[str]:
    """Whole training steps, and what their kernels are for. A model's time and operations are both shown relative to
    our own vanilla's: skipping tokens pays off fully where the first is at most the second."""
    lines, kinds = [], []
    groups = list(cases_of(result))
    vanilla = next((own for _, case, _, own in groups if case == "vanilla" and own and not own["failed"]), None)
    for op, case, group, own in groups:
        plain = next((row for row in group if not row["ours"]), None)
        done = own if own and not own["failed"] else None
        rival = best_rival(group, op, case)
        facts = [
            f"{done['tokens'] / done['ms'] * 1e3:,.0f}", f"{tflops(done):.0f}",
            f"{1e14 * tflops(done) / result['matmul_flops_per_second']:.1f}",
        ] if done else ["-"] * 3  # fmt: skip
        memory = f"{done['peak_bytes'] / rival['peak_bytes']:.2f}" if done and rival else "-"
        relative = [f"{done[key] / vanilla[key]:.3f}" if done and vanilla else "-" for key in ("ms", "flops")]
        parameters = next((f"{row['parameters'] / 1e6:.0f}" for row in (done, rival) if row), "-")
        lines.append((case, parameters, *(_if_done(row, "ms", 1) for row in (plain, own)), *facts,
                      *(_if_done(row, "peak_bytes", 2**30) for row in (plain, own)), _faster(done, rival), memory,
                      *relative))  # fmt: skip
        if plain:
            kinds += [(case, row) for row in (plain, own) if row and not row["failed"]]
    header = ("model", "parameters, M", "plain, ms", "ours, ms", "tokens/s", "TFLOP/s", "% of matmul", "plain, GiB",
              "ours, GiB", "x plain", "memory / plain", "time / vanilla", "FLOPs / vanilla")  # fmt: skip
    return markdown(header, lines) + (["", "Where the time goes:", "", *_kinds_table(kinds)] if kinds else [])


def scaling_table(result: dict) -> list[str]:
    """Training on several GPUs: all their tokens a second, and what share that is of as many times one GPU's."""
    lines = []
    for row in result["rows"]:
        speed = "failed" if row["failed"] else f"{row['tokens_per_second']:,.0f}"
        share = f"{100 * row['efficiency']:.1f}" if "efficiency" in row else "-"
        parallel = row["parallel"] if row["gpus"] > 1 else "-"
        lines.append((row["case"], str(row["gpus"]), parallel, speed, share))
    return markdown(("model", "GPUs", "parallel", "tokens/s", "% of linear"), lines)


def decode_table(result: dict) -> list[str]:
    """Decoding: a line for each case and model, as the benchmark prints it, case by case."""
    lines = [tuple(decode.cells(row)) for rows in decode.by_case(result["rows"]).values() for row in rows]
    return markdown(tuple(name for name, _ in decode.COLUMNS), lines)


def serve_table(result: dict) -> list[str]:
    """Ways to the engine: tokens a second, and what share that is of the engine's own."""
    lines, alone = [], None
    for row in result["rows"]:
        alone = row if row["way"] == "engine" else alone
        speed = "failed" if row["failed"] else f"{row['tokens_per_second']:,.0f}"
        done = alone and not alone["failed"] and not row["failed"]
        share = f"{100 * row['tokens_per_second'] / alone['tokens_per_second']:.0f}" if done else "-"
        lines.append((row["case"], row["way"], speed, share))
    return markdown(("engine", "way", "tokens/s", "% of the engine's"), lines)


def summary(folder: Path) -> str:
    """README.md's table: what a reader decides by, ours beside the best rival of the same run."""
    found = {}
    for benchmark in dict.fromkeys(benchmark for _, benchmark, *_ in SUMMARY):
        for result in results(benchmark, folder).values():
            if result["environment"]["card"] == CARD:
                found[benchmark, result.get("variant") or ""] = result
    lines = []
    for what, benchmark, variant, name, case in SUMMARY:
        if result := found.get((benchmark, variant)):
            cells = _decoding if benchmark == "decode" else _beside_best_rival
            lines.append((what, *cells(result, name, case)))
    if not lines:
        return f"{NONE}\n"
    where = "; ".join(dict.fromkeys(title({"environment": result["environment"]}) for result in found.values()))
    return "\n".join([f"{where}:", "", *markdown(("", "case", "ours", "best rival", "times as fast"), lines), ""])


def _beside_best_rival(result: dict, op: str, case: str) -> tuple[str, ...]:
    own = next(own for *key, _, own in cases_of(result) if key == [op, case])
    rival = best_rival(result["rows"], op, case)
    name = RIVALS.get(rival["impl"], rival["impl"]) if rival else None
    return case, _figures(own), f"{name}: {_figures(rival)}" if name else "-", _faster(own, rival)


def _decoding(result: dict, model: str, case: str) -> tuple[str, ...]:
    """A model beside the vanilla one of its depth, and that one beside transformers."""
    rows = {row["model"]: row for row in result["rows"] if row["case"] == case}
    own, vanilla = rows[model], rows.get(rows[model]["vanilla"])
    rivals = [row for name, row in rows.items() if name.startswith("transformers")] if own is vanilla else [vanilla]
    done = [row for row in rivals if row and not row["failed"]]
    rival = max(done, key=lambda row: row["tokens_per_second"], default=None)
    shown, speed = f"{model}, {case}", "failed" if own["failed"] else _speed(own)
    if own["failed"] or not rival:
        return shown, speed, "-", "-"
    times = own["tokens_per_second"] / rival["tokens_per_second"]
    return shown, speed, f"{rival['model']}: {_speed(rival)}", f"{times:.2f}"


def _speed(row: dict) -> str:
    return f"{row['tokens_per_second']:,.0f} tokens/s"


def _figures(row: dict | None) -> str:
    """A step's time and memory; of an operator the rate of its operations where these are counted, or the time."""
    if row is None or row["failed"]:
        return "failed" if row else "-"
    if "peak_bytes" in row:
        return f"{row['ms']:.1f} ms, {row['peak_bytes'] / 2**30:.1f} GiB"
    return f"{tflops(row):.0f} TFLOP/s" if "flops" in row else f"{row['ms']:.3g} ms"


def numerics_table(part: str, found: dict) -> list[str]:
    """A part of bench/numerics.py: ``found`` of it, as tables."""
    return {"ops": _ops_errors, "model": _model_errors, "training": _training_differences}[part](found)


def _ops_errors(found: dict) -> list[str]:
    """Of each dtype at the first and the last size: our backend with the largest error, beside PyTorch's smallest."""
    lines = []
    for op, of, axis, dtype in dict.fromkeys((r["op"], r["of"], r["axis"], r["dtype"]) for r in found["rows"]):
        group = [row for row in found["rows"] if (row["op"], row["of"], row["axis"], row["dtype"]) ==
                 (op, of, axis, dtype)]  # fmt: skip
        sizes = sorted({row["n"] for row in group})
        for n in dict.fromkeys((sizes[0], sizes[-1])):
            own, plain = ([row for row in group if row["n"] == n and row["ours"] is ours and not row["failed"]]
                          for ours in (True, False))  # fmt: skip
            worst = max(own, key=lambda row: row["rms"], default=None)
            rival = min(plain, key=lambda row: row["rms"], default=None)
            shown = [f"{row[name]:.1e}" if row else "-" for row in (worst, rival) for name in ("rms", "max")]
            ratio = f"{worst['rms'] / rival['rms']:.2f}" if worst and rival and rival["rms"] else "-"
            impls = [row["impl"] if row else "-" for row in (worst, rival)]
            lines.append((op, of, dtype, f"{axis} {n:,}", impls[0], *shown[:2], impls[1], *shown[2:], ratio))
    header = ("operator", "of", "dtype", "size", "ours, the worst", "rms", "max", "PyTorch's, the best", "rms", "max",
              "ours / PyTorch's")  # fmt: skip
    return markdown(header, lines)


def _model_errors(found: dict) -> list[str]:
    """The first and the last size of each model: shares of tokens with another depth, and errors of the logits."""
    lines = []
    for model, kv, axis in dict.fromkeys((row["model"], row["kv"], row["axis"]) for row in found["rows"]):
        group = [row for row in found["rows"] if (row["model"], row["kv"], row["axis"]) == (model, kv, axis)]
        sizes = sorted({row["n"] for row in group})
        for n in dict.fromkeys((sizes[0], sizes[-1])):
            for row in (row for row in group if row["n"] == n):
                lines.append((model, kv, f"{axis} {n:,}", row["dtype"], row["impl"], f"{100 * row['moved']:.2f}",
                              *(f"{row[name]:.1e}" for name in ("rms", "replayed_rms", "replayed_max"))))  # fmt: skip
    header = ("router", "keys and values", "size", "dtype", "computed by", "tokens of another depth, %",
              "logits of the others, rms", "logits by float64's depths, rms", "max")  # fmt: skip
    return markdown(header, lines)


def _training_differences(found: dict) -> list[str]:
    """Losses of the runs, what they differ by, and the trained model's errors."""
    lines = []
    for row in found["rows"]:
        losses = ["failed"] * 2 if row["failed"] else [f"{row[name]:.4f}" for name in ("late", "last")]
        lines.append((f"{row['precision']}, seed {row['seed']}", *losses))
    for name, (a, b) in numerics.differences(found["rows"]).items():
        lines.append((name, *(f"{a[of] - b[of]:+.4f}" for of in ("late", "last"))))
    share = f"{100 * numerics.LATE:.0f}"
    header = ("run", f"training loss, mean of the last {share} % of steps", "validation loss at the end")
    tables = markdown(header, lines)
    if found["model"]:
        tables += ["", "The fp32 model of seed 0 on the tokens held out from it:", "", *_model_errors(
            {"rows": found["model"]})]  # fmt: skip
    return tables


def _kinds_table(rows: list[tuple[str, dict]]) -> list[str]:
    """Milliseconds of a profiled step by what kernels are for, what takes most of all first."""
    total = Counter()
    for _, row in rows:
        total.update(row["by_kind"])
    kinds = [kind for kind, _ in total.most_common()]
    lines = []
    for case, row in rows:
        spent = [row["by_kind"].get(kind, 0) for kind in kinds]
        lines.append((case, "ours" if row["ours"] else row["impl"], *(f"{ms:.1f}" for ms in (*spent, sum(spent)))))
    return markdown(("model", "", *(f"{kind}, ms" for kind in kinds), "all, ms"), lines)


def _if_done(row: dict | None, key: str, unit: float) -> str:
    if row is None:
        return "-"
    return "failed" if row["failed"] else f"{row[key] / unit:.1f}"


def _own(row: dict | None) -> str:
    """The milliseconds of our faster kernel, and which one that is, if it isn't Triton's."""
    return _ms(row) + (f" ({row['impl']})" if row and row["impl"] != "triton" else "")


def _tflops(row: dict | None) -> str:
    if row is None:
        return "-"
    return "failed" if row["failed"] else f"{tflops(row):.0f}"


def _faster(own: dict | None, rival: dict | None) -> str:
    return f"{rival['ms'] / own['ms']:.2f}" if own and rival and not own["failed"] else "-"


def _ms(row: dict | None) -> str:
    if row is None:
        return "-"
    return "failed" if row["failed"] else f"{row['ms']:.3g}"


TABLES = {"attn_flops": flops_table, "kv": bytes_table, "train": train_table, "scaling": scaling_table,
          "decode": decode_table, "serve": serve_table, "layer": functools.partial(table, library="Liger")}  # fmt: skip
CHARTS = {"decode": decode.chart, "scaling": scaling.chart, "serve": serve.chart}


def section(benchmark: str, folder: Path = RESULTS) -> str:
    """What stands between the markers."""
    if benchmark == "summary":
        return summary(folder)
    parts = []
    for path, result in results(benchmark, folder).items():
        where = result["environment"]
        as_lines = TABLES.get(benchmark, table)
        unfinished = "" if result["complete"] else " The run was not finished."
        made = f"driver {where['driver']}, CUDA {where['cuda']}, commit {commit_of(where)}, {where['date'][:10]}"
        parts.append(
            f"{title(result)}; {made}."
            f"{unfinished} [Chart](../bench/results/{path.stem}.png).\n\n" + "\n".join(as_lines(result)) + "\n"
        )
    return "\n".join(parts) or f"{NONE}\n"


def commit_of(where: dict) -> str:
    return (where["commit"] or "unknown")[:10] + (" with changes" if where["dirty"] else "")


def rendered(text: str, folder: Path = RESULTS) -> str:
    """``text`` with every benchmark's section written anew."""
    return SECTION.sub(lambda found: found[1] + section(found[2], folder) + found[3], text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/report.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args(argv)
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    old = [page for page, text in texts.items() if rendered(text) != text]
    if options.check:
        for page in old:
            print(f"{page.name} is out of date: run python bench/report.py", file=sys.stderr)
        return int(bool(old))
    for page in old:
        page.write_text(rendered(texts[page]), encoding="utf-8")
    for benchmark in (found[2] for text in texts.values() for found in SECTION.finditer(text)):
        for path, result in results(benchmark, RESULTS).items():
            CHARTS.get(benchmark, chart)(result, path.with_suffix(".png"))
            print(f"{path.stem}: {len(result['rows'])} rows")
    for path, result in results("numerics", RESULTS).items():  # whose tables are made when docs/numerics.md is built
        numerics.chart(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
