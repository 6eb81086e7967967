"""Write the tables of README.md, and the charts, from the JSON in bench/results.

python bench/report.py           # writes
python bench/report.py --check   # exits with 1 if README.md isn't what it would write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import RESULTS, ROOT, bandwidth, best_rival, chart, title

README = ROOT / "README.md"
SECTION = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.S)
HEADER = ("operator", "case", "ours, ms", "floor, ms", "x floor", "best eager, ms", "compiled, ms", "faster by")


def results(benchmark: str, folder: Path) -> dict[Path, dict]:
    """The full results, one a card; quick and filtered runs don't count."""
    paths = [path for path in sorted(folder.glob(f"{benchmark}-*.json")) if not path.stem.endswith("-partial")]
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def table(result: dict) -> list[str]:
    """A Markdown table with a line for each (operator, case)."""
    lines = [HEADER, ("---",) * len(HEADER)]
    rows = result["rows"]
    for op, case in dict.fromkeys((row["op"], row["case"]) for row in rows):
        group = [row for row in rows if (row["op"], row["case"]) == (op, case)]
        own = next((row for row in group if row["ours"]), None)
        eager = best_rival([row for row in group if row["impl"] != "compile"], op, case)
        compiled = best_rival([row for row in group if row["impl"] == "compile"], op, case)
        rival = best_rival(group, op, case)
        times, faster = "-", "-"
        if own and not own["failed"]:
            times = f"{own['ms'] / own['floor_ms']:.2f}"
            faster = f"{rival['ms'] / own['ms']:.2f}" if rival else "-"
        note = f" ({own['impl']})" if own and own["impl"] != "triton" else ""
        floor = f"{group[0]['floor_ms']:.3g}"
        lines.append((op, case, _ms(own) + note, floor, times, _ms(eager), _ms(compiled), faster))
    return [f"| {' | '.join(line)} |" for line in lines]


def _ms(row: dict | None) -> str:
    if row is None:
        return "-"
    return "failed" if row["failed"] else f"{row['ms']:.3g}"


def section(benchmark: str, folder: Path = RESULTS) -> str:
    """What stands between the markers."""
    parts = []
    for path, result in results(benchmark, folder).items():
        where = result["environment"]
        commit = (where["commit"] or "unknown")[:10] + (" with changes" if where["dirty"] else "")
        unfinished = "" if result["complete"] else " The run was not finished."
        parts.append(
            f"{title(result)}; driver {where['driver']}, CUDA {where['cuda']}, commit {commit}, {where['date'][:10]}."
            f"{unfinished} [Chart](bench/results/{path.stem}.png).\n\n" + "\n".join(table(result)) + "\n"
        )
    return "\n".join(parts) or "No result has been recorded yet.\n"


def rendered(text: str, folder: Path = RESULTS) -> str:
    """``text`` with every benchmark's section written anew."""
    return SECTION.sub(lambda found: found[1] + section(found[2], folder) + found[3], text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/report.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if README.md is out of date")
    options = parser.parse_args(argv)
    text = README.read_text(encoding="utf-8")
    fresh = rendered(text)
    if options.check:
        if fresh != text:
            print("README.md is out of date: run python bench/report.py", file=sys.stderr)
        return int(fresh != text)
    README.write_text(fresh, encoding="utf-8")
    for benchmark in (found[2] for found in SECTION.finditer(text)):
        for path, result in results(benchmark, RESULTS).items():
            chart(result, path.with_suffix(".png"))
            print(f"{path.stem}: {len(result['rows'])} rows, copy {bandwidth(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
