"""The ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from ..decode import Engine, Event, QueueFull
from .answers import Choice, token_name, usage
from .requests import APIError, CompletionRequest, invalid, plan
from .worker import Job, Worker, prompt_logprobs

log = logging.getLogger(__name__)


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
    name_of = functools.lru_cache(1 << 16)(functools.partial(token_name, engine.tokenizer))
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
        return invalid(error, request).response()

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
        return PlainTextResponse(prometheus(await working().ask(Engine.metrics)), media_type=PROMETHEUS)

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
            prompts = await asyncio.to_thread(plan, body, engine, max_choices)
            watches.add(task := asyncio.create_task(watch()))
            task.add_done_callback(watches.discard)
            choices: list[Choice] = []
            echoes: list[dict] = []
            for prompt in prompts:
                scores = None
                if body.echo and body.logprobs is not None and not job.gone:
                    score = functools.partial(prompt_logprobs, ids=prompt.ids, top=body.logprobs)
                    scores = await worker.ask(score)
                for _ in prompt.params:
                    choices.append(Choice(len(choices), prompt, body, engine.tokenizer, name_of))
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
        return JSONResponse({**head, "choices": parts, "usage": usage(prompts, choices)})

    return app


async def _chunks(worker, job, head, choices, echoes, prompts, body) -> AsyncIterator[str]:
    """A stream's server-sent events."""
    wants_usage = bool(body.stream_options and body.stream_options.include_usage)

    def data(parts: list[dict]) -> str:
        return f"data: {json.dumps({**head, 'choices': parts, **({'usage': None} if wants_usage else {})})}\n\n"

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
        if wants_usage:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(prompts, choices)})}\n\n"
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


PROMETHEUS = "text/plain; version=0.0.4"


def prometheus(found: dict) -> str:
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
