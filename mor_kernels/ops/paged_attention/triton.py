"""Attention of a few queries over paged keys, split over the keys, in Triton.

A program holds a tile of a lane's queries with all query heads that share a key/value head (row = query * GROUP + head
of the group) and goes through a part of the lane's keys:

    m' = max(m, max s);  p = exp(s - m');  l' = l exp(m - m') + sum p;  acc' = acc exp(m - m') + p v,   s = scale q k^T

Where a lane has one part the program writes acc / l. Otherwise each leaves m, l and acc in fp32, and the one that comes
last, which a counter tells, merges them in the order of the keys, so that the result doesn't depend on who that is:

    m = max m_i;  out = sum exp(m_i - m) acc_i / sum exp(m_i - m) l_i

Which lane is split into how many parts depends on all lengths, which only the device knows. One program works out a
schedule, a line for each part: with the work of a lane (tiles of queries times keys), parts get as many keys as make
about ``PROGRAMS`` of them in all. The lengths are the same in all layers of a block, so one schedule serves all; each
call leaves the counters as it found them. The grid has a program for every part there could be, the heads of a part
side by side, since they read neighbouring bytes; those past the last return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from .._triton import LEAST, LOG2_E, from_e4m3, has_float8
from ._parts import ENTRY, FIELDS, WHOLE, empty_schedule, most_parts, queries_of_a_tile, ranges_in, unread, wanted

LEAST_KEYS = 512  # a part isn't worth its merging for fewer
UNIT = 64  # keys: parts are multiples of so many


@triton.jit
def _work(k_lens, rows, cu_seqlens, lane, lanes, queries, BLOCK_Q: tl.constexpr, UNIT: tl.constexpr):
    """Of lanes: row, first query, the one past the last, tiles of queries, keys, units of keys. Lane number ``lanes``
    stands for the queries past the last lane's."""
    inside = lane < lanes
    keys = tl.load(k_lens + lane, mask=inside, other=0)
    row = lane.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + lane, mask=inside, other=-1)
        keys = tl.where(row >= 0, keys, 0)
    if cu_seqlens is None:
        start, end = lane, lane + inside.to(tl.int32)
    else:
        start = tl.load(cu_seqlens + lane, mask=lane <= lanes, other=0)
        end = tl.load(cu_seqlens + lane + 1, mask=inside, other=0)
        end = tl.where(inside, end, tl.where(lane == lanes, queries, start))
    return row.to(tl.int32), start, end, tl.cdiv(end - start, BLOCK_Q), keys, tl.maximum(tl.cdiv(keys, UNIT), 1)


@triton.jit(do_not_specialize=["lanes", "queries", "parts", "counters", "ranges", "target", "least"])
def _schedule(
    k_lens, rows, cu_seqlens, schedule, lanes, queries, parts, counters, ranges, target, least,
    BLOCK_Q: tl.constexpr, UNIT: tl.constexpr, FIELDS: tl.constexpr, ENTRY: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Lines of FIELDS numbers, one a part, and the rest; see ``_parts.py``."""
    work = tl.zeros((), tl.int64)
    for first in range(0, lanes + 1, LANES):
        lane = first + tl.arange(0, LANES)
        _, _, _, q_tiles, _, units = _work(k_lens, rows, cu_seqlens, lane, lanes, queries, BLOCK_Q, UNIT)
        work += tl.sum(q_tiles.to(tl.int64) * units)
    each = tl.maximum(tl.cdiv(work, target), least).to(tl.int32)

    done = tl.zeros((), tl.int32)
    for first in range(0, lanes + 1, LANES):
        lane = first + tl.arange(0, LANES)
        row, start, end, q_tiles, keys, units = _work(k_lens, rows, cu_seqlens, lane, lanes, queries, BLOCK_Q, UNIT)
        splits = tl.cdiv(units, each)
        size = tl.cdiv(units, splits) * UNIT
        splits = tl.maximum(tl.cdiv(keys, size), 1)
        mine = q_tiles * splits
        before = tl.cumsum(mine, 0) - mine + done
        done += tl.sum(mine)
        most = tl.max(mine)
        nth = tl.zeros((), tl.int32)
        while nth < most:
            index = nth + tl.arange(0, PARTS)[None, :]
            there = index < mine[:, None]
            tile, split = index // splits[:, None], index % splits[:, None]
            query = start[:, None] + tile * BLOCK_Q
            begin = split * size[:, None]
            line = schedule + (before[:, None] + index) * FIELDS
            same = tl.zeros_like(index)
            tl.store(line, row[:, None] + same, mask=there)
            tl.store(line + 1, query, mask=there)
            tl.store(line + 2, end[:, None] - query, mask=there)
            tl.store(line + 3, keys[:, None] + same, mask=there)
            tl.store(line + 4, begin, mask=there)
            tl.store(line + 5, tl.minimum(begin + size[:, None], keys[:, None]), mask=there)
            tl.store(line + 6, before[:, None] + tile * splits[:, None], mask=there)
            tl.store(line + 7, splits[:, None] + same, mask=there)
            nth += PARTS
    for first in range(done, parts, LANES):
        part = first + tl.arange(0, LANES)
        tl.store(schedule + part * FIELDS + 2, 0, mask=part < parts)
    for first in range(0, counters, LANES):
        counter = first + tl.arange(0, LANES)
        tl.store(schedule + parts * FIELDS + counter, 0, mask=counter < counters)
    tl.debug_barrier()  # all lines are there before they are copied
    field = tl.arange(0, FIELDS)
    for first in range(0, ranges, LANES):
        r = first + tl.arange(0, LANES)
        begin, end = (
            (r.to(tl.int64) * done // ranges).to(tl.int32),
            ((r.to(tl.int64) + 1) * done // ranges).to(tl.int32),
        )
        entry = schedule + parts * FIELDS + counters + r * ENTRY
        some = (r < ranges) & (begin < end)
        line = tl.load(schedule + begin[:, None] * FIELDS + field, mask=some[:, None], other=0)
        tl.store(entry[:, None] + field, line, mask=(r < ranges)[:, None])
        tl.store(entry + FIELDS, begin, mask=r < ranges)
        tl.store(entry + FIELDS + 1, end - begin, mask=r < ranges)


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


@triton.jit
def _as_fp16(q):
    """Rows in fp16 and the power of two of each that was taken out, so that the largest is in [1, 2): e4m3 becomes fp16
    in one instruction for two, and bf16 in several."""
    size = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = ((254 << 23) - size).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse[:, None]).to(tl.float16), size.to(tl.float32, bitcast=True)


@triton.jit
def _merge(
    sums, statistics, first, parts, g, groups, row, inside,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """acc / l of the rows that are ``inside``, from ``parts`` parts."""
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, MERGED)
    acc = tl.zeros((row.shape[0], BLOCK_D), tl.float32)
    total = tl.zeros((row.shape[0],), tl.float32)
    largest = tl.full((row.shape[0],), LEAST, tl.float32)
    for at in range(0, parts, MERGED):
        mask = (at + s < parts)[:, None] & inside[None, :]
        index = ((first + at + s).to(tl.int64) * groups + g)[:, None] * ROWS + row[None, :]
        m = tl.load(statistics + index * 2, mask=mask, other=LEAST, cache_modifier=".cg")
        l = tl.load(statistics + index * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            sums + index[:, :, None] * WIDTH + d[None, None, :], mask=mask[:, :, None] & (d < WIDTH)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(m, 0))
        weight = tl.exp2(m - new_largest[None, :])
        fade = tl.exp2(largest - new_largest)
        # Threads add the same products, each from its own side. A plain product would be fused with the addition, and
        # which of two is then rounded would depend on the side.
        total = total * fade + tl.sum(tl.fma(weight, l, tl.zeros_like(l)), 0)
        weights = tl.broadcast_to(weight[:, :, None], part.shape)
        acc = acc * fade[:, None] + tl.sum(tl.fma(weights, part, tl.zeros_like(part)), 0)
        largest = new_largest
    return _normalized(acc, total)


@triton.jit
def _normalized(acc, total):
    """acc / l, and zeros where nothing was seen; NaN stays."""
    some = total != 0
    return tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)


@triton.jit
def _write(out, acc, query, head, heads, inside, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = out + (query.to(tl.int64) * heads + head)[:, None] * WIDTH + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (d < WIDTH)[None, :])


@triton.jit(do_not_specialize=["parts", "room", "table_row", "groups"])
def _forward(
    q, k_cache, v_cache, page_table, schedule, positions, k_scale, v_scale, out, sums, statistics,
    scale, parts, room, table_row, groups, q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MERGED: tl.constexpr, BLOCK_H: tl.constexpr, FIELDS: tl.constexpr,
    PRECISION: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A part of a lane for one key/value head."""
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    part, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    line = schedule + part * FIELDS
    table = page_table + tl.load(line).to(tl.int64) * table_row
    query = tl.load(line + 1)  # the first of the tile
    left = tl.load(line + 2)  # queries of the lane from that one on; 0 where there is no such part
    keys = tl.load(line + 3)  # of the lane
    first, last = tl.load(line + 4), tl.load(line + 5)  # keys of this part
    first_part = tl.load(line + 6)  # of the tile
    splits = tl.load(line + 7)  # parts of the tile
    if left > 0:
        m = tl.arange(0, BLOCK_M)
        token, head = query + m // GROUP, g * GROUP + m % GROUP
        valid = (m < ROWS) & (m // GROUP < left)
        d = tl.arange(0, BLOCK_D)
        at = token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
        q_tile = tl.load(q + at[:, None] + d[None, :], mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
        if positions is None:  # the queries are the newest tokens
            position = keys - left + m // GROUP
        else:
            position = tl.load(positions + token, mask=valid, other=-1).to(tl.int64)
            position = tl.minimum(position, keys - 1).to(tl.int32)
        position = tl.where(valid, position, -1)
        last = tl.minimum(tl.minimum(last, room), tl.max(position) + 1)
        position = tl.minimum(position, last - 1)
        k_cache += g.to(tl.int64) * k_head
        v_cache += g.to(tl.int64) * v_head
        factor = tl.full((BLOCK_M,), scale * LOG2_E, tl.float32)
        if k_scale is not None:
            factor *= tl.load(k_scale + g)
        if k_cache.dtype.element_ty == tl.uint8:
            if q_tile.dtype != tl.float32:
                q_tile, power = _as_fp16(q_tile)
                factor *= power
        n = tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        largest = tl.full((BLOCK_M,), LEAST, tl.float32)
        for start in tl.range(first, last, BLOCK_N):
            key = start + n
            inside = key < last
            page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            offset = (key % PAGE).to(tl.int64)
            k_tile = _cached(k_cache, page, offset, k_page, k_slot, d, inside, WIDTH, q_tile.dtype, NATIVE)
            v_tile = _cached(v_cache, page, offset, v_page, v_slot, d, inside, WIDTH, q_tile.dtype, NATIVE)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * factor[:, None]
            s = tl.where(key[None, :] <= position[:, None], s, -float("inf"))
            new_largest = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp2(s - new_largest[:, None])
            fade = tl.exp2(largest - new_largest)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision=PRECISION)
            largest = new_largest
        if v_scale is not None:
            acc *= tl.load(v_scale + g)
        if splits == 1:
            _write(out, _normalized(acc, total), token, head, groups * GROUP, valid, WIDTH, BLOCK_D)
        else:
            index = (part.to(tl.int64) * groups + g) * ROWS + m
            tl.store(sums + index[:, None] * WIDTH + d[None, :], acc, mask=valid[:, None] & (d < WIDTH)[None, :])
            tl.store(statistics + index * 2, largest, mask=valid)
            tl.store(statistics + index * 2 + 1, total, mask=valid)
            tl.debug_barrier()  # all of it is there before it counts
            counter = schedule + parts * FIELDS + first_part * groups + g
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                h = tl.arange(0, BLOCK_H)
                inside = (h < ROWS) & (h // GROUP < left)
                merged = _merge(
                    sums, statistics, first_part, splits, g, groups, h, inside, ROWS, WIDTH, BLOCK_D, MERGED
                )
                _write(out, merged, query + h // GROUP, g * GROUP + h % GROUP, groups * GROUP, inside, WIDTH, BLOCK_D)


def _rowwise(cache: torch.Tensor) -> torch.Tensor:
    """Caches whose last dimension is contiguous, as bytes where they are float8."""
    cache = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return cache if cache.stride(3) == 1 else cache.contiguous()


def _setting(block_m: int, block_d: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys of a tile, warps and stages of the pipeline that copies tiles ahead, as measured."""
    if dtype == torch.float32 or block_d > 128:
        return 32, 4, 3
    return (64, 4, 3) if block_m > 16 else (64, 2, 5)


def attention_schedule(k_lens, heads, groups, queries, width, item_size, rows, cu_seqlens_q, split):
    lanes = k_lens.shape[0]
    out = empty_schedule(k_lens, heads, groups, queries, width, item_size, rows, cu_seqlens_q, split)
    parts = most_parts(lanes, heads, groups, queries, cu_seqlens_q)
    block_q, ranges = queries_of_a_tile(lanes, heads // groups, queries, cu_seqlens_q), ranges_in(out, parts, groups)
    _schedule[(1,)](
        *contiguous(k_lens, rows, cu_seqlens_q), out, lanes, queries, parts, parts * groups, ranges, wanted(groups),
        LEAST_KEYS // UNIT if split else WHOLE,
        BLOCK_Q=block_q, UNIT=UNIT, FIELDS=FIELDS, ENTRY=ENTRY, LANES=256, PARTS=8, num_warps=8,
    )  # fmt: skip
    return out


def paged_attention(
    q, k_cache, v_cache, page_table, k_lens, schedule, rows, cu_seqlens_q, q_positions, k_scale, v_scale, scale
):
    if (out := unread(q, k_cache, page_table, k_lens)) is not None:
        return out
    n, heads, width = q.shape
    out = q.new_empty(q.shape)
    lanes, (page_size, groups) = k_lens.shape[0], k_cache.shape[1:3]
    if schedule is None:
        item_size = k_cache.dtype.itemsize
        schedule = attention_schedule(k_lens, heads, groups, n, width, item_size, rows, cu_seqlens_q, split=True)
    native = k_cache.dtype == torch.float8_e4m3fn and has_float8()
    q = q if q.stride(2) == 1 else q.contiguous()
    k_cache, v_cache = _rowwise(k_cache), _rowwise(v_cache)
    page_table, q_positions, k_scale, v_scale = contiguous(page_table, q_positions, k_scale, v_scale)
    group = heads // groups
    parts = most_parts(lanes, heads, groups, n, cu_seqlens_q)
    block_q = queries_of_a_tile(lanes, group, n, cu_seqlens_q)
    block_h = triton.next_power_of_2(block_q * group)
    block_d = max(triton.next_power_of_2(width), 16)
    block_n, num_warps, num_stages = _setting(block_h, block_d, q.dtype)
    partial = q.new_empty(parts * groups * block_q * group, width + 2, dtype=torch.float32)
    sums, statistics = partial.flatten()[: len(partial) * width], partial.flatten()[len(partial) * width :]
    _forward[(parts * groups,)](
        q, k_cache, v_cache, page_table, schedule, q_positions, k_scale, v_scale, out, sums, statistics, scale,
        parts, page_table.shape[1] * page_size, page_table.shape[1], groups,
        *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], GROUP=group, WIDTH=width,
        BLOCK_D=block_d, PAGE=page_size, BLOCK_Q=block_q, BLOCK_M=max(block_h, 16), BLOCK_N=block_n,
        MERGED=max(min(2048 // (block_h * block_d), 32), 1), BLOCK_H=block_h, FIELDS=FIELDS,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", NATIVE=native,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
