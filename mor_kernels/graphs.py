"""What captures of CUDA graphs share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_workspace() -> Iterator[None]:
    """Within, cuBLAS has no workspace. On Hopper most products take their tiles from a counter there, which is set to 0
    before each; in a graph that is a node of its own, and 5 us pass in which nothing is computed. Without a workspace
    tiles are shared out beforehand, and the products themselves take as long."""
    variable, api = "CUBLAS_WORKSPACE_CONFIG", getattr(torch.backends.cuda, "cublas_workspace_size", None)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    # who has set the variable has a reason; deterministic algorithms need it set to what PyTorch tells
    if not hopper or variable in os.environ or torch.are_deterministic_algorithms_enabled():
        yield
        return
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
