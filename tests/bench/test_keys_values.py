"""The benchmark of keys and values on tiny shapes: every implementation passes its check, and planted faults don't."""

import functools

import pytest
import torch

from bench import kv
from bench.harness import Mismatch
from tests.bench import checks

TINY = {"batches": (1, 5), "means": (9, 40, 41), "page_sizes": (4, 16), "prompts": (33,)}
CASES = kv.make_cases("cpu", functools.partial(torch.compile, backend="eager", fullgraph=True), **TINY)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name}")
def test_every_implementation_passes(case):
    checks.every_implementation_passes(case)


def test_the_default_cases_are_those_of_the_targets():
    cases = kv.make_cases("cpu", lambda function: function)
    moved = {(case.op, case.name): case.nbytes for case in cases}
    assert len(moved) == len(cases)
    for batch in (32, 128, 512):
        for mean in (128, 2048, 16384):
            for page in (16, 64):
                found = moved["decode", f"B{batch} mean {mean}, page {page}"]
                assert found == pytest.approx(batch * mean * 1280, rel=0.05)
    assert moved["lookup", "B32 mean 2048, page 16"] == pytest.approx(2 * 32 * 2048 * 1280, rel=0.01)
    assert moved["rope + append", "8192 tokens, page 16"] == pytest.approx(8192 * 2 * 3200, rel=0.01)


def outcome(op, **shape):
    case = next(case for case in CASES if case.op == op and case.name.startswith(shape.get("name", "")))
    inputs = case.make(0)
    return case, inputs, case.implementations[-1].prepare(inputs)()


@pytest.mark.parametrize("op", ["decode", "decode fp8"])
def test_an_attention_that_misses_a_key_fails(op):
    case, inputs, out = outcome(op, name="B5")
    case.check(inputs, out, True)
    inputs.lens -= 1
    with pytest.raises(Mismatch, match="lane"):
        case.check(inputs, out, True)
    with pytest.raises(Mismatch, match="NaN"):
        case.check(inputs, out * torch.nan, True)


def test_an_append_that_touches_another_slot_or_turns_wrong_fails():
    case, _, (q, k_cache, v_cache) = outcome("rope + append", name="5")
    fresh = case.make(0)
    case.check(fresh, (q, k_cache, v_cache), True)
    free = next(i for i in range(v_cache.shape[0] * 4) if i not in fresh.slots.tolist())
    wrong = v_cache.clone()
    wrong[free // 4, free % 4] += 1
    with pytest.raises(Mismatch, match="v_cache: another slot changed"):
        case.check(fresh, (q, k_cache, wrong), True)
    with pytest.raises(Mismatch, match="q"):
        case.check(fresh, (q * 1.01, k_cache, v_cache), True)
    fresh.positions += 1
    with pytest.raises(Mismatch, match="k"):
        case.check(fresh, (q, k_cache, v_cache), True)


def test_a_lookup_or_slots_that_are_off_fail():
    case, inputs, (k, v) = outcome("lookup", name="B5")
    with pytest.raises(Mismatch, match="v: not bit-equal"):
        case.check(inputs, (k, v.roll(1, 0)), True)
    case, _, (slots, lens) = outcome("take_pages_", name="B5")
    case.check(case.make(0), (slots, lens), True)
    with pytest.raises(Mismatch, match="slots"):
        case.check(case.make(0), (slots + 1, lens), True)
