"""A single program goes through all lanes, in their order, since pages are taken in that order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from ..pages.triton import give
from ._fields import FIELDS, NOTHING

LANES = 512  # looked at together, at the most
NONE = tl.constexpr(NOTHING)
# rows of the table, as FIELDS has them
RECURSION, FEED, ROW, SLOT, LINE, PLACE, WAITS, POSITION, END = map(tl.constexpr, range(len(FIELDS)))
STOP = tl.constexpr(len(FIELDS))  # the first of the tokens that end a request


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
def _wants(goes_on, table, slots, lane, mask):
    """Which lanes are to pass the last and the first layer, and which of these have waited for it."""
    column = table + lane
    feed = tl.load(column + FEED * slots, mask=mask, other=-1)
    line = tl.load(column + LINE * slots, mask=mask, other=-1)
    waits = tl.load(column + WAITS * slots, mask=mask, other=-1)
    on = tl.load(goes_on + lane, mask=mask, other=0) != 0
    wants = ((line >= 0) & (on == 0)) | (feed >= 0)
    return wants & (waits < 0), wants & (waits >= 0)


@triton.jit(do_not_specialize=["n", "slots", "size"])
def _leave(
    goes_on, table, k_lens, x, columns, keys, rows, places,
    n, slots, size, stride,
    COLUMN: tl.constexpr, COLUMN_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """A program for each place; all find out which lane's it is, since no other program has to be waited for then."""
    place = tl.program_id(0)
    waiting = tl.zeros((), tl.int32)
    if MANY:
        for first in range(0, n, LANES):
            lane = first + tl.arange(0, LANES)
            _, waited = _wants(goes_on, table, slots, lane, lane < n)
            waiting += tl.sum(waited.to(tl.int32))
    before = tl.zeros((), tl.int32)
    waited_before = tl.zeros((), tl.int32)
    own = tl.zeros((), tl.int32)  # the lane, from 1
    for first in range(0, n, LANES):
        lane = first + tl.arange(0, LANES)
        came, waited = _wants(goes_on, table, slots, lane, lane < n)
        came, waited = came.to(tl.int32), waited.to(tl.int32)
        if MANY == 0:
            waiting = tl.sum(waited)
        rank = tl.where(waited > 0, waited_before + tl.cumsum(waited, 0), waiting + before + tl.cumsum(came, 0)) - 1
        at = tl.where((came + waited > 0) & (rank < size), rank, -1)
        own += tl.sum(tl.where(at == place, lane + 1, 0))
        before += tl.sum(came)
        waited_before += tl.sum(waited)
        if place == 0:
            tl.store(places + lane, at.to(tl.int64), mask=lane < n)
    there = own > 0
    lane = tl.maximum(own - 1, 0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    state = tl.load(x + lane * stride + d, mask=there & (d < WIDTH), other=0)
    tl.store(rows + place.to(tl.int64) * WIDTH + d, state, mask=d < WIDTH)
    field = tl.arange(0, COLUMN_BLOCK)
    number = tl.load(table + field * slots + lane, mask=there & (field < COLUMN), other=0)
    number = tl.where(there, number, tl.where(field < STOP, -1, 0))
    tl.store(columns + field * size + place, number, mask=field < COLUMN)
    tl.store(keys + place, tl.load(k_lens + slots + lane, mask=there, other=0))


def leave(goes_on, table, k_lens, x, size):
    n, (fields, slots), width = goes_on.shape[0], table.shape, x.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, keys = table.new_empty(fields, size), k_lens.new_empty(size)
    rows, places = x.new_empty(size, width), table.new_empty(n)
    if size:
        lanes = min(max(triton.next_power_of_2(n), 64), LANES)
        _leave[(size,)](
            goes_on.contiguous(), table, k_lens, x, columns, keys, rows, places, n, slots, size, x.stride(0),
            COLUMN=fields, COLUMN_BLOCK=triton.next_power_of_2(fields), WIDTH=width,
            BLOCK=triton.next_power_of_2(max(width, 1)), LANES=lanes, MANY=n > lanes, num_warps=4,
        )  # fmt: skip
    else:
        places.fill_(-1)
    return columns, keys, rows, places


@triton.jit
def _ends(chosen, goes_on, at, table, slots, lane, mask, STOPS: tl.constexpr):
    """Of lanes: their place among those at the ends, whether their tokens are through with the block, what was chosen
    next, and whether their requests end with it."""
    column = table + lane
    place = lane
    if at is not None:
        place = tl.load(at + lane, mask=mask, other=-1)
    there = mask & (place >= 0)
    token = tl.load(chosen + place, mask=there, other=0)
    stop = (token < 0) | (
        tl.load(column + POSITION * slots, mask=mask, other=0) + 2 >= tl.load(column + END * slots, mask=mask, other=0)
    )
    for i in tl.static_range(STOPS):
        stop = stop | (token == tl.load(column + (STOP + i) * slots, mask=mask, other=-1))
    on = tl.load(goes_on + lane, mask=mask, other=0) != 0
    through = (tl.load(column + LINE * slots, mask=mask, other=-1) >= 0) & (on == 0)
    return place, there, through, token, through & there & stop


@triton.jit
def _give_ended(
    lengths, owned, page_table, free_pages, free, max_pages,
    ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages,
    lane, rows_each, ended, PAGES: tl.constexpr,
):  # fmt: skip
    """The pages of requests that have ended, ready to be taken; returns how many are free in both pools."""
    if tl.max(ended.to(tl.int32)) > 0:
        row = lane * rows_each
        free = give(lengths, owned, page_table, free_pages, free, max_pages, row, rows_each, ended, PAGES)
        if ends_lengths is not None:
            ends_free = give(
                ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages, lane, 1, ended,
                PAGES,
            )  # fmt: skip
        tl.debug_barrier()
    return free, ends_free


@triton.jit(do_not_specialize=["n", "size", "slots", "turns", "recursions", "rows_each", "max_pages", "ends_max_pages"])
def _advance(
    chosen, goes_on, at, table, k_lens, ticks, record, ids, positions_out, lanes_out, slots_out, k_lens_out,
    lengths, owned, page_table, free_pages, free_count,
    ends_lengths, ends_owned, ends_page_table, ends_free_pages, ends_free_count,
    n, size, slots, turns, turn_stride, recursions, rows_each, max_pages, ends_max_pages,
    SHARED: tl.constexpr, STOPS: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, PAGES: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """No load waits for a store: what a lane has just counted is added to what is loaded."""
    free = tl.load(free_count)
    tick = tl.load(ticks)
    record += tick % turns * turn_stride
    ends_free = tl.zeros((), tl.int64)
    if ends_lengths is not None:
        ends_free = tl.load(ends_free_count)
    if MANY:  # pages are given before any is taken
        for first in range(0, n, LANES):
            lane = (first + tl.arange(0, LANES)).to(tl.int64)
            _, _, _, _, ended = _ends(chosen, goes_on, at, table, slots, lane, lane < n, STOPS)
            free, ends_free = _give_ended(
                lengths, owned, page_table, free_pages, free, max_pages, ends_lengths, ends_owned, ends_page_table,
                ends_free_pages, ends_free, ends_max_pages, lane, rows_each, ended, PAGES,
            )  # fmt: skip
    at_ends = tl.zeros((), tl.int32)
    for first in range(0, n, LANES):
        lane = (first + tl.arange(0, LANES)).to(tl.int64)
        mask = lane < n
        column = table + lane
        recursion = tl.load(column + RECURSION * slots, mask=mask, other=-1)
        feed = tl.load(column + FEED * slots, mask=mask, other=-1)
        row = tl.load(column + ROW * slots, mask=mask, other=-1)
        had_slot = tl.load(column + SLOT * slots, mask=mask, other=-1) >= 0
        place = tl.load(column + PLACE * slots, mask=mask, other=-1)
        waits = tl.load(column + WAITS * slots, mask=mask, other=-1)
        position = tl.load(column + POSITION * slots, mask=mask, other=0)
        entry, there, through, token, ended = _ends(chosen, goes_on, at, table, slots, lane, mask, STOPS)
        passed = recursion >= 0
        leaves = through & there
        waiting = through & (there == 0)
        fed = there & (feed >= 0)
        going = leaves & (ended == 0)
        enters = going | fed
        passes = enters | (passed & (through == 0))
        active = passes | waiting
        taken = tl.where(passed, recursion + 1, waits)
        counted = passed & had_slot & (ended == 0)
        counted_end = going & (place >= 0)
        following = tl.where(enters, 0, tl.where(passes, recursion + 1, -1))
        if MANY == 0:
            free, ends_free = _give_ended(
                lengths, owned, page_table, free_pages, free, max_pages, ends_lengths, ends_owned, ends_page_table,
                ends_free_pages, ends_free, ends_max_pages, lane, rows_each, ended, PAGES,
            )  # fmt: skip
        if SHARED:
            read = lane
            appends = following == 0
        else:
            read = lane * recursions + following
            appends = passes
        held = tl.load(owned + read, mask=appends, other=0)
        length = tl.load(lengths + read, mask=passes, other=0)
        counts = tl.load(lengths + row, mask=counted, other=0)
        if ends_lengths is not None:
            end_held = tl.load(ends_owned + lane, mask=enters, other=0)
            end_length = tl.load(ends_lengths + lane, mask=mask, other=0) + counted_end.to(tl.int64)

        tl.debug_barrier()  # other threads may hold the same lanes: they have read before these are written
        tl.store(record + 3 * lane, tl.where(leaves, token, NONE), mask=mask)
        tl.store(record + 3 * lane + 1, tl.where(passed | leaves, taken, 0), mask=mask)
        tl.store(record + 3 * lane + 2, following, mask=mask)
        position += going.to(tl.int64)
        line = tl.where(active, lane, -1)
        tl.store(column + RECURSION * slots, following, mask=mask)
        tl.store(column + FEED * slots, tl.full((LANES,), -1, tl.int64), mask=there)
        tl.store(column + LINE * slots, line, mask=mask)
        tl.store(column + WAITS * slots, tl.where(waiting, taken, -1), mask=mask)
        tl.store(column + POSITION * slots, position, mask=mask)
        tl.store(ids + entry, tl.where(fed, feed, tl.maximum(token, 0)), mask=there)
        tl.store(positions_out + entry, tl.where(enters, position, 0), mask=there)
        tl.store(lanes_out + entry, tl.where(enters, lane, -1), mask=there)
        tl.store(k_lens_out + entry, tl.where(enters, position + 1, 0).to(tl.int32), mask=there)
        at_ends += tl.sum(there.to(tl.int32))
        tl.store(lengths + row, counts + 1, mask=counted)
        entering_slot = tl.full((LANES,), -1, tl.int64)
        if ends_lengths is not None:
            tl.store(ends_lengths + lane, end_length, mask=counted_end)
            entering_slot, ends_free = _take(
                ends_owned, ends_page_table, ends_free_pages, ends_free, ends_max_pages, lane, enters,
                end_length, end_held, PAGE_SIZE,
            )  # fmt: skip
            place = tl.where(enters, entering_slot, tl.where(active, place, -1))
            tl.store(column + PLACE * slots, place, mask=mask)
            tl.store(k_lens + slots + lane, tl.where(active, position + 1, 0).to(tl.int32), mask=mask)
        tl.store(slots_out + entry, entering_slot, mask=there)
        length += (counted & (row == read)).to(tl.int64)
        slot, free = _take(owned, page_table, free_pages, free, max_pages, read, appends, length, held, PAGE_SIZE)
        tl.store(column + ROW * slots, tl.where(appends, read, -1), mask=mask)
        tl.store(column + SLOT * slots, slot, mask=mask)
        tl.store(k_lens + lane, tl.where(passes, length + (slot >= 0), 0).to(tl.int32), mask=mask)
    if at is not None:
        for first in range(0, size, LANES):
            entry = first + tl.arange(0, LANES)
            rest = (entry >= at_ends) & (entry < size)
            none = tl.full((LANES,), -1, tl.int64)
            tl.store(ids + entry, none + 1, mask=rest)
            tl.store(positions_out + entry, none + 1, mask=rest)
            tl.store(lanes_out + entry, none, mask=rest)
            tl.store(slots_out + entry, none, mask=rest)
            tl.store(k_lens_out + entry, (none + 1).to(tl.int32), mask=rest)
    tl.store(ticks, tick + 1)
    tl.store(free_count, free)
    if ends_lengths is not None:
        tl.store(ends_free_count, ends_free)


def advance(chosen, goes_on, at, table, k_lens, ticks, record, *rest):
    block, ends, (recursions, shared, page_size) = rest[:5], rest[5:10], rest[10:]
    n, slots = goes_on.shape[0], table.shape[1]
    ids, positions, entering, places = (torch.empty_like(chosen) for _ in range(4))
    keys = torch.empty_like(chosen, dtype=torch.int32)
    lanes, stops = min(max(triton.next_power_of_2(n), 64), LANES), table.shape[0] - len(FIELDS)
    _advance[(1,)](
        *contiguous(chosen, goes_on, at), table, k_lens, ticks,
        record, ids, positions, entering, places, keys, *block, *ends, n, chosen.shape[0], slots, record.shape[0],
        record.stride(0), recursions, 1 if shared else recursions, block[2].shape[1],
        0 if ends[0] is None else ends[2].shape[1],
        SHARED=shared, STOPS=stops, PAGE_SIZE=page_size, LANES=lanes, PAGES=8, MANY=n > lanes, num_warps=lanes // 32,
    )  # fmt: skip
    return ids, positions, entering, places, keys


@triton.jit
def _enter(
    x, new, lanes, logits, weight, stride_x, stride_new, stride_logits, temperature,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    if lane < 0:
        return
    d = tl.arange(0, BLOCK)
    state = tl.load(new + row * stride_new + d, mask=d < WIDTH, other=0)
    tl.store(x + lane * stride_x + d, state, mask=d < WIDTH)
    if logits is not None:
        score = state.to(tl.float32) * tl.load(weight + d, mask=d < WIDTH, other=0).to(tl.float32)
        tl.store(logits + lane * stride_logits, tl.sum(score) / temperature)


def enter(x, new, lanes, logits, weight, temperature):
    n, width = new.shape
    new = new if new.stride(1) == 1 else new.contiguous()
    if n:
        _enter[(n,)](
            x, new, *contiguous(lanes), logits, *contiguous(weight), x.stride(0),
            new.stride(0), 0 if logits is None else logits.stride(0), temperature,
            WIDTH=width, BLOCK=triton.next_power_of_2(max(width, 1)), num_warps=4,
        )  # fmt: skip
