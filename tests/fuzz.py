"""A campaign: every hypothesis test for a share of the time, with random examples, on all backends of this machine.

    python tests/fuzz.py MINUTES [--json FILE] [--seed SEED] [pytest's arguments, such as -n WORKERS tests/ops]

What fails is shrunk, printed and kept in .hypothesis, from where the next campaign takes it up first.
"""

from __future__ import annotations

import argparse
import functools
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


class TimeIsUp(pytest.skip.Exception):
    """Hypothesis lets what skips a test through, at once."""


class Share:
    """A test's share of the time, and what came of it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.examples = self.rejected = self.faults = 0

    def begin(self) -> None:
        if not self.faults and time.monotonic() > self.end:  # what fails is shrunk in peace
            raise TimeIsUp("its share of the time is up")

    def over(self, error: BaseException | None) -> None:
        from hypothesis.errors import StopTest, UnsatisfiedAssumption

        if error is None:
            self.examples += 1
        elif isinstance(error, (UnsatisfiedAssumption, StopTest)):  # StopTest: it drew too much
            self.rejected += 1
        else:
            self.faults += 1

    def counted(self, test):
        @functools.wraps(test)
        def one(*args, **kwargs):
            self.begin()
            error: BaseException | None = None
            try:
                return test(*args, **kwargs)
            except BaseException as e:
                error = e
                raise
            finally:
                self.over(error)

        return one

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """The same for state machines, of which each example makes one."""
        from hypothesis.stateful import RuleBasedStateMachine

        teardown = RuleBasedStateMachine.teardown

        def end(machine):
            error = sys.exc_info()[1]
            self.over(error)
            teardown(machine)
            if error is None:  # earlier hypothesis would miss what was drawn by then in another example
                self.begin()

        patch.setattr(RuleBasedStateMachine, "teardown", end)


def draws(item: pytest.Item) -> bool:
    """Whether a test draws examples."""
    return hasattr(item.obj, "hypothesis") or item.get_closest_marker("machine") is not None


@pytest.hookimpl(trylast=True)  # what -k leaves
def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if draws(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    config.seconds_each = float(os.environ["MOR_FUZZ"]) * 60 * workers / max(len(kept), 1)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    share, handle = Share(pyfuncitem.config.seconds_each), getattr(pyfuncitem.obj, "hypothesis", None)
    with pytest.MonkeyPatch.context() as patch:
        if handle is None:
            share.watch(patch)
        else:
            patch.setattr(handle, "inner_test", share.counted(handle.inner_test))
        try:
            return (yield)
        except TimeIsUp:
            return True
        finally:
            params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
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
