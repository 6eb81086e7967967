"""Continuous depth-wise batching: sequences at different recursions share each call of the block.

A request holds a slot while it runs. At each step every slot that is generating takes one pass of the block, at
whatever recursion its token has reached; where all recursions share their layers this is one call for all slots. Tokens
that have taken their last recursion go on, in the same step, through last layer, head and sampler, and the tokens
sampled go through embedding and first layer, ready for the next step. Prompts are computed in chunks, recursion by
recursion.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from .. import ops
from ..model import MoR
from .cache import KVCache
from .sampler import SamplingParams, log_probabilities, sample
from .text import TextStream


class QueueFull(RuntimeError):
    """As many requests wait as may; step() or cancel() makes room."""


@dataclass(frozen=True)
class Event:
    """A token of a request."""

    request: int
    token: int | None  # None only if the request ends in an error: there was no number among the model's logits
    text: str  # what this token adds to the text; empty while it is held back, and without a tokenizer
    depth: int  # recursions taken by the position whose logits the token was sampled from
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None  # token ids and log-probabilities, likeliest first
    finish_reason: str | None = None  # on a request's last event; see Completion


@dataclass(frozen=True)
class Completion:
    """A request that has ended."""

    prompt: list[int]
    tokens: list[int]  # generated, with the one that ended the request
    text: str | None  # without stop tokens and stop strings; None without a tokenizer
    depths: list[int]  # recursions taken at each position that was computed: all of prompt and tokens but the last
    logprobs: list[float] | None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None
    finish_reason: str  # "stop" (a stop token or string), "length", "cancelled" or "error" (see Event.token)


@dataclass(eq=False)
class _Request:
    id: int
    params: SamplingParams
    seed: int
    prompt_length: int
    tokens: list[int]  # the prompt and what was generated
    text: TextStream | None
    depths: list[int] = field(default_factory=list)  # of the positions computed so far; kept when pages are taken away
    events: list[Event] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = -1  # while it runs
    done: int = 0  # tokens whose keys and values are complete
    in_flight: bool = False  # the newest token is between passes of the block
    recursion: int = 0  # passes that it has taken


@dataclass
class _Tokens:
    """n tokens on their way through the recursions."""

    positions: Tensor  # (n,) int64
    x: Tensor  # (n, D) state
    last: Tensor  # (n,) int64 recursions that the token takes, unless a router lets it go before
    replayed: Tensor  # (n,) bool: `last` was recorded earlier, and no router is asked
    logits: Tensor | None = None  # (n,) score of x by the router of the next recursion: expert-choice, linear routers
    entry: Tensor | None = None  # (n, D) state that entered the first recursion: token-choice
    gates: Tensor | None = None  # (n, Nr) gate at each recursion: token-choice

    def take(self, index: Tensor) -> _Tokens:
        return _Tokens(**{name: value[index] for name, value in self._held()})

    def put(self, index: Tensor, tokens: _Tokens) -> None:
        for name, value in self._held():
            value[index] = getattr(tokens, name)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ((name, value) for name, value in named if value is not None)


class Engine:
    """Generates for many requests at once.

    model: MoR on any device, in any float dtype.
    max_sequences: requests that run at once; others wait.
    num_pages, cache_bytes: size of the cache, as pages of the block or as bytes in all, page tables included; by
        default enough for max_sequences of full length and depth. When pages run out, the youngest request gives its
        own back and is computed anew later, with the recorded depths, so that its output stays the same.
    page_size: tokens a page.
    cache_dtype: of keys and values, by default the model's; or a narrower one, such as torch.float8_e4m3fn, see
        `calibrate`.
    prefill_chunk: most prompt tokens that are computed in one step, beside the running requests' passes.
    tokenizer: anything with decode(ids) -> str, for text and stop strings, and encode(str) -> ids (or an object with
        `.ids`), for prompts that are strings.
    eos_token_id: ends a request. bos_token_id: stands in for an empty prompt; by default eos_token_id.
    max_waiting: requests that may wait.

    Raises ValueError for an argument out of range.
    """

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
        tokenizer=None,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        max_waiting: int = 1024,
    ):
        sizes = {"max_sequences": max_sequences, "page_size": page_size, "prefill_chunk": prefill_chunk}
        sizes["max_waiting"] = max_waiting
        sizes |= {n: v for n, v in (("num_pages", num_pages), ("cache_bytes", cache_bytes)) if v is not None}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
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
        self.cache = self._new_cache(num_pages, cache_bytes, page_size, stored)
        width, recursions = self.config.hidden_size, self.config.num_recursions
        new = functools.partial(torch.zeros, device=self.device)
        self.state = _Tokens(  # of the token in flight in each slot
            positions=new(max_sequences, dtype=torch.int64),
            x=new(max_sequences, width, dtype=dtype),
            last=new(max_sequences, dtype=torch.int64),
            replayed=new(max_sequences, dtype=torch.bool),
        )
        score = torch.promote_types(dtype, torch.float32)
        if self.config.router == "token_choice":
            self.state.entry = new(max_sequences, width, dtype=dtype)
            self.state.gates = new(max_sequences, recursions, dtype=score)
        # linear routers as depth_step_ takes them: those of the model and the auxiliary ones, (Nr, D) each, if any
        self.routers = self.aux_routers = None
        if self.config.router == "expert_choice" and self.config.router_arch == "linear":
            self.state.logits = new(max_sequences, dtype=score)
            self.routers = new(recursions, width, dtype=model.routers[0].weight.dtype)
            self.aux_routers = torch.zeros_like(self.routers) if len(model.aux_routers) else None
        kinds = {"temperature": torch.float64, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
        kinds["seed"] = torch.int64
        self.sampling = {name: new(max_sequences, dtype=kind) for name, kind in kinds.items()}  # by slot

        self.requests: dict[int, _Request] = {}  # submitted and not yet collected
        self.waiting: deque[_Request] = deque()  # oldest first, all younger than those that run
        self.running: list[_Request] = []  # oldest first
        self.free_slots = list(range(max_sequences - 1, -1, -1))
        self._submitted = self._generated = self._preemptions = self._ticks = self._passes = 0
        self._depths = [0] * self.config.num_recursions
        self._events: list[Event] = []  # of the step that is under way

    def _new_cache(self, num_pages, cache_bytes, page_size, dtype) -> KVCache:
        c = self.config
        rows = 1 if c.kv == "shared" else c.num_recursions
        full = self.max_sequences * -(-c.max_position_embeddings // page_size)
        # every token takes a place in the ends and, in the mean, this many in the block
        if c.kv == "shared" or c.router == "none":
            places = rows
        else:
            places = sum(c.capacities) if c.capacities else (rows + 1) / 2

        def new(num_pages, device):
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
        Raises ValueError if the cache isn't float8, or holds tokens.
        """
        if self.cache.block.k_scale is None:
            raise ValueError(f"cache_dtype: expected torch.float8_e4m3fn, to calibrate, got {self.cache.block.k.dtype}")
        if self.running:
            raise ValueError(f"calibrate: expected no running request, got {len(self.running)}")
        probe = Engine(self.model, max_sequences=1, tokenizer=self.tokenizer, bos_token_id=self.bos_token_id)
        pools = [(self.cache.block, probe.cache.block), (self.cache.ends, probe.cache.ends)]
        pools = [(pool, other) for pool, other in pools if pool is not None]
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

        prompt: token ids, or a string if there is a tokenizer; empty if a bos or eos token id is known.
        Raises ValueError for a prompt or parameters that can't be served, QueueFull if max_waiting requests wait.
        """
        params = params or SamplingParams()
        tokens = self._prompt_ids(prompt)
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
        request = _Request(
            id=self._submitted,
            params=params,
            seed=int(torch.randint(2**63 - 1, ())) if params.seed is None else params.seed,
            prompt_length=len(tokens),
            tokens=tokens,
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
        )
        self._submitted += 1
        self.requests[request.id] = request
        self.waiting.append(request)
        return request.id

    def _prompt_ids(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, since the engine has no tokenizer, got a string")
            encoded = self.tokenizer.encode(prompt)
            prompt = getattr(encoded, "ids", encoded)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(f"prompt: expected token ids or a string, got {prompt!r}") from None
        if not tokens:
            if self.bos_token_id is None:
                raise ValueError("prompt: expected at least one token, since no bos or eos token id is known, got none")
            tokens = [self.bos_token_id]
        for i, token in enumerate(tokens):
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"prompt[{i}]: expected a token id in [0, {self.config.vocab_size}), got {token}")
        return tokens

    def cancel(self, request: int) -> Completion:
        """End a request that waits or runs, and collect what it has generated."""
        if self._find(request).finish_reason is None:
            self._finish(self.requests[request], "cancelled")
        return self.collect(request)

    def collect(self, request: int) -> Completion:
        """The outcome of a request that has ended; the engine forgets it. Raises ValueError if it hasn't ended."""
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
            logprobs=None if r.params.logprobs is None else [e.logprob for e in events],
            top_logprobs=None if r.params.logprobs is None else [e.top_logprobs for e in events],
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
            params = [params] * len(prompts)
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

    def metrics(self) -> dict:
        """Counts since the engine was made, and what it holds now.

        tokens generated, ticks (steps that had work), occupancy (mean share of the slots that took a pass in a tick),
        depth_histogram (positions computed that took 1, 2, ... recursions), preemptions; running, waiting,
        pages_in_use and pages of block and own ends together, cache_bytes.
        """
        pools = [pool for pool, _ in self._pages_for([])]
        pages = sum(pool.num_pages for pool in pools)
        return {
            "tokens": self._generated,
            "ticks": self._ticks,
            "occupancy": self._passes / max(self._ticks * self.max_sequences, 1),
            "depth_histogram": list(self._depths),
            "preemptions": self._preemptions,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "pages_in_use": pages - sum(int(pool.pages.free_count) for pool in pools),
            "pages": pages,
            "cache_bytes": self.cache.nbytes,
        }

    # A step

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Advance every running request: a chunk of the prompts, then one pass of the block for each generating slot.

        Returns the tokens that came out, of all requests. Without work it does nothing.
        """
        self._admit()
        if self.running:
            self._ticks += 1
            for stacked, routers in ((self.routers, self.model.routers), (self.aux_routers, self.model.aux_routers)):
                if stacked is not None:  # anew, since weights may have been loaded between steps
                    torch.cat([router.weight for router in routers], out=stacked)
            self._prefill()
            self._decode()
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Give slots to waiting requests, in order, while the pages would do for all that is still to be computed."""
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            pending = [len(r.tokens) for r in (*self.running, request) if not r.in_flight]
            if self.running and any(need > int(pool.pages.free_count) for pool, need in self._pages_for(pending)):
                break
            self.waiting.popleft()
            request.slot = self.free_slots.pop()
            self.running.append(request)
            for name, values in self.sampling.items():
                values[request.slot] = request.seed if name == "seed" else getattr(request.params, name)

    def _pages_for(self, lengths: list[int]):
        """For each pool, with what sequences of these lengths may take of it: every token at full depth."""
        pages = sum(-(-n // self.cache.block.page_size) for n in lengths)
        yield self.cache.block, pages * self.cache.rows_each
        if self.cache.ends:
            yield self.cache.ends, pages

    def _prefill(self) -> None:
        """Compute the next tokens of the prompts, oldest first; a prompt that is complete yields its first token."""
        counts, budget = {}, self.prefill_chunk  # tokens by request
        for r in self.running:
            if not r.in_flight and budget:
                counts[r] = min(budget, len(r.tokens) - r.done)
                budget -= counts[r]

        def lacking(requests):  # as much as they may need, so that no page is missing half-way through the recursions
            slots, sizes = self._ints(r.slot for r in requests), self._ints(counts[r] for r in requests)
            rows = self.cache.all_rows(slots)
            return self.cache.block.lacks(rows.flatten(), sizes.repeat_interleave(rows.shape[1])) or (
                self.cache.ends is not None and self.cache.ends.lacks(slots, sizes)
            )

        requests = self._make_room(list(counts), lacking)
        if not requests:
            return
        parts = [slice(r.done, r.done + counts[r]) for r in requests]
        recorded = [depth for r, part in zip(requests, parts) for depth in (r.depths + [0] * counts[r])[part]]
        slots, sizes = self._ints(r.slot for r in requests), self._ints(counts[r] for r in requests)
        tokens = self._enter(
            self._ints(token for r, part in zip(requests, parts) for token in r.tokens[part]),
            self._ints(position for part in parts for position in range(part.start, part.stop)),
            self._ints(recorded),
            slots,
            _offsets(sizes),
        )
        run = torch.repeat_interleave(torch.arange(len(requests), device=self.device), sizes)
        active, depths = torch.arange(len(run), device=self.device), torch.zeros_like(run)
        for recursion in range(self.config.num_recursions):
            sizes_left = torch.bincount(run[active], minlength=len(requests))
            left = sizes_left > 0
            part, lanes = tokens.take(active), slots[left]
            goes_on = self._pass(part, lanes, torch.full_like(lanes, recursion), _offsets(sizes_left[left]))
            tokens.put(active, part)
            depths[active] += 1
            active = active[goes_on]
            if not len(active):
                break
        x = self._leave(tokens, slots, _offsets(sizes))

        ends = sizes.cumsum(0)
        for r, end in zip(requests, ends.tolist()):
            self._record(r, depths[end - counts[r] : end].tolist())
        complete = [i for i, r in enumerate(requests) if r.done == len(r.tokens)]
        self._emit([requests[i] for i in complete], x[ends[complete] - 1])

    def _decode(self) -> None:
        """One pass of the block for each token in flight, and the next token where it was the last pass."""

        def lacking(requests):
            slots, recursions = self._ints(r.slot for r in requests), self._ints(r.recursion for r in requests)
            return self.cache.block.lacks(self.cache.rows(slots, recursions), torch.ones_like(slots))

        requests = self._make_room([r for r in self.running if r.in_flight], lacking)
        if not requests:
            return
        slots = self._ints(r.slot for r in requests)
        tokens = self.state.take(slots)
        goes_on = self._pass(tokens, slots, self._ints(r.recursion for r in requests))
        self.state.put(slots, tokens)
        self._passes += len(requests)
        leaving = []
        for i, (r, on) in enumerate(zip(requests, goes_on.tolist())):
            r.recursion += 1
            if not on:
                leaving.append(i)
                self._record(r, [r.recursion])
                r.in_flight = False
        if leaving:
            index = self._ints(leaving)
            x = self._leave(tokens.take(index), slots[index])
            self._emit([requests[i] for i in leaving], x)

    # Tokens on their way through the model: n of them, in R runs, of slots (R,), that begin at cu_seqlens (R+1,); where
    # there is none, each run is one token

    def _enter(
        self, ids: Tensor, positions: Tensor, recorded: Tensor, slots: Tensor, cu_seqlens: Tensor | None = None
    ) -> _Tokens:
        """Embedding and first layer; recorded (n,) depths, 0 for none."""
        x = self.model.embed_tokens(ids)
        if self.cache.ends:
            plan = self.cache.plan_ends(slots, positions, cu_seqlens)
            x = self.model.first_layer(x, positions, functools.partial(plan.attend, 0))
        replayed, chosen = recorded > 0, self.config.num_recursions
        logits = entry = gates = None
        if self.routers is not None:
            logits = self.model.routers[0](x)[:, 0]
        if self.config.router == "token_choice":
            _, depths, probs = self.model.choose_depths(x[None])
            chosen, entry, gates = depths[0], x.clone(), self.config.alpha * probs[0]
        return _Tokens(positions, x, torch.where(replayed, recorded, chosen), replayed, logits, entry, gates)

    def _pass(
        self, tokens: _Tokens, slots: Tensor, recursions: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Take tokens through the block once, each run at its own recursion (R,) from 0, and update their state.

        Returns which of the n tokens take the next recursion as well.
        """
        model, config = self.model, self.config
        recursion = recursions
        if cu_seqlens is not None:
            recursion = torch.repeat_interleave(recursions, cu_seqlens.diff(), output_size=len(tokens.x))
        update = self._block(tokens.x, tokens.positions, slots, recursions, recursion, cu_seqlens)
        if self.routers is not None:
            return ops.depth_step_(
                tokens.x, update, tokens.logits, recursion, self.routers, last=tokens.last, replayed=tokens.replayed,
                aux_weight=self.aux_routers, activation=config.router_activation, alpha=config.alpha,
                temperature=config.temperature, residual=config.residual,
            )  # fmt: skip
        everyone = torch.arange(len(recursion), device=self.device)
        goes_on = recursion + 1 < tokens.last
        if config.router == "expert_choice":
            gates = self._at_recursions(model.expert_gates, recursion, tokens.x)
            tokens.x = ops.scatter_back(tokens.x, update, everyone, gates, residual=config.residual)
            following = (recursion + 1).clamp(max=config.num_recursions - 1)
            goes_on &= tokens.replayed | self._at_recursions(model.goes_on, following, tokens.x)
        elif config.router == "token_choice":
            gates = tokens.gates.gather(1, recursion[:, None]).squeeze(1)
            every_step = config.gate == "every_step"
            state = ops.scatter_back(tokens.x, update, everyone, gates if every_step else None, residual="none")
            left = ops.scatter_back(tokens.entry, state, everyone, None if every_step else gates)
            tokens.x = torch.where(goes_on[:, None], state, left)
        else:
            tokens.x = update
        return goes_on

    def _block(self, x, positions, slots, recursions, recursion, cu_seqlens) -> Tensor:
        """f of tokens (n, D) at recursion (n,): one call where the recursions share all layers, otherwise one each."""
        present = recursions.unique().tolist()
        if len(present) > 1 and "cycle" not in self.config.sharing:
            out = torch.empty_like(x)
            for r in present:  # several recursions at once: decoding, with one token a run
                of = recursion == r
                out[of] = self._block(x[of], positions[of], slots[of], recursions[of], recursion[of], cu_seqlens)
            return out
        plan = self.cache.plan(slots, recursions, positions, cu_seqlens, entering=0 in present)
        out = self.model.block(x, recursion if len(present) > 1 else present[0], positions, plan.attend)
        plan.commit()
        return out

    @staticmethod
    def _at_recursions(function: Callable[[int, Tensor], Tensor], recursion: Tensor, x: Tensor) -> Tensor:
        """function(r, x) (n,) for tokens x (n, D) at different recursions (n,)."""
        present, which = recursion.unique(return_inverse=True)
        return torch.stack([function(r, x) for r in present.tolist()]).gather(0, which[None])[0]

    def _leave(self, tokens: _Tokens, slots: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Last layer; the tokens' keys and values are then complete. Returns normalised states (n, D), for the head."""
        if not self.cache.ends:
            return self.model.last_layer(tokens.x, tokens.positions, None)
        plan = self.cache.plan_ends(slots, tokens.positions, cu_seqlens)
        x = self.model.last_layer(tokens.x, tokens.positions, functools.partial(plan.attend, 1))
        plan.commit()
        return x

    def _emit(self, requests: list[_Request], x: Tensor) -> None:
        """Choose the next token of each request from the last state x (m, D) of its newest, and feed it in or end."""
        if not requests:
            return
        slots = self._ints(r.slot for r in requests)
        logits = self.model.head(x)
        settings = {name: values[slots] for name, values in self.sampling.items()}
        chosen = sample(logits, **settings, position=self._ints(len(r.tokens) for r in requests))
        top = max((r.params.logprobs for r in requests if r.params.logprobs is not None), default=None)
        if top is not None:
            own, values, ids = (t.tolist() for t in log_probabilities(logits, chosen.clamp(min=0), top))
        going_on = []
        for i, (r, token) in enumerate(zip(requests, chosen.tolist())):
            wanted, logprob, likeliest = r.params.logprobs, None, None
            if wanted is not None:
                logprob, likeliest = own[i], tuple(zip(ids[i][:wanted], values[i][:wanted]))
            text, reason = self._advance(r, token)
            event = Event(r.id, token if token >= 0 else None, text, r.depths[-1], logprob, likeliest, reason)
            r.events.append(event)
            self._events.append(event)
            if reason is None:
                going_on.append(r)
            else:
                self._finish(r, reason)
        self._feed(going_on)

    def _advance(self, r: _Request, token: int) -> tuple[str, str | None]:
        """Add a sampled token to a request: the text that becomes certain, and why the request ends, if it does."""
        if token < 0:
            return r.text.flush() if r.text else "", "error"
        r.tokens.append(token)
        self._generated += 1
        text, reason = "", None
        if token in r.params.stop_token_ids or (token == self.eos_token_id and not r.params.ignore_eos):
            reason = "stop"
        elif r.text:
            text = r.text.push(token)
            reason = "stop" if r.text.stopped else None
        if reason is None:
            full = len(r.tokens) - r.prompt_length == r.params.max_tokens
            # the newest token would have no position
            reason = "length" if full or len(r.tokens) > self.config.max_position_embeddings else None
        return text + r.text.flush() if reason and r.text else text, reason

    def _feed(self, requests: list[_Request]) -> None:
        """Take the newest token of each request to the door of the block."""

        def lacking(requests):
            slots = self._ints(r.slot for r in requests)
            return self.cache.ends is not None and self.cache.ends.lacks(slots, torch.ones_like(slots))

        requests = self._make_room(requests, lacking)
        if not requests:
            return
        slots = self._ints(r.slot for r in requests)
        ids, positions = self._ints(r.tokens[-1] for r in requests), self._ints(len(r.tokens) - 1 for r in requests)
        tokens = self._enter(ids, positions, torch.zeros_like(ids), slots)
        self.state.put(slots, tokens)
        for r in requests:
            r.in_flight, r.recursion = True, 0

    # Slots and pages

    def _make_room(self, requests: list[_Request], lacking: Callable[[list[_Request]], bool]) -> list[_Request]:
        """Take pages from the youngest running requests until those asked for no longer lack any; returns who is left.

        The oldest is never taken from: alone it fits, which submit made sure of.
        """
        while requests and lacking(requests):
            youngest = self.running[-1]
            self._release(youngest)
            youngest.done, youngest.in_flight = 0, False
            self.waiting.appendleft(youngest)
            self._preemptions += 1
            requests = [r for r in requests if r.slot >= 0]
        return requests

    def _release(self, r: _Request) -> None:
        self.cache.free(self._ints([r.slot]))
        self.free_slots.append(r.slot)
        self.running.remove(r)
        r.slot = -1

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
            self._depths[depth - 1] += 1

    def _ints(self, values) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
