"""Append and lookup are copies: equal to the bit, on a pool that is NaN wherever nothing was written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops import _dispatch
from reference import ops as reference
from tests import strategies as s

FP8 = torch.float8_e4m3fn


@s.targets("kv_append")
@given(pages=st.integers(1, 4), page_size=st.integers(1, 5), n=s.sizes_or_none, seed=s.seeds, dtype=s.dtypes,
       cache_dtype=s.dtypes, strided=st.booleans())  # fmt: skip
def test_append(device, backend, pages, page_size, n, seed, dtype, cache_dtype, strided):
    s.assume_served(device, backend, dtype)
    s.assume_served(device, backend, cache_dtype)
    pages, n = s.larger(device, seed, pages, n)
    generator = torch.Generator().manual_seed(seed)
    n = min(n, pages * page_size)
    slots = torch.randperm(pages * page_size, generator=generator)[:n]
    slots = torch.where(torch.rand(n, generator=generator) < 0.3, -1, slots)
    k, v = (s.normal((n, 2, 4), seed + i, dtype, strided) for i in (0, 1))
    caches = [s.normal((pages, page_size, 2, 4), seed + i, cache_dtype) for i in (2, 3)]
    want = reference.kv_append(k.to(cache_dtype), v.to(cache_dtype), *caches, slots)
    tensors = [t.to(device).requires_grad_() for t in (k, v, *caches)]
    got = ops.kv_append(*tensors, slots.to(device), backend=backend)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors[2:], caches)), "the given caches changed"

    upstream = [s.normal(c.shape, seed + i, cache_dtype) for i, c in enumerate(caches, 4)]
    gradients = torch.autograd.grad(got, tensors, [u.to(device) for u in upstream])
    for new, old, up in zip(gradients[:2], gradients[2:], upstream):
        flat = up.flatten(0, 1).clone()
        for i, slot in enumerate(slots.tolist()):
            wanted = torch.zeros(2, 4, dtype=dtype) if slot < 0 else up.flatten(0, 1)[slot].to(dtype)
            assert torch.equal(new[i].cpu(), wanted)
            if slot >= 0:
                flat[slot] = 0
        assert torch.equal(old.cpu().flatten(0, 1), flat)

    with torch.no_grad():
        ops.kv_append_(*tensors, slots.to(device), backend=backend)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors[2:], want))


@s.targets("kv_lookup")
@given(rows=st.integers(0, 4), max_pages=st.integers(0, 3), page_size=st.integers(1, 4), slack=st.integers(0, 3),
       seed=s.seeds, dtype=s.dtypes)  # fmt: skip
def test_lookup(device, backend, rows, max_pages, page_size, slack, seed, dtype):
    s.assume_served(device, backend, dtype)
    lens = s.lengths(rows, max_pages * page_size, seed)
    pool = rows * max_pages + 2
    table = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))[: rows * max_pages]
    table = table.view(rows, max_pages).to(torch.int32)
    caches = [torch.full((pool, page_size, 2, 3), torch.nan, dtype=dtype) for _ in range(2)]
    for i, cache in enumerate(caches):
        for row, length in enumerate(lens.tolist()):
            for t in range(length):
                cache[table[row, t // page_size], t % page_size] = s.normal((2, 3), seed + 10 * t + row + i, dtype)
    cu, total = s.cu_seqlens(lens), int(lens.sum()) + slack
    tensors = [c.to(device).requires_grad_() for c in caches]
    got = ops.kv_lookup(*tensors, table.to(device), cu.to(device), total, backend=backend)
    want = reference.kv_lookup(*caches, table, cu, total)
    for a, b in zip(got, want):
        assert not b.isnan().any() and torch.equal(a.cpu(), b)
    # each slot belongs to one token, and so its gradient is a copy
    upstream = [s.normal(t.shape, seed + i, dtype) for i, t in enumerate(want)]
    gradients = torch.autograd.grad(got, tensors, [t.to(device) for t in upstream])
    for gradient, cache, new in zip(gradients, caches, upstream):
        expected = torch.zeros_like(cache)
        for row, (first, length) in enumerate(zip(cu.tolist(), lens.tolist())):
            for t in range(length):
                expected[table[row, t // page_size], t % page_size] = new[first + t]
        assert torch.equal(gradient.cpu(), expected)


@s.targets("kv_append_")
@given(
    n=s.sizes_or_none, heads=st.integers(1, 3), half=st.integers(1, 5), groups=st.integers(1, 3), seed=s.seeds,
    dtype=s.dtypes, stored=st.sampled_from([*s.DTYPES, FP8]), scaled=st.booleans(), strided=st.booleans(),
)  # fmt: skip
def test_append_turns_keys_and_queries(device, backend, n, heads, half, groups, seed, dtype, stored, scaled, strided):
    """Into caches of any strides, whose other elements stay as they were to the bit."""
    for each in (dtype, stored):
        s.assume_served(device, backend, each)
    n, half = s.larger(device, seed, n), s.wider(device, seed, half, (1, 5, 32, 64))
    pages, page_size = 3 + n // 4, 4
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * page_size, generator=generator)[:n]
    slots = torch.where(torch.rand(n, generator=generator) < 0.3, -1, slots)
    positions = torch.randint(0, 3000, (n,), generator=generator)
    q, k, v = (
        s.normal((n, h, 2 * half), seed + i, dtype, strided) for i, h in enumerate([heads * groups, heads, heads])
    )
    caches = [s.normal((pages, page_size, heads, 2 * half), seed + i, torch.float32, strided) for i in (3, 4)]
    caches = [c.to(stored) for c in caches]
    scales = {}
    if stored == FP8 and scaled:
        scales = {name: torch.rand(heads, generator=generator) + 0.1 for name in ("k_scale", "v_scale")}
    want_q, want_k = (reference.rope(t.double(), positions) for t in (q, k))
    on_device = [c.to(device) for c in caches]
    got = ops.kv_append_(
        *(t.to(device) for t in (k, v)), *on_device, slots.to(device), positions=positions.to(device),
        q=q.to(device), backend=backend, **{name: t.to(device) for name, t in scales.items()},
    )  # fmt: skip
    # cosines and sines come in fp32
    s.assert_close(got, want_q, dtype, 0.5, "q", slack=1e-6)
    for name, want, cache, before in zip("kv", (want_k, v.double()), on_device, caches):
        cache = cache.cpu().flatten(0, 1)
        written = slots[slots >= 0]
        others = torch.ones(pages * page_size, dtype=torch.bool)
        others[written] = False
        # as bytes, since torch 2.6 can't index 8-bit floats
        assert torch.equal(bits(cache)[others], bits(before.flatten(0, 1))[others])
        if stored != FP8:
            s.assert_close(cache[written], want[slots >= 0], stored, 0.5, name, slack=1e-6 if name == "k" else 0.0)
            continue
        scale = scales.get(f"{name}_scale", torch.ones(heads))[:, None].double()
        scaled_want, got_new = want[slots >= 0] / scale, cache.double()[written]
        # half a place of 3 bits of mantissa, or of the smallest numbers; 448 at the most
        allowed = torch.maximum(scaled_want.abs() * 2**-4, torch.tensor(2.0**-10)) * 1.01 + 1e-6 / scale
        assert ((got_new - scaled_want.clamp(-448, 448)).abs() <= allowed).all()


@s.targets("kv_append_")
def test_float8_is_rounded_as_pytorch_does(device, backend):
    """Every number of 8 bits, what lies between them, zeros, the largest, what is larger, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = codes[~codes.isnan()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    extremes = torch.tensor([1e4, -1e4, 448.1, 464.0, 1e-30, -1e-30, torch.inf, -torch.inf])
    x = torch.cat((finite, between, between * 1.001, between * 0.999, extremes))
    x = torch.cat((x, torch.full((len(x) % 2 + 2,), torch.nan)))[:, None, None]
    cache = torch.zeros(len(x), 1, 1, 1, dtype=FP8, device=device)
    other = cache.clone()
    ops.kv_append_(x.to(device), -x.to(device), cache, other, torch.arange(len(x), device=device), backend=backend)
    for got, sign in ((cache, 1), (other, -1)):
        want = (sign * x).clamp(-448, 448).to(FP8)[:, None].float()
        assert torch.equal(got.cpu().float().nan_to_num(nan=1e6), want.nan_to_num(nan=1e6))


@s.targets("kv_lookup")
def test_rows_that_share_pages_add_up_their_gradients(device, backend):
    table = torch.tensor([[2, 0], [2, 1], [2, 0], [0, 2]], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 6, 9, 13, 13], dtype=torch.int32, device=device)
    caches = [s.normal((3, 4, 2, 3), i, torch.float32).to(device).requires_grad_() for i in (0, 1)]
    got = ops.kv_lookup(*caches, table, cu, 14, backend=backend)
    upstream = [s.normal((14, 2, 3), i, torch.float32).to(device) for i in (2, 3)]
    gradients = torch.autograd.grad(got, caches, upstream)
    for gradient, up in zip(gradients, upstream):
        want = torch.zeros(3, 4, 2, 3, device=device)
        for row, pages in enumerate(table.tolist()):
            for i, t in enumerate(range(cu[row], cu[row + 1])):
                want[pages[i // 4], i % 4] += up[t]
        torch.testing.assert_close(gradient, want, rtol=1e-6, atol=1e-6)


def test_turned_append_has_gradients():
    k, v, *caches = (s.normal(n, i).requires_grad_() for i, n in enumerate([(3, 2, 4)] * 2 + [(2, 4, 2, 4)] * 2))
    slots, positions = torch.tensor([7, -1, 2]), torch.tensor([5, 0, 9])
    assert torch.autograd.gradcheck(lambda *t: ops.kv_append(*t, slots, positions=positions), (k, v, *caches))
    want = reference.kv_append(reference.rope(k, positions), v, *caches, slots)
    got = ops.kv_append(k, v, *caches, slots, positions=positions)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def bits(t):
    """What NaN compares equal in."""
    return t.contiguous().view(torch.uint8)


@pytest.fixture
def used(device, backend, monkeypatch):
    """The device, with a backend for everything that is called."""
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    return device


every_backend = s.targets("kv_lookup")


@every_backend
def test_page_boundary(used):
    """Length 15 -> 16 -> 17 with pages of 16 and a foreign page full of 1e4 between."""
    k_cache, v_cache = (torch.full((3, 16, 1, 2), 1e4, device=used) for _ in "kv")
    table = torch.tensor([[0, 2]], dtype=torch.int32, device=used)
    tokens = s.normal((17, 1, 2), 0, torch.float32).to(used)
    for length in range(1, 18):
        t = length - 1
        slot = table[0, t // 16].long() * 16 + t % 16
        ops.kv_append_(tokens[t : t + 1], -tokens[t : t + 1], k_cache, v_cache, slot[None])
        k, v = ops.kv_lookup(k_cache, v_cache, table, torch.tensor([0, length], dtype=torch.int32, device=used), length)
        assert torch.equal(k, tokens[:length]) and torch.equal(v, -k)
    for cache in (k_cache, v_cache):
        assert (cache[1] == 1e4).all() and (cache[2, 1:] == 1e4).all()


@every_backend
def test_padding_lanes_write_nowhere(used):
    """Slots [0, -1, 2], and -1 alone: the canary in the last slot survives, and so does every other byte."""
    for slots in ([0, -1, 2], [-1, 0, 2], [-1, -1, -1]):
        caches = torch.full((2, 1, 4, 1, 2), 7.0, device=used)
        new = s.normal((2, 3, 1, 2), 0, torch.float32).to(used)
        ops.kv_append_(*new, *caches, torch.tensor(slots, device=used))
        for slot in range(4):
            want = new[:, slots.index(slot)] if slot in slots else torch.full((2, 1, 2), 7.0, device=used)
            assert torch.equal(caches[:, 0, slot], want)


@every_backend
def test_decode_after_prefill_leaves_old_bytes(used):
    """Prefill 6, two of which take the second recursion, decode 1: old bytes stay, and a row holds the keys of its own
    recursion only."""
    caches = torch.full((2, 4, 4, 1, 2), torch.nan, device=used)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=used)  # recursion 1, recursion 2
    first, second = (s.normal((2, n, 1, 2), n, torch.float32).to(used) for n in (7, 2))
    ops.kv_append_(*first[:, :6], *caches, torch.arange(6, device=used))
    ops.kv_append_(*second, *caches, torch.tensor([8, 9], device=used))
    before = caches.clone()
    ops.kv_append_(*first[:, 6:], *caches, torch.tensor([6], device=used))
    changed = (caches.view(torch.int32) != before.view(torch.int32)).any(-1)[..., 0].flatten(1)
    assert changed.nonzero().tolist() == [[0, 6], [1, 6]]
    ends = torch.tensor([0, 7, 9], dtype=torch.int32, device=used)
    for got, *wanted in zip(ops.kv_lookup(*caches, table, ends, 9), first, second):
        assert torch.equal(got, torch.cat(wanted))
    q = s.normal((1, 2, 2), 0, torch.float32).to(used)
    for row, (k, v) in enumerate((first, second)):  # of one row, both queries see all keys
        of_row = {"rows": torch.tensor([row], device=used)}
        out = ops.paged_attention(q, *caches, table, torch.tensor([k.shape[0]], device=used).int(), **of_row)
        weights = (torch.einsum("hd,kd->hk", q[0], k[:, 0]) / 2**0.5).softmax(-1)
        torch.testing.assert_close(out[0], weights @ v[:, 0])


@every_backend
def test_empty_row_beside_a_live_one_and_no_rows(used):
    cache = s.normal((2, 2, 1, 2), 0, torch.float32).to(used)
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=used)
    k, _ = ops.kv_lookup(cache, cache, table, torch.tensor([0, 0, 1], dtype=torch.int32, device=used), 1)
    assert torch.equal(k, cache[0, :1])
    k, _ = ops.kv_lookup(cache, cache, table[:0], torch.zeros(1, dtype=torch.int32, device=used), 0)
    assert k.shape == (0, 1, 2)
