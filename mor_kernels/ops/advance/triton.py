"""A single program goes through all lanes, in their order, since pages are taken in that order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._fields import FIELDS, NOTHING

LANES = 512  # looked at together
NONE = tl.constexpr(NOTHING)
ROWS = tl.constexpr(len(FIELDS))


@triton.jit
def _take(lengths, owned, page_table, free_pages, free, max_pages, page_size, row, mask):
    """Flat slots of one token more in each row, -1 where there is no place, the tokens there, and the pages left."""
    length = tl.load(lengths + row, mask=mask, other=0)
    held = tl.load(owned + row, mask=mask, other=0)
    nth_page = length // page_size
    inside = mask & (nth_page < max_pages)
    needs = inside & (nth_page >= held)
    before = tl.cumsum(needs.to(tl.int64), 0) - needs.to(tl.int64)
    granted = needs & (before < free)
    entry = page_table + row * max_pages + nth_page
    number = tl.load(free_pages + free - 1 - before, mask=granted, other=0)
    there = inside & (nth_page < held)
    page = tl.where(granted, number, tl.load(entry, mask=there, other=0)).to(tl.int64)
    tl.store(entry, number, mask=granted)
    tl.store(owned + row, held + 1, mask=granted)
    slot = tl.where(granted | there, page * page_size + length % page_size, -1)
    return slot, length, free - tl.sum(granted.to(tl.int64))


@triton.jit(do_not_specialize=["n", "slots", "stops", "recursions", "max_pages", "ends_max_pages", "page_size"])
def _advance(
    chosen, goes_on, table, k_lens, record, ids, enters_out, rows_out, slots_out,
    lengths, owned, page_table, free_pages, free_count,
    ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free_count,
    n, slots, stops, recursions, max_pages, ends_max_pages, page_size, SHARED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    free = tl.load(free_count)
    ends_free = tl.zeros((), tl.int64)
    if ends_lengths is not None:
        ends_free = tl.load(ends_free_count)
    for first in range(0, n, LANES):
        lane = first + tl.arange(0, LANES)
        mask = lane < n
        column = table + lane
        recursion = tl.load(column, mask=mask, other=-1)
        feed = tl.load(column + slots, mask=mask, other=-1)
        row = tl.load(column + 2 * slots, mask=mask, other=-1)
        position = tl.load(column + 6 * slots, mask=mask, other=0)
        end = tl.load(column + 7 * slots, mask=mask, other=0)
        token = tl.load(chosen + lane, mask=mask, other=0)
        on = tl.load(goes_on + lane, mask=mask, other=0) != 0
        passed = recursion >= 0
        leaves = passed & (on == 0)
        stop = (token < 0) | (position + 2 >= end)
        for i in range(0, stops):
            stop = stop | (token == tl.load(column + (ROWS + i) * slots, mask=mask, other=-1))
        ended = leaves & stop
        fed = feed >= 0
        going = leaves & (stop == 0)
        enters = going | fed
        active = enters | (passed & on)
        tl.store(record + 3 * lane, tl.where(leaves, token, NONE), mask=mask)
        tl.store(record + 3 * lane + 1, tl.where(passed, recursion + 1, 0), mask=mask)
        tl.store(record + 3 * lane + 2, ended.to(tl.int64), mask=mask)
        tl.store(ids + lane, tl.where(fed, feed, tl.maximum(token, 0)), mask=mask)
        tl.store(enters_out + lane, enters, mask=mask)

        counted = passed & (tl.load(column + 3 * slots, mask=mask, other=-1) >= 0)
        length = tl.load(lengths + row, mask=counted, other=0)
        tl.store(lengths + row, length + 1, mask=counted)
        position += going.to(tl.int64)
        recursion = tl.where(enters, 0, tl.where(active, recursion + 1, -1))
        line = tl.where(active, lane.to(tl.int64), -1)
        tl.store(column, recursion, mask=mask)
        tl.store(column + slots, tl.full((LANES,), -1, tl.int64), mask=mask)
        tl.store(column + 4 * slots, line, mask=mask)
        tl.store(column + 6 * slots, position, mask=mask)
        tl.store(rows_out + lane, tl.where(enters, line, -1), mask=mask)
        entering_slot = tl.full((LANES,), -1, tl.int64)
        if ends_lengths is not None:
            place = tl.load(column + 5 * slots, mask=mask, other=-1)
            length = tl.load(ends_lengths + lane, mask=leaves & (place >= 0), other=0)
            tl.store(ends_lengths + lane, length + 1, mask=leaves & (place >= 0))
            tl.debug_barrier()  # what was counted is there, whichever threads hold it
            entering_slot, length, ends_free = _take(
                ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages, page_size,
                lane.to(tl.int64), enters,
            )  # fmt: skip
            place = tl.where(enters, entering_slot, tl.where(active, place, -1))
            tl.store(column + 5 * slots, place, mask=mask)
            tl.store(k_lens + slots + lane, tl.where(active, position + 1, 0).to(tl.int32), mask=mask)
        else:
            tl.debug_barrier()
        tl.store(slots_out + lane, entering_slot, mask=mask)
        if SHARED:
            read = lane.to(tl.int64)
            appends = recursion == 0
        else:
            read = lane.to(tl.int64) * recursions + recursion
            appends = active
        slot, length, free = _take(lengths, owned, page_table, free_pages, free, max_pages, page_size, read, appends)
        if SHARED:
            length = tl.load(lengths + read, mask=active, other=0)
        tl.store(column + 2 * slots, tl.where(appends, read, -1), mask=mask)
        tl.store(column + 3 * slots, slot, mask=mask)
        seen = length + (slot >= 0).to(tl.int64)
        tl.store(k_lens + lane, tl.where(active, seen, 0).to(tl.int32), mask=mask)
    tl.store(free_count, free)
    if ends_lengths is not None:
        tl.store(ends_free_count, ends_free)


def advance(chosen, goes_on, table, k_lens, record, *rest):
    block, ends, (recursions, shared, page_size) = rest[:5], rest[5:10], rest[10:]
    n, slots = chosen.shape[0], table.shape[1]
    ids, rows, places = (torch.empty_like(chosen) for _ in range(3))
    enters = torch.empty_like(goes_on)
    if n:
        _advance[(1,)](
            chosen.contiguous(), goes_on.contiguous(), table, k_lens, record, ids, enters, rows, places, *block, *ends,
            n, slots, table.shape[0] - len(FIELDS), recursions, block[2].shape[1],
            0 if ends[0] is None else ends[2].shape[1], page_size, SHARED=shared, LANES=LANES, num_warps=8,
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
