"""Rows of a stream by index, differentiable: how a recursion picks up its tokens."""

from __future__ import annotations

from typing import Any

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from . import eager

_forward = define(
    "gather(Tensor x, Tensor indices, str backend) -> Tensor",
    fake=lambda x, indices: x.new_empty(indices.shape[0], *x.shape[1:]),
    check=eager.check,
    eager=eager.gather,
    triton=deferred(f"{__name__}.triton", "gather"),
    cuda=deferred(f"{__name__}.cuda", "gather"),
)
_backward = define(
    "gather_backward(Tensor d_rows, Tensor indices, SymInt length, str backend) -> Tensor",
    fake=lambda d_rows, indices, length: d_rows.new_empty(length, *d_rows.shape[1:]),
    eager=eager.gather_backward,
    triton=deferred(f"{__name__}.triton", "gather_backward"),
    cuda=deferred(f"{__name__}.cuda", "gather_backward"),
)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor, backend: str) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.length, ctx.backend = x.shape[0], backend
        return _forward(x, indices, backend)

    @staticmethod
    @first_order("gather")
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return _backward(d_rows, indices, ctx.length, ctx.backend), None, None


def gather(x: torch.Tensor, indices: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """``x[indices]`` with zeros for index -1; a bit-exact copy.

    Args:
        x: (M, ...) rows; bf16, fp16, fp32 or fp64; any strides.
        indices: (n,) int64 in [-1, M), each row at most once (-1 as often as need be).
        backend: see :func:`route`.

    Returns:
        (n, ...), dtype of x; gradients reach x.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("gather", "x", x, ("M", "..."))
    _checks.tensor("gather", "indices", indices, ("n",), (torch.int64,), x)
    return apply(_Gather, x, indices, resolve("gather", backend, x))
