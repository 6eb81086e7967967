"""How kernels want their arguments to lie, whatever they are written in."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., D) as (n, D); (D,) is one row."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def strides(x: torch.Tensor | None) -> tuple[int, ...]:
    """Of the first three dimensions; zeros for None."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
