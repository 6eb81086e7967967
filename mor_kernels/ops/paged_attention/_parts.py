"""A schedule's size and tiles, which the kernels and the fake implementations agree on; any kernel reads any schedule.

A schedule is int32: a line for each part there could be (row of the page table; first query of the tile; queries of the
lane from that one on, 0 where there is no part; keys of the lane; first key of the part, and the one past its last;
line of the tile's first part; parts of the tile), a counter for each line and key/value head, and ranges of lines (the
numbers of its first, which one that is, and how many there are).
"""

from __future__ import annotations

import torch

from .._dispatch import properties

FIELDS = 8  # numbers that describe a part
ENTRY = FIELDS + 2  # numbers that describe a range
RANGES = 768  # at the most
PROGRAMS = 4224  # wanted in all: 32 for each of an H100's multiprocessors, so that the last ones end together
WHOLE = 2**29  # units of keys for which a part isn't worth its merging, where no lane is to be split
ROWS = 64  # of a tile: queries times the heads of a group


def wanted(groups: int) -> int:
    """Parts to aim at."""
    return max(PROGRAMS // groups, 1)


def most_parts(lanes: int, heads: int, groups: int, queries: int, cu_seqlens_q: torch.Tensor | None) -> int:
    """Parts that the lanes can be split into: each tile of queries has one, and ``PROGRAMS`` are wanted.

    A lane has at most one tile that isn't full; and full tiles are as large as they can be, or there are no more of
    them than lanes. Nothing here depends on which of the two it is, since ``queries`` may be a symbol.
    """
    tiles = queries if cu_seqlens_q is None else queries // _most_queries(heads // groups) + 2 * lanes + 1
    return tiles + wanted(groups)


def schedule_size(parts: int, groups: int, ranges: int) -> int:
    return parts * (FIELDS + groups) + ranges * ENTRY


def empty_schedule(
    k_lens: torch.Tensor,
    heads: int,
    groups: int,
    queries: int,
    width: int,
    item_size: int,
    rows: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    split: bool,
) -> torch.Tensor:
    parts = most_parts(k_lens.shape[0], heads, groups, queries, cu_seqlens_q)
    return k_lens.new_empty(schedule_size(parts, groups, most_ranges(groups, width, item_size, k_lens.device)))


def ranges_in(schedule: torch.Tensor, parts: int, groups: int) -> int:
    """The reverse of :func:`schedule_size`."""
    return (schedule.shape[0] - schedule_size(parts, groups, 0)) // ENTRY


def most_ranges(groups: int, width: int, item_size: int, device: torch.device) -> int:
    """As many, times ``groups``, as blocks of the CUDA kernel run at once; there are lines for as many cuts."""
    multiprocessors, major = properties(device)
    blocks = multiprocessors * _blocks(width, item_size, major) if multiprocessors else 3 * groups
    return min(max(blocks // groups, 1), RANGES, wanted(groups))


def _blocks(width: int, item_size: int, major: int) -> int:
    """Of one multiprocessor: as kBlocks has it for Hopper; what an A100's shared memory has room for."""
    if major < 9:
        return 3 if width <= 64 and item_size <= 2 else 2
    if width <= 64:
        return {1: 4, 2: 5}.get(item_size, 3)
    return 3 if width <= 128 or item_size == 2 else 2


def queries_of_a_tile(lanes: int, group: int, queries: int, cu_seqlens_q: torch.Tensor | None) -> int:
    """One where each lane has one; else as many as a lane has in the mean, if that many rows fit into a tile."""
    if cu_seqlens_q is None:
        return 1
    mean = -(-queries // max(lanes, 1))
    return min(1 << max(mean - 1, 0).bit_length(), _most_queries(group))


def _most_queries(group: int) -> int:
    """The largest power of 2 of queries that fit into a tile."""
    return 1 << max(ROWS // group, 1).bit_length() - 1


def unread(
    q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, k_lens: torch.Tensor
) -> torch.Tensor | None:
    """The output where there is no key to read, empty or zeros; else None."""
    if 0 in (q.numel(), k_cache.numel(), page_table.numel(), k_lens.numel()):
        return q.new_zeros(q.shape)
    return None
