"""What the tests of several benchmarks ask of a case."""

import torch

from bench import harness


def every_implementation_passes(case):
    """Rivals first, ours last, each right by the case's own check."""
    torch._dynamo.reset()
    assert [i.ours for i in case.implementations] == [False] * (len(case.implementations) - 1) + [True]
    for implementation in case.implementations:
        assert 0 <= harness.verify(case, implementation) <= 1
