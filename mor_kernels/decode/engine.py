"""Continuous depth-wise batching: sequences at different recursions share each call of the block.

A request holds a slot while it runs. In each tick every slot that is generating takes one pass of the block, at
whatever recursion its token has reached; where all recursions share their layers this is one call for all slots. Tokens
that have taken their last recursion go on, in the same tick, through last layer, head and sampler, and the tokens
sampled go through embedding and first layer, ready for the next one. Prompts but for their newest token are computed in
chunks, recursion by recursion.

The device does this by itself (program.py): on CUDA the host launches a tick while the ones before it are under
way, and reads what came out of them later, from pinned memory. It keeps accounts of the pages that could have been
taken in the meantime, and only where these might not suffice, it waits.
"""

from __future__ import annotations

import bisect
import heapq
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..files import as_value_error
from ..model import MoR
from ..ops.advance._fields import NOTHING
from .cache import KVCache, PagePool
from .program import TICKS, Lane, Program
from .sampler import SamplingParams
from .text import TextStream, Tokenizer

SMALL = 128  # slots of a tick up to which the time between two launches counts beside it
AHEAD = 3  # launches that may be under way when the host waits for the oldest
FEW = 32  # slots up to which fewer in last layer, head and first layer would take as long


class QueueFull(RuntimeError):
    """As many requests wait as may; step() or cancel() makes room."""


class Event(NamedTuple):
    """A token of a request."""

    request: int
    token: int | None  #: None only if the request ends in an error: there was no number among the model's logits
    text: str  #: what this token adds to the text; empty while it is held back, and without a tokenizer
    depth: int  #: recursions taken by the position whose logits the token was sampled from
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None  #: token ids and log-probabilities, likeliest first
    finish_reason: str | None = None  #: on a request's last event; see Completion


@dataclass(frozen=True)
class Completion:
    """A request that has ended."""

    prompt: list[int]
    tokens: list[int]  #: generated, with the one that ended the request
    text: str | None  #: without stop tokens and stop strings; None without a tokenizer
    depths: list[int]  #: recursions taken at each position that was computed: all of prompt and tokens but the last
    logprobs: list[float] | None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None
    finish_reason: str  #: "stop" (a stop token or string), "length", "cancelled" or "error" (see Event.token)


@dataclass(eq=False, slots=True)
class _Request:
    id: int
    params: SamplingParams
    seed: int
    prompt_length: int
    end: int  # tokens at which it ends
    tokens: list[int]  # the prompt and what was generated
    stops: frozenset[int]  # tokens that end it
    text: TextStream | None
    depths: list[int] = field(default_factory=list)  # of the positions computed so far; kept when pages are taken away
    events: list[Event] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = -1  # while it runs
    launched: int = 0  # tokens whose computation in chunks was launched
    done: int = 0  # tokens whose keys and values are known to be complete
    in_flight: bool = False  # the newest token was handed to the ticks
    plain: bool = False  # neither text nor log-probabilities are wanted

    @property
    def pending(self) -> int:
        """Tokens that are yet to be launched in chunks: all but the newest, until ticks take over."""
        return 0 if self.in_flight else len(self.tokens) - 1 - self.launched


@dataclass
class _Flight:
    """A launch that is under way, and where it leaves what came out."""

    host: list[np.ndarray]
    there: torch.cuda.Event | None
    slots: np.ndarray
    serials: np.ndarray  # ids of the requests in the slots: they may have ended meanwhile, and a slot be another's
    counts: np.ndarray | int  # tokens that the slots' rows may grow by
    ticks: tuple[np.ndarray, ...] = ()  # their records; none of a chunk

    def is_over(self) -> bool:
        return self.there is None or self.there.query()


class _Durations:
    """How often something took how long, in bins of which each is a twentieth longer than the one before."""

    SHORTEST, RATIO, BINS = 1e-6, 1.05, 400  # to more than a minute

    def __init__(self) -> None:
        self.counts = np.zeros(self.BINS, np.int64)

    def add(self, seconds: np.ndarray) -> None:
        bins = np.log(np.maximum(seconds / self.SHORTEST, 1)) / math.log(self.RATIO)
        np.add.at(self.counts, np.minimum(bins.astype(int), self.BINS - 1), 1)

    def percentile(self, percent: float) -> float | None:
        """Seconds, to a twentieth; None where nothing was counted."""
        if not (total := self.counts.sum()):
            return None
        return self.SHORTEST * self.RATIO ** int(np.searchsorted(self.counts.cumsum(), total * percent / 100))


_new_event = tuple.__new__  # Event's own takes twice as long
_WAITS, _FED = -1, -2
_LATELY = 50  # ticks


class Engine:
    """Generates for many requests at once.

    Args:
        model: MoR on any device, in any float dtype. Its weights may change in place, by load_state_dict, but stay
            where they are.
        max_sequences: requests that run at once; others wait.
        num_pages: size of the cache, as pages of the block; by default enough for max_sequences of full length and
            depth. When pages run out, the youngest request gives its own back and is computed anew later, with the
            recorded depths, so that its output stays the same.
        cache_bytes: the same as bytes in all, page tables included.
        page_size: tokens a page.
        cache_dtype: of keys and values, by default the model's; or a narrower one, such as torch.float8_e4m3fn, see
            :meth:`calibrate`.
        prefill_chunk: most prompt tokens that are computed in one step, beside the running requests' passes.
        tokenizer: anything with decode(ids) -> str, for text and stop strings, and encode(str) -> ids (or an object
            with `.ids`), for prompts that are strings.
        eos_token_id: ends a request.
        bos_token_id: stands in for an empty prompt; by default eos_token_id.
        max_waiting: requests that may wait.
        batch_invariant: what a request gets doesn't depend, bit for bit, on what runs beside it or on pages being taken
            away, in 16 bits as well: all launches have one size, max_sequences (prefill_chunk too), and no row of keys
            is shared out among programs. Few sequences, long rows and long prompts take longer then. Otherwise products
            of other sizes may be rounded in another way, so that in 16 bits a choice between near equals can turn.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    _recorded: Callable[[Tensor, Tensor], Tensor] | None = None  # see Program

    def __init__(
        self,
        model: MoR,
        *,
        max_sequences: int = 32,
        num_pages: int | None = None,
        cache_bytes: int | None = None,
        page_size: int = 16,
        cache_dtype: torch.dtype | None = None,
        prefill_chunk: int = 512,
        tokenizer: Tokenizer | None = None,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        max_waiting: int = 1024,
        batch_invariant: bool = False,
    ) -> None:
        sizes = {"max_sequences": max_sequences, "page_size": page_size, "prefill_chunk": prefill_chunk}
        sizes["max_waiting"] = max_waiting
        sizes |= {n: v for n, v in (("num_pages", num_pages), ("cache_bytes", cache_bytes)) if v is not None}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if not isinstance(batch_invariant, bool):
            raise ValueError(f"batch_invariant: expected True or False, got {batch_invariant!r}")
        if num_pages is not None and cache_bytes is not None:
            raise ValueError("cache_bytes: expected None beside num_pages, got both")
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.max_sequences, self.prefill_chunk, self.max_waiting = max_sequences, prefill_chunk, max_waiting
        self.eos_token_id = eos_token_id
        self.bos_token_id = eos_token_id if bos_token_id is None else bos_token_id

        embedding = model.embed_tokens.weight
        self.device, dtype = embedding.device, embedding.dtype
        stored = dtype if cache_dtype is None else cache_dtype
        narrower = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        if stored != dtype and not (stored in narrower and stored.itemsize < dtype.itemsize):
            raise ValueError(f"cache_dtype: expected {dtype} or a narrower float dtype, got {stored}")
        if batch_invariant and self.device.type != "cuda":
            raise ValueError(f"batch_invariant: expected a model on CUDA, whose kernels it is of, got {self.device}")
        self.cache = self._new_cache(num_pages, cache_bytes, page_size, stored)
        self.cache.batch_invariant = self.batch_invariant = batch_invariant
        if batch_invariant:
            self.prefill_chunk = max_sequences
        on_gpu = self.device.type == "cuda"  # where a launch costs something, and the first few tokens nothing
        self._ticks_each, self._few = (TICKS, FEW) if on_gpu else (1, 1)
        self.program = Program(model, self.cache, max_sequences, TICKS * (AHEAD + 2), self._recorded)

        self.requests: dict[int, _Request] = {}  # submitted and not yet collected
        self.waiting: deque[_Request] = deque()  # oldest first, all younger than those that run
        self.running: dict[int, _Request] = {}  # by id, oldest first
        self._filling: dict[int, _Request] = {}  # those of them whose prompt isn't complete
        self._wanting: dict[int, int] = {}  # log-probabilities that running requests want
        self.free_slots = list(range(max_sequences))  # a heap: ticks are as large as the highest slot at work
        self._ended: list[int] = []  # slots that the device still holds pages for
        self._by_themselves: set[int] = set()  # slots that it has freed
        self._flights: deque[_Flight] = deque()  # oldest first
        # by slot: the request and its id, whether ticks have taken it over; places known to be taken in each row of the
        # block and, in the last column, of its own ends; the recursion that its token takes next, _WAITS before the
        # last layer, _FED before the first one; and how many places more each row may have got by now
        self._at: list[_Request | None] = [None] * max_sequences
        self._serials, self._in_flight = np.full(max_sequences, -1), np.zeros(max_sequences, bool)
        self._lengths = np.zeros((max_sequences, self.cache.rows_each + (self.cache.ends is not None)), np.int64)
        self._recursion = np.full(max_sequences, _WAITS)
        self._leaving = 1.0  # of tokens that take a pass, the share for which it is the last, lately
        self._ahead = np.zeros(max_sequences, np.int64)
        self._shown = np.full(max_sequences, np.nan)  # by slot, when the last token came out, in seconds
        self._submitted = self._generated = self._preemptions = self._ticks = self._passes = 0
        self._depths = np.zeros(self.config.num_recursions + 1, np.int64)  # tokens by their depth
        self._intervals = _Durations()  # between tokens of a request
        self._events: list[Event] = []  # of the step that is under way

    def _new_cache(self, num_pages: int | None, cache_bytes: int | None, page_size: int, dtype: torch.dtype) -> KVCache:
        c = self.config
        rows = 1 if c.kv == "shared" else c.num_recursions
        full = self.max_sequences * -(-c.max_position_embeddings // page_size)
        # every token takes a place in the ends and, in the mean, this many in the block
        places: float
        if c.kv == "shared" or c.router == "none":
            places = rows
        else:
            places = sum(c.capacities) if c.capacities else (rows + 1) / 2

        def new(num_pages: int, device: torch.device | str) -> KVCache:
            end_pages = min(full, int(num_pages / places) + 1)
            return KVCache(c, self.max_sequences, num_pages, end_pages, page_size, dtype, device)

        if cache_bytes is not None:  # the most pages that fit, by the bytes of caches without memory
            sizes = range(full * rows + 1)
            num_pages = bisect.bisect_right(sizes, cache_bytes, key=lambda n: new(n, "meta").nbytes) - 1
            if num_pages < 1:
                least = new(1, "meta").nbytes
                raise ValueError(f"cache_bytes: expected at least {least}, for a page, got {cache_bytes}")
        return new(full * rows if num_pages is None else min(num_pages, full * rows), self.device)

    def calibrate(self, prompts: Sequence[Sequence[int] | str]) -> None:
        """Set the scales of a float8 cache, one a layer and head, by the largest keys and values of these prompts.

        Without it they are 1, which serves numbers up to 448. Larger numbers are written as the largest.

        Raises:
            ValueError: the cache isn't float8, or holds tokens.
        """
        if self.cache.block.k_scale is None:
            raise ValueError(f"cache_dtype: expected torch.float8_e4m3fn, to calibrate, got {self.cache.block.k.dtype}")
        if self.running:
            raise ValueError(f"calibrate: expected no running request, got {len(self.running)}")
        probe = Engine(self.model, max_sequences=1, tokenizer=self.tokenizer, bos_token_id=self.bos_token_id)
        pools = [(self.cache.block, probe.cache.block)]
        if self.cache.ends is not None and probe.cache.ends is not None:
            pools.append((self.cache.ends, probe.cache.ends))
        for _, other in pools:
            other.k.zero_()
            other.v.zero_()
        for i, prompt in enumerate(prompts):
            probe.generate([prompt], SamplingParams(max_tokens=1))
            for pool, other in pools:
                pool.calibrate(other, anew=i == 0)

    # Requests

    def submit(self, prompt: Sequence[int] | str, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id.

        Args:
            prompt: token ids, or a string if there is a tokenizer; empty if a bos or eos token id is known.
            params: how its tokens are chosen; default ``SamplingParams()``.

        Raises:
            ValueError: prompt or parameters can't be served; the message says why.
            QueueFull: max_waiting requests wait.
        """
        params = params or SamplingParams()
        tokens = self.prompt_ids(prompt)
        limit, vocabulary = self.config.max_position_embeddings, self.config.vocab_size
        if len(tokens) > limit:
            raise ValueError(f"prompt: expected at most {limit} tokens (max_position_embeddings), got {len(tokens)}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected an engine with a tokenizer, got one without")
        if params.logprobs is not None and params.logprobs > vocabulary:
            raise ValueError(f"logprobs: expected at most {vocabulary} (vocab_size), got {params.logprobs}")
        longest = min(len(tokens) + params.max_tokens - 1, limit)
        for pool, need in self._pages_for([longest]):
            if need > pool.num_pages:
                raise ValueError(
                    f"prompt: expected a request that fits in the cache alone; {longest} tokens may take {need} pages, "
                    f"got {pool.num_pages}"
                )
        if len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"max_waiting: {self.max_waiting} requests wait already")
        stops = set(params.stop_token_ids)
        if self.eos_token_id is not None and not params.ignore_eos:
            stops.add(self.eos_token_id)
        request = _Request(
            id=self._submitted,
            params=params,
            seed=int(torch.randint(2**63 - 1, (), device="cpu")) if params.seed is None else params.seed,
            prompt_length=len(tokens),
            # the newest token of all would have no position
            end=min(len(tokens) + params.max_tokens, self.config.max_position_embeddings + 1),
            tokens=tokens,
            stops=frozenset(stops),
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            plain=self.tokenizer is None and params.logprobs is None,
        )
        self._submitted += 1
        self.requests[request.id] = request
        self.waiting.append(request)
        return request.id

    def prompt_ids(self, prompt: Sequence[int] | str) -> list[int]:
        """The tokens that a prompt stands for, as `submit` takes them; any thread may ask. Raises ValueError, as it."""
        ids: Sequence[Any] = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, since the engine has no tokenizer, got a string")
            with as_value_error("prompt: expected a text that the tokenizer can encode, got"):
                encoded = self.tokenizer.encode(prompt)
            ids = getattr(encoded, "ids", encoded)
        try:
            tokens = [operator.index(token) for token in ids]
        except TypeError:
            raise ValueError(f"prompt: expected token ids or a string, got {ids!r}") from None
        if not tokens:
            if self.bos_token_id is None:
                raise ValueError("prompt: expected at least one token, since no bos or eos token id is known, got none")
            tokens = [self.bos_token_id]
        for i, token in enumerate(tokens):
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"prompt[{i}]: expected a token id in [0, {self.config.vocab_size}), got {token}")
        return tokens

    def cancel(self, request: int) -> Completion:
        """End a request that waits or runs, and collect what it has generated.

        Raises:
            ValueError: there is no such request, or it was collected.
        """
        if self._find(request).finish_reason is None:
            self._finish(self.requests[request], "cancelled")
        return self.collect(request)

    def collect(self, request: int) -> Completion:
        """The outcome of a request that has ended; the engine forgets it.

        Raises:
            ValueError: it hasn't ended, or there is none.
        """
        r = self._find(request)
        if r.finish_reason is None:
            raise ValueError(f"request: expected one that has ended, got {request}, which has not")
        del self.requests[request]
        events = [e for e in r.events if e.token is not None]
        held = r.text.flush() if r.text else ""  # of a request that was cancelled
        return Completion(
            prompt=r.tokens[: r.prompt_length],
            tokens=r.tokens[r.prompt_length :],
            text=None if r.text is None else "".join(e.text for e in r.events) + held,
            depths=r.depths,
            logprobs=None if r.params.logprobs is None else [e.logprob for e in events if e.logprob is not None],
            top_logprobs=(
                None if r.params.logprobs is None else [e.top_logprobs for e in events if e.top_logprobs is not None]
            ),
            finish_reason=r.finish_reason,
        )

    def _find(self, request: int) -> _Request:
        if request not in self.requests:
            raise ValueError(f"request: expected the id of a request that was not collected, got {request!r}")
        return self.requests[request]

    def stream(self, prompt: Sequence[int] | str, params: SamplingParams | None = None) -> Iterator[Event]:
        """Submit a request, step the engine, and yield the request's tokens as they come; others go on beside it.

        Raises what submit does, when the iteration begins. Closing the iterator early cancels the request.
        """
        request = self._find(self.submit(prompt, params))
        given = 0
        try:
            while given < len(request.events) or request.finish_reason is None:
                if given < len(request.events):
                    yield request.events[given]
                    given += 1
                else:
                    self.step()
        finally:
            if request.id in self.requests:
                self.cancel(request.id)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Serve all prompts, with one set of parameters or one each, and return their completions in order.

        Raises what submit does; then none of the prompts is served.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params: expected one, or one for each of {len(prompts)} prompts, got {len(params)}")
        ids = []
        try:
            for prompt, chosen in zip(prompts, params):
                while len(self.waiting) >= self.max_waiting:
                    self.step()
                ids.append(self.submit(prompt, chosen))
            while any(self.requests[i].finish_reason is None for i in ids):
                self.step()
        except BaseException:
            for i in ids:
                self.cancel(i)
            raise
        return [self.collect(i) for i in ids]

    def metrics(self) -> dict[str, Any]:
        """Counts since the engine was made, and what it holds now.

        tokens generated, ticks (launches that advanced every slot), occupancy (mean share of the slots that took a pass
        in a tick), depth_histogram (positions computed that took 1, 2, ... recursions), preemptions, token_seconds
        (p50 and p99 of the time between two tokens of a request, to a twentieth; None before there are any); running,
        waiting, pages_in_use and pages of block and own ends together, cache_bytes. Waits for the device.
        """
        with self._on_device():
            self._drain()
            self._flush()
        pools = [pool for pool, _ in self._pages_for([])]
        pages = sum(pool.num_pages for pool in pools)
        return {
            "tokens": self._generated,
            "ticks": self._ticks,
            "occupancy": self._passes / max(self._ticks * self.max_sequences, 1),
            "depth_histogram": self._depths[1:].tolist(),
            "preemptions": self._preemptions,
            "token_seconds": {f"p{percent}": self._intervals.percentile(percent) for percent in (50, 99)},
            "running": len(self.running),
            "waiting": len(self.waiting),
            "pages_in_use": pages - sum(int(pool.pages.free_count) for pool in pools),
            "pages": pages,
            "cache_bytes": self.cache.nbytes,
        }

    # A step

    def step(self) -> list[Event]:
        """Advance every running request: a chunk of the prompts, then one pass of the block for each generating slot.

        Returns the tokens that have come out by now, of all requests; on CUDA those of a launch come a step or two
        later. Without work it does nothing.
        """
        with torch.no_grad(), self._on_device():
            while self._flights and (len(self._flights) >= AHEAD or self._flights[0].is_over()):
                self._land(self._flights.popleft())
            self._admit()
            launched = self._prefill() + self._tick()
            if self._flights and (self.device.type == "cpu" or not launched):
                self._drain() if self.device.type == "cpu" else self._land(self._flights.popleft())
        events, self._events = self._events, []
        return events

    def _on_device(self) -> torch.cuda.device:
        return torch.cuda.device(self.device if self.device.type == "cuda" else -1)

    def _drain(self) -> None:
        """Wait for all that is under way."""
        while self._flights:
            self._land(self._flights.popleft())

    def _flush(self) -> None:
        """Have the device free the slots of requests that ended."""
        if self._ended:
            self.program.end(self._ended)
            self._ended = []

    def _admit(self) -> None:
        """Give slots to waiting requests, in order, while the pages would do for all that is still to be computed, and
        a page for each one that runs."""
        if not self.waiting or not self.free_slots:
            return
        used = self._pages_used(self._ahead[:, None])  # whatever is admitted holds nothing yet
        pending = [r.pending for r in self._filling.values()]
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            more = self._pages_for([*pending, len(request.tokens)])
            if self.running and any(a + b + len(self.running) > pool.num_pages for a, (pool, b) in zip(used, more)):
                break
            self.waiting.popleft()
            request.slot = slot = heapq.heappop(self.free_slots)
            self._at[slot], self._serials[slot] = request, request.id
            self.running[request.id] = self._filling[request.id] = request
            pending.append(request.pending)
            if request.params.logprobs is not None:
                self._wanting[request.id] = request.params.logprobs

    def _pages_for(self, lengths: list[int]) -> Iterator[tuple[PagePool, int]]:
        """For each pool, with what sequences of these lengths may take of it: every token at full depth."""
        pages = sum(-(-n // self.cache.block.page_size) for n in lengths)
        yield self.cache.block, pages * self.cache.rows_each
        if self.cache.ends:
            yield self.cache.ends, pages

    def _pages_used(self, growth: np.ndarray | int) -> tuple[int, ...]:
        """Pages of each pool once the rows have grown by so many tokens each."""
        pages = -(-(self._lengths + growth) // self.cache.block.page_size)
        block = self.cache.rows_each
        return (int(pages[:, :block].sum()), *pages[:, block:].sum(0).tolist())

    def _fits(self, growth: np.ndarray) -> bool:
        pools = (self.cache.block, self.cache.ends)
        return all(pool is None or used <= pool.num_pages for used, pool in zip(self._pages_used(growth), pools))

    def _prefill(self) -> bool:
        """Launch the next tokens of the prompts, oldest first; a prompt that is complete joins the ticks."""
        if not self._filling:
            return False

        def chosen() -> tuple[dict[_Request, int], np.ndarray]:
            counts: dict[_Request, int] = {}
            budget = self.prefill_chunk
            for r in self._filling.values():
                if r.pending and budget:
                    counts[r] = min(budget, r.pending)
                    budget -= counts[r]
            more = np.zeros(self.max_sequences, np.int64)
            more[[r.slot for r in counts]] = list(counts.values())
            return counts, more

        counts, more = chosen()
        while counts and not self._fits((self._ahead + more)[:, None]):
            if self._flights:
                self._land(self._flights.popleft())
            else:
                self._preempt()
            counts, more = chosen()
        self._flush()
        if counts:
            runs = []
            for r, count in counts.items():
                first, after = r.launched, r.launched + count
                recorded = (r.depths[first:after] + [0] * count)[:count]
                runs.append((r.slot, first, r.tokens[first:after], recorded))
                r.launched = after
            size = self._size(sum(counts.values()), self.prefill_chunk)
            depths = self.program.prefill(size, runs)
            self._launched([depths], np.array([r.slot for r in counts]), np.array(list(counts.values())))
        ready = [r for r in self._filling.values() if not r.pending]
        if ready:
            self.program.begin(
                [Lane(r.slot, r.tokens[-1], len(r.tokens) - 1, r.end, r.seed, r.params, tuple(r.stops)) for r in ready]
            )
            for r in ready:
                del self._filling[r.id]
                r.in_flight = self._in_flight[r.slot] = True
                self._recursion[r.slot] = _FED
        return bool(counts)

    def _size(self, number: int, most: int) -> int:
        """What a launch for so many is rounded up to: a power of 2, one and a half of one, or the most there can be."""
        if self.batch_invariant:
            return most
        power = 1 << (number - 1).bit_length()
        return min(power * 3 // 4 if power >= 16 and number <= power * 3 // 4 else power, most)

    def _tick(self) -> bool:
        """Launch a pass of the block for each token in flight, and the next token where it is the last pass."""
        while True:
            slots = np.flatnonzero(self._in_flight)
            if not len(slots):
                return False
            logprobs = max(self._wanting.values(), default=None)
            size = self._size(int(slots[-1]) + 1, self.max_sequences)
            count = self._ticks_each if logprobs is None and size <= SMALL else 1
            if self._fits((self._ahead + count * self._in_flight)[:, None]):
                break
            if self._flights:
                self._land(self._flights.popleft())
            elif self._fits(self._growth()):
                count = 1
                break
            else:
                self._preempt()
        self._flush()
        told = self.program.tick(size, self._places(size, len(slots), logprobs), logprobs, count)
        found = [] if logprobs is None else self.program.logprobs_of(size, logprobs)
        self._launched(found, slots, count, told)
        return True

    def _places(self, size: int, slots: int, logprobs: int | None) -> int:
        """For how many lanes there is room in last layer, head and first layer: as many as leave in the mean, and a
        standard deviation. The few that find none wait for a tick."""
        if self.batch_invariant or logprobs is not None or size <= self._few:
            return size
        share = self._leaving
        return min(size, self._size(math.ceil(slots * share + math.sqrt(slots * share * (1 - share))), size))

    def _growth(self) -> np.ndarray:
        """By how much each row may grow in a tick, once nothing is under way."""
        growth = np.zeros_like(self._lengths)
        for slot in np.flatnonzero(self._in_flight):
            r = self._at[slot]
            assert r is not None
            deeper, rows = self._recursion[slot] + 1, self.cache.rows_each
            if 0 < deeper < rows:
                growth[r.slot, deeper] = 1
            if self._recursion[slot] == _FED or len(r.tokens) + 1 < r.end:
                growth[r.slot, 0] = 1
                growth[r.slot, rows:] = 1
        return growth

    def _launched(
        self,
        found: Sequence[Tensor],
        slots: np.ndarray,
        counts: np.ndarray | int,
        ticks: tuple[np.ndarray, ...] = (),
    ) -> None:
        host: list[np.ndarray] = []
        there = None
        if self.device.type == "cpu":
            host = [t.numpy() for t in found]
        else:
            for t in found:
                pinned = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
                host.append(pinned.copy_(t, non_blocking=True).numpy())
            there = torch.cuda.Event()
            there.record()
        self._ahead[slots] += counts
        self._flights.append(_Flight(host, there, slots, self._serials[slots], counts, ticks))

    def _land(self, flight: _Flight) -> None:
        """Learn what came out of a launch."""
        if flight.there:
            flight.there.synchronize()
        self._ahead[flight.slots] -= flight.counts
        if not flight.ticks:
            self._land_chunk(flight)
        for record in flight.ticks:
            self._land_tick(flight, record)

    def _live(self, flight: _Flight) -> np.ndarray:
        return self._serials[flight.slots] == flight.serials

    def _land_chunk(self, flight: _Flight) -> None:
        assert isinstance(flight.counts, np.ndarray)
        end, live = 0, self._live(flight)
        for slot, count, there in zip(flight.slots, flight.counts, live):
            depths = flight.host[0][end : end + count]
            end += count
            if there:
                rows = range(self.cache.rows_each)
                self._lengths[slot, : len(rows)] += [int((depths > row).sum()) for row in rows]
                self._lengths[slot, len(rows) :] += count
                self._record(self._at[slot], depths.tolist())

    def _land_tick(self, flight: _Flight, record: np.ndarray) -> None:
        self._ticks += 1
        slots, rows = flight.slots, self.cache.rows_each
        tokens, depths, following = record[slots].T
        live, came = self._live(flight), tokens != NOTHING
        passed = (depths > 0) & ~(came & live & (self._recursion[slots] == _WAITS))
        self._passes += int(passed.sum())
        if passed.any():
            through = passed & (came | (following < 0))
            self._leaving += (through.sum() / passed.sum() - self._leaving) / _LATELY
        took_part = live & ((depths > 0) | (following >= 0))
        self._recursion[slots[took_part]] = following[took_part]
        placed = live & (following >= 0) & (following < rows)
        self._lengths[slots[placed], following[placed]] += 1
        self._lengths[slots[live & (following == 0)], rows:] += 1
        exits = came & live
        slots, depths, tokens, following = slots[exits], depths[exits], tokens[exits], following[exits]
        self._depths += np.bincount(depths, minlength=len(self._depths))
        now, before = time.perf_counter(), self._shown[slots]
        self._shown[slots] = now
        self._intervals.add(now - before[before == before])  # a NaN has no token before
        self._by_themselves = {*slots[following < 0].tolist()}
        requests, events = self._at, self._events
        for slot, token, depth in zip(slots.tolist(), tokens.tolist(), depths.tolist()):
            r = requests[slot]
            r.depths.append(depth)
            r.done += 1
            if r.plain and token >= 0 and token not in r.stops and len(r.tokens) + 1 < r.end:
                # as _emit would, in less time: with a thousand sequences it is as long as the device's
                r.tokens.append(token)
                event = _new_event(Event, (r.id, token, "", depth, None, None, None))
                r.events.append(event)
                events.append(event)
                self._generated += 1
            else:
                self._emit(r, token, depth, flight.host, slot)

    def _emit(self, r: _Request, token: int, depth: int, host: list[np.ndarray], slot: int) -> None:
        """Add a token that was sampled to its request, and end that if it is the last."""
        logprob = likeliest = reason = None
        text = ""
        if token >= 0:
            r.tokens.append(token)
            self._generated += 1
        if (wanted := r.params.logprobs) is not None:
            values, ids = host[0][slot], host[1][slot]
            logprob = float(values[0])
            likeliest = tuple(zip(ids[:wanted].tolist(), values[1 : 1 + wanted].tolist()))
        if token < 0:
            reason = "error"
        elif token in r.stops:
            reason = "stop"
        else:
            if r.text:
                text = r.text.push(token)
                reason = "stop" if r.text.stopped else None
            if reason is None and len(r.tokens) >= r.end:
                reason = "length"
        if reason and r.text:
            text += r.text.flush()
        event = Event(r.id, token if token >= 0 else None, text, depth, logprob, likeliest, reason)
        r.events.append(event)
        self._events.append(event)
        if reason:
            self._finish(r, reason)

    # Slots and pages

    def _preempt(self) -> None:
        """Take its pages from the youngest running request; nothing is under way. The oldest is never taken from: alone
        it fits, which submit made sure of."""
        youngest = self.running[next(reversed(self.running))]
        self._release(youngest)
        youngest.launched = youngest.done = 0
        youngest.in_flight = False
        self.waiting.appendleft(youngest)
        self._preemptions += 1

    def _release(self, r: _Request) -> None:
        slot, r.slot = r.slot, -1
        self._lengths[slot], self._recursion[slot], self._shown[slot] = 0, _WAITS, np.nan
        self._at[slot], self._serials[slot], self._in_flight[slot] = None, -1, False
        if slot in self._by_themselves:
            self._by_themselves.remove(slot)
        else:
            self._ended.append(slot)
        heapq.heappush(self.free_slots, slot)
        del self.running[r.id]
        self._filling.pop(r.id, None)
        self._wanting.pop(r.id, None)

    def _finish(self, r: _Request, reason: str) -> None:
        r.finish_reason = reason
        if r.slot >= 0:
            self._release(r)
        else:
            self.waiting.remove(r)

    def _record(self, r: _Request, depths: list[int]) -> None:
        """Note the depths of the positions just computed; those computed again have theirs already."""
        new = depths[max(len(r.depths) - r.done, 0) :]
        r.done += len(depths)
        r.depths += new
        for depth in new:
            self._depths[depth] += 1
