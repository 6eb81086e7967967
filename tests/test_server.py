"""The server, spoken to by OpenAI's own client over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mor_kernels.decode import Engine, SamplingParams
from tests.decode.models import tiny

pytest.importorskip("fastapi")
uvicorn, openai, httpx = map(pytest.importorskip, ("uvicorn", "openai", "httpx"))
server = pytest.importorskip("mor_kernels.server")

LINES = ["The quick brown fox jumps over the lazy dog.", "Naïvely – the dog looks at the fox, and that at the dog €."]
EOS = "<|endoftext|>"
CONTEXT = 4096
FIELDS = {"router": "expert_choice", "num_recursions": 2, "num_hidden_layers": 2, "sharing": "cycle",
          "tie_word_embeddings": False}  # a quick one, whose tokens vary  # fmt: skip
JSON = {"Content-Type": "application/json"}


def train_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=288, special_tokens=[EOS], show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@contextlib.contextmanager
def serving(engine, **options):
    """A client of a server of this engine, and what the server is made of."""
    app = server.create_app(engine, model_name="tiny", **options)
    bound = server.bind("127.0.0.1", 0)
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    while not uvicorn_server.started:
        time.sleep(0.01)
    key = options.get("api_key") or "none"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
    http = httpx.Client(base_url=url, timeout=60)
    try:
        with client, http:
            yield SimpleNamespace(client=client, http=http, app=app, engine=engine, url=url)
    finally:
        uvicorn_server.should_exit = True
        thread.join()
    assert not app.state.worker.thread.is_alive() and not engine.requests


@pytest.fixture(scope="module")
def parts():
    tokenizer = train_tokenizer()
    model, reference = tiny(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT, **FIELDS)
    options = {"tokenizer": tokenizer, "bos_token_id": 0, "page_size": 8}
    alone = Engine(model, max_sequences=1, **options)
    engine = Engine(model, max_sequences=3, max_waiting=12, prefill_chunk=8, **options)
    return SimpleNamespace(tokenizer=tokenizer, model=model, reference=reference, options=options, alone=alone,
                           engine=engine)  # fmt: skip


@pytest.fixture(scope="module")
def served(parts):
    with serving(parts.engine, max_choices=8, max_body_bytes=20_000) as found:
        yield found


def held(served):
    """Running and waiting requests and pages in use, as /metrics has them."""
    lines = served.http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [float(values[f"mor_{name}"]) for name in ("running_requests", "waiting_requests", "pages_in_use")]


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "nothing happened in 30 seconds"
        time.sleep(0.01)


def joined(chunks):
    """What the chunks of a stream add up to, by choice: text, finish_reason, logprobs, depths; and the usage."""
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for part in chunk.choices:
            found = choices.setdefault(part.index, {"text": "", "finish_reason": None, "logprobs": {}, "depths": []})
            assert found["finish_reason"] is None
            found["text"] += part.text
            found["finish_reason"] = part.finish_reason
            found["depths"] += getattr(part, "depths", [])
            for key, values in part.logprobs or ():
                found["logprobs"][key] = found["logprobs"].get(key, []) + values
    return [choices[i] for i in sorted(choices)], usage


PROMPTS = ["the dog €", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_text_equals_the_engines(served, parts, stream):
    """Several prompts, two choices of each, as strings or as ids."""
    seeds = [SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=s) for s in (5, 6)]
    want = parts.alone.generate([p for p in PROMPTS for _ in seeds], seeds * len(PROMPTS))
    assert len({c.text for c in want}) == len(want)
    more = {"model": "tiny", "max_tokens": 9, "temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2, "user": "me",
            "best_of": 2, "extra_body": {"top_k": 40, "min_p": 0.01, "depths": True}, "stream": stream}  # fmt: skip
    ids = [parts.tokenizer.encode(p).ids for p in PROMPTS]
    for prompt in [PROMPTS] if stream else [PROMPTS, ids]:
        if stream:
            more["stream_options"] = {"include_usage": True}
        got = served.client.completions.create(prompt=prompt, **more)
        choices, usage = joined(got) if stream else ([c.model_dump() for c in got.choices], got.usage)
        assert [c["text"] for c in choices] == [c.text for c in want]
        assert [c["finish_reason"] for c in choices] == [c.finish_reason for c in want]
        assert [c["depths"] for c in choices] == [c.depths[len(c.prompt) - 1 :] for c in want]
        read, generated = sum(max(len(i), 1) for i in ids), sum(len(c.tokens) for c in want)
        assert (usage.prompt_tokens, usage.completion_tokens) == (read, generated)
        assert usage.total_tokens == read + generated
    if not stream:
        assert got.object == "text_completion" and got.id.startswith("cmpl-") and got.model == "tiny"
        assert [c.index for c in got.choices] == list(range(4)) and abs(got.created - time.time()) < 60


def test_defaults_and_stops(served, parts):
    create = served.client.completions.create
    got = create(model="tiny", prompt=[3, 4, 5], seed=1, best_of=1, logit_bias={}, presence_penalty=0, stop=None)
    assert got.choices[0].finish_reason == "length" and got.usage.completion_tokens == 16
    (want,) = parts.alone.generate([[3, 4, 5]], SamplingParams(max_tokens=16, temperature=1.0, seed=1))
    assert got.choices[0].text == want.text and got.choices[0].logprobs is None
    assert not hasattr(got.choices[0], "depths")
    assert create(model="tiny", prompt="x", max_tokens=9).choices[0].text != create(
        model="tiny", prompt="x", max_tokens=9).choices[0].text  # no seed: another one each time  # fmt: skip

    (free,) = parts.alone.generate(["lazy dog."], SamplingParams(max_tokens=14))
    stop = free.text[6:8]
    assert len(stop) == 2
    for stops in (stop, ["never", stop]):
        for stream in (False, True):
            got = create(model="tiny", prompt="lazy dog.", max_tokens=14, temperature=0, stop=stops, stream=stream)
            choice = joined(got)[0][0] if stream else got.choices[0].model_dump()
            assert choice["text"] == free.text[: free.text.index(stop)] and choice["finish_reason"] == "stop"


def test_log_probabilities_and_echo(served, parts):
    prompt = LINES[1]
    ids = parts.tokenizer.encode(prompt).ids
    (want,) = parts.alone.generate([ids], SamplingParams(max_tokens=8, temperature=0.0, logprobs=3))
    tokens = ids + want.tokens
    more = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3, "echo": True}
    choice = served.client.completions.create(**more).choices[0]
    assert choice.text == prompt + want.text
    found = choice.logprobs
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == len(tokens)

    log = parts.reference.forward(torch.tensor([tokens[:-1]]), mode="threshold").logits[0].log_softmax(-1)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    # float64 on both sides; sums of some hundred terms of size 1 in another order
    expected = [log[i, token].item() for i, token in enumerate(tokens[1:])]
    assert found.token_logprobs[1:] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for row, token, name, top in zip(log, tokens[1:], found.tokens[1:], found.top_logprobs[1:]):
        likeliest = row.topk(3).values.tolist()
        chosen = row[token].item()
        assert list(top.values()) == pytest.approx(likeliest + [chosen] * (chosen not in likeliest), rel=1e-9)
        assert top[name] == pytest.approx(chosen, rel=1e-9)
    for name, token, at in zip(found.tokens, tokens, found.text_offset):
        assert name in (f"token_id:{token}", EOS) or choice.text[at : at + len(name)] == name
    assert 20 < sum(not name.startswith("token_id") for name in found.tokens) < len(tokens)

    streamed = joined(served.client.completions.create(**more, stream=True))[0][0]
    assert streamed["text"] == choice.text and streamed["logprobs"] == found.model_dump()
    alone = served.client.completions.create(**{**more, "echo": False, "logprobs": 0, "prompt": ids}).choices[0]
    assert alone.text == want.text and alone.logprobs.tokens == found.tokens[len(ids) :]
    assert [list(top) for top in alone.logprobs.top_logprobs] == [[name] for name in alone.logprobs.tokens]
    assert alone.logprobs.token_logprobs == pytest.approx(want.logprobs, rel=1e-9)
    assert served.client.completions.create(**{**more, "logprobs": None, "prompt": ids}).choices[0].text == choice.text


def test_the_end_of_a_text_ends_a_completion(parts):
    (free,) = parts.alone.generate(["The"], SamplingParams(max_tokens=9, ignore_eos=True))
    at = next(i for i in range(2, 9) if free.tokens[i] not in free.tokens[:i])
    engine = Engine(parts.model, max_sequences=1, **{**parts.options, "eos_token_id": free.tokens[at]})
    with serving(engine) as other:
        got = other.client.completions.create(model="tiny", prompt="The", max_tokens=9, temperature=0, logprobs=0)
    assert got.choices[0].finish_reason == "stop" and got.choices[0].text == free.text[: len(got.choices[0].text)]
    assert got.usage.completion_tokens == len(got.choices[0].logprobs.tokens) == at + 1


REFUSED = [
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": CONTEXT}, "max_tokens", f"at most {CONTEXT - 3}.*got {CONTEXT}"),
    ({"max_tokens": "9"}, "max_tokens", "whole number"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": True}, "temperature", "a number"),
    ({"top_p": 0}, "top_p", r"\(0, 1\]"),
    ({"top_k": -1}, "top_k", "0 keeps all"),
    ({"min_p": 2}, "min_p", r"\[0, 1\]"),
    ({"seed": -1}, "seed", "whole number"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 9}, "n", "at most 8 choices"),
    ({"prompt": ["a"] * 9}, "prompt", "at most 8 choices"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"stop": ["a"] * 5}, "stop", "up to 4"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": [3]}, "stop", "string"),
    ({"prompt": []}, "prompt", "list of token ids"),
    ({"prompt": ["a", 3]}, "prompt", "list of token ids"),
    ({"prompt": {"a": 3}}, "prompt", "list of token ids"),
    ({"prompt": [3, 288]}, "prompt", r"prompt\[1\].*\[0, 288\), got 288"),
    ({"prompt": [[3], [4, -1]]}, "prompt", r"prompt\[1\]\[1\].*got -1"),
    ({"prompt": [3] * 5000}, "prompt", "max_position_embeddings"),
    ({"prompt": "\ud800"}, "prompt", "Unicode"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not a field"),
    ({"best_of": 2}, "best_of", "not served"),
    ({"suffix": "x"}, "suffix", "not served"),
    ({"logit_bias": {"3": 1}}, "logit_bias", "not served"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not served"),
    ({"frequency_penalty": -0.5}, "frequency_penalty", "not served"),
    ({"messages": []}, "messages", "not a field"),
    ({"prompt": ...}, "prompt", "got none"),
]


def test_refused_values_are_named(served):
    for fields, param, pattern in REFUSED:
        body = {"model": "tiny", "prompt": "a qu", "max_tokens": 4, **fields}
        body = {name: value for name, value in body.items() if value is not ...}
        answer = served.http.post("/v1/completions", content=json.dumps(body), headers=JSON)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (fields, error)
        assert error["message"].startswith(param.partition(".")[0]), error
        assert re.search(pattern, error["message"]), error
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 300
    assert held(served) == [0, 0, 0]


def test_what_is_no_request(served):
    def post(path="/v1/completions", **given):
        answer = served.http.post(path, **given)
        return answer.status_code, answer.json()["error"]["message"]

    good = json.dumps({"model": "tiny", "prompt": "a"})
    for content, headers, status, said in (
        ("{", JSON, 400, "body: expected JSON"),
        ("[1]", JSON, 400, "body: expected a JSON object"),
        ("[" * 20_000, JSON, 400, ""),
        (good, {"Content-Type": "text/plain"}, 400, "Content-Type: expected application/json"),
        (good + " " * 20_000, JSON, 413, "body: expected at most 20000 bytes"),
        (iter([good.encode(), b" " * 20_000]), JSON, 413, "body: expected at most 20000 bytes"),  # of unknown length
    ):
        found = post(content=content, headers=headers)
        assert found[0] == status and found[1].startswith(said), found
    assert post("/v1/chat/completions", content=good, headers=JSON)[0] == 404
    assert served.http.get("/v1/completions").status_code == 405
    for call in (
        lambda: served.client.completions.create(model="other", prompt="a"),
        lambda: served.client.models.retrieve("other/one"),
    ):
        with pytest.raises(openai.NotFoundError, match="tiny") as caught:
            call()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert [m.id for m in served.client.models.list()] == ["tiny"] == [served.client.models.retrieve("tiny").id]
    assert served.http.get("/health").json() == {"status": "ok"}
    assert "/v1/completions" in served.http.get("/openapi.json").json()["paths"]


LONG = {"model": "tiny", "prompt": "The", "max_tokens": 4000, "temperature": 0, "stop": "never"}


def test_a_client_that_goes_away_frees_what_it_held_and_a_full_queue_refuses(served):
    create = served.client.completions.create
    first = create(**LONG, n=3, stream=True)
    next(first)
    assert held(served)[:2] == [3, 0] and held(served)[2] > 0
    second = create(**LONG, n=8, stream=True)  # waits; its answer has begun
    wait_until(lambda: held(served)[1] == 8)

    with pytest.raises(openai.RateLimitError, match="max_waiting") as caught:
        create(**LONG, n=5)
    assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
    assert held(served)[1] == 8  # none of the five stayed

    body = json.dumps(LONG)  # not streamed, by a client that then closes its connection
    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port)) as client:
        head = ["POST /v1/completions HTTP/1.1", "Host: a", f"Content-Length: {len(body)}"]
        client.sendall("\r\n".join([*head, "Content-Type: application/json", "", body]).encode())
        wait_until(lambda: held(served)[1] == 9)
    wait_until(lambda: held(served)[1] == 8)
    first.close()
    wait_until(lambda: held(served)[:2] == [3, 5])
    second.close()
    wait_until(lambda: held(served) == [0, 0, 0])
    assert not served.engine.requests and create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_many_clients_at_once(served, parts):
    params = [SamplingParams(max_tokens=5 + i, temperature=i % 2 * 0.9, seed=i) for i in range(6)]
    want = parts.alone.generate([LINES[i % 2][:i] for i in range(6)], params)
    got = [None] * 6

    def ask(i):
        found = served.client.completions.create(
            model="tiny", prompt=LINES[i % 2][:i], max_tokens=5 + i, temperature=i % 2 * 0.9, seed=i, stream=i % 3 == 0
        )
        got[i] = joined(found)[0][0]["text"] if i % 3 == 0 else found.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [c.text for c in want]


def test_a_failing_engine_answers_everybody_and_shows(parts, monkeypatch, caplog):
    engine = Engine(parts.model, max_sequences=2, **parts.options)
    step, fail = engine.step, threading.Event()

    def failing():
        if fail.is_set():
            raise RuntimeError("the device is gone")
        return step()

    monkeypatch.setattr(engine, "step", failing)
    with serving(engine) as found:
        stream = found.client.completions.create(**LONG, stream=True)
        next(stream)
        errors = []

        def wait():
            with pytest.raises(openai.InternalServerError) as caught:
                found.client.completions.create(**LONG)
            errors.append(caught.value)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: len(engine.requests) == 2)
        fail.set()
        with pytest.raises(openai.APIError, match="engine failed"):
            for _ in stream:
                pass
        waiting.join()
        assert errors[0].status_code == 503 and "engine failed" in errors[0].message
        assert found.http.get("/health").status_code == 503 == found.http.get("/metrics").status_code
        with pytest.raises(openai.InternalServerError, match="engine failed"):
            found.client.completions.create(model="tiny", prompt="a")
        engine.requests.clear()
    assert "the device is gone" in caplog.text


def test_what_runs_when_the_server_ends_is_cancelled(parts):
    engine = Engine(parts.model, max_sequences=1, **parts.options)
    with serving(engine) as found:
        stream = found.client.completions.create(**LONG, stream=True)
        next(stream)
        found.app.state.worker.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            found.client.completions.create(model="tiny", prompt="a")
    assert engine.metrics()["pages_in_use"] == 0


def test_a_model_without_numbers_is_an_error(parts):
    model, _ = tiny(vocab_size=288, **FIELDS)
    with torch.no_grad():
        model.embed_tokens.weight[7].fill_(float("nan"))
    with serving(Engine(model, max_sequences=2, **parts.options)) as found:
        with pytest.raises(openai.InternalServerError, match="logits") as caught:
            found.client.completions.create(model="tiny", prompt=[[3], [7]], max_tokens=50)
        assert caught.value.status_code == 500
        with pytest.raises(openai.APIError, match="logits"):
            list(found.client.completions.create(model="tiny", prompt=[7], stream=True))


def test_a_key_is_asked_for(parts):
    with serving(Engine(parts.model, max_sequences=1, **parts.options), api_key="secret") as found:
        assert found.client.models.retrieve("tiny").id == "tiny"
        for header in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Basic secret"}):
            answer = found.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}, headers=header)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert found.http.get("/metrics").status_code == 401 and found.http.get("/health").status_code == 200


def test_arguments_and_addresses(parts, monkeypatch, capsys):
    for options, name in (({"model_name": ""}, "model_name"), ({"model_name": "a", "api_key": ""}, "api_key"),
                          ({"model_name": "a", "max_choices": 0}, "max_choices")):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            server.create_app(parts.alone, **options)
    with pytest.raises(ValueError, match="tokenizer"):
        server.create_app(Engine(parts.model, max_sequences=1), model_name="a")
    with pytest.raises(OSError, match="--host, --port"):
        server.bind("203.0.113.1", 0)  # an address that nobody has
    with pytest.raises(ValueError, match="--port.*got 70000"):
        server.bind("127.0.0.1", 70000)
    monkeypatch.setattr(server.process._Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    app = server.create_app(parts.alone, model_name="a")

    async def health():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.get("/health")).status_code

    assert asyncio.run(health()) == 503  # it was never started
    for address, key, warned in (("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False),
                                 ("::1", False, False), ("::", False, True)):  # fmt: skip
        bound = SimpleNamespace(getsockname=lambda a=address: (a, 80), listen=lambda _: None)
        server.serve(app, bound, model_name="a", api_key=key)
        assert ("warning" in capsys.readouterr().err) == warned
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mor_kernels.server")
    with pytest.raises(ImportError, match=r"pip install mor-kernels\[server\]"):
        importlib.import_module("mor_kernels.server")


def test_the_command(parts, tmp_path):
    """It tells where it serves; SIGTERM lets what runs finish."""
    parts.model.save_pretrained(tmp_path / "tiny")
    parts.tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    command = [sys.executable, "-m", "mor_kernels", "serve", str(tmp_path / "tiny"), "--port", "0", "--device", "cpu",
               "--max-sequences", "2"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        assert said.startswith("serving tiny at http://127.0.0.1:"), said + process.stderr.read()
        with openai.OpenAI(base_url=said.split()[-1], api_key="none", max_retries=0, timeout=60) as client:
            stream = client.completions.create(model="tiny", prompt="The", max_tokens=60, temperature=0, stream=True)
            first = next(stream)
            process.send_signal(signal.SIGTERM)
            (choice,), _ = joined([first, *stream])
        (want,) = parts.alone.generate(["The"], SamplingParams(max_tokens=60))
        assert choice["text"] == want.text and choice["finish_reason"] == "length"
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
