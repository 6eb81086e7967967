"""A server of completions that clients of OpenAI's API can talk to: ``/v1/completions``, over one :class:`Engine`.

The engine belongs to one thread, :class:`Worker`, which executes what it is called with between two steps of the
engine, and waits where there is nothing to generate. Requests are checked and made into tokens before they come to it,
and what comes out goes back to the event loop, step by step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hmac
import ipaddress
import json
import logging
import math
import queue
import reprlib
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch

from .decode import Completion, Engine, Event, QueueFull, SamplingParams
from .decode.sampler import log_probabilities
from .decode.text import TextStream, decode

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise ImportError(f"server: expected FastAPI and uvicorn (pip install mor-kernels[server]): {error}") from error

MAX_LOGPROBS = 20  # of a token; each is decoded for the answer
GRACE = 20.0  # seconds that running requests have to finish in when the server is told to stop
_CHUNK = 1 << 24  # logits of a prompt brought to fp32 together

log = logging.getLogger(__name__)


class APIError(Exception):
    """An answer in the shape of OpenAI's errors."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = {429: "rate_limit_error"}.get(status, "server_error" if status >= 500 else "invalid_request_error")
        message = message.encode("utf-8", "backslashreplace").decode()  # a client may have sent half a surrogate pair
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.content, self.status, headers)


# Requests


def _field(expected: str, **options):
    return Field(description=expected, **{"default": None, **options})


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = _field("true or false")


class CompletionRequest(BaseModel):
    """The body of a request. Ranges are those of SamplingParams; null is the default."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = _field("a model's name", default=...)
    prompt: Any = _field("a string, a list of strings, a list of token ids or a list of such lists", default=...)
    max_tokens: int | None = _field("a whole number of at least 1")
    temperature: float | None = _field("a number of at least 0")
    top_p: float | None = _field("a number in (0, 1]")
    top_k: int | None = _field("a whole number (0 keeps all)")
    min_p: float | None = _field("a number in [0, 1]")
    seed: int | None = _field("a whole number in [0, 2**63)")
    n: int | None = _field("a whole number of at least 1", ge=1)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = _field("a string or a list of up to 4 strings")
    stream: bool | None = _field("true or false")
    stream_options: StreamOptions | None = _field('{"include_usage": true or false}, where stream is true')
    logprobs: int | None = _field(f"a whole number of at most {MAX_LOGPROBS}", le=MAX_LOGPROBS)
    echo: bool | None = _field("true or false")
    depths: bool | None = _field("true or false: tell the recursions that were spent on choosing each token")
    user: str | None = _field("a string, which is ignored")
    # not served; their neutral values are taken
    best_of: int | None = _field("null or n")
    suffix: str | None = _field("null")
    logit_bias: dict[str, float] | None = _field("null")
    presence_penalty: float | None = _field("0")
    frequency_penalty: float | None = _field("0")


class _Prompt(NamedTuple):
    ids: list[int]
    text: str
    params: list[SamplingParams]  # of each of n choices


def _plan(body: CompletionRequest, engine: Engine, max_choices: int) -> list[_Prompt]:
    """What the engine is asked for. Raises APIError, or ValueError for what the engine's own checks find."""
    n = 1 if body.n is None else body.n
    neutral = {"best_of": n, "suffix": "", "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0}
    for name, value in neutral.items():
        if getattr(body, name) not in (None, value):
            raise APIError(400, f"{name}: not served; expected null or {value!r}, got {getattr(body, name)!r}", name)
    if body.stream_options and not body.stream:
        raise APIError(400, "stream_options: expected null, since stream isn't true, got an object", "stream_options")
    prompts = _prompts(body.prompt)
    if len(prompts) * n > max_choices:
        name = "prompt" if n == 1 else "n"
        raise APIError(400, f"{name}: expected at most {max_choices} choices (prompts times n) in a request, got "
                       f"{len(prompts) * n}", name)  # fmt: skip
    chosen = {
        "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        **{name: getattr(body, name) for name in ("top_p", "top_k", "min_p", "seed", "logprobs")},
    }
    first = SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
    params = [first] * n
    if first.seed is not None:  # with one seed the choices would be the same
        params = [replace(first, seed=(first.seed + i) % 2**63) for i in range(n)]

    found, limit = [], engine.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        try:
            ids = engine.prompt_ids(prompt)
            if len(ids) > limit:
                raise ValueError(f"prompt: expected at most {limit} tokens (max_position_embeddings), got {len(ids)}")
        except ValueError as error:
            where = f"prompt[{i}]" if len(prompts) > 1 else "prompt"
            raise ValueError(where + str(error).removeprefix("prompt")) from None
        if len(ids) + first.max_tokens > limit:
            raise APIError(
                400,
                f"max_tokens: expected at most {limit - len(ids)}, since the context is of {limit} tokens and the "
                f"prompt of {len(ids)}, got {first.max_tokens}",
                "max_tokens",
                "context_length_exceeded",
            )
        text = ""
        if body.echo:
            assert engine.tokenizer is not None  # as create_app has checked
            text = prompt if isinstance(prompt, str) else decode(engine.tokenizer, ids)
        found.append(_Prompt(ids, text, params))
    return found


def _prompts(prompt: Any) -> list[str | list[int]]:
    def ids(value) -> bool:
        return isinstance(value, list) and all(type(token) is int for token in value)

    if prompt is None:  # the beginning of a document, as OpenAI's
        return [""]
    if isinstance(prompt, str) or prompt and ids(prompt):
        prompt = [prompt]
    listed = isinstance(prompt, list) and prompt
    if not listed or not (all(isinstance(p, str) for p in prompt) or all(map(ids, prompt))):
        expected = CompletionRequest.model_fields["prompt"].description
        raise APIError(400, f"prompt: expected {expected}, got {reprlib.repr(prompt)}", "prompt")
    for text in prompt:
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise APIError(400, f"prompt: expected Unicode text: {error.reason}", "prompt") from None
    return prompt


def _invalid(error: RequestValidationError, request: Request) -> APIError:
    """What FastAPI found wrong with a body, by the name of the field."""
    found = error.errors()
    first = found[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "json_invalid":
        return APIError(400, f"body: expected JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if "json" not in request.headers.get("content-type", ""):
        return APIError(400, "Content-Type: expected application/json, got "
                        f"{request.headers.get('content-type', 'none')!r}")  # fmt: skip
    if not name:
        return APIError(400, f"body: expected a JSON object, got {reprlib.repr(error.body)}")
    if first["type"] == "missing":
        return APIError(400, f"{name}: expected a value, got none", name)
    if first["type"] == "extra_forbidden":
        return APIError(400, f"{name}: not a field that is served", name, "unknown_field")
    name = str(first["loc"][1])
    expected = CompletionRequest.model_fields[name].description
    return APIError(400, f"{name}: expected {expected}, got {reprlib.repr(error.body[name])}", name)


# Answers


class _Choice:
    """Makes the tokens of a choice into parts of an answer."""

    def __init__(self, index: int, prompt: _Prompt, body: CompletionRequest, tokenizer, name: Callable):
        self.index, self.prompt, self.tokenizer, self.name = index, prompt, tokenizer, name
        self.wants_logprobs, self.wants_depths = body.logprobs is not None, bool(body.depths)
        self.offset = 0  # of the next character in the text
        self.characters = TextStream(tokenizer)
        self.count = 0

    def echo(self, scores) -> dict:
        """The prompt; scores are its tokens' log-probabilities and their likeliest tokens."""
        part = self._part(self.prompt.text, self.prompt.ids, scores)
        self.offset, self.characters = len(self.prompt.text), TextStream(self.tokenizer)
        return part

    def events(self, events: Sequence[Event]) -> dict:
        """What has come out since the last part."""
        found = [e for e in events if e.token is not None]
        self.count += len(found)
        scores = [(e.logprob, e.top_logprobs) for e in found]
        tokens = [e.token for e in found if e.token is not None]
        part = self._part("".join(e.text for e in events), tokens, scores, [e.depth for e in found])
        part["finish_reason"] = events[-1].finish_reason
        return part

    def whole(self, completion: Completion, echo: dict | None) -> dict:
        self.count = len(completion.tokens)
        scores = list(zip(completion.logprobs or (), completion.top_logprobs or ()))
        depths = completion.depths[len(completion.prompt) - 1 :][: self.count]
        part = self._part(completion.text or "", completion.tokens, scores, depths)
        part["finish_reason"] = completion.finish_reason
        if echo:
            part["text"] = echo["text"] + part["text"]
            if self.wants_logprobs:
                part["logprobs"] = {key: echo["logprobs"][key] + part["logprobs"][key] for key in part["logprobs"]}
        return part

    def _part(self, text: str, tokens: Sequence[int], scores, depths: Sequence[int] = ()) -> dict:
        part = {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}
        if self.wants_logprobs:
            part["logprobs"] = self._logprobs(tokens, scores)
        if self.wants_depths:
            part["depths"] = list(depths)
        return part

    def _logprobs(self, tokens: Sequence[int], scores) -> dict:
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, (logprob, likeliest) in zip(tokens, scores):
            name, length = self.name(token)
            found["tokens"].append(name)
            found["token_logprobs"].append(_finite(logprob))
            top: dict[str, float | None] = {}
            for other, value in (*likeliest, (token, logprob)) if likeliest is not None else ():
                top.setdefault(self.name(other)[0], _finite(value))  # of tokens of one name the likeliest
            found["top_logprobs"].append(top or None)  # None of a prompt's first token
            more = len(self.characters.push(token))
            # unfinished characters may come out before its own; a part of a character is where that is
            found["text_offset"].append(self.offset + (max(more - length, 0) if length is not None else 0))
            self.offset += more
        return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _token_name(tokenizer, token: int) -> tuple[str, int | None]:
    """What a token is called: its text, a special one's name, or its id if it is a part of a character; and how many
    characters it has, None of such a part."""
    text = decode(tokenizer, [token, token])[len(decode(tokenizer, [token])) :]  # a text's first space may be dropped
    name = text
    if not text and hasattr(tokenizer, "id_to_token"):
        name = tokenizer.id_to_token(token)
    if not name or "\ufffd" in text:
        name = f"token_id:{token}"
    return name, None if "\ufffd" in text else len(text)


@torch.no_grad()
def prompt_logprobs(engine: Engine, ids: Sequence[int], top: int) -> list:
    """Log-probability and `top` likeliest tokens (id, log-probability) at each place of a prompt, (None, None) first.

    One forward pass of the model, which the engine's requests wait for; in evaluation it routes as decoding does.
    """
    found: list = [(None, None)]
    if len(ids) > 1:
        tokens = torch.tensor([ids], device=engine.device)
        logits = engine.model(tokens[:, :-1]).logits
        assert logits is not None  # which are asked for by default
        step = max(1, _CHUNK // logits.shape[-1])
        for chunk, following in zip(logits[0].split(step), tokens[0, 1:].split(step)):
            chosen, values, others = (t.tolist() for t in log_probabilities(chunk, following, top))
            found += [(c, tuple(zip(o, v))) for c, v, o in zip(chosen, values, others)]
    return found


# The engine's thread


class Job:
    """The choices of one client's request, and what has come out of them. Belongs to the event loop."""

    def __init__(self, stream: bool):
        self.stream = stream
        self.gone = False  # nobody waits for it
        self.ids: list[int] = []  # of the engine's requests; belongs to the worker's thread
        self._error: APIError | None = None
        self._queue: asyncio.Queue[list] = asyncio.Queue()

    def put(self, found: list, error: APIError | None = None) -> None:
        self._error = self._error or error
        self._queue.put_nowait(found)

    async def next(self) -> list[tuple[int, Event | Completion]]:
        """All that came out since the last call, each with its choice's index; raises the error that ended the job."""
        found: list = []
        while not found:
            if self._error and self._queue.empty():
                raise self._error
            found += await self._queue.get()
            while not self._queue.empty():
                found += self._queue.get_nowait()
        return found


class Worker:
    """The thread that owns an engine. Everything else calls into it."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop):
        """loop: the event loop of the jobs."""
        self.engine, self.loop = engine, loop
        self.ended: str | None = None  # why it takes no calls any more
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `ended`, so that no call is left behind
        self._stopping = False
        self._jobs: dict[int, tuple[Job, int]] = {}  # by the engine's id of a choice
        self.thread = threading.Thread(target=self._run, name="mor-kernels engine", daemon=True)
        self.thread.start()

    def call(self, function: Callable[[Engine], Any]) -> concurrent.futures.Future:
        """Have the thread execute function(engine). Raises APIError when it has ended."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self.ended:
                raise APIError(503, self.ended)
            self._calls.put((function, future))
        return future

    async def ask(self, function: Callable[[Engine], Any]):
        """The result of function(engine), executed in the thread."""
        return await asyncio.wrap_future(self.call(function))

    async def submit(self, job: Job, choices: Sequence[tuple[list[int], SamplingParams]]) -> None:
        """Begin with all choices of a job or, where an error of Engine.submit is raised, with none."""

        def submit(engine: Engine) -> None:
            if job.gone:
                return
            try:
                for prompt, params in choices:
                    job.ids.append(engine.submit(prompt, params))
            except BaseException:
                while job.ids:
                    engine.cancel(job.ids.pop())
                raise
            self._jobs |= {request: (job, choice) for choice, request in enumerate(job.ids)}

        await self.ask(submit)

    def cancel(self, job: Job) -> None:
        """End what is left of a job, as nobody waits for it."""

        def cancel(engine: Engine) -> None:
            for request in job.ids:
                if self._jobs.pop(request, None):
                    engine.cancel(request)
            self._post({job: []}, APIError(499, "the client went away"))

        if not job.gone:
            job.gone = True
            with contextlib.suppress(APIError):
                self.call(cancel)

    def stop(self) -> None:
        """Have the thread end; what still runs is cancelled, and answered with an error."""

        def stop(engine: Engine) -> None:
            self._stopping = True

        with contextlib.suppress(APIError):
            self.call(stop)

    def _run(self) -> None:
        reason = "the server is shutting down"
        try:
            while not self._stopping:
                self._execute()
                if self._jobs and not self._stopping:
                    self._deliver(self.engine.step())
        except BaseException:
            log.exception("the engine failed")
            reason = "the engine failed; the server's log says why"
        with self._lock:
            self.ended = reason
        error = APIError(503, reason)
        while not self._calls.empty():
            future = self._calls.get()[1]
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._post({job: [] for job, _ in self._jobs.values()}, error)
        if self._stopping:
            for request in self._jobs:
                self.engine.cancel(request)

    def _execute(self) -> None:
        """Execute the calls that have come, and wait for one if there is nothing to generate."""
        for _ in range(max(self._calls.qsize(), not self._jobs)):
            function, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    result = function(self.engine)
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

    def _deliver(self, events: list[Event]) -> None:
        found: dict[Job, list] = {}
        for event in events:
            job, choice = self._jobs.get(event.request, (None, 0))
            if job is None:  # cancelled after it came out
                continue
            completion = None
            if event.finish_reason:
                completion = self.engine.collect(event.request)
                del self._jobs[event.request]
            if (part := event if job.stream else completion) is not None:
                found.setdefault(job, []).append((choice, part))
        if found:
            self._post(found)

    def _post(self, found: dict[Job, list], error: APIError | None = None) -> None:
        def put() -> None:
            for job, parts in found.items():
                job.put(parts, error)

        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self.loop.call_soon_threadsafe(put)


# The application


class _Guard:
    """Refuses requests without the key before their bodies are read, and bodies that are too large while they are."""

    def __init__(self, app, api_key: str | None, max_body_bytes: int):
        self.app, self.api_key, self.max_body_bytes = app, api_key, max_body_bytes

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if self.api_key is not None and scope["path"] != "/health":
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(key.strip(), self.api_key.encode())
            if kind.lower() != b"bearer" or not same:
                error = APIError(401, "Authorization: expected Bearer and the server's key", code="invalid_api_key")
                return await error.response()(scope, receive, send)
        too_large = APIError(413, f"body: expected at most {self.max_body_bytes} bytes", code="request_too_large")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return await too_large.response()(scope, receive, send)
        received = 0

        async def counted():
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise HTTPException(413, str(too_large))
            return message

        await self.app(scope, counted, send)


def create_app(
    engine: Engine, *, model_name: str, api_key: str | None = None, max_choices: int = 128,
    max_body_bytes: int = 4 * 2**20,
) -> FastAPI:  # fmt: skip
    """An ASGI application that serves the engine, which nothing else may use from the application's start to its end.

    Args:
        engine: with a tokenizer. Its max_waiting bounds the requests that wait.
        model_name: what clients call the model.
        api_key: clients must send it, but for /health; None asks for none.
        max_choices: prompts times n of a request, at most; no more than may wait at once.
        max_body_bytes: size of a request's body.

    Raises ValueError for an argument out of range.
    """
    if engine.tokenizer is None:
        raise ValueError("engine: expected one with a tokenizer, got one without")
    if not model_name:
        raise ValueError(f"model_name: expected a name, got {model_name!r}")
    if api_key is not None and not api_key:
        raise ValueError("api_key: expected None or a key, got an empty string")
    for name, value in (("max_choices", max_choices), ("max_body_bytes", max_body_bytes)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    max_choices = min(max_choices, engine.max_waiting)
    token_name = functools.lru_cache(1 << 16)(functools.partial(_token_name, engine.tokenizer))
    watches: set[asyncio.Task] = set()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.worker = worker = Worker(engine, asyncio.get_running_loop())
        yield
        worker.stop()
        await asyncio.to_thread(worker.thread.join)

    # the pages of /docs would bring scripts from elsewhere
    app = FastAPI(title="mor-kernels", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(_Guard, api_key=api_key, max_body_bytes=max_body_bytes)
    app.state.worker = None

    @app.exception_handler(APIError)
    async def _(request: Request, error: APIError):
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError):
        return _invalid(error, request).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException):
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        code = "request_too_large" if error.status_code == 413 else None
        return APIError(error.status_code, message, code=code).response()

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception):
        return APIError(500, "something went wrong; the server's log says what").response()

    def working() -> Worker:
        worker = app.state.worker
        if worker is None or worker.ended:
            raise APIError(503, worker.ended if worker else "the server has not started")
        return worker

    @app.get("/health")
    async def health():
        working()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics():
        return PlainTextResponse(_prometheus(await working().ask(Engine.metrics)), media_type=_PROMETHEUS)

    model = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "mor-kernels"}

    def known(name: str) -> None:
        if name != model_name:
            raise APIError(404, f"model: expected {model_name!r}, got {name!r}", "model", "model_not_found")

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str):
        known(name)
        return model

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request):
        worker = working()
        known(body.model)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
                "model": model_name}  # fmt: skip
        job = Job(bool(body.stream))

        async def watch():
            while (await request.receive())["type"] != "http.disconnect":  # which also comes after the answer
                pass
            worker.cancel(job)

        try:
            prompts = await asyncio.to_thread(_plan, body, engine, max_choices)
            watches.add(task := asyncio.create_task(watch()))
            task.add_done_callback(watches.discard)
            choices: list[_Choice] = []
            echoes: list[dict] = []
            for prompt in prompts:
                scores = None
                if body.echo and body.logprobs is not None and not job.gone:
                    score = functools.partial(prompt_logprobs, ids=prompt.ids, top=body.logprobs)
                    scores = await worker.ask(score)
                for _ in prompt.params:
                    choices.append(_Choice(len(choices), prompt, body, engine.tokenizer, token_name))
                    echoes += [choices[-1].echo(scores or [])] if body.echo else []
            await worker.submit(job, [(prompt.ids, params) for prompt in prompts for params in prompt.params])
            if body.stream:
                chunks = _chunks(worker, job, head, choices, echoes, prompts, body)
                return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            found: dict[int, Any] = {}
            while len(found) < len(choices):
                found |= dict(await job.next())
                if any(completion.finish_reason == "error" for completion in found.values()):
                    raise _no_number()
        except BaseException as error:
            worker.cancel(job)
            if isinstance(error, QueueFull):
                raise APIError(429, f"{error}; try again later", code="queue_full") from None
            if isinstance(error, ValueError):
                name = str(error).partition(":")[0].partition("[")[0]
                raise APIError(400, str(error), name if name in CompletionRequest.model_fields else None) from None
            raise
        parts = [choice.whole(found[i], echoes[i] if echoes else None) for i, choice in enumerate(choices)]
        return JSONResponse({**head, "choices": parts, "usage": _usage(prompts, choices)})

    return app


async def _chunks(worker, job, head, choices, echoes, prompts, body) -> AsyncIterator[str]:
    """A stream's server-sent events."""
    usage = bool(body.stream_options and body.stream_options.include_usage)

    def data(parts: list[dict]) -> str:
        return f"data: {json.dumps({**head, 'choices': parts, **({'usage': None} if usage else {})})}\n\n"

    try:
        for echo in echoes:
            yield data([echo])
        running = len(choices)
        while running:
            events: dict[int, list[Event]] = {}
            for index, event in await job.next():
                events.setdefault(index, []).append(event)
            for index, found in events.items():
                part = choices[index].events(found)
                if part["finish_reason"] == "error":
                    raise _no_number()
                running -= part["finish_reason"] is not None
                if part["text"] or part["finish_reason"] or body.logprobs is not None or body.depths:
                    yield data([part])
        if usage:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(prompts, choices)})}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        if not isinstance(error, APIError):
            log.exception("a stream failed")
            error = APIError(500, "something went wrong; the server's log says what")
        yield f"data: {json.dumps(error.content)}\n\n"
    finally:
        worker.cancel(job)


def _no_number() -> APIError:
    return APIError(500, "model: expected numbers among its logits, got none")


def _usage(prompts: Sequence[_Prompt], choices: Sequence[_Choice]) -> dict:
    read, generated = sum(len(prompt.ids) for prompt in prompts), sum(choice.count for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


_PROMETHEUS = "text/plain; version=0.0.4"


def _prometheus(found: dict) -> str:
    """Engine.metrics in the text format that Prometheus reads."""
    depths = {f'{{depth="{depth}"}}': count for depth, count in enumerate(found["depth_histogram"], 1)}
    times = {f'{{quantile="0.{name[1:]}"}}': s for name, s in found["token_seconds"].items() if s is not None}
    lines = []
    for name, kind, values, text in (
        ("generated_tokens_total", "counter", found["tokens"], "tokens generated"),
        ("ticks_total", "counter", found["ticks"], "launches that advanced every slot"),
        ("positions_total", "counter", depths, "positions computed, by the recursions that they took"),
        ("preemptions_total", "counter", found["preemptions"], "requests whose pages were taken away"),
        ("occupancy_ratio", "gauge", found["occupancy"], "mean share of the slots that took a pass in a tick"),
        ("token_seconds", "gauge", times, "time between two tokens of a request"),
        ("running_requests", "gauge", found["running"], "requests that hold a slot"),
        ("waiting_requests", "gauge", found["waiting"], "requests that wait for one"),
        ("pages_in_use", "gauge", found["pages_in_use"], "pages of keys and values that are taken"),
        ("pages", "gauge", found["pages"], "pages of keys and values in all"),
        ("cache_bytes", "gauge", found["cache_bytes"], "size of the cache"),
    ):
        lines += [f"# HELP mor_{name} {text}", f"# TYPE mor_{name} {kind}"]
        lines += [f"mor_{name}{k} {v}" for k, v in (values if isinstance(values, dict) else {"": values}).items()]
    return "\n".join(lines) + "\n"


# The process


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: FastAPI):
        super().__init__(config)
        self.app = app

    async def shutdown(self, sockets=None) -> None:
        """Wait for what runs, but for GRACE seconds."""
        late = asyncio.get_running_loop().call_later(GRACE, self.app.state.worker.stop)
        await super().shutdown(sockets)
        late.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, whose port may be 0 for any. OSError if that can't be had, ValueError for no port."""
    if not 0 <= port < 2**16:  # getaddrinfo takes the rest
        raise ValueError(f"--port: expected 0 to 65535, got {port}")
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound:
            bound.close()
        expected = "expected a free address of this machine"
        raise OSError(f"--host, --port: {expected}, got {host}:{port}: {error}") from None
    return bound


def serve(app: FastAPI, bound: socket.socket, *, model_name: str, api_key: bool) -> None:
    """Serve an application of :func:`create_app` at a bound socket until SIGTERM or SIGINT, and say where."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    where = f"http://{f'[{host}]' if address.version == 6 else host}:{port}/v1"
    if not address.is_loopback and not api_key:
        print(f"warning: {where} can be reached from other machines, and asks for no key (--api-key, MOR_API_KEY)",
              file=sys.stderr)  # fmt: skip
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=math.ceil(GRACE) + 5)
    process = _Server(config, app)
    # uvicorn catches the signal while it runs, and sends it once more when it is through
    signal.signal(signal.SIGTERM, lambda *_: setattr(process, "should_exit", True))
    bound.listen(config.backlog)
    print(f"serving {model_name} at {where}", flush=True)
    try:
        process.run(sockets=[bound])
    finally:
        if (worker := app.state.worker) is not None:  # a second Ctrl-C leaves it as it is
            worker.stop()
            worker.thread.join(timeout=GRACE)
