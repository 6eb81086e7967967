"""Ragged paged keys and values: one row of pages for each (sequence, recursion).

How far a token recurses decides which rows grow, so rows differ in length. A page belongs to a row and serves every
layer of the block, since all of them write the same slot of it. What a pass does with a row:

    prepare  rows whose last page is full take new pages; gives the slots of the new tokens
    append   each layer writes its keys and values into those slots
    lookup   each layer reads the row, the new tokens included
    commit   the row's length grows, once, after the whole block
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops


class OutOfPages(RuntimeError):
    """The free pages don't suffice; nothing was changed."""


def _spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For items of `counts` (R,) laid out one after another: each one's row (total,) and its index inside the row."""
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)
    return row, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[row]


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


class PagePool:
    """Pages shared by `rows` rows, all state in tensors on the device.

    k, v (layers, num_pages, page_size, G, d); lengths (rows,) int64 committed tokens; owned (rows,) int64 pages held;
    page_table (rows, max_pages) int32, -1 where a row has no page; free_pages (num_pages,) int32, a stack of which the
    first free_count (a 0-d int64 tensor) are free. A flat slot is page * page_size + offset.
    """

    def __init__(self, layers, rows, num_pages, page_size, max_length, kv_heads, head_dim, dtype, device):
        shape = (layers, num_pages, page_size, kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        self.page_size, self.num_pages = page_size, num_pages
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.owned = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.full((rows, -(-max_length // page_size)), -1, dtype=torch.int32, device=device)
        self.free_pages = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device)
        self.free_count = torch.tensor(num_pages, device=device)

    @property
    def nbytes(self) -> int:
        return 2 * self.k.nbytes

    def missing(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Pages (R,) int64 that each row still lacks for `counts` more tokens; rows of -1 lack none."""
        length = self.lengths[rows.clamp(min=0)] + counts
        need = (length + self.page_size - 1) // self.page_size - self.owned[rows.clamp(min=0)]
        return need.clamp(min=0) * (rows >= 0)

    def lacks(self, rows: Tensor, counts: Tensor) -> bool:
        """Whether `prepare` would run out of pages."""
        return bool(self.missing(rows, counts).sum() > self.free_count)

    def prepare(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Give the rows the pages that `counts` more tokens need, and return those tokens' slots.

        rows (R,) int64, each at most once, -1 for padding; counts (R,) int64. Rows take pages in the order given. Pages
        of an earlier prepare that was not committed are kept, so preparing twice is harmless.
        Returns (counts.sum(),) int64 flat slots, row by row; -1 for the tokens of padding.
        Raises OutOfPages before anything is changed, ValueError if a row would outgrow its page table.
        """
        need = self.missing(rows, counts)
        taken = int(need.sum())
        if taken > int(self.free_count):
            raise OutOfPages(f"rows: need {taken} pages, {int(self.free_count)} of {self.num_pages} are free")
        safe = rows.clamp(min=0)
        limit = self.page_table.shape[1]
        if len(rows) and int((self.owned[safe] + need).max()) > limit:
            raise ValueError(f"counts: a row would outgrow its {limit} pages of {self.page_size} tokens")
        lane, nth = _spread(need, taken)
        self.page_table[safe[lane], self.owned[safe[lane]] + nth] = self.free_pages[
            self.free_count - 1 - torch.arange(taken, device=rows.device)
        ]
        self.owned.index_add_(0, safe, need)
        self.free_count -= taken

        lane, nth = _spread(counts, int(counts.sum()))
        real = rows[lane] >= 0
        index = torch.where(real, self.lengths[safe[lane]] + nth, 0)  # padding mustn't look past the page table
        return torch.where(real, self.slot(safe[lane], index), -1)

    def slot(self, rows: Tensor, index: Tensor) -> Tensor:
        """Flat slots (n,) int64 of the tokens at `index` (n,) of `rows` (n,)."""
        page = self.page_table[rows, index // self.page_size].long()
        return page * self.page_size + index % self.page_size

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v (n, G, d) into `slots` (n,); -1 goes nowhere."""
        ops.kv_append_(k, v, self.k[layer], self.v[layer], slots)

    def lookup(self, layer: int, page_table: Tensor, cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Keys and values (total, G, d) of the rows whose pages are `page_table` (R, max_pages), one after another."""
        return ops.kv_lookup(self.k[layer], self.v[layer], page_table, cu_seqlens, total)

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        """Count the tokens written since `prepare` as part of their rows; rows of -1 are passed over."""
        self.lengths.index_add_(0, rows.clamp(min=0), counts * (rows >= 0))

    def free(self, rows: Tensor) -> None:
        """Give back all pages of `rows` (R,) int64, each at most once, none of them -1."""
        owned = self.owned[rows]
        given = int(owned.sum())
        lane, nth = _spread(owned, given)
        target = self.free_count + torch.arange(given, device=rows.device)
        self.free_pages[target] = self.page_table[rows[lane], nth]
        self.free_count += given
        self.page_table[rows] = -1
        self.owned[rows] = 0
        self.lengths[rows] = 0


@dataclass
class Plan:
    """Where the tokens of one call write and what they read, worked out once for all layers.

    The n tokens form R runs; a run is consecutive tokens of one row, in order of position.
    """

    pool: PagePool
    grown: Tensor  # (R,) int64 row that each run appends to, -1 for none
    counts: Tensor  # (R,) int64 tokens in each run
    slots: Tensor | None  # (n,) int64 where they are written; None if no run appends
    cu_queries: Tensor  # (R+1,) int32
    cu_keys: Tensor  # (R+1,) int32
    max_queries: int
    max_keys: int
    total: int  # keys of all runs together
    query_index: Tensor  # (n,) int64 index, among its run's keys, of the last key that each token sees
    pages: Tensor  # (R, max_pages) int32 page table of the rows read
    source: Tensor | None = None  # hybrid: (total,) int64 flat slot of each key, in place of `pages`

    def attend(self, slot: int, q: Tensor, kv: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of queries (n, H, d) at layer `slot` of the pool; kv() gives the tokens' own k, v (n, G, d)."""
        if self.slots is not None:
            self.pool.append(slot, *kv(), self.slots)
        if self.source is None:
            k, v = self.pool.lookup(slot, self.pages, self.cu_keys, self.total)
        else:
            k, v = (cache[slot].flatten(0, 1)[self.source] for cache in (self.pool.k, self.pool.v))
        return ops.attention_varlen(
            q, k, v, self.cu_queries, self.cu_keys, self.max_queries, self.max_keys, q_positions=self.query_index
        )

    def commit(self) -> None:
        self.pool.commit(self.grown, self.counts)


class KVCache:
    """Keys and values of `max_sequences` sequences of a model, for its block and for its own first and last layers.

    kv="recursion_wise": a row for each recursion holds the tokens that reached it. "shared": the rows of the first
    recursion hold every token and serve all recursions. "hybrid": rows as recursion-wise; a token at recursion r sees,
    for each position, what that position wrote at recursion r if it got there, otherwise what it wrote at the first
    recursion (hybrid_base="first") or at the last that it reached ("latest").
    """

    def __init__(self, config, max_sequences, num_pages, end_pages, page_size, dtype, device):
        """config: the model's MoRConfig; num_pages for the block, end_pages for its own first and last layers."""
        self.recursions, self.kv, self.base = config.num_recursions, config.kv, config.hybrid_base
        self.rows_each = 1 if self.kv == "shared" else self.recursions
        shape = (page_size, config.max_position_embeddings, config.num_key_value_heads, config.head_dim, dtype, device)
        self.block = PagePool(len(config.recursion_layers[0]), max_sequences * self.rows_each, num_pages, *shape)
        self.ends = PagePool(2, max_sequences, end_pages, *shape) if config.has_own_ends else None
        if self.kv == "hybrid":  # the last recursion that each token took, by its position
            length = config.max_position_embeddings
            self.reached = torch.zeros(max_sequences, length, dtype=torch.int8, device=device)

    @property
    def nbytes(self) -> int:
        return self.block.nbytes + (self.ends.nbytes if self.ends else 0)

    def rows(self, sequences: Tensor, recursions: Tensor) -> Tensor:
        """The block's row (R,) that a sequence's tokens grow at a recursion (from 0), -1 where they grow none."""
        if self.kv == "shared":
            return torch.where(recursions == 0, sequences, -1)
        return sequences * self.recursions + recursions

    def all_rows(self, sequences: Tensor) -> Tensor:
        """All rows (R, rows a sequence) of sequences (R,) in the block's pool."""
        return sequences[:, None] * self.rows_each + torch.arange(self.rows_each, device=sequences.device)

    def plan(self, sequences: Tensor, recursions: Tensor, counts: Tensor, positions: Tensor) -> Plan:
        """Plan a pass of the block and take its pages.

        sequences, recursions (from 0), counts (R,) int64: the runs, each sequence at most once. positions (n,) int64 of
        the tokens in their sequences, ascending in a run; every token takes recursion 0, so its position is also its
        place in that row.
        Raises OutOfPages before anything is changed.
        """
        grown = self.rows(sequences, recursions)
        if self.kv == "recursion_wise":
            return self._plan(self.block, grown, counts)
        base = sequences * self.rows_each
        keys = self.block.lengths[base] + torch.where(recursions == 0, counts, 0)
        plan = self._plan(self.block, grown, counts, read_rows=base, keys=keys, query_index=positions)
        if self.kv == "hybrid":
            lane, _ = _spread(counts, len(positions))
            self.reached[sequences[lane], positions] = recursions[lane].to(torch.int8)
            plan.source = self._hybrid_slots(sequences, recursions, keys, plan.total)
        return plan

    def plan_ends(self, sequences: Tensor, counts: Tensor) -> Plan:
        """Plan the first layer (slot 0 of the pool) or the last (1), which write the same places; commit after both."""
        return self._plan(self.ends, sequences, counts)

    def free(self, sequence: int) -> None:
        """Give back all pages of a sequence."""
        sequences = torch.tensor([sequence], device=self.block.lengths.device)
        self.block.free(self.all_rows(sequences).flatten())
        if self.ends:
            self.ends.free(sequences)

    @staticmethod
    def _plan(pool, grown, counts, read_rows=None, keys=None, query_index=None) -> Plan:
        slots = pool.prepare(grown, counts)
        if read_rows is None:
            read_rows, keys = grown, pool.lengths[grown] + counts
            lane, nth = _spread(counts, len(slots))
            query_index = pool.lengths[grown][lane] + nth
        return Plan(
            pool=pool,
            grown=grown,
            counts=counts,
            slots=slots if bool((grown >= 0).any()) else None,
            cu_queries=_offsets(counts),
            cu_keys=_offsets(keys),
            max_queries=int(counts.max()) if len(counts) else 0,
            max_keys=int(keys.max()) if len(keys) else 0,
            total=int(keys.sum()),
            query_index=query_index,
            pages=pool.page_table[read_rows],
        )

    def _hybrid_slots(self, sequences: Tensor, recursions: Tensor, keys: Tensor, total: int) -> Tensor:
        """Flat slot (total,) of the entry that each run's recursion sees at positions 0, 1, ..., keys - 1."""
        lane, position = _spread(keys, total)
        start = (keys.cumsum(0) - keys)[lane]
        reached = self.reached[sequences[lane], position].long()
        entry = torch.minimum(reached, recursions[lane])
        if self.base == "first":
            entry = torch.where(reached >= recursions[lane], entry, 0)
        # in the row of recursion e a token stands after the earlier ones that reached e
        at_least = (reached[:, None] >= torch.arange(self.recursions, device=reached.device)).long()
        before = at_least.cumsum(0) - at_least
        index = (before - before[start]).gather(1, entry[:, None]).squeeze(1)
        return self.block.slot(sequences[lane] * self.recursions + entry, index)
