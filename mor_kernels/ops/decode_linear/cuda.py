"""A linear layer of few rows by the kernel of ``csrc/decode_linear.cu``."""

from __future__ import annotations

from ... import _C
from .._cuda import launch

PLAN = (0, 0)  # rows of the weight that a block has, and parts of K; 0: as the launcher chooses


def decode_linear(x, weight, norm_weight, eps, residual, gated, prefetch):
    (n, width), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    y = x.new_empty(n, columns)
    if y.numel():
        launch(
            _C.decode_linear, x, weight, None if norm_weight is None else norm_weight.contiguous(), residual, y, eps, n,
            width, columns, x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), gated,
            prefetch, *PLAN, x.dtype,
        )  # fmt: skip
    return y
