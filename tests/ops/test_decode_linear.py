"""Linear layers of few rows, with the norm, the gates and the residual sum around them."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s

PLANS = [(0, 0, 0), (32, 1, 0), (32, 4, 0), (64, 2, 40), (64, 8, 0), (128, 1, 0), (128, 3, 120)]


WIDER = (576, 1288) if "cuda" in s.DEVICES else ()


def planned(backend, plan):
    """The CUDA kernel's rows of the weight, parts of K, and KB of shared memory; zeros leave them to the launcher."""
    if backend != "cuda":
        return contextlib.nullcontext()
    ops.decode_linear(*[torch.zeros(0, 8, dtype=torch.float16, device=s.DEVICES[-1])] * 2, backend="cuda")  # imports it
    return mock.patch.object(sys.modules["mor_kernels.ops.decode_linear.cuda"], "PLAN", plan)


def serves(backend, dtype, norm, width):
    if backend != "cuda":
        return True
    return dtype in s.HALVES and width % 8 == 0 and not (norm and dtype == torch.float16)


def exactly(x, weight, norm_weight=None, eps=1e-5, residual=None, gated=False, *, between=False):
    """y in fp64, and how far a result of x's dtype may be from it: what each rounding can do, added up.

    A norm rounds the rows that are multiplied, ``between`` tells that products are rounded, and y is. Sums of K
    products in fp32 (fp64) may be off by a rounding of their largest part at each step, on tensor cores by two.
    """
    unit = torch.finfo(x.dtype).eps / (1 if x.dtype == torch.float64 else 2)  # y in fp64 is rounded here, too
    step = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    h, w = x.double(), weight.double()
    off = 2 * (h.shape[1] + 8) * step
    if norm_weight is not None:
        h = h * (h.square().mean(1, keepdim=True) + eps).rsqrt() * norm_weight.double()
        off += unit
    y = h @ w.T
    delta = off * (h.abs() @ w.abs().T)
    if between:
        delta = delta + unit * (y.abs() + delta)
    if gated:
        (gate, value), (of_gate, of_value) = y.chunk(2, 1), delta.chunk(2, 1)
        y, steepest = F.silu(gate) * value, 1.1  # of silu
        delta = steepest * of_gate * (value.abs() + of_value) + F.silu(gate).abs() * of_value + 8 * step * y.abs()
        if between:
            delta = delta + unit * (y.abs() + delta)
    if residual is not None:
        y = y + residual.double()
    delta = delta + unit * (y.abs() + delta) + torch.finfo(x.dtype).smallest_normal * unit
    return y, delta


def assert_within(got, x, *arguments, backend, **options):
    want, allowed = exactly(x, *arguments, **options, between=backend == "triton")  # PyTorch's product
    assert got.dtype == x.dtype and got.shape == want.shape and got.is_contiguous()
    over = (got.cpu().double() - want).abs() - allowed
    assert not over.isnan().any() and (not over.numel() or over.max() <= 0), f"{over.max()} over the budget"


def drawn(n, width, columns, seed, dtype, norm, added, gated, strided):
    """Arguments and options. Strided ones are rows of wider memory, so that every backend takes them."""

    def make(nth, rows, width):
        return s.normal((rows, width + 24 * strided), seed + nth, dtype)[:, 8 * strided :][:, :width]

    options = {"gated": gated, "eps": 0.01}
    if norm:
        options["norm_weight"] = (s.normal((width,), seed + 2) / 4 + 1).to(dtype)
    if added:
        options["residual"] = make(3, n, columns)
    return (make(0, n, width), make(1, columns * (2 if gated else 1), width)), options


def on(device, arguments, options):
    move = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t  # noqa: E731
    return [move(t) for t in arguments], {name: move(t) for name, t in options.items()}


@s.targets("decode_linear")
@given(
    n=st.sampled_from([0, 1, 2, 7, 16, 17, 33]), width=st.sampled_from([1, 7, 8, 24, 64, 72, 200, *WIDER]),
    columns=st.sampled_from([0, 1, 7, 32, 36, 67, *WIDER]), seed=s.seeds, dtype=s.dtypes, norm=st.booleans(),
    added=st.booleans(), gated=st.booleans(), strided=st.booleans(), prefetch=st.booleans(),
    plan=st.sampled_from(PLANS),
)  # fmt: skip
def test_equals_reference(
    device, backend, n, width, columns, seed, dtype, norm, added, gated, strided, prefetch, plan
):  # fmt: skip
    s.assume_served(device, backend, dtype)
    if backend == "cuda":  # most of what is drawn, in place of little
        width, dtype = -(-width // 8) * 8, torch.bfloat16 if norm else dtype
    assume(serves(backend, dtype, norm, width))
    arguments, options = drawn(n, width, columns, seed, dtype, norm, added, gated, strided)
    there, with_ = on(device, arguments, options)
    with planned(backend, plan):
        got = ops.decode_linear(*there, **with_, prefetch=prefetch, backend=backend)
    assert_within(got, *arguments, **options, backend=backend)


@s.targets("decode_linear")
@pytest.mark.parametrize(
    ("n", "width", "columns", "gated", "plan"),
    [(130, 136, 33, False, (0, 0, 0)), (65, 200, 40, True, (64, 2, 0)), (40, 968, 67, True, (128, 1, 0)), (9, 1288,
     70, False, (32, 1, 20)), (100, 1288, 30, False, (128, 2, 0)), (33, 520, 130, False, (64, 7, 0)), (100, 1288, 30,
     False, (128, 2, 160)), (20, 968, 30, False, (64, 1, 98))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_many_rows_and_long_ones(device, backend, n, width, columns, gated, plan):
    """More than a tile of rows, more of K than a ring has room for, and parts of several lengths."""
    for norm in (False, True):
        dtype = torch.bfloat16 if norm and backend == "cuda" else torch.float16
        arguments, options = drawn(n, width, columns, 5, dtype, norm, True, gated, False)
        there, with_ = on(device, arguments, options)
        with planned(backend, plan):
            got = ops.decode_linear(*there, **with_, backend=backend)
        assert_within(got, *arguments, **options, backend=backend)


@s.targets("decode_linear")
@pytest.mark.parametrize("gated", [False, True])
def test_no_worse_than_pytorch_in_the_same_dtype(device, backend, gated):
    """The error of its rows, beside that of PyTorch's operators one after another, each of which rounds."""
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    arguments, options = drawn(12, 576, 48, 3, dtype, True, True, gated, False)
    there, with_ = on(device, arguments, options)
    got = ops.decode_linear(*there, **with_, backend=backend).cpu().double()
    want = exactly(*arguments, **options)[0]
    x, weight = arguments
    y = F.linear(F.rms_norm(x, x.shape[1:], options["norm_weight"], options["eps"]), weight)
    if gated:
        gate, value = y.chunk(2, 1)
        y = F.silu(gate) * value
    plain = (y + options["residual"]).double()
    assert (got - want).square().mean() <= 1.1 * (plain - want).square().mean()


@s.targets("decode_linear")
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_depends_on_no_other(device, backend, gated):
    """Nor on where it stands; those of the kernel not on how many there are, either."""
    if backend == "triton":
        pytest.skip("its products are PyTorch's")
    n, width, columns = 40, 200, 24
    dtype = torch.bfloat16 if backend == "cuda" else torch.float64
    arguments, options = drawn(n, width, columns, 0, dtype, True, True, gated, False)
    (x, weight), options = on(device, arguments, options)
    residual = options.pop("residual")

    def run(x, residual):
        return ops.decode_linear(x, weight, **options, residual=residual, backend=backend)

    exact = backend == "cuda"
    for plan in PLANS:
        with planned(backend, plan):
            y = run(x, residual)
            order = torch.randperm(n)
            same = torch.equal(run(x[order], residual[order]), y[order])
            poisoned = torch.full_like(x, torch.nan)
            poisoned[1::2] = torch.inf
            poisoned[5], poisoned[26] = x[5], x[26]
            alone = run(poisoned, residual)
            few = run(x[:9].contiguous(), residual[:9])
        if exact:
            assert same and torch.equal(alone[[5, 26]], y[[5, 26]]) and torch.equal(few, y[:9])
        else:  # PyTorch's product may add up otherwise
            torch.testing.assert_close(alone[[5, 26]], y[[5, 26]])
            torch.testing.assert_close(few, y[:9])
            break


def assert_next(got, gains):
    """y * gains and sums of y's squares are of y as it was rounded; every sum of the same columns."""
    y, scaled, squares = (t.cpu() for t in got)
    assert scaled.dtype == y.dtype and scaled.shape == y.shape and scaled.is_contiguous()
    torch.testing.assert_close(scaled, y * gains, rtol=0, atol=0)
    n, columns = y.shape
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    assert squares.dtype == wide and squares.shape == (n, -(-columns // 32)) and squares.is_contiguous()
    want = F.pad(y.double().square(), (0, -columns % 32)).view(n, -(-columns // 32), 32).sum(2)
    torch.testing.assert_close(squares.double(), want, rtol=32 * torch.finfo(wide).eps, atol=0)


@s.targets("decode_linear")
@given(
    n=st.sampled_from([0, 1, 2, 17, 33]), width=st.sampled_from([1, 8, 72, 200]),
    between=st.sampled_from([1, 8, 32, 40, 136, 264, *WIDER]), columns=st.sampled_from([1, 8, 36, 67]), seed=s.seeds,
    dtype=s.dtypes, added=st.booleans(), gated=st.booleans(), strided=st.booleans(), prefetch=st.booleans(),
    plan=st.sampled_from(PLANS), next_plan=st.sampled_from(PLANS),
)  # fmt: skip
def test_a_norm_of_the_layer_before(
    device, backend, n, width, between, columns, seed, dtype, added, gated, strided, prefetch, plan, next_plan
):  # fmt: skip
    """Two layers with a norm between them, of which the first gives squares and the second divides."""
    s.assume_served(device, backend, dtype)
    if backend == "cuda":
        width, between, dtype = -(-width // 8) * 8, -(-between // 8) * 8, torch.bfloat16
    first, options = drawn(n, width, between, seed, dtype, False, added, False, strided)
    gains = (s.normal((between,), seed + 7) / 4 + 1).to(dtype)
    (_, weight), last = drawn(n, between, columns, seed + 11, dtype, False, added, gated, strided)
    there, with_ = on(device, first, options | {"next_norm_weight": gains})
    with planned(backend, plan):
        got = ops.decode_linear(*there, **with_, prefetch=prefetch, backend=backend)
        assert torch.equal(got[0], ops.decode_linear(*there, **on(device, (), options)[1], backend=backend))
    assert_within(got[0], *first, **options, backend=backend)
    assert_next(got, gains)
    y, scaled, squares = got
    (weight_there,), with_ = on(device, (weight,), last | {"squares": squares})
    with planned(backend, next_plan):
        z = ops.decode_linear(scaled, weight_there, **with_, prefetch=prefetch, backend=backend)
    assert_within(z, y.cpu(), weight, gains, **last, backend=backend)


@s.targets("decode_linear")
def test_squares_of_a_row_depend_on_no_other(device, backend):
    """Nor does what is made of them; how many partial sums there are is up to the caller."""
    if backend == "triton":
        pytest.skip("its products are PyTorch's")
    n, width, columns = 40, 136, 72
    dtype = torch.bfloat16 if backend == "cuda" else torch.float64
    gains = s.normal((width,), 9, dtype)
    (x, weight, more, gains), _ = on(
        device, (*drawn(n, width, width, 0, dtype, False, False, False, False)[0], s.normal((columns, width), 8, dtype),
                 gains), {},
    )  # fmt: skip

    def run(x):
        y, scaled, squares = ops.decode_linear(x, weight, next_norm_weight=gains, backend=backend)
        return y, scaled, squares, ops.decode_linear(scaled, more, squares=squares, backend=backend)

    poisoned = torch.full_like(x, torch.nan)
    poisoned[1::2] = torch.inf
    poisoned[5], poisoned[26] = x[5], x[26]
    order = torch.randperm(n)
    for plan in PLANS:
        with planned(backend, plan):
            want, mixed, alone, few = run(x), run(x[order]), run(poisoned), run(x[:9].contiguous())
        for of_all, of_mixed, of_alone, of_few in zip(want, mixed, alone, few):
            if backend == "cuda":
                assert torch.equal(of_mixed, of_all[order]) and torch.equal(of_few, of_all[:9])
                assert torch.equal(of_alone[[5, 26]], of_all[[5, 26]])
            else:
                torch.testing.assert_close(of_alone[[5, 26]], of_all[[5, 26]])
    _, scaled, squares, y = want
    for sums in (squares.sum(1, keepdim=True), F.pad(squares, (0, 30))[:, torch.arange(35) // 2]):
        got = ops.decode_linear(scaled, more, squares=sums, eps=0.5, backend=backend)
        z = scaled.double() @ more.double().T * (sums.double().sum(1, keepdim=True) / width + 0.5).rsqrt()
        torch.testing.assert_close(got.double(), z, rtol=2**-7, atol=2**-7)


@s.targets("decode_linear")
def test_large_and_small_rows(device, backend):
    """Squares of the largest rows don't overflow, a row of zeros is its residual, and eps counts for small ones."""
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    x = s.normal((4, 64), 0, dtype)
    x[0], x[1], x[2] = 0, x[1] * 1000, x[2] / 1000
    _, options = drawn(4, 64, 9, 0, dtype, True, True, False, False)
    weight = s.normal((9, 64), 1, dtype)
    there, with_ = on(device, (x, weight), options)
    got = ops.decode_linear(*there, **with_, backend=backend)
    assert_within(got, x, weight, **options, backend=backend)
    assert torch.equal(got[0].cpu(), options["residual"][0])


@s.kernels("decode_linear", "cuda")
def test_what_the_kernel_refuses(device, backend):
    x, weight = (s.normal((5, 24), i, torch.bfloat16).to(device) for i in range(2))
    for reason, arguments, options in [
        ("not torch.float32", (x.float(), weight.float()), {}),
        ("float16 has no room", (x.half(), weight.half()), {"norm_weight": weight[0].half()}),
        ("of x don't allow", (x[:, 1:], weight[:, 1:]), {}),
        ("of x don't allow", (x[:, 1:9], weight[:, :8]), {}),
        ("of x don't allow", (x.mT.contiguous().mT, weight), {}),
        ("of weight don't allow", (x[:, :16], s.normal((3, 36), 2, torch.bfloat16).to(device)[:, :16]), {}),
        ("of norm_weight don't allow", (x, weight), {"norm_weight": x.flatten()[1:25]}),
        ("residual whose elements", (x, weight), {"residual": x[:, :5].mT.contiguous().mT}),
    ]:
        with pytest.raises(RuntimeError, match=f"decode_linear: backend='cuda' is not available: .*{reason}"):
            ops.decode_linear(*arguments, **options, backend=backend)
        got = ops.decode_linear(*arguments, **options)
        between = "triton" if device == "cuda" else "eager"
        cpu, options = on("cpu", arguments, options)
        assert_within(got, *cpu, **options, backend=between)
    for options in ({"squares": torch.ones(5, 1, device=device)}, {"next_norm_weight": x[0, :5].half()}):
        with pytest.raises(RuntimeError, match="float16 has no room"):
            ops.decode_linear(x.half(), weight.half(), **options, backend=backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_chain_in_a_cuda_graph(backend, prefetch):
    """Each reads what the one before wrote, and begins before that is over; nothing waits for the host."""
    n, width, layers = 40, 512, 12
    options = {"prefetch": prefetch, "backend": backend}
    weights = [(s.normal((width, width), i, torch.bfloat16) / width**0.5).cuda() for i in range(layers)]
    gain = torch.ones(width, dtype=torch.bfloat16, device="cuda")

    def chain(x):
        for weight in weights:
            h = ops.decode_linear(x, weight, norm_weight=gain, **options)
            x, scaled, squares = ops.decode_linear(h, weight, residual=x, next_norm_weight=gain, **options)
            h = ops.decode_linear(scaled, weight, squares=squares, **options)
            x = ops.decode_linear(h, weight, residual=x, **options)
        return x

    x = s.normal((n, width), 99, torch.bfloat16).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = chain(x).clone()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for seed in range(3):
        graph.replay()
        assert torch.equal(got, want)
        x.copy_(s.normal((n, width), seed, torch.bfloat16))
        want = chain(x).clone()
    torch.cuda.synchronize()


def paged(n, pages, page_size, groups, width, seed, dtype, strided):
    """Caches, of which those of ``strided`` lie (page, head, slot, d) in memory, and slots, a third of them -1."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * page_size, generator=generator)[:n]
    slots = torch.where(torch.rand(n, generator=generator) < 0.3, -1, slots)
    shape = (pages, groups, page_size, width) if strided else (pages, page_size, groups, width)
    caches = [s.normal(shape, seed + i, dtype) for i in (5, 6)]
    return [c.transpose(1, 2) if strided else c for c in caches], slots


@s.targets("decode_qkv_")
@given(
    n=st.sampled_from([0, 1, 3, 17, 33]), width=st.sampled_from([8, 72, 200]), counts=st.sampled_from([(1, 1), (3, 2)]),
    of_head=st.sampled_from([2, 6, 64, 128]), seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
    prefetch=st.booleans(), short=st.booleans(), before=st.booleans(), plan=st.sampled_from(PLANS),
)  # fmt: skip
def test_heads_are_turned_and_appended(
    device, backend, n, width, counts, of_head, seed, dtype, strided, prefetch, short, before, plan
):  # fmt: skip
    """Into caches whose other slots stay as they were to the bit; with the norm's squares from ``before``, or not."""
    s.assume_served(device, backend, dtype)
    if backend == "cuda":
        of_head, dtype = max(of_head, 64), torch.bfloat16
    heads, groups = counts
    (x, weight), options = drawn(n, width, (heads + 2 * groups) * of_head, seed, dtype, True, False, False, strided)
    del options["gated"]
    caches, slots = paged(n, 9, 5, groups, of_head, seed, dtype, strided)
    positions = torch.randint(0, 3000, (n,), generator=torch.Generator().manual_seed(seed))
    if short:
        positions = positions.int()
    of_norm = dict(options)
    multiplied = x
    if before:
        multiplied = x * of_norm.pop("norm_weight")
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_norm["squares"] = x.to(wide).square()
    moved = on(device, (multiplied, weight, *caches, slots), of_norm | {"positions": positions})
    (x_there, *there), with_ = moved
    with planned(backend, plan):
        got = ops.decode_qkv_(x_there, *there, heads=heads, **with_, prefetch=prefetch, backend=backend)
    y, delta = exactly(x, weight, **options, between=backend == "triton")
    y, delta = (t.view(n, heads + 2 * groups, of_head) for t in (y, delta))
    of_angle = torch.finfo(torch.float32).eps * (3000 if backend == "eager" and dtype != torch.float64 else 8)
    turned = reference.rope(y[:, :-groups], positions.long())
    first, second = y[:, :-groups].abs().chunk(2, 2)
    both, of_both = first + second, sum(delta[:, :-groups].chunk(2, 2))
    allowed = (of_both + of_angle * both + torch.finfo(dtype).eps / 2 * both).repeat(1, 1, 2)
    want, allowed = torch.cat((turned, y[:, -groups:]), 1), torch.cat((allowed, delta[:, -groups:]), 1)
    assert got.dtype == dtype and got.shape == (n, heads, of_head) and got.is_contiguous()
    assert ((got.cpu().double() - want[:, :heads]).abs() <= allowed[:, :heads]).all()
    for nth, (cache, before) in enumerate(zip(there[1:3], caches)):
        cache, part = cache.cpu(), slice(heads + nth * groups, heads + (nth + 1) * groups)
        written = slots[slots >= 0]
        off = (cache.flatten(0, 1)[written].double() - want[slots >= 0, part]).abs()
        assert (off <= allowed[slots >= 0, part]).all()
        others = torch.ones(9 * 5, dtype=torch.bool)
        others[written] = False
        assert torch.equal(cache.flatten(0, 1)[others], before.flatten(0, 1)[others])


@s.targets("decode_qkv_")
def test_heads_are_those_of_the_two_operators(device, backend):
    """In float32 or, of the kernel, but for one rounding; also to caches of 8 bits, which that kernel leaves to others,
    and without any slot."""
    n, heads, groups, of_head, width = 5, 3, 1, 64, 40
    dtype = torch.bfloat16 if backend == "cuda" else torch.float32
    (x, weight), options = drawn(n, width, (heads + 2 * groups) * of_head, 0, dtype, True, False, False, False)
    del options["gated"]
    positions, slots = torch.tensor([0, 7, 1, 2**20, 3]), torch.tensor([3, -1, 0, 11, 5])
    stored = [dtype, torch.float8_e4m3fn] if backend != "cuda" else [dtype]
    for pages, cache_dtype in [*((3, d) for d in stored), (0, dtype)]:
        caches = [torch.zeros(pages, 4, groups, of_head, dtype=cache_dtype, device=device) for _ in range(4)]
        there, with_ = on(device, (x, weight, slots if pages else torch.full((n,), -1), positions), options)
        *there, slots_there, positions_there = there
        q = ops.decode_qkv_(
            *there, *caches[:2], slots_there, heads=heads, positions=positions_there, **with_, backend=backend
        )
        y = ops.decode_linear(*there, **with_, backend=backend).view(n, -1, of_head)
        want, k, v = y.split((heads, groups, groups), 1)
        want = ops.kv_append_(k, v, *caches[2:], slots_there, positions=positions_there, q=want, backend=backend)
        rounding = {torch.bfloat16: 2**-6, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(q, want, rtol=rounding, atol=rounding)
        for got, wanted in zip(caches[:2], caches[2:]):
            rtol = 2**-3 if cache_dtype == torch.float8_e4m3fn else rounding  # a number rounded the other way
            torch.testing.assert_close(got.float(), wanted.float(), rtol=rtol, atol=rounding)


@s.kernels("decode_qkv_", "cuda")
def test_which_heads_the_kernel_refuses(device, backend):
    def call(of_head=64, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, shift=0, x=None):
        x = s.normal((3, 24), 0, dtype) if x is None else x
        (x, weight), options = on(device, (x, s.normal((3 * of_head, 24), 1, dtype)), {"norm_weight": x[0].clone()})
        cache = torch.zeros(2, 4, 1, of_head + shift, device=device).to(cache_dtype)[..., shift:]
        slots = torch.arange(3, device=device)
        ops.decode_qkv_(
            x, weight, cache, cache.clone(), slots, heads=1, positions=slots, **options, backend=backend
        )  # fmt: skip

    call()
    for reason, changed in [
        ("of width 64 or 128, not 32", {"of_head": 32}),
        ("caches of the dtype of x, torch.bfloat16, not torch.float32", {"cache_dtype": torch.float32}),
        ("float16 has no room", {"dtype": torch.float16, "cache_dtype": torch.float16}),
        ("of k_cache don't allow", {"shift": 1}),
        ("of x don't allow", {"x": s.normal((24, 3), 0, torch.bfloat16).mT}),
    ]:
        with pytest.raises(RuntimeError, match=f"decode_qkv_: backend='cuda' is not available: .*{reason}"):
            call(**changed)
