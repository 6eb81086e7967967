"""Gated residual update of the kept tokens, written back into the stream (paper, equations 1 and 2)."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import _checks
from .._dispatch import apply, define, resolve
from .._indices import flat_rows
from . import eager

RESIDUALS = ("block", "delta", "none")

_forward = define(
    "scatter_back(Tensor x, Tensor update, Tensor indices, Tensor? gates, str residual, str backend) -> Tensor",
    fake=lambda x, update, indices, gates, residual: x.new_empty(x.shape),
    eager=eager.scatter_back,
)
_backward = define(
    "scatter_back_backward(Tensor d_out, Tensor x, Tensor update, Tensor indices, Tensor? gates, str residual, "
    "str backend) -> (Tensor d_x, Tensor d_update, Tensor d_gates)",
    fake=lambda d_out, x, update, indices, gates, residual: (
        d_out.new_empty(d_out.shape),
        update.new_empty(update.shape),
        update.new_empty(0) if gates is None else gates.new_empty(gates.shape),
    ),
    eager=eager.scatter_back_backward,
)


class _ScatterBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, update, indices, gates, residual, backend):
        ctx.save_for_backward(x, update, indices, gates)
        ctx.residual, ctx.backend = residual, backend
        return _forward(x, update, indices, gates, residual, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, update, indices, gates = ctx.saved_tensors
        d_x, d_update, d_gates = _backward(d_out, x, update, indices, gates, ctx.residual, ctx.backend)
        return d_x, d_update, None, None if gates is None else d_gates, None, None


def scatter_back(
    x: torch.Tensor,
    update: torch.Tensor,
    indices: torch.Tensor,
    gates: torch.Tensor | None = None,
    *,
    residual: str = "block",
    backend: str | None = None,
) -> torch.Tensor:
    """The stream with the kept tokens updated; all other rows are bit-exact copies.

    At a kept token, with f its row of ``update`` and g its gate:

    ========= =====================
    residual  new row
    ========= =====================
    "block"   x + g * f
    "delta"   x + g * (f - x)
    "none"    g * f
    ========= =====================

    computed in fp32 and rounded once. Batched: x (B, N, D), update (B, k, D), indices and gates (B, k). Packed:
    x (M, D), update (n, D), indices and gates (n,). Deterministic, since no index occurs twice.

    Args:
        x: the stream; bf16, fp16, fp32 or fp64.
        update: the block's output at the kept tokens; may have another floating dtype than x.
        indices: int64, each row at most once; -1 for none.
        gates: fp32 or fp64; default 1.

    Returns:
        A new stream, shape and dtype of x; gradients reach x, update and gates.
    """
    op = "scatter_back"
    if not isinstance(x, torch.Tensor) or x.dim() not in (2, 3):
        _checks.fail(op, "x", "a tensor of shape (B, N, D) or (M, D)", getattr(x, "shape", type(x).__name__))
    *lead, width = x.shape
    kept = ("k",) if len(lead) == 1 else (lead[0], "k")
    _checks.tensor(op, "x", x, x.shape)
    _checks.tensor(op, "indices", indices, kept, (torch.int64,), x)
    _checks.tensor(op, "update", update, (*indices.shape, width), like=x)
    if gates is not None:
        _checks.tensor(op, "gates", gates, tuple(indices.shape), (torch.float32, torch.float64), x)
    _checks.choice(op, "residual", residual, RESIDUALS)
    out = apply(
        _ScatterBack,
        x.reshape(-1, width),
        update.reshape(-1, width),
        indices if len(lead) == 1 else flat_rows(indices, lead[1]),
        None if gates is None else gates.reshape(-1),
        residual,
        resolve(op, backend, x),
    )
    return out.view(x.shape)
