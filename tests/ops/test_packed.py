"""Depths, packing, gather and scatter-back against the reference."""

from __future__ import annotations

import contextlib
import importlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s


def chunks_of(backend, small):
    """With ``small``, Triton programs that work on few elements each, so that small inputs take many of them."""
    if backend != "triton" or not small:
        return contextlib.nullcontext()
    return mock.patch.object(importlib.import_module("mor_kernels.ops.pack.triton"), "CHUNK", 8)


@s.targets("pack_depths")
@given(batch=s.sizes_or_none, length=s.sizes_or_none, recursions=st.integers(1, 4), seed=s.seeds,
       dtype=st.sampled_from([torch.int64, torch.int32]), strided=st.booleans(), small=st.booleans())  # fmt: skip
def test_pack_depths(device, backend, batch, length, recursions, seed, dtype, strided, small):
    generator, length = torch.Generator().manual_seed(seed), s.larger(device, seed, length)
    depths = torch.randint(0, recursions + 1, (batch, length), generator=generator).to(dtype)
    moved = depths.to(device)
    with chunks_of(backend, small):
        got = ops.pack_depths(moved.T.contiguous().T if strided else moved, recursions, backend=backend)
    for one, other in zip(got, reference.pack_depths(depths, recursions)):
        assert torch.equal(one.cpu(), other)


@s.targets("pack_depths")
@pytest.mark.parametrize(("shape", "small"), [((5, 1001), 0), ((3000, 1), 0), ((1, 2048), 0), ((5, 31), 1)])
def test_pack_depths_of_many(device, backend, shape, small):
    """More tokens than a program packs, more chunks than it adds up at once; sequences that begin anywhere."""
    depths = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(0))
    with chunks_of(backend, small):
        got = ops.pack_depths(depths.to(device), 2, backend=backend)
    for one, other in zip(got, reference.pack_depths(depths, 2)):
        assert torch.equal(one.cpu(), other)


@s.targets("choose_depths")
@given(batch=s.sizes_or_none, length=s.sizes_or_none, recursions=st.integers(1, 5), seed=s.seeds, dtype=s.dtypes,
       biased=st.booleans(), ties=st.booleans(), padded=st.booleans(), strided=st.booleans(), small=st.booleans(),
       activation=st.sampled_from(["softmax", "sigmoid"]))  # fmt: skip
def test_choose_depths(
    device, backend, batch, length, recursions, seed, dtype, biased, ties, padded, strided, small, activation
):
    s.assume_served(device, backend, dtype)
    length = s.larger(device, seed, length)
    shape = (batch, length, recursions)
    logits = s.tied(shape, seed, dtype) if ties else s.normal(shape, seed, dtype, strided)
    bias = s.tied((recursions,), seed + 1, dtype) if biased else None
    seqlens = s.lengths(batch, length, seed) if padded else torch.full((batch,), length)
    valid = torch.arange(length) < seqlens[:, None]
    a, a64 = logits.to(device).requires_grad_(), logits.double().requires_grad_()
    with chunks_of(backend, small):
        got = ops.choose_depths(
            a,
            activation=activation,
            bias=None if bias is None else bias.to(device),
            valid=valid.to(device) if padded else None,
            backend=backend,
        )
        upstream = s.normal(shape, seed + 2, got.probs.dtype)
        upstream[~valid] = 0  # the reference has no probabilities there
        (gradient,) = torch.autograd.grad(got.probs, a, upstream.to(device))
    chosen = reference.choose_depths(logits, activation=activation, bias=bias, seqlens=seqlens).depths
    assert torch.equal(got.depths.cpu(), chosen)
    want = reference.choose_depths(a64, activation=activation, seqlens=seqlens).probs
    # an exponential of x, made as 2^(x log2(e)), is off by |x| / 2 roundings; a logit here is below 5
    s.assert_close(got.probs.cpu()[valid], want[valid], got.probs.dtype, 8, "probs")
    if valid.any():
        (wanted,) = torch.autograd.grad(want, a64, upstream.double())
        s.assert_close(gradient, wanted, dtype, 8, "gradient")


@s.targets("choose_depths")
def test_choose_among_64(device, backend):
    logits = s.tied((3, 50, 64), 0, torch.float32)
    got = ops.choose_depths(logits.to(device), backend=backend)
    assert torch.equal(got.depths.cpu(), reference.choose_depths(logits).depths)
    s.assert_close(got.probs, logits.double().softmax(-1), torch.float32, 8)


EXTREMES = [
    ([1.0, 1.0, 1.0], 1),
    ([0.0, 2.0, 2.0], 2),
    ([18.0, 20.0, 19.0], 2),
    ([torch.nan, -5.0, -4.0], 3),
    ([torch.nan] * 3, 1),
    ([-torch.inf, torch.inf, 0.0], 2),
    ([-torch.inf] * 3, 1),
    ([torch.nan, -torch.inf, torch.nan], 2),
]


@s.targets("choose_depths")
@pytest.mark.parametrize(("logits", "depth"), EXTREMES)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_depth_of_extremes(device, backend, logits, depth, activation):
    logits = torch.tensor([[logits]], device=device)
    got = ops.choose_depths(logits, activation=activation, backend=backend)
    assert got.depths.item() == depth and got.probs.isfinite().all()
    unknown = torch.tensor([torch.nan, 0.0, 0.0], device=device)
    biased = ops.choose_depths(torch.zeros_like(logits), activation=activation, bias=unknown, backend=backend)
    assert biased.depths.item() == 2


@s.targets("choose_depths")
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_gradient_of_extremes(device, backend, activation):
    """As PyTorch differentiates the bounds and the replacement of what is not a number."""
    logits = torch.tensor([[row for row, _ in EXTREMES]], device=device, requires_grad=True)
    largest = torch.finfo(torch.float32).max
    composed = torch.where(logits.isnan(), -largest, logits.clamp(-largest, largest))
    composed = composed.softmax(-1) if activation == "softmax" else composed.sigmoid()
    probs = ops.choose_depths(logits, activation=activation, backend=backend).probs
    weights = s.normal(probs.shape, 0, torch.float32).to(device)
    (got,), (want,) = (torch.autograd.grad((t * weights).sum(), logits) for t in (probs, composed))
    torch.testing.assert_close(got, want)


def indices(rows, n, seed):
    """n indices in -1..rows-1, none but -1 twice."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)[:n]
    order = torch.nn.functional.pad(order, (0, n - len(order)), value=-1)
    return torch.where(torch.rand(n, generator=generator) < 0.3, -1, order)


@s.targets("gather")
@given(rows=s.sizes_or_none, n=s.sizes_or_none, width=s.sizes, seed=s.seeds, dtype=s.dtypes, strided=st.booleans())
def test_gather(device, backend, rows, n, width, seed, dtype, strided):
    s.assume_served(device, backend, dtype)
    (rows, n), width = s.larger(device, seed, rows, n), s.wider(device, seed, width)
    x = s.normal((rows, width), seed, dtype, strided)
    index = indices(rows, n, seed)
    a = x.to(device).requires_grad_()
    got = ops.gather(a, index.to(device), backend=backend)
    assert torch.equal(got.cpu(), reference.gather(x, index))
    upstream = s.normal((n, width), seed + 1, dtype)
    (dx,) = torch.autograd.grad(got, a, upstream.to(device))
    wanted = torch.zeros(rows, width, dtype=dtype)
    for i, row in zip(index.tolist(), upstream):
        if i >= 0:
            wanted[i] = row
    assert torch.equal(dx.cpu(), wanted)


def check_scatter_back(device, backend, x, update, index, gates, residual):
    """Forward, backward and in place, against the reference."""
    tensors = [t for t in (x, update, gates) if t is not None]
    a = [t.to(device).requires_grad_() for t in tensors]
    options = {"residual": residual, "backend": backend}
    got = ops.scatter_back(*a[:2], index.to(device), *a[2:], **options)
    b = [t.double().requires_grad_() for t in tensors]
    want = reference.scatter_back(*b[:2], index, *b[2:], residual=residual) if len(x) or x.dim() == 2 else b[0] * 1
    s.assert_close(got, want, x.dtype, 0.5, "out")  # fp32 arithmetic, rounded once, to nearest
    untouched = torch.ones(x.shape[:-1], dtype=torch.bool)
    for rows, named in [(untouched, index)] if x.dim() == 2 else zip(untouched, index):
        rows[named[named >= 0]] = False
    assert torch.equal(got.cpu()[untouched], x[untouched])  # copies are bit-exact

    upstream = s.normal(x.shape, 3, x.dtype, strided=not x.is_contiguous())
    gradients = torch.autograd.grad(got, a, upstream.to(device))
    wanted = torch.autograd.grad(want, b, upstream.double(), materialize_grads=True, allow_unused=True)
    # d_gates are sums over rows of d_out times f or f - x
    at = index[..., None] % (x.shape[-2] + 1)
    dy, row = (F.pad(t.double().abs(), (0, 0, 0, 1)).take_along_dim(at, -2) for t in (upstream, x))
    terms = 0, 0, (dy * (update.double().abs() + row * (residual == "delta"))).sum(-1)
    for name, one, other, tensor, of_it in zip(("d_x", "d_update", "d_gates"), gradients, wanted, tensors, terms):
        s.assert_close(one, other, tensor.dtype, 2, name, terms=of_it)

    memory = torch.full((x.shape[0] + 2, *x.shape[1:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype, device=device)
    stream = memory[1:-1, ..., ::2] if not x.is_contiguous() else memory[1:-1, ..., : x.shape[-1]]
    with torch.no_grad():
        stream.copy_(x)
        assert ops.scatter_back_(stream, a[1], index.to(device), *a[2:], **options) is stream
    assert torch.equal(stream, got)
    stream.fill_(7.0)
    assert (memory == 7).all()  # nothing beside the stream was written


@s.targets("scatter_back")
@given(
    batch=st.integers(0, 3), length=s.sizes_or_none, k=s.sizes_or_none, width=s.sizes, seed=s.seeds, dtype=s.dtypes,
    strided=st.booleans(), gated=st.booleans(), packed=st.booleans(), mixed=st.booleans(),
    residual=st.sampled_from(["block", "delta", "none"]),
)  # fmt: skip
def test_scatter_back(device, backend, batch, length, k, width, seed, dtype, strided, gated, packed, mixed, residual):
    s.assume_served(device, backend, dtype)
    (length, k), width = s.larger(device, seed, length, k), s.wider(device, seed, width)
    lead, kept = ((length,), (k,)) if packed else ((batch, length), (batch, k))
    others = {torch.float32: torch.float16, torch.float64: torch.float64}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if packed:
        index = indices(length, k, seed)
    else:
        rows = [indices(length, k, seed + b) for b in range(batch)]
        index = torch.stack(rows) if batch else torch.empty(0, k, dtype=torch.int64)
    check_scatter_back(
        device,
        backend,
        s.normal((*lead, width), seed, dtype, strided),
        s.normal((*kept, width), seed + 1, others.get(dtype, torch.float32) if mixed else dtype, strided),
        index,
        s.normal(kept, seed + 2, wide, strided) if gated else None,
        residual,
    )


@s.targets("scatter_back")
@pytest.mark.parametrize(("width", "length"), [(960, 11), (8192 + 5, 3)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("residual", ["block", "delta", "none"])
def test_scatter_back_of_wide_rows(device, backend, width, length, gated, residual):
    x, update = s.normal((length, width), 0, torch.float32), s.normal((3, width), 1, torch.float16)
    gates = s.normal((3,), 2, torch.float32) if gated else None
    check_scatter_back(device, backend, x, update, torch.tensor([length - 1, -1, 0]), gates, residual)


@s.kernels("scatter_back", "triton")
def test_kernels_ask_the_indices_what_unwritten_memory_claims(device, backend, monkeypatch):
    """Where no index names a position, the inverse holds anything: here a slot, that of another position."""
    largest = torch.iinfo(torch.int32).max  # what deterministic mode fills unwritten memory with
    for op in ("route", "gather", "scatter_back"):
        kernels = importlib.import_module(f"mor_kernels.ops.{op}.triton")
        inverse_of = kernels.inverse_of
        claim = lambda *args, f=inverse_of: (t := f(*args)).masked_fill(t == largest, 0)  # noqa: E731
        monkeypatch.setattr(kernels, "inverse_of", claim)
    x, update, gates = (s.normal(shape, 0, torch.float32).to(device) for shape in [(2, 5, 3), (2, 3, 3), (2, 3)])
    index, candidates = torch.tensor([[[3, 1, -1], [0, 2, 4]], [[1, 3, 4], [0, -1, -1]]], device=device)
    calls = [
        lambda a, f, g, backend: (ops.scatter_back(a, f, index, g, residual="delta", backend=backend),),
        lambda a, f, g, backend: (ops.gather(a[0], index[0], backend=backend),),
        lambda a, f, g, backend: ops.route(a, f[0, 0], 2, candidates=candidates, backend=backend)[:4:2],
    ]
    for call in calls:
        results = []
        for backend in ("triton", "eager"):
            tensors = [t.clone().requires_grad_() for t in (x, update, gates)]
            outputs = call(*tensors, backend)
            loss = sum(t.square().sum() for t in outputs)
            results.append([*outputs, *torch.autograd.grad(loss, tensors, materialize_grads=True)])
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)


def test_scatter_of_everything_back_is_the_identity():
    """Routing all tokens and writing them back ungated gives x to the bit."""
    x = s.normal((2, 5, 3), 0, torch.bfloat16)
    routed = ops.route(x, torch.ones(3, dtype=torch.bfloat16), 5)
    assert torch.equal(ops.scatter_back(x, routed.rows, routed.indices, residual="none"), x)


@s.targets("scatter_back")
@pytest.mark.parametrize("residual", ["block", "delta", "none"])
def test_nan_in_skipped_rows_does_not_leak(device, backend, residual):
    x, update, gates = torch.ones(4, 2), torch.tensor([[1.0], [torch.nan]]).repeat(1, 2), torch.tensor([1.0, torch.nan])
    x, update, gates = (t.to(device).requires_grad_() for t in (x, update, gates))
    index = torch.tensor([2, -1], device=device)
    out = ops.scatter_back(x, update, index, gates, residual=residual, backend=backend)
    assert out.sum() == {"block": 10, "delta": 8, "none": 8}[residual]
    _, d_update, d_gates = torch.autograd.grad(out.sum(), (x, update, gates))
    assert d_update.tolist() == [[1, 1], [0, 0]] and d_gates.tolist() == [0 if residual == "delta" else 2, 0]


@s.targets("scatter_back_")
def test_autograd_sees_what_is_written_in_place(device, backend):
    x, update = (torch.ones(n, 2, device=device) for n in (3, 1))
    weight = torch.ones(2, device=device, requires_grad=True)
    y = (x * weight).sum()  # saves x
    ops.scatter_back_(x, update, torch.tensor([1], device=device), backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
