"""Depths, packing, gather and scatter-back against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops._dispatch import unavailable
from reference import ops as reference
from tests import strategies as s


@s.targets("pack_depths")
@given(batch=s.sizes_or_none, length=s.sizes_or_none, recursions=st.integers(1, 4), seed=s.seeds,
       dtype=st.sampled_from([torch.int64, torch.int32]))  # fmt: skip
def test_pack_depths(device, backend, batch, length, recursions, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    depths = torch.randint(0, recursions + 1, (batch, length), generator=generator).to(dtype)
    got = ops.pack_depths(depths.to(device), recursions, backend=backend)
    for one, other in zip(got, reference.pack_depths(depths, recursions)):
        assert torch.equal(one.cpu(), other)


@given(batch=s.sizes, length=s.sizes, recursions=st.integers(1, 4), seed=s.seeds, biased=st.booleans(),
       ties=st.booleans(), activation=st.sampled_from(["softmax", "sigmoid"]))  # fmt: skip
def test_choose_depths(batch, length, recursions, seed, biased, ties, activation):
    logits = (s.tied if ties else s.normal)((batch, length, recursions), seed).requires_grad_()
    bias = s.tied((recursions,), seed + 1) if biased else None
    seqlens = s.lengths(batch, length, seed)
    valid = torch.arange(length) < seqlens[:, None]
    got = ops.choose_depths(logits, activation=activation, bias=bias, valid=valid)
    want = reference.choose_depths(logits, activation=activation, bias=bias, seqlens=seqlens)
    assert torch.equal(got.depths, want.depths)
    torch.testing.assert_close(got.probs[valid], want.probs[valid], rtol=1e-14, atol=0)
    if valid.any():
        (got,), (want,) = (torch.autograd.grad(t.probs[valid].square().sum(), logits) for t in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("logits", "depth"),
    [
        ([1.0, 1.0, 1.0], 1),
        ([0.0, 2.0, 2.0], 2),
        ([18.0, 20.0, 19.0], 2),
        ([torch.nan, -5.0, -4.0], 3),
        ([torch.nan] * 3, 1),
        ([-torch.inf, torch.inf, 0.0], 2),
        ([-torch.inf] * 3, 1),
    ],
)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_depth_of_extremes(logits, depth, activation):
    got = ops.choose_depths(torch.tensor([[logits]]), activation=activation)
    assert got.depths.item() == depth and got.probs.isfinite().all()


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
    for name, one, other, tensor in zip(("d_x", "d_update", "d_gates"), gradients, wanted, tensors):
        s.assert_close(one, other, tensor.dtype, 2, name)

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


@pytest.mark.parametrize("device", [d for d in s.DEVICES if unavailable("triton", "scatter_back", d) is None])
@pytest.mark.parametrize("residual", ["block", "delta", "none"])
def test_kernels_take_an_index_outside_the_sequence_for_none(device, residual):
    outside = torch.tensor([[1, 5, -7, 2**40], [4, -5, 2**31, 0]], device=device)
    none = torch.where((outside >= 0) & (outside < 5), outside, -1)
    x, update, gates = (s.normal(shape, 0, torch.float32).to(device) for shape in [(2, 5, 3), (2, 4, 3), (2, 4)])
    results = []
    for index in (outside, none):
        tensors = [t.clone().requires_grad_() for t in (x, update, gates)]
        out = ops.scatter_back(*tensors[:2], index, tensors[2], residual=residual, backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        results[-1].append(ops.scatter_back_(x.clone(), update, index, gates, residual=residual, backend="triton"))
    for one, other in zip(*results):
        assert torch.equal(one, other)


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
