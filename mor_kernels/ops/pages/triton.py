"""The accounts in one launch each: a single program goes through all lanes, in their order.

What it does is little (a lane takes a page every page_size tokens), and a sum over lanes would have to be waited for by
other programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import last_at_most

LANES = 1024  # looked at together
PAGES = 32  # of a lane, moved together, of LANES_MOVING lanes
LANES_MOVING = 64


@triton.jit
def _needs(lengths, owned, rows, cu_seqlens, lane, lanes, page_size):
    """Of lanes: their rows, the pages held, and how many pages more the new tokens need."""
    inside = lane < lanes
    row = tl.load(rows + lane, mask=inside, other=-1)
    real = row >= 0
    count = tl.load(cu_seqlens + lane + 1, mask=inside, other=0) - tl.load(cu_seqlens + lane, mask=inside, other=0)
    held = tl.load(owned + row, mask=real, other=0)
    new = tl.load(lengths + row, mask=real, other=0) + count
    need = tl.maximum((new + page_size - 1) // page_size - held, 0)
    return row, held, tl.where(real, need, 0), tl.where(real, new, 0)


@triton.jit(do_not_specialize=["lanes", "total", "max_pages", "page_size"])
def _take(
    lengths, owned, page_table, free_pages, free_count, rows, cu_seqlens, slots, granted, k_lens, refused,
    lanes, total, max_pages, page_size, LANES: tl.constexpr, MOVING: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    free = tl.load(free_count)
    needed = tl.zeros((), tl.int64)
    outgrown = tl.zeros((), tl.int32)
    for first in range(0, lanes, LANES):
        lane = first + tl.arange(0, LANES)
        row, held, need, new = _needs(lengths, owned, rows, cu_seqlens, lane, lanes, page_size)
        needed += tl.sum(need)
        outgrown = tl.maximum(outgrown, tl.max((held + need > max_pages).to(tl.int32)))
    answer = tl.where(outgrown > 0, -1, tl.maximum(needed - free, 0))
    tl.store(refused, answer)
    good = answer == 0

    taken = tl.zeros((), tl.int64)
    for first in range(0, lanes, MOVING):
        lane = first + tl.arange(0, MOVING)
        row, held, need, new = _needs(lengths, owned, rows, cu_seqlens, lane, lanes, page_size)
        need = tl.where(good, need, 0)
        before = tl.cumsum(need, 0) - need + taken
        taken += tl.sum(need)
        most = tl.max(need)
        nth = tl.zeros((), tl.int64)
        while nth < most:
            page = nth + tl.arange(0, PAGES)[None, :]
            moves = page < need[:, None]
            number = tl.load(free_pages + free - 1 - before[:, None] - page, mask=moves, other=0)
            tl.store(page_table + row[:, None] * max_pages + held[:, None] + page, number, mask=moves)
            nth += PAGES
        tl.debug_barrier()  # other threads may hold the same lanes: they have read before these are written
        tl.store(owned + row, held + need, mask=need > 0)
        inside = lane < lanes
        tl.store(granted + lane, tl.where(good, row, -1), mask=inside)
        tl.store(k_lens + lane, tl.where(good, new, 0).to(tl.int32), mask=inside)
    tl.store(free_count, free - taken)
    tl.debug_barrier()  # the page table is complete

    tokens = tl.where(good, total, 0)
    for first in range(0, total, LANES):
        token = first + tl.arange(0, LANES)
        lane = last_at_most(cu_seqlens, token, lanes + 1)
        there = (token < tokens) & (lane < lanes)
        row = tl.load(rows + lane, mask=there, other=-1)
        there = there & (row >= 0)
        index = tl.load(lengths + row, mask=there, other=0) + token - tl.load(cu_seqlens + lane, mask=there, other=0)
        page = tl.load(page_table + row * max_pages + index // page_size, mask=there, other=0).to(tl.int64)
        tl.store(slots + token, tl.where(there, page * page_size + index % page_size, -1), mask=token < total)


@triton.jit(do_not_specialize=["lanes"])
def _commit(lengths, rows, cu_seqlens, lanes, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < lanes
    row = tl.load(rows + lane, mask=inside, other=-1)
    count = tl.load(cu_seqlens + lane + 1, mask=inside, other=0) - tl.load(cu_seqlens + lane, mask=inside, other=0)
    length = tl.load(lengths + row, mask=row >= 0, other=0)
    tl.store(lengths + row, length + count, mask=row >= 0)


@triton.jit
def give(lengths, owned, page_table, free_pages, free, max_pages, first_row, rows_each, mask, PAGES: tl.constexpr):
    """All pages of so many rows of each lane, lane after lane, whose lengths become 0; returns the pages left."""
    held = tl.zeros(first_row.shape, tl.int64)
    for r in range(rows_each):
        held += tl.load(owned + first_row + r, mask=mask, other=0)
    before = tl.cumsum(held, 0) - held + free
    for r in range(rows_each):
        before += _give_row(lengths, owned, page_table, free_pages, before, max_pages, first_row + r, mask, PAGES)
    return free + tl.sum(held)


@triton.jit
def _give_row(lengths, owned, page_table, free_pages, before, max_pages, row, mask, PAGES: tl.constexpr):
    """A row's pages become the free ones from number `before` on; returns how many there are."""
    held = tl.load(owned + row, mask=mask, other=0)
    most = tl.max(held)
    nth = tl.zeros((), tl.int64)
    while nth < most:
        page = nth + tl.arange(0, PAGES)[None, :]
        moves = page < held[:, None]
        entry = page_table + row[:, None] * max_pages + page
        tl.store(free_pages + before[:, None] + page, tl.load(entry, mask=moves, other=0), mask=moves)
        tl.store(entry, -1, mask=moves)
        nth += PAGES
    tl.debug_barrier()  # other threads may hold the same lanes: they have read before these are written
    tl.store(owned + row, 0, mask=mask)
    tl.store(lengths + row, 0, mask=mask)
    return held


@triton.jit(do_not_specialize=["lanes", "max_pages"])
def _free(
    lengths, owned, page_table, free_pages, free_count, rows, lanes, max_pages,
    MOVING: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    free = tl.load(free_count)
    for first in range(0, lanes, MOVING):
        lane = first + tl.arange(0, MOVING)
        row = tl.load(rows + lane, mask=lane < lanes, other=-1)
        free = give(lengths, owned, page_table, free_pages, free, max_pages, row, 1, row >= 0, PAGES)
    tl.store(free_count, free)


def take(lengths, owned, page_table, free_pages, free_count, rows, cu_seqlens, total, page_size):
    rows, cu_seqlens = rows.contiguous(), cu_seqlens.contiguous()
    slots, granted, refused = rows.new_empty(total), torch.empty_like(rows), rows.new_empty(())
    k_lens = rows.new_empty(rows.shape, dtype=torch.int32)
    _take[(1,)](
        lengths, owned, page_table, free_pages, free_count, rows, cu_seqlens, slots, granted, k_lens, refused,
        len(rows), total, page_table.shape[1], page_size, LANES=LANES, MOVING=LANES_MOVING, PAGES=PAGES, num_warps=8,
    )  # fmt: skip
    return slots, granted, k_lens, refused


def commit(lengths, rows, cu_seqlens):
    if len(rows):
        _commit[(triton.cdiv(len(rows), 128),)](
            lengths, rows.contiguous(), cu_seqlens.contiguous(), len(rows), LANES=128, num_warps=4
        )


def free(lengths, owned, page_table, free_pages, free_count, rows):
    if len(rows):
        _free[(1,)](
            lengths, owned, page_table, free_pages, free_count, rows.contiguous(), len(rows), page_table.shape[1],
            MOVING=LANES_MOVING, PAGES=PAGES, num_warps=8,
        )  # fmt: skip
