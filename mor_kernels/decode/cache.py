"""Ragged paged keys and values: one row of pages for each (sequence, recursion).

How far a token recurses decides which rows grow, so rows differ in length. A page belongs to a row and serves every
layer of the block, since all of them write the same slot of it. What a pass does with a row:

    prepare  rows whose last page is full take new pages; gives the slots of the new tokens
    append   each layer turns its keys by their positions and writes them and its values into those slots
    attend   each layer's queries read the row, the new tokens included
    commit   the row's length grows, once, after the whole block

All state is on the device, and nothing here waits for it but what says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..model.config import MoRConfig
from ..model.layers import Attention, Normed, Project, RMSNorm


class OutOfPages(RuntimeError):
    """The free pages don't suffice; nothing was changed."""


class PagePool:
    """Pages shared by `rows` rows, for `layers` layers.

    k, v (layers, num_pages, page_size, G, d), where float8_e4m3fn with a scale a head, k_scale and v_scale (layers, G);
    pages, the state, see ops.Pages. A flat slot is page * page_size + offset.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        num_pages: int,
        page_size: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, num_pages, page_size, kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if dtype == torch.float8_e4m3fn:
            self.k_scale, self.v_scale = torch.ones(2, layers, kv_heads, dtype=torch.float32, device=device)
        self.page_size, self.num_pages = page_size, num_pages
        self.pages = ops.Pages.new(rows, num_pages, -(-max_length // page_size), device)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that the pool holds: keys and values, scales, and the state of the rows."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale, *self.pages)
        return sum(t.nbytes for t in tensors if t is not None)

    def prepare(self, rows: Tensor, cu_seqlens: Tensor, total: int) -> ops.Taken:
        """Give the rows the pages that their new tokens need, see ops.take_pages_. Refused, nothing is changed, and the
        tokens of all rows are padding.

        Raises OutOfPages, and ValueError if a row would outgrow its page table, on the CPU; elsewhere that would wait
        for the device, and `refused` tells.
        """
        taken = ops.take_pages_(self.pages, rows, cu_seqlens, total, self.page_size)
        if rows.device.type == "cpu" and taken.refused:
            if taken.refused < 0:
                limit = self.pages.page_table.shape[1]
                raise ValueError(f"counts: a row would outgrow its {limit} pages of {self.page_size} tokens")
            free = int(self.pages.free_count)
            need = free + int(taken.refused)
            raise OutOfPages(f"rows: need {need} pages, {free} of {self.num_pages} are free")
        return taken

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, theta: float
    ) -> Tensor:
        """Turn q (n, H, d) and k by the positions (n,) and write k, v (n, G, d) into `slots` (n,); -1 goes nowhere.

        Returns the turned queries.
        """
        turned = ops.kv_append_(
            k, v, self.k[layer], self.v[layer], slots, positions=positions, theta=theta, q=q, **self._scales(layer)
        )
        assert turned is not None  # with q
        return turned

    def attend(
        self, layer: int, q: Tensor, page_table: Tensor, k_lens: Tensor, by_slot: bool = False, **options: Any
    ) -> Tensor:
        """ops.paged_attention of q; the page table has a page for each entry, or by_slot a flat slot for each token."""
        k, v = self.k[layer], self.v[layer]
        if by_slot:  # pages of one token
            k, v = (t.view(-1, 1, *t.shape[2:]) for t in (k, v))
        return ops.paged_attention(q, k, v, page_table, k_lens, **options, **self._scales(layer))

    def calibrate(self, other: PagePool, anew: bool) -> None:
        """Scale each head so that the largest number that ``other``, a pool of the same layers, holds becomes e4m3's;
        scales that are larger stay, but anew."""
        for scales, cache in ((self.k_scale, other.k), (self.v_scale, other.v)):
            assert scales is not None  # of float8
            wanted = cache.abs().amax((1, 2, 4)).float() / torch.finfo(self.k.dtype).max
            scales.copy_(torch.where(wanted > 0, wanted, 1) if anew else torch.maximum(scales, wanted))

    def _scales(self, layer: int) -> dict[str, Any]:
        if self.k_scale is None or self.v_scale is None:
            return {}
        return {"k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer]}

    def commit(self, rows: Tensor, cu_seqlens: Tensor) -> None:
        """Count the tokens written since `prepare` as part of their rows; rows of -1 are passed over."""
        ops.commit_pages_(self.pages, rows, cu_seqlens)

    def free(self, rows: Tensor) -> None:
        """Give back all pages of `rows` (R,) int64, each at most once; -1 is passed over."""
        ops.free_pages_(self.pages, rows)


@dataclass
class Plan:
    """Where the tokens of one call write and what they read, worked out once for all layers.

    The n tokens form R runs; a run is consecutive tokens of one row, in order of position.
    """

    pool: PagePool
    positions: Tensor  # (n,) int64
    cu_seqlens: Tensor | None  # (R+1,) int32 where each run begins; None where each is one token
    rows: Tensor  # (R,) int64 lines of the page table that the runs read, -1 for padding
    k_lens: Tensor  # (R,) int32 keys of each run
    page_table: Tensor
    taken: ops.Taken | None = None  # None where no run appends
    schedule: Tensor | None = None  # of the attention, the same in all layers
    beside: torch.cuda.Event | None = None  # when that will be there, if it is made on another stream
    by_position: bool = False  # keys stand at their positions: a query sees those up to its own
    by_slot: bool = False  # see PagePool.attend
    each: bool = False  # rows and k_lens are the tokens', of which each is a lane of its own to the attention
    split: bool = True  # see ops.attention_schedule

    def only(self, lanes: Tensor) -> Plan:
        """The plan for some of the lanes (R,) bool, of one token each; the others are padding."""
        assert self.taken is not None
        taken = self.taken._replace(slots=torch.where(lanes, self.taken.slots, -1))
        return replace(self, rows=torch.where(lanes, self.rows, -1), taken=taken, schedule=None, beside=None)

    def attend(self, slot: int, project: Project, heads: int, positions: Tensor, theta: float) -> Tensor:
        """Attention at layer `slot` of the pool for n tokens' queries; see model.layers.Attend."""
        if self.taken is None:
            q = ops.rope(project(keys=False), positions, theta)
        else:
            projected = project()
            groups = (projected.shape[1] - heads) // 2
            q, k, v = projected.split((heads, groups, groups), 1)
            q = self.pool.append(slot, q, k, v, self.taken.slots, positions, theta)
        return self._look(slot, q)

    def serve(
        self,
        slot: int,
        x: Tensor,
        normed: Normed | None,
        attention: Attention,
        norm: RMSNorm,
        positions: Tensor,
        theta: float,
    ) -> Tensor:
        """The same for few tokens x (n, D), projection included; see model.layers.Layer.serve."""
        weight, heads = attention.qkv_proj.weight, attention.heads
        options: dict[str, Any] = {"eps": norm.eps, "prefetch": True}
        if normed is None:
            options["norm_weight"] = norm.weight
        else:
            x, options["squares"] = normed
        if self.taken is not None and self.pool.k_scale is None:
            k, v = self.pool.k[slot], self.pool.v[slot]
            options |= {"heads": heads, "positions": positions, "theta": theta}
            return self._look(slot, ops.decode_qkv_(x, weight, k, v, self.taken.slots, **options))

        def project(keys: bool = True) -> Tensor:
            own = weight if keys else weight[: heads * attention.head_dim]
            return ops.decode_linear(x, own, **options).view(len(x), -1, attention.head_dim)

        return self.attend(slot, project, heads, positions, theta)

    def schedule_beside(self, stream: torch.cuda.Stream, heads: int, queries: int) -> None:
        """Make the schedule on another stream, beside what comes before the first attention. The plan is to be kept
        until everything else has been launched, or its memory would be taken meanwhile."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._make_schedule(heads, queries)
            self.beside = stream.record_event()

    def _make_schedule(self, heads: int, queries: int) -> None:
        k_cache = self.pool.k[0]
        self.schedule = ops.attention_schedule(
            self.k_lens, heads, k_cache.shape[2], queries, k_cache=k_cache, split=self.split, **self._runs()
        )

    def _runs(self) -> dict[str, Any]:
        return {"rows": self.rows, "cu_seqlens_q": None if self.each else self.cu_seqlens}

    def _look(self, slot: int, q: Tensor) -> Tensor:
        if self.schedule is None:
            self._make_schedule(*q.shape[1::-1])
        if self.beside:
            torch.cuda.current_stream().wait_event(self.beside)
            self.beside = None
        return self.pool.attend(
            slot,
            q,
            self.page_table,
            self.k_lens,
            self.by_slot,
            schedule=self.schedule,
            q_positions=self.positions if self.by_position else None,
            **self._runs(),
        )

    def commit(self) -> None:
        if self.taken is not None:
            self.pool.commit(self.taken.rows, _offsets(self.taken.rows, self.cu_seqlens))


def _offsets(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return torch.arange(len(rows) + 1, device=rows.device, dtype=torch.int32) if cu_seqlens is None else cu_seqlens


def _lanes(tokens: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers (n,) of the tokens, and of the run that each is in; of the last run, if it is in none."""
    token = torch.arange(len(tokens), device=tokens.device, dtype=torch.int32)
    return token, torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=len(cu_seqlens) - 2)


class KVCache:
    """Keys and values of `max_sequences` sequences of a model, for its block and for its own first and last layers.

    kv="recursion_wise": a row for each recursion holds the tokens that reached it. "shared": the rows of the first
    recursion hold every token and serve all recursions. "hybrid": rows as recursion-wise; a token at recursion r sees,
    for each position, what that position wrote at recursion r if it got there, otherwise what it wrote at the first
    recursion (hybrid_base="first") or at the last that it reached ("latest").
    """

    def __init__(
        self,
        config: MoRConfig,
        max_sequences: int,
        num_pages: int,
        end_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """num_pages for the block, end_pages for its own first and last layers."""
        self.recursions, self.kv, self.hybrid_base = config.num_recursions, config.kv, config.hybrid_base
        self.rows_each = 1 if self.kv == "shared" else self.recursions
        length = config.max_position_embeddings
        shape = (page_size, length, config.num_key_value_heads, config.head_dim, dtype, device)
        self.block = PagePool(len(config.recursion_layers[0]), max_sequences * self.rows_each, num_pages, *shape)
        self.ends = PagePool(2, max_sequences, end_pages, *shape) if config.has_own_ends else None
        self.seen: Tensor | None = None
        self.batch_invariant = False  # whether attention of a token is computed without regard to any other
        if self.kv == "hybrid":
            # the slot that a recursion's tokens see at each position, a page table with a page a token; the rows of one
            # sequence more take what padding brings
            self.seen = torch.zeros(max_sequences + 1, self.recursions, length, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that the cache holds."""
        seen = 0 if self.seen is None else self.seen.nbytes
        return self.block.nbytes + (self.ends.nbytes if self.ends else 0) + seen

    def rows(self, sequences: Tensor, recursions: Tensor) -> Tensor:
        """The block's row (R,) that a sequence's tokens grow at a recursion (from 0), -1 where they grow none."""
        if self.kv == "shared":
            return torch.where(recursions == 0, sequences, -1)
        return torch.where(sequences >= 0, sequences * self.recursions + recursions, -1)

    def all_rows(self, sequences: Tensor) -> Tensor:
        """All rows (R, rows a sequence) of sequences (R,) in the block's pool."""
        return sequences[:, None] * self.rows_each + torch.arange(self.rows_each, device=sequences.device)

    def plan(
        self, sequences: Tensor, recursion: int | Tensor, positions: Tensor, cu_seqlens: Tensor | None = None
    ) -> Plan:
        """Plan a pass of the block and take its pages.

        sequences (R,) int64, each at most once, -1 for padding; recursion from 0, or one for each run (R,) int64.
        positions (n,) int64 of the tokens in their sequences, ascending in a run; every token takes recursion 0, so its
        position is also its place in that row. cu_seqlens (R+1,) int32: where the runs begin; None where each is one
        token. Refused, nothing is changed, and on the CPU this raises OutOfPages.
        """
        # or kv="shared" needs no keys of the tokens, but then their queries are projected otherwise
        entering = not isinstance(recursion, int) or recursion == 0 or self.batch_invariant
        recursions = torch.full_like(sequences, recursion) if isinstance(recursion, int) else recursion
        grown = self.rows(sequences, recursions)
        if self.kv == "recursion_wise":
            return self._alone(self._plan(self.block, grown, positions, cu_seqlens))
        lengths, first = self.block.pages.lengths, sequences.clamp(min=0) * self.rows_each
        if self.kv == "shared" and not entering:
            plan = Plan(self.block, positions, cu_seqlens, sequences, lengths[first], self.block.pages.page_table)
        else:
            plan = self._plan(self.block, grown, positions, cu_seqlens)
            assert plan.taken is not None
            new = 1 if cu_seqlens is None else cu_seqlens.diff()
            plan.k_lens = lengths[first] + torch.where((recursions == 0) & (plan.taken.rows >= 0), new, 0)
            plan.rows = sequences
        plan.k_lens = torch.where(sequences >= 0, plan.k_lens, 0).int()
        plan.by_position = True
        if self.kv == "hybrid":
            assert plan.taken is not None
            plan.page_table = self._see(sequences, recursions, positions, cu_seqlens, plan.taken.slots)
            plan.rows, plan.by_slot = grown, True
        return self._alone(plan)

    def plan_ends(self, sequences: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None) -> Plan:
        """Plan the first layer (slot 0 of the pool) or the last (1), which write the same places; commit after both."""
        assert self.ends is not None
        return self._alone(self._plan(self.ends, sequences, positions, cu_seqlens))

    def plan_place(self, positions: Tensor, lines: Tensor, places: Tensor, k_lens: Tensor) -> Plan | None:
        """Plan the first or the last layer for a token of each lane, whose place :func:`ops.advance_` has taken."""
        if self.ends is None:
            return None
        return self._alone(self._placed(self.ends, positions, lines, places, k_lens))

    def plan_pass(
        self, positions: Tensor, recursion: Tensor, line: Tensor, row: Tensor, slot: Tensor, k_lens: Tensor
    ) -> Plan:
        """The same of a pass of the block; see ops.Lanes."""
        shared = self.kv == "shared"
        plan = self._placed(self.block, positions, line if shared else row, slot, k_lens)
        plan.by_position = self.kv != "recursion_wise"
        if self.kv == "hybrid":
            plan.page_table = self._see(line, recursion.clamp(min=0), positions, None, slot)
            plan.k_lens = torch.where(line >= 0, positions + 1, 0).int()
            plan.by_slot = True
        return self._alone(plan)

    @staticmethod
    def _placed(pool: PagePool, positions: Tensor, rows: Tensor, slots: Tensor, k_lens: Tensor) -> Plan:
        taken = ops.Taken(slots, rows, k_lens, None)  # type: ignore[arg-type]  # nobody asks what was refused
        return Plan(pool, positions, None, rows, k_lens, pool.pages.page_table, taken)

    def free(self, sequences: Tensor) -> None:
        """Give back all pages of sequences (R,) int64; -1 is passed over."""
        rows = torch.where(sequences[:, None] >= 0, self.all_rows(sequences), -1)
        self.block.free(rows.flatten())
        if self.ends:
            self.ends.free(sequences)

    @staticmethod
    def _plan(pool: PagePool, rows: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Plan:
        taken = pool.prepare(rows, _offsets(rows, cu_seqlens), len(positions))
        return Plan(pool, positions, cu_seqlens, taken.rows, taken.k_lens, pool.pages.page_table, taken)

    def _alone(self, plan: Plan) -> Plan:
        """If that is wanted, the plan with each token as a lane of its own, and no lane shared out."""
        if self.batch_invariant:
            plan.split = False
            if plan.cu_seqlens is not None:
                token, lane = _lanes(plan.positions, plan.cu_seqlens)
                there = token < plan.cu_seqlens[-1]
                last = plan.k_lens[lane]  # its keys end with the last one that the token sees
                if not plan.by_position:
                    last = last - (plan.cu_seqlens[lane + 1] - 1 - token)
                plan.rows, plan.k_lens = torch.where(there, plan.rows[lane], -1), torch.where(there, last, 0)
                plan.each = True
        return plan

    def _see(
        self, sequences: Tensor, recursions: Tensor, positions: Tensor, cu_seqlens: Tensor | None, slots: Tensor
    ) -> Tensor:
        """Note where the keys stand that count for a position at its own recursion, and for now at later ones.

        Returns the page table of that.
        """
        assert self.seen is not None  # kv="hybrid"
        spare = self.seen.shape[0] - 1
        if cu_seqlens is not None:
            _, lane = _lanes(positions, cu_seqlens)
            sequences, recursions = sequences[lane], recursions[lane]
        later, recursions = torch.arange(self.recursions, device=slots.device), recursions[:, None]
        counts = (later == recursions) | (later > recursions) & ((recursions == 0) | (self.hybrid_base == "latest"))
        counts &= slots[:, None] >= 0
        place = torch.where(counts, sequences[:, None], spare), later.expand_as(counts)
        self.seen[(*place, positions[:, None].expand_as(counts))] = slots[:, None].expand_as(counts).int()
        return self.seen.flatten(0, 1)
