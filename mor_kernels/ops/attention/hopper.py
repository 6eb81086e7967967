"""Attention of queries at given positions over all keys up to them, in Gluon for Hopper; the maths is triton.py's.

Tiles come to shared memory by TMA, and wgmma multiplies them, 64 rows a warp group.

Forward, heads of 64: a program is one warp group, which holds 64 rows (query * GROUP + head of the group), passes over
keys and values and starts their copies itself. Four programs share a multiprocessor: one's softmax runs beside
another's products.

The other kernels' programs are several warp groups, each with work of its own: a producer starts copies, as many stages
ahead as a ring holds, for two consumers.

Forward, heads of 128: each consumer holds 64 rows. The product of probabilities and values of a tile runs together with
the scores of the next.

Backward: a program holds 128 keys and passes over the queries of each head of its group, once: the five products

    s^T = k q^T,  d_p^T = v d_out^T,  d_v += p^T d_out,  d_k += d_s^T q,  d_q^T = k^T d_s

instead of the seven of two passes. d_s goes through shared memory to a third warp group, which multiplies it by the
keys and adds d_q to sums in memory, in fp32, by TMA. In which order programs add is not determined, and so are the last
bits of d_q; sums take four bytes an element of q beside it.

Keys and values that no row of a program sees, and queries past a sequence's end, may be NaN: they are overwritten by
zeros in shared memory before they are multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._triton import contiguous
from ._triton import cleared, cleared_gradients
from .triton import CHUNK, LEAST, LOG2_E, Sizes, _item, _positions, _span, _statistic

ROWS = gl.constexpr(64)  # of a consumer: what one wgmma multiplies
BOTH = gl.constexpr(128)  # rows of both consumers
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of a warp group; its name until Triton 3.6


@builtin
def add_to_global(descriptor, at, tile, _semantic=None):
    """memory[at:] += tile, by TMA; Triton names it ``tma.async_atomic_add`` from 3.8 on."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, tile.handle)


@gluon.jit
def _place(q_ends, k_ends, groups, pairs, tiles, section, q_rows, k_rows, PACKED: gl.constexpr):
    """Of this program: the key/value head, the tile, and where the sequence's queries and keys begin and how many."""
    b, g, tile = _item(gl.program_id(0), groups, pairs, tiles, section)
    b = b.to(gl.int64)
    q_start, queries = _span(b, q_ends, q_rows, PACKED)
    k_start, keys = _span(b, k_ends, k_rows, PACKED)
    return g, tile, q_start, queries, k_start, keys


@gluon.jit
def _parity(i, STAGES: gl.constexpr):
    """Of the i-th use of a ring: how often its barrier completed before, modulo 2."""
    return (i // STAGES) & 1


@gluon.jit
def _clean(tile, first, count, SIZE: gl.constexpr, D: gl.constexpr):
    """Zeros in the rows of a tile, which begins at row ``first``, from row ``count`` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for start in gl.static_range(0, SIZE, 16):  # few at once: a producer has few registers
        if first + start + 16 > count:
            row = first + start + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            some = tile.slice(start, 16)
            rows = some.load(LAYOUT)
            some.store(gl.where((row < count)[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()
    barrier()


@gluon.jit
def _load_rows(q, first_row, q_start, queries, q_token, first_head, GROUP: gl.constexpr, D: gl.constexpr):
    """64 rows of queries."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = (q_start + row // GROUP) * q_token + (first_head + row % GROUP) * D
    inside = (row // GROUP < queries)[:, None]
    return gl.load(q + at[:, None] + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :], mask=inside, other=0.0)


@gluon.jit
def _mask(s, position, first):
    """Scores of keys from ``first`` on, -inf where a row's position is before the key."""
    key = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(key[None, :] <= position[:, None], s, -float("inf"))


@gluon.jit
def _softmax(s, largest, scale_2):
    """Of a tile of scores: p before it is divided by its sum, by how much what came before fades, the new maxima."""
    new_largest = gl.maximum(largest, gl.max(s, 1) * scale_2)
    return gl.exp2(s * scale_2 - new_largest[:, None]), gl.exp2(largest - new_largest), new_largest


@gluon.jit
def _products(i, q_tile, k_ring, v_ring, k_ready, v_ready, p, acc, STAGES: gl.constexpr):
    """Scores of tile i. The product of p and the values of the tile before is begun and still to be waited for."""
    P: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    stage, before = i % STAGES, (i - 1) % STAGES
    p_before = gl.convert_layout(p.to(v_ring.dtype), P)
    mbarrier.wait(k_ready.index(stage), _parity(i, STAGES))
    zeros = gl.zeros_like(p)
    s = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), _parity(i - 1, STAGES))
    acc = warpgroup_mma(p_before, v_ring.index(before), acc, is_async=True)
    return warpgroup_mma_wait(1, deps=(s,)), acc


@gluon.jit
def _sums(p):
    """Of each row, what each of the four threads that hold it sees; added up when all tiles are."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _scaled(x, factor):
    """The rows of x times their factors."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _store_rows(acc, total, largest, position, first_row, out, lse, sizes, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """out and lse of 64 rows, from sums over the keys."""
    OF_ROW: gl.constexpr = position.type.layout
    OUT: gl.constexpr = acc.type.layout
    D: gl.constexpr = acc.shape[1]
    q_start, queries, q_rows, heads, first_head = sizes
    row = first_row + gl.arange(0, ROWS, OF_ROW)
    query = row // GROUP
    some = position >= 0
    total = gl.where(some, gl.convert_layout(gl.sum(total, 1), OF_ROW), 1.0)
    written = query < (queries if PACKED else q_rows)
    at = _statistic(q_start, q_rows, heads, PACKED) + (first_head + row % GROUP) * q_rows.to(gl.int64) + query
    gl.store(lse + at, gl.where(some, (largest + gl.log2(total)) / LOG2_E, -float("inf")), mask=written)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    at = ((q_start + row // GROUP) * heads + first_head + row % GROUP) * D
    written = row // GROUP < (queries if PACKED else q_rows)
    some = gl.convert_layout(some, gl.SliceLayout(1, OUT))
    acc = gl.where(some[:, None], _scaled(acc, 1.0 / total), 0.0).to(out.dtype.element_ty)
    gl.store(out + at[:, None] + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :], acc, mask=written[:, None])


@gluon.jit
def _copy(tiles, at, ready, tile):
    mbarrier.expect(ready, tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, at, ready, tile)


@gluon.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows"])
def _forward_narrow(
    k_tiles, v_tiles, q, positions, q_ends, k_ends, out, lse, scale, q_token,
    groups, pairs, tiles, section, q_rows, k_rows,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """out and lse of 64 rows. The last tiles see most keys and come first."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    IN_WARP: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # all rows in each warp: extremes without the others
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_tiles.dtype)
    dtype: gl.constexpr = q.dtype.element_ty
    g, tile, q_start, queries, k_start, keys = _place(
        q_ends, k_ends, groups, pairs, tiles, section, q_rows, k_rows, PACKED
    )  # fmt: skip
    first_row = (tiles - 1 - tile) * ROWS
    if PACKED:
        if first_row // GROUP >= queries:
            return
    q_tile = gl.allocate_shared_memory(k_tiles.dtype, [ROWS, D], TILE)
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_N, D], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, BLOCK_N, D], v_tiles.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
    key, column = k_start.to(gl.int32), g * D
    _copy(k_tiles, [key, column], k_ready.index(0), k_ring.index(0))  # needed nearly always: before that is known
    _copy(v_tiles, [key, column], v_ready.index(0), v_ring.index(0))
    rows = _load_rows(q, first_row, q_start, queries, q_token, g * GROUP, GROUP, D)
    if positions is not None:
        positions += q_start
    query = (first_row + gl.arange(0, ROWS, IN_WARP)) // GROUP
    valid = query < queries
    position = _positions(positions, query, queries, keys)
    seen = gl.max(gl.where(valid, position, -1), 0) + 1
    unmasked = (gl.min(gl.where(valid, position, keys - 1), 0) + 1) // BLOCK_N
    n_tiles = gl.cdiv(seen, BLOCK_N)
    for slot in gl.static_range(1, STAGES):
        if slot < n_tiles:
            _copy(k_tiles, [key + slot * BLOCK_N, column], k_ready.index(slot), k_ring.index(slot))
            _copy(v_tiles, [key + slot * BLOCK_N, column], v_ready.index(slot), v_ring.index(slot))
    query = (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    position = gl.where(query < queries, _positions(positions, query, queries, keys), -1)
    q_tile.store(rows)
    fence_async_shared()
    barrier()
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    largest = gl.full([ROWS], LEAST, gl.float32, gl.SliceLayout(1, S))
    total = _sums(zeros)
    scale_2 = scale * LOG2_E
    mbarrier.wait(k_ready.index(0), 0)
    if n_tiles > 0:
        s = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if STAGES < n_tiles:
            _copy(k_tiles, [key + STAGES * BLOCK_N, column], k_ready.index(0), k_ring.index(0))
        if unmasked <= 0:
            s = _mask(s, position, 0)
        p, fade, largest = _softmax(s, largest, scale_2)
        total = _sums(p)
        for i in range(1, n_tiles):
            stage, before = i % STAGES, (i - 1) % STAGES
            s, acc = _products(i, q_tile, k_ring, v_ring, k_ready, v_ready, p, acc, STAGES)
            after = i + STAGES
            if after < n_tiles:
                _copy(k_tiles, [key + after * BLOCK_N, column], k_ready.index(stage), k_ring.index(stage))
            if i >= unmasked:
                s = _mask(s, position, i * BLOCK_N)
            p, fade, largest = _softmax(s, largest, scale_2)
            total = _scaled(total, fade) + _sums(p)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if after - 1 < n_tiles:
                _copy(v_tiles, [key + (after - 1) * BLOCK_N, column], v_ready.index(before), v_ring.index(before))
            acc = _scaled(acc, fade)
        last = n_tiles - 1
        v_tile = v_ring.index(last % STAGES)
        mbarrier.wait(v_ready.index(last % STAGES), _parity(last, STAGES))
        if n_tiles * BLOCK_N > seen:
            _clean(v_tile, last * BLOCK_N, seen, BLOCK_N, D)
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), P), v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        mbarrier.wait(v_ready.index(0), 0)  # a copy mustn't outlive its program
    sizes = (q_start, queries, q_rows, groups * GROUP, g * GROUP)
    _store_rows(acc, total, largest, position, first_row, out, lse, sizes, GROUP, PACKED)


@gluon.jit
def _forward_producer(
    k_tiles, v_tiles, rings, came, row, column, n_tiles, seen,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    for i in range(n_tiles):
        stage, used = i % STAGES, _parity(i, STAGES) ^ 1
        mbarrier.wait(k_free.index(stage), used)
        _copy(k_tiles, [row + i * BLOCK_N, column], k_ready.index(stage), k_ring.index(stage))
        mbarrier.wait(v_free.index(stage), used)
        if (i + 1) * BLOCK_N > seen:  # nobody sees the last rows, which may be NaN
            _copy(v_tiles, [row + i * BLOCK_N, column], came, v_ring.index(stage))
            mbarrier.wait(came, 0)
            _clean(v_ring.index(stage), i * BLOCK_N, seen, BLOCK_N, D)
            mbarrier.arrive(v_ready.index(stage), count=1)
        else:
            _copy(v_tiles, [row + i * BLOCK_N, column], v_ready.index(stage), v_ring.index(stage))


@gluon.jit
def _forward_consumer(
    q_tile, rings, first_row, q, positions, out, lse, scale, sizes,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    n_tiles, q_token, q_start, queries, keys, q_rows, heads, first_head = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dtype: gl.constexpr = q.dtype.element_ty
    q_tile.store(_load_rows(q, first_row, q_start, queries, q_token, first_head, GROUP, D))
    fence_async_shared()
    query = (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    valid = query < queries
    position = gl.where(valid, _positions(positions, query, queries, keys), -1)
    seen = gl.max(position, 0) + 1
    unmasked = (gl.min(gl.where(valid, position, keys - 1), 0) + 1) // BLOCK_N
    own = gl.cdiv(seen, BLOCK_N)  # the other consumer may have more
    barrier()
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    largest = gl.full([ROWS], LEAST, gl.float32, gl.SliceLayout(1, S))
    total = _sums(zeros)
    scale_2 = scale * LOG2_E
    if own > 0:
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(0), count=1)
        if unmasked <= 0:
            s = _mask(s, position, 0)
        p, fade, largest = _softmax(s, largest, scale_2)
        total = _sums(p)
        for i in range(1, own):
            stage, before = i % STAGES, (i - 1) % STAGES
            s, acc = _products(i, q_tile, k_ring, v_ring, k_ready, v_ready, p, acc, STAGES)
            mbarrier.arrive(k_free.index(stage), count=1)
            if i >= unmasked:
                s = _mask(s, position, i * BLOCK_N)
            p, fade, largest = _softmax(s, largest, scale_2)
            total = _scaled(total, fade) + _sums(p)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_free.index(before), count=1)
            acc = _scaled(acc, fade)
        before = (own - 1) % STAGES
        mbarrier.wait(v_ready.index(before), _parity(own - 1, STAGES))
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), P), v_ring.index(before), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(before), count=1)
    for i in range(own, n_tiles):
        stage = i % STAGES
        mbarrier.wait(k_ready.index(stage), _parity(i, STAGES))
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), _parity(i, STAGES))
        mbarrier.arrive(v_free.index(stage), count=1)
    sizes = (q_start, queries, q_rows, heads, first_head)
    _store_rows(acc, total, largest, position, first_row, out, lse, sizes, GROUP, PACKED)


@gluon.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows"])
def _forward_wide(
    k_tiles, v_tiles, q, positions, q_ends, k_ends, out, lse, scale, q_token,
    groups, pairs, tiles, section, q_rows, k_rows,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse of 128 rows. The last tiles see most keys and come first."""
    g, tile, q_start, queries, k_start, keys = _place(
        q_ends, k_ends, groups, pairs, tiles, section, q_rows, k_rows, PACKED
    )  # fmt: skip
    first_row = (tiles - 1 - tile) * BOTH
    if positions is not None:
        positions += q_start
    IN_WARP: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all rows in each warp
    query = (first_row + gl.arange(0, BOTH, IN_WARP)) // GROUP
    position = _positions(positions, query, queries, keys)
    seen = gl.max(gl.where(query < queries, position, -1), 0) + 1
    n_tiles = gl.cdiv(seen, BLOCK_N)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_tiles.dtype)
    q_tile = gl.allocate_shared_memory(k_tiles.dtype, [2, ROWS, D], TILE)
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_N, D], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, BLOCK_N, D], v_tiles.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(came, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    rings = (k_ring, v_ring, k_ready, v_ready, k_free, v_free)
    sizes = (n_tiles, q_token, q_start, queries, keys, q_rows, groups * GROUP, g * GROUP)
    row, column = k_start.to(gl.int32), g * D
    gl.warp_specialize([
        (_forward_consumer, (
            q_tile.index(0), rings, first_row, q, positions, out, lse, scale, sizes, GROUP, D, BLOCK_N, STAGES, PACKED,
        )),
        (_forward_consumer, (
            q_tile.index(1), rings, first_row + ROWS, q, positions, out, lse, scale, sizes,
            GROUP, D, BLOCK_N, STAGES, PACKED,
        )),
        (_forward_producer, (k_tiles, v_tiles, rings, came, row, column, n_tiles, seen, BLOCK_N, D, STAGES)),
    ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@triton.jit(do_not_specialize=["rows", "heads", "q_rows"])
def _prepare(
    d_out, out, d_lse, delta, sums, rows, heads, q_rows,
    D: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta of (query, head) rows, and zeros in their sums."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    d_out_tile = tl.load(d_out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    out_tile = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    query, head = row // heads, row % heads
    sequence = 0 if PACKED else query // q_rows
    statistic = (sequence * heads + head) * q_rows + (query if PACKED else query % q_rows)
    value = tl.sum(d_out_tile * out_tile, 1)
    if d_lse is not None:
        value -= tl.load(d_lse + statistic, mask=inside, other=0.0)
    tl.store(delta + statistic, value, mask=inside)
    tl.store(sums + at, tl.zeros((BLOCK, D), tl.float32), mask=inside[:, None])


@gluon.jit
def _bring(
    tiles_1, tiles_2, row, column, tile_1, tile_2, ready, came, cleaned, first, count,
    SIZE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy a tile of each; ``ready`` completes when they are there. Rows from ``count`` on may hold NaN: the copies
    then complete ``came`` instead, and ``ready`` follows when they are cleaned. Returns how often that was, in all."""
    if first + SIZE > count:
        mbarrier.expect(came, tiles_1.block_type.nbytes + tiles_2.block_type.nbytes)
        tma.async_copy_global_to_shared(tiles_1, [row, column], came, tile_1)
        tma.async_copy_global_to_shared(tiles_2, [row, column], came, tile_2)
        mbarrier.wait(came, cleaned & 1)
        _clean(tile_1, first, count, SIZE, D)
        _clean(tile_2, first, count, SIZE, D)
        mbarrier.arrive(ready, count=1)
        cleaned += 1
    else:
        mbarrier.expect(ready, tiles_1.block_type.nbytes + tiles_2.block_type.nbytes)
        tma.async_copy_global_to_shared(tiles_1, [row, column], ready, tile_1)
        tma.async_copy_global_to_shared(tiles_2, [row, column], ready, tile_2)
    return cleaned


@gluon.jit
def _backward_producer(
    q_tiles, d_out_tiles, k_tiles, v_tiles, rings, of_keys, came, k_row, k_column, row, column,
    positions, lse, delta, sizes,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_ring, d_out_ring, lse_ring, delta_ring, position_ring, q_ready, q_free = rings
    k_tile, v_tile, k_ready = of_keys
    since, steps, queries, keys, q_rows, first_key, seen = sizes
    cleaned = steps * 0
    cleaned = _bring(
        k_tiles, v_tiles, k_row, k_column, k_tile, v_tile, k_ready, came, cleaned, first_key, seen, BOTH, D
    )  # fmt: skip
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    first = since
    for i in range(steps * GROUP):
        query = first + m
        inside = query < queries
        position = gl.where(inside, _positions(positions, query, queries, keys), -1)
        # what sees nothing: p = exp2(s - inf) = 0
        lse_2 = gl.load(lse + query, mask=inside & (position >= 0), other=float("inf")) * LOG2_E
        sums = gl.load(delta + query, mask=inside, other=0.0)
        stage = i % STAGES
        mbarrier.wait(q_free.index(stage), _parity(i, STAGES) ^ 1)
        lse_ring.index(stage).store(lse_2)
        delta_ring.index(stage).store(sums)
        position_ring.index(stage).store(position)
        barrier()
        cleaned = _bring(
            q_tiles, d_out_tiles, row + first, column, q_ring.index(stage), d_out_ring.index(stage),
            q_ready.index(stage), came, cleaned, first, queries, BLOCK_M, D,
        )  # fmt: skip
        first += BLOCK_M
        if first >= queries:  # the next head
            first = since
            column += D
            lse += q_rows
            delta += q_rows


@gluon.jit
def _backward_consumer(
    rings, of_keys, of_d_s, d_k, d_v, scale, sizes,
    WHICH: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = d_k.dtype.element_ty
    q_ring, d_out_ring, lse_ring, delta_ring, position_ring, q_ready, q_free = rings
    k_tile, v_tile, k_ready = of_keys
    d_s_tile, d_s_ready, d_s_free = of_d_s
    since, steps, queries, keys, masked, seen, first_key, k_start, k_rows, groups, g = sizes
    first_key += WHICH * ROWS
    k_tile = k_tile.slice(WHICH * ROWS, ROWS)
    v_tile = v_tile.slice(WHICH * ROWS, ROWS)
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    acc_k = gl.zeros([ROWS, D], gl.float32, OUT)
    acc_v = gl.zeros([ROWS, D], gl.float32, OUT)
    scale_2 = scale * LOG2_E
    n_tiles = steps * GROUP
    first = since
    mbarrier.wait(k_ready, 0)
    if n_tiles > 0:
        mbarrier.wait(q_ready.index(0), 0)
        s = warpgroup_mma(k_tile, q_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        d_p = warpgroup_mma(v_tile, d_out_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s, d_p = warpgroup_mma_wait(0, deps=(s, d_p))
        for i in range(n_tiles):
            stage = i % STAGES
            p = gl.exp2(s * scale_2 - lse_ring.index(stage).load(OF_QUERY)[None, :])
            if first < masked:
                p = gl.where(key[:, None] <= position_ring.index(stage).load(OF_QUERY)[None, :], p, 0.0)
            d_s = (p * (d_p - delta_ring.index(stage).load(OF_QUERY)[None, :])).to(dtype)
            acc_v = warpgroup_mma(gl.convert_layout(p.to(dtype), P), d_out_ring.index(stage), acc_v, is_async=True)
            acc_k = warpgroup_mma(gl.convert_layout(d_s, P), q_ring.index(stage), acc_k, is_async=True)
            mbarrier.wait(d_s_free, (i & 1) ^ 1)
            d_s_tile.slice(WHICH * ROWS, ROWS).store(d_s)
            fence_async_shared()
            barrier()
            mbarrier.arrive(d_s_ready, count=1)
            first += BLOCK_M
            if first >= queries:
                first = since
            after = (i + 1) % STAGES
            if i + 1 < n_tiles:
                mbarrier.wait(q_ready.index(after), _parity(i + 1, STAGES))
            # after the last tile products that nobody reads: without a branch the multiplications don't wait
            s = warpgroup_mma(k_tile, q_ring.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
            d_p = warpgroup_mma(v_tile, d_out_ring.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
            acc_v, acc_k = warpgroup_mma_wait(2, deps=(acc_v, acc_k))
            mbarrier.arrive(q_free.index(stage), count=1)
            s, d_p = warpgroup_mma_wait(0, deps=(s, d_p))
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    at = ((k_start + key) * groups + g)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :]
    written = (key < (keys if PACKED else k_rows))[:, None]
    some = (key < seen)[:, None]
    gl.store(d_k + at, gl.where(some, acc_k * scale, 0.0).to(dtype), mask=written)
    gl.store(d_v + at, gl.where(some, acc_v, 0.0).to(dtype), mask=written)


@gluon.jit
def _backward_adder(
    of_keys, of_d_s, sum_ring, sum_tiles, row, column, since, steps, queries,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, SUM_STAGES: gl.constexpr,
):  # fmt: skip
    Q: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    k_tile, v_tile, k_ready = of_keys
    d_s_tile, d_s_ready, d_s_free = of_d_s
    zeros = gl.zeros([D, BLOCK_M], gl.float32, Q)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, Q))
    first = since
    mbarrier.wait(k_ready, 0)
    for i in range(steps * GROUP):
        mbarrier.wait(d_s_ready, i & 1)
        d_q = warpgroup_mma(k_tile.permute((1, 0)), d_s_tile, zeros, use_acc=False, is_async=True)
        d_q = warpgroup_mma_wait(0, deps=(d_q,))
        mbarrier.arrive(d_s_free, count=1)
        if first + BLOCK_M > queries:  # past the end is another sequence
            d_q = gl.where((first + m < queries)[None, :], d_q, 0.0)
        tma.store_wait(SUM_STAGES - 1)
        barrier()
        sum_ring.index(i % SUM_STAGES).permute((1, 0)).store(d_q)
        fence_async_shared()
        barrier()
        add_to_global(sum_tiles, [row + first, column], sum_ring.index(i % SUM_STAGES))
        first += BLOCK_M
        if first >= queries:
            first = since
            column += D
    tma.store_wait(0)


@gluon.jit
def _seeing(positions, queries, keys, first_key, last_key, CHUNK: gl.constexpr):
    """Of a sequence: the first query that sees ``first_key``, the one from which on all see ``last_key``, and the
    number of keys that any sees."""
    ANY: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    since, always, seen = queries, queries * 0, queries * 0
    for start in range(0, queries, CHUNK):
        query = start + gl.arange(0, CHUNK, ANY)
        last = gl.where(query < queries, _positions(positions, query, queries, keys), -1)
        since = gl.minimum(since, gl.min(gl.where(last >= first_key, query, queries), 0))
        always = gl.maximum(always, gl.max(gl.where((last < last_key) & (query < queries), query + 1, 0), 0))
        seen = gl.maximum(seen, gl.max(last, 0) + 1)
    return since, always, seen


@gluon.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows"])
def _backward(
    q_tiles, d_out_tiles, k_tiles, v_tiles, sum_tiles, positions, q_ends, k_ends, lse, delta, d_k, d_v, scale,
    groups, pairs, tiles, section, q_rows, k_rows,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SUM_STAGES: gl.constexpr, CHUNK: gl.constexpr, PACKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """d_k and d_v of a tile of keys, and its part of d_q. The first keys are seen most and come first."""
    g, tile, q_start, queries, k_start, keys = _place(
        q_ends, k_ends, groups, pairs, tiles, section, q_rows, k_rows, PACKED
    )  # fmt: skip
    first_key = tile * BOTH
    statistic = _statistic(q_start, q_rows, groups * GROUP, PACKED) + g * GROUP * q_rows.to(gl.int64)
    lse += statistic
    delta += statistic
    if positions is not None:
        positions += q_start
    since, always, seen = _seeing(positions, queries, keys, first_key, gl.minimum(first_key + BOTH, keys) - 1, CHUNK)
    none = since == queries
    since = since // BLOCK_M * BLOCK_M  # so that only a tile at the sequence's end may be cut
    steps = gl.where(none, 0, gl.cdiv(queries - since, BLOCK_M))
    masked = gl.where(first_key + BOTH > seen, queries, always)  # keys that nobody sees never count
    dtype: gl.constexpr = q_tiles.dtype
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    D_S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOTH, BLOCK_M], dtype)
    k_tile = gl.allocate_shared_memory(dtype, [BOTH, D], k_tiles.layout)
    v_tile = gl.allocate_shared_memory(dtype, [BOTH, D], v_tiles.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_tiles.layout)
    d_out_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], d_out_tiles.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    position_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], PLAIN)
    d_s_tile = gl.allocate_shared_memory(dtype, [BOTH, BLOCK_M], D_S)
    sum_ring = gl.allocate_shared_memory(gl.float32, [SUM_STAGES, BLOCK_M, D], sum_tiles.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_s_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    d_s_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_ready, count=1)
    mbarrier.init(came, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(q_free.index(stage), count=2)
    mbarrier.init(d_s_ready, count=2)
    mbarrier.init(d_s_free, count=1)
    k_row, k_column = k_start.to(gl.int32) + first_key, g * D
    row, column = q_start.to(gl.int32), g * GROUP * D
    rings = (q_ring, d_out_ring, lse_ring, delta_ring, position_ring, q_ready, q_free)
    of_keys = (k_tile, v_tile, k_ready)
    of_d_s = (d_s_tile, d_s_ready, d_s_free)
    sizes = (since, steps, queries, keys, masked, seen, first_key, k_start, k_rows, groups, g)
    of_queries = (since, steps, queries, keys, q_rows, first_key, seen)
    gl.warp_specialize([
        (_backward_consumer, (
            rings, of_keys, of_d_s, d_k, d_v, scale, sizes, 0, GROUP, D, BLOCK_M, STAGES, PACKED,
        )),
        (_backward_consumer, (
            rings, of_keys, of_d_s, d_k, d_v, scale, sizes, 1, GROUP, D, BLOCK_M, STAGES, PACKED,
        )),
        (_backward_adder, (
            of_keys, of_d_s, sum_ring, sum_tiles, row, column, since, steps, queries,
            GROUP, D, BLOCK_M, SUM_STAGES,
        )),
        (_backward_producer, (
            q_tiles, d_out_tiles, k_tiles, v_tiles, rings, of_keys, came, k_row, k_column, row, column,
            positions, lse, delta, of_queries, GROUP, D, BLOCK_M, STAGES,
        )),
    ], [4, 4, 4], [CONSUMER_REGISTERS, ADDER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _rows(x):
    """(rows, heads * d): a view, if TMA can read it (16 bytes at once), or a copy."""
    x = x.flatten(-2).flatten(0, -2)
    apart = x.stride(0) >= x.shape[1] and x.stride(0) * x.element_size() % 16 == 0
    fits = x.stride(1) == 1 and apart and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _tiles(rows, height, width):
    """How TMA reads (or adds to) tiles of ``height`` rows of one head."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[rows.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([height, width], element)
    return TensorDescriptor.from_tensor(rows, [height, width], layout)


class _Call(Sizes):
    """What both directions of one call have in common."""

    def __init__(self, q, k, v, q_positions, q_ends, k_ends, scale, longest=None):
        super().__init__(q, k, q_ends, longest)
        self.q, self.k, self.v = (_rows(t) for t in (q, k, v))
        self.shapes = q.shape, k.shape
        self.positions, *self.ends = contiguous(q_positions, q_ends, k_ends)
        self.scale = scale

    def launch(self, kernel, height, length, streamed, *arguments, **constants):
        """One program a tile of so many of ``length`` rows, or keys, of each sequence and key/value head."""
        tiles = triton.cdiv(length, height)
        if not self.pairs * tiles:
            return
        section = self.section(streamed, self.q.element_size())
        kernel[(self.pairs * tiles,)](
            *arguments, self.groups, self.pairs, tiles, section, self.q_rows, self.k_rows,
            GROUP=self.heads // self.groups, D=self.width, PACKED=self.packed, num_warps=4, **constants,
        )  # fmt: skip

    def forward(self):
        out, lse = self.q.new_empty(self.shapes[0]), self.q.new_empty(self.lse_shape, dtype=torch.float32)
        if not (self.q.numel() and self.k.numel()):
            return out.zero_(), lse.fill_(-float("inf"))
        if self.width == 64:
            kernel, height, block_n = _forward_narrow, ROWS.value, 64
            registers = {"maxnreg": 128}  # four programs a multiprocessor
        else:
            kernel, height, block_n = _forward_wide, BOTH.value, 128
            registers = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "maxnreg": 168}
        self.launch(
            kernel, height, self.q_longest * (self.heads // self.groups), self.k_longest,
            _tiles(self.k, block_n, self.width), _tiles(self.v, block_n, self.width), self.q, self.positions,
            *self.ends, out, lse, self.scale, self.q.stride(0), BLOCK_N=block_n, STAGES=2, **registers,
        )  # fmt: skip
        return out, lse

    def backward(self, d_out, d_lse, out, lse):
        d_out, d_lse, out, lse = contiguous(d_out, d_lse, out, lse)
        d_q, (d_k, d_v) = self.q.new_empty(self.shapes[0]), (self.q.new_empty(self.shapes[1]) for _ in range(2))
        if not (self.q.numel() and self.k.numel()):
            return d_q.zero_(), d_k.zero_(), d_v.zero_()
        delta, sums = torch.empty_like(lse), torch.empty_like(d_q, dtype=torch.float32)
        rows, block = sums.numel() // self.width, 32
        _prepare[(triton.cdiv(rows, block),)](
            d_out, out, d_lse, delta, sums, rows, self.heads, self.q_rows,
            D=self.width, PACKED=self.packed, BLOCK=block, num_warps=4,
        )  # fmt: skip
        block_m = 64 if self.width == 64 else 32  # twice the width takes twice the registers for d_k and d_v
        of_queries = (_tiles(t, block_m, self.width) for t in (self.q, _rows(d_out)))
        of_keys = (_tiles(t, BOTH.value, self.width) for t in (self.k, self.v))
        self.launch(
            _backward, BOTH.value, self.k_longest, self.q_longest * (self.heads // self.groups),
            *of_queries, *of_keys, _tiles(_rows(sums), block_m, self.width), self.positions, *self.ends, lse, delta,
            d_k, d_v, self.scale, BLOCK_M=block_m, STAGES=4, SUM_STAGES=2, CHUNK=CHUNK,
            CONSUMER_REGISTERS=208, ADDER_REGISTERS=72, PRODUCER_REGISTERS=24, maxnreg=128,
        )  # fmt: skip
        return torch.mul(sums, self.scale, out=d_q), d_k, d_v


def attention(q, k, v, k_fresh, v_fresh, *rest):
    return _Call(q, k, v, *rest).forward()


def attention_backward(d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse, *rest):
    return *_Call(q, k, v, *rest).backward(d_out, d_lse, out, lse), lse.new_empty(0), lse.new_empty(0)


def attention_varlen(
    q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale
):
    call = _Call(q, k, v, q_positions, cu_seqlens_q, cu_seqlens_k, scale, (max_seqlen_q, max_seqlen_k))
    return cleared(cu_seqlens_q, *call.forward())


def attention_varlen_backward(
    d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale,
):  # fmt: skip
    call = _Call(q, k, v, q_positions, cu_seqlens_q, cu_seqlens_k, scale, (max_seqlen_q, max_seqlen_k))
    gradients = call.backward(d_out, d_lse, out, lse)
    return *cleared_gradients(cu_seqlens_q, cu_seqlens_k, *gradients), lse.new_empty(0), lse.new_empty(0)
