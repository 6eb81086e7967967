"""A residual sum, its RMSNorm (Zhang and Sennrich, 2019) and perhaps the linear layer that reads the norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._layout import as_rows
from .._numeric import wide
from . import eager


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _sums(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], dtype=wide(rows.dtype))


def _sum_dtype(x: torch.Tensor, add: torch.Tensor | None) -> torch.dtype:
    return x.dtype if add is None else torch.promote_types(x.dtype, add.dtype)


_forward = define(
    "add_rms_norm(Tensor x, Tensor? add, Tensor weight, float eps, ScalarType dtype, str backend)"
    " -> (Tensor total, Tensor h, Tensor rstd)",
    fake=lambda x, add, weight, eps, dtype: (
        x.new_empty(0) if add is None else _like(x, _sum_dtype(x, add)), _like(x, dtype), _sums(x)
    ),
    eager=eager.add_rms_norm,
    triton=deferred(f"{__name__}.triton", "add_rms_norm"),
)  # fmt: skip
_backward = define(
    "add_rms_norm_backward(Tensor d_h, Tensor d_total, Tensor total, Tensor rstd, Tensor weight, bool again,"
    " str backend) -> (Tensor d, Tensor h, Tensor d_weight)",
    fake=lambda d_h, d_total, total, rstd, weight, again: (
        _like(total, total.dtype), _like(total, d_h.dtype) if again else d_h.new_empty(0), _like(weight, weight.dtype)
    ),
    eager=eager.add_rms_norm_backward,
    triton=deferred(f"{__name__}.triton", "add_rms_norm_backward"),
)  # fmt: skip


class _RMSNormLinear(torch.autograd.Function):
    """Of rows (n, D), without a linear layer if its weight is None. What that layer read isn't kept: the kernel that
    writes the gradient of the sum writes it anew on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        add: torch.Tensor | None,
        norm_weight: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _sum_dtype(x, add) if weight is None else weight.dtype
        total, h, rstd = _forward(x, add, norm_weight, eps, dtype, backend)
        if add is None:  # under another name, so that the gradient of both uses of x comes here
            total = torch.ops.aten._unsafe_view(x, x.shape)
        ctx.save_for_backward(total, rstd, norm_weight, weight)
        ctx.scalars = (eps, backend, None if add is None else add.dtype, x.dtype)
        return total, h if weight is None else F.linear(h, weight)

    @staticmethod
    @first_order("rms_norm and rms_norm_linear")
    def backward(
        ctx: Any, d_total: torch.Tensor, d_y: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        total, rstd, norm_weight, weight = ctx.saved_tensors  # read once: activation checkpointing allows no more
        eps, backend, add_dtype, x_dtype = ctx.scalars
        needs_x, needs_add, needs_norm, needs_weight, _, _ = ctx.needs_input_grad
        if needs_x or needs_add or needs_norm:
            d_h = d_y if weight is None else d_y @ weight
            d, h, d_norm = _backward(d_h, d_total, total, rstd, norm_weight, needs_weight, backend)
        elif needs_weight:
            h = _forward(total, None, norm_weight, eps, weight.dtype, backend)[1]
        return (
            d.to(x_dtype) if needs_x else None,
            d.to(add_dtype) if needs_add else None,
            d_norm if needs_norm else None,
            d_y.mT @ h if needs_weight else None,
            None,
            None,
        )  # fmt: skip


def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    add: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = x + add`` and ``rms_norm(total) @ weight.T``: where a Llama layer adds to the residual stream and reads
    it again.

    One kernel adds and normalises. Nothing but the sum and a number a token is kept for the backward pass, where one
    kernel adds the gradient that comes through the norm to that of the sum, and writes the normalised values anew for
    the gradient of weight.

    Args:
        x: (..., D); bf16, fp16, fp32 or fp64; any strides.
        norm_weight: (D,), the norm's gains.
        weight: (O, D).
        eps: added to the mean of squares.
        add: (..., D), or None for a sum that is x itself.
        backend: see :func:`route`.

    All are of one dtype. Under autocast weight alone is cast, and the others may differ: the residual stream stays in
    the dtype that it has.

    Returns:
        total and y, (..., D) in the dtype of x (of the wider one, where add's is another), and (..., O) in the dtype of
        weight. The sum is rounded to its dtype before it is normalised; the norm is computed in fp32 (fp64 for fp64)
        and rounded once, and so is the gradient. The products are PyTorch's. Gradients reach all four.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    return _rms_norm("rms_norm_linear", x, norm_weight, weight, eps, add, backend)


def rms_norm(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    add: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = x + add`` and ``rms_norm(total)``: :func:`rms_norm_linear` without its linear layer, for the norm
    before a head.

    Args:
        x: (..., D), as there; under autocast nothing is cast.
        norm_weight: (D,), as there.
        eps: as there.
        add: (..., D), as there.
        backend: see :func:`route`.

    Returns:
        total and h, each (..., D) in the dtype of x (of the wider one, where add's is another). Gradients reach x,
        norm_weight and add.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    return _rms_norm("rms_norm", x, norm_weight, None, eps, add, backend)


def _rms_norm(
    op: str,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    add: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _checks.tensor(op, "x", x, ("...", "D"))
    width = x.shape[-1]
    _checks.tensor(op, "norm_weight", norm_weight, (width,), like=x)
    if op == "rms_norm_linear":
        _checks.tensor(op, "weight", weight, ("O", width), like=x)
    if add is not None:
        _checks.tensor(op, "add", add, tuple(x.shape), like=x)
    dtype = _checks.autocast_dtype(x)
    if not dtype:
        _checks.one_dtype(op, x=x, norm_weight=norm_weight, weight=weight, add=add)
    elif weight is not None:
        weight = weight.to(dtype)
    rows = as_rows(x), None if add is None else as_rows(add)
    backend = resolve(op, backend, x, registered="add_rms_norm")
    total, y = apply(_RMSNormLinear, *rows, norm_weight, weight, _checks.number(op, "eps", eps), backend)
    return total.view(x.shape), y.view(*x.shape[:-1], y.shape[-1])
