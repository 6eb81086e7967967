"""Attention and rotary embedding against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops.attention import eager
from reference import ops as reference
from tests import strategies as s


def compare(got, want, inputs, exact, dtype, device):
    """Outputs and gradients against float64, element by element."""
    (out, lse), (out64, lse64) = got, want
    seen = lse64 > -torch.inf
    assert torch.equal(lse.cpu() > -torch.inf, seen)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    s.assert_close(lse.cpu()[seen], lse64[seen], wide, 8, "lse")  # an fp32 sum of exponentials of fp32 sums
    s.assert_close(out, out64, dtype, 0.5, "out")  # fp32 arithmetic, rounded once, to nearest
    upstream, upstream_lse = s.normal(out64.shape, 5, dtype), torch.where(seen, s.normal(lse64.shape, 6), 0)
    loss = (out.double() * upstream.double().to(device)).sum()
    loss = loss + torch.where(seen.to(device), lse.double() * upstream_lse.to(device), 0).sum()
    loss64 = (out64 * upstream.double()).sum() + torch.where(seen, lse64 * upstream_lse, 0).sum()
    gradients = torch.autograd.grad(loss, inputs)
    wanted = torch.autograd.grad(loss64, exact, materialize_grads=True) if loss64.requires_grad else None
    for i, (name, gradient) in enumerate(zip(("d_q", "d_k", "d_v"), gradients)):
        other = wanted[i] if wanted else torch.zeros_like(exact[i])
        # d_s = p (d_out v^T - sum(d_out out)): out comes rounded to dtype, and the two terms cancel
        s.assert_close(gradient, other, dtype, 4, name, cancels=0.25)


@s.targets("attention")
@given(
    batch=st.integers(0, 3), queries=s.sizes_or_none, keys=s.sizes_or_none, heads=s.counts_of_heads, width=s.widths,
    seed=s.seeds, dtype=s.dtypes, strided=st.booleans(), positioned=st.booleans(), ragged=st.booleans(),
)  # fmt: skip
def test_equals_reference(
    device, backend, batch, queries, keys, heads, width, seed, dtype, strided, positioned, ragged
):
    q_heads, kv_heads = heads
    q, k, v = (
        s.normal((batch, n, h, width), seed + i, dtype, strided)
        for i, (n, h) in enumerate([(queries, q_heads), (keys, kv_heads), (keys, kv_heads)])
    )
    options = {}
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
    moved = {name: t.to(device) for name, t in options.items()}
    got = ops.attention(*inputs, return_lse=True, backend=backend, **moved)
    compare(got, want, inputs, exact, dtype, device)


@s.targets("attention_varlen")
@given(
    batch=st.integers(1, 4), longest=s.sizes, heads=s.counts_of_heads, width=s.widths, seed=s.seeds, dtype=s.dtypes,
    slack=st.integers(0, 3), positioned=st.booleans(),
)  # fmt: skip
def test_varlen_equals_reference(device, backend, batch, longest, heads, width, seed, dtype, slack, positioned):
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
    compare(got, want, inputs, exact, dtype, device)


@pytest.mark.parametrize("width", [80, 96, 128])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 1), (10, 2), (14, 2)])
def test_slices_of_a_fused_projection(width, q_heads, kv_heads):
    """k and v as views of one fused qkv; a distinct v for each head."""
    fused = s.normal((2, 7, (q_heads + 2 * kv_heads) * width), 0, torch.float32)
    q, k, v = fused.split([q_heads * width, kv_heads * width, kv_heads * width], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, width)) for t in (q, k, v))
    assert not k.is_contiguous()
    want = reference.attention(q.double(), k.double(), v.double())
    s.assert_close(ops.attention(q, k, v), want, torch.float32, 4)


def test_positions_not_a_causal_flag():
    """Queries at positions 0 and 3 over keys 0..4; bottom-right alignment would show the first one keys 0..3."""
    k = torch.zeros(1, 5, 1, 2)
    v = torch.arange(5.0).view(1, 5, 1, 1).expand(1, 5, 1, 2)
    out = ops.attention(torch.ones(1, 2, 1, 2), k, v, q_positions=torch.tensor([[0, 3]]))
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.0, 1.5]))


def test_nan_in_unused_tail_does_not_leak():
    q, k, v = (s.normal((1, n, 1, 4), n, torch.float32) for n in (2, 9, 9))
    clean = ops.attention(q, k, v, q_positions=torch.tensor([[1, 4]]))
    k[:, 5:], v[:, 5:] = torch.nan, torch.nan
    assert torch.equal(ops.attention(q, k, v, q_positions=torch.tensor([[1, 4]])), clean)


def test_zero_length_sequences():
    """One query in all and three query heads on one: forward and backward."""
    q = s.normal((1, 3, 4), 0).requires_grad_()
    k, v = (s.normal((3, 1, 4), i).requires_grad_() for i in (1, 2))
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 0, 0, 1], [0, 1, 2, 3]))
    out = ops.attention_varlen(q, k, v, cu_q, cu_k, 1, 1)
    torch.testing.assert_close(out, v[2:].expand(1, 3, 4))
    out.sum().backward()
    assert v.grad[:2].eq(0).all() and v.grad[2].eq(3).all() and not k.grad.isnan().any()


def test_long_row_is_summed_in_fp32():
    q, k, v = (s.normal((1, n, 1, 16), i, torch.bfloat16) for i, n in enumerate((3, 4096, 4096)))
    positions = torch.tensor([[0, 2047, 4095]])
    want = reference.attention(q.double(), k.double(), v.double(), q_positions=positions)
    s.assert_close(ops.attention(q, k, v, q_positions=positions), want, torch.bfloat16, 1)


def test_blocks_of_queries_equal_the_whole(monkeypatch):
    inputs = [s.normal((2, n, h, 4), i).requires_grad_() for i, (n, h) in enumerate([(11, 6), (13, 2), (13, 2)])]
    whole = ops.attention(*inputs)
    gradients = torch.autograd.grad(whole.square().sum(), inputs)
    monkeypatch.setattr(eager, "_SCORES_AT_ONCE", 2 * 6 * 13 * 3)
    blocks = ops.attention(*inputs)
    torch.testing.assert_close(blocks, whole)
    for one, other in zip(torch.autograd.grad(blocks.square().sum(), inputs), gradients):
        torch.testing.assert_close(one, other)


@given(batch=s.sizes_or_none, length=s.sizes_or_none, width=s.widths, seed=s.seeds, dtype=s.dtypes)
def test_rope(batch, length, width, seed, dtype):
    x = s.normal((batch, length, 3, width), seed, dtype)
    positions = torch.randint(0, 2048, (batch, length), generator=torch.Generator().manual_seed(seed))
    got = ops.rope(x, positions)
    want = reference.rope(x.double(), positions) if batch * length else x.double()
    # an fp32 angle of up to 2,048 radians is off by half its last bit, 6e-5, and so are its sine and cosine
    angle = 2048 * torch.finfo(torch.float32).eps if dtype != torch.float64 else 1e-12
    allowed = angle * 4 + 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=allowed, atol=allowed * 4)


def test_rope_positions_by_row():
    x = s.normal((2, 2, 1, 4), 0)
    got = ops.rope(x, torch.tensor([[0, 5], [2, 3]]))
    for b, t, position in [(0, 0, 0), (0, 1, 5), (1, 0, 2), (1, 1, 3)]:
        alone = ops.rope(x[b, t][None], torch.tensor([position]))
        assert torch.equal(got[b, t], alone[0])
    assert torch.equal(got[0, 0], x[0, 0])
