"""The accounts in PyTorch's operators, over all rows at once: no size depends on a value, so nothing waits for the
device."""

from __future__ import annotations

import torch

from .. import _checks


def _check_rows(op, lengths, rows):
    _checks.indices(op, "rows", rows, lengths.shape[0])
    _checks.distinct(op, "rows", rows, "row")


def check_take(lengths, owned, page_table, free_pages, free_count, rows, cu_seqlens, total, page_size):
    _check_rows("take_pages_", lengths, rows)
    _checks.offsets("take_pages_", "cu_seqlens", cu_seqlens, total)
    _checks.accounts("take_pages_", "pages", lengths, owned, page_table, free_pages, free_count)


def check_commit(lengths, rows, cu_seqlens):
    _check_rows("commit_pages_", lengths, rows)
    _checks.offsets("commit_pages_", "cu_seqlens", cu_seqlens, int(cu_seqlens[-1]))


def check_free(lengths, owned, page_table, free_pages, free_count, rows):
    _check_rows("free_pages_", lengths, rows)
    _checks.accounts("free_pages_", "pages", lengths, owned, page_table, free_pages, free_count)


def _by_row(values, rows, count, missing):
    """(count,) values (R,) of the lanes by their rows; ``missing`` for rows that have no lane."""
    longer = values.new_full((count + 1,), missing)
    longer[torch.where(rows >= 0, rows, count)] = values
    return longer[:-1]


def take(lengths, owned, page_table, free_pages, free_count, rows, cu_seqlens, total, page_size):
    device, count = rows.device, lengths.shape[0]
    if rows.shape[0] == 0 or count == 0:
        return rows.new_full((total,), -1), torch.full_like(rows, -1), torch.zeros_like(rows).int(), rows.new_zeros(())
    real = rows >= 0
    safe = rows.clamp(min=0)
    old, held = lengths[safe], owned[safe]
    new = old + cu_seqlens.diff()
    need = ((new + page_size - 1) // page_size - held).clamp(min=0) * real
    outgrown = (held + need > page_table.shape[1]).any()
    lacking = torch.where(need.sum() > free_count, need.sum() - free_count, 0)
    refused = torch.where(outgrown, -1, lacking)
    granted = torch.where(refused == 0, rows, -1)
    need = torch.where(refused == 0, need, 0)

    # the n-th page of a row that takes it lies so deep in the stack
    first = _by_row(need.cumsum(0) - need, granted, count, 0)
    more = _by_row(need, granted, count, 0)
    nth = torch.arange(page_table.shape[1], device=device) - owned[:, None]
    taken = (nth >= 0) & (nth < more[:, None])
    if free_pages.numel():
        place = (free_count - 1 - first[:, None] - nth).clamp(0, free_pages.shape[0] - 1)
        page_table.copy_(torch.where(taken, free_pages[place], page_table))
    owned.add_(more)
    free_count.sub_(need.sum())

    token = torch.arange(total, device=device, dtype=torch.int32)
    lane = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp(max=rows.shape[0] - 1)
    there = (token < cu_seqlens[-1]) & (granted[lane] >= 0)
    index = torch.where(there, old[lane] + token - cu_seqlens[lane], 0)
    if page_table.shape[1] == 0:
        return rows.new_full((total,), -1), granted, torch.zeros_like(rows).int(), refused
    page = page_table[safe[lane], index // page_size].long()
    slots = torch.where(there, page * page_size + index % page_size, -1)
    return slots, granted, torch.where(granted >= 0, new, 0).int(), refused


def commit(lengths, rows, cu_seqlens):
    if lengths.shape[0]:
        lengths.add_(_by_row(cu_seqlens.diff().long(), rows, lengths.shape[0], 0))


def free(lengths, owned, page_table, free_pages, free_count, rows):
    count, limit = page_table.shape
    if 0 in (rows.shape[0], count, limit, free_pages.shape[0]):
        return
    given = owned[rows.clamp(min=0)] * (rows >= 0)
    first = _by_row(given.cumsum(0) - given, rows, count, 0)
    leaves = _by_row(given, rows, count, 0)
    nth = torch.arange(limit, device=rows.device)
    moved = nth < leaves[:, None]
    place = torch.where(moved, free_count + first[:, None] + nth, free_pages.shape[0])
    longer = torch.cat((free_pages, free_pages[:1]))  # the place past the end takes what doesn't move
    longer.scatter_(0, place.flatten(), torch.where(moved, page_table, 0).flatten())
    free_pages.copy_(longer[:-1])
    free_count.add_(given.sum())
    gone = _by_row(torch.ones_like(rows, dtype=torch.bool), rows, count, False)
    page_table.masked_fill_(gone[:, None], -1)
    lengths.masked_fill_(gone, 0)
    owned.masked_fill_(gone, 0)
