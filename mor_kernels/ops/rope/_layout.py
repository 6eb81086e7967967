"""Projections as the kernels want them."""

from __future__ import annotations

import torch


def split(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Queries (..., H, d), keys and values (..., G, d), views of (..., H + 2G, d)."""
    groups = (qkv.shape[-2] - heads) // 2
    return qkv.split((heads, groups, groups), -2)


def batched(x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, d), a view if its strides allow, with contiguous heads."""
    length = x.shape[-3] if x.dim() > 2 else 1
    x = x.reshape(x.shape[:-2].numel() // length, length, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()
