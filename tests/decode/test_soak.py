"""Random load for as long as one likes: what comes out is what each request gets alone, once, and nothing stays.

    python tests/decode/test_soak.py [REQUESTS]   # on CUDA where there is one
"""

import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from mor_kernels.decode import Engine, QueueFull, SamplingParams
from mor_kernels.decode.program import TICKS
from tests.decode.models import KINDS, VOCABULARY, tiny


def drawn(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt, and settings of every kind."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 2, 5, 20]))]
    stops = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 12]))]  # more than the device knows
    return prompt, SamplingParams(
        max_tokens=rng.choice([1, 3, 10, 30]),
        temperature=rng.choice([0, 0, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(1000),
        stop_token_ids=stops,
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, None, 0, 2]),
    )


def soak(model, requests: int, seed: int = 0, compared: int = 20) -> dict:
    """Submit, step, cancel, run out of pages; returns the engine's metrics at the end."""
    rng = random.Random(seed)
    rows = 1 if model.config.kv == "shared" else model.config.num_recursions
    dtype = model.embed_tokens.weight.dtype
    exact = dtype == torch.bfloat16
    options = {"max_sequences": 7, "page_size": 4, "eos_token_id": 3, "batch_invariant": exact}
    engine = Engine(model, num_pages=20 * rows, prefill_chunk=8, max_waiting=9, **options)
    engine._ticks_each = TICKS  # on a CPU, too
    if not exact:  # tokens often have to wait for the last layer
        engine._places = lambda size, slots, logprobs: size if logprobs is not None else -(-size // 2)
    work, streamed, outcomes, submitted = {}, {}, [], 0
    while submitted < requests or engine.requests:
        while submitted < requests and rng.random() < 0.5:
            prompt, params = drawn(rng)
            try:
                i = engine.submit(prompt, params)
            except QueueFull:
                break
            work[i], streamed[i] = (prompt, params), []
            submitted += 1
        if engine.requests and rng.random() < 0.03:
            i = rng.choice(list(engine.requests))
            outcomes.append((*work.pop(i), engine.cancel(i), streamed.pop(i)))
        for event in engine.step():
            if event.request in streamed:  # or it was cancelled after this came out
                streamed[event.request].append(event.token)
                if event.finish_reason:
                    i = event.request
                    outcomes.append((*work.pop(i), engine.collect(i), streamed.pop(i)))
    assert len(outcomes) == requests
    for prompt, params, completion, tokens in outcomes:
        assert completion.prompt == prompt and 0 <= len(completion.tokens) <= params.max_tokens
        assert tokens == completion.tokens  # none lost, none twice
        ended = completion.finish_reason
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {3})
        assert not stops & {*completion.tokens[:-1]}
        assert (ended == "stop") == (bool(completion.tokens) and completion.tokens[-1] in stops)
        assert ended in ("stop", "cancelled") or len(completion.tokens) == params.max_tokens
    for prompt, params, completion, _ in rng.sample(outcomes, min(compared, len(outcomes))):
        (alone,) = Engine(model, **options).generate([prompt], params)
        n = len(completion.tokens)
        assert completion.tokens == alone.tokens[:n]
        assert completion.depths == alone.depths[: len(completion.depths)]
        if params.logprobs is not None:
            # otherwise sums in another order, in fp32 of logits that are some tens large
            slack = {"rel": 1e-6} if dtype == torch.float64 else {"abs": 1e-3}
            assert completion.logprobs == (alone.logprobs[:n] if exact else pytest.approx(alone.logprobs[:n], **slack))
    metrics = engine.metrics()
    assert metrics["pages_in_use"] == metrics["running"] == metrics["waiting"] == 0
    for pool in filter(None, (engine.cache.block, engine.cache.ends)):
        assert int(pool.pages.free_count) == pool.num_pages
        assert sorted(pool.pages.free_pages.tolist()) == list(range(pool.num_pages))
    return metrics


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "-".join(str(v) for v in fields.values()))
def test_random_load(fields):
    """On a GPU with graphs, and in bf16 as well; memory doesn't grow from one load to the next."""
    cuda, (model, _) = torch.cuda.is_available(), tiny(3, **fields)
    if not cuda:
        soak(model, 20, compared=3)
        return
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to("cuda", dtype)
        assert soak(model, 600, compared=20)["preemptions"] > 0
        held = []
        for seed in (1, 2):
            soak(model, 50, seed, compared=0)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
        assert held[1] <= held[0]


if __name__ == "__main__":
    import time

    torch.set_grad_enabled(False)
    count, cuda = int((sys.argv[1:] or ["20000"])[0]), torch.cuda.is_available()
    dtypes = (torch.float32, torch.bfloat16) if cuda else (torch.float64,)
    for fields, dtype in itertools.product(KINDS, dtypes):
        model = tiny(3, **fields)[0].to("cuda" if cuda else "cpu", dtype)
        start = time.perf_counter()
        found = soak(model, count // len(KINDS) // len(dtypes), seed=7, compared=100)
        print(f"{fields}, {dtype}: {time.perf_counter() - start:.0f} s, {found}", flush=True)
