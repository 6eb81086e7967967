"""Ragged paged keys and values: append, lookup and what their gradients need, each one pass over what is written.

A program of the append holds some heads, of the queries, the keys or the values, of a few tokens, so that one launch
serves a decoding step and a prompt alike. Queries and keys turn by their positions as in :mod:`..rope.triton`; a token
without a slot writes nothing.

Keys and values of 8 bits are uint8 here, value = e4m3 number * scale of the head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._layout import contiguous, strides
from .._triton import cos_sin, frequencies, inverse_of, last_at_most, place, step_of, tile, to_e4m3
from ._layout import entries_by_page, side_by_side

HEADS = 4  # of a program of the append: what lies side by side in memory
BYTES = 4096  # of halves of heads in a program: 64 a thread, in flight together


@triton.jit
def _put(
    x, source, x_head, x_d, out, target, out_head, out_d, scales, position, step_high, step_low, read, written, head,
    heads, HALF: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of a tile of tokens, which begin at ``source`` of x and at ``target`` of out; turned if there is a
    position, divided if there are scales."""
    i = tl.arange(0, 2**BITS)[None, None, :].to(tl.int64)
    head = head + tl.arange(0, HEADS)[None, :, None].to(tl.int64)
    low, high = (head < heads) & (i < HALF), (head < heads) & (i < WIDTH - HALF)
    half = tl.full((), HALF, tl.int64)
    source = x + source[:, None, None] + head * x_head + i * x_d
    a = tl.load(source, mask=read[:, None, None] & low, other=0.0).to(tl.float32)
    b = tl.load(source + half * x_d, mask=read[:, None, None] & high, other=0.0).to(tl.float32)
    if position is not None:
        cos, sin = cos_sin(position[:, None] * frequencies(step_high, step_low, BITS)[None, :])
        cos, sin = cos[:, None, :], sin[:, None, :]
        a, b = a * cos - b * sin, b * cos + a * sin
    if scales is not None:
        scale = tl.load(scales + head, mask=head < heads, other=1.0) + tl.zeros_like(a)
        a, b = tl.div_rn(a, scale), tl.div_rn(b, scale)
    if out.dtype.element_ty == tl.uint8:
        a, b = to_e4m3(a), to_e4m3(b)
    target = out + target[:, None, None] + head * out_head + i * out_d
    tl.store(target, a.to(out.dtype.element_ty), mask=written[:, None, None] & low)
    tl.store(target + half * out_d, b.to(out.dtype.element_ty), mask=written[:, None, None] & high)


@triton.jit(do_not_specialize=["tokens", "slots_there", "q_shares", "shares", "q_heads", "heads"])
def _append(
    q, k, v, slots, positions, out_q, k_cache, v_cache, k_scale, v_scale, step_high, step_low,
    tokens, slots_there, q_shares, shares, q_heads, heads,
    q_n, q_h, q_d, k_n, k_h, k_d, v_n, v_h, v_d,
    k_page, k_slot, k_head, k_last, v_page, v_slot, v_head, v_last,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """k and v of a tile of tokens into their slots, and q turned into out_q: ``q_shares`` programs for queries, and
    ``shares`` each for keys and values."""
    everyone = q_shares + 2 * shares
    token = tl.program_id(0).to(tl.int64) // everyone * TOKENS + tl.arange(0, TOKENS)
    share = tl.program_id(0) % everyone
    inside = token < tokens
    position = None
    if positions is not None:
        position = tl.load(positions + token, mask=inside, other=0).to(tl.int64)
    if share < q_shares:
        if q is not None:
            _put(
                q, token * q_n, q_h, q_d, out_q, token * q_heads * WIDTH, WIDTH, 1, None, position, step_high, step_low,
                inside, inside, share * HEADS, q_heads, HALF, WIDTH, BITS, HEADS,
            )  # fmt: skip
    else:
        slot = tl.load(slots + token, mask=inside, other=-1)
        written = (slot >= 0) & (slot < slots_there)
        page, offset = slot // PAGE, slot % PAGE
        share -= q_shares
        if share < shares:
            _put(
                k, token * k_n, k_h, k_d, k_cache, page * k_page + offset * k_slot, k_head, k_last, k_scale, position,
                step_high, step_low, inside, written, share * HEADS, heads, HALF, WIDTH, BITS, HEADS,
            )  # fmt: skip
        else:
            _put(
                v, token * v_n, v_h, v_d, v_cache, page * v_page + offset * v_slot, v_head, v_last, v_scale, None,
                step_high, step_low, inside, written, (share - shares) * HEADS, heads, HALF, WIDTH, BITS, HEADS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n", "length"])
def _merge(
    k, v, k_old, v_old, slots, inverse, k_out, v_out, n, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """out[m] = new[j] where slots[j] = m, old[m] elsewhere; zeros for new ones where there are none."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    j = place(slots, inverse, m, n, m < length).to(tl.int64)
    columns = (d < width)[None, :]
    old = (j < 0) & (m < length)
    at = m[:, None] * width + d[None, :]
    k_row = tl.load(k_old + at, mask=old[:, None] & columns, other=0.0)
    v_row = tl.load(v_old + at, mask=old[:, None] & columns, other=0.0)
    if k is not None:
        new = j[:, None] * width + d[None, :]
        there = (j >= 0)[:, None]
        k_new = tl.load(k + new, mask=there & columns, other=0.0).to(k_out.dtype.element_ty)
        v_new = tl.load(v + new, mask=there & columns, other=0.0).to(v_out.dtype.element_ty)
        k_row, v_row = tl.where(there, k_new, k_row), tl.where(there, v_new, v_row)
    mask = (m < length)[:, None] & columns
    tl.store(k_out + at, k_row, mask=mask)
    tl.store(v_out + at, v_row, mask=mask)


@triton.jit(do_not_specialize=["total", "rows", "max_pages", "pages"])
def _lookup(
    k_cache, v_cache, page_table, cu_seqlens, k_out, v_out, total, rows, max_pages, pages,
    k_page, k_slot, v_page, v_slot, width, PAGE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[t] = cache[page, offset] of the t-th token of all rows, 0 past the last."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = t < total
    row = last_at_most(cu_seqlens, t, rows + 1)
    index = t - tl.load(cu_seqlens + tl.minimum(row, rows))
    live = inside & (row < rows) & (index // PAGE < max_pages)
    page = tl.load(page_table + row.to(tl.int64) * max_pages + index // PAGE, mask=live, other=-1).to(tl.int64)
    live = live & (page >= 0) & (page < pages)
    columns = (d < width)[None, :]
    offset = (index % PAGE).to(tl.int64)
    mask = live[:, None] & columns
    k_row = tl.load(k_cache + (page * k_page + offset * k_slot)[:, None] + d[None, :], mask=mask, other=0.0)
    v_row = tl.load(v_cache + (page * v_page + offset * v_slot)[:, None] + d[None, :], mask=mask, other=0.0)
    at = t.to(tl.int64)[:, None] * width + d[None, :]
    mask = inside[:, None] & columns
    tl.store(k_out + at, k_row, mask=mask)
    tl.store(v_out + at, v_row, mask=mask)


@triton.jit(do_not_specialize=["slots", "max_pages"])
def _lookup_backward(
    d_k, d_v, entries, first, cu_seqlens, k_out, v_out, slots, max_pages, width,
    PAGE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d_cache[page, offset]: the sum over the entries of the page table that name the page, in their order."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = slot < slots
    page, offset = slot // PAGE, slot % PAGE
    at = tl.load(first + page, mask=inside, other=0)
    end = tl.load(first + page + 1, mask=inside, other=0)
    columns = (d < width)[None, :]
    k_sum = tl.zeros((ROWS, WIDTH), tl.float32)
    v_sum = tl.zeros((ROWS, WIDTH), tl.float32)
    most = tl.max(end - at)
    while most > 0:
        there = at < end
        entry = tl.load(entries + at, mask=there, other=0)
        row, index = entry // max_pages, entry % max_pages * PAGE + offset
        t = tl.load(cu_seqlens + row, mask=there, other=0) + index
        there = there & (t < tl.load(cu_seqlens + row + 1, mask=there, other=0))
        source = t[:, None] * width + d[None, :]
        mask = there[:, None] & columns
        k_sum += tl.load(d_k + source, mask=mask, other=0.0).to(tl.float32)
        v_sum += tl.load(d_v + source, mask=mask, other=0.0).to(tl.float32)
        at += 1
        most -= 1
    target = slot[:, None] * width + d[None, :]
    mask = inside[:, None] & columns
    tl.store(k_out + target, k_sum.to(k_out.dtype.element_ty), mask=mask)
    tl.store(v_out + target, v_sum.to(v_out.dtype.element_ty), mask=mask)


def _bytes(*caches: torch.Tensor) -> list[torch.Tensor]:
    return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in caches]


def append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, k_scale, v_scale):
    out_q = k.new_empty(0) if q is None else q.new_empty(q.shape)
    tokens, heads, width = k.shape
    q_heads = 0 if q is None else q.shape[1]
    slots_there = k_cache.shape[0] * k_cache.shape[1]
    if tokens * width * (q_heads + heads * slots_there):
        k_cache, v_cache = _bytes(k_cache, v_cache)
        slots, positions, k_scale, v_scale = contiguous(slots, positions, k_scale, v_scale)
        half = (width + 1) // 2
        bits = max(half - 1, 1).bit_length()
        tile_heads = min(triton.next_power_of_2(max(heads, 1)), HEADS)
        size = max(BYTES // k.element_size() // tile_heads >> bits, 1)
        q_shares, shares = triton.cdiv(q_heads, tile_heads), triton.cdiv(heads, tile_heads)
        _append[(triton.cdiv(tokens, size) * (q_shares + 2 * shares),)](
            q, k, v, slots, positions, out_q, k_cache, v_cache, k_scale, v_scale,
            *(step_of(theta, half) if positions is not None else (1.0, 0.0)),
            tokens, slots_there, q_shares, shares, q_heads, heads,
            *strides(q), *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
            PAGE=k_cache.shape[1], WIDTH=width, HALF=half, BITS=bits, TOKENS=size, HEADS=tile_heads, num_warps=2,
        )  # fmt: skip
    return out_q


def _merged(k, v, k_cache, v_cache, slots):
    """Caches (num_pages, page_size, G, d) with k and v (n, G, d) at the slots, or zeros where they are None."""
    k_out, v_out = (t.new_empty(t.shape) for t in (k_cache, v_cache))
    if k_out.numel():
        length, width = k_out.shape[0] * k_out.shape[1], k_out[0, 0].numel()
        k, v, k_cache, v_cache, slots = contiguous(k, v, k_cache, v_cache, slots)
        size = tile(width, 2048, 4)
        _merge[(triton.cdiv(length, size.rows), triton.cdiv(width, size.width))](
            k, v, k_cache, v_cache, slots, inverse_of(slots[None], length), k_out, v_out, len(slots), length, width,
            ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip
    return k_out, v_out


def append(k, v, k_cache, v_cache, slots):
    return _merged(k, v, k_cache, v_cache, slots)


def append_backward(d_k_cache, d_v_cache, slots):
    return _merged(None, None, d_k_cache, d_v_cache, slots)


def lookup(k_cache, v_cache, page_table, cu_seqlens, total):
    out = [t.new_empty(total, *t.shape[2:]) for t in (k_cache, v_cache)]
    width = k_cache.shape[2] * k_cache.shape[3]
    if total * width == 0:
        return tuple(out)
    num_pages, page_size = k_cache.shape[:2]
    if 0 in (num_pages, page_size, *page_table.shape):
        return tuple(t.zero_() for t in out)
    flat = [side_by_side(t) for t in _bytes(k_cache, v_cache)]
    size = tile(width, 2048, 4)
    _lookup[(triton.cdiv(total, size.rows), triton.cdiv(width, size.width))](
        *flat, page_table.contiguous(), cu_seqlens.contiguous(), *_bytes(*out), total, *page_table.shape, num_pages,
        *flat[0].stride()[:2], *flat[1].stride()[:2], width,
        PAGE=page_size, ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
    )  # fmt: skip
    return tuple(out)


def lookup_backward(d_k, d_v, page_table, cu_seqlens, num_pages, page_size):
    out = [t.new_empty(num_pages, page_size, *t.shape[1:]) for t in (d_k, d_v)]
    width = d_k.shape[1] * d_k.shape[2]
    slots = num_pages * page_size
    if slots * width == 0:
        return tuple(out)
    if 0 in (*page_table.shape, d_k.shape[0]):
        return tuple(t.zero_() for t in out)
    entries, first = entries_by_page(page_table, cu_seqlens, num_pages, page_size)
    size = tile(width, 2048, 4)
    _lookup_backward[(triton.cdiv(slots, size.rows), triton.cdiv(width, size.width))](
        d_k.contiguous(), d_v.contiguous(), entries, first, cu_seqlens.contiguous(), *out, slots, page_table.shape[1],
        width, PAGE=page_size, ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
    )  # fmt: skip
    return tuple(out)
