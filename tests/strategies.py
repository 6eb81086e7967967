"""Hypothesis strategies and comparisons that the tests of all backends share.

Inputs are drawn as small integers over a power of two where ties matter, so that equal really means equal, and from a
seeded normal distribution otherwise. Shapes are ragged, odd, one or empty on purpose; tensors come with any strides.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from mor_kernels.ops import _dispatch
from mor_kernels.ops._dispatch import BACKENDS, unavailable

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES, torch.float64)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def targets(op: str, *specialists: str):
    """Parametrize a test over every (device, backend) of this machine that serves ``op``; with ``specialists``, if the
    test draws what they take."""
    return _parametrized(op, (*BACKENDS, *specialists))


def kernels(op: str, *backends: str):
    """The same, of the backends that have kernels, or of ``backends`` alone."""
    return _parametrized(op, backends or BACKENDS[1:])


def _parametrized(op, backends):
    found = [(d, b) for d in DEVICES for b in backends if unavailable(b, op, d) is None]
    return pytest.mark.parametrize(("device", "backend"), found, ids=lambda name: name)


def prefer(monkeypatch, backend):
    """Have whatever is called served by ``backend``; "cuda" is every CUDA kernel that there is, and Triton's for the
    rest, or eager where Triton is interpreted."""
    monkeypatch.setattr(_dispatch, "_default_backend", "auto" if backend == "cuda" else backend)
    if backend == "cuda":
        monkeypatch.setattr(_dispatch, "_best", _cuda_where_there_is_one)


def _cuda_where_there_is_one(op, tensors, arguments):
    for backend in ("cuda", "triton", "eager") if tensors[0].is_cuda else ("cuda", "eager"):
        if not (_dispatch._refusal(op, backend, tensors) or _dispatch._unfit(op, backend, arguments)):
            return backend


def assume_served(device, backend, dtype):
    """Skip a drawn dtype that the backend leaves to eager (fp64) or that Triton's interpreter rounds wrongly (bf16)."""
    assume(backend == "eager" or dtype != torch.float64)
    assume((device, backend) != ("cpu", "triton") or dtype != torch.bfloat16)


def examples(number: int, **options) -> settings:
    """Settings of a test that draws so many examples where others draw 25."""
    return settings(max_examples=max(1, number * settings().max_examples // 25), **options)


def run_machine(machine: type[RuleBasedStateMachine], *arguments, number: int, steps: int) -> None:
    """``number`` examples of at most ``steps`` rules; the test has pytest's mark "machine"."""
    run_state_machine_as_test(lambda: machine(*arguments), settings=examples(number, stateful_step_count=steps))


def small_heads(backend):
    """A width and a dtype that a backend takes, as small and as wide as it does."""
    return (64, torch.bfloat16) if backend == "hopper" else (4, torch.float32)


sizes = st.integers(1, 9)
sizes_or_none = st.integers(0, 9)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
counts_of_heads = st.sampled_from([(1, 1), (3, 1), (5, 1), (7, 1), (6, 2), (4, 4)])  # query heads, key/value heads
widths = st.sampled_from([2, 4, 6, 10])


def larger(device, seed, *drawn):
    """On a GPU, two times out of three, sizes of several tiles: 2 to 9 become 66 to 330; elsewhere sizes as drawn."""
    sizes = drawn if device == "cpu" or seed % 3 == 0 else tuple(33 * n + seed % 33 if n > 1 else n for n in drawn)
    return sizes if len(sizes) > 1 else sizes[0]


def wider(device, seed, drawn, others=(1, 5, 64, 1100)):
    """On a GPU one of few widths, since kernels are compiled for each; elsewhere the width as drawn."""
    return drawn if device == "cpu" else others[(drawn + seed) % len(others)]


def normal(shape, seed, dtype=torch.float64, strided=False):
    """Normally distributed; with ``strided`` a view that is not contiguous (every other element of the last axis, axes
    permuted in memory)."""
    generator = torch.Generator().manual_seed(seed)
    if not strided or not shape:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    memory = torch.randn((*reversed(shape[:-1]), 2 * shape[-1]), generator=generator, dtype=torch.float64).to(dtype)
    return memory.permute(*reversed(range(len(shape) - 1)), len(shape) - 1)[..., ::2]


def tied(shape, seed, dtype=torch.float64):
    """Multiples of 1/2 in -1..1: many exact ties, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-2, 3, shape, generator=generator) / 2).to(dtype)


def lengths(batch, most, seed):
    """(B,) int64 in 0..most, with empty and full rows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, most + 1, (batch,), generator=generator)
    special = torch.randint(0, 4, (batch,), generator=generator)
    return torch.where(special == 0, 0, torch.where(special == 1, most, drawn))


def cu_seqlens(lens):
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)


def subset(batch, length, seed):
    """(B, C) ascending positions of a random subset of each row, -1 at the end."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(batch, length, generator=generator) < 0.6
    most = int(chosen.sum(1).max()) if batch * length else 0
    rows = [row.nonzero()[:, 0] for row in chosen]
    return torch.stack([torch.nn.functional.pad(r, (0, most - len(r)), value=-1) for r in rows])


def poison_tail(tensor, lens):
    """A copy with NaN past each row's length."""
    past = torch.arange(tensor.shape[1]) >= lens[:, None]
    return tensor.masked_fill(past.view(*past.shape, *[1] * (tensor.dim() - 2)), torch.nan)


def rounding_of_scores(q, k, scale, dtype):
    """Of attention's, and so of p relatively: half an eps of a sum of products, each without its sign."""
    if not (q.numel() and k.numel()):
        return 0.0
    wide = torch.promote_types(dtype, torch.float32)
    largest = q.detach().double().norm(dim=-1).max() * k.detach().double().norm(dim=-1).max()
    return torch.finfo(wide).eps / 2 * largest.item() * abs(q.shape[-1] ** -0.5 if scale is None else scale)


def assert_close(got, exact, dtype, roundings=2.0, message="", cancels=0.01, slack=0.0, terms=0.0):
    """Element by element, within ``roundings`` roundings of ``dtype`` of the float64 result, relative to the value and,
    for what cancels, to the share ``cancels`` of the largest one; ``slack`` and the error of sums in float32 (float64)
    come on top, which is relative to the largest result or to ``terms``: of each, the sum of what it adds, unsigned."""
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    assert got.shape == exact.shape, f"{message}: shape {tuple(got.shape)} instead of {tuple(exact.shape)}"
    assert not got.isnan().any(), f"{message}: NaN"
    if not got.numel():
        return
    largest = exact.abs().max()
    wide = torch.promote_types(dtype, torch.float32)
    sums = 8 * torch.finfo(wide).eps * torch.as_tensor(terms, dtype=torch.float64).clamp(min=largest)
    over = (got - exact).abs() - roundings * torch.finfo(dtype).eps * (exact.abs() + cancels * largest) - sums - slack
    assert over.max() <= 0, f"{message}: {over.max()} over the budget at {over.argmax()}"
