from __future__ import annotations

import torch

from .. import _checks
from .._indices import flat_rows


def _column(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))


def check(x: torch.Tensor, indices: torch.Tensor) -> None:
    _checks.indices("gather", "indices", indices, x.shape[0])
    _checks.distinct("gather", "indices", indices)


def gather(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(indices.shape[0], *x.shape[1:])
    return torch.where(_column(indices >= 0, x), x[indices.clamp(min=0)], 0)


def gather_batched(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """(B, k, D) rows of x (B, N, D) at positions (B, k) of their sequences, zeros for -1."""
    return gather(x.flatten(0, 1), flat_rows(indices, x.shape[1])).view(*indices.shape, x.shape[2])


def gather_backward(d_rows: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
    d_x = d_rows.new_zeros(length + 1, *d_rows.shape[1:])  # the row past the end takes what -1 brings
    d_x[torch.where(indices >= 0, indices, length)] = d_rows
    return d_x[:length].clone()
