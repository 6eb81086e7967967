"""The second half of a SwiGLU block (Shazeer, 2020, "GLU Variants Improve Transformer"): gated values, and the product
with the down projection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._layout import as_rows
from . import eager

_forward = define(
    "swiglu(Tensor gate_up, str backend) -> Tensor",
    fake=lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    eager=eager.swiglu,
    triton=deferred(f"{__name__}.triton", "swiglu"),
)
_backward = define(
    "swiglu_backward_(Tensor(a!) d_h, Tensor gate_up, str backend) -> Tensor d_gate_up",  # and d_h becomes h
    fake=lambda d_h, gate_up: gate_up.new_empty(gate_up.shape),
    eager=eager.swiglu_backward_,
    triton=deferred(f"{__name__}.triton", "swiglu_backward_"),
)


class _SwigluLinear(torch.autograd.Function):
    """Of tokens as rows (n, 2F). h isn't kept: the kernel that reads its gradient writes it anew in place of that."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.backend = backend
        return F.linear(_forward(gate_up, backend), weight)

    @staticmethod
    @first_order("swiglu_linear")
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        gate_up, weight = ctx.saved_tensors  # read once: activation checkpointing allows no more
        needs_gate_up, needs_weight, _ = ctx.needs_input_grad
        d_gate_up = None
        if needs_gate_up:
            h = d_y @ weight  # its gradient, until the next line
            d_gate_up = _backward(h, gate_up, ctx.backend)
        elif needs_weight:
            h = _forward(gate_up, ctx.backend)
        return d_gate_up, d_y.mT @ h if needs_weight else None, None


def swiglu_linear(gate_up: torch.Tensor, weight: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """``(silu(gate) * up) @ weight.T`` of a fused projection ``[gate | up]``.

    Nothing but gate_up and weight is kept for the backward pass, where one kernel reads the gradient, gate and up once
    and writes the gradient of both, as one tensor, and in place of the one that it read the gated values, which the
    gradient of weight takes.

    Args:
        gate_up: (..., 2F), gates and then values; bf16, fp16, fp32 or fp64; any strides.
        weight: (D, F), of the same dtype; under autocast both are cast.
        backend: see :func:`route`.

    Returns:
        (..., D), dtype of gate_up (the autocast dtype under autocast). Gated values and their gradients are computed in
        fp32 (fp64 for fp64) and rounded once; the products are PyTorch's. Gradients reach gate_up and weight.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "swiglu_linear"
    _checks.tensor(op, "gate_up", gate_up, ("...", "2F"))
    if gate_up.shape[-1] % 2:
        _checks.fail(op, "gate_up", "an even last dimension", gate_up.shape[-1])
    _checks.tensor(op, "weight", weight, ("D", gate_up.shape[-1] // 2), like=gate_up)
    gate_up, weight = _checks.one_dtype(op, gate_up=gate_up, weight=weight)
    y = apply(_SwigluLinear, as_rows(gate_up), weight, resolve(op, backend, gate_up, registered="swiglu"))
    return y.view(*gate_up.shape[:-1], weight.shape[0])
