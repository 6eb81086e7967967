"""The measurement of errors, as far as it goes without a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import numerics, report
from bench.harness import Mismatch
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train import prepare

TINY = {**numerics.SMALL, "vocab_size": 64, "num_hidden_layers": 5, "num_recursions": 3}
ROUTERS = pytest.mark.parametrize("name", numerics.ROUTERS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command's result, all of its parts; and what it drew."""
    folder, figures = tmp_path_factory.mktemp("numerics"), []
    figure = pytest.importorskip("matplotlib.figure").Figure
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    prepare(folder / "text.txt", folder / "data", vocab_size=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "savefig", lambda self, path, **_: figures.append((path.name, self)))
        patch.setattr(numerics.torch.cuda, "is_available", lambda: False)
        arguments = ["--quick", "--data", str(folder / "data"), "--out", str(folder), "--commit", "0123456"]
        assert numerics.main(arguments) == 0
    result = json.loads((folder / "numerics-cpu-partial.json").read_text())
    return SimpleNamespace(folder=folder, figures=dict(figures), parts=result["parts"], result=result)


def test_every_part_is_measured(run):
    assert run.result["complete"] and list(run.parts) == ["ops", "model", "training"]
    assert set(run.figures) == {f"numerics-cpu-partial-{part}.png" for part in numerics.PARTS}
    rows = run.parts["ops"]["rows"]
    assert not any(row["failed"] for row in rows)
    kinds = {(row["op"], row["of"], row["axis"]) for row in rows}
    assert len(kinds) == 4 + 4 + 3 + 2 * 2 + 1 + 3 + 3 and {row["dtype"] for row in rows} == set(numerics.DTYPES)
    for op, of, axis in kinds:  # neither ours nor PyTorch's is wrong: a few roundings, 13 where d_q cancels
        for row in (row for row in rows if (row["op"], row["of"], row["axis"]) == (op, of, axis)):
            far = op == "rope" and row["n"] == 2**20 and not row["ours"]  # angles in fp32 are off by that much
            given = "given" in op
            least = 2e-2 if far else 5e-2 if given else 32 * torch.finfo(numerics.DTYPES[row["dtype"]]).eps
            assert row["rms"] <= min(row["max"] * 1.001, least), row
    price = {row["op"]: row["rms"] for row in rows if row["op"].startswith("decode") and row["ours"]}
    assert price["decode, fp8 cache, against what was given"] > 5 * price["decode, fp8 cache, against what was held"]


def test_models_are_compared_with_float64(run):
    rows = run.parts["model"]["rows"]
    assert {(row["model"], row["kv"], row["axis"]) for row in rows} == {
        (name, kv, axis) for name in numerics.ROUTERS for kv in ("recursion_wise", "shared") for axis in ("N", "Nr")
    }
    for row in rows + run.parts["training"]["model"]:
        low, high = (1e-8, 1e-5) if row["dtype"] == "fp32" else (1e-4, 5e-2)  # of a few layers
        assert low < row["replayed_rms"] < high and row["tokens"] >= 32 and 0 <= row["moved"] < 0.2
    assert {row["model"] for row in run.parts["training"]["model"]} == set(list(numerics.ROUTERS)[:2])


def test_runs_differ_in_precision_or_in_their_seed(run):
    rows = run.parts["training"]["rows"]
    assert [(row["precision"], row["seed"]) for row in rows] == numerics.RUNS
    for row in rows:
        assert [step for step, _ in row["validation"]] == [5, 10] and row["last"] == row["validation"][-1][1]
        assert row["late"] == row["training"][-1][1] < row["training"][0][1]  # of the last of ten steps
    pairs = numerics.differences(rows)
    assert len(pairs) == 4
    gaps = {name: abs(a["training"][0][1] - b["training"][0][1]) for name, (a, b) in pairs.items()}
    assert 0 < gaps["bf16 - fp32, seed 0"] < 2e-3 < gaps["seed 1 - seed 0, fp32"]  # the same weights and tokens
    assert numerics.differences([rows[0], {**rows[1], "failed": "why"}]) == {}


def test_tables_say_what_was_measured(run):
    lines = report.numerics_table("ops", run.parts["ops"])
    assert len({line.count("|") for line in lines}) == 1 and any(" | N 64 | eager | " in line for line in lines)
    row = {"op": "a", "of": "out", "axis": "N", "n": 1, "dtype": "bf16", "max": 0.5, "failed": None}
    found = {"eager": 0.02, "triton": 0.04, "SDPA": 0.16, "SDPA math": 0.08}
    rows = [{**row, "impl": impl, "ours": "SDPA" not in impl, "rms": rms} for impl, rms in found.items()]
    rows += [{**rows[0], "n": 4096}, {**rows[2], "n": 4096, "failed": "out of memory"}]
    lines = report.numerics_table("ops", {"rows": rows})
    assert lines[2:] == ["| a | out | bf16 | N 1 | triton | 4.0e-02 | 5.0e-01 | SDPA math | 8.0e-02 | 5.0e-01 | 0.50 |",
                         "| a | out | bf16 | N 4,096 | eager | 2.0e-02 | 5.0e-01 | - | - | - | - |"]  # fmt: skip
    lines = report.numerics_table("model", run.parts["model"])
    assert len(lines) == 2 + 6 * 2 * 2  # routers and keys; a length and a number of recursions; dtypes
    text = "\n".join(report.numerics_table("training", run.parts["training"]))
    assert "| bfloat16, seed 1 | " in text and "| bf16 - fp32, seed 0 | " in text and "expert-choice, threshold" in text


def test_a_part_replaces_itself_alone(run, monkeypatch):
    monkeypatch.setattr(numerics, "measure_model", lambda *_: [{"failed": "why", "ours": True}])
    monkeypatch.setattr(numerics, "chart", lambda *_: None)
    monkeypatch.setattr(numerics.torch.cuda, "is_available", lambda: False)
    assert numerics.main(["--quick", "--parts", "model", "--out", str(run.folder)]) == 1  # of ours one failed
    parts = json.loads((run.folder / "numerics-cpu-partial.json").read_text())["parts"]
    assert parts["ops"] == run.parts["ops"] and parts["model"]["rows"][0]["failed"] == "why"
    assert numerics.main(["--out", str(run.folder)]) == 2


def test_errors_are_relative_to_rows_and_lists():
    exact = torch.tensor([[3.0, 4.0], [0.03, 0.04]], dtype=torch.float64)
    found = numerics.errors(exact + torch.tensor([[0.0, 0.05], [0.0, 0.0]]), exact)
    assert found["max"] == pytest.approx(0.01) and found["rms"] == pytest.approx(0.01 / 2**0.5)
    assert numerics.errors(exact[0] + 0.5, exact[0])["max"] == pytest.approx(0.5 / 12.5**0.5)
    with pytest.raises(Mismatch, match="not finite"):
        numerics.errors(exact * torch.nan, exact)
    with pytest.raises(Mismatch, match="shape"):
        numerics.errors(exact[0], exact)


def test_what_a_backend_refuses_is_no_failure():
    def fail(error):
        raise error

    exact = {"out": torch.ones(2, dtype=torch.float64)}
    refused = RuntimeError("attention: backend='hopper' is not available: it computes in bfloat16")
    ours = {"hopper": lambda: fail(refused), "triton": lambda: fail(ValueError("why")), "eager": lambda: exact}
    problem = numerics.Problem("a", "N", 2, "fp32", exact, ours, {})
    rows = numerics.measured(problem)
    assert [(row["impl"], row["failed"]) for row in rows] == [("triton", "ValueError: why"), ("eager", None)]


@pytest.mark.parametrize("step", [1, 2])
def test_float64_in_blocks_is_what_autograd_computes(monkeypatch, step):
    monkeypatch.setattr(numerics, "AT_ONCE", 3 * 3 * 9 * 2)
    torch.manual_seed(0)
    positions = torch.arange(step - 1, 9, step)
    q, d_out = (torch.randn(len(positions), 3, 4, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(9, 1, 4, dtype=torch.float64) for _ in range(2))

    def call(q, k, v):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        mask = torch.arange(9) <= positions[:, None]
        scale = numerics.WIDTH**-0.5
        out = F.scaled_dot_product_attention(q, k.expand(3, -1, -1), v.expand(3, -1, -1), mask, scale=scale)
        return out.transpose(0, 1)

    want = numerics.differentiated(call, (q, k, v), d_out)
    for got, exact in zip(numerics.exact_attention(q, k, v, d_out, positions), want):
        torch.testing.assert_close(got[0], exact)
    x, weight, targets = torch.randn(9, 4, dtype=torch.float64), torch.randn(54, 4).double(), torch.arange(9)
    want = numerics.differentiated(
        lambda x, weight: F.cross_entropy(x @ weight.T, targets, reduction="sum"), (x, weight), torch.ones(()).double()
    )
    for got, exact in zip(numerics.exact_cross_entropy(x, weight, targets).values(), want):
        torch.testing.assert_close(got, exact)


@ROUTERS
def test_depths_are_replayed(name):
    router, mode = numerics.ROUTERS[name]
    torch.manual_seed(0)
    model = MoR(MoRConfig(**TINY, router=router, kv="shared")).double().eval()
    ids = torch.randint(64, (2, 12))
    with torch.no_grad():
        own = model(ids, mode=mode)
        with numerics.replayed(model, own.depths):
            again = model(ids, mode=mode)
        others = own.depths.flip(1)
        with numerics.replayed(model, others):
            replayed = model(ids, mode=mode)
        free = model(ids, mode=mode)
    assert torch.equal(again.logits, own.logits) and torch.equal(free.depths, own.depths)
    assert torch.equal(replayed.depths, others) and not torch.equal(others, own.depths)
    changed = (replayed.logits - own.logits).abs().amax(-1) > 1e-9
    assert changed[others != own.depths].all()
