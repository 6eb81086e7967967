"""The end of a decoding step by the kernel of ``csrc/depth_step.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import ACTIVATIONS, RESIDUALS, launch
from .._layout import contiguous


def depth_step(
    x, update, logits, recursions, weight, last, replayed, aux_weight, activation, alpha, temperature, residual
):
    n, width = x.shape
    goes_on = torch.empty(n, dtype=torch.bool, device=x.device)
    if n:
        recursions, weight, last, replayed, aux_weight = contiguous(recursions, weight, last, replayed, aux_weight)
        launch(
            _C.depth_step, x, update, logits, recursions, weight, last, replayed, aux_weight, goes_on,
            n, weight.shape[0], width, *x.stride(), *update.stride(), *logits.stride(),
            ACTIVATIONS[activation], alpha, temperature, RESIDUALS[residual],
            x.dtype, update.dtype, weight.dtype, (weight if aux_weight is None else aux_weight).dtype,
        )  # fmt: skip
    return goes_on
