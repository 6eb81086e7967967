"""A residual sum, its RMSNorm and, where there is one, the linear layer behind it, against PyTorch's own in float64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from tests import strategies as s

forward, backward = torch.ops.mor_kernels.add_rms_norm, torch.ops.mor_kernels.add_rms_norm_backward
widths = st.one_of(st.sampled_from([1, 2, 16, 17, 64, 127, 960, 1025]), st.integers(1, 40))
EPS = 1e-5


def plain(x, gains, weight=None, add=None, eps=EPS):
    total = x if add is None else x + add
    h = F.rms_norm(total, total.shape[-1:], gains, eps)
    return total, h if weight is None else F.linear(h, weight)


def fused(x, gains, weight=None, add=None, eps=EPS, backend=None):
    if weight is None:
        return ops.rms_norm(x, gains, eps, add=add, backend=backend)
    return ops.rms_norm_linear(x, gains, weight, eps, add=add, backend=backend)


def run(function, inputs, d_outputs):
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    outputs, leaves = function(*inputs), [t for t in inputs if t is not None]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, d_outputs)]


@s.targets("add_rms_norm")
@given(
    rows=st.one_of(s.sizes_or_none, st.sampled_from([40, 300])), width=widths, scale=st.sampled_from([0.001, 1, 30]),
    adds=st.booleans(), seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
)  # fmt: skip
def test_norm_and_gradient(device, backend, rows, width, scale, adds, seed, dtype, strided):
    """Element by element: what is one rounding from exact is that near, the sum exactly PyTorch's."""
    s.assume_served(device, backend, dtype)
    x, d_h, d_total = (s.normal((rows, width), seed + i, dtype, strided).to(device) for i in range(3))
    x = x * scale
    add = (s.normal((rows, width), seed + 3, dtype) * scale).to(device) if adds else None
    gains = (1 + s.normal((width,), seed + 4, dtype) / 2).to(device)
    total, h, rstd = forward(x, add, gains, EPS, dtype, backend)
    assert torch.equal(total, x + add) if adds else not total.numel()
    total = total if adds else x
    got = backward(d_h, d_total, total, rstd, gains, True, backend)
    assert torch.equal(got[1], h)
    without = backward(d_h, d_total, total, rstd, gains, False, backend)
    assert torch.equal(without[0], got[0]) and not without[1].numel() and torch.equal(without[2], got[2])
    assert {t.dtype for t in (h, *got)} == {dtype} and rstd.dtype == torch.promote_types(dtype, torch.float32)

    exact, exact_gains = (t.detach().cpu().double().requires_grad_() for t in (total, gains))
    want = F.rms_norm(exact, (width,), exact_gains, EPS)
    d, d_gains = torch.autograd.grad(want, (exact, exact_gains), d_h.cpu().double())
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # where steps don't shrink any more
    # halves are rounded once; in fp32 and fp64 each factor is, and the mean of squares is a sum of `width`
    roundings = 0.51 if dtype in s.HALVES else 8
    s.assert_close(h, want.detach(), dtype, roundings, "h", slack=least)
    # the gradient cancels within a row, whose size is what roundings in fp32 are relative to
    sizes = d_h.cpu().double().abs().amax(1, True) * exact_gains.detach().abs().max() * rstd.cpu().double()[:, None]
    wide = torch.finfo(rstd.dtype).eps
    d = d + d_total.cpu().double()
    budget = roundings * torch.finfo(dtype).eps * d.abs() + 16 * wide * sizes.expand_as(d) + least
    assert ((got[0].cpu().double() - d).abs() <= budget).all(), "d"
    unit = exact.detach() * rstd.cpu().double()[:, None]
    budget = 16 * wide * (d_h.cpu().double() * unit).abs().sum(0) + least  # of a sum of so many
    if dtype in s.HALVES:
        budget += roundings * torch.finfo(dtype).eps * d_gains.abs()
    assert ((got[2].cpu().double() - d_gains).abs() <= budget).all(), "d_weight"


@s.targets("add_rms_norm")
def test_sums_of_programs(device, backend):
    """What a GPU of any size leaves; no call of an operator has so many programs in the interpreter."""
    if backend == "eager":
        pytest.skip("a kernel's")
    from mor_kernels.ops._triton import sum_rows

    for rows in (0, 1, 396, 1100):
        x = s.normal((rows, 37), rows, torch.float32).to(device)
        got, want = sum_rows(x, torch.bfloat16 if device == "cuda" else torch.float16), x.double().sum(0)
        assert ((got.double() - want).abs() <= 0.51 * torch.finfo(got.dtype).eps * want.abs() + 1e-5 * rows**0.5).all()


@s.targets("add_rms_norm")
@given(
    lead=st.lists(st.integers(0, 5), max_size=3), width=widths, out=st.none() | s.sizes_or_none, adds=st.booleans(),
    seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
)  # fmt: skip
def test_equals_pytorch(device, backend, lead, width, out, adds, seed, dtype, strided):
    """Through the product, if there is one: as near to float64 as PyTorch's own in the same dtype."""
    s.assume_served(device, backend, dtype)
    x = s.normal((*lead, width), seed, dtype, strided).to(device)
    add = s.normal((*lead, width), seed + 1, dtype, not strided).to(device) if adds else None
    gains = (1 + s.normal((width,), seed + 2, dtype) / 2).to(device)
    weight = None if out is None else s.normal((out, width), seed + 3, dtype, strided).to(device) / width**0.5
    widths_out = (width, width if out is None else out)
    d_outputs = [s.normal((*lead, n), seed + 4 + i, dtype).to(device) for i, n in enumerate(widths_out)]
    inputs = (x, gains, weight, add)
    exact_inputs, exact_d = ([None if t is None else t.cpu().double() for t in ts] for ts in (inputs, d_outputs))
    exact = run(plain, exact_inputs, exact_d)
    # What is added up, each without its sign. Of what comes back to the norm a part cancels: of a single column all but
    # EPS; a product and a sum over rows may leave little of their terms, each of which comes of a few roundings.
    d_y, rstd = exact_d[1].abs(), (exact[0].square().mean(-1, True) + EPS).rsqrt()
    unit, of_h = (exact[0] * rstd).abs(), d_y if out is None else d_y @ exact_inputs[2].abs()
    entering = (of_h * exact_inputs[1].abs() * rstd).amax() if of_h.numel() else 0
    terms = [0, 0, 2 * entering, torch.einsum("...w->w", of_h * unit), 2 * entering]
    if out is not None:
        h = unit * exact_inputs[1].abs()
        terms[1] = h @ exact_inputs[2].abs().mT
        terms.insert(4, torch.einsum("...o,...w->ow", d_y, h))
    ours = run(functools.partial(fused, backend=backend), inputs, d_outputs)
    theirs = run(plain, inputs, d_outputs)
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    labels = ("total", "y", *(f"gradient {i}" for i in range(4)))
    for label, want, one, other, of_it in zip(labels, exact, ours, theirs, terms):
        assert one.dtype == dtype and one.shape == want.shape
        if one.numel():
            one, other, largest = one.cpu().double(), other.cpu().double(), want.abs().max()
            budget = 2 * (other - want).abs().max() + 4 * eps * (want.abs() + largest) + 2 * eps * of_it + 9 * least
            assert ((one - want).abs() <= budget).all(), label


@s.targets("add_rms_norm")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_infinite_and_nan_stay_in_their_rows(device, backend):
    x, add = (s.normal((6, 300), i, torch.float32).to(device) for i in range(2))
    gains, weight = torch.ones(300, device=device), s.normal((4, 300), 2, torch.float32).to(device)
    poisoned = x.clone()
    poisoned[2, 299], poisoned[4, 0] = torch.nan, torch.inf
    got, want = fused(poisoned, gains, weight, add, backend=backend), plain(poisoned, gains, weight, add)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert got[1].isnan().any(1).tolist() == [False, False, True, False, True, False]


@s.targets("add_rms_norm")
@pytest.mark.parametrize("wanted", range(16))
def test_gradients_of_what_needs_one(device, backend, wanted):
    shapes = (3, 5, 6), (6,), (4, 6), (3, 5, 6)
    inputs = [s.normal(shape, i, torch.float32).to(device) for i, shape in enumerate(shapes)]
    d_outputs = [s.normal((3, 5, n), n, torch.float32).to(device) for n in (6, 4)]
    want = run(plain, inputs, d_outputs)[2:]
    for i, t in enumerate(inputs):
        t.requires_grad_(bool(wanted >> i & 1))
    x, gains, weight, add = inputs
    outputs = ops.rms_norm_linear(x, gains, weight, EPS, add=add, backend=backend)
    assert outputs[1].requires_grad == bool(wanted)
    if wanted:
        torch.autograd.backward([t for t in outputs if t.requires_grad],
                                [d for d, t in zip(d_outputs, outputs) if t.requires_grad])  # fmt: skip
    for t, gradient in zip(inputs, want, strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.requires_grad:
            torch.testing.assert_close(t.grad, gradient)


@s.targets("add_rms_norm")
def test_keeps_the_sum_and_a_number_a_row(device, backend):
    x, add = (s.normal((5, 6), i, torch.float32).to(device).requires_grad_() for i in range(2))
    gains, weight = torch.ones(6, device=device), s.normal((4, 6), 2, torch.float32).to(device).requires_grad_()
    kept = []
    for given_add in (None, add):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            total, _ = ops.rms_norm_linear(x, gains, weight, add=given_add, backend=backend)
        assert [tuple(t.shape) for t in kept] == [(5, 6), (5,), (6,), (4, 6)]
        assert kept[0].data_ptr() == total.data_ptr() and (total.data_ptr() == x.data_ptr()) == (given_add is None)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ops.rms_norm(x, gains, add=given_add, backend=backend)
        assert [tuple(t.shape) for t in kept] == [(5, 6), (5,), (6,)]


@s.targets("add_rms_norm")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)])
def test_under_autocast_the_product_alone_is_cast(device, backend, dtypes):
    if (device, backend) == ("cpu", "triton"):
        pytest.skip("the interpreter rounds bf16 wrongly")
    x, add = (s.normal((5, 6), i, dtype).to(device).requires_grad_() for i, dtype in enumerate(dtypes))
    gains, weight = (s.normal(shape, 2, torch.float32).to(device).requires_grad_() for shape in ((6,), (4, 6)))
    results = []
    for function in (functools.partial(fused, backend=backend), plain):
        with torch.autocast(device, dtype=torch.bfloat16):
            total, y = function(x, gains, weight, add)
        assert (total.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        results.append([total, y, *torch.autograd.grad(total.sum() + y.float().sin().sum(), (x, gains, weight, add))])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)  # a rounding of h or y to bf16, and its sum
    assert torch.equal(results[0][0], results[1][0])
    with torch.autocast(device, dtype=torch.bfloat16):
        without = ops.rms_norm(x, gains, add=add, backend=backend)
    for one, other in zip(without, ops.rms_norm(x, gains, add=add.float(), backend=backend), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)


@s.targets("add_rms_norm")
def test_compiles_for_any_number_of_rows(device, backend):
    torch._dynamo.reset()

    def step(x, add, gains, weight):
        total, y = ops.rms_norm_linear(x, gains, weight, add=add, backend=backend)
        return ops.rms_norm_linear(total * 2, gains, weight, backend=backend)[0], y

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")

    def compiled(x, add, *others):
        for t in (x, add):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        return whole(x, add, *others)

    gains, weight = torch.ones(6, device=device), s.normal((4, 6), 1, torch.float32).to(device)
    for rows in (5, 3, 8):
        x, add = (s.normal((rows, 6), i, torch.float32).to(device) for i in range(2))
        d_outputs = [torch.ones(rows, n, device=device) for n in (6, 4)]
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            got = run(compiled, (x, add, gains, weight), d_outputs)
        for one, other in zip(got, run(step, (x, add, gains, weight), d_outputs), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 30 GB")
def test_more_than_two_to_the_31_elements():
    x = torch.zeros(2**21 + 1, 2**10, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    gains = torch.ones(2**10, dtype=torch.bfloat16, device="cuda")
    total, h, rstd = forward(x, x, gains, EPS, torch.bfloat16, "auto")
    assert torch.equal(total[-1], 2 * x[-1]) and torch.equal(h[-1], x[-1]) and not h[:-1].any() and not total[:-1].any()
    d, again, d_gains = backward(x, x, total, rstd, gains, True, "auto")
    assert torch.equal(again, h) and torch.equal(d[-1], x[-1]) and not d[:-1].any()
    assert torch.equal(d_gains, torch.ones_like(d_gains))
