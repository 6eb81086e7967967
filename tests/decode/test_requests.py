"""Requests in any order of calls: each gets what it gets alone, once, and nothing of it stays."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from mor_kernels.decode import QueueFull, SamplingParams
from mor_kernels.decode.program import TICKS
from tests.decode.models import KINDS, VOCABULARY, Letters, assert_nothing_held, poisoned, random_prompts, tiny
from tests.strategies import DEVICES, run_machine

EOS, LIMIT, PAGE = 3, 11, 3
PROMPTS = random_prompts((1, 2, 6, LIMIT), 1)
SAMPLED = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 2.0, "seed": 2**62, "top_k": 9},
    {"temperature": 1.5, "seed": 3, "top_p": 0.8, "min_p": 0.02},
]


@functools.cache
def model_of(number, dtype):
    fields = {"num_recursions": 3, **KINDS[number]}
    layers = fields["num_recursions"] + 2
    return tiny(3, **fields, num_hidden_layers=layers, max_position_embeddings=LIMIT)[0].to(DEVICES[-1], dtype)


@functools.cache
def alone(number, dtype, sequences, prompt, sampled):
    """All that an idle engine makes of a prompt."""
    engine = new_engine(number, dtype, max_sequences=sequences)
    params = SamplingParams(max_tokens=LIMIT, logprobs=3, ignore_eos=True, **SAMPLED[sampled])
    return engine.generate([PROMPTS[prompt]], params)[0]


def new_engine(number, dtype, **options):
    exact = dtype == torch.bfloat16  # otherwise a choice between near equals could turn
    return poisoned(model_of(number, dtype), page_size=PAGE, eos_token_id=EOS, batch_invariant=exact, **options)


def expected(whole, params):
    """Tokens, text and reason of a request, by what it would have been without an end."""
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    for n, token in enumerate(whole.tokens, 1):
        tokens = whole.tokens[:n]
        if token in stops:
            return tokens, Letters().decode(tokens[:-1]), "stop"
        text = Letters().decode(tokens)
        if ends := [(text.find(s) + len(s), text.find(s)) for s in params.stop if s in text]:
            return tokens, text[: min(ends)[1]], "stop"
        if n == params.max_tokens:
            break
    return tokens, text, "length"


some_params = st.fixed_dictionaries({
    "max_tokens": st.integers(1, LIMIT + 2),
    "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=12),  # more than the device knows
    "stop": st.lists(st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=2), max_size=2),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 3),
})  # fmt: skip
requests = {"prompt": st.integers(0, len(PROMPTS) - 1), "sampled": st.integers(0, len(SAMPLED) - 1)}
requests["params"] = some_params


class Requests(RuleBasedStateMachine):
    submitted = Bundle("submitted")

    def __init__(self):
        super().__init__()
        self.work = {}  # by id: prompt, sampled, params; of those that were not collected
        self.given, self.count, self.streams = {}, 0, []

    @initialize(
        number=st.integers(0, len(KINDS) - 1), half=st.booleans(), sequences=st.sampled_from([3, 1]),
        chunk=st.sampled_from([1, 3, 32]), few=st.sampled_from([True, True, False]),
        ticks=st.sampled_from([1, TICKS]), texts=st.booleans(),
    )  # fmt: skip
    def new(self, number, half, sequences, chunk, few, ticks, texts):
        dtype = torch.float64 if DEVICES[-1] == "cpu" else torch.bfloat16 if half else torch.float32
        self.alone = functools.partial(alone, number, dtype, sequences)
        rows = 1 if KINDS[number].get("kv") == "shared" else KINDS[number].get("num_recursions", 3)
        pages = -(-LIMIT // PAGE) * rows + 1 if few else None
        options = {"max_sequences": sequences, "num_pages": pages, "prefill_chunk": chunk, "max_waiting": 3}
        self.engine = new_engine(number, dtype, tokenizer=Letters() if texts else None, **options)
        self.engine._ticks_each = ticks
        if few and not self.engine.batch_invariant:  # tokens have to wait for the last layer
            self.engine._places = lambda size, slots, logprobs: size if logprobs is not None else -(-size // 2)
        self.step_engine, self.engine.step = self.engine.step, self.step

    def step(self):
        """Whoever asks for a step; each event comes out of one."""
        events = self.step_engine()
        for event in events:
            given = self.given.setdefault(event.request, [])
            assert not given or given[-1].finish_reason is None
            given.append(event)
        return events

    def drawn(self, prompt, sampled, params):
        if self.engine.tokenizer is None:
            params = {**params, "stop": ()}
        return PROMPTS[prompt], SamplingParams(**params, **SAMPLED[sampled])

    def check(self, drawn, completion, events):
        prompt, params = self.drawn(*drawn)
        whole = self.alone(*drawn[:2])
        tokens, text, reason = expected(whole, params)
        n, cancelled = len(completion.tokens), completion.finish_reason == "cancelled"
        if cancelled:
            assert n < len(tokens)
            tokens, text, reason = tokens[:n], Letters().decode(tokens[:n]), None
        if self.engine.tokenizer is None:
            text = None
        assert (completion.prompt, completion.tokens, completion.text) == (prompt, tokens, text)
        assert completion.finish_reason == (reason or "cancelled")
        assert completion.depths == whole.depths[: len(completion.depths)]
        assert cancelled or len(completion.depths) == len(prompt) + n - 1
        # otherwise sums in another order, in fp32 of logits that are some tens large
        slack = {"rel": 1e-6} if self.engine.device.type == "cpu" else {"abs": 1e-3}
        near = (lambda x: x) if self.engine.batch_invariant else functools.partial(pytest.approx, **slack)
        if params.logprobs is None:
            assert completion.logprobs is completion.top_logprobs is None
        else:
            assert completion.logprobs == near(whole.logprobs[:n])
            assert len(completion.top_logprobs) == n
            for top, most in zip(completion.top_logprobs, whole.top_logprobs):
                assert [value for _, value in top] == near([value for _, value in most[: params.logprobs]])
        assert [e.token for e in events] == tokens
        assert [e.depth for e in events] == completion.depths[len(prompt) - 1 :][:n]
        assert [e.finish_reason for e in events] == ([None] * (n - 1) + [reason] if n else [])
        if reason:
            assert "".join(e.text for e in events) == (text or "")

    def check_out(self, i, how):
        pending = [e for e in self.engine._events if e.request == i]  # metrics() has learnt of them
        self.check(self.work.pop(i), how(i), self.given.pop(i, []) + pending)

    @rule(target=submitted, **requests)
    def submit(self, prompt, sampled, params):
        if len(self.engine.waiting) == 3:
            with pytest.raises(QueueFull):
                self.engine.submit(*self.drawn(prompt, sampled, params))
            return multiple()
        i = self.engine.submit(*self.drawn(prompt, sampled, params))
        assert i == self.count
        self.count += 1
        self.work[i] = prompt, sampled, params
        return i

    @rule(prompt=st.sampled_from([[0] * (LIMIT + 1), [VOCABULARY], [-1], ["a"]]))
    def submit_nonsense(self, prompt):
        with pytest.raises(ValueError, match="prompt"):
            self.engine.submit(prompt)

    @rule(steps=st.integers(1, 9))
    def go_on(self, steps):
        for _ in range(steps):
            self.engine.step()

    @rule(i=consumes(submitted))
    def cancel(self, i):
        self.check_out(i, self.engine.cancel)

    @rule(i=consumes(submitted))
    def collect(self, i):
        if self.engine.requests[i].finish_reason is None:
            with pytest.raises(ValueError, match="expected one that has ended"):
                self.engine.collect(i)
            while self.engine.requests[i].finish_reason is None:
                self.engine.step()
        self.check_out(i, self.engine.collect)
        with pytest.raises(ValueError, match="not collected"):
            self.engine.collect(i)

    @rule(drawn=st.lists(st.tuples(*requests.values()), max_size=3))
    def generate(self, drawn):
        prompts, params = zip(*[self.drawn(*each) for each in drawn]) if drawn else ((), ())
        completions = self.engine.generate(prompts, params)
        for i, (each, completion) in enumerate(zip(drawn, completions, strict=True), self.count):
            self.check(each, completion, self.given.pop(i))
        self.count += len(drawn)

    @precondition(lambda self: len(self.engine.waiting) < 3)
    @rule(**requests, most=st.integers(0, LIMIT))
    def stream(self, prompt, sampled, params, most):
        """And close it after so many events, or where it ends."""
        ids, params = self.drawn(prompt, sampled, params)
        stream = self.engine.stream(ids, params)
        events = list(itertools.islice(stream, most))
        begun = bool(most)  # a generator that was asked for nothing has submitted nothing
        stream.close()
        whole = self.alone(prompt, sampled)
        assert [e.token for e in events] == expected(whole, params)[0][: len(events)]
        self.given.pop(self.count, None)
        self.count += begun

    @rule()
    def measure(self):
        metrics = self.engine.metrics()
        pools = [pool for pool in (self.engine.cache.block, self.engine.cache.ends) if pool is not None]
        owned = 0
        for pool in pools:
            state = pool.pages
            free = state.free_pages[: int(state.free_count)].tolist()
            mine = [p for row, n in zip(state.page_table.tolist(), state.owned.tolist()) for p in row[:n]]
            assert sorted(free + mine) == list(range(pool.num_pages))
            owned += len(mine)
        assert metrics["pages_in_use"] == owned
        assert (metrics["running"], metrics["waiting"]) == (len(self.engine.running), len(self.engine.waiting))

    @invariant()
    def accounts(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        assert set(engine.requests) == set(self.work)
        live = {i for i, r in engine.requests.items() if r.finish_reason is None}
        assert {*engine.running, *(r.id for r in engine.waiting)} == live
        assert {*engine._filling, *engine._wanting} <= {*engine.running}
        assert len(engine.running) + len(engine.free_slots) == engine.max_sequences
        ages = [*engine.running, *(r.id for r in engine.waiting)]
        assert ages == sorted(ages)  # pages are taken from the youngest, so the oldest always gets on

    def teardown(self):
        if hasattr(self, "engine"):
            for i in [*self.work]:
                self.check_out(i, self.engine.cancel)
            assert_nothing_held(self.engine)
            assert not (self.engine.requests or self.engine._filling or self.engine._wanting or self.engine._flights)
        super().teardown()


@pytest.mark.machine
def test_each_gets_what_it_gets_alone():
    run_machine(Requests, number=4, steps=15)
