"""A campaign: every hypothesis test for a share of the time, with random examples, on all backends of this machine.

    python tests/fuzz.py MINUTES [--json FILE] [--seed SEED] [pytest's arguments, such as -n WORKERS tests/ops]

What fails is shrunk, printed and kept in .hypothesis, from where the next campaign takes it up first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)

import pytest  # noqa: E402

COUNTS = ("tests", "examples", "rejected", "faults")


class Share:
    """A test's share of the time, and what came of it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.examples = self.rejected = 0
        self.fault = False

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def watch(self, patch: pytest.MonkeyPatch, key: bytes) -> None:
        """Between two examples the engine ends as if there were enough of them: what is raised within one would be a
        result of the test's, which has to draw the same each time."""
        from hypothesis.internal.conjecture.data import Status
        from hypothesis.internal.conjecture.engine import ConjectureRunner, ExitReason, RunIsComplete

        make, test = ConjectureRunner.__init__, ConjectureRunner.test_function

        def kept(runner, *args, **options):
            make(runner, *args, **{**options, "database_key": key})  # without, nothing is kept where a seed is given

        def counted(runner, data):
            complete = None
            try:
                test(runner, data)
            except RunIsComplete as e:
                complete = e
            if not self.fault:  # what fails is shrunk in peace, and what that takes isn't counted
                self.examples += data.status is Status.VALID
                self.rejected += data.status < Status.VALID
                self.fault = data.status is Status.INTERESTING
            if complete is not None:
                raise complete
            if self.is_over and not self.fault:
                runner.exit_with(ExitReason.finished)

        patch.setattr(ConjectureRunner, "__init__", kept)
        patch.setattr(ConjectureRunner, "test_function", counted)


def draws(item: pytest.Item) -> bool:
    """Whether a test draws examples."""
    return hasattr(item.obj, "hypothesis") or item.get_closest_marker("machine") is not None


def parameters(item: pytest.Item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def weight(item: pytest.Item) -> int:
    """Shares of the time: for the Hopper kernels nearly all of it goes to Triton, seconds for each combination, and
    engines come with their graphs."""
    return 6 if parameters(item).get("backend") == "hopper" or item.path.name == "test_requests.py" else 1


@pytest.hookimpl(trylast=True)  # what -k leaves
def pytest_collection_modifyitems(config, items):
    kept = sorted((item for item in items if draws(item)), key=weight, reverse=True)  # the longest first
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    config.seconds = float(os.environ["MOR_FUZZ"]) * 60
    config.seconds_each = config.seconds * workers / max(sum(map(weight, kept)), 1)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    from hypothesis.errors import Unsatisfiable

    config = pyfuncitem.config
    share = Share(min(config.seconds, weight(pyfuncitem) * config.seconds_each))
    with pytest.MonkeyPatch.context() as patch:
        share.watch(patch, pyfuncitem.nodeid.encode())
        try:
            return (yield)
        except Unsatisfiable:
            if share.is_over:  # all that there was time for was rejected, as the table tells
                return True
            raise
        finally:
            params = parameters(pyfuncitem)
            part = pyfuncitem.path.relative_to(ROOT / "tests").with_suffix("")
            found = {"part": f"{part.parent}/{part.name.removeprefix('test_')}"}
            found["backend"] = f"{params['device']} {params['backend']}" if "backend" in params else "-"
            found |= {"examples": share.examples, "rejected": share.rejected}
            pyfuncitem.user_properties.append(("fuzz", found))


def counted(reports) -> list[dict]:
    rows: dict[tuple, dict] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for report in reports:
        for found in (value for name, value in report.user_properties if name == "fuzz"):
            row = rows[found["part"], found["backend"]]
            row["tests"] += 1
            row["faults"] += report.failed
            for name in ("examples", "rejected"):
                row[name] += found[name]
    return [{"part": part, "backend": backend, **row} for (part, backend), row in sorted(rows.items())]


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):  # what a worker of pytest-xdist has done is a part
        return
    rows = counted(r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when == "call")
    total = {name: sum(row[name] for row in rows) for name in COUNTS}
    head = {name: name for name in ("part", "backend", *COUNTS)}
    for row in [head, *rows, {"part": "all", "backend": "", **total}]:
        numbers = "".join(f"{row[name]:>10}" for name in COUNTS)
        terminalreporter.write_line(f"{row['part']:<30}{row['backend']:<14}{numbers}")
    seed, minutes = config.getoption("--hypothesis-seed"), float(os.environ["MOR_FUZZ"])
    terminalreporter.write_line(f"seed {seed}")
    if path := os.environ.get("MOR_FUZZ_JSON"):
        found = {"minutes": minutes, "seed": seed, "rows": rows, **total}
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options, rest = parser.parse_known_args()
    os.environ["MOR_FUZZ"] = str(options.minutes)
    if options.json:
        os.environ["MOR_FUZZ_JSON"] = str(Path(options.json).resolve())
    os.chdir(ROOT)
    return pytest.main(["-q", "-p", "tests.fuzz", f"--hypothesis-seed={options.seed}", *rest])


if __name__ == "__main__":
    sys.exit(main())
