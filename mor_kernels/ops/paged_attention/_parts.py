"""The size of a schedule and of its tiles, which the kernels and the fake implementations agree on."""

from __future__ import annotations

FIELDS = 8  # numbers that describe a part
PROGRAMS = 4224  # wanted in all: 32 for each of an H100's multiprocessors, so that the last ones end together
ROWS = 64  # of a tile: queries times the heads of a group


def wanted(groups: int) -> int:
    """Parts to aim at."""
    return max(PROGRAMS // groups, 1)


def most_parts(lanes: int, heads: int, groups: int, queries: int, cu_seqlens_q) -> int:
    """Parts that the lanes can be split into: each tile of queries has one, and ``PROGRAMS`` are wanted.

    A lane has at most one tile that isn't full; and full tiles are as large as they can be, or there are no more of
    them than lanes. Nothing here depends on which of the two it is, since ``queries`` may be a symbol.
    """
    tiles = queries if cu_seqlens_q is None else queries // _most_queries(heads // groups) + 2 * lanes + 1
    return tiles + wanted(groups)


def queries_of_a_tile(lanes: int, group: int, queries: int, cu_seqlens_q) -> int:
    """One where each lane has one; else as many as a lane has in the mean, if that many rows fit into a tile."""
    if cu_seqlens_q is None:
        return 1
    mean = -(-queries // max(lanes, 1))
    return min(1 << max(mean - 1, 0).bit_length(), _most_queries(group))


def _most_queries(group: int) -> int:
    """The largest power of 2 of queries that fit into a tile."""
    return 1 << max(ROWS // group, 1).bit_length() - 1
