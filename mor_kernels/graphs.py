"""What captures of CUDA graphs share."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of a device: each stream keeps what memory it has had, and workspaces for products."""
    return torch.cuda.Stream(device)


def _give_workspaces() -> None:
    """PyTorch gives cuBLAS a workspace at a thread's first product on a stream, for good: were that one without a
    workspace, later ones would write where there is none. Backward passes have a thread of their own."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    for stream in (torch.cuda.current_stream(device), side_stream(device)):
        with torch.cuda.stream(stream):
            one = torch.ones(8, 8, device=device, requires_grad=torch.is_grad_enabled())
            product = torch.mm(one, one)
            if product.requires_grad:
                torch.autograd.grad(product.sum(), one)


@contextmanager
def without_workspace() -> Iterator[None]:
    """Within, cuBLAS has no workspace, on the current stream or in a capture on :func:`side_stream`. On Hopper most
    products take their tiles from a counter there, which is set to 0 before each; in a graph that is a node of its own,
    and 5 us pass in which nothing is computed. Without a workspace tiles are shared out beforehand, and the products
    themselves take as long.

    No other thread may do its first product on a stream meanwhile, which would be without a workspace for good.
    """
    variable, api = "CUBLAS_WORKSPACE_CONFIG", getattr(torch.backends.cuda, "cublas_workspace_size", None)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    # who has set the variable has a reason; deterministic algorithms need it set to what PyTorch tells
    if not hopper or variable in os.environ or torch.are_deterministic_algorithms_enabled():
        yield
        return
    _give_workspaces()
    size = api() if api else None
    try:
        if api:
            api(0)
        else:  # an older PyTorch, which looks there before each product
            os.environ[variable] = ":0:0"
        yield
    finally:
        if api:
            api(size)
        else:
            del os.environ[variable]


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Within, what is launched becomes ``graph``, without a workspace; on :func:`side_stream` and by this thread alone,
    since NCCL's watchdog asks for events of its own meanwhile.

    No garbage is collected meanwhile: it may hold other graphs or pinned memory, and CUDA invalidates a capture in
    whose midst these are freed.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with without_workspace(), torch.cuda.graph(graph, pool, side_stream(device), "thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
