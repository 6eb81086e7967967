"""Cross-entropy of a linear layer's outputs, without all of its outputs at once.

Liger Kernel's does the same, but asks the device twice a call (how many targets there are, and whether the gradient is
1), and both times the host waits until all that was launched is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._layout import as_rows
from .._numeric import wide
from . import eager

CHUNK = 4096  # rows: 0.4 GB of logits in bf16 for 49,152 tokens; with fewer, the products leave a GPU partly idle
TILE = 128  # rows of the products' tiles
SUMS_IN_FP32 = torch.__version__ >= "2.8"  # of products of halves, see _add_product

_cross_entropy = define(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, bool gradient, str backend) -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=wide(logits.dtype)),
    check=eager.check,
    eager=eager.cross_entropy_,
    triton=deferred(f"{__name__}.triton", "cross_entropy_"),
)
_scaled = define(
    "scaled(Tensor x, Tensor factor, ScalarType dtype, str backend) -> Tensor",
    fake=lambda x, factor, dtype: x.new_empty(x.shape, dtype=dtype),
    eager=eager.scaled,
    triton=deferred(f"{__name__}.triton", "scaled"),
)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, whose sums are not rounded to a's dtype in between, where PyTorch (from 2.8 on) can do that."""
    if SUMS_IN_FP32 and a.is_cuda and total.dtype == torch.float32 != a.dtype:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _chunks(n: int) -> Iterator[slice]:
    """n rows in as few chunks as can be, and these alike."""
    rows = -(-n // max(-(-n // CHUNK), 1))
    rows = max(-(-rows // TILE), 1) * TILE
    return (slice(start, start + rows) for start in range(0, n, rows))


class _LinearCrossEntropy(torch.autograd.Function):
    """Of rows (n, D). The gradients are computed in the forward pass, while a chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        needs_x: bool,
        needs_weight: bool,
        backend: str,
    ) -> torch.Tensor:
        losses = x.new_empty(len(x), dtype=wide(x.dtype))
        d_x = x.new_empty(x.shape) if needs_x else None
        d_weight = weight.new_zeros(weight.shape, dtype=wide(weight.dtype)) if needs_weight else None
        for chunk in _chunks(len(x)):
            logits = x[chunk] @ weight.T  # until their losses are known; then their gradient
            losses[chunk] = _cross_entropy(logits, targets[chunk], needs_x or needs_weight, backend)
            if d_x is not None:
                torch.mm(logits, weight, out=d_x[chunk])
            if d_weight is not None:
                _add_product(d_weight, logits.T, x[chunk])
            del logits  # before the next chunk's are there
        total = losses.sum()
        ctx.save_for_backward(d_x, d_weight, total)  # the sum says what the two depend on, see first_order
        ctx.dtype, ctx.backend = weight.dtype, backend
        return total

    @staticmethod
    @first_order("linear_cross_entropy")
    def backward(ctx: Any, d_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if d is None else _scaled(d, d_total, ctx.dtype, ctx.backend) for d in ctx.saved_tensors[:2])
        return *gradients, None, None, None, None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Sum of the cross-entropies of ``x @ weight.T``, a few thousand tokens' logits at a time.

    Where a gradient is needed it is computed on the way: the logits of those tokens become their gradient in place, of
    which the gradients of x and weight are made at once, and these two are all that is kept for the backward pass.

    Args:
        x: (..., D); bf16, fp16, fp32 or fp64; any strides.
        weight: (V, D), of the same dtype; under autocast both are cast.
        targets: (...) int64, -100 for tokens without one, which count for nothing.
        backend: see :func:`route`.

    Returns:
        A scalar in fp32 (fp64 for fp64 x), to be divided by the number of targets for their mean. Logits are rounded to
        the dtype of x; losses and the logits' gradient are computed in fp32 (fp64 for fp64), the latter rounded once.
        The products are PyTorch's. Gradients reach x and weight.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "linear_cross_entropy"
    _checks.tensor(op, "x", x, ("...", "D"))
    _checks.tensor(op, "weight", weight, ("V", x.shape[-1]), like=x)
    _checks.tensor(op, "targets", targets, tuple(x.shape[:-1]), (torch.int64,), x)
    x, weight = _checks.one_dtype(op, x=x, weight=weight)
    # asked here, since in a Function's forward inputs need gradients in evaluation as well
    needs = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    backend = resolve(op, backend, x, registered="cross_entropy_")
    return apply(_LinearCrossEntropy, as_rows(x), weight, targets.flatten(), *needs, backend)
