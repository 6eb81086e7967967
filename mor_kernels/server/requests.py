"""What clients may ask for, and what the engine is asked for then; errors in the shape of OpenAI's."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from ..decode import Engine, SamplingParams
from ..decode.text import decode

MAX_LOGPROBS = 20  # of a token; each is decoded for the answer


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


class Prompt(NamedTuple):
    ids: list[int]
    text: str
    params: list[SamplingParams]  # of each of n choices


def plan(body: CompletionRequest, engine: Engine, max_choices: int) -> list[Prompt]:
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
        found.append(Prompt(ids, text, params))
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


def invalid(error: RequestValidationError, request: Request) -> APIError:
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
