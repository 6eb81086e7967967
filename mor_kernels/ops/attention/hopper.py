"""Attention of queries at given positions over all keys up to them, in Gluon for Hopper; the maths is triton.py's.

Tiles come to shared memory by TMA, and wgmma multiplies them, 64 rows a warp group.

Softmax subtracts a row's reference from its scores rather than their maximum: any number near it gives the same
quotients. It is the maximum of the first tile and moves only where scores exceed it by more than SLACK: then what came
before fades; elsewhere that multiplication is left out. For bf16, which holds numbers as large as fp32 does, the
forward of heads of 64 doesn't even look at the maxima of the tiles after the first: a program in which a sum came out
as BEYOND or more (or NaN) passes again, this time looking.

Forward, heads of 64: a program is one warp group, which holds 64 rows (query * GROUP + head of the group), passes over
keys and values and starts their copies itself. Four programs share a multiprocessor: one's softmax runs beside
another's products.

The other kernels' programs are several warp groups, each with work of its own: a producer starts copies, as many stages
ahead as a ring holds, for two consumers. A program stays on its multiprocessor and computes one item after the other,
until none is left: the producer takes the next when it has started all copies of the one before.

Forward, heads of 128: each consumer holds 64 rows of an item's 128. The product of probabilities and values of a tile
runs together with the scores of the next.

Backward: an item is 128 keys, held while the queries of each head of their group pass by, once: the five products

    s^T = k q^T,  d_p^T = v d_out^T,  d_v += p^T d_out,  d_k += d_s^T q,  d_q^T = k^T d_s

instead of the seven of two passes. Each consumer has 64 of the keys. It begins the scores of the next tile of queries
while it passes on d_s of this one, and multiplies d_out by values and by p while it computes: without that, the tensor
cores have nothing of its to do for half of the time. d_s goes through shared memory to whoever multiplies it by the
keys and adds d_q to sums in memory, in fp32, by TMA: for heads of 64 a third warp group, which leaves consumers room
for their keys in registers; for heads of 128, where d_k and d_v fill half of all registers, the consumers, a step
later, each for one half of the columns. In which order programs add is not determined, and so are the last bits of d_q;
sums take four bytes an element of q beside it. Which queries see an item's keys was found out before, while delta was
computed.

Keys and values that no row of a program sees, and queries past a sequence's end, may be NaN: they are overwritten by
zeros in shared memory before they are multiplied. Of the forward's rows past the end nothing is kept.

A wait for products stands behind a branch, such as a wait for copies has: ptxas would otherwise let all that precedes
the wait, which is to run beside the products, come after it.
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

from .._dispatch import properties
from .._layout import contiguous
from .._triton import LEAST, LOG2_E, quotient
from ._triton import CHUNK, Sizes, cleared, cleared_gradients, item_of, last_key_of, span_of, statistic_of

ROWS = gl.constexpr(64)  # of a consumer: what one wgmma multiplies
BOTH = gl.constexpr(128)  # rows of both consumers
FINISHED = 2048  # elements of a program: 16 a thread
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# what producers tell of an item, in this order: the forward's, and the backward's, of which _plan says what four are
ITEM, TILES = map(gl.constexpr, range(2))
SOME, SINCE, STEPS, MASKED, SEEN, QUERIES, ROW, HEAD, FIRST_KEY, KEYS, KEY_ROW = map(gl.constexpr, range(11))
SLACK = gl.constexpr(8.0)  # in powers of 2: fp16, too, holds probabilities up to 2**8
BEYOND = gl.constexpr(2.0**32)  # sums in fp32 and probabilities in bf16 could be far larger
# acc *= fade, left out if no row of the warp fades; for 32 elements of a thread, two of a row, two of another and so on
FADE = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $64, 0f3F800000; setp.neu.f32 q, $66, 0f3F800000; or.pred p, p, q; "
    "vote.sync.any.pred p, p, 0xffffffff; @!p bra same; "
    + "".join(f"mul.f32 ${i}, ${i}, ${64 + i}; " for i in range(32))
    + "same: }"
)
FADE_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of a warp group; its name until Triton 3.6
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name until Triton 3.7


@builtin
def add_to_global(descriptor, at, tile, _semantic=None):
    """memory[at:] += tile, by TMA; Triton names it ``tma.async_atomic_add`` from 3.8 on."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, tile.handle)


@gluon.jit
def _place(item, q_ends, k_ends, sizes, PACKED: gl.constexpr):
    """The key/value head and the tile of an item, and where its sequence's queries and keys begin and how many."""
    groups, pairs, tiles, section, q_rows, k_rows = sizes
    b, g, tile = item_of(item, groups, pairs, tiles, section)
    b = b.to(gl.int64)
    q_start, queries = span_of(b, q_ends, q_rows, PACKED)
    k_start, keys = span_of(b, k_ends, k_rows, PACKED)
    return g, tile, q_start, queries, k_start, keys


@gluon.jit
def _parity(i, STAGES: gl.constexpr):
    """Of the i-th use of a ring: how often its barrier completed before, modulo 2."""
    return (i // STAGES) & 1


@gluon.jit
def _clean(tile, first, count, SIZE: gl.constexpr, D: gl.constexpr, STEP: gl.constexpr = 16):
    """Zeros in the rows of a tile, which begins at row ``first``, from row ``count`` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for start in gl.static_range(0, SIZE, STEP):  # few at once: a producer has few registers
        if first + start + STEP > count:
            row = first + start + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
            some = tile.slice(start, STEP)
            rows = some.load(LAYOUT)
            some.store(gl.where((row < count)[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()
    barrier()


@gluon.jit
def _load_rows(q, first_row, q_start, queries, q_token, first_head, GROUP: gl.constexpr, D: gl.constexpr):
    """64 rows of queries; anything where there are none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = (q_start + row // GROUP) * q_token + (first_head + row % GROUP) * D
    inside = (row // GROUP < queries)[:, None]
    return gl.load(q + at[:, None] + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :], mask=inside)


@gluon.jit
def _mask(s, position, first):
    """Scores of keys from ``first`` on, -inf where a row's position is before the key."""
    key = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(key[None, :] <= position[:, None], s, -float("inf"))


@gluon.jit
def _sums(p):
    """Of each row, what each of the four threads that hold it sees; added up when all tiles are."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _maxima(s):
    """Of each row. A tree: few steps wait for one another."""
    x = s.reshape([s.shape[0], s.shape[1] // 16, 2, 4, 2])
    x = gl.max(gl.max(gl.max(gl.max(x, 4), 2), 1), 1)
    return gl.convert_layout(x, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def _probabilities(s, reference, scale_2, dtype: gl.constexpr):
    """Of a tile of scores: p before it is divided by its sum, as the product with values takes it, and its sums."""
    p = gl.exp2(s * scale_2 - reference[:, None])
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, s.type.layout, 2)), _sums(p)


@gluon.jit
def _softmax(s, reference, scale_2, dtype: gl.constexpr):
    """_probabilities(s), by how much what came before fades, and the new reference."""
    largest = _maxima(s) * scale_2
    new_reference = gl.where(largest > reference + SLACK, largest, reference)
    p, sums = _probabilities(s, new_reference, scale_2, dtype)
    return p, sums, gl.exp2(reference - new_reference), new_reference


@gluon.jit
def _scaled(x, factor):
    """The rows of x times their factors."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _faded(acc, fade):
    """_scaled(acc, fade), in which fade is mostly 1."""
    fade = gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None].broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(FADE, FADE_OPERANDS, [acc, fade], dtype=gl.float32, is_pure=True, pack=32)


@gluon.jit
def _store_rows(acc, total, reference, position, first_row, out, lse, sizes, GROUP: gl.constexpr, PACKED: gl.constexpr):
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
    at = statistic_of(q_start, q_rows, heads, PACKED) + (first_head + row % GROUP) * q_rows.to(gl.int64) + query
    gl.store(lse + at, gl.where(some, (reference + gl.log2(total)) / LOG2_E, -float("inf")), mask=written)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    at = ((q_start + row // GROUP) * heads + first_head + row % GROUP) * D
    written = row // GROUP < (queries if PACKED else q_rows)
    acc = _scaled(acc, 1.0 / total)
    acc = gl.where(gl.convert_layout(some, gl.SliceLayout(1, OUT))[:, None], acc, 0.0)
    acc = acc.to(out.dtype.element_ty)
    gl.store(out + at[:, None] + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :], acc, mask=written[:, None])


@gluon.jit
def _copy(tiles, at, ready, tile):
    mbarrier.expect(ready, tiles.block_type.nbytes)
    load(tiles, at, ready, tile)


@gluon.jit
def _copy_two(tiles_1, tiles_2, at_1, at_2, ready, tile_1, tile_2):
    """Both copies complete ``ready``."""
    mbarrier.expect(ready, tiles_1.block_type.nbytes + tiles_2.block_type.nbytes)
    load(tiles_1, at_1, ready, tile_1)
    load(tiles_2, at_2, ready, tile_2)


@gluon.jit
def _fill(i, since, n_tiles, of_keys, ring, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Begin to copy the keys of tile i and the values of the one before, which are needed together."""
    k_tiles, v_tiles, row, column = of_keys
    k_ring, v_ring, ready = ring
    slot = (since + i) % STAGES
    row += i * BLOCK_N
    if i < n_tiles:
        k_at, v_at = [row, column], [row - BLOCK_N, column]
        _copy_two(k_tiles, v_tiles, k_at, v_at, ready.index(slot), k_ring.index(slot), v_ring.index(slot))
    elif i == n_tiles:
        _copy(v_tiles, [row - BLOCK_N, column], ready.index(slot), v_ring.index(slot))


@gluon.jit
def _pass(
    since, n_tiles, seen, unmasked, q, of_keys, ring, position, scale_2,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LOOKING: gl.constexpr,
):  # fmt: skip
    """The sums over the keys, and the references. ``since`` tiles went through the ring before; it is being filled."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    k_ring, v_ring, ready = ring
    dtype: gl.constexpr = k_ring.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    reference = gl.full([ROWS], LEAST, gl.float32, gl.SliceLayout(1, S))
    mbarrier.wait(ready.index(since % STAGES), _parity(since, STAGES))
    s = warpgroup_mma(q, k_ring.index(since % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if unmasked <= 0:
        s = _mask(s, position, 0)
    p, total, fade, reference = _softmax(s, reference, scale_2, dtype)
    mbarrier.wait(ready.index((since + 1) % STAGES), _parity(since + 1, STAGES))
    for i in range(1, n_tiles):
        slot, after = (since + i) % STAGES, since + i + 1
        s = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_ring.index(slot), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        _fill(i - 1 + STAGES, since, n_tiles, of_keys, ring, BLOCK_N, STAGES)
        if i >= unmasked:
            s = _mask(s, position, i * BLOCK_N)
        if LOOKING:
            p, sums, fade, reference = _softmax(s, reference, scale_2, dtype)
            total = _scaled(total, fade) + sums
        else:
            p, sums = _probabilities(s, reference, scale_2, dtype)
            total += sums
        mbarrier.wait(ready.index(after % STAGES), _parity(after, STAGES))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if LOOKING:
            acc = _faded(acc, fade)
    v_tile = v_ring.index((since + n_tiles) % STAGES)
    if n_tiles * BLOCK_N > seen:
        _clean(v_tile, (n_tiles - 1) * BLOCK_N, seen, BLOCK_N, D, BLOCK_N)
    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,)), total, reference


@gluon.jit
def _last_keys(
    positions, first_row, q_start, queries, keys, GROUP: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr
):
    """The last keys that rows see, -1 for none, and which rows there are."""
    if positions is not None:
        positions += q_start
    query = (first_row + gl.arange(0, HEIGHT, LAYOUT)) // GROUP
    return gl.where(query < queries, last_key_of(positions, query, queries, keys), -1), query < queries


@gluon.jit
def _queries(
    q, q_token, positions, g, first_row, q_start, queries, keys,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, OF_ROW: gl.constexpr,
):  # fmt: skip
    """64 rows, and the last keys that they see; how many keys any row sees, how many tiles of keys need no mask."""
    IN_WARP: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # all rows in each warp: extremes without the others
    rows = _load_rows(q, first_row, q_start, queries, q_token, g * GROUP, GROUP, D)
    position, valid = _last_keys(positions, first_row, q_start, queries, keys, GROUP, ROWS, IN_WARP)
    seen = gl.max(position, 0) + 1
    unmasked = (gl.min(gl.where(valid, position, keys - 1), 0) + 1) // BLOCK_N
    position, valid = _last_keys(positions, first_row, q_start, queries, keys, GROUP, ROWS, OF_ROW)
    return rows, position, seen, unmasked


@gluon.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows"])
def _forward_narrow(
    k_tiles, v_tiles, q, positions, q_ends, k_ends, out, lse, scale, q_token,
    groups, pairs, tiles, section, q_rows, k_rows,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """out and lse of 64 rows. The last tiles see most keys and come first."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, S)
    LOOKING: gl.constexpr = k_tiles.dtype != gl.bfloat16
    sizes = (groups, pairs, tiles, section, q_rows, k_rows)
    g, tile, q_start, queries, k_start, keys = _place(gl.program_id(0), q_ends, k_ends, sizes, PACKED)
    first_row = (tiles - 1 - tile) * ROWS
    if PACKED:
        if first_row // GROUP >= queries:
            return
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_N, D], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, BLOCK_N, D], v_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    ring = (k_ring, v_ring, ready)
    key, column = k_start.to(gl.int32), g * D
    of_keys = (k_tiles, v_tiles, key, column)
    _copy(k_tiles, [key, column], ready.index(0), k_ring.index(0))  # needed nearly always: before that is known
    rows, position, seen, unmasked = _queries(
        q, q_token, positions, g, first_row, q_start, queries, keys, GROUP, D, BLOCK_N, OF_ROW
    )  # fmt: skip
    n_tiles = gl.cdiv(seen, BLOCK_N)
    for i in gl.static_range(1, STAGES - 1):
        _fill(i, 0, n_tiles, of_keys, ring, BLOCK_N, STAGES)
    through = k_ring.index(STAGES - 1)  # the last of the ring that is needed
    through.store(rows)
    barrier()
    q_tile = through.load(gl.DotOperandLayout(0, S, 2))
    fence_async_shared()
    barrier()
    _fill(STAGES - 1, 0, n_tiles, of_keys, ring, BLOCK_N, STAGES)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    reference = gl.full([ROWS], LEAST, gl.float32, OF_ROW)
    total = _sums(gl.zeros([ROWS, BLOCK_N], gl.float32, S))
    scale_2 = scale * LOG2_E
    if n_tiles > 0:
        acc, total, reference = _pass(
            0, n_tiles, seen, unmasked, q_tile, of_keys, ring, position, scale_2, D, BLOCK_N, STAGES, LOOKING
        )  # fmt: skip
        if not LOOKING:
            fine = (gl.convert_layout(gl.sum(total, 1), OF_ROW) < BEYOND) | (position < 0)
            if gl.min(fine.to(gl.int32), 0) == 0:
                since = n_tiles + 1
                _copy(k_tiles, [key, column], ready.index(since % STAGES), k_ring.index(since % STAGES))
                for i in gl.static_range(1, STAGES):
                    _fill(i, since, n_tiles, of_keys, ring, BLOCK_N, STAGES)
                acc, total, reference = _pass(
                    since, n_tiles, seen, unmasked, q_tile, of_keys, ring, position, scale_2, D, BLOCK_N, STAGES, True
                )  # fmt: skip
    else:
        mbarrier.wait(ready.index(0), 0)  # a copy mustn't outlive its program
    sizes = (q_start, queries, q_rows, groups * GROUP, g * GROUP)
    _store_rows(acc, total, reference, position, first_row, out, lse, sizes, GROUP, PACKED)


@gluon.jit
def _tell(tile, numbers):
    """What a producer tells of an item; it must have been read of the one before."""
    for i in gl.static_range(len(numbers)):
        tile.slice(i, 1).store(gl.full([1], numbers[i], gl.int32, ONE))
    barrier()


@gluon.jit
def _told(tile, which: gl.constexpr):
    """One of the numbers that the producer told about an item."""
    return gl.sum(tile.slice(which, 1).load(ONE), 0)


@gluon.jit
def _rows_of(item, q_ends, k_ends, sizes, PACKED: gl.constexpr):
    """Of an item of 128 rows, or none past the last: its key/value head, first row, its sequence's queries and keys."""
    groups, pairs, tiles, section, q_rows, k_rows = sizes
    last = pairs * tiles - 1
    g, tile, q_start, queries, k_start, keys = _place(gl.minimum(item, last), q_ends, k_ends, sizes, PACKED)
    return g, (tiles - 1 - tile) * BOTH, q_start, gl.where(item > last, 0, queries), k_start, keys


@gluon.jit
def _forward_producer(
    k_tiles, v_tiles, rings, of_items, came, taken, positions, q_ends, k_ends, sizes,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Tells the consumers of an item and how many tiles its rows see, brings these, and takes the next."""
    IN_WARP: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    item_ring, item_ready, item_free = of_items
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    groups, pairs, tiles, section, q_rows, k_rows = sizes
    item, turn, step, cleaned = gl.program_id(0), pairs * 0, pairs * 0, pairs * 0
    while item < pairs * tiles:
        g, first_row, q_start, queries, k_start, keys = _rows_of(item, q_ends, k_ends, sizes, PACKED)
        position, valid = _last_keys(positions, first_row, q_start, queries, keys, GROUP, BOTH, IN_WARP)
        seen = gl.max(position, 0) + 1
        n_tiles = gl.cdiv(seen, BLOCK_N)
        mbarrier.wait(item_free.index(turn % 2), _parity(turn, 2) ^ 1)
        _tell(item_ring.index(turn % 2), (item, n_tiles))
        mbarrier.arrive(item_ready.index(turn % 2), count=1)
        turn += 1
        row, column = k_start.to(gl.int32), g * D
        for i in range(n_tiles):
            stage, used = step % STAGES, _parity(step, STAGES) ^ 1
            mbarrier.wait(k_free.index(stage), used)
            _copy(k_tiles, [row + i * BLOCK_N, column], k_ready.index(stage), k_ring.index(stage))
            mbarrier.wait(v_free.index(stage), used)
            if (i + 1) * BLOCK_N > seen:  # nobody sees the last rows, which may be NaN
                _copy(v_tiles, [row + i * BLOCK_N, column], came, v_ring.index(stage))
                mbarrier.wait(came, cleaned & 1)
                _clean(v_ring.index(stage), i * BLOCK_N, seen, BLOCK_N, D)
                mbarrier.arrive(v_ready.index(stage), count=1)
                cleaned += 1
            else:
                _copy(v_tiles, [row + i * BLOCK_N, column], v_ready.index(stage), v_ring.index(stage))
            step += 1
        if taken is None:
            item = pairs * tiles
        else:
            item = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
    if taken is not None:  # tells that none is left
        mbarrier.wait(item_free.index(turn % 2), _parity(turn, 2) ^ 1)
        _tell(item_ring.index(turn % 2), (item,))
        mbarrier.arrive(item_ready.index(turn % 2), count=1)


@gluon.jit
def _forward_consumer(
    q_tile, rings, of_items, taken, q, positions, q_ends, k_ends, out, lse, scale, q_token, sizes,
    WHICH: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    groups, pairs, tiles, section, q_rows, k_rows = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q.dtype.element_ty
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    scale_2 = scale * LOG2_E
    item_ring, item_ready, item_free = of_items
    item, turn, since = gl.program_id(0), pairs * 0, pairs * 0
    g, first_row, q_start, queries, k_start, keys = _rows_of(item, q_ends, k_ends, sizes, PACKED)
    first_row += WHICH * ROWS
    rows, position, seen, unmasked = _queries(
        q, q_token, positions, g, first_row, q_start, queries, keys, GROUP, D, BLOCK_N, OF_ROW
    )  # fmt: skip
    q_tile.store(rows)
    fence_async_shared()
    barrier()
    while item < pairs * tiles:
        acc = gl.zeros([ROWS, D], gl.float32, OUT)
        reference = gl.full([ROWS], LEAST, gl.float32, OF_ROW)
        total = _sums(zeros)
        own = gl.cdiv(seen, BLOCK_N)
        end = since + own
        if own > 0:
            stage = since % STAGES
            mbarrier.wait(k_ready.index(stage), _parity(since, STAGES))
            s = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_free.index(stage), count=1)
            if unmasked <= 0:
                s = _mask(s, position, 0)
            p, total, fade, reference = _softmax(s, reference, scale_2, dtype)
            mbarrier.wait(k_ready.index((since + 1) % STAGES), _parity(since + 1, STAGES), pred=own > 1)
            for i in range(since + 1, end):
                stage, before = i % STAGES, (i - 1) % STAGES
                s = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(before), _parity(i - 1, STAGES))
                acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(k_free.index(stage), count=1)
                if i - since >= unmasked:
                    s = _mask(s, position, (i - since) * BLOCK_N)
                p, sums, fade, reference = _softmax(s, reference, scale_2, dtype)
                total = _scaled(total, fade) + sums
                mbarrier.wait(k_ready.index((i + 1) % STAGES), _parity(i + 1, STAGES), pred=i + 1 < end)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_free.index(before), count=1)
                acc = _faded(acc, fade)
            before = (end - 1) % STAGES
            mbarrier.wait(v_ready.index(before), _parity(end - 1, STAGES))
            acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_free.index(before), count=1)
        mbarrier.wait(item_ready.index(turn % 2), _parity(turn, 2))
        since += _told(item_ring.index(turn % 2), TILES)
        mbarrier.arrive(item_free.index(turn % 2), count=1)
        for i in range(end, since):  # what only the other consumer's rows see
            stage = i % STAGES
            mbarrier.wait(k_ready.index(stage), _parity(i, STAGES))
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.wait(v_ready.index(stage), _parity(i, STAGES))
            mbarrier.arrive(v_free.index(stage), count=1)
        of_rows = (q_start, queries, q_rows, groups * GROUP, g * GROUP)
        own_position, own_first = position, first_row
        if taken is None:
            item = pairs * tiles
        else:
            # not before all tiles are free: until then the producer doesn't come to the next item
            turn += 1
            mbarrier.wait(item_ready.index(turn % 2), _parity(turn, 2))
            item = _told(item_ring.index(turn % 2), ITEM)
            g, first_row, q_start, queries, k_start, keys = _rows_of(item, q_ends, k_ends, sizes, PACKED)
            first_row += WHICH * ROWS
            rows, position, seen, unmasked = _queries(
                q, q_token, positions, g, first_row, q_start, queries, keys, GROUP, D, BLOCK_N, OF_ROW
            )  # fmt: skip
        _store_rows(acc, total, reference, own_position, own_first, out, lse, of_rows, GROUP, PACKED)
        if taken is not None:
            q_tile.store(rows)
            fence_async_shared()
            barrier()


@gluon.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows"])
def _forward_wide(
    k_tiles, v_tiles, q, positions, q_ends, k_ends, out, lse, scale, q_token, taken,
    groups, pairs, tiles, section, q_rows, k_rows,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse of items of 128 rows. The last rows see most keys and come first."""
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_tiles.dtype)
    q_tile = gl.allocate_shared_memory(k_tiles.dtype, [2, ROWS, D], TILE)
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_N, D], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, BLOCK_N, D], v_tiles.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_ring = gl.allocate_shared_memory(gl.int32, [2, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(came, count=1)
    for side in gl.static_range(2):
        mbarrier.init(item_ready.index(side), count=1)
        mbarrier.init(item_free.index(side), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    rings = (k_ring, v_ring, k_ready, v_ready, k_free, v_free)
    of_items = (item_ring, item_ready, item_free)
    sizes = (groups, pairs, tiles, section, q_rows, k_rows)
    gl.warp_specialize([
        (_forward_consumer, (
            q_tile.index(0), rings, of_items, taken, q, positions, q_ends, k_ends, out, lse, scale, q_token, sizes,
            0, GROUP, D, BLOCK_N, STAGES, PACKED,
        )),
        (_forward_consumer, (
            q_tile.index(1), rings, of_items, taken, q, positions, q_ends, k_ends, out, lse, scale, q_token, sizes,
            1, GROUP, D, BLOCK_N, STAGES, PACKED,
        )),
        (_forward_producer, (
            k_tiles, v_tiles, rings, of_items, came, taken, positions, q_ends, k_ends, sizes,
            GROUP, D, BLOCK_N, STAGES, PACKED,
        )),
    ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@triton.jit
def _plan(
    plan, b, tile, positions, q_ends, k_ends, q_rows, k_rows,
    PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys: the first query of the first tile of queries that sees it, how many such tiles there are from
    it on, up to which query they are masked, and how many of the sequence's keys any query sees."""
    q_start, queries = span_of(b, q_ends, q_rows, PACKED)
    k_start, keys = span_of(b, k_ends, k_rows, PACKED)
    if positions is not None:
        positions += q_start
    first_key = tile * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    since, always, seen = queries, 0, 0
    for start in tl.range(0, queries, CHUNK):
        query = start + tl.arange(0, CHUNK)
        inside = query < queries
        last = tl.where(inside, last_key_of(positions, query, queries, keys), -1)
        since = tl.minimum(since, tl.min(tl.where(last >= first_key, query, queries)))
        always = tl.maximum(always, tl.max(tl.where((last < last_key) & inside, query + 1, 0)))
        seen = tl.maximum(seen, tl.max(last) + 1)
    first = since // BLOCK_M * BLOCK_M  # so that only a tile at the sequence's end may be cut
    tl.store(plan, first)
    tl.store(plan + 1, tl.where(since == queries, 0, tl.cdiv(queries - first, BLOCK_M)))
    tl.store(plan + 2, tl.where(first_key + BLOCK_N > seen, queries, always))  # keys that nobody sees never count
    tl.store(plan + 3, seen)


@triton.jit(do_not_specialize=["rows", "heads", "tiles", "q_rows", "k_rows"])
def _prepare(
    d_out, out, d_lse, delta, sums, taken, plan, positions, q_ends, k_ends, rows, heads, tiles, q_rows, k_rows,
    D: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The plan of the backward, how many items are taken: none; delta of (query, head) rows and zeros in their sums."""
    program = tl.program_id(0).to(tl.int64)
    if program == 0:
        tl.store(taken, 0)
    row = program * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if program * BLOCK >= rows:
        program -= tl.cdiv(rows, BLOCK)
        b, tile = program // tiles, (program % tiles).to(tl.int32)
        plan += program * 4
        _plan(plan, b, tile, positions, q_ends, k_ends, q_rows, k_rows, PACKED, BLOCK_M, BLOCK_N, CHUNK)
    else:
        at = row[:, None] * D + tl.arange(0, D)[None, :]
        d_out_tile = tl.load(d_out + at, mask=inside[:, None], other=0.0).to(tl.float32)
        out_tile = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
        query = quotient(row, heads, rows)
        head, sequence = row - query * heads, 0
        if not PACKED:
            sequence = quotient(query, q_rows, rows)
            query -= sequence * q_rows
        statistic = (sequence * heads + head) * q_rows + query
        value = tl.sum(d_out_tile * out_tile, 1)
        if d_lse is not None:
            value -= tl.load(d_lse + statistic, mask=inside, other=0.0)
        tl.store(delta + statistic, value, mask=inside)
        tl.store(sums + at, tl.zeros((BLOCK, D), tl.float32), mask=inside[:, None])


@triton.jit
def _finish(sums, d_q, scale, n, BLOCK: tl.constexpr):
    """d_q = scale * sums, rounded; Triton is to know that n is a multiple of 16, so that it loads 16 bytes at once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(d_q + at, (tl.load(sums + at, mask=at < n) * scale).to(d_q.dtype.element_ty), mask=at < n)


@gluon.jit
def _bring(
    tiles_1, tiles_2, row, column, tile_1, tile_2, ready, came, cleaned, first, count,
    SIZE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy a tile of each; ``ready`` completes when they are there. Rows from ``count`` on may hold NaN: the copies
    then complete ``came`` instead, and ``ready`` follows when they are cleaned. Returns how often that was, in all."""
    if first + SIZE > count:
        _copy_two(tiles_1, tiles_2, [row, column], [row, column], came, tile_1, tile_2)
        mbarrier.wait(came, cleaned & 1)
        _clean(tile_1, first, count, SIZE, D)
        _clean(tile_2, first, count, SIZE, D)
        mbarrier.arrive(ready, count=1)
        cleaned += 1
    else:
        _copy_two(tiles_1, tiles_2, [row, column], [row, column], ready, tile_1, tile_2)
    return cleaned


@gluon.jit
def _take(taken, plan, groups, pairs, tiles, section):
    """The next item, and what is planned of it."""
    item = gl.atomic_add(taken, 1, sem="relaxed")
    since, steps, masked, seen = pairs * 0, pairs * 0, pairs * 0, pairs * 0
    if item < pairs * tiles:
        b, g, tile = item_of(item, groups, pairs, tiles, section)
        plan += (b.to(gl.int64) * tiles + tile) * 4
        since, steps, masked, seen = gl.load(plan), gl.load(plan + 1), gl.load(plan + 2), gl.load(plan + 3)
    return item, since, steps, masked, seen


@gluon.jit
def _backward_producer(
    q_tiles, d_out_tiles, k_tiles, v_tiles, rings, of_keys, of_items, came, taken, plan, positions, q_ends, k_ends,
    lse, delta, sizes,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Takes an item, tells the others what they need to know of it, and brings its keys, values and queries."""
    q_ring, d_out_ring, lse_ring, delta_ring, position_ring, q_ready, q_free = rings
    k_ring, v_ring, k_ready, k_free = of_keys
    item_ring, item_ready, item_free = of_items
    groups, pairs, tiles, section, q_rows, k_rows = sizes
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    turn, step, cleaned = pairs * 0, pairs * 0, pairs * 0
    item, since, steps, masked, seen = _take(taken, plan, groups, pairs, tiles, section)
    while item < pairs * tiles:
        g, tile, q_start, queries, k_start, keys = _place(item, q_ends, k_ends, sizes, PACKED)
        first_key = tile * BOTH
        row, key_row = q_start.to(gl.int32), k_start.to(gl.int32)
        mbarrier.wait(item_free.index(turn % 2), _parity(turn, 2) ^ 1)
        written = keys if PACKED else k_rows
        _tell(
            item_ring.index(turn % 2), (1, since, steps, masked, seen, queries, row, g, first_key, written, key_row)
        )  # fmt: skip
        mbarrier.arrive(item_ready.index(turn % 2), count=1)
        side = turn % KEY_STAGES
        mbarrier.wait(k_free.index(side), _parity(turn, KEY_STAGES) ^ 1)
        column = g * D
        cleaned = _bring(
            k_tiles, v_tiles, key_row + first_key, column, k_ring.index(side), v_ring.index(side),
            k_ready.index(side), came, cleaned, first_key, seen, BOTH, D,
        )  # fmt: skip
        of_sequence = positions
        if positions is not None:
            of_sequence = positions + q_start
        column *= GROUP
        statistic = statistic_of(q_start, q_rows, groups * GROUP, PACKED) + g * GROUP * q_rows.to(gl.int64)
        first = since
        for _ in range(steps * GROUP):
            query = first + m
            inside = query < queries
            position = gl.where(inside, last_key_of(of_sequence, query, queries, keys), -1)
            lse_2 = gl.load(lse + statistic + query, mask=inside, other=0.0) * LOG2_E
            lse_2 = gl.where(position >= 0, lse_2, float("inf"))  # what sees nothing: p = exp2(s - inf) = 0
            sums = gl.load(delta + statistic + query, mask=inside, other=0.0)
            stage = step % STAGES
            mbarrier.wait(q_free.index(stage), _parity(step, STAGES) ^ 1)
            lse_ring.index(stage).store(lse_2)
            delta_ring.index(stage).store(sums)
            position_ring.index(stage).store(position)
            barrier()
            cleaned = _bring(
                q_tiles, d_out_tiles, row + first, column, q_ring.index(stage), d_out_ring.index(stage),
                q_ready.index(stage), came, cleaned, first, queries, BLOCK_M, D,
            )  # fmt: skip
            step += 1
            first += BLOCK_M
            if first >= queries:  # the next head
                first = since
                column += D
                statistic += q_rows
        turn += 1
        item, since, steps, masked, seen = _take(taken, plan, groups, pairs, tiles, section)
    mbarrier.wait(item_free.index(turn % 2), _parity(turn, 2) ^ 1)
    _tell(item_ring.index(turn % 2), (0,))
    mbarrier.arrive(item_ready.index(turn % 2), count=1)


@gluon.jit
def _add(d_q, first, queries, sum_tile, sum_tiles, row, column, PENDING: gl.constexpr):
    """sums[row + first:, column:] += d_q^T; of queries past the end, which are another sequence's, nothing."""
    m = first + gl.arange(0, d_q.shape[1], gl.SliceLayout(0, d_q.type.layout))
    if first + d_q.shape[1] > queries:
        d_q = gl.where((m < queries)[None, :], d_q, 0.0)
    tma.store_wait(PENDING)
    barrier()
    sum_tile.permute((1, 0)).store(d_q)
    fence_async_shared()
    barrier()
    add_to_global(sum_tiles, [row + first, column], sum_tile)


@gluon.jit
def _backward_consumer(
    rings, of_keys, of_items, of_d_s, sum_ring, sum_tiles, d_k, d_v, scale, groups,
    WHICH: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, ADDER: gl.constexpr,
):  # fmt: skip
    """d_k and d_v of 64 keys; without an adder also one half of d_q's columns."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, S)
    PART: gl.constexpr = D // 2
    dtype: gl.constexpr = d_k.dtype.element_ty
    q_ring, d_out_ring, lse_ring, delta_ring, position_ring, q_ready, q_free = rings
    k_ring, v_ring, k_ready, k_free = of_keys
    item_ring, item_ready, item_free = of_items
    d_s_ring, d_s_ready, d_s_free = of_d_s
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    scale_2 = scale * LOG2_E
    turn, step = groups * 0, groups * 0
    mbarrier.wait(item_ready.index(0), 0)
    while _told(item_ring.index(turn % 2), SOME) > 0:
        about = item_ring.index(turn % 2)
        since, steps, masked, seen = _told(about, SINCE), _told(about, STEPS), _told(about, MASKED), _told(about, SEEN)
        queries, row, g = _told(about, QUERIES), _told(about, ROW), _told(about, HEAD)
        first_key, keys, k_start = _told(about, FIRST_KEY) + WHICH * ROWS, _told(about, KEYS), _told(about, KEY_ROW)
        mbarrier.arrive(item_free.index(turn % 2), count=1)
        column = g * GROUP * D + WHICH * PART
        side = turn % KEY_STAGES
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        acc_k = gl.zeros([ROWS, D], gl.float32, OUT)
        acc_v = gl.zeros([ROWS, D], gl.float32, OUT)
        first, before, end = since, since, step + steps * GROUP
        mbarrier.wait(k_ready.index(side), _parity(turn, KEY_STAGES))
        if step < end:
            stage = step % STAGES
            k_tile = k_ring.index(side).slice(WHICH * ROWS, ROWS)
            v_tile = v_ring.index(side).slice(WHICH * ROWS, ROWS)
            if ADDER:  # registers are left: less to read from shared memory
                k_tile = k_tile.load(K_LAYOUT)
            mbarrier.wait(q_ready.index(stage), _parity(step, STAGES))
            s = warpgroup_mma(k_tile, q_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            for i in range(step, end):
                stage, after, now, last = i % STAGES, (i + 1) % STAGES, i % 2, gl.maximum(i - 1, step)
                if not ADDER:  # 0: nobody lives to see 2**30 steps; the compiler, not knowing, keeps no addresses
                    side = i >> 30
                    k_tile = k_ring.index(side).slice(WHICH * ROWS, ROWS)
                    v_tile = v_ring.index(side).slice(WHICH * ROWS, ROWS)
                d_out_t = d_out_ring.index(stage).permute((1, 0))
                d_p = warpgroup_mma(v_tile, d_out_t, zeros, use_acc=False, is_async=True)
                p = gl.exp2(s * scale_2 - lse_ring.index(stage).load(OF_QUERY)[None, :])
                if first < masked:
                    p = gl.where(key[:, None] <= position_ring.index(stage).load(OF_QUERY)[None, :], p, 0.0)
                acc_v = warpgroup_mma(gl.convert_layout(p.to(dtype), P), d_out_ring.index(stage), acc_v, is_async=True)
                d_p = warpgroup_mma_wait(1, deps=(d_p,))
                d_s = (p * (d_p - delta_ring.index(stage).load(OF_QUERY)[None, :])).to(dtype)
                mbarrier.wait(d_s_free.index(now), _parity(i, 2) ^ 1)
                d_s_ring.index(now).slice(WHICH * ROWS, ROWS).store(d_s)
                acc_k = warpgroup_mma(gl.convert_layout(d_s, P), q_ring.index(stage), acc_k, is_async=True)
                if ADDER:
                    if i + 1 < end:
                        mbarrier.wait(q_ready.index(after), _parity(i + 1, STAGES))
                    # after the last tile a product that nobody reads: without a branch the multiplications don't wait
                    q_t = q_ring.index(after).permute((1, 0))
                    s = warpgroup_mma(k_tile, q_t, zeros, use_acc=False, is_async=True)
                fence_async_shared()
                barrier()
                mbarrier.arrive(d_s_ready.index(now), count=1)
                if not ADDER:  # of the step before, whose other half is there by now; in the first nobody reads it
                    mbarrier.wait(d_s_ready.index(last % 2), _parity(last, 2))
                    k_t = k_ring.index(side).slice(WHICH * PART, PART, dim=1).permute((1, 0))
                    d_q = warpgroup_mma(k_t, d_s_ring.index(last % 2), zeros, use_acc=False, is_async=True)
                acc_v, acc_k = warpgroup_mma_wait(1, deps=(acc_v, acc_k))
                mbarrier.arrive(q_free.index(stage), count=1)
                if not ADDER:
                    if i + 1 < end:
                        mbarrier.wait(q_ready.index(after), _parity(i + 1, STAGES))
                    q_t = q_ring.index(after).permute((1, 0))
                    s = warpgroup_mma(k_tile, q_t, zeros, use_acc=False, is_async=True)
                    d_q = warpgroup_mma_wait(1, deps=(d_q,))
                    if i > step:
                        mbarrier.arrive(d_s_free.index(last % 2), count=1)
                        _add(d_q, before, queries, sum_ring.index(WHICH), sum_tiles, row, column, 0)
                        before += BLOCK_M
                        if before >= queries:
                            before = since
                            column += D
                first += BLOCK_M
                if first >= queries:
                    first = since
                s = warpgroup_mma_wait(0, deps=(s,))
            if not ADDER:
                last = end - 1
                mbarrier.wait(d_s_ready.index(last % 2), _parity(last, 2))
                k_t = k_ring.index(0).slice(WHICH * PART, PART, dim=1).permute((1, 0))
                d_q = warpgroup_mma(k_t, d_s_ring.index(last % 2), zeros, use_acc=False, is_async=True)
                d_q = warpgroup_mma_wait(0, deps=(d_q,))
                mbarrier.arrive(d_s_free.index(last % 2), count=1)
                mbarrier.arrive(k_free.index(0), count=1)
                _add(d_q, before, queries, sum_ring.index(WHICH), sum_tiles, row, column, 0)
        if ADDER or end == step:
            mbarrier.arrive(k_free.index(turn % KEY_STAGES), count=1)
        step = end
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        at = ((k_start.to(gl.int64) + key) * groups + g)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :]
        written = (key < keys)[:, None]
        if first_key + ROWS > seen:
            some = (key < seen)[:, None]
            acc_k, acc_v = gl.where(some, acc_k, 0.0), gl.where(some, acc_v, 0.0)
        gl.store(d_k + at, (acc_k * scale).to(dtype), mask=written)
        gl.store(d_v + at, acc_v.to(dtype), mask=written)
        turn += 1
        mbarrier.wait(item_ready.index(turn % 2), _parity(turn, 2))
    if not ADDER:
        tma.store_wait(0)


@gluon.jit
def _backward_adder(
    of_keys, of_items, of_d_s, sum_ring, sum_tiles, groups,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, KEY_STAGES: gl.constexpr,
):  # fmt: skip
    Q: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    k_ring, v_ring, k_ready, k_free = of_keys
    item_ring, item_ready, item_free = of_items
    d_s_ring, d_s_ready, d_s_free = of_d_s
    zeros = gl.zeros([D, BLOCK_M], gl.float32, Q)
    turn, step = groups * 0, groups * 0
    mbarrier.wait(item_ready.index(0), 0)
    while _told(item_ring.index(turn % 2), SOME) > 0:
        about = item_ring.index(turn % 2)
        since, steps, queries = _told(about, SINCE), _told(about, STEPS), _told(about, QUERIES)
        row, column = _told(about, ROW), _told(about, HEAD) * GROUP * D
        mbarrier.arrive(item_free.index(turn % 2), count=1)
        first = since
        side = turn % KEY_STAGES
        mbarrier.wait(k_ready.index(side), _parity(turn, KEY_STAGES))
        k_t = k_ring.index(side).permute((1, 0)).load(gl.DotOperandLayout(0, Q, 2))
        for _ in range(steps * GROUP):
            slot = step % 2
            mbarrier.wait(d_s_ready.index(slot), _parity(step, 2))
            d_q = warpgroup_mma(k_t, d_s_ring.index(slot), zeros, use_acc=False, is_async=True)
            d_q = warpgroup_mma_wait(0, deps=(d_q,))
            mbarrier.arrive(d_s_free.index(slot), count=1)
            _add(d_q, first, queries, sum_ring.index(slot), sum_tiles, row, column, 1)
            step += 1
            first += BLOCK_M
            if first >= queries:
                first = since
                column += D
        mbarrier.arrive(k_free.index(side), count=1)
        turn += 1
        mbarrier.wait(item_ready.index(turn % 2), _parity(turn, 2))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "pairs", "tiles", "section", "q_rows", "k_rows"])
def _backward(
    q_tiles, d_out_tiles, k_tiles, v_tiles, sum_tiles, taken, plan, positions, q_ends, k_ends, lse, delta, d_k, d_v,
    scale, groups, pairs, tiles, section, q_rows, k_rows,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    PACKED: gl.constexpr, ADDER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """d_k and d_v of tiles of keys, and their parts of d_q. The first keys are seen most and come first."""
    dtype: gl.constexpr = q_tiles.dtype
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    D_S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOTH, BLOCK_M], dtype)
    USERS: gl.constexpr = 3 if ADDER else 2  # of keys, besides the producer
    k_ring = gl.allocate_shared_memory(dtype, [KEY_STAGES, BOTH, D], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(dtype, [KEY_STAGES, BOTH, D], v_tiles.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_tiles.layout)
    d_out_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], d_out_tiles.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    position_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], PLAIN)
    d_s_ring = gl.allocate_shared_memory(dtype, [2, BOTH, BLOCK_M], D_S)
    sum_ring = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, sum_tiles.block_type.shape[1]], sum_tiles.layout)
    item_ring = gl.allocate_shared_memory(gl.int32, [2, 16], PLAIN)
    k_ready = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    item_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_s_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    d_s_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    came = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(came, count=1)
    for side in gl.static_range(KEY_STAGES):
        mbarrier.init(k_ready.index(side), count=1)
        mbarrier.init(k_free.index(side), count=USERS)
    for side in gl.static_range(2):
        mbarrier.init(item_ready.index(side), count=1)
        mbarrier.init(item_free.index(side), count=USERS)
        mbarrier.init(d_s_ready.index(side), count=2)
        mbarrier.init(d_s_free.index(side), count=1 if ADDER else 2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(q_free.index(stage), count=2)
    rings = (q_ring, d_out_ring, lse_ring, delta_ring, position_ring, q_ready, q_free)
    of_keys = (k_ring, v_ring, k_ready, k_free)
    of_items = (item_ring, item_ready, item_free)
    of_d_s = (d_s_ring, d_s_ready, d_s_free)
    sizes = (groups, pairs, tiles, section, q_rows, k_rows)
    if ADDER:  # two lists: one can't be put together, since a name may hold neither a function nor constants
        gl.warp_specialize([
            (_backward_consumer, (
                rings, of_keys, of_items, of_d_s, sum_ring, sum_tiles, d_k, d_v, scale, groups,
                0, GROUP, D, BLOCK_M, STAGES, KEY_STAGES, ADDER,
            )),
            (_backward_consumer, (
                rings, of_keys, of_items, of_d_s, sum_ring, sum_tiles, d_k, d_v, scale, groups,
                1, GROUP, D, BLOCK_M, STAGES, KEY_STAGES, ADDER,
            )),
            (_backward_adder, (
                of_keys, of_items, of_d_s, sum_ring, sum_tiles, groups, GROUP, D, BLOCK_M, KEY_STAGES,
            )),
            (_backward_producer, (
                q_tiles, d_out_tiles, k_tiles, v_tiles, rings, of_keys, of_items, came, taken, plan, positions,
                q_ends, k_ends, lse, delta, sizes, GROUP, D, BLOCK_M, STAGES, KEY_STAGES, PACKED,
            )),
        ], [4, 4, 4], [CONSUMER_REGISTERS, ADDER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_backward_consumer, (
                rings, of_keys, of_items, of_d_s, sum_ring, sum_tiles, d_k, d_v, scale, groups,
                0, GROUP, D, BLOCK_M, STAGES, KEY_STAGES, ADDER,
            )),
            (_backward_consumer, (
                rings, of_keys, of_items, of_d_s, sum_ring, sum_tiles, d_k, d_v, scale, groups,
                1, GROUP, D, BLOCK_M, STAGES, KEY_STAGES, ADDER,
            )),
            (_backward_producer, (
                q_tiles, d_out_tiles, k_tiles, v_tiles, rings, of_keys, of_items, came, taken, plan, positions,
                q_ends, k_ends, lse, delta, sizes, GROUP, D, BLOCK_M, STAGES, KEY_STAGES, PACKED,
            )),
        ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


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
        self.at_once = properties(q.device)[0] or 132  # programs, one a multiprocessor; without a GPU an H100's

    def launch(self, kernel, height, length, streamed, *arguments, programs=None, **constants):
        """An item is a tile of so many of ``length`` rows, or keys, of a sequence and key/value head; each has a
        program, or takes one of ``programs``."""
        tiles = triton.cdiv(length, height)
        if not self.pairs * tiles:
            return
        section = self.section(streamed, self.q.element_size())
        kernel[(min(programs or self.pairs * tiles, self.pairs * tiles),)](
            *arguments, self.groups, self.pairs, tiles, section, self.q_rows, self.k_rows,
            GROUP=self.heads // self.groups, D=self.width, PACKED=self.packed, num_warps=4, **constants,
        )  # fmt: skip

    def forward(self):
        out, lse = self.q.new_empty(self.shapes[0]), self.q.new_empty(self.lse_shape, dtype=torch.float32)
        if not (self.q.numel() and self.k.numel()):
            return out.zero_(), lse.fill_(-float("inf"))
        length = self.q_longest * (self.heads // self.groups)
        if self.width == 64:
            kernel, height, block_n, stages = _forward_narrow, ROWS.value, 64, 3
            taken, programs, registers = (), None, {"maxnreg": 128}  # four programs a multiprocessor
        else:
            kernel, height, block_n, stages = _forward_wide, BOTH.value, 128, 3
            programs, registers = self.at_once, {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 32, "maxnreg": 168}
            more = self.pairs * triton.cdiv(length, height) > programs  # than one item a program
            taken = (self.q.new_zeros(1, dtype=torch.int32) if more else None,)
        self.launch(
            kernel, height, length, self.k_longest,
            _tiles(self.k, block_n, self.width), _tiles(self.v, block_n, self.width), self.q, self.positions,
            *self.ends, out, lse, self.scale, self.q.stride(0), *taken, programs=programs,
            BLOCK_N=block_n, STAGES=stages, **registers,
        )  # fmt: skip
        return out, lse

    def backward(self, d_out, d_lse, out, lse):
        d_out, d_lse, out, lse = contiguous(d_out, d_lse, out, lse)
        d_q, (d_k, d_v) = self.q.new_empty(self.shapes[0]), (self.q.new_empty(self.shapes[1]) for _ in range(2))
        if not (self.q.numel() and self.k.numel()):
            return d_q.zero_(), d_k.zero_(), d_v.zero_()
        delta, sums = torch.empty_like(lse), torch.empty_like(d_q, dtype=torch.float32)
        tiles, block_m = triton.cdiv(self.k_longest, BOTH.value), 64
        taken, plan = (lse.new_empty(n, dtype=torch.int32) for n in (1, self.batch * tiles * 4))
        rows, block = sums.numel() // self.width, 32
        _prepare[(triton.cdiv(rows, block) + self.batch * tiles,)](
            d_out, out, d_lse, delta, sums, taken, plan, self.positions, *self.ends,
            rows, self.heads, tiles, self.q_rows, self.k_rows,
            D=self.width, PACKED=self.packed, BLOCK=block, BLOCK_M=block_m, BLOCK_N=BOTH.value, CHUNK=CHUNK,
            num_warps=4,
        )  # fmt: skip
        if self.width == 64:
            stages = {"STAGES": 4, "KEY_STAGES": 2}
            registers = {"CONSUMER_REGISTERS": 192, "ADDER_REGISTERS": 96, "PRODUCER_REGISTERS": 32, "maxnreg": 128}
        else:  # twice the width takes twice the registers for d_k and d_v, and shared memory
            stages = {"STAGES": 3, "KEY_STAGES": 1}
            registers = {"CONSUMER_REGISTERS": 240, "ADDER_REGISTERS": 0, "PRODUCER_REGISTERS": 32, "maxnreg": 168}
        of_queries = (_tiles(t, block_m, self.width) for t in (self.q, _rows(d_out)))
        of_keys = (_tiles(t, BOTH.value, self.width) for t in (self.k, self.v))
        self.launch(
            _backward, BOTH.value, self.k_longest, self.q_longest * (self.heads // self.groups),
            *of_queries, *of_keys, _tiles(_rows(sums), block_m, 64), taken, plan, self.positions, *self.ends,
            lse, delta, d_k, d_v, self.scale, programs=self.at_once, BLOCK_M=block_m, ADDER=self.width == 64,
            **stages, **registers,
        )  # fmt: skip
        n = sums.numel()
        _finish[(triton.cdiv(n, FINISHED),)](sums, d_q, self.scale, n, BLOCK=FINISHED, num_warps=4)
        return d_q, d_k, d_v


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
