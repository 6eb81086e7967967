"""Lane by lane the same, in PyTorch's operators; no size depends on a value, so nothing waits for the device."""

from __future__ import annotations

import torch

from ..pages.eager import free as give
from ._fields import FIELDS, NOTHING


def advance(chosen, goes_on, table, k_lens, record, *rest):
    block, ends, (recursions, shared, page_size) = rest[:5], rest[5:10], rest[10:]
    n = chosen.shape[0]
    own = table[:, :n]
    recursion, feed, row, slot, line, place, position, end = own[: len(FIELDS)]
    passed = recursion >= 0
    leaves = passed & ~goes_on
    ended = leaves & ((chosen < 0) | (chosen == own[len(FIELDS) :]).any(0) | (position + 2 >= end))
    enters = (leaves & ~ended) | (feed >= 0)
    active = enters | (passed & goes_on)
    record[:, 0] = torch.where(leaves, chosen, NOTHING)
    record[:, 1] = torch.where(passed, recursion + 1, 0)
    record[:, 2] = ended
    ids = torch.where(feed >= 0, feed, chosen.clamp(min=0))

    lane = torch.arange(n, device=chosen.device)
    each = 1 if shared else recursions
    for r in range(each):
        give(*block, torch.where(ended, lane * each + r, -1))
    _count(block[0], row, passed & ~ended & (slot >= 0))
    position.add_((leaves & ~ended).long())
    recursion.copy_(torch.where(enters, 0, torch.where(active, recursion + 1, -1)))
    feed.fill_(-1)
    line.copy_(torch.where(active, lane, -1))
    if ends[0] is not None:
        give(*ends, torch.where(ended, lane, -1))
        _count(ends[0], lane, leaves & ~ended & (place >= 0))
        place.copy_(torch.where(enters, _take(ends, lane, enters, page_size), torch.where(active, place, -1)))
        k_lens[1, :n] = torch.where(active, position + 1, 0)
    appends = recursion == 0 if shared else active
    row.copy_(torch.where(appends, lane if shared else lane * recursions + recursion, -1))
    slot.copy_(_take(block, row, row >= 0, page_size))
    seen = block[0][lane if shared else row.clamp(min=0)] if block[0].numel() else torch.zeros_like(row)
    k_lens[0, :n] = torch.where(active, seen + (slot >= 0), 0)
    return ids, enters, torch.where(enters, lane, -1), torch.where(enters, place, -1)


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


def enter(x, new, enters, logits, weight, temperature):
    x.copy_(torch.where(enters[:, None], new, x))
    if logits is not None:
        score = torch.nn.functional.linear(new.to(logits.dtype), weight.to(logits.dtype)[None])[:, 0] / temperature
        logits.copy_(torch.where(enters, score, logits))
