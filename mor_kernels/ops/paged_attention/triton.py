"""Attention of a few queries over paged keys, split over the keys, in Triton.

A program holds some queries of a lane with all query heads that share a key/value head (row = query * GROUP + head of
the group) and goes through a part of the lane's keys, page by page:

    m' = max(m, max s);  p = exp(s - m');  l' = l exp(m - m') + sum p;  acc' = acc exp(m - m') + p v,   s = scale q k^T

Where a lane is not split it writes acc / l. Otherwise each part leaves m, l and acc in fp32, and a second launch merges
them in order:

    m = max m_i;  out = sum exp(m_i - m) acc_i / sum exp(m_i - m) l_i

How lanes are split depends on all lengths, which only the device knows. Each program works it out anew: with the work
of a lane (tiles of queries times tiles of keys), the keys of a part are as many as give about ``target`` parts in all,
and a cumulative sum over the lanes says whose part it is. The grid has a program for every part there could be, the
heads of a part side by side, since they read neighbouring bytes; programs past the last part return at once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .._triton import from_e4m3, has_float8, last_at_most

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e38)  # below any score, and finite: exp2(-inf - LEAST) is 0
PARTS_PER_PROCESSOR = 8  # of a multiprocessor: they are short, and many hide one another's latencies
LEAST_KEYS = 256  # a part isn't worth its merging for fewer
MERGED = 8  # parts at a time


@triton.jit
def _lane_work(
    k_lens, rows, cu_seqlens, lane, lanes, queries, room,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of queries and of keys of lanes; lane number ``lanes`` stands for the queries past the last lane's."""
    inside = lane < lanes
    keys = tl.load(k_lens + lane, mask=inside, other=0)
    if rows is not None:
        keys = tl.where(tl.load(rows + lane, mask=inside, other=-1) >= 0, keys, 0)
    keys = tl.minimum(keys, room)
    if cu_seqlens is None:
        q_tiles = inside.to(tl.int32)
    else:
        start = tl.load(cu_seqlens + lane, mask=lane <= lanes, other=0)
        end = tl.load(cu_seqlens + lane + 1, mask=inside, other=0)
        q_tiles = tl.cdiv(tl.where(inside, end, tl.where(lane == lanes, queries, start)) - start, BLOCK_Q)
    return q_tiles, tl.maximum(tl.cdiv(keys, BLOCK_N), 1)


@triton.jit
def _tiles_each(
    k_lens, rows, cu_seqlens, lanes, queries, room, target, least,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Tiles of keys in a part, at the most."""
    work = tl.zeros((), tl.int64)
    for first in range(0, lanes + 1, BLOCK_R):
        q_tiles, k_tiles = _lane_work(
            k_lens, rows, cu_seqlens, first + tl.arange(0, BLOCK_R), lanes, queries, room, BLOCK_Q, BLOCK_N
        )
        work += tl.sum(q_tiles.to(tl.int64) * k_tiles)
    return tl.maximum(tl.cdiv(work, target), least).to(tl.int32)


@triton.jit
def _parts_before(
    k_lens, rows, cu_seqlens, lanes, queries, room, each, part, lane,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The lane that a part belongs to (``lanes + 1`` for none) and the parts before that lane's; with a negative part,
    the same for a ``lane`` that is known."""
    before = tl.zeros((), tl.int32)
    found = tl.zeros((), tl.int32)
    begin = tl.zeros((), tl.int32)
    for first in range(0, lanes + 1, BLOCK_R):
        index = first + tl.arange(0, BLOCK_R)
        q_tiles, k_tiles = _lane_work(k_lens, rows, cu_seqlens, index, lanes, queries, room, BLOCK_Q, BLOCK_N)
        parts = q_tiles * tl.cdiv(k_tiles, each)
        ends = tl.cumsum(parts, 0) + before
        earlier = (index <= lanes) & tl.where(part < 0, index < lane, ends <= part)
        both = tl.sum(tl.where(earlier, (1 << 32) + parts.to(tl.int64), 0))
        found += (both >> 32).to(tl.int32)
        begin += (both & 0xFFFFFFFF).to(tl.int32)
        before += tl.sum(parts)
    return found, begin


@triton.jit
def _lane(
    k_lens, rows, cu_seqlens, lane, lanes, queries, room, each,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of one lane: its row, its first query, how many there are, its keys, tiles of queries, parts, tiles of a part."""
    inside = lane < lanes
    row = lane.to(tl.int64)
    keys = tl.minimum(tl.load(k_lens + lane, mask=inside, other=0), room)
    if rows is not None:
        row = tl.load(rows + lane, mask=inside, other=-1)
        keys = tl.where(row >= 0, keys, 0)
    start, end = lane, lane + 1
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + tl.minimum(lane, lanes))
        end = tl.load(cu_seqlens + lane + 1, mask=inside, other=queries)
        end = tl.where(inside, end, queries)
    k_tiles = tl.maximum(tl.cdiv(keys, BLOCK_N), 1)
    parts = tl.cdiv(k_tiles, each)
    return row, start, end - start, keys, tl.cdiv(end - start, BLOCK_Q), parts, tl.cdiv(k_tiles, parts)


@triton.jit
def _cached(
    cache, page, offset, stride_page, stride_slot, d, inside,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, zeros where they are not ``inside``: what is there may be NaN."""
    mask = inside[:, None]
    if WIDTH < d.shape[0]:
        mask = mask & (d < WIDTH)[None, :]
    x = tl.load(cache + (page * stride_page + offset * stride_slot)[:, None] + d[None, :], mask=mask, other=0)
    if cache.dtype.element_ty == tl.uint8:
        return from_e4m3(x, DTYPE, NATIVE)
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["lanes", "queries", "room", "target", "least", "table_row", "groups"])
def _forward(
    q, k_cache, v_cache, page_table, k_lens, rows, cu_seqlens, positions, k_scale, v_scale, out, sums, statistics,
    scale, lanes, queries, room, target, least, table_row, groups, q_token, q_head,
    k_page, k_slot, k_head, v_page, v_slot, v_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A part of a lane for one key/value head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    part, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    each = _tiles_each(k_lens, rows, cu_seqlens, lanes, queries, room, target, least, BLOCK_Q, BLOCK_N, BLOCK_R)
    lane, before = _parts_before(
        k_lens, rows, cu_seqlens, lanes, queries, room, each, part, 0, BLOCK_Q, BLOCK_N, BLOCK_R
    )  # fmt: skip
    if lane <= lanes:
        row, start, count, keys, q_tiles, parts, tiles = _lane(
            k_lens, rows, cu_seqlens, lane, lanes, queries, room, each, BLOCK_Q, BLOCK_N
        )
        first = (part - before) // q_tiles * tiles * BLOCK_N
        m = tl.arange(0, BLOCK_M)
        query, head = (part - before) % q_tiles * BLOCK_Q + m // GROUP, g * GROUP + m % GROUP
        valid = (m < BLOCK_Q * GROUP) & (query < count)
        d = tl.arange(0, BLOCK_D)
        columns = (d < WIDTH)[None, :]
        token = (start + query).to(tl.int64)
        q_tile = tl.load(
            q + (token * q_token + head * q_head)[:, None] + d[None, :], mask=valid[:, None] & columns, other=0.0
        )
        if positions is None:
            position = keys - count + query
        else:
            position = tl.minimum(tl.load(positions + token, mask=valid, other=-1).to(tl.int64), keys - 1).to(tl.int32)
        position = tl.where(valid, position, -1)
        end = tl.minimum(first + tiles * BLOCK_N, tl.max(position) + 1)
        table = page_table + row * table_row
        k_cache += g.to(tl.int64) * k_head
        v_cache += g.to(tl.int64) * v_head
        factor = scale * LOG2_E
        if k_scale is not None:
            factor *= tl.load(k_scale + g)
        n = tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        largest = tl.full((BLOCK_M,), LEAST, tl.float32)
        for at in tl.range(first, end, BLOCK_N):
            key = at + n
            inside = key < end
            page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            offset = (key % PAGE).to(tl.int64)
            k_tile = _cached(k_cache, page, offset, k_page, k_slot, d, inside, WIDTH, q_tile.dtype, NATIVE)
            v_tile = _cached(v_cache, page, offset, v_page, v_slot, d, inside, WIDTH, q_tile.dtype, NATIVE)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * factor
            s = tl.where(key[None, :] <= position[:, None], s, -float("inf"))
            new_largest = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp2(s - new_largest[:, None])
            fade = tl.exp2(largest - new_largest)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision=PRECISION)
            largest = new_largest
        if v_scale is not None:
            acc *= tl.load(v_scale + g)
        if parts == 1:
            some = total != 0
            acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
            at_out = out + (token * (groups * GROUP) + head)[:, None] * WIDTH + d[None, :]
            tl.store(at_out, acc.to(out.dtype.element_ty), mask=valid[:, None] & columns)
        else:
            index = (part.to(tl.int64) * groups + g) * (BLOCK_Q * GROUP) + m
            tl.store(sums + index[:, None] * WIDTH + d[None, :], acc, mask=valid[:, None] & columns)
            tl.store(statistics + index * 2, largest, mask=valid)
            tl.store(statistics + index * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["lanes", "queries", "room", "target", "least", "groups"])
def _merge(
    k_lens, rows, cu_seqlens, out, sums, statistics, lanes, queries, room, target, least, groups,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The output of one query, for one key/value head, of a lane that was split."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    lane = query
    if cu_seqlens is not None:
        lane = last_at_most(cu_seqlens, query, lanes + 1)
    each = _tiles_each(k_lens, rows, cu_seqlens, lanes, queries, room, target, least, BLOCK_Q, BLOCK_N, BLOCK_R)
    row, start, count, keys, q_tiles, parts, tiles = _lane(
        k_lens, rows, cu_seqlens, lane, lanes, queries, room, each, BLOCK_Q, BLOCK_N
    )
    if parts > 1:
        _, before = _parts_before(
            k_lens, rows, cu_seqlens, lanes, queries, room, each, -1, lane, BLOCK_Q, BLOCK_N, BLOCK_R
        )
        place = query - start
        h, d, s = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, MERGED)
        columns = (h < GROUP)[:, None] & (d < WIDTH)[None, :]
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        largest = tl.full((BLOCK_H,), LEAST, tl.float32)
        for first in range(0, parts, MERGED):
            inside = first + s < parts
            part = (before + (first + s) * q_tiles + place // BLOCK_Q).to(tl.int64)
            index = ((part * groups + g) * (BLOCK_Q * GROUP) + place % BLOCK_Q * GROUP)[:, None] + h[None, :]
            mask = inside[:, None] & (h < GROUP)[None, :]
            m = tl.load(statistics + index * 2, mask=mask, other=LEAST)
            l = tl.load(statistics + index * 2 + 1, mask=mask, other=0.0)
            part_acc = tl.load(
                sums + index[:, :, None] * WIDTH + d[None, None, :],
                mask=inside[:, None, None] & columns[None, :, :], other=0.0,
            )  # fmt: skip
            new_largest = tl.maximum(largest, tl.max(m, 0))
            weight = tl.exp2(m - new_largest[None, :])
            fade = tl.exp2(largest - new_largest)
            total = total * fade + tl.sum(weight * l, 0)
            acc = acc * fade[:, None] + tl.sum(weight[:, :, None] * part_acc, 0)
            largest = new_largest
        some = total != 0
        acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
        at = out + (query.to(tl.int64) * (groups * GROUP) + g * GROUP + h)[:, None] * WIDTH + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=columns)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _rowwise(cache: torch.Tensor) -> torch.Tensor:
    """Caches whose last dimension is contiguous, as bytes where they are float8."""
    cache = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return cache if cache.stride(3) == 1 else cache.contiguous()


def paged_attention(q, k_cache, v_cache, page_table, k_lens, rows, cu_seqlens_q, q_positions, k_scale, v_scale, scale):
    n, heads, width = q.shape
    out = q.new_empty(q.shape)
    lanes, (page_size, groups) = k_lens.shape[0], k_cache.shape[1:3]
    if out.numel() == 0:
        return out
    if 0 in (k_cache.numel(), page_table.numel(), lanes):
        return out.zero_()
    native = k_cache.dtype == torch.float8_e4m3fn and has_float8()
    q = q if q.stride(2) == 1 else q.contiguous()
    k_cache, v_cache, page_table = _rowwise(k_cache), _rowwise(v_cache), page_table.contiguous()
    group = heads // groups
    several = 1 if cu_seqlens_q is None else triton.cdiv(n, lanes)  # queries a lane, in the mean
    block_m = max(min(triton.next_power_of_2(group * several), 64), triton.next_power_of_2(group), 16)
    block_d = max(triton.next_power_of_2(width), 16)
    exact = q.dtype == torch.float32
    block_n = 64 if block_d <= 128 and not exact else 32
    block_r = max(min(triton.next_power_of_2(lanes + 1), 1024), 16)
    least = LEAST_KEYS // block_n
    room = page_table.shape[1] * page_size
    target = max(_processors(q.device) * PARTS_PER_PROCESSOR // groups, 1)
    q_tiles = n if cu_seqlens_q is None else n // (block_m // group) + lanes + 1  # at the most
    parts = q_tiles + target
    split = room > LEAST_KEYS
    size = (parts * groups * (block_m // group * group) if split else 0, width)
    sums, statistics = q.new_empty(size, dtype=torch.float32), q.new_empty((size[0], 2), dtype=torch.float32)
    lengths = k_lens.contiguous(), None if rows is None else rows.contiguous()
    lengths += (None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),)
    numbers = lanes, n, room, target, least
    shape = {"GROUP": group, "WIDTH": width, "BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    _forward[((parts if split else q_tiles) * groups,)](
        q, k_cache, v_cache, page_table, *lengths, None if q_positions is None else q_positions.contiguous(),
        k_scale, v_scale, out, sums, statistics, scale, *numbers, page_table.shape[1], groups, *q.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], **shape, PAGE=page_size, BLOCK_R=block_r,
        PRECISION="tf32x3" if exact else "tf32", NATIVE=native, num_warps=4, num_stages=3,
    )  # fmt: skip
    if split:
        _merge[(n * groups,)](
            *lengths, out, sums, statistics, *numbers, groups, **shape, BLOCK_R=block_r,
            BLOCK_H=triton.next_power_of_2(group), MERGED=MERGED, num_warps=4,
        )  # fmt: skip
    return out
