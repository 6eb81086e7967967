"""Lane by lane the same, in PyTorch's operators; no size depends on a value, so nothing waits for the device."""

from __future__ import annotations

import torch

from .. import _checks
from ..pages.eager import free as give
from ._fields import FIELDS, NOTHING


def leave(goes_on, table, k_lens, x, size):
    n = goes_on.shape[0]
    own = table[:, :n]
    _, feed, _, _, line, _, waits = own[:7]
    lane = torch.arange(n, device=x.device)
    wants = ((line >= 0) & ~goes_on) | (feed >= 0)
    first = wants & (waits >= 0)
    rank = torch.where(first, first.cumsum(0), first.sum() + (wants & ~first).cumsum(0)) - 1
    at = torch.where(wants & (rank < size), rank, -1)
    lanes = _placed(lane, at, size, -1)
    columns = table.new_zeros(table.shape[0], size)
    columns[: len(FIELDS)] = -1
    there, safe = lanes >= 0, lanes.clamp(min=0)
    if n:
        columns = torch.where(there, own[:, safe], columns)
        rows, keys = torch.where(there[:, None], x[safe], 0), torch.where(there, k_lens[1, safe], 0)
    else:
        rows, keys = x.new_zeros(size, x.shape[1]), k_lens.new_zeros(size)
    return columns, keys, rows, at


def _placed(values, at, size, missing):
    """(size,) values (n,) at their places, of which -1 is none."""
    longer = values.new_full((size + 1,), missing)
    longer[torch.where(at >= 0, at, size)] = values
    return longer[:-1]


def check(chosen, goes_on, at, table, k_lens, ticks, record, *rest):
    op, block, ends, (recursions, _, _) = "advance_", rest[:5], rest[5:10], rest[10:]
    if at is not None:
        _checks.indices(op, "at", at, chosen.shape[0])
        _checks.distinct(op, "at", at, "place")
    state = dict(zip(FIELDS, table[:, : goes_on.shape[0]]))
    for name, limit in (("recursion", recursions), ("row", block[0].shape[0]), ("line", table.shape[1])):
        _checks.indices(op, f"lanes.table ({name})", state[name], limit)
    if int(ticks) < 0:
        _checks.fail(op, "lanes.ticks", "a number of at least 0", int(ticks))
    _checks.accounts(op, "block", *block)
    if ends[0] is not None:
        _checks.accounts(op, "ends", *ends)


def advance(chosen, goes_on, at, table, k_lens, ticks, record, *rest):
    block, ends, (recursions, shared, page_size) = rest[:5], rest[5:10], rest[10:]
    n, size = goes_on.shape[0], chosen.shape[0]
    own = table[:, :n]
    recursion, feed, row, slot, line, place, waits, position, end = own[: len(FIELDS)]
    lane = torch.arange(n, device=chosen.device)
    at = lane if at is None else at
    there, passed = at >= 0, recursion >= 0
    token = torch.nn.functional.pad(chosen, (0, 1))[torch.where(there, at, size)]
    through = (line >= 0) & ~goes_on
    leaves, waiting, fed = through & there, through & ~there, there & (feed >= 0)
    ended = leaves & ((token < 0) | (token == own[len(FIELDS) :]).any(0) | (position + 2 >= end))
    going = leaves & ~ended
    enters = going | fed
    passes = enters | (passed & goes_on)
    active = passes | waiting
    taken = torch.where(passed, recursion + 1, waits)
    following = torch.where(enters, 0, torch.where(passes, recursion + 1, -1))
    depth = torch.where(passed | leaves, taken, 0)
    told = torch.stack((torch.where(leaves, token, NOTHING), depth, following), 1)
    record[(ticks % record.shape[0]).view(1), :n] = told[None]
    ticks.add_(1)
    ids = torch.where(fed, feed, token.clamp(min=0))

    rows = lane[:, None] if shared else lane[:, None] * recursions + torch.arange(recursions, device=lane.device)
    give(*block, torch.where(ended[:, None], rows, -1).flatten())
    _count(block[0], row, passed & ~ended & (slot >= 0))
    position.add_(going.long())
    recursion.copy_(following)
    waits.copy_(torch.where(waiting, taken, -1))
    feed.copy_(torch.where(there, -1, feed))
    line.copy_(torch.where(active, lane, -1))
    if ends[0] is not None:
        give(*ends, torch.where(ended, lane, -1))
        _count(ends[0], lane, going & (place >= 0))
        place.copy_(torch.where(enters, _take(ends, lane, enters, page_size), torch.where(active, place, -1)))
        k_lens[1, :n] = torch.where(active, position + 1, 0)
    appends = recursion == 0 if shared else passes
    row.copy_(torch.where(appends, lane if shared else lane * recursions + recursion, -1))
    slot.copy_(_take(block, row, row >= 0, page_size))
    seen = block[0][lane if shared else row.clamp(min=0)] if block[0].numel() else torch.zeros_like(row)
    k_lens[0, :n] = torch.where(passes, seen + (slot >= 0), 0)
    return (
        _placed(ids, at, size, 0),
        _placed(torch.where(enters, position, 0), at, size, 0),
        _placed(torch.where(enters, lane, -1), at, size, -1),
        _placed(torch.where(enters, place, -1), at, size, -1),
        _placed(torch.where(enters, position + 1, 0).int(), at, size, 0),
    )


def _count(lengths, rows, mask):
    """A token more in each of the rows, all different, where the mask says so."""
    lengths.index_add_(0, torch.where(mask, rows, 0), mask.long())


def _take(pages, rows, mask, page_size):
    """(n,) flat slots of one token more in each of the rows, all different, where the mask says so and pages suffice;
    -1 elsewhere."""
    lengths, owned, page_table, free_pages, free_count = pages
    if 0 in (*page_table.shape, rows.shape[0], free_pages.shape[0]):
        return torch.full_like(rows, -1)
    safe = torch.where(mask, rows, 0)
    length, held = lengths[safe], owned[safe]
    room = length // page_size < page_table.shape[1]
    needs = mask & room & (length // page_size >= held)
    nth = needs.cumsum(0) - 1
    granted = needs & (nth < free_count)
    number = free_pages[(free_count - 1 - nth.clamp(min=0)).clamp(min=0)]
    at = safe * page_table.shape[1] + (length // page_size).clamp(max=page_table.shape[1] - 1)
    flat = page_table.view(-1)
    page = torch.where(granted, number, flat[at])
    # to each its own place: what isn't granted writes what is there, and duplicates of row 0 are added as zeros
    flat.index_add_(0, torch.where(granted, at, 0), torch.where(granted, number - flat[at], 0))
    owned.index_add_(0, safe, granted.long())
    free_count.sub_(granted.sum())
    there = mask & room & (granted | ~needs)
    return torch.where(there, page.long() * page_size + length % page_size, -1)


def check_enter(x, new, lanes, logits, weight, temperature):
    _checks.indices("enter_", "lanes", lanes, x.shape[0])
    _checks.distinct("enter_", "lanes", lanes, "lane")
    results = {"x": x} if logits is None else {"x": x, "logits": logits}
    _checks.apart("enter_", results, new=new, lanes=lanes, weight=weight)


def enter(x, new, lanes, logits, weight, temperature):
    n = x.shape[0]
    if not n or not len(lanes):
        return
    # each lane's row of new, if it has one
    at = _placed(torch.arange(len(lanes), device=x.device), lanes, n, -1)
    enters, at = at >= 0, at.clamp(min=0)
    x.copy_(torch.where(enters[:, None], new[at], x))
    if logits is not None:
        score = torch.nn.functional.linear(new.to(logits.dtype), weight.to(logits.dtype)[None])[:, 0] / temperature
        logits.copy_(torch.where(enters, score[at], logits))
