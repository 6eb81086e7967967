"""What the harness does without a GPU: checks, counts, rows, files."""

import contextlib
import dataclasses
import json
import statistics
from types import SimpleNamespace

import pytest
import torch

from bench import harness
from bench.harness import Case, Implementation, Mismatch, Samples, Timing

ROW = {"case": "B2", "op": "double", "impl": "triton", "ours": True, "bytes": 3_000_000, "floor_ms": 0.001,
       "ms": 0.002, "p20": 0.0019, "p80": 0.0021, "timing": "graph", "error": 0.5, "failed": None}  # fmt: skip


def case(**functions):
    def check(inputs, outputs, ours):
        return harness.close("out", outputs, 2 * inputs.x.double(), 1e-6)

    def make(seed):
        return SimpleNamespace(x=torch.randn(5, generator=torch.Generator().manual_seed(seed)))

    implementations = tuple(
        Implementation(name, lambda s, function=function: lambda: function(s.x), ours=name == "ours")
        for name, function in functions.items()
    )
    return Case("double", "N5", 40, make, check, implementations)


def result():
    return {"environment": {}, "copy_bandwidth": 3e12, "complete": False, "rows": []}


def sampler(milliseconds):
    return lambda case, implementation: Samples([milliseconds[implementation.name]] * 3, "graph")


def test_enough_sets_to_leave_the_cache_but_not_too_many():
    l2 = 50 * 2**20
    assert harness.sets_needed(10**9, l2) == harness.MIN_SETS
    assert harness.sets_needed(2 * 2**20, l2) == 100
    assert harness.sets_needed(2 * 2**20 + 1, l2) * (2 * 2**20 + 1) >= 4 * l2
    assert harness.sets_needed(1, l2) == harness.MAX_SETS


def test_close_measures_and_refuses():
    want = torch.zeros(3, dtype=torch.float64)
    assert harness.close("t", torch.tensor([0.0, 0.5, 0.0]), want, 1.0) == 0.5
    for got in ([0.0, 1.5, 0.0], [0.0, float("nan"), 0.0], [0.0, 0.0]):
        with pytest.raises(Mismatch, match="t: "):
            harness.close("t", torch.tensor(got), want, 1.0)


def test_timing_is_a_median_between_percentiles():
    timing = Timing.of([float(ms) for ms in range(1, 100)], "graph")
    assert (timing.ms, timing.p20, timing.p80, timing.how) == (50.0, 20.0, 80.0, "graph")


def test_a_wrong_implementation_is_not_timed_and_the_run_goes_on(tmp_path, capsys):
    def broken(x):
        raise RuntimeError("no kernel")

    cases = [case(wrong=lambda x: 2 * x + 1, broken=broken, right=lambda x: x + x, ours=lambda x: 2 * x)]
    measured, path = result(), tmp_path / "new" / "double.json"
    failed = harness.run(cases, measured, path, sampler({"right": 0.2, "ours": 0.1}))
    wrong, broken, right, ours = measured["rows"]
    assert failed == 2
    assert wrong["failed"].startswith("Mismatch: out: the error is") and wrong["ms"] is None
    assert broken["failed"] == "RuntimeError: no kernel"
    assert right["failed"] is None and right["ms"] == 0.2 and right["error"] < 1
    assert ours["floor_ms"] == pytest.approx(40 / 3e12 * 1e3)
    assert json.loads(path.read_text()) == measured and measured["complete"]
    assert all(row.keys() == ROW.keys() for row in measured["rows"])
    printed = capsys.readouterr().out
    assert "FAILED Mismatch" in printed and " 2.00 " in printed.splitlines()[-1]  # twice as fast as the best rival


def test_where_operations_are_counted_the_floor_is_the_larger_one(tmp_path, capsys):
    few, many = (dataclasses.replace(case(right=lambda x: x + x, ours=lambda x: 2 * x), flops=f) for f in (2, 5_000))
    many = dataclasses.replace(many, name="N6")
    measured = result() | {"matmul_flops_per_second": 1e14}
    assert harness.run([few, many], measured, tmp_path / "double.json", sampler({"right": 3e-7, "ours": 2e-7})) == 0
    bandwidth_bound, matmul_bound = measured["rows"][1::2]
    assert bandwidth_bound["flops"] == 2 and bandwidth_bound["floor_ms"] == pytest.approx(40 / 3e12 * 1e3)
    assert matmul_bound["flops"] == 5_000 and matmul_bound["floor_ms"] == pytest.approx(5_000 / 1e14 * 1e3)
    header, *lines = capsys.readouterr().out.splitlines()
    for name, value in {"x floor": "4.00", "% matmul": "25.0", "TFLOP/s": "25", "x rival": "1.50"}.items():
        assert lines[4][: header.index(f" {name} ") + len(name) + 1].endswith(f" {value}")
    assert lines[5] == "  ours, times as fast as right 1.50"


def test_our_rows_are_compared_with_each_rival():
    rows = [ROW | {"impl": "a", "ours": False, "ms": 0.003}, ROW | {"impl": "b", "ours": False, "ms": 0.001},
            ROW | {"impl": "c", "ours": False, "failed": "why"}, ROW | {"impl": "d", "ours": False, "case": "B3"},
            ROW, ROW | {"impl": "auto", "ms": 0.001}]  # fmt: skip
    assert harness.against_each(rows, "double", "B2").splitlines() == [
        "  triton, times as fast as a 1.50, b 0.50",
        "  auto, times as fast as a 3.00, b 1.00",
    ]
    assert "no rival" in harness.against_each(rows[4:], "double", "B2")
    assert "ours was not" in harness.against_each(rows[:4], "double", "B2")


def on_a_gpu(monkeypatch, tmp_path, cases, **more):
    """The exit status where a GPU is, with all that needs one replaced."""
    monkeypatch.setattr(harness.torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(harness.torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(harness, "environment", lambda commit: {"card": "A Card", "torch": "2", "triton": "3"})
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 3e12)
    monkeypatch.setattr(harness, "matmul_flops_per_second", lambda: 7e14)
    monkeypatch.setattr(harness, "sample_on_gpu", lambda *_: Samples([0.1], "graph"))
    monkeypatch.setattr(harness, "chart", lambda result, path: None)
    options = harness.command_line_of_cases("double", "").parse_args(["--out", str(tmp_path)])
    return harness.on_gpu("double", lambda: cases, options, **more)


def test_models_have_the_papers_depths_or_layers_more():
    depths = {"135M": (30, 30, 32, 30), "360M": (32, 32, 32, 34), "730M": (26, 26, 26, 26), "1.7B": (24, 24, 26, 26)}
    for size, layers in depths.items():
        made = [harness.paper_config(size, num_recursions=recursions) for recursions in (1, 2, 3, 4)]
        assert tuple(config.num_hidden_layers for config in made) == layers


@pytest.mark.parametrize(("wrong", "status"), [("right", 0), ("ours", 1), (None, 0)])
def test_only_a_failure_of_ours_is_one_of_the_run(wrong, status, monkeypatch, tmp_path, capsys):
    functions = {"right": lambda x: x + x, "ours": lambda x: 2 * x} | ({wrong: lambda x: 3 * x} if wrong else {})
    assert on_a_gpu(monkeypatch, tmp_path, [case(**functions)]) == status
    assert ("1 rows FAILED" in capsys.readouterr().err) == bool(wrong)


def test_the_rate_of_a_matrix_product_is_measured_where_operations_are_counted(monkeypatch, tmp_path, capsys):
    plain = case(ours=lambda x: 2 * x)
    on_a_gpu(monkeypatch, tmp_path, [plain])
    on_a_gpu(monkeypatch, tmp_path, [dataclasses.replace(plain, flops=9)], partial=True)
    without, counted = (json.loads((tmp_path / f"double-a-card{x}.json").read_text()) for x in ("", "-partial"))
    assert list(without) == ["benchmark", "variant", "environment", "copy_bandwidth", "complete", "rows"]
    assert counted["matmul_flops_per_second"] == 7e14
    assert "700 TFLOP/s" in harness.title(counted) and "TFLOP" not in harness.title(without)


def test_implementations_take_turns_and_their_samples_are_pooled(tmp_path):
    taken = []

    def sample(case, implementation):
        taken.append(implementation.name)
        return Samples([float(len(taken))], "graph", error=0.1 * len(taken))

    functions = {name: lambda x: x + x for name in "abc"} | {"wrong": lambda x: 3 * x, "ours": lambda x: 2 * x}
    measured = result()
    harness.run([case(**functions)], measured, tmp_path / "double.json", sample)
    assert sorted(taken) == sorted(["a", "b", "c", "ours"] * harness.TURNS)
    turns = [taken[i : i + 4] for i in range(0, len(taken), 4)]
    assert all(sorted(turn) == ["a", "b", "c", "ours"] for turn in turns) and len(set(map(tuple, turns))) > 1
    for row in measured["rows"]:
        if row["impl"] != "wrong":
            when = [i + 1 for i, name in enumerate(taken) if name == row["impl"]]
            assert row["ms"] == statistics.median(when) and row["error"] == pytest.approx(0.1 * when[-1])


def test_an_implementation_that_fails_in_a_later_turn_has_failed(tmp_path):
    taken = []

    def sample(case, implementation):
        taken.append(implementation.name)
        if implementation.name == "right" and taken.count("right") == 2:
            raise RuntimeError("out of memory")
        return Samples([0.1], "graph")

    measured = result()
    cases = [case(right=lambda x: x + x, ours=lambda x: 2 * x)]
    assert harness.run(cases, measured, tmp_path / "double.json", sample) == 1
    right, ours = measured["rows"]
    assert right["failed"] == "RuntimeError: out of memory" and right["ms"] is None and ours["ms"] == 0.1
    assert taken.count("right") == 2 and taken.count("ours") == harness.TURNS


def test_cases_are_written_as_they_are_measured(tmp_path):
    path = tmp_path / "double.json"
    first, second = (dataclasses.replace(case(ours=lambda x: 2 * x), name=name) for name in ("N5", "N6"))

    def killed(case, implementation):
        if case is second:
            raise KeyboardInterrupt
        return Samples([0.2], "events")

    with pytest.raises(KeyboardInterrupt):
        harness.run([first, second], result(), path, killed)
    left = json.loads(path.read_text())
    assert not left["complete"] and [row["case"] for row in left["rows"]] == ["N5"]


def test_inputs_that_an_implementation_changes_are_checked_against_untouched_ones():
    assert harness.verify(case(ours=lambda x: x.mul_(2)), case(ours=lambda x: x.mul_(2)).implementations[0]) < 1


def test_best_rival_is_of_the_same_case_and_did_not_fail():
    rows = [
        ROW,
        ROW | {"impl": "eager", "ours": False, "ms": 0.004},
        ROW | {"impl": "compile", "ours": False, "ms": 0.003},
        ROW | {"impl": "other", "ours": False, "ms": 0.001, "case": "B3"},
        ROW | {"impl": "broken", "ours": False, "ms": None, "failed": "why"},
    ]
    assert harness.best_rival(rows, "double", "B2")["impl"] == "compile"
    assert harness.best_rival(rows[:1], "double", "B2") is None


def test_lines_are_aligned():
    header = harness.format_cells([name for name, _ in harness.COLUMNS])
    line = harness.format_row(ROW, ROW | {"ms": 0.005})
    for name, value in {
        "ms": "0.0020",
        "x floor": "2.00",
        "% floor": "50.0",
        "GB/s": "1500",
        "x rival": "2.50",
    }.items():
        assert line[: header.index(f" {name} ") + len(name) + 1].endswith(f" {value}")
    assert harness.format_row(ROW | {"ours": False}, ROW).split()[-3] == "-"
    assert harness.format_row(ROW, ROW, matmul=1e14).split()[-5:-3] == ["-", "-"]  # whose operations aren't counted


def test_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    environment = {"card": "A card", "torch": "2", "triton": "3"}
    rows = [ROW, ROW | {"impl": "eager", "ours": False}, ROW | {"case": "B4", "failed": "why", "ms": None}]
    for drawn, more in ((rows, {}), ([], {}), (rows, {"matmul_flops_per_second": 7e14})):
        harness.chart(result() | more | {"environment": environment, "rows": drawn}, tmp_path / "chart.png")
        assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_chart_shows_times_of_the_floor(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        pytest.importorskip("matplotlib.figure").Figure, "savefig", lambda f, *_, **__: figures.append(f)
    )
    rows = [ROW, ROW | {"impl": "eager", "ours": False, "ms": 0.005}, ROW | {"case": "B4", "ms": 7.0},
            ROW | {"op": "other", "ms": 0.004}]  # fmt: skip
    harness.chart(result() | {"environment": {"card": "A", "torch": "2", "triton": "3"}, "rows": rows}, tmp_path / "c")
    (axes,) = figures[0].axes
    names = {place: label.get_text() for place, label in zip(axes.get_yticks(), axes.get_yticklabels())}
    shown = {(points.get_label(), names[y]): x for points in axes.collections for x, y in points.get_offsets().tolist()}
    op, floor = ROW["op"], ROW["floor_ms"]
    case = ROW["case"]
    assert op in names.values() and "other" in names.values()
    assert shown[ROW["impl"], "B4"] == harness.FARTHEST < 7.0 / floor
    assert shown["eager", case] == pytest.approx(0.005 / floor)
    assert [text.get_text() for text in axes.texts if text.get_text()] == [f"{ROW['ms']:.3g} ms", "7 ms", "0.004 ms"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert harness.main("double", "Twice.", lambda: [case(ours=lambda x: 2 * x)], ["--out", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
