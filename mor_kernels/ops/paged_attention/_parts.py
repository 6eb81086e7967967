"""The size of a schedule and of its tiles, which the kernels and the fake implementations agree on."""

from __future__ import annotations

FIELDS = 8  # numbers that describe a part
PROGRAMS = 2112  # wanted in all: 16 for each of an H100's multiprocessors, so that they hide one another's latencies
ROWS = 64  # of a tile: queries times the heads of a group


def wanted(groups: int) -> int:
    """Parts to aim at."""
    return max(PROGRAMS // groups, 1)


def most_parts(lanes: int, groups: int, queries: int, cu_seqlens_q) -> int:
    """Parts that the lanes can be split into: each tile of queries has one, and ``PROGRAMS`` are wanted."""
    return queries + wanted(groups) + (0 if cu_seqlens_q is None else lanes + 1)


def queries_of_a_tile(lanes: int, group: int, queries: int, cu_seqlens_q) -> int:
    """One where each lane has one; else as many as a lane has in the mean, if that many rows fit into a tile."""
    if cu_seqlens_q is None:
        return 1
    several = 1
    while several * lanes < queries and 2 * several * group <= ROWS:
        several *= 2
    return several
