"""The benchmark of a layer's operators on tiny shapes: every implementation passes its check, planted faults don't."""

import functools

import pytest
import torch

from bench import layer
from bench.harness import Mismatch
from tests.bench import checks

TINY = {"norm": ((23, 16, 24),), "swiglu": ((23, 24, 16),), "rope": ((2, 13, 4, 2, 16),), "loss": ((23, 16, 40),)}
CASES = layer.make_cases("cpu", functools.partial(torch.compile, backend="eager", fullgraph=True), **TINY)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)


@each_case
def test_every_implementation_passes(case):
    checks.every_implementation_passes(case)


@each_case
def test_one_wrong_element_of_any_output_is_caught(case):
    for ours in (True, False):
        inputs = case.make(0)
        right = case.implementations[-1].prepare(inputs)()
        assert 0 < case.check(inputs, right, ours) < 1
        for i, output in enumerate(right):
            wrong = [t.clone() for t in right]
            wrong[i].view(-1)[-1] += 0.25 * (output.float().square().mean().sqrt() + output.view(-1)[-1].abs())
            with pytest.raises(Mismatch, match="error"):
                case.check(inputs, wrong, ours)
        with pytest.raises(ValueError, match="zip"):
            case.check(inputs, right[:-1], ours)


@each_case
def test_inputs_are_the_same_for_one_seed_and_differ_between_seeds(case):
    first, again, other = (case.make(seed) for seed in (0, 0, 1))
    for a, b, c in zip(first.tensors, again.tensors, other.tensors):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_floors_count_each_number_and_its_gradient_once():
    cases = {case.op: case for case in layer.make_cases("cpu", lambda function: function)[::-1]}
    n, d, out = 32768, 960, 1600
    assert cases["rms_norm_linear fwd+bwd"].nbytes == 4 * (3 * n * d + d + out * d + n * out)
    assert cases["rms_norm_linear fwd+bwd"].flops == 6 * n * d * out
    assert cases["rope_qkv fwd+bwd"].nbytes == 4 * 2 * n * 25 * 64 and cases["rope_qkv fwd+bwd"].flops is None
