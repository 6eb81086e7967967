"""Append and lookup are copies: equal to the bit, on a pool that is NaN wherever nothing was written."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s


@s.targets("kv_append")
@given(pages=st.integers(1, 4), page_size=st.integers(1, 5), n=s.sizes_or_none, seed=s.seeds, dtype=s.dtypes,
       cache_dtype=s.dtypes, strided=st.booleans())  # fmt: skip
def test_append(device, backend, pages, page_size, n, seed, dtype, cache_dtype, strided):
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
    gradients = torch.autograd.grad([t.sum() for t in got], tensors)
    for gradient, cache in zip(gradients, caches):
        assert torch.equal(gradient.cpu(), (~cache.isnan()).to(dtype))


def test_page_boundary():
    """Length 15 -> 16 -> 17 with pages of 16 and a foreign page full of 1e4 between."""
    k_cache = torch.full((3, 16, 1, 2), 1e4)
    table = torch.tensor([[0, 2]], dtype=torch.int32)
    tokens = s.normal((17, 1, 2), 0, torch.float32)
    for length in range(1, 18):
        t = length - 1
        slot = table[0, t // 16].long() * 16 + t % 16
        ops.kv_append_(tokens[t : t + 1], tokens[t : t + 1], k_cache, k_cache, slot[None])
        k, _ = ops.kv_lookup(k_cache, k_cache, table, torch.tensor([0, length], dtype=torch.int32), length)
        assert torch.equal(k, tokens[:length])
    assert (k_cache[1] == 1e4).all()


def test_padding_lanes_write_nowhere():
    """Slots [0, -1, 2], and -1 alone: the canary in the last slot survives, and so does every other byte."""
    for slots in ([0, -1, 2], [-1, 0, 2], [-1, -1, -1]):
        cache = torch.full((1, 4, 1, 2), 7.0)
        new = s.normal((3, 1, 2), 0, torch.float32)
        ops.kv_append_(new, new, cache, cache, torch.tensor(slots))
        for slot in range(4):
            want = new[slots.index(slot)] if slot in slots else torch.full((1, 2), 7.0)
            assert torch.equal(cache[0, slot], want)


def test_decode_after_prefill_leaves_old_bytes():
    """Prefill 6, decode 1, two recursions: old bytes stay, and a row holds the keys of its own recursion only."""
    cache = torch.full((4, 4, 1, 2), torch.nan)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)  # recursion 1, recursion 2
    prefill, token = s.normal((6, 1, 2), 0, torch.float32), s.normal((1, 1, 2), 1, torch.float32)
    ops.kv_append_(prefill, prefill, cache, cache, torch.arange(6))
    before = cache.clone()
    ops.kv_append_(token, token, cache, cache, torch.tensor([6]))
    changed = (cache.view(torch.int32) != before.view(torch.int32)).any(-1)[..., 0].flatten()
    assert changed.nonzero().flatten().tolist() == [6]
    k, _ = ops.kv_lookup(cache, cache, table, torch.tensor([0, 7, 7], dtype=torch.int32), 7)
    assert torch.equal(k, torch.cat((prefill, token)))


def test_empty_row_beside_a_live_one_and_no_rows():
    cache = s.normal((2, 2, 1, 2), 0, torch.float32)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    k, _ = ops.kv_lookup(cache, cache, table, torch.tensor([0, 0, 1], dtype=torch.int32), 1)
    assert torch.equal(k, cache[0, :1])
    k, _ = ops.kv_lookup(cache, cache, table[:0], torch.zeros(1, dtype=torch.int32), 0)
    assert k.shape == (0, 1, 2)
