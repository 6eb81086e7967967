"""What the device does: a tick of all slots, and chunks of prompts.

Nothing here waits for the device, and sizes depend on no value, so that on CUDA each size becomes a graph: the host
launches one for a whole tick. A lane is the state of a slot, and what isn't at work in a launch is padding (-1).
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..graphs import captured, without_workspace
from ..model import MoR
from ..ops._numeric import wide
from ..ops.advance._fields import FIELDS
from .cache import KVCache, Plan
from .sampler import SamplingParams, log_probabilities

TICKS = 2  # of a launch, at the most: from one graph to the next it takes longer than from a kernel to the next
SETTINGS = ("seed", "top_k", "temperature", "top_p", "min_p")  # of sampling, for each slot
STOPS = 8  # tokens that end a request which the device knows; the host knows them all


@dataclass
class _Tokens:
    """n tokens on their way through the recursions."""

    positions: Tensor  # (n,) int64
    x: Tensor  # (n, D) state
    last: Tensor | None = None  # (n,) int64 recursions that the token takes, unless a router lets it go before
    replayed: Tensor | None = None  # (n,) bool: `last` was recorded earlier, and no router is asked
    logits: Tensor | None = None  # (n,) score of x by the router of the next recursion: expert-choice, linear routers
    entry: Tensor | None = None  # (n, D) state that entered the first recursion: token-choice
    gates: Tensor | None = None  # (n, Nr) gate at each recursion: token-choice

    def map(self, function: Callable[[Tensor], Tensor]) -> _Tokens:
        each = (getattr(self, f.name) for f in fields(self))
        return _Tokens(*(None if t is None else function(t) for t in each))  # type: ignore[arg-type]  # as they are here

    def put(self, index: Tensor | slice, tokens: _Tokens) -> None:
        for f in fields(self):
            if (value := getattr(self, f.name)) is not None:
                value[index] = getattr(tokens, f.name)

    def enter(self, lanes: Tensor, tokens: _Tokens) -> None:
        """The lanes (m,) get the tokens, but for x, logits and replayed; those of -1 go to a row more that there is."""
        for name in ("last", "entry", "gates"):
            if (value := getattr(self, name)) is not None:
                value[torch.where(lanes >= 0, lanes, len(value) - 1)] = getattr(tokens, name)


@dataclass
class Lane:
    """What the host says of a slot that begins: the newest token, whose predecessors are in the cache."""

    slot: int
    token: int
    position: int
    end: int  # tokens of the sequence at which the request ends
    seed: int
    params: SamplingParams
    stops: tuple[int, ...]


class Program:
    """State of `max_sequences` slots, and the functions that advance it."""

    def __init__(
        self,
        model: MoR,
        cache: KVCache,
        max_sequences: int,
        records: int,
        recorded: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """records: ticks whose records are kept. recorded(positions, seeds) -> depths, all (n,) int64 from 1: of tokens
        that ticks compute, for a benchmark that wants them other than the router does."""
        self.recorded = recorded
        self.everyone = torch.ones(max_sequences, dtype=torch.bool, device=model.embed_tokens.weight.device)
        # whether tokens at different recursions share a call of the block
        self.mixed = model.config.num_recursions == 1 or "cycle" in model.config.sharing
        self.model, self.cache, self.config = model, cache, model.config
        embedding = model.embed_tokens.weight
        self.device, dtype = embedding.device, embedding.dtype
        width, recursions = self.config.hidden_size, self.config.num_recursions
        new = functools.partial(torch.zeros, device=self.device)
        lanes = ops.Lanes.new(max_sequences, STOPS + len(SETTINGS), self.device)
        self.columns = lanes.table  # state of the lanes, then settings of sampling, floats as their bits
        self.columns[-len(SETTINGS) :] = 0
        self.lanes, self.settings = lanes._replace(table=lanes.table[: -len(SETTINGS)]), lanes.table[-len(SETTINGS) :]
        self.tokens = _Tokens(  # that each slot has between two passes
            positions=self.lanes.row("position"),
            x=new(max_sequences, width, dtype=dtype),
        )
        score = wide(dtype)
        if self.config.router == "token_choice":
            self.tokens.last = new(max_sequences + 1, dtype=torch.int64)
            self.tokens.entry = new(max_sequences + 1, width, dtype=dtype)
            self.tokens.gates = new(max_sequences + 1, recursions, dtype=score)
        # linear routers as depth_step_ takes them: those of the model and the auxiliary ones, (Nr, D) each, if any
        self.routers: Tensor | None = None
        self.aux_routers: Tensor | None = None
        if self.config.router == "expert_choice" and self.config.router_arch == "linear" and self.config.gate != "none":
            self.tokens.logits = new(max_sequences, dtype=score)
            self.routers = new(recursions, width, dtype=model.routers[0].weight.dtype)
            self.aux_routers = torch.zeros_like(self.routers) if len(model.aux_routers) else None
        self.router_versions: list[tuple[int, int]] | None = None
        self.ticks = 0  # launched
        # in turn of each tick, see ops.advance_
        self.told = torch.zeros(records, max_sequences, 3, dtype=torch.int64, device="cpu")
        self.record = self.told.to(self.device)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.told = self.told.pin_memory()
                self.record = torch.as_tensor(_Mapped(self.told), device=self.device)
        self.logprobs: dict[int, tuple[Tensor, Tensor]] = {}  # by their number; see `tick`
        self.chunks: dict[int, _Chunk] = {}  # by size
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph | None] = {}
        self.pool: Any = None  # the handle of their memory
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # Requests come and go between two launches

    def begin(self, lanes: list[Lane]) -> None:
        """The tokens given are taken to the door of the block in the next tick."""
        columns = []
        for lane in lanes:
            p = lane.params
            stops = (*lane.stops[:STOPS], *[-1] * (STOPS - len(lane.stops)))
            floats = struct.pack("3d", p.temperature, p.top_p, p.min_p)
            given = {"feed": lane.token, "position": lane.position, "end": lane.end}
            state = (given.get(name, -1) for name in FIELDS)
            columns.append((*state, *stops, lane.seed, p.top_k, *struct.unpack("3q", floats)))
        numbers = self.ints([*(lane.slot for lane in lanes), *(number for column in columns for number in column)])
        self.columns.index_copy_(1, numbers[: len(lanes)], numbers[len(lanes) :].view(len(lanes), -1).T)

    def end(self, slots: list[int]) -> None:
        """Free slots and their pages, of requests that didn't end by themselves."""
        ended = self.ints(slots)
        self.lanes.table[: FIELDS.index("position")].index_fill_(1, ended, -1)
        self.cache.free(ended)

    def ints(self, values: Iterable[int]) -> Tensor:
        """int64 on the device; nothing waits for it."""
        numbers = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        return numbers.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else numbers

    # Launches

    def tick(self, n: int, leaving: int, logprobs: int | None = None, count: int = 1) -> tuple[np.ndarray, ...]:
        """So many times one pass of the block for slots 0..n-1, and the next token where it was the last, for as many
        as ``leaving`` of them; the others wait.

        Returns the record (S, 3) of each tick on the host, see :func:`ops.advance_`: it is there after the launch,
        and after as many more ticks as records are kept it is another's.
        """

        def ticks() -> None:
            for _ in range(count):
                self._tick(n, leaving, logprobs)

        self._run(("tick", n, leaving, logprobs, count), ticks)
        if self.record.data_ptr() != self.told.data_ptr():  # where the device can't write into the host's memory
            self.told.copy_(self.record, non_blocking=True)
        turns = range(self.ticks, self.ticks + count)
        self.ticks += count
        return tuple(self.told[turn % len(self.told)].numpy() for turn in turns)

    def logprobs_of(self, n: int, number: int) -> tuple[Tensor, Tensor]:
        """After a single tick of n slots that was asked for so many, and until the next: log-probabilities
        (n, 1 + number) of the chosen token and the likeliest ones, whose ids are (n, number)."""
        if number not in self.logprobs:
            slots, score = self.lanes.table.shape[1], wide(self.tokens.x.dtype)
            self.logprobs[number] = (
                torch.zeros(slots, 1 + number, dtype=score, device=self.device),
                torch.zeros(slots, number, dtype=torch.int64, device=self.device),
            )
        values, ids = self.logprobs[number]
        return values[:n], ids[:n]

    def prefill(self, size: int, runs: list[tuple[int, int, list[int], list[int]]]) -> Tensor:
        """Compute up to `size` tokens of prompts. runs: slot, first position, tokens, and recorded depths (0: none).

        Returns (size,) the recursions that each token took, which the next chunk of that size overwrites.
        """
        if size not in self.chunks:
            self.chunks[size] = _Chunk.new(size, min(size, self.lanes.table.shape[1]), self.device)
        chunk = self.chunks[size]
        rows: list[list[int]] = [[], [], []]
        for _, first, tokens, recorded in runs:
            for row, values in zip(rows, (tokens, range(first, first + len(tokens)), recorded)):
                row += values
        padding = [0] * (size - len(rows[0]))
        ends = [0]
        for _, _, tokens, _ in runs:
            ends.append(ends[-1] + len(tokens))
        lanes = len(chunk.slots)
        slots = [slot for slot, *_ in runs] + [-1] * (lanes - len(runs))
        ends += ends[-1:] * (lanes - len(runs))
        numbers = self.ints([*rows[0], *padding, *rows[1], *padding, *rows[2], *padding, *slots, *ends])
        chunk.tokens.copy_(numbers[: 3 * size].view(3, size))
        chunk.slots.copy_(numbers[3 * size : 3 * size + lanes])
        chunk.cu_seqlens.copy_(numbers[3 * size + lanes :])
        self._run(("prefill", size), lambda: self._prefill(chunk))
        return chunk.depths

    def _run(self, key: tuple[Any, ...], function: Callable[[], None]) -> None:
        """Do it; the second time it becomes a graph, since the first one compiles kernels."""
        self._load_routers()
        if self.device.type != "cuda":
            function()
        elif key not in self.graphs:
            with without_workspace():
                function()
            self.graphs[key] = None
        else:
            graph = self.graphs[key]
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with captured(graph, self.pool, self.device):
                    function()
                self.graphs[key], self.pool = graph, graph.pool()
            graph.replay()

    def _load_routers(self) -> None:
        if self.routers is None:
            return
        weights: list[list[Tensor]]
        weights = [[r.weight for r in routers] for routers in (self.model.routers, self.model.aux_routers)]
        versions = [(w.data_ptr(), w._version) for of in weights for w in of]
        if versions != self.router_versions:  # weights may be loaded between two launches
            for stacked, of in zip((self.routers, self.aux_routers), weights):
                if stacked is not None:
                    torch.cat(of, out=stacked)
            self.router_versions = versions

    def _tick(self, n: int, leaving: int, logprobs: int | None) -> None:
        recursion, row, slot, line, position = (
            self.lanes.row(name)[:n] for name in ("recursion", "row", "slot", "line", "position")
        )
        seed = self.settings[0, :n]
        tokens, k_lens = self.tokens.map(lambda t: t[:n]), self.lanes.k_lens[:, :n]
        whole = self.cache.plan_pass(position, recursion, line, row, slot, k_lens[0])
        ends, last = ops.Leaving(self.columns[:, :n], k_lens[1], tokens.x, None), None
        if leaving == n:
            # of tokens that go on the keys are written as well, to a place that is theirs and counts later
            last = self._plan_last(ends)
        self._schedule_beside(n, whole if self.mixed else None, last)
        update = self._block(tokens.x, position, recursion, whole)
        passing = tokens
        if self.recorded:
            passing = replace(tokens, last=self.recorded(position, seed), replayed=self.everyone[:n])
        goes_on = self._pass(passing, recursion, update)
        if leaving < n:
            ends = ops.leave(goes_on, self.lanes._replace(table=self.columns), tokens.x, leaving)
            last = self._plan_last(ends)
            self._schedule_beside(leaving, last)
        position = self._row(ends, "position")
        logits = self.model.head(self.model.serve_last(ends.x, position, last))
        seed, top_k, *floats = ends.columns[-len(SETTINGS) :]
        temperature, top_p, min_p = (t.view(torch.float64) for t in floats)
        chosen = ops.sample(logits, temperature, top_k, top_p, min_p, seed, position)
        if logprobs is not None:
            values, ids = self.logprobs_of(n, logprobs)
            own, top, top_ids = log_probabilities(logits, chosen.clamp(min=0), logprobs)
            values.copy_(torch.cat((own[:, None], top), 1))
            ids.copy_(top_ids)
        pages, end_pages = self.cache.block, self.cache.ends
        ids, positions, lanes, slots, keys = ops.advance_(
            chosen, goes_on, ends.at, self.lanes, self.record, pages.pages,
            None if end_pages is None else end_pages.pages, self.config.num_recursions, pages.page_size,
            shared=self.config.kv == "shared",
        )  # fmt: skip
        first = self.cache.plan_place(positions, lanes, slots, keys)
        self._schedule_beside(leaving, first)
        new = self._enter(ids, positions, None, first)
        self.tokens.enter(lanes, new)
        router = None if self.routers is None else self.routers[0]
        ops.enter_(tokens.x, new.x, lanes, tokens.logits, router, self.config.router_temperature)

    def _plan_last(self, ends: ops.Leaving) -> Plan | None:
        position, line, place = (self._row(ends, name) for name in ("position", "line", "place"))
        return self.cache.plan_place(position, line, place, ends.k_lens)

    @staticmethod
    def _row(ends: ops.Leaving, name: str) -> Tensor:
        return ends.columns[FIELDS.index(name)]

    def _schedule_beside(self, n: int, *plans: Plan | None) -> None:
        # elsewhere the memory would have to be kept longer
        if self.side is not None and torch.cuda.is_current_stream_capturing():
            for plan in filter(None, plans):
                plan.schedule_beside(self.side, self.config.num_attention_heads, n)

    def _prefill(self, chunk: _Chunk) -> None:
        """Recursion by recursion; those that go on move to the front, in order."""
        size, cu_seqlens = chunk.tokens.shape[1], chunk.cu_seqlens
        ids, positions, recorded = chunk.tokens
        each = torch.arange(size, device=self.device)
        ends = None if self.cache.ends is None else self.cache.plan_ends(chunk.slots, positions, cu_seqlens)
        tokens = self._enter(ids, positions, recorded, ends)
        if self.routers is not None:
            tokens.logits = self.model.routers[0](tokens.x)[:, 0]
        tokens = tokens.map(lambda t: torch.cat((t, torch.zeros_like(t[:1]))))  # the one more is padding's
        active, depths = each < cu_seqlens[-1], torch.zeros(size + 1, dtype=torch.int64, device=self.device)
        for recursion in range(self.config.num_recursions):
            before = F.pad(active.cumsum(0), (1, 0))
            order = torch.full((size + 1,), size, device=self.device)
            order[torch.where(active, before[:-1], size)] = each
            order = torch.where(each < before[-1], order[:-1], size)
            if self.device.type == "cpu":  # where that waits for nothing
                order = order[: int(before[-1])]
                if not len(order):
                    break
            part, offsets = tokens.map(operator.itemgetter(order)), before[cu_seqlens.long()].int()
            plan = self.cache.plan(chunk.slots, recursion, part.positions, offsets)
            update = self.model.serve(part.x, recursion, part.positions, plan)
            plan.commit()
            goes_on = self._pass(part, torch.where(order < size, recursion, -1), update)
            tokens.put(order, part)
            depths[order] += 1
            going = torch.zeros(size + 1, dtype=torch.bool, device=self.device)
            going[order] = goes_on & (order < size)
            active = going[:-1]
        self.model.serve_last(tokens.x[:-1], positions, ends)
        if ends:
            ends.commit()
        chunk.depths.copy_(depths[:-1])

    # Tokens on their way through the model

    def _enter(self, ids: Tensor, positions: Tensor, recorded: Tensor | None, plan: Plan | None) -> _Tokens:
        """Embedding and first layer; recorded (n,) depths, 0 for none. The linear router is left to `ops.enter_`."""
        tokens = _Tokens(positions, self.model.serve_first(self.model.embed_tokens(ids), positions, plan))
        if self.config.router == "token_choice":
            assert self.config.alpha is not None  # as MoRConfig stores it
            _, depths, probs = self.model.choose_depths(tokens.x[None])
            tokens.last, tokens.entry, tokens.gates = depths[0], tokens.x.clone(), self.config.alpha * probs[0]
        if recorded is not None:
            chosen = self.config.num_recursions if tokens.last is None else tokens.last
            tokens.replayed = recorded > 0
            tokens.last = torch.where(tokens.replayed, recorded, chosen)
        return tokens

    def _pass(self, tokens: _Tokens, recursion: Tensor, update: Tensor) -> Tensor:
        """Give the tokens at recursion (n,), -1 for padding, what the block made of them.

        Returns (n,) which of them take the next recursion as well.
        """
        model, config = self.model, self.config
        if self.routers is not None:
            assert tokens.logits is not None and config.router_activation is not None and config.alpha is not None
            return ops.depth_step_(
                tokens.x, update, tokens.logits, recursion, self.routers, last=tokens.last, replayed=tokens.replayed,
                aux_weight=self.aux_routers, activation=config.router_activation, alpha=config.alpha,
                temperature=config.router_temperature, residual=config.residual,
            )  # fmt: skip
        everyone, passes = torch.arange(len(recursion), device=self.device), (recursion >= 0)[:, None]
        goes_on = (recursion >= 0) & (recursion + 1 < (config.num_recursions if tokens.last is None else tokens.last))
        recursion = recursion.clamp(min=0)
        if config.router == "expert_choice":
            gates = None if config.gate == "none" else self._at_recursions(model.expert_gates, recursion, tokens.x)
            new = ops.scatter_back(tokens.x, update, everyone, gates, residual=config.residual)
            tokens.x.copy_(torch.where(passes, new, tokens.x))
            following = (recursion + 1).clamp(max=config.num_recursions - 1)
            wanted = self._at_recursions(model.goes_on, following, tokens.x)
            goes_on &= wanted if tokens.replayed is None else tokens.replayed | wanted
        elif config.router == "token_choice":
            assert tokens.gates is not None and tokens.entry is not None
            gates = tokens.gates.gather(1, recursion[:, None]).squeeze(1)
            state = ops.scatter_back(
                tokens.x, update, everyone, gates if config.gate == "every_step" else None, residual="none"
            )
            left = ops.scatter_back(tokens.entry, state, everyone, gates if config.gate == "exit_only" else None)
            tokens.x.copy_(torch.where(passes, torch.where(goes_on[:, None], state, left), tokens.x))
        else:
            tokens.x.copy_(torch.where(passes, update, tokens.x))
        return goes_on

    def _block(self, x: Tensor, positions: Tensor, recursion: Tensor, plan: Plan) -> Tensor:
        """f of tokens (n, D), each at its own recursion (n,): one call where the recursions share all layers, otherwise
        one each."""
        count = self.config.num_recursions
        if self.mixed:
            return self.model.serve(x, 0 if count == 1 else recursion, positions, plan)
        out = torch.zeros_like(x)
        for r in range(count):
            here = recursion == r
            out = torch.where(here[:, None], self.model.serve(x, r, positions, plan.only(here)), out)
        return out

    def _at_recursions(self, function: Callable[[int, Tensor], Tensor], recursion: Tensor, x: Tensor) -> Tensor:
        """function(r, x) (n,) for tokens x (n, D) at different recursions (n,)."""
        each = [function(r, x) for r in range(self.config.num_recursions)]
        return torch.stack(each).gather(0, recursion[None])[0]


@dataclass
class _Chunk:
    """Where a launch of `Program.prefill` finds its tokens and leaves what it found out."""

    tokens: Tensor  # (3, size) int64 ids, positions, recorded depths
    slots: Tensor  # (R,) int64
    cu_seqlens: Tensor  # (R+1,) int32
    depths: Tensor  # (size,) int64

    @classmethod
    def new(cls, size: int, runs: int, device: torch.device) -> _Chunk:
        new = functools.partial(torch.zeros, device=device, dtype=torch.int64)
        return cls(new(3, size), new(runs), torch.zeros(runs + 1, device=device, dtype=torch.int32), new(size))


class _Mapped:
    """Pinned memory for what takes a tensor of the device; if it isn't this device's to write, it makes a copy."""

    def __init__(self, pinned: Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape), "typestr": "<i8", "data": (pinned.data_ptr(), False), "version": 2,
        }  # fmt: skip
