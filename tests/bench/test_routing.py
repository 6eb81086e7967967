"""The routing benchmark on tiny shapes: every implementation passes its check, and planted faults don't."""

import functools

import pytest
import torch

from bench import harness, routing
from bench.harness import Mismatch
from tests.bench import checks

SHAPES = ((2, 24, 16, 9), (1, 15, 8, 15))
TINY = {"route": SHAPES, "scatter": SHAPES, "selection": ((2, 24, 9),), "pack": (3, 11, 3), "aux": (2, 24, 9)}
CASES = routing.make_cases("cpu", functools.partial(torch.compile, backend="eager", fullgraph=True), **TINY)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name}")
def test_every_implementation_passes(case):
    checks.every_implementation_passes(case)


def test_inputs_are_the_same_for_one_seed_and_differ_between_seeds():
    for case in CASES:
        first, again, other = (vars(case.make(seed)) for seed in (0, 0, 1))
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name])
        assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_the_default_cases_are_those_of_the_targets():
    cases = routing.make_cases("cpu", lambda function: function)
    names = [(case.op, case.name) for case in cases]
    assert len(set(names)) == len(names) and ("route", "B1 N131072 D2048 k43690") in names
    moved = dict(zip(names, (case.nbytes for case in cases)))
    b, n, d, k = 32, 2048, 960, 1365
    shape = f"B{b} N{n} D{d} k{k}"
    assert moved["route", shape] == pytest.approx(2 * b * (n + k) * d, rel=0.01)
    assert moved["route backward", shape] == pytest.approx(2 * b * (2 * n + k) * d, rel=0.01)
    assert moved["scatter_back", shape] == pytest.approx(2 * b * (2 * n + k) * d, rel=0.01)
    assert moved["scatter bwd block", shape] == pytest.approx(2 * b * 3 * k * d, rel=0.01)
    assert moved["scatter bwd delta", shape] == pytest.approx(2 * b * (2 * n + 3 * k) * d, rel=0.01)


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 1.0, 2.0, 1.0]])


@pytest.mark.parametrize("slack", [None, 0.0])
def test_a_right_choice_passes(slack):
    routing.check_choice(LOGITS, torch.tensor([[1, 2, 3, 4]]), 4, slack)


@pytest.mark.parametrize(
    ("indices", "why"),
    [
        ([1, 2, 4, 5], "tie"),
        ([0, 1, 2, 4], "larger"),
        ([1, 2, 3, 5], "larger"),
        ([1, 3, 2, 4], "ascending"),
        ([1, 2, 2, 4], "ascending"),
        ([1, 2, 3, 6], "range"),
        ([-1, 1, 2, 4], "range"),
        ([1, 2, 4], "shape"),
    ],
)
def test_a_wrong_choice_is_caught(indices, why):
    with pytest.raises(Mismatch, match=why):
        routing.check_choice(LOGITS, torch.tensor([indices]), 4)


def test_slack_forgives_rounding_and_no_more():
    routing.check_choice(LOGITS, torch.tensor([[1, 2, 4, 5]]), 4, 0.0)  # another tie
    with pytest.raises(Mismatch, match="larger"):
        routing.check_choice(LOGITS, torch.tensor([[0, 1, 2, 4]]), 4, 0.4)
    routing.check_choice(LOGITS, torch.tensor([[0, 1, 2, 4]]), 4, 0.5)


def outputs_of(op):
    """Our implementation of the first case of ``op``: its check, its inputs, and clones of its outputs."""
    case = next(case for case in CASES if case.op == op)
    outputs = case.implementations[-1].prepare(case.make(0))()
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return case, case.make(0), [output.detach().clone() for output in outputs]


@pytest.mark.parametrize(
    ("op", "which", "amount", "why"),
    [
        ("route", 0, 1, "rows"),
        ("route", 1, 1, "indices|larger|tie"),
        ("route", 2, 1e-4, "gates"),
        ("route", 3, 1e-2, "logits|larger|tie"),
        ("route backward", 1, 0.5, "d_x"),
        ("route backward", 2, 10, "d_weight"),
        ("scatter_back", 0, 1, "out"),
        ("scatter bwd block", 0, 1, "d_x"),
        ("scatter bwd delta", 0, 1, "d_x"),
        ("scatter bwd delta", 1, 0.5, "d_update"),
        ("scatter bwd delta", 2, 0.5, "d_gates"),
        ("pack_depths", 0, 1, "indices"),
        ("pack_depths", 1, 1, "cu_seqlens"),
        ("aux_loss fwd+bwd", 0, 0.1, "loss"),
        ("aux_loss fwd+bwd", 1, 0.1, "d_logits"),
    ],
)
def test_one_wrong_number_is_caught(op, which, amount, why):
    case, inputs, outputs = outputs_of(op)
    outputs[which].view(-1)[-1] += amount
    with pytest.raises(Mismatch, match=why):
        case.check(inputs, outputs[0] if len(outputs) == 1 else outputs, True)


def test_a_changed_row_that_was_not_kept_is_caught():
    case, inputs, (out,) = outputs_of("scatter_back")
    dropped = next(p for p in range(out.shape[1]) if p not in inputs.indices[0])
    out[0, dropped, 0] += 1
    with pytest.raises(Mismatch, match="not a copy"):
        case.check(inputs, out, True)


def test_ours_are_the_backends_that_work_and_are_named_truly(monkeypatch):
    reasons = {("triton", "route"): None, ("cuda", "route"): None, ("triton", "pack_depths"): None}
    monkeypatch.setattr(harness._dispatch, "unavailable", lambda backend, op, _: reasons.get((backend, op), "absent"))

    def ours(case):
        return [implementation.name for implementation in case.implementations if implementation.ours]

    cases = routing.Cases("cuda", lambda function: function)
    assert ours(cases.route(1, 2, 3, 1)) == ["cuda", "triton"]
    assert ours(cases.pack(1, 2, 3)) == ["triton"]
    assert ours(cases.scatter_back(1, 2, 3, 1)) == ["ours, eager"]
