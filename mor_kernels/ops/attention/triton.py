"""Attention of queries at given positions over all keys up to them, in Triton; forward and backward, one family.

A program of the forward, and of the backward for d_q, holds a tile of rows: the query heads that share a key/value
head stand beside one another, row = query * GROUP + head of the group, so that the tile spans few positions. A program
of the backward for d_k and d_v holds a tile of keys and goes through the queries of each head of the group, which sums
over the group by itself. Positions decide what is computed: with the least and the largest position of a tile,

    keys before least + 1      are visible to all its rows: whole tiles of them are not masked;
    keys from largest + 1 on   are visible to none: skipped.

Nothing here needs ascending positions, but they make the masked part narrow. With s = scale * q k^T where visible and
-inf elsewhere, tile after tile of keys (FlashAttention-2, Dao 2023; exponentials to the base 2):

    m' = max(m, max s);  p = exp(s - m');  l' = l exp(m - m') + sum p;  acc' = acc exp(m - m') + p v
    out = acc / l;  lse = m + log l

and backward, from lse and delta = sum(d_out * out) - d_lse:

    p = exp(s - lse);  d_s = p * (d_out v^T - delta)
    d_q = scale * d_s k;  d_k = scale * d_s^T q;  d_v = p^T d_out

p and d_s are rounded to the dtype of the inputs before they are multiplied; every sum is in fp32. Each output element
is written by one program, in one order: the result is deterministic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from .._triton import LEAST, LOG2_E
from ._triton import CHUNK, Sizes, cleared, cleared_gradients, item_of, last_key_of, span_of, statistic_of

ALIGN = tl.constexpr(16)  # the backward's statistics of a sequence begin at a multiple of so many rows,
GAP = tl.constexpr(5)  # and are followed by so many times as much: a tile of 64 that begins at the last row ends there
PLANES = tl.constexpr(4)  # of statistics in a tile: lse, delta, and two that are not there


@triton.jit
def _sequence(x, b, start, batch, token, PACKED: tl.constexpr):
    """The first row of sequence b, which is row ``start`` where they are packed."""
    x += b * batch
    if PACKED:
        x += start * token
    return x


@triton.jit
def _wide(index):
    """As int64, before it is multiplied by a stride; a loop's variable is a plain int in Triton's interpreter."""
    return index + tl.zeros((), tl.int64)


@triton.jit
def _offsets(row, stride, BLOCK_D: tl.constexpr):
    """Where (rows, BLOCK_D) elements stand, as 64-bit offsets."""
    return row.to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load(x, offsets, inside, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile of rows, zeros where they are not ``inside`` and past WIDTH: what is there may be NaN."""
    mask = inside[:, None]
    if WIDTH < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < WIDTH)[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0)


@triton.jit
def _keys(
    x, first, token, offsets, places, k_start, fresh, own, fresh_token, inside,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of keys or of values from row ``first`` on; where ``places`` names a query, its ``fresh`` row. Those of
    this sequence and head begin at ``own``."""
    at = x + _wide(first) * token + offsets
    if places is not None:
        place = tl.load(places + k_start + first + tl.arange(0, offsets.shape[0]), mask=inside, other=-1)
        at = tl.where((place >= 0)[:, None], fresh + own + _offsets(place, fresh_token, BLOCK_D), at)
    return _load(at, 0, inside, WIDTH, BLOCK_D)


@triton.jit
def _visible(position, valid, keys, BLOCK_N: tl.constexpr):
    """Of a tile of rows: how many keys, in whole tiles of keys, all see; and how many any sees."""
    seen = tl.max(tl.where(valid, position, -1)) + 1
    shared = (tl.min(tl.where(valid, position, keys - 1)) + 1) // BLOCK_N * BLOCK_N
    return tl.minimum(shared, seen), seen


@triton.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows", "pitch"])
def _forward(
    q, k, v, k_fresh, v_fresh, places, positions, q_ends, k_ends, out, lse, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    groups, pairs, tiles, section, q_rows, k_rows, pitch,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out and lse of a tile of rows. The last tiles see most keys and come first."""
    b, g, tile = item_of(tl.program_id(0).to(tl.int64), groups, pairs, tiles, section)
    q_start, queries = span_of(b, q_ends, q_rows, PACKED)
    k_start, keys = span_of(b, k_ends, k_rows, PACKED)
    row = (tiles - 1 - tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, g * GROUP + row % GROUP
    valid = query < queries
    q = _sequence(q, b, q_start, q_batch, q_token, PACKED)
    k = _sequence(k + g * k_head, b, k_start, k_batch, k_token, PACKED)
    v = _sequence(v + g * v_head, b, k_start, v_batch, v_token, PACKED)
    # loaded before the positions, whose extremes must be waited for
    q_tile = _load(q, _offsets(query, q_token, BLOCK_D) + (head * q_head)[:, None], valid, WIDTH, BLOCK_D)
    position = last_key_of(positions + q_start if positions is not None else None, query, queries, keys)
    shared, seen = _visible(position, valid, keys, BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    own = (q_start * groups + g) * WIDTH
    k_offsets, v_offsets = _offsets(n, k_token, BLOCK_D), _offsets(n, v_token, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), LEAST, tl.float32)
    for first in tl.range(0, seen, BLOCK_N):
        key = first + n
        k_tile = _keys(
            k, first, k_token, k_offsets, places, k_start, k_fresh, own, groups * WIDTH, key < seen, WIDTH, BLOCK_D
        )  # fmt: skip
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if first >= shared:
            s = tl.where(key[None, :] <= position[:, None], s, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(s, 1) * (scale * LOG2_E))
        p = tl.exp2(s * (scale * LOG2_E) - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(p, 1)
        v_tile = _keys(
            v, first, v_token, v_offsets, places, k_start, v_fresh, own, groups * WIDTH, key < seen, WIDTH, BLOCK_D
        )  # fmt: skip
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision=PRECISION)
        largest = new_largest
    some = valid & (position >= 0)
    d = tl.arange(0, BLOCK_D)
    written = query < (queries if PACKED else q_rows)
    at = out + ((q_start + query) * (groups * GROUP) + head)[:, None] * WIDTH + d[None, :]
    total = tl.where(some, total, 1.0)
    acc = tl.where(some[:, None], acc / total[:, None], 0.0)
    tl.store(at, acc.to(out.dtype.element_ty), mask=written[:, None] & (d < WIDTH)[None, :])
    at = lse + statistic_of(q_start, q_rows, groups * GROUP, PACKED) + head * q_rows.to(tl.int64) + query
    tl.store(at, tl.where(some, (largest + tl.log2(total)) / LOG2_E, -float("inf")), mask=written)


@triton.jit
def _aligned(b, head, q_start, heads, pitch, PACKED: tl.constexpr):
    """Where a sequence begins in (B, heads, pitch), or in (heads, pitch); pitch is counted in units of ALIGN."""
    if PACKED:
        return (head * pitch + q_start // ALIGN + b * GAP) * ALIGN
    return (b * heads + head) * pitch * ALIGN


@triton.jit
def _planes(row):
    """Where the lse of a row stands. Its delta follows ALIGN later: so many of each lie side by side."""
    return row // ALIGN * (2 * ALIGN) + row % ALIGN


@triton.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows", "pitch"])
def _backward_q(
    d_out, d_lse, q, k, v, k_fresh, v_fresh, places, positions, q_ends, k_ends,
    out, lse, d_q, lasts, statistics, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    groups, pairs, tiles, section, q_rows, k_rows, pitch,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """d_q of a tile of rows. For :func:`_backward_kv` it leaves each query's last key, lse to the base 2, and delta."""
    b, g, tile = item_of(tl.program_id(0).to(tl.int64), groups, pairs, tiles, section)
    q_start, queries = span_of(b, q_ends, q_rows, PACKED)
    k_start, keys = span_of(b, k_ends, k_rows, PACKED)
    row = (tiles - 1 - tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, g * GROUP + row % GROUP
    valid = query < queries
    q = _sequence(q, b, q_start, q_batch, q_token, PACKED)
    k = _sequence(k + g * k_head, b, k_start, k_batch, k_token, PACKED)
    v = _sequence(v + g * v_head, b, k_start, v_batch, v_token, PACKED)
    heads = groups * GROUP
    # loaded before the positions, as in the forward
    q_tile = _load(q, _offsets(query, q_token, BLOCK_D) + (head * q_head)[:, None], valid, WIDTH, BLOCK_D)
    at = _offsets((q_start + query) * heads + head, WIDTH, BLOCK_D)
    d_out_tile = _load(d_out, at, valid, WIDTH, BLOCK_D)
    out_tile = _load(out, at, valid, WIDTH, BLOCK_D)
    position = last_key_of(positions + q_start if positions is not None else None, query, queries, keys)
    shared, seen = _visible(position, valid, keys, BLOCK_N)
    statistic = statistic_of(q_start, q_rows, heads, PACKED) + head * q_rows.to(tl.int64) + query
    delta = tl.sum(d_out_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + statistic, mask=valid, other=0.0)
    lse_2 = tl.load(lse + statistic, mask=valid, other=float("inf")) * LOG2_E
    lse_2 = tl.where(position >= 0, lse_2, float("inf"))  # what sees nothing: p = exp2(s - inf) = 0
    statistics += _planes(_aligned(b, head, q_start, heads, pitch, PACKED) + query)
    tl.store(statistics, lse_2, mask=valid)
    tl.store(statistics + ALIGN, delta, mask=valid)
    if g == 0:
        tl.store(lasts + _aligned(b, 0, q_start, 1, pitch, PACKED) + query, position, mask=valid & (head == 0))
    n = tl.arange(0, BLOCK_N)
    own = (q_start * groups + g) * WIDTH
    k_offsets, v_offsets = _offsets(n, k_token, BLOCK_D), _offsets(n, v_token, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in tl.range(0, seen, BLOCK_N):
        key = first + n
        k_tile = _keys(
            k, first, k_token, k_offsets, places, k_start, k_fresh, own, groups * WIDTH, key < seen, WIDTH, BLOCK_D
        )  # fmt: skip
        v_tile = _keys(
            v, first, v_token, v_offsets, places, k_start, v_fresh, own, groups * WIDTH, key < seen, WIDTH, BLOCK_D
        )  # fmt: skip
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        d_p = tl.dot(d_out_tile, tl.trans(v_tile), input_precision=PRECISION)
        d_s = tl.exp2(s * (scale * LOG2_E) - lse_2[:, None]) * (d_p - delta[:, None])
        if first >= shared:
            d_s = tl.where(key[None, :] <= position[:, None], d_s, 0.0)
        acc = tl.dot(d_s.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    acc = tl.where((valid & (position >= 0))[:, None], acc, 0.0)  # a NaN among the keys is in all of them
    written = query < (queries if PACKED else q_rows)
    mask = written[:, None] & (tl.arange(0, BLOCK_D) < WIDTH)[None, :]
    tl.store(d_q + at, (acc * scale).to(d_q.dtype.element_ty), mask=mask)


@triton.jit
def _seeing(lasts, queries, first_key, last_key, CHUNK: tl.constexpr):
    """Of a sequence: the first query that sees ``first_key``, the one from which on all see ``last_key``, and the
    number of keys that any sees."""
    since, always, seen = queries, 0, 0
    for start in tl.range(0, queries, CHUNK):
        query = start + tl.arange(0, CHUNK)
        last = tl.load(lasts + query, mask=query < queries, other=-1)
        since = tl.minimum(since, tl.min(tl.where(last >= first_key, query, queries)))
        always = tl.maximum(always, tl.max(tl.where((last < last_key) & (query < queries), query + 1, 0)))
        seen = tl.maximum(seen, tl.max(last) + 1)
    return since, always, seen


@triton.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows", "pitch"])
def _backward_kv(
    d_out, q, k, v, k_fresh, v_fresh, places, q_ends, k_ends, lasts, statistics,
    d_k, d_v, d_k_fresh, d_v_fresh, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    groups, pairs, tiles, section, q_rows, k_rows, pitch,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """d_k and d_v of a tile of keys. The first keys are seen most and come first."""
    b, g, tile = item_of(tl.program_id(0).to(tl.int64), groups, pairs, tiles, section)
    q_start, queries = span_of(b, q_ends, q_rows, PACKED)
    k_start, keys = span_of(b, k_ends, k_rows, PACKED)
    n = tl.arange(0, BLOCK_N)
    first_key = tile * BLOCK_N
    key = first_key + n
    q = _sequence(q + g * GROUP * q_head, b, q_start, q_batch, q_token, PACKED)
    k = _sequence(k + g * k_head, b, k_start, k_batch, k_token, PACKED)
    v = _sequence(v + g * v_head, b, k_start, v_batch, v_token, PACKED)
    heads = groups * GROUP
    d_out += (q_start * heads + g * GROUP) * WIDTH
    lasts += _aligned(b, 0, q_start, 1, pitch, PACKED)
    statistics += 2 * _aligned(b, g * GROUP, q_start, heads, pitch, PACKED)
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    since, always, seen = _seeing(lasts, queries, first_key, last_key, CHUNK)
    since = since // ALIGN * ALIGN
    own = (q_start * groups + g) * WIDTH
    k_offsets, v_offsets = _offsets(n, k_token, BLOCK_D), _offsets(n, v_token, BLOCK_D)
    k_tile = _keys(
        k, first_key, k_token, k_offsets, places, k_start, k_fresh, own, groups * WIDTH, key < seen, WIDTH, BLOCK_D
    )  # fmt: skip
    v_tile = _keys(
        v, first_key, v_token, v_offsets, places, k_start, v_fresh, own, groups * WIDTH, key < seen, WIDTH, BLOCK_D
    )  # fmt: skip
    acc_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    acc_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    m = tl.arange(0, BLOCK_M)
    q_offsets, d_out_offsets = _offsets(m, q_token, BLOCK_D), _offsets(m, heads * WIDTH, BLOCK_D)
    # The planes that are not there make it as many elements as there are threads, which load each element once. Of
    # fewer, every thread would load all that it needs: more instructions than q and d_out take together.
    plane = tl.arange(0, PLANES)[:, None]
    plane_offsets, there = plane * ALIGN + _planes(m)[None, :], (plane < 2) & (m >= 0)[None, :]
    q += _wide(since) * q_token
    d_out += _wide(since) * heads * WIDTH
    statistics += 2 * _wide(since)
    steps = tl.cdiv(queries - since, BLOCK_M)
    back = (steps - 1) * BLOCK_M
    first = since
    for _ in tl.range(0, steps * GROUP):  # tile after tile, head after head, without a division
        inside = first + m < queries
        q_tile = _load(q, q_offsets, inside, WIDTH, BLOCK_D)
        d_out_tile = _load(d_out, d_out_offsets, inside, WIDTH, BLOCK_D)
        planes = tl.trans(tl.load(statistics + plane_offsets, mask=there, other=0.0))
        even, odd = tl.split(tl.reshape(planes, (BLOCK_M, PLANES // 2, 2)))
        lse_2, absent = tl.split(even)
        delta, absent = tl.split(odd)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        d_p = tl.dot(v_tile, tl.trans(d_out_tile), input_precision=PRECISION)
        if first < always:
            s = tl.where(key[:, None] <= tl.load(lasts + first + m)[None, :], s, -float("inf"))
        p = tl.exp2(s * (scale * LOG2_E) - lse_2[None, :])
        acc_v = tl.dot(p.to(d_out_tile.dtype), d_out_tile, acc_v, input_precision=PRECISION)
        d_s = p * (d_p - delta[None, :])
        acc_k = tl.dot(d_s.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)
        first += BLOCK_M
        ended = first >= queries
        q += tl.where(ended, q_head - back * _wide(q_token), BLOCK_M * _wide(q_token))
        d_out += tl.where(ended, WIDTH - back * _wide(heads * WIDTH), BLOCK_M * _wide(heads * WIDTH))
        statistics += tl.where(ended, 2 * (_wide(pitch) * ALIGN - back), 2 * BLOCK_M)
        first = tl.where(ended, since, first)
    d = tl.arange(0, BLOCK_D)
    at = ((k_start + key) * groups + g)[:, None] * WIDTH + d[None, :]
    written = (key < (keys if PACKED else k_rows))[:, None] & (d < WIDTH)[None, :]
    some = (key < seen)[:, None]
    if places is not None:
        place = tl.load(places + k_start + key, mask=key < keys, other=-1)
        fresh = own + _offsets(place, groups * WIDTH, BLOCK_D)
        replaced = (place >= 0)[:, None] & (d < WIDTH)[None, :]
        tl.store(d_k_fresh + fresh, (acc_k * scale).to(d_k.dtype.element_ty), mask=replaced)
        tl.store(d_v_fresh + fresh, acc_v.to(d_v.dtype.element_ty), mask=replaced)
        some = some & (place < 0)[:, None]
    tl.store(d_k + at, tl.where(some, acc_k * scale, 0.0).to(d_k.dtype.element_ty), mask=written)
    tl.store(d_v + at, tl.where(some, acc_v, 0.0).to(d_v.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["tiles", "q_rows", "k_rows"])
def _place(positions, q_ends, k_ends, places, tiles, q_rows, k_rows, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """places[the key at a query's position] = the query, counted in its sequence; the others stay."""
    b = (tl.program_id(0) // tiles).to(tl.int64)
    query = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    q_start, queries = span_of(b, q_ends, q_rows, PACKED)
    k_start, keys = span_of(b, k_ends, k_rows, PACKED)
    position = tl.load(positions + q_start + query, mask=query < queries, other=-1).to(tl.int64)
    tl.store(places + k_start + position, query, mask=(position >= 0) & (position < keys))


class Setting(NamedTuple):
    """Rows and keys of a tile, and how it is compiled; ``registers`` of a thread at most, so that more tiles are in
    flight on a multiprocessor."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int | None = None


class Settings(NamedTuple):
    forward: Setting
    backward_q: Setting
    backward_kv: Setting


# By the padded head width, for 2-byte elements. On an H100, measured.
SM_90 = {
    32: Settings(Setting(64, 64, 4, 3, 96), Setting(64, 64, 4, 3), Setting(64, 64, 4, 3, 168)),
    64: Settings(Setting(64, 64, 4, 3, 128), Setting(64, 64, 4, 3, 128), Setting(32, 64, 4, 3, 168)),
    128: Settings(Setting(128, 128, 8, 3), Setting(128, 64, 8, 3), Setting(64, 128, 8, 3)),
    256: Settings(Setting(128, 32, 8, 3), Setting(128, 32, 8, 2), Setting(32, 32, 4, 2)),
}
# Elsewhere what doesn't spill on an A100 and takes less than 100 KB of shared memory, not measured.
SM_80 = {
    32: Settings(Setting(64, 64, 4, 3), Setting(64, 64, 4, 2), Setting(32, 64, 4, 2)),
    64: Settings(Setting(128, 64, 8, 2), Setting(64, 64, 4, 2), Setting(32, 64, 4, 2)),
    128: Settings(Setting(64, 32, 4, 3), Setting(128, 32, 8, 2), Setting(32, 64, 8, 2)),
    256: Settings(Setting(64, 32, 8, 2), Setting(64, 16, 8, 2), Setting(32, 32, 4, 2)),
}
# float32 is multiplied as three products of tf32: for accuracy, not for speed. (With 8 warps and 16 keys, Triton 3.6
# compiles code for an H100 that reads past the end of shared memory.)
FP32 = {
    32: Settings(Setting(32, 32, 4, 2), Setting(32, 16, 4, 1), Setting(16, 32, 4, 1)),
    64: Settings(Setting(32, 32, 4, 2), Setting(32, 16, 4, 1), Setting(16, 32, 4, 1)),
    128: Settings(Setting(32, 16, 4, 1), Setting(32, 16, 4, 1), Setting(16, 16, 4, 1)),
}


@functools.cache
def settings(width: int, exact: bool, device: torch.device) -> Settings:
    """For a padded head width; ``exact``: float32."""
    if exact:
        return FP32[max(32, width)]
    compiled = isinstance(_forward, triton.runtime.JITFunction)  # otherwise it is interpreted
    arch = triton.runtime.driver.active.get_current_target().arch if compiled else 90
    return (SM_90 if arch == 90 else SM_80)[max(32, width)]


# Triton 3.2 fails to compile loops whose loads depend on loads, unless they are not pipelined; 3.6 is the first tried.
PIPELINES_INDIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


class _Call(Sizes):
    """What the kernels of one call have in common."""

    def __init__(self, q, k, v, k_fresh, v_fresh, q_positions, q_ends, k_ends, scale, longest=None):
        if scale <= 0:  # the kernels take maxima before they scale, and scale what is masked, -inf, too
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        super().__init__(q, k, q_ends, longest)
        self.q, self.k, self.v = q, k, v
        self.k_fresh, self.v_fresh, self.positions, *self.ends = contiguous(
            k_fresh, v_fresh, q_positions, q_ends, k_ends
        )
        self.scale = scale
        exact = q.dtype == torch.float32
        block_d = max(16, triton.next_power_of_2(self.width))
        self.settings = settings(block_d, exact, q.device)
        self.strides = [s for t in (q, k, v) for s in ((0, *t.stride()[:2]) if self.packed else t.stride()[:3])]
        self.pitch = triton.cdiv(self.q_rows, ALIGN.value) + GAP.value * (self.batch if self.packed else 1)
        self.constants = {
            "GROUP": self.heads // self.groups,
            "WIDTH": self.width,
            "BLOCK_D": block_d,
            "PRECISION": "tf32x3" if exact else "tf32",
            "PACKED": self.packed,
        }

    def launch(self, kernel, setting, *arguments, over_keys=False, **constants):
        """One program a tile of rows, or of keys, of each sequence and key/value head."""
        group, itemsize = self.constants["GROUP"], self.q.element_size()
        if over_keys:
            tiles = triton.cdiv(self.k_longest, setting.keys)
            streamed = self.q_longest * group
        else:
            tiles = triton.cdiv(self.q_longest * group, setting.rows)
            streamed = self.k_longest
        if not self.pairs * tiles:
            return
        pipelined = self.k_fresh is None or PIPELINES_INDIRECT
        kernel[(self.pairs * tiles,)](
            *arguments, *self.strides, self.groups, self.pairs, tiles, self.section(streamed, itemsize),
            self.q_rows, self.k_rows, self.pitch,
            **self.constants, **constants, BLOCK_M=setting.rows, BLOCK_N=setting.keys,
            num_warps=setting.num_warps, num_stages=setting.num_stages if pipelined else 1, maxnreg=setting.registers,
        )  # fmt: skip

    def inputs(self):
        """q, k, v; fresh keys and values, and for each key the query whose fresh one takes its place, -1 for none."""
        places = None
        if self.k_fresh is not None:
            places = self.k.new_full((self.k_rows * (1 if self.packed else self.batch),), -1, dtype=torch.int32)
            tiles = triton.cdiv(self.q_longest, CHUNK)
            if self.batch * tiles:
                _place[(self.batch * tiles,)](
                    self.positions, *self.ends, places, tiles, self.q_rows, self.k_rows,
                    PACKED=self.packed, BLOCK=CHUNK, num_warps=4,
                )  # fmt: skip
        return self.q, self.k, self.v, self.k_fresh, self.v_fresh, places

    def forward(self):
        q = self.q
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        self.launch(_forward, self.settings.forward, *self.inputs(), self.positions, *self.ends, out, lse, self.scale)
        return out, lse

    def backward(self, d_out, d_lse, out, lse):
        d_out, d_lse, out, lse = contiguous(d_out, d_lse, out, lse)
        d_q, d_k, d_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (self.q, self.k, self.v))
        fresh = self.k_fresh, self.v_fresh
        d_fresh = [None if t is None else torch.zeros_like(t) for t in fresh]  # of those that take no key's place
        inputs = self.inputs()
        rows = (1 if self.packed else self.batch) * self.pitch * ALIGN.value
        # zeros, since tiles go past the last query: q and d_out are taken for zeros there, these are not masked
        lasts, statistics = lse.new_zeros((1 + 2 * self.heads) * rows).split((rows, 2 * self.heads * rows))
        statistics = lasts.view(torch.int32), statistics
        self.launch(
            _backward_q, self.settings.backward_q,
            d_out, d_lse, *inputs, self.positions, *self.ends, out, lse, d_q, *statistics, self.scale,
        )  # fmt: skip
        self.launch(
            _backward_kv, self.settings.backward_kv,
            d_out, *inputs, *self.ends, *statistics, d_k, d_v, *d_fresh, self.scale, over_keys=True, CHUNK=CHUNK,
        )  # fmt: skip
        return d_q, d_k, d_v, *(lse.new_empty(0) if t is None else t for t in d_fresh)


def attention(*arguments):
    return _Call(*arguments).forward()


def attention_backward(d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse, *rest):
    return _signed(rest[-1], _Call(q, k, v, k_fresh, v_fresh, *rest).backward(d_out, d_lse, out, lse))


def attention_varlen(
    q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale
):
    longest = max_seqlen_q, max_seqlen_k
    call = _Call(q, k, v, k_fresh, v_fresh, q_positions, cu_seqlens_q, cu_seqlens_k, scale, longest)
    return cleared(cu_seqlens_q, *call.forward())


def attention_varlen_backward(
    d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale,
):  # fmt: skip
    longest = max_seqlen_q, max_seqlen_k
    call = _Call(q, k, v, k_fresh, v_fresh, q_positions, cu_seqlens_q, cu_seqlens_k, scale, longest)
    d_q, d_k, d_v, *d_fresh = call.backward(d_out, d_lse, out, lse)
    return _signed(scale, (*cleared_gradients(cu_seqlens_q, cu_seqlens_k, d_q, d_k, d_v), *d_fresh))


def _signed(scale, gradients):
    """d_q of what went in as -q, or as zeros."""
    d_q, *others = gradients
    return d_q if scale > 0 else -d_q if scale < 0 else torch.zeros_like(d_q), *others
