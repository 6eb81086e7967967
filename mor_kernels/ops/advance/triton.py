"""A single program goes through all lanes, in their order, since pages are taken in that order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pages.triton import give
from ._fields import FIELDS, NOTHING

LANES = 512  # looked at together, at the most
NONE = tl.constexpr(NOTHING)
ROWS = tl.constexpr(len(FIELDS))


@triton.jit
def _take(owned, page_table, free_pages, free, max_pages, row, mask, length, held, PAGE_SIZE: tl.constexpr):
    """Flat slots of one token more in each row of so many, -1 where there is no place, and the pages left."""
    nth_page = length // PAGE_SIZE
    inside = mask & (nth_page < max_pages)
    needs = inside & (nth_page >= held)
    before = tl.cumsum(needs.to(tl.int32), 0) - needs.to(tl.int32)
    granted = needs & (before < free)
    entry = page_table + row * max_pages + nth_page
    number = tl.load(free_pages + free - 1 - before, mask=granted, other=0)
    there = inside & (nth_page < held)
    page = tl.where(granted, number, tl.load(entry, mask=there, other=0)).to(tl.int64)
    tl.store(entry, number, mask=granted)
    tl.store(owned + row, held + 1, mask=granted)
    slot = tl.where(granted | there, page * PAGE_SIZE + length % PAGE_SIZE, -1)
    return slot, free - tl.sum(granted.to(tl.int64))


@triton.jit
def _ends(chosen, goes_on, table, slots, lane, mask, STOPS: tl.constexpr):
    """Whether tokens of lanes leave, and whether their requests end with what came out."""
    column = table + lane
    token = tl.load(chosen + lane, mask=mask, other=0)
    stop = (token < 0) | (
        tl.load(column + 6 * slots, mask=mask, other=0) + 2 >= tl.load(column + 7 * slots, mask=mask, other=0)
    )
    for i in tl.static_range(STOPS):
        stop = stop | (token == tl.load(column + (ROWS + i) * slots, mask=mask, other=-1))
    on = tl.load(goes_on + lane, mask=mask, other=0) != 0
    leaves = (tl.load(column, mask=mask, other=-1) >= 0) & (on == 0)
    return leaves, leaves & stop


@triton.jit(do_not_specialize=["n", "slots", "recursions", "rows_each", "max_pages", "ends_max_pages"])
def _advance(
    chosen, goes_on, table, k_lens, record, ids, enters_out, rows_out, slots_out,
    lengths, owned, page_table, free_pages, free_count,
    ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free_count,
    n, slots, recursions, rows_each, max_pages, ends_max_pages,
    SHARED: tl.constexpr, STOPS: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, PAGES: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """No load waits for a store: what a lane has just counted is added to what is loaded."""
    free = tl.load(free_count)
    ends_free = tl.zeros((), tl.int64)
    if ends_lengths is not None:
        ends_free = tl.load(ends_free_count)
    if MANY:  # pages are given before any is taken, in one order however many lanes are looked at together
        for r in range(rows_each):
            for first in range(0, n, LANES):
                lane = (first + tl.arange(0, LANES)).to(tl.int64)
                _, ended = _ends(chosen, goes_on, table, slots, lane, lane < n, STOPS)
                row = lane * rows_each + r
                free = give(lengths, owned, page_table, free_pages, free, max_pages, row, ended, PAGES)
        if ends_lengths is not None:
            for first in range(0, n, LANES):
                lane = (first + tl.arange(0, LANES)).to(tl.int64)
                _, ended = _ends(chosen, goes_on, table, slots, lane, lane < n, STOPS)
                ends_free = give(
                    ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages, lane, ended,
                    PAGES,
                )  # fmt: skip
        tl.debug_barrier()
    for first in range(0, n, LANES):
        lane = (first + tl.arange(0, LANES)).to(tl.int64)
        mask = lane < n
        column = table + lane
        recursion = tl.load(column, mask=mask, other=-1)
        feed = tl.load(column + slots, mask=mask, other=-1)
        row = tl.load(column + 2 * slots, mask=mask, other=-1)
        had_slot = tl.load(column + 3 * slots, mask=mask, other=-1) >= 0
        place = tl.load(column + 5 * slots, mask=mask, other=-1)
        position = tl.load(column + 6 * slots, mask=mask, other=0)
        token = tl.load(chosen + lane, mask=mask, other=0)
        leaves, ended = _ends(chosen, goes_on, table, slots, lane, mask, STOPS)
        passed = recursion >= 0
        fed = feed >= 0
        going = leaves & (ended == 0)
        enters = going | fed
        active = enters | (passed & (leaves == 0))
        counted = passed & had_slot & (ended == 0)
        counted_end = going & (place >= 0)
        following = tl.where(enters, 0, tl.where(active, recursion + 1, -1))
        if MANY == 0:
            if tl.max(ended.to(tl.int32)) > 0:
                for r in range(rows_each):
                    row_of = lane * rows_each + r
                    free = give(lengths, owned, page_table, free_pages, free, max_pages, row_of, ended, PAGES)
                if ends_lengths is not None:
                    ends_free = give(
                        ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages, lane,
                        ended, PAGES,
                    )  # fmt: skip
                tl.debug_barrier()  # what was given is there to be taken
        if SHARED:
            read = lane
            appends = following == 0
        else:
            read = lane * recursions + following
            appends = active
        held = tl.load(owned + read, mask=appends, other=0)
        length = tl.load(lengths + read, mask=active, other=0)
        counts = tl.load(lengths + row, mask=counted, other=0)
        if ends_lengths is not None:
            end_held = tl.load(ends_owned + lane, mask=enters, other=0)
            end_length = tl.load(ends_lengths + lane, mask=mask, other=0) + counted_end.to(tl.int64)

        tl.debug_barrier()  # other threads may hold the same lanes: they have read before these are written
        tl.store(record + 3 * lane, tl.where(leaves, token, NONE), mask=mask)
        tl.store(record + 3 * lane + 1, tl.where(passed, recursion + 1, 0), mask=mask)
        tl.store(record + 3 * lane + 2, ended.to(tl.int64), mask=mask)
        tl.store(ids + lane, tl.where(fed, feed, tl.maximum(token, 0)), mask=mask)
        tl.store(enters_out + lane, enters, mask=mask)
        position += going.to(tl.int64)
        line = tl.where(active, lane, -1)
        tl.store(column, following, mask=mask)
        tl.store(column + slots, tl.full((LANES,), -1, tl.int64), mask=mask)
        tl.store(column + 4 * slots, line, mask=mask)
        tl.store(column + 6 * slots, position, mask=mask)
        tl.store(rows_out + lane, tl.where(enters, line, -1), mask=mask)
        tl.store(lengths + row, counts + 1, mask=counted)
        entering_slot = tl.full((LANES,), -1, tl.int64)
        if ends_lengths is not None:
            tl.store(ends_lengths + lane, end_length, mask=counted_end)
            entering_slot, ends_free = _take(
                ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages, lane, enters,
                end_length, end_held, PAGE_SIZE,
            )  # fmt: skip
            place = tl.where(enters, entering_slot, tl.where(active, place, -1))
            tl.store(column + 5 * slots, place, mask=mask)
            tl.store(k_lens + slots + lane, tl.where(active, position + 1, 0).to(tl.int32), mask=mask)
        tl.store(slots_out + lane, entering_slot, mask=mask)
        length += (counted & (row == read)).to(tl.int64)
        slot, free = _take(owned, page_table, free_pages, free, max_pages, read, appends, length, held, PAGE_SIZE)
        tl.store(column + 2 * slots, tl.where(appends, read, -1), mask=mask)
        tl.store(column + 3 * slots, slot, mask=mask)
        tl.store(k_lens + lane, tl.where(active, length + (slot >= 0), 0).to(tl.int32), mask=mask)
    tl.store(free_count, free)
    if ends_lengths is not None:
        tl.store(ends_free_count, ends_free)


def advance(chosen, goes_on, table, k_lens, record, *rest):
    block, ends, (recursions, shared, page_size) = rest[:5], rest[5:10], rest[10:]
    n, slots = chosen.shape[0], table.shape[1]
    ids, rows, places = (torch.empty_like(chosen) for _ in range(3))
    enters = torch.empty_like(goes_on)
    if n:
        lanes, stops = min(max(triton.next_power_of_2(n), 64), LANES), table.shape[0] - len(FIELDS)
        _advance[(1,)](
            chosen.contiguous(), goes_on.contiguous(), table, k_lens, record, ids, enters, rows, places, *block, *ends,
            n, slots, recursions, 1 if shared else recursions, block[2].shape[1],
            0 if ends[0] is None else ends[2].shape[1],
            SHARED=shared, STOPS=stops, PAGE_SIZE=page_size, LANES=lanes, PAGES=8, MANY=n > lanes,
            num_warps=lanes // 32,
        )  # fmt: skip
    return ids, enters, rows, places


@triton.jit
def _enter(x, new, enters, logits, weight, stride_x, stride_new, temperature, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(enters + row) == 0:
        return
    d = tl.arange(0, BLOCK)
    state = tl.load(new + row * stride_new + d, mask=d < WIDTH, other=0)
    tl.store(x + row * stride_x + d, state, mask=d < WIDTH)
    if logits is not None:
        score = state.to(tl.float32) * tl.load(weight + d, mask=d < WIDTH, other=0).to(tl.float32)
        tl.store(logits + row, tl.sum(score) / temperature)


def enter(x, new, enters, logits, weight, temperature):
    n, width = x.shape
    new = new if new.stride(1) == 1 else new.contiguous()
    if n and width:
        _enter[(n,)](
            x, new, enters.contiguous(), logits, None if weight is None else weight.contiguous(), x.stride(0),
            new.stride(0), temperature, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
