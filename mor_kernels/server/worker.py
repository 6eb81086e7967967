"""The thread that an engine belongs to.

It executes what it is called with between two steps of the engine, and waits where there is nothing to generate.
Requests are checked and made into tokens before they come to it, and what comes out goes back to the event loop, step
by step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..decode import Completion, Engine, Event, SamplingParams
from ..decode.sampler import LOGITS_AT_ONCE, log_probabilities
from .requests import APIError

log = logging.getLogger(__name__)


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
        step = max(1, LOGITS_AT_ONCE // logits.shape[-1])
        for chunk, following in zip(logits[0].split(step), tokens[0, 1:].split(step)):
            chosen, values, others = (t.tolist() for t in log_probabilities(chunk, following, top))
            found += [(c, tuple(zip(o, v))) for c, v, o in zip(chosen, values, others)]
    return found
