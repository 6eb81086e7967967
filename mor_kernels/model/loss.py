"""Cross-entropy of a linear layer's outputs, without all of its outputs at once.

Liger Kernel's does the same, but asks the device twice a call (how many targets there are, and whether the gradient is
1), and both times the host waits until all that was launched is done.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from ..ops._numeric import wide

CHUNK = 4096  # rows: 0.4 GB of logits in bf16 for 49,152 tokens; with fewer, the products leave a GPU partly idle


def softmax_(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies of logits (n, V) against targets (n, 1), -100 for none, and the gradient at the
    targets, (n, 1). The logits become softmax, the gradient elsewhere. Computed in fp32, in fp64 for fp64."""
    scores, given = logits.to(wide(logits.dtype)), targets >= 0
    log_sums = scores.logsumexp(1, keepdim=True)
    losses = log_sums - scores.gather(1, targets.clamp(min=0))
    logits.copy_(torch.where(given, (scores - log_sums).exp(), 0))
    return torch.where(given, losses, 0).sum(), torch.where(given, torch.expm1(-losses), 0).to(logits.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, whose sums are not rounded to a's dtype in between, where PyTorch (from 2.8 on) can do that."""
    if a.is_cuda and total.dtype == torch.float32 != a.dtype and torch.__version__ >= "2.8":
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are computed in the forward pass, while a chunk's logits are there."""

    @staticmethod
    def forward(ctx, x, weight, targets, softmax_):
        total = x.new_zeros((), dtype=wide(x.dtype))
        d_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if ctx.needs_input_grad[1] else None
        for start in range(0, len(x), CHUNK):
            chunk = slice(start, start + CHUNK)
            gradient, wanted = x[chunk] @ weight.T, targets[chunk, None]  # logits, until their loss is known
            loss, at_targets = softmax_(gradient, wanted)
            gradient.scatter_(1, wanted.clamp(min=0), at_targets)
            total += loss
            if d_x is not None:
                torch.mm(gradient, weight, out=d_x[chunk])
            if d_weight is not None:
                _add_product(d_weight, gradient.T, x[chunk])
        ctx.save_for_backward(d_x, d_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        d_x, d_weight = ctx.saved_tensors
        if d_x is not None:  # in d_total's fp32: rounded, one over the number of targets would be off alike for all
            d_x = (d_x.to(d_total.dtype) * d_total).to(d_x.dtype)
        return d_x, None if d_weight is None else (d_weight * d_total).to(ctx.dtype), None, None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softmax_: Callable = softmax_
) -> torch.Tensor:
    """Sum of the cross-entropies of ``x @ weight.T``, a scalar in fp32 (fp64 for fp64), differentiable once.

    Args:
        x: (n, D); weight: (V, D), of the same dtype, or under autocast of any.
        targets: (n,) int64, -100 for rows without one.
        softmax_: see :func:`softmax_`; a compiled one, for example.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return _LinearCrossEntropy.apply(x, weight, targets, softmax_)
