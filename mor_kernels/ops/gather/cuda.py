"""Gather and its backward by the kernels of ``csrc/gather.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import inverse_of, launch


def gather(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows = x.new_empty(indices.shape[0], *x.shape[1:])
    if rows.numel():
        flat = x.reshape(x.shape[0], rows[0].numel())
        launch(
            _C.gather, flat, indices.contiguous(), rows, len(rows), *flat.shape[:1], *flat.stride(), flat.shape[1],
            x.dtype,
        )  # fmt: skip
    return rows


def gather_backward(d_rows: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
    d_x = d_rows.new_empty(length, *d_rows.shape[1:])
    if d_x.numel():
        d_rows, indices = d_rows.contiguous(), indices.contiguous()
        inverse = inverse_of(indices[None], length)
        launch(
            _C.gather_backward, d_rows, indices, inverse, d_x, len(indices), length, d_x[0].numel(), d_x.dtype
        )  # fmt: skip
    return d_x
