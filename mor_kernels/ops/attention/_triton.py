"""What attention's kernels and the libraries behind it share: the sizes of a call and what a program has of them, rows
that belong to no sequence, and lists of blocks for FlashAttention-4."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128  # queries and keys of a block in the lists
CHUNK = 1024  # positions that are compared at once
SECTION_BYTES = 2**24  # of keys and values (or queries and gradients) that share the L2 cache


class Sizes:
    """Of one call; ``longest`` bounds the lengths where sequences are packed."""

    def __init__(self, q, k, q_ends, longest=None):
        self.packed = longest is not None
        self.heads, self.width = q.shape[-2:]
        self.groups = k.shape[-2]
        self.batch = q_ends.shape[0] - 1 if self.packed else q.shape[0]
        self.pairs = self.batch * self.groups
        self.q_rows, self.k_rows = (q.shape[0], k.shape[0]) if self.packed else (q.shape[1], k.shape[1])
        self.q_longest, self.k_longest = longest or (self.q_rows, self.k_rows)
        self.lse_shape = (self.heads, self.q_rows) if self.packed else (self.batch, self.heads, self.q_rows)

    def section(self, streamed, itemsize):
        """How many (sequence, head) pairs are computed at a time, by the rows that each of their tiles passes over."""
        return min(self.pairs, max(1, SECTION_BYTES // max(1, 2 * streamed * self.width * itemsize)))


@triton.jit
def item_of(item, groups, pairs, tiles, section):
    """The sequence, the key/value head and the tile of a program. A section of (sequence, head) pairs, whose keys and
    values fit into the L2 cache together, comes after another; within it a tile of every pair, then the next. In 32
    bits it is shorter; in 64 ``_backward_kv`` of triton.py takes fewer registers."""
    before = item // (section * tiles) * section
    size = tl.minimum(section, pairs - before)
    inside = item - before * tiles
    pair = before + inside % size
    return pair // groups, pair % groups, (inside // size).to(tl.int32)


@triton.jit
def span_of(b, ends, rows, PACKED: tl.constexpr):
    """The first row of sequence b in contiguous memory, and how many it has."""
    if PACKED:
        start = tl.load(ends + b).to(tl.int64)
        count = tl.load(ends + b + 1).to(tl.int64) - start
    else:
        start = b * rows
        count = rows.to(tl.int64)
        if ends is not None:
            count = tl.minimum(tl.maximum(tl.load(ends + b).to(tl.int64), 0), count)
    return start, count.to(tl.int32)


@triton.jit
def last_key_of(positions, query, queries, keys):
    """The last key that each query sees, -1 for none."""
    if positions is None:
        position = query
    else:
        position = tl.load(positions + query, mask=query < queries, other=-1).to(tl.int64)
    return tl.maximum(tl.minimum(position, keys - 1), -1).to(tl.int32)


@triton.jit
def statistic_of(q_start, q_rows, heads, PACKED: tl.constexpr):
    """Where a sequence begins in (B, heads, q_rows), or in (heads, total)."""
    return q_start if PACKED else q_start * heads


@triton.jit(do_not_specialize=["total", "columns"])
def _fill_tail(x, ends, value, total, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``value`` in the rows of a packed tensor past the last sequence."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends)
    if (tl.program_id(0).to(tl.int64) + 1) * ROWS <= end:
        return
    for first in tl.range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at = x + row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
        mask = ((row >= end) & (row < total))[:, None] & (column < columns)[None, :]
        tl.store(at, tl.full((ROWS, COLUMNS), value, tl.float32).to(x.dtype.element_ty), mask=mask)


def clear_tail(cu_seqlens, value, *packed):
    """``value`` in the rows (first axis) of the packed tensors that belong to no sequence."""
    for x in packed:
        x = x.flatten(1)
        total, columns = x.shape
        if total and columns:
            block = min(1024, triton.next_power_of_2(columns))
            rows = 4096 // block
            _fill_tail[(triton.cdiv(total, rows),)](
                x, cu_seqlens[-1:], value, total, columns, *x.stride(), ROWS=rows, COLUMNS=block, num_warps=4
            )


def cleared(cu_seqlens_q, out, lse):
    """Both, where no sequence is: zeros, and nothing seen."""
    clear_tail(cu_seqlens_q, 0.0, out)
    clear_tail(cu_seqlens_q, -float("inf"), lse.T)
    return out, lse


def cleared_gradients(cu_seqlens_q, cu_seqlens_k, d_q, d_k, d_v):
    clear_tail(cu_seqlens_q, 0.0, d_q)
    clear_tail(cu_seqlens_k, 0.0, d_k, d_v)
    return d_q, d_k, d_v


@triton.jit(do_not_specialize=["batch", "queries", "keys"])
def _block_lists(
    positions, counts, partial, full, batch, queries, keys,
    BY_KEYS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The lists of one block of queries (the blocks of keys that it sees in part, and whole), or BY_KEYS of one block
    of keys (the blocks of queries that see it in part, and whole); counts (2, B, blocks), lists (B, blocks, others).

    Keys before least + 1 of a block's positions are visible to all its queries, keys from largest + 1 on to none. A
    block of fewer queries or keys than BLOCK counts as seen in part: its end must be masked.
    """
    q_blocks, k_blocks = tl.cdiv(queries, BLOCK), tl.cdiv(keys, BLOCK)
    blocks = k_blocks if BY_KEYS else q_blocks
    at_count = tl.program_id(0).to(tl.int64)
    b, block = at_count // blocks, tl.program_id(0) % blocks
    positions += b * queries
    if BY_KEYS:
        partial += at_count * q_blocks
        full += at_count * q_blocks
        in_part, whole = 0, 0
        for first in tl.range(0, q_blocks, AT_ONCE):
            other = first + tl.arange(0, AT_ONCE)
            query = other[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            position = tl.load(positions + query, mask=query < queries, other=-1).to(tl.int32)
            largest = tl.max(position, 1)
            least = tl.min(position, 1)
            sees_all = (least >= (block + 1) * BLOCK - 1) & (other < q_blocks)
            sees_some = (largest >= block * BLOCK) & (other < q_blocks) & (sees_all == 0)
            tl.store(full + whole + tl.cumsum(sees_all.to(tl.int32), 0) - 1, other, mask=sees_all)
            tl.store(partial + in_part + tl.cumsum(sees_some.to(tl.int32), 0) - 1, other, mask=sees_some)
            whole += tl.sum(sees_all.to(tl.int32))
            in_part += tl.sum(sees_some.to(tl.int32))
    else:
        query = block * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(positions + query, mask=query < queries, other=-1).to(tl.int32)
        touched = tl.cdiv(tl.max(position) + 1, BLOCK)
        whole = (tl.min(position) + 1) // BLOCK
        in_part = touched - whole
        for first in tl.range(0, touched, AT_ONCE):
            other = first + tl.arange(0, AT_ONCE)
            tl.store(full + at_count * k_blocks + other, other, mask=other < whole)
            tl.store(partial + at_count * k_blocks + other, whole + other, mask=other < in_part)
    tl.store(counts + at_count, in_part)
    tl.store(counts + batch.to(tl.int64) * blocks + at_count, whole)


def block_lists(positions: torch.Tensor, keys: int, by_keys: bool) -> tuple[torch.Tensor, ...]:
    """Which blocks of 128 keys a block of 128 queries sees in part, and which whole; or ``by_keys`` which blocks of
    queries see a block of keys so. One launch, no synchronisation.

    Args:
        positions: (B, queries) integers below ``keys``, in any order; a query sees the keys up to its position.

    Returns:
        For (B, 1, blocks): how many in part, (…, others) which; how many whole, which. int32; ascending, and past the
        count unwritten.
    """
    batch, queries = positions.shape
    q_blocks, k_blocks = triton.cdiv(queries, BLOCK), triton.cdiv(keys, BLOCK)
    blocks, others = (k_blocks, q_blocks) if by_keys else (q_blocks, k_blocks)
    counts = positions.new_empty(2, batch, 1, blocks, dtype=torch.int32)
    partial, full = counts.new_empty(2, batch, 1, blocks, others)
    if counts.numel():
        _block_lists[(batch * blocks,)](
            positions.contiguous(), counts, partial, full, batch, queries, keys,
            BY_KEYS=by_keys, BLOCK=BLOCK, AT_ONCE=32 if by_keys else 128, num_warps=4,
        )  # fmt: skip
    return counts[0], partial, counts[1], full
