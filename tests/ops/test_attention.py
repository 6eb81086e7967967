"""Attention against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops.attention import eager
from reference import ops as reference
from tests import strategies as s


def rounding_of_nothing(upstream, out, v, factor, scale):
    """Of a gradient d_s times a factor, k or q: d_s is p times a difference, and where that is 0, as with one key, a
    rounding of what is subtracted is left. Of that out was rounded to its dtype: an error that is the same in all d_s
    of a query, and so is left where their sum cancels."""
    if not (upstream.numel() and v.numel()):
        return 0.0
    eps = torch.finfo(torch.float64 if upstream.dtype == torch.float64 else torch.float32).eps
    sums = eps * upstream.double().abs().sum(-1).max().item() * v.abs().max().item()
    scale = v.shape[-1] ** -0.5 if scale is None else abs(scale)
    of_out = torch.finfo(upstream.dtype).eps / 2 * scale * (upstream.double() * out).abs().sum(-1).max().item()
    return (sums + of_out) * factor.abs().max().item()


def compare(got, want, inputs, exact, dtype, device, backend, scale=None):
    """Outputs and gradients against float64, element by element."""
    (out, lse), (out64, lse64) = got, want
    seen = lse64 > -torch.inf
    assert torch.equal(lse.cpu() > -torch.inf, seen)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    off = s.rounding_of_scores(*exact[:2], scale, dtype)
    s.assert_close(lse.cpu()[seen], lse64[seen], wide, 8, "lse", slack=off)  # an fp32 sum of exponentials of fp32 sums
    # A kernel rounds p to dtype for the tensor cores: an error of up to half an eps of sum p |v|, so of the largest v.
    rounded = backend != "eager" and dtype in s.HALVES
    off += torch.finfo(dtype).eps / 2 * rounded
    slack = off * exact[2].abs().amax().item() if exact[2].numel() else 0.0
    s.assert_close(out, out64, dtype, 0.5, "out", slack=slack)  # fp32 arithmetic, rounded once, to nearest
    upstream, upstream_lse = s.normal(out64.shape, 5, dtype), torch.where(seen, s.normal(lse64.shape, 6), 0)
    loss = (out.double() * upstream.double().to(device)).sum()
    loss = loss + torch.where(seen.to(device), lse.double() * upstream_lse.to(device), 0).sum()
    loss64 = (out64 * upstream.double()).sum() + torch.where(seen, lse64 * upstream_lse, 0).sum()
    gradients = torch.autograd.grad(loss, inputs)
    wanted = torch.autograd.grad(loss64, exact, materialize_grads=True) if loss64.requires_grad else None
    for i, (name, gradient) in enumerate(zip(("d_q", "d_k", "d_v"), gradients)):
        other = wanted[i] if wanted else torch.zeros_like(exact[i])
        # d_s = p (d_out v^T - sum(d_out out)): out comes rounded to dtype, and the two terms cancel; where p and d_s
        # are rounded too, so does a sum of up to a hundred of them, of any sign
        slack = rounding_of_nothing(upstream, out64, exact[2], exact[1 - i], scale) if i < 2 else 0.0
        s.assert_close(gradient, other, dtype, 4, name, cancels=1.0 if rounded else 0.25, slack=slack)


@s.targets("attention")
@given(
    batch=st.integers(0, 3), queries=s.sizes_or_none, keys=s.sizes_or_none, heads=s.counts_of_heads, width=s.widths,
    seed=s.seeds, dtype=s.dtypes, strided=st.booleans(), positioned=st.booleans(), ragged=st.booleans(),
    scale=st.sampled_from([None, 0.3, 0.0, -0.3]),
)  # fmt: skip
def test_equals_reference(
    device, backend, batch, queries, keys, heads, width, seed, dtype, strided, positioned, ragged, scale
):
    s.assume_served(device, backend, dtype)
    width = s.wider(device, seed, width, (4, 40, 64, 128))
    if backend == "triton":  # what gradients' sums of more than that may be off by is known of its tiles
        queries, keys = s.larger(device, seed, queries, keys)
    check(device, backend, batch, queries, keys, heads, width, seed, dtype, strided, positioned, ragged, scale)


def check(device, backend, batch, queries, keys, heads, width, seed, dtype, strided, positioned, ragged, scale=None):
    q_heads, kv_heads = heads
    q, k, v = (
        s.normal((batch, n, h, width), seed + i, dtype, strided)
        for i, (n, h) in enumerate([(queries, q_heads), (keys, kv_heads), (keys, kv_heads)])
    )
    options = {"softmax_scale": scale}
    if positioned:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(batch, max(keys, queries), generator=generator).argsort(1)[:, :queries]
        options["q_positions"] = drawn.sort(1).values
    if ragged:
        options |= {"q_lens": s.lengths(batch, queries, seed), "k_lens": s.lengths(batch, keys, seed + 1)}
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    if batch and queries:
        want = reference.attention(*exact, return_lse=True, **options)
    else:
        want = exact[0] * 1, q.new_zeros(batch, q_heads, queries, dtype=torch.float64)
    if ragged and not strided and dtype.is_floating_point:
        q = s.poison_tail(q, options["q_lens"])
        k, v = (s.poison_tail(t, options["k_lens"]) for t in (k, v))
    inputs = [t.to(device).detach().requires_grad_() for t in (q, k, v)]
    moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    got = ops.attention(*inputs, return_lse=True, backend=backend, **moved)
    compare(got, want, inputs, exact, dtype, device, backend, scale)


@s.targets("attention_varlen")
@given(
    batch=st.integers(1, 4), longest=s.sizes, heads=s.counts_of_heads, width=s.widths, seed=s.seeds, dtype=s.dtypes,
    slack=st.integers(0, 3), positioned=st.booleans(),
)  # fmt: skip
def test_varlen_equals_reference(device, backend, batch, longest, heads, width, seed, dtype, slack, positioned):
    s.assume_served(device, backend, dtype)
    width = s.wider(device, seed, width, (4, 40, 64, 128))
    longest = s.larger(device, seed, longest) if backend == "triton" else longest
    check_varlen(device, backend, batch, longest, heads, width, seed, dtype, slack, positioned)


def check_varlen(device, backend, batch, longest, heads, width, seed, dtype, slack, positioned):
    q_lens, k_lens = s.lengths(batch, longest, seed), s.lengths(batch, longest, seed + 1)
    total_q, total_k = int(q_lens.sum()) + slack, int(k_lens.sum()) + slack
    q, k, v = (
        s.normal((n, h, width), seed + i, dtype)
        for i, (n, h) in enumerate([(total_q, heads[0]), (total_k, heads[1]), (total_k, heads[1])])
    )
    cu = s.cu_seqlens(q_lens), s.cu_seqlens(k_lens)
    positions = None
    if positioned:
        positions = torch.randint(0, longest + 1, (total_q,), generator=torch.Generator().manual_seed(seed))
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want = reference.attention_varlen(*exact, *cu, longest, longest, q_positions=positions, return_lse=True)
    inputs = [t.to(device).requires_grad_() for t in (q, k, v)]
    got = ops.attention_varlen(
        *inputs, *(t.to(device) for t in cu), longest, longest + slack, return_lse=True, backend=backend,
        q_positions=None if positions is None else positions.to(device),
    )  # fmt: skip
    compare(got, want, inputs, exact, dtype, device, backend)


on_hopper = s.kernels("attention", "hopper")


@on_hopper
@s.examples(60)
@given(
    batch=st.integers(0, 3), queries=st.integers(0, 400), keys=st.integers(0, 400), heads=s.counts_of_heads,
    width=st.sampled_from([64, 128]), seed=s.seeds, dtype=st.sampled_from(s.HALVES), strided=st.booleans(),
    positioned=st.booleans(), ragged=st.booleans(),
)  # fmt: skip
@example(
    batch=12, queries=390, keys=400, heads=(6, 3), width=64, seed=0, dtype=torch.bfloat16, strided=False,
    positioned=True, ragged=True,
)  # fmt: skip
@example(
    batch=12, queries=390, keys=400, heads=(6, 3), width=128, seed=1, dtype=torch.bfloat16, strided=False,
    positioned=True, ragged=True,
)  # fmt: skip
def test_hopper_equals_reference(
    device, backend, batch, queries, keys, heads, width, seed, dtype, strided, positioned, ragged
):
    """Tiles of 128 queries and keys, whole, in part and without any; in the examples more of them than programs."""
    check(device, backend, batch, queries, keys, heads, width, seed, dtype, strided, positioned, ragged)


@on_hopper
@s.examples(40)
@given(
    batch=st.integers(1, 4), longest=st.integers(1, 400), heads=s.counts_of_heads, width=st.sampled_from([64, 128]),
    seed=s.seeds, dtype=st.sampled_from(s.HALVES), slack=st.integers(0, 3), positioned=st.booleans(),
)  # fmt: skip
@example(batch=20, longest=400, heads=(6, 3), width=64, seed=0, dtype=torch.float16, slack=3, positioned=False)
@example(batch=20, longest=400, heads=(6, 3), width=128, seed=1, dtype=torch.float16, slack=3, positioned=False)
def test_hopper_varlen_equals_reference(device, backend, batch, longest, heads, width, seed, dtype, slack, positioned):
    check_varlen(device, backend, batch, longest, heads, width, seed, dtype, slack, positioned)


@pytest.fixture
def many_tiles(device, monkeypatch):
    """How much larger lengths must be for several tiles; in the interpreter tiles are small, since each takes long."""
    if device == "cuda":
        return 8
    from mor_kernels.ops.attention import triton as kernels

    small = kernels.Setting(16, 16, 4, 1)
    monkeypatch.setattr(kernels, "settings", lambda *_: kernels.Settings(small, small, small))
    return 1


on_triton = s.kernels("attention", "triton")


@on_triton
@s.examples(12)
@given(
    queries=st.integers(1, 36), keys=st.integers(1, 36), heads=st.sampled_from([(2, 2), (3, 1), (6, 2)]), seed=s.seeds,
    dtype=st.sampled_from([torch.float32, torch.float16]), positioned=st.booleans(), ragged=st.booleans(),
)  # fmt: skip
@example(queries=32, keys=33, heads=(3, 1), seed=0, dtype=torch.float32, positioned=False, ragged=False)  # whole tiles
def test_many_tiles(device, backend, many_tiles, queries, keys, heads, seed, dtype, positioned, ragged):
    """Skipped, masked and wholly visible tiles; rows of a tile that end inside a query's group."""
    lengths = queries * many_tiles, keys * many_tiles
    check(device, backend, 2, *lengths, heads, 16, seed, dtype, False, positioned, ragged)


@on_triton
@pytest.mark.parametrize("heads", [(3, 1), (4, 2)])
@s.examples(3)
@given(longest=st.integers(1, 36), seed=s.seeds, positioned=st.booleans())
def test_many_tiles_packed(device, backend, many_tiles, heads, longest, seed, positioned):
    check_varlen(device, backend, 3, longest * many_tiles, heads, 16, seed, torch.float32, 21, positioned)


@on_triton
def test_sections_of_pairs(device, backend, many_tiles, monkeypatch):
    """Pairs of sequence and head come in sections, the last of them smaller."""
    from mor_kernels.ops.attention import _triton as shared

    monkeypatch.setattr(shared, "SECTION_BYTES", 2 * (2 * 40 * many_tiles * 16 * 4))
    check(device, backend, 5, 30 * many_tiles, 40 * many_tiles, (3, 3), 16, 0, torch.float32, False, True, True)


@on_triton
def test_positions_are_searched_in_pieces(device, backend, many_tiles, monkeypatch):
    from mor_kernels.ops.attention import triton as kernels

    monkeypatch.setattr(kernels, "CHUNK", 16)
    check(device, backend, 2, 40 * many_tiles, 45 * many_tiles, (3, 1), 16, 0, torch.float32, False, True, True)


def with_fresh(device, backend, queries, keys, heads, dtype, packed=False, d=16, seed=0):
    """Out and gradients of hybrid attention, and of the reference on merged keys and values; and slack."""
    q_lens, k_lens = torch.tensor([queries, max(queries - 7, 0)]), torch.tensor([keys, max(keys - 3, queries)])
    shapes = [(2, n, h, d) for n, h in zip((queries, keys, keys, queries, queries), [heads[0], *[heads[1]] * 4])]
    tensors = [s.normal(shape, seed + i, dtype) for i, shape in enumerate(shapes)]
    positions = torch.rand(2, keys, generator=torch.Generator().manual_seed(seed + 1))
    positions = positions.masked_fill(torch.arange(keys) >= k_lens[:, None], 2).argsort(1)[:, :queries].sort(1).values
    exact = [t.double().requires_grad_() for t in tensors]
    merged = [exact[1].clone(), exact[2].clone()]
    for x, fresh in zip(merged, exact[3:]):
        for b, n in enumerate(q_lens):
            x[b, positions[b, :n]] = fresh[b, :n]
    want = reference.attention(exact[0], *merged, q_positions=positions, q_lens=q_lens, k_lens=k_lens)
    upstream = s.normal(want.shape, seed + 9, dtype)
    wanted = [want, *torch.autograd.grad(want, exact, upstream.double())]
    given = [t.to(device).requires_grad_() for t in tensors]
    on_device = [t.to(device) for t in (positions, q_lens, k_lens)]
    if packed:
        which = [torch.arange(n)[None] < lens[:, None] for n, lens in ((queries, q_lens), (keys, k_lens))]
        masks = [which[i].to(device) for i in (0, 1, 1, 0, 0)]
        rows = [t[mask] for t, mask in zip(given, masks)]
        cu = [s.cu_seqlens(lens).to(device) for lens in (q_lens, k_lens)]
        options = dict(zip(("k_fresh", "v_fresh"), rows[3:]))
        flat = on_device[0][masks[0]]
        out = ops.attention_varlen(*rows[:3], *cu, queries, keys, q_positions=flat, backend=backend, **options)
        out = torch.zeros_like(given[0]).masked_scatter(masks[0][..., None, None], out)
    else:
        options = dict(zip(("q_positions", "q_lens", "k_lens", "k_fresh", "v_fresh"), (*on_device, *given[3:])))
        out = ops.attention(*given[:3], backend=backend, **options)
    flat = [t.detach().flatten() for t in exact]
    slack = rounding_of_nothing(upstream, want, torch.cat(flat[2::2]), torch.cat((flat[0], *flat[1::2])), d**-0.5)
    return [out, *torch.autograd.grad(out, given, upstream.to(device))], wanted, slack


@s.targets("attention")
@s.examples(10)
@given(
    queries=s.sizes, more=s.sizes_or_none, heads=s.counts_of_heads, width=s.widths, seed=s.seeds, dtype=s.dtypes,
    packed=st.booleans(),
)  # fmt: skip
def test_any_fresh_keys_and_values(device, backend, queries, more, heads, width, seed, dtype, packed):
    s.assume_served(device, backend, dtype)
    queries, more = s.larger(device, seed, queries, more)
    width = s.wider(device, seed, width, (4, 40, 64, 128))
    got, want, slack = with_fresh(device, backend, queries, queries + more, heads, dtype, packed, width, seed)
    for name, one, other in zip(("out", "d_q", "d_k", "d_v", "d_k_fresh", "d_v_fresh"), got, want):
        s.assert_close(one, other, dtype, 4, name, cancels=1.0, slack=slack if name[2:3] in ("q", "k") else 0.0)


@s.targets("attention")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("queries", "keys", "heads"), [(5, 9, (2, 2)), (20, 35, (6, 2)), (33, 33, (3, 1))])
def test_fresh_keys_and_values(device, backend, packed, queries, keys, heads, request):
    """Hybrid: the queries' own keys and values in place of those at their positions; gradients reach both."""
    if backend == "triton" and device == "cpu":
        request.getfixturevalue("many_tiles")
    scale = 8 if device == "cuda" else 1
    for dtype in (torch.float32, torch.float16):
        got, want, _ = with_fresh(device, backend, queries * scale, keys * scale, heads, dtype, packed)
        for name, one, other in zip(("out", "d_q", "d_k", "d_v", "d_k_fresh", "d_v_fresh"), got, want):
            s.assert_close(one, other, dtype, 4, name, cancels=1.0)


def test_fresh_ones_come_in_pairs_and_with_positions():
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match="v_fresh: expected both of k_fresh and v_fresh"):
        ops.attention(q, q, q, q_positions=torch.tensor([[0, 1]]), k_fresh=q)
    with pytest.raises(ValueError, match="q_positions: expected positions"):
        ops.attention(q, q, q, k_fresh=q, v_fresh=q)
    with pytest.raises(ValueError, match="k_fresh"):
        ops.attention(q, q, q, q_positions=torch.tensor([[0, 1]]), k_fresh=q[:, :1], v_fresh=q[:, :1])


@s.targets("attention", "hopper")
def test_positions_in_any_order(device, backend):
    """Ascending positions are faster, not a condition; one query may see nothing, another more than there is."""
    width, dtype = s.small_heads(backend)
    tensors = [s.normal((1, 9, 2, width), i, dtype) for i in range(3)]
    positions = torch.tensor([[8, 0, -1, 3, 100, 2, 2, 7, -5]])
    exact, inputs = [t.double().requires_grad_() for t in tensors], [t.to(device).requires_grad_() for t in tensors]
    want = reference.attention(*exact, q_positions=positions.clamp(max=8), return_lse=True)
    got = ops.attention(*inputs, q_positions=positions.to(device), return_lse=True, backend=backend)
    compare(got, want, inputs, exact, dtype, device, backend)


@s.targets("attention")
@pytest.mark.parametrize("scale", [0.0, -0.7, 0.7])
def test_scale(device, backend, scale):
    """0 weighs all that is seen alike, a negative one turns the order of the scores."""
    shapes = (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16)
    inputs = [s.normal(shape, i, torch.float32).to(device).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [t.detach().cpu().double().requires_grad_() for t in inputs]
    positions = torch.arange(9).expand(2, 9)
    want = reference.attention(*exact, q_positions=positions, softmax_scale=scale)
    out = ops.attention(*inputs, q_positions=positions.to(device), softmax_scale=scale, backend=backend)
    upstream = s.normal(out.shape, 6, torch.float32)
    gradients = torch.autograd.grad(out, inputs, upstream.to(device))
    for got, exactly in zip((out, *gradients), (want, *torch.autograd.grad(want, exact, upstream.double()))):
        s.assert_close(got, exactly, torch.float32, 8, cancels=0.25)


@s.targets("attention", "hopper")
@pytest.mark.parametrize("width", [64, 80, 96, 128])
@pytest.mark.parametrize("heads", [(3, 1), (10, 2), (14, 2)])
def test_slices_of_a_fused_projection(device, backend, width, heads):
    """q, k and v as views of one fused qkv; a distinct v for each head."""
    if width not in {"hopper": (64, 128)}.get(backend, (80, 96, 128)):
        pytest.skip("other kernels are tried on 80, 96 and 128; those for Hopper have 64 and 128 alone")
    dtype, counts = s.small_heads(backend)[1], (heads[0], heads[1], heads[1])
    fused = s.normal((2, 7, sum(counts), width), 0, dtype)
    exact = [t.double().requires_grad_() for t in fused.split(counts, 2)]
    inputs = fused.to(device).requires_grad_().split(counts, 2)
    assert not inputs[1].is_contiguous()
    want = reference.attention(*exact, return_lse=True)
    if (device, backend) == ("cpu", "triton") and (width, heads) not in ((80, (3, 1)), (96, (14, 2)), (128, (10, 2))):
        s.assert_close(ops.attention(*inputs, backend=backend), want[0], dtype, 4)  # gradients take a second
        return
    got = ops.attention(*inputs, return_lse=True, backend=backend)
    compare(got, want, inputs, exact, dtype, device, backend)
    cu = torch.tensor([0, 7, 14], dtype=torch.int32, device=device)
    packed = ops.attention_varlen(*(t.flatten(0, 1) for t in inputs), cu, cu, 7, 7, backend=backend)
    # p is rounded, as in compare
    rounded = torch.finfo(dtype).eps / 2 * exact[2].abs().amax().item() if dtype in s.HALVES else 0.0
    s.assert_close(packed.unflatten(0, (2, 7)), want[0], dtype, 4, slack=rounded)


@s.targets("attention", "hopper")
@pytest.mark.parametrize("packed", [False, True])
def test_positions_not_a_causal_flag(device, backend, packed):
    """Queries at positions 0 and 3 over keys 0..4; bottom-right alignment would show the first one keys 0..3."""
    width, dtype = s.small_heads(backend)
    q, k = (torch.ones(n, 1, width, device=device, dtype=dtype) for n in (2, 5))
    v = torch.arange(5.0, device=device, dtype=dtype)[:, None, None].repeat(1, 1, width).requires_grad_()
    positions = torch.tensor([0, 3], device=device)
    if packed:
        ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (2, 5)]
        out = ops.attention_varlen(q, k, v, *ends, 2, 5, q_positions=positions, backend=backend)
    else:
        out = ops.attention(q[None], k[None], v[None], q_positions=positions[None], backend=backend)[0]
    torch.testing.assert_close(out[:, 0].cpu().float(), torch.tensor([[0.0], [1.5]]).expand(2, width))
    (d_v,) = torch.autograd.grad(out.sum(), v)
    want = torch.tensor([1.25, 0.25, 0.25, 0.25, 0.0])
    torch.testing.assert_close(d_v[:, 0].cpu().float(), want[:, None].expand(5, width))


@s.targets("attention", "hopper")
@pytest.mark.parametrize("unused", ["by position", "by length", "packed"])
def test_nan_in_unused_tail_does_not_leak(device, backend, unused):
    """Keys that no query may see, keys past a sequence's length, and rows past the last packed sequence."""
    width, dtype = s.small_heads(backend)
    q, k, v = (s.normal((1, n, 1, width), n, dtype).to(device).requires_grad_() for n in (2, 9, 9))
    positions = torch.tensor([[1, 4 if unused == "by position" else 8]], device=device)
    lens = {"k_lens": torch.tensor([5], device=device)} if unused == "by length" else {}
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (2, 5)]

    def run(*inputs):
        if unused == "packed":
            rows = (t[0] for t in inputs)
            out = ops.attention_varlen(*rows, *ends, 2, 5, q_positions=positions[0], backend=backend)
        else:
            out = ops.attention(*inputs, q_positions=positions, **lens, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    clean = run(q, k, v)
    past = (torch.arange(9, device=device) > 4).view(1, 9, 1, 1)
    for got, want in zip(run(q, *(t.detach().masked_fill(past, torch.nan).requires_grad_() for t in (k, v))), clean):
        assert torch.equal(got, want)


@s.targets("attention", "hopper")
@pytest.mark.parametrize("packed", [False, True])
def test_nan_stays_in_its_sequence(device, backend, packed):
    """In values, and in the gradient that comes in: the other sequence, at either side, has the same results."""

    def run(q, k, v, d_out):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        if packed:
            cu = torch.tensor([0, 5, 10, 15], dtype=torch.int32, device=device)
            out = ops.attention_varlen(*(t.flatten(0, 1) for t in inputs), cu, cu, 5, 5, backend=backend)
        else:
            out = ops.attention(*inputs, backend=backend)
        return [t.view(3, 5, -1) for t in (out, *torch.autograd.grad(out, inputs, d_out.view(out.shape)))]

    width, dtype = s.small_heads(backend)
    q, k, v, d_out = (s.normal((3, 5, heads, width), heads, dtype).to(device) for heads in (6, 2, 2, 6))
    clean = run(q, k, v, d_out)
    for spoiled in range(4):
        tensors = [q.clone(), k.clone(), v.clone(), d_out.clone()]
        tensors[spoiled][1] = torch.nan
        for got, want in zip(run(*tensors), clean):
            assert torch.equal(got[[0, 2]], want[[0, 2]])


@s.targets("attention", "hopper")
@pytest.mark.parametrize("spoiled", [0, 1], ids=["k", "v"])
def test_padding_is_zero_beside_nan(device, backend, spoiled):
    """A number that isn't one reaches every query of its sequence, but padding is none."""
    width, dtype = s.small_heads(backend)
    q, k, v = (s.normal((2, n, 1, width), n, dtype).to(device) for n in (4, 5, 5))
    (k, v)[spoiled][1, 0, 0, 3] = torch.nan
    inputs = [t.requires_grad_() for t in (q, k, v)]
    lens = torch.tensor([4, 2], device=device)
    out = ops.attention(*inputs, q_lens=lens, backend=backend)
    (d_q,) = torch.autograd.grad(out, q, torch.ones_like(out))
    for t in (out, d_q):
        assert t[0].isfinite().all() and not t[1, 2:].any() and t[1, :2].isnan().flatten(1).any(1).all()


@s.targets("attention_varlen", "hopper")
def test_zero_length_sequences(device, backend):
    """One query in all and three query heads on one: forward and backward."""
    width, dtype = s.small_heads(backend)
    q = s.normal((1, 3, width), 0, dtype).to(device).requires_grad_()
    k, v = (s.normal((3, 1, width), i, dtype).to(device).requires_grad_() for i in (1, 2))
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 0, 0, 1], [0, 1, 2, 3]))
    out = ops.attention_varlen(q, k, v, cu_q, cu_k, 1, 1, backend=backend)
    torch.testing.assert_close(out, v[2:].expand(1, 3, width))
    out.sum().backward()
    assert v.grad[:2].eq(0).all() and v.grad[2].eq(3).all()
    assert k.grad[:2].eq(0).all() and k.grad.isfinite().all() and q.grad.isfinite().all()


@s.targets("attention_varlen", "hopper")
@pytest.mark.parametrize("packed", [False, True])
def test_queries_without_keys_and_keys_without_queries(device, backend, packed):
    """Query lengths [1, 0, 3], key lengths [4, 7, 0]; what is padding is NaN."""
    width, dtype = s.small_heads(backend)
    q_lens, k_lens = torch.tensor([1, 0, 3]), torch.tensor([4, 7, 0])
    q = s.poison_tail(s.normal((3, 3, 2, width), 0, dtype), q_lens)
    k, v = (s.poison_tail(s.normal((3, 7, 1, width), i, dtype), k_lens) for i in (1, 2))
    if packed:
        q, k, v = (t[torch.arange(t.shape[1]) < n[:, None]] for t, n in ((q, q_lens), (k, k_lens), (v, k_lens)))
        ends = [s.cu_seqlens(n).to(device) for n in (q_lens, k_lens)]
        call = lambda *t: ops.attention_varlen(*t, *ends, 3, 7, backend=backend)  # noqa: E731
    else:
        lens = {"q_lens": q_lens.to(device), "k_lens": k_lens.to(device)}
        call = lambda *t: ops.attention(*t, **lens, backend=backend)  # noqa: E731
    q, k, v = (t.to(device).requires_grad_() for t in (q, k, v))
    out = call(q, k, v)
    d_q, d_k, d_v = (t.flatten(0, -3) for t in torch.autograd.grad(out.sum(), (q, k, v)))
    out, v = out.flatten(0, -3), v.flatten(0, -3)
    torch.testing.assert_close(out[:1], v[:1].expand(1, 2, width))
    assert out[1:].eq(0).all()
    assert d_q[1:].eq(0).all() and d_k[1:].eq(0).all() and d_v[1:].eq(0).all()
    assert d_v[0].eq(2).all() and d_q.isfinite().all() and d_k.isfinite().all()


@s.targets("attention", "hopper")
def test_long_row_is_summed_in_fp32(device, backend):
    width = 64 if backend == "hopper" else 16
    q, k, v = (s.normal((1, n, 1, width), i, torch.float16) for i, n in enumerate((3, 4096, 4096)))
    positions = torch.tensor([[0, 2047, 4095]])
    want = reference.attention(q.double(), k.double(), v.double(), q_positions=positions)
    out = ops.attention(*(t.to(device) for t in (q, k, v)), q_positions=positions.to(device), backend=backend)
    s.assert_close(out, want, torch.float16, 1)


@s.targets("attention", "hopper")
@pytest.mark.parametrize("dtype", s.HALVES, ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_error_budget(device, backend, dtype, width):
    """No more error than PyTorch's own attention of the same dtype, on which an fp32 softmax is spent too."""
    if device == "cpu" and (backend, dtype) != ("triton", torch.float16):
        pytest.skip("a GPU's business; the interpreter is tried on fp16, since it rounds bf16 wrongly")
    queries, keys = (100, 180) if device == "cpu" else (300, 700)
    shapes = [(2, queries, 6, width), (2, keys, 2, width), (2, keys, 2, width)]
    exact = [s.normal(shape, i).to(dtype).double().to(device).requires_grad_() for i, shape in enumerate(shapes)]
    positions = torch.rand(2, keys, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :queries]
    positions = positions.sort(1).values.to(device)
    upstream = s.normal(shapes[0], 5).to(dtype).to(device)

    def plain(q, k, v):
        k, v = (t.repeat_interleave(3, 2) for t in (k, v))
        mask = (torch.arange(keys, device=device) <= positions[..., None])[:, None]
        scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5).masked_fill(~mask, -torch.inf)
        p = scores.softmax(-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    def run(function, inputs):
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]

    want = run(plain, exact)
    theirs = run(plain, [t.detach().to(dtype).requires_grad_() for t in exact])
    ours = run(
        lambda *t: ops.attention(*t, q_positions=positions, backend=backend),
        [t.detach().to(dtype).requires_grad_() for t in exact],
    )
    for name, a, b, w in zip(("out", "d_q", "d_k", "d_v"), ours, theirs, want):
        assert (a.double() - w).norm() <= 1.1 * (b.double() - w).norm(), name
        assert (a.double() - w).abs().max() <= 2 * (b.double() - w).abs().max(), name


@s.targets("attention", "hopper")
@pytest.mark.parametrize("growth", [5, 50])
@pytest.mark.parametrize("dtype", s.HALVES, ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_scores_that_grow_along_the_keys(device, backend, dtype, width, growth):
    """By so many powers of 2 that a softmax that keeps the maximum of the first keys must notice (5) or overflow (50);
    for some queries all stay small."""
    if device == "cpu" and (width == 128 or (backend, dtype) == ("triton", torch.bfloat16)):
        pytest.skip("a GPU's business; the interpreter rounds bf16 wrongly")
    tensors = [s.normal((2, n, h, width), i, dtype) for i, (n, h) in enumerate([(90, 3), (200, 1), (200, 1)])]
    tensors[1][:, 100:150] *= growth
    positions = (torch.arange(90) * 2).expand(2, 90)
    exact = [t.double().requires_grad_() for t in tensors]
    inputs = [t.to(device).requires_grad_() for t in tensors]
    want = reference.attention(*exact, q_positions=positions, return_lse=True)
    got = ops.attention(*inputs, q_positions=positions.to(device), backend=backend, return_lse=True)
    compare(got, want, inputs, exact, dtype, device, backend)


@pytest.mark.skipif("cuda" not in s.DEVICES, reason="needs 10 GB of memory")
@s.targets("attention", "hopper")
def test_past_two_to_the_31_elements(device, backend):
    """Keys and values whose rows lie up to 2.6e9 elements apart."""
    if (device, backend) not in (("cuda", "triton"), ("cuda", "hopper")):
        pytest.skip("of kernels that compute addresses themselves")
    fused = torch.empty(1, 40000, 64 * 1024, dtype=torch.bfloat16, device="cuda")
    k, v = fused[..., 40960:41088].normal_().unflatten(-1, (2, 1, 64)).unbind(2)
    q = torch.randn(1, 130, 3, 64, dtype=torch.bfloat16, device="cuda")
    positions = torch.linspace(39000, 39999, 130, device="cuda").long()[None]
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    dense = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    results = []
    for tensors in (inputs, dense):
        out = ops.attention(*tensors, q_positions=positions, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for name, got, want in zip(("out", "d_q", "d_k", "d_v"), *results):
        if (backend, name) == ("hopper", "d_q"):  # added up in any order
            torch.testing.assert_close(got, want)
        else:
            assert torch.equal(got, want), name


@on_triton
def test_heads_too_wide_for_the_kernels_are_left_to_eager(device, backend):
    q, k, v = (s.normal((1, 3, 1, 320), i, torch.float32).to(device) for i in range(3))
    with pytest.raises(RuntimeError, match="heads of width up to 128, not 320"):
        ops.attention(q, k, v, backend=backend)
    assert torch.equal(ops.attention(q, k, v), ops.attention(q, k, v, backend="eager"))


def test_blocks_of_queries_equal_the_whole(monkeypatch):
    inputs = [s.normal((2, n, h, 4), i).requires_grad_() for i, (n, h) in enumerate([(11, 6), (13, 2), (13, 2)])]
    whole = ops.attention(*inputs)
    gradients = torch.autograd.grad(whole.square().sum(), inputs)
    monkeypatch.setattr(eager, "_SCORES_AT_ONCE", 2 * 6 * 13 * 3)
    blocks = ops.attention(*inputs)
    torch.testing.assert_close(blocks, whole)
    for one, other in zip(torch.autograd.grad(blocks.square().sum(), inputs), gradients):
        torch.testing.assert_close(one, other)
