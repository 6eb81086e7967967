"""SwiGLU and its down projection against the plain formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from tests import strategies as s

widths = st.one_of(st.sampled_from([0, 1, 2, 3, 8, 16, 24, 127, 130, 256, 520, 1032, 1100]), st.integers(1, 40))


def backward(d_h, gate_up, backend):
    """The gradient of gate_up, and h, which the operator writes in place of d_h."""
    h = d_h.clone()  # of the same strides, where these are dense
    return torch.ops.mor_kernels.swiglu_backward_(h, gate_up, backend), h


def plain(gate_up, weight):
    gate, up = gate_up.chunk(2, -1)
    return F.linear(F.silu(gate) * up, weight)


def run(function, inputs, d_y):
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, d_y)]


def smallest(dtype):
    """The smallest number above 0."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def check_values(got, gate_up, d_h=None):
    """Gated values, or their gradients and they: one rounding to the dtype, element by element."""
    exact = gate_up.detach().cpu().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    h = F.silu(gate) * up
    want = (h,) if d_h is None else (*torch.autograd.grad(h, exact, d_h.cpu().double()), h)
    for name, one, other in zip(("d_gate_up", "h") if len(want) == 2 else ("h",), got, want, strict=True):
        given = d_h is not None and name == "h"  # by the test, in whose place it is
        assert one.dtype == gate_up.dtype and (given or one.is_contiguous())
        # halves are rounded once; in fp32 and fp64 each factor is. Below the smallest normal number steps don't shrink
        roundings, slack = 0.5 if gate_up.dtype in s.HALVES else 8, smallest(gate_up.dtype)
        s.assert_close(one, other, gate_up.dtype, roundings, name, slack=slack)


@s.targets("swiglu")
@given(
    lead=st.lists(st.integers(0, 9), max_size=3), width=widths, out=s.sizes_or_none, scale=st.sampled_from([1, 8]),
    seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
)  # fmt: skip
def test_equals_formula(device, backend, lead, width, out, scale, seed, dtype, strided):
    """Values and gradients: within one rounding. Through the products: as near as PyTorch in the same dtype."""
    s.assume_served(device, backend, dtype)
    gate_up = (s.normal((*lead, 2 * width), seed, dtype, strided) * scale).to(device)
    if strided and lead:
        gate_up = s.normal((*lead, 4 * width), seed, dtype).to(device)[..., width : 3 * width] * scale
    weight = s.normal((out, width), seed + 1, dtype, strided).to(device) / max(width, 1) ** 0.5
    rows = gate_up if lead else gate_up[None]
    d_h = s.normal((*rows.shape[:-1], width), seed + 2, dtype, not strided).to(device)
    check_values([torch.ops.mor_kernels.swiglu(rows, backend)], rows)
    check_values(backward(d_h, rows, backend), rows, d_h)

    d_y = s.normal((*lead, out), seed + 3, dtype, not strided).to(device)
    exact = run(plain, [t.cpu().double() for t in (gate_up, weight)], d_y.cpu().double())
    ours = run(lambda *t: ops.swiglu_linear(*t, backend=backend), (gate_up, weight), d_y)
    theirs = run(plain, (gate_up, weight), d_y)
    # a product may leave little of its terms, here without their signs; h and the gradient of h are rounded, too
    d_y, w, leaf = d_y.cpu().double().abs(), weight.cpu().double().abs(), gate_up.cpu().double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    h = F.silu(gate) * up
    (d_gate_up,) = torch.autograd.grad(h, leaf, d_y @ w)
    h = h.detach().abs()
    terms = h @ w.mT, d_gate_up.abs(), torch.einsum("...o,...w->ow", d_y, h)
    eps = torch.finfo(dtype).eps
    for label, want, one, other, of_it in zip(("y", "d_gate_up", "d_weight"), exact, ours, theirs, terms, strict=True):
        assert one.dtype == dtype and one.shape == want.shape
        if one.numel():
            one, other, largest = one.cpu().double(), other.cpu().double(), want.abs().max()
            assert not one.isnan().any()
            budget = 2 * (other - want).abs().max() + 2 * eps * (want.abs() + largest + of_it) + 9 * smallest(dtype)
            assert ((one - want).abs() <= budget).all(), label


@s.targets("swiglu")
def test_strides_of_rows_and_the_same_values_in_both_passes(device, backend):
    wide = s.normal((3, 5, 100), 0, torch.float32).to(device)
    views = wide[..., 7:61], wide[:, ::2, :54], wide.transpose(0, 1)[..., :54], wide[:1, :, :54].expand(3, 5, 54)
    for view in (*views, wide.mT.contiguous().mT[..., :54]):
        h = torch.ops.mor_kernels.swiglu(view, backend)
        assert torch.equal(h, torch.ops.mor_kernels.swiglu(view.contiguous(), backend))
        d_h = s.normal(h.shape, 1, torch.float32).to(device)
        got = backward(d_h, view, backend)
        assert torch.equal(got[1], h)
        turned = backward(d_h.mT.contiguous().mT, view.contiguous(), backend)
        assert all(torch.equal(one, other) for one, other in zip(got, turned, strict=True))


@s.targets("swiglu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_infinite_and_nan_as_in_pytorch(device, backend, dtype):
    if backend != "eager" and dtype == torch.float64:
        pytest.skip("float64 is eager's")
    special = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -200.0, 200.0, 1.0], device=device)
    gate, up = torch.meshgrid(special, special, indexing="ij")
    gate_up = torch.cat((gate, up), -1).to(dtype)
    h = F.silu(gate.to(dtype)) * up.to(dtype)
    torch.testing.assert_close(torch.ops.mor_kernels.swiglu(gate_up, backend), h, equal_nan=True)
    leaf = gate_up.clone().requires_grad_()
    halves = leaf.chunk(2, -1)
    (want,) = torch.autograd.grad(F.silu(halves[0]) * halves[1], leaf, torch.ones_like(h))
    d_gate_up, again = backward(torch.ones_like(h), gate_up, backend)
    torch.testing.assert_close(d_gate_up, want, equal_nan=True)
    torch.testing.assert_close(again, h, equal_nan=True)


@s.targets("swiglu")
def test_a_nan_stays_in_its_row(device, backend):
    gate_up, weight = s.normal((6, 300), 0, torch.float32).to(device), s.normal((4, 150), 1, torch.float32).to(device)
    poisoned = gate_up.clone()
    poisoned[2, 149], poisoned[4, 150] = torch.nan, torch.nan
    got = ops.swiglu_linear(poisoned, weight, backend=backend)
    assert got.isnan().any(-1).tolist() == [False, False, True, False, True, False]
    there = [0, 1, 3, 5]
    torch.testing.assert_close(got[there], ops.swiglu_linear(gate_up, weight, backend=backend)[there])


@s.targets("swiglu")
@pytest.mark.parametrize("wanted", ["gate_up", "weight", "both", "neither"])
def test_gradients_of_what_needs_one(device, backend, wanted):
    gate_up, weight = s.normal((3, 5, 14), 0, torch.float32).to(device), s.normal((4, 7), 1, torch.float32).to(device)
    want = run(plain, (gate_up, weight), torch.ones(3, 5, 4, device=device))
    gate_up.requires_grad_(wanted in ("gate_up", "both")), weight.requires_grad_(wanted in ("weight", "both"))
    y = ops.swiglu_linear(gate_up, weight, backend=backend)
    assert y.requires_grad == (wanted != "neither")
    if y.requires_grad:
        y.sum().backward()
    for t, gradient in zip((gate_up, weight), want[1:], strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.requires_grad:
            torch.testing.assert_close(t.grad, gradient)


@s.targets("swiglu")
def test_keeps_its_arguments_alone(device, backend):
    gate_up, weight = (s.normal(shape, 0, torch.float32).to(device).requires_grad_() for shape in ((5, 14), (4, 7)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        ops.swiglu_linear(gate_up, weight, backend=backend)
    assert kept == [gate_up.data_ptr(), weight.data_ptr()]


@s.targets("swiglu")
def test_compiles_for_any_number_of_rows(device, backend):
    """Once, within a region that goes on, and for no rows too."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(x, into, weight):
        return x + ops.swiglu_linear(F.linear(x, into), weight, backend=backend)

    whole = torch.compile(step, fullgraph=True, backend=count)

    def compiled(x, *weights):
        torch._dynamo.maybe_mark_dynamic(x, 1)
        return whole(x, *weights)

    into, weight = s.normal((14, 4), 0, torch.float32).to(device), s.normal((4, 7), 1, torch.float32).to(device)
    for rows in (5, 3, 8, 0):
        x = s.normal((1, rows, 4), rows, torch.float32).to(device)
        for one, other in zip(*(run(f, (x, into, weight), torch.ones_like(x)) for f in (compiled, step)), strict=True):
            assert torch.equal(one, other)
        assert len(graphs) == 1 or not rows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 30 GB")
def test_more_than_two_to_the_31_elements():
    gate_up = torch.zeros(2**20 + 1, 2**11, dtype=torch.bfloat16, device="cuda")
    gate_up[-1] = 1
    h = torch.ops.mor_kernels.swiglu(gate_up, "auto")
    assert h[-1].min() > 0.7 and not h[:-1].any()
    d_gate_up, again = backward(torch.ones_like(h), gate_up, "auto")
    assert torch.equal(again, h) and d_gate_up[-1].min() > 0.7 and not d_gate_up[:-1].any()
