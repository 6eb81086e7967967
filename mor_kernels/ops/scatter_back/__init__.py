"""Gated residual update of the kept tokens, written back into the stream (paper, equations 1 and 2)."""

from __future__ import annotations

from typing import Any

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from . import eager

RESIDUALS = ("block", "delta", "none")


def _fake_backward(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    update: torch.Tensor | None,
    indices: torch.Tensor,
    gates: torch.Tensor | None,
    dtype: torch.dtype,
    residual: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        d_out.new_empty(0 if residual == "block" else d_out.shape),
        d_out.new_empty(*indices.shape, d_out.shape[2], dtype=dtype),
        d_out.new_empty(0) if gates is None else gates.new_empty(gates.shape),
    )


_forward = define(
    "scatter_back(Tensor x, Tensor update, Tensor indices, Tensor? gates, str residual, str backend) -> Tensor",
    fake=lambda x, update, indices, gates, residual: x.new_empty(x.shape),
    check=eager.check,
    eager=eager.scatter_back,
    triton=deferred(f"{__name__}.triton", "scatter_back"),
    cuda=deferred(f"{__name__}.cuda", "scatter_back"),
)
_in_place = define(
    "scatter_back_(Tensor(a!) x, Tensor update, Tensor indices, Tensor? gates, str residual, str backend) -> ()",
    fake=lambda *_: None,
    check=eager.check_in_place,
    eager=eager.scatter_back_in_place,
    triton=deferred(f"{__name__}.triton", "scatter_back_in_place"),
    cuda=deferred(f"{__name__}.cuda", "scatter_back_in_place"),
)
_backward = define(
    "scatter_back_backward(Tensor d_out, Tensor? x, Tensor? update, Tensor indices, Tensor? gates, ScalarType dtype, "
    "str residual, str backend) -> (Tensor d_x, Tensor d_update, Tensor d_gates)",
    fake=_fake_backward,
    eager=eager.scatter_back_backward,
    triton=deferred(f"{__name__}.triton", "scatter_back_backward"),
    cuda=deferred(f"{__name__}.cuda", "scatter_back_backward"),
)


class _ScatterBack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        update: torch.Tensor,
        indices: torch.Tensor,
        gates: torch.Tensor | None,
        residual: str,
        backend: str,
    ) -> torch.Tensor:
        # The gradients of x and update need neither; d_x of "block" is d_out itself, so the op leaves it out.
        needs_x = gates is not None and residual == "delta"
        ctx.save_for_backward(x if needs_x else None, None if gates is None else update, indices, gates)
        ctx.scalars = (update.dtype, residual, backend)
        return _forward(x, update, indices, gates, residual, backend)

    @staticmethod
    @first_order("scatter_back")
    def backward(
        ctx: Any, d_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None, None, None]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
        d_x, d_update, d_gates = _backward(d_out, *saved, *ctx.scalars)
        gated, residual = saved[3] is not None, ctx.scalars[1]
        return d_out if residual == "block" else d_x, d_update, None, d_gates if gated else None, None, None


def _batched(
    op: str, x: torch.Tensor, update: torch.Tensor, indices: torch.Tensor, gates: torch.Tensor | None, residual: str
) -> tuple[torch.Tensor | None, ...]:
    """The checked tensors, packed ones as a batch of one."""
    _checks.tensor(op, "x", x, ("...",))
    if x.dim() not in (2, 3):
        _checks.fail(op, "x", "a tensor of shape (B, N, D) or (M, D)", tuple(x.shape))
    *lead, width = x.shape
    kept = ("k",) if len(lead) == 1 else (lead[0], "k")
    _checks.tensor(op, "indices", indices, kept, (torch.int64,), x)
    _checks.tensor(op, "update", update, (*indices.shape, width), like=x)
    if gates is not None:
        _checks.tensor(op, "gates", gates, tuple(indices.shape), (torch.float32, torch.float64), x)
    _checks.choice(op, "residual", residual, RESIDUALS)
    tensors = (x, update, indices, gates)
    return tensors if len(lead) == 2 else tuple(None if t is None else t.unsqueeze(0) for t in tensors)


def scatter_back(
    x: torch.Tensor,
    update: torch.Tensor,
    indices: torch.Tensor,
    gates: torch.Tensor | None = None,
    *,
    residual: str = "block",
    backend: str | None = None,
) -> torch.Tensor:
    """The stream with the kept tokens updated (paper, equations 1 and 2); all other rows are bit-exact copies.

    At a kept token, with f its row of ``update`` and g its gate:

    ========= =====================
    residual  new row
    ========= =====================
    "block"   x + g * f
    "delta"   x + g * (f - x)
    "none"    g * f
    ========= =====================

    computed in fp32 and rounded once. The stream is batched or packed. Deterministic, since no index occurs twice.

    Args:
        x: (B, N, D) or (M, D), the stream; bf16, fp16, fp32 or fp64; any strides.
        update: (B, k, D) or (n, D), the block's output at the kept tokens; may have another floating dtype than x.
        indices: (B, k) or (n,) int64, in any order, each row at most once; -1 for none.
        gates: (B, k) or (n,), fp32 or fp64; default 1.
        residual: which of the above.
        backend: see :func:`route`.

    Returns:
        A new stream, shape and dtype of x; gradients reach x, update and gates.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "scatter_back"
    tensors = _batched(op, x, update, indices, gates, residual)
    return apply(_ScatterBack, *tensors, residual, resolve(op, backend, x, update, gates)).view(x.shape)


def scatter_back_(
    x: torch.Tensor,
    update: torch.Tensor,
    indices: torch.Tensor,
    gates: torch.Tensor | None = None,
    *,
    residual: str = "block",
    backend: str | None = None,
) -> torch.Tensor:
    """As :func:`scatter_back`, bit for bit, but into the given x, of which only the kept rows are touched; no gradient.

    Args:
        x: (B, N, D) or (M, D), as there; no two rows of it share memory.
        update: (B, k, D) or (n, D), as there; shares no memory with x.
        indices: (B, k) or (n,) int64, as there.
        gates: (B, k) or (n,), as there.
        residual: as there.
        backend: see :func:`route`.

    Returns:
        x itself.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "scatter_back_"
    tensors = _batched(op, x, update, indices, gates, residual)
    _checks.written(op, x=x)
    _checks.no_gradient(op, x, update, gates, instead="use scatter_back")
    _in_place(*tensors, residual, resolve(op, backend, x, update, gates))
    return x
