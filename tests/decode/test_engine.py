import contextlib
import gc
from copy import deepcopy

import pytest
import tokenizers
import torch

from mor_kernels import graphs, ops
from mor_kernels.decode import Engine, QueueFull, SamplingParams
from mor_kernels.decode.program import TICKS
from mor_kernels.model.convert import separate
from mor_kernels.ops import _dispatch
from tests.decode.models import (
    VOCABULARY,
    Letters,
    assert_equals_reference,
    assert_nothing_held,
    poisoned,
    random_prompts,
    tiny,
)
from tests.strategies import prefer, targets

EXPERT, TOKEN = {"router": "expert_choice"}, {"router": "token_choice"}
GRID = [
    {"num_recursions": 1},
    {"num_recursions": 1, "sharing": "cycle", "tie_word_embeddings": False},
    {"num_recursions": 2, "kv": "shared"},
    {"num_recursions": 3, "sharing": "sequence", "kv": "hybrid"},
    {"num_recursions": 1, **EXPERT},
    {"num_recursions": 2, "num_hidden_layers": 2, "sharing": "cycle", **EXPERT},
    {**EXPERT, "residual": "delta", "router_activation": "tanh", "alpha": 1.0, "router_temperature": 0.5},
    {**EXPERT, "aux": "router", "router_arch": "mlp", "kv": "shared"},
    {**EXPERT, "router_arch": "wide_mlp", "lora_rank": 2, "recursion_encoding": True},
    {**EXPERT, "lora_rank": 2, "recursion_encoding": True, "sharing": "sequence", "kv": "hybrid"},
    {**EXPERT, "sharing": "middle_sequence", "num_hidden_layers": 8},
    {**EXPERT, "sharing": "sequence", "kv": "shared"},
    {**EXPERT, "share_norms": False, "aux": "router", "router_temperature": 2.0, "router_temperature_at": "state"},
    {**EXPERT, "share_norms": False, "gate": "none", "sharing": "sequence", "lora_rank": 1},
    {**TOKEN, "share_norms": False, "gate": "none", "kv": "shared"},
    {**EXPERT, "sharing": "cycle", "kv": "shared", "router_activation": "none"},
    {**EXPERT, "kv": "hybrid"},
    {**EXPERT, "kv": "hybrid", "hybrid_base": "latest"},
    {**EXPERT, "kv": "hybrid", "hybrid_base": "latest", "sharing": "middle_sequence"},
    TOKEN,
    {**TOKEN, "gate": "every_step", "alpha": 0.7},
    {**TOKEN, "gate": "every_step", "kv": "shared", "router_activation": "sigmoid", "lora_rank": 1},
    {**TOKEN, "balance": "loss_free", "kv": "hybrid", "sharing": "cycle"},
    {**TOKEN, "kv": "hybrid", "hybrid_base": "latest", "gate": "every_step", "router_arch": "mlp"},
    {**TOKEN, "sharing": "sequence", "kv": "shared", "num_recursions": 2, "balance": "loss_free"},
]
STRATEGIES = [
    {**EXPERT, "kv": "recursion_wise"},
    {**EXPERT, "kv": "shared"},
    {**EXPERT, "kv": "hybrid", "hybrid_base": "latest"},
    {**TOKEN, "sharing": "sequence"},
]


def name(fields):
    return "-".join(str(v) for v in fields.values())


def requests(lengths, max_tokens, logprobs):
    params = [
        SamplingParams(max_tokens=m, temperature=i % 2 * 0.9, seed=i, top_k=20 if i == 3 else 0, logprobs=logprobs)
        for i, m in enumerate(max_tokens)
    ]
    return random_prompts(lengths), params


def assert_same(got, want):
    assert [c.tokens for c in got] == [c.tokens for c in want]
    assert [c.depths for c in got] == [c.depths for c in want]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in want]
    for a, b in zip(got, want):
        torch.testing.assert_close(torch.tensor(a.logprobs or []), torch.tensor(b.logprobs or []), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fields", GRID, ids=name)
def test_equals_the_teacher_forced_reference(fields):
    model, reference = tiny(**fields)
    engine = poisoned(model, max_sequences=3, page_size=4, prefill_chunk=7)
    prompts, params = requests((3, 9, 1, 17, 5), (6, 4, 8, 3, 1), VOCABULARY)
    completions = engine.generate(prompts, params)
    for completion, chosen in zip(completions, params):
        assert_equals_reference(reference, completion, chosen)
        assert completion.finish_reason == "length" and len(completion.tokens) == chosen.max_tokens
    if fields.get("router") and fields.get("num_recursions") != 1:
        assert len({depth for c in completions for depth in c.depths}) > 1
    assert_nothing_held(engine)


@pytest.mark.parametrize("fields", STRATEGIES, ids=name)
def test_interleaved_chunked_and_preempted_requests_equal_each_alone(fields):
    model, _ = tiny(1, **fields)
    prompts, params = requests((3, 9, 1, 5, 4), (10, 4, 12, 6, 9), 0)
    alone = []
    for prompt, chosen in zip(prompts, params):
        alone += poisoned(model, max_sequences=1).generate([prompt], chosen)
    rows = 1 if fields.get("kv") == "shared" else 3
    for chunk, pages in ((1, None), (4, 3 * rows)):
        engine = poisoned(model, max_sequences=4, page_size=4, prefill_chunk=chunk, num_pages=pages)
        assert_same(engine.generate(prompts, params), alone)
        assert (engine.metrics()["preemptions"] > 0) == (pages is not None)
        assert_nothing_held(engine)


@pytest.mark.parametrize("fields", [*STRATEGIES, {"router": "none"}], ids=name)
def test_tokens_wait_where_few_places_are_left_at_the_ends(fields):
    """One token a tick passes the last layer."""
    model, _ = tiny(1, **fields)
    prompts, params = requests((3, 9, 1, 5, 4), (6, 3, 7, 4, 5), None)
    alone = []
    for prompt, chosen in zip(prompts, params):
        alone += poisoned(model, max_sequences=1).generate([prompt], chosen)
    for pages in (None, 9):
        engine = poisoned(model, max_sequences=4, page_size=4, num_pages=pages)
        engine._places, waited = lambda *_: 1, 0
        ids = [engine.submit(prompt, chosen) for prompt, chosen in zip(prompts, params)]
        while engine.running or engine.waiting:
            assert len(engine.step()) <= 1
            waited += int((engine.program.lanes.row("waits") >= 0).sum())
        assert waited > 0 or pages  # which keep them from running side by side
        assert_same([engine.collect(i) for i in ids], alone)
        assert_nothing_held(engine)


def test_records_are_copied_from_where_the_host_cannot_read_them():
    model, _ = tiny(1, **EXPERT)
    prompts, params = requests((3, 9, 1), (10, 4, 12), None)
    engine = poisoned(model, max_sequences=2)
    engine.program.record = engine.program.record.clone()
    assert_same(engine.generate(prompts, params), poisoned(model, max_sequences=2).generate(prompts, params))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sequences", [3, 40], ids=["norms inside", "norms handed on"])
@pytest.mark.parametrize("fields", STRATEGIES, ids=name)
def test_fused_layers_in_bf16(monkeypatch, fields, sequences):
    """Their log-probabilities are no further from those of float64 than those of plain bf16 kernels."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "num_attention_heads": 2}
    exact, _ = tiny(2, **fields, **sizes, num_key_value_heads=1)
    with torch.no_grad():  # of the size that training leaves, so that rounding doesn't choose the depths
        for parameter in exact.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.2)
    prompts = random_prompts([1 + i % 3 for i in range(sequences)])
    params = SamplingParams(max_tokens=1, logprobs=VOCABULARY)

    def values(model):
        done = poisoned(model, max_sequences=sequences, page_size=4).generate(prompts, params)
        depths = [c.depths for c in done]
        return depths, torch.tensor([[value for _, value in sorted(c.top_logprobs[0])] for c in done], dtype=float)

    calls, linear = [], ops.decode_linear
    monkeypatch.setattr(ops, "decode_linear", lambda *a, **k: calls.append(k) or linear(*a, **k))
    exact = exact.to("cuda", torch.bfloat16).double()  # the weights that the others have
    depths, want = values(exact)
    assert not calls
    errors = []
    for backend in ("triton", "auto"):
        monkeypatch.setattr(_dispatch, "_default_backend", backend)
        own_depths, got = values(deepcopy(exact).bfloat16())
        same = [a == b for a, b in zip(depths, own_depths)]  # a logit near 0 may turn
        assert sum(same) >= 0.9 * sequences
        errors.append((got - want)[same].square().mean().sqrt().item())
        assert bool(calls) == (backend == "auto")
    assert any("squares" in call for call in calls) == (sequences > 32)
    assert 0 < errors[1] < 1.3 * errors[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_engines_that_are_gone_do_not_disturb_a_capture():
    """What they hold is freed when garbage is collected, here at every opportunity."""
    model = tiny(1, **EXPERT)[0].float().cuda()
    prompts, params = requests((3, 9), (10, 12), 3)
    want = Engine(model).generate(prompts, params)
    thresholds = gc.get_threshold()
    try:
        for _ in range(3):
            gone = Engine(model)
            gone.generate(prompts, params)
            gone.itself = gone
            gc.disable()
            del gone
            engine = Engine(model)
            gc.enable()
            gc.set_threshold(1)
            assert [c.tokens for c in engine.generate(prompts, params)] == [c.tokens for c in want]
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_in_a_capture(monkeypatch, enabled):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "without_workspace", contextlib.nullcontext)
    monkeypatch.setattr(graphs, "side_stream", lambda _: None)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), graphs.captured(None, None, None):
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("fields", STRATEGIES, ids=name)
def test_batch_invariance(monkeypatch, backend, fields):
    """Bit for bit in bf16, with chunks and preemptions where they fall."""
    monkeypatch.setattr(_dispatch, "_default_backend", backend)
    model = tiny(1, **fields)[0].to("cuda", torch.bfloat16)
    prompts, params = requests((3, 9, 1, 5, 4), (10, 4, 12, 6, 9), 3)
    options = {"max_sequences": 4, "page_size": 4, "batch_invariant": True}
    alone = [poisoned(model, **options).generate([p], c)[0] for p, c in zip(prompts, params)]
    rows = 1 if fields.get("kv") == "shared" else 3
    for pages in (None, 3 * rows):
        engine = poisoned(model, **options, num_pages=pages)
        assert engine.generate(prompts, params) == alone
        assert (engine.metrics()["preemptions"] > 0) == (pages is not None)
        assert_nothing_held(engine)


@pytest.mark.parametrize("fields", STRATEGIES, ids=name)
def test_the_whole_context(fields):
    """Prompts beyond half the context, and generation to its last position."""
    model, reference = tiny(3, **{**fields, "max_position_embeddings": 32})
    engine = poisoned(model, max_sequences=2, page_size=4)
    params = SamplingParams(max_tokens=40, logprobs=VOCABULARY)
    for completion in engine.generate(random_prompts((20, 32, 5)), params):
        assert len(completion.prompt) + len(completion.tokens) == 33 and completion.finish_reason == "length"
        assert_equals_reference(reference, completion, params)
    assert_nothing_held(engine)


@pytest.mark.parametrize("length", [15, 16, 17])
def test_page_boundary(length):
    model, reference = tiny(2, **EXPERT)
    engine = Engine(model, page_size=16)
    for pool in (engine.cache.block, engine.cache.ends):
        pool.k.fill_(1e4)
        pool.v.fill_(1e4)
    params = SamplingParams(max_tokens=3, logprobs=VOCABULARY)
    assert_equals_reference(reference, engine.generate(random_prompts([length]), params)[0], params)


def test_one_call_of_the_block_a_step_whatever_the_depths(monkeypatch):
    def run(sharing):
        model, _ = tiny(3, sharing=sharing, **EXPERT)
        calls, serve = [], model.serve
        monkeypatch.setattr(model, "serve", lambda *a: calls.append(deepcopy(a[1])) or serve(*a))
        engine = Engine(model, max_sequences=4)
        for prompt in random_prompts([2, 3, 4, 5]):
            engine.submit(prompt, SamplingParams(max_tokens=8))
        engine.step()
        per_step = []
        while engine.running:
            calls.clear()
            engine.step()
            per_step.append(list(calls))
        return per_step

    steps = run("middle_cycle")
    assert {len(calls) for calls in steps} == {1}
    assert any(isinstance(calls[0], torch.Tensor) and len(calls[0].unique()) == 3 for calls in steps)
    for calls in run("sequence"):
        assert all(isinstance(r, int) for r in calls) and len(set(calls)) == len(calls)


def test_a_step_leaves_the_keys_already_written_alone():
    model, _ = tiny(4, **EXPERT)
    engine = poisoned(model, max_sequences=2, page_size=4)
    engine.submit(random_prompts([6])[0], SamplingParams(max_tokens=5))
    engine.step()
    while engine.running:
        pools = (engine.cache.block, engine.cache.ends)
        before = [(p.k.clone(), p.v.clone()) for p in pools]
        place = engine.program.lanes.row("place").clone()
        engine.step()
        for pool, (k, v) in zip(pools, before):
            written = ~k.isnan()
            if pool is engine.cache.ends:  # the last layer writes those of a token in flight in each tick
                written[1].flatten(0, 1)[place[place >= 0]] = False
            assert torch.equal(pool.k[written], k[written]) and torch.equal(pool.v[written], v[written])


@pytest.fixture
def once(monkeypatch, device, backend):
    """A model of one layer, which every operator of the backend serves, its reference, and how far they may differ: the
    kernels compute in fp32."""
    prefer(monkeypatch, backend)
    dtype, tolerance = (torch.float64, 1e-9) if backend == "eager" else (torch.float32, 1e-4)

    def make(seed, recursions, **fields):
        sizes = {"num_recursions": recursions, "num_hidden_layers": recursions, "sharing": "cycle"}
        model, reference = tiny(seed, **sizes, num_attention_heads=1, num_key_value_heads=1, **fields)
        reference.weights |= separate(model.to(dtype).double().state_dict(), model.config)
        return model.to(device, dtype), reference, tolerance

    return make


@targets("paged_attention")
def test_three_steps_equal_a_prefill_anew(once):
    """One block, two recursions."""
    model, reference, tolerance = once(4, 2, **EXPERT)
    params = SamplingParams(max_tokens=3, logprobs=VOCABULARY)
    stepped = poisoned(model, page_size=4).generate(random_prompts([1]), params)[0]
    assert_equals_reference(reference, stepped, params, tolerance)
    params = SamplingParams(max_tokens=1, logprobs=VOCABULARY)
    anew = poisoned(model, page_size=4).generate([stepped.prompt + stepped.tokens[:2]], params)[0]
    assert anew.tokens == stepped.tokens[2:] and anew.depths == stepped.depths and set(anew.depths) == {1, 2}
    assert anew.logprobs == pytest.approx(stepped.logprobs[2:], rel=tolerance)


@targets("paged_attention")
def test_pages_of_a_finished_sequence_serve_the_next_one(once):
    """Which takes them in the next tick, while the device has ticks of the first one before it."""
    model, reference, tolerance = once(4, 2, **TOKEN)
    params = SamplingParams(max_tokens=2, logprobs=VOCABULARY)
    engine = poisoned(model, max_sequences=2, page_size=2, num_pages=2)
    engine._ticks_each = TICKS  # on a CPU, too
    for completion in engine.generate(random_prompts([1, 1]), params):
        assert_equals_reference(reference, completion, params, tolerance)
    assert_nothing_held(engine)


@targets("paged_attention")
def test_rope_goes_by_position_where_few_tokens_go_deep(once, device, backend):
    """Only positions 0, 5 and 9 reach the third recursion, whose rows are then 1, 2 and 3 long."""
    model, reference, tolerance = once(5, 3, **EXPERT)
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] = -1000.0
        model.embed_tokens.weight[7, 0] = 1000.0
        for router in model.routers:
            router.weight.zero_()
            router.weight[0, 0] = 1e-2
    reference.weights |= separate({n: t.cpu().double() for n, t in model.state_dict().items()}, model.config)
    prompt = [7, 1, 2, 3, 4, 7, 5, 6, 8, 7]
    interpreted = (device, backend) == ("cpu", "triton")  # which takes a second for each token
    params = SamplingParams(max_tokens=1 if interpreted else 2, logprobs=VOCABULARY)
    for chunk in (512,) if interpreted else (512, 2):
        completion = Engine(model, prefill_chunk=chunk).generate([prompt], params)[0]
        assert completion.depths[:10] == [3, 1, 1, 1, 1, 3, 1, 1, 1, 3]
        assert_equals_reference(reference, completion, params, tolerance)


def test_preempted_requests_replay_their_depths():
    model, _ = tiny(6, **EXPERT)
    engine = poisoned(model, max_sequences=2)
    request = engine.requests[engine.submit(random_prompts([8])[0], SamplingParams(max_tokens=20))]
    while len(request.tokens) < 14:
        engine.step()
    depths = list(request.depths)
    engine._drain()
    engine._preempt()
    assert request.slot < 0 and engine.metrics()["pages_in_use"] == 0
    with torch.no_grad():
        for router in model.routers:  # routers that would now decide otherwise
            router.weight.neg_()
    while len(request.depths) < 16:
        engine.step()
    assert request.depths[: len(depths)] == depths
    engine._drain()
    lengths = engine.cache.block.pages.lengths.view(2, 3)[request.slot].tolist()
    taken = [*request.depths, engine._recursion[request.slot]]
    assert lengths == [sum(depth > r for depth in taken) for r in range(3)]
    assert len(request.depths) == sum(engine.metrics()["depth_histogram"])  # recomputed positions count once


def test_streams_equal_completions():
    model, _ = tiny(8, **TOKEN)
    engine = Engine(model, tokenizer=Letters(), max_sequences=2)
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=i, logprobs=2) for i in range(3)]
    completions = engine.generate(["abc", "z", "hello"], params)
    assert [c.text for c in completions] == [Letters().decode(c.tokens) for c in completions]
    streams = [engine.stream(prompt, chosen) for prompt, chosen in zip(["abc", "z", "hello"], params)]
    events = [[], [], []]
    for _ in range(12):  # three consumers that take turns
        for stream, got in zip(streams, events):
            got.append(next(stream))
    for stream, got, completion in zip(streams, events, completions):
        assert next(stream, None) is None
        assert [e.token for e in got] == completion.tokens
        assert "".join(e.text for e in got) == completion.text
        # the batch, and with it the last bits, depends on when a request came
        assert [e.logprob for e in got] == pytest.approx(completion.logprobs, rel=1e-9)
        for e, top in zip(got, completion.top_logprobs):
            assert len(top) == 2 and [i for i, _ in e.top_logprobs] == [i for i, _ in top]
            assert [value for _, value in e.top_logprobs] == pytest.approx([value for _, value in top], rel=1e-9)
        assert [e.depth for e in got] == completion.depths[len(completion.prompt) - 1 :]
        assert [e.finish_reason for e in got] == [None] * 11 + ["length"]
    assert not engine.requests


def test_closing_a_stream_cancels_its_request():
    model, _ = tiny(8, **TOKEN)
    engine = Engine(model)
    stream = engine.stream([1, 2], SamplingParams(max_tokens=9))
    next(stream)
    stream.close()
    assert not engine.requests
    assert_nothing_held(engine)


def test_stop_strings_over_tokens_and_stop_tokens():
    model, _ = tiny(9, **EXPERT)
    engine = Engine(model, tokenizer=Letters())
    params = {"max_tokens": 12, "temperature": 2.0, "seed": 3}
    free = engine.generate(["abc"], SamplingParams(**params))[0]
    for start in range(1, len(free.text) - 3, 4):
        stop = free.text[start : start + 3]
        if "\ufffd" in stop:
            continue
        got = engine.generate(["abc"], SamplingParams(**params, stop=[stop]))[0]
        assert got.text == free.text[: free.text.index(stop)]
        assert got.finish_reason == "stop"
        assert got.tokens == free.tokens[: len(got.tokens)] and stop in Letters().decode(got.tokens)
    token = free.tokens[5]
    first = free.tokens.index(token)
    got = engine.generate(["abc"], SamplingParams(**params, stop_token_ids=[token]))[0]
    assert got.tokens == free.tokens[: first + 1] and got.finish_reason == "stop"
    assert got.text == Letters().decode(got.tokens[:-1])
    engine = Engine(model, tokenizer=Letters(), eos_token_id=token)
    assert engine.generate(["abc"], SamplingParams(**params))[0] == got
    assert engine.generate(["abc"], SamplingParams(**params, ignore_eos=True))[0] == free


def test_generation_ends_at_the_last_position():
    model, reference = tiny(10, max_position_embeddings=12, **EXPERT)
    engine = poisoned(model, page_size=8)
    params = SamplingParams(max_tokens=100, logprobs=VOCABULARY)
    for length, tokens in ((9, 4), (12, 1)):
        completion = engine.generate(random_prompts([length]), params)[0]
        assert (len(completion.tokens), completion.finish_reason) == (tokens, "length")
        assert_equals_reference(reference, completion, params)
    with pytest.raises(ValueError, match=r"prompt: expected at most 12 tokens \(max_position_embeddings\), got 13"):
        engine.submit([1] * 13)


def test_empty_prompts_start_from_bos_or_eos():
    model, _ = tiny(11, **EXPERT)
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        Engine(model).submit([])
    want = Engine(model).generate([[5]], SamplingParams(max_tokens=3))
    assert Engine(model, eos_token_id=5).generate([[]], SamplingParams(max_tokens=3, ignore_eos=True)) == want
    assert Engine(model, eos_token_id=4, bos_token_id=5).generate([[]], SamplingParams(3, ignore_eos=True)) == want


def test_cancel():
    model, _ = tiny(12, **EXPERT)
    engine = Engine(model, max_sequences=1, tokenizer=Letters())
    running, waiting = (engine.submit("ab", SamplingParams(max_tokens=50)) for _ in range(2))
    while len(engine.requests[running].events) < 3:
        engine.step()
    got = engine.cancel(running)
    assert got.finish_reason == "cancelled" and len(got.tokens) == 3 and got.text == Letters().decode(got.tokens)
    got = engine.cancel(waiting)
    assert (got.tokens, got.depths, got.text, got.finish_reason) == ([], [], "", "cancelled")
    assert engine.step() == []
    assert_nothing_held(engine)


def test_a_request_without_numbers_ends_alone():
    model, _ = tiny(13, **EXPERT)
    with torch.no_grad():
        model.embed_tokens.weight[7] = float("nan")
    engine = Engine(model, max_sequences=3, tokenizer=Letters())
    params = SamplingParams(max_tokens=5)
    good, bad, other = engine.generate([[1, 2], [3, 7], [4]], params)
    assert (bad.tokens, bad.text, bad.finish_reason) == ([], "", "error")
    assert [good, other] == [engine.generate([p], params)[0] for p in ([1, 2], [4])]


def test_queue_and_metrics():
    model, _ = tiny(14, **EXPERT)
    engine = Engine(model, max_sequences=2, max_waiting=2, prefill_chunk=4)
    for _ in range(2):
        engine.submit([1])
    with pytest.raises(QueueFull, match="max_waiting: 2 requests wait already"):
        engine.submit([1])
    for i in (0, 1):
        engine.cancel(i)
    got = engine.generate(random_prompts([3] * 7), SamplingParams(max_tokens=4))
    metrics = engine.metrics()
    assert metrics["tokens"] == 28
    assert sum(metrics["depth_histogram"]) == sum(len(c.depths) for c in got) == 7 * 6
    assert metrics["depth_histogram"] == [sum(c.depths.count(d) for c in got) for d in (1, 2, 3)]
    assert 0 < metrics["occupancy"] <= 1 and metrics["ticks"] > 0
    assert metrics["cache_bytes"] == engine.cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_cache_bytes(dtype):
    """All that the cache holds fits, and a page more of each kind would not."""
    for fields in (EXPERT, {**EXPERT, "kv": "shared"}, {**TOKEN, "sharing": "cycle"}, {**EXPERT, "kv": "hybrid"}):
        model, _ = tiny(15, **fields)
        size = 16_000 + 11_000 * dtype.itemsize
        engine = Engine(model.float(), max_sequences=8, cache_bytes=size, page_size=4, cache_dtype=dtype)
        pools = [pool for pool in (engine.cache.block, engine.cache.ends) if pool is not None]
        page_bytes = [2 * pool.k[:, :1].nbytes for pool in pools]
        assert engine.cache.nbytes <= size < engine.cache.nbytes + sum(page + 4 for page in page_bytes)
        held = [t for pool in pools for t in (pool.k, pool.v, pool.k_scale, pool.v_scale, *pool.pages)]
        held.append(engine.cache.seen)
        assert engine.cache.nbytes == sum(t.nbytes for t in held if t is not None)
        assert {pool.k.dtype for pool in pools} == {dtype}
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].tokens) == 3


@targets("paged_attention")
@pytest.mark.parametrize("fields", STRATEGIES, ids=name)
def test_kernels_generate_what_eager_does(monkeypatch, device, backend, fields):
    """Token for token and depth for depth in fp32; padding and unwritten keys are NaN."""
    if backend == "eager":
        pytest.skip("compared with itself")
    model, _ = tiny(1, **fields)
    model = model.float().to(device)
    lengths, counts = ((3, 9, 1, 40), (10, 4, 12, 6)) if device == "cuda" else ((4, 1), (2, 3))
    prompts, params = requests(lengths, counts, 3)
    outcomes = []
    for each in ("eager", backend):
        prefer(monkeypatch, each)
        engine = poisoned(model, max_sequences=4, page_size=4, prefill_chunk=16)
        outcomes.append(engine.generate(prompts, params))
        assert_nothing_held(engine)
    want, got = outcomes
    assert [c.tokens for c in got] == [c.tokens for c in want]
    assert [c.depths for c in got] == [c.depths for c in want]
    for a, b in zip(got, want):  # sums of fp32 in another order, through ten layers of weights of size 1
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_narrower_caches(dtype):
    """What a cache of fewer bits changes is of the size of its rounding; a scale a head keeps float8 in range."""
    model, _ = tiny(1, router="none", num_recursions=1, num_hidden_layers=2, sharing="cycle")
    model = model.float()
    with torch.no_grad():  # one head's values are beyond 448, which only a scale can hold
        model.layers[0].self_attn.qkv_proj.weight[-8:-4] *= 500
        model.layers[0].self_attn.o_proj.weight[:, :8] /= 500
    prompts, params = random_prompts([30, 17]), SamplingParams(max_tokens=1, logprobs=VOCABULARY)

    def logits(**options):
        engine = Engine(model, page_size=4, **options)
        if options.get("cache_dtype") == torch.float8_e4m3fn:
            engine.calibrate(prompts[::-1])
            scales = [t.clone() for t in (engine.cache.block.k_scale, engine.cache.block.v_scale)]
            assert scales[1][0, 0] > 100 * scales[1][0, 1]
            engine.calibrate(prompts)  # in any order, the largest of them all counts
            assert torch.equal(engine.cache.block.k_scale, scales[0])
            assert torch.equal(engine.cache.block.v_scale, scales[1])
        done = engine.generate(prompts, params)
        return torch.tensor([[value for _, value in sorted(c.top_logprobs[0])] for c in done])

    exact, kept = logits(), logits(cache_dtype=dtype)
    error = (kept - exact).abs().max() / exact.std()
    assert 0 < error < (1 if dtype == torch.float8_e4m3fn else 32 * torch.finfo(dtype).eps)


def test_calibration_needs_an_idle_float8_cache():
    model, _ = tiny(1, **EXPERT)
    with pytest.raises(ValueError, match="cache_dtype: expected torch.float8_e4m3fn, to calibrate, got torch.float64"):
        Engine(model).calibrate([[1]])
    engine = Engine(model, cache_dtype=torch.float8_e4m3fn)
    engine.submit([1, 2], SamplingParams(max_tokens=9))
    engine.step()
    with pytest.raises(ValueError, match="calibrate: expected no running request, got 1"):
        engine.calibrate([[1]])


def test_a_byte_level_tokenizer():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["naïve café 😀 déjà vu €5 " * 4], trainer)
    model, _ = tiny(17, vocab_size=290, **TOKEN)
    with torch.no_grad():  # bytes above 127 are likelier, so that characters begin and break
        above = [i for t, i in tokenizer.get_vocab().items() if len(t) == 1 and not t.isascii()]
        model.embed_tokens.weight[above] *= 2
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=1, logprobs=0)
    engine = Engine(model, tokenizer=tokenizer)
    events = list(engine.stream("naïve 😀", params))
    text = tokenizer.decode([e.token for e in events])
    assert "".join(e.text for e in events) == text and "\ufffd" in text
    assert engine.generate([tokenizer.encode("naïve 😀").ids], params)[0].text == text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_sequences": 0}, "max_sequences: expected a whole number of at least 1, got 0"),
        ({"page_size": 1.5}, "page_size: expected a whole number of at least 1, got 1.5"),
        ({"batch_invariant": 1}, "batch_invariant: expected True or False, got 1"),
        ({"batch_invariant": True}, "batch_invariant: expected a model on CUDA"),
        ({"num_pages": 3, "cache_bytes": 10}, "cache_bytes: expected None beside num_pages"),
        ({"cache_bytes": 10}, r"cache_bytes: expected at least \d+, for a page, got 10"),
        ({"cache_dtype": torch.int8}, "cache_dtype: expected torch.float64 or a narrower float dtype, got torch.int8"),
    ],
)
def test_wrong_options_are_named(options, message):
    model, _ = tiny(16, **EXPERT)
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([1, 50], {}, r"prompt\[1\]: expected a token id in \[0, 50\), got 50"),
        ([-1], {}, r"prompt\[0\]: expected a token id in \[0, 50\), got -1"),
        ("text", {}, "prompt: expected token ids, since the engine has no tokenizer"),
        ([0.5], {}, "prompt: expected token ids or a string"),
        ([1], {"stop": ["a"]}, "stop: expected an engine with a tokenizer"),
        ([1], {"logprobs": 51}, r"logprobs: expected at most 50 \(vocab_size\), got 51"),
        ([1] * 20, {}, "prompt: .* 39 tokens may take 9 pages, got 8"),
    ],
)
def test_wrong_requests_are_named(prompt, params, message):
    model, _ = tiny(16, **EXPERT)
    engine, params = Engine(model, num_pages=8), SamplingParams(max_tokens=20, **params)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], prompt], [SamplingParams(max_tokens=20), params])
    assert_nothing_held(engine)


def test_a_prompt_that_the_tokenizer_cannot_encode():
    class Words(Letters):
        def encode(self, text):
            raise Exception("missing [UNK]")  # a bare one, as those of the package tokenizers

    with pytest.raises(ValueError, match="prompt: expected a text that the tokenizer can encode, got: missing"):
        Engine(tiny(16, **EXPERT)[0], tokenizer=Words()).submit("x")


def test_wrong_ids_and_counts_are_named():
    model, _ = tiny(16, **EXPERT)
    engine = Engine(model)
    for call in (engine.cancel, engine.collect):
        with pytest.raises(ValueError, match="request: expected the id of a request that was not collected, got 5"):
            call(5)
    with pytest.raises(ValueError, match="request: expected one that has ended, got 0"):
        engine.collect(engine.submit([1]))
    with pytest.raises(ValueError, match="params: expected one, or one for each of 2 prompts, got 1"):
        engine.generate([[1], [2]], [SamplingParams()])
