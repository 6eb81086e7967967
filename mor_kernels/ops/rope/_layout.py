"""Projections as the kernels want them, and fused ones by kernels that know of none."""

from __future__ import annotations

from collections.abc import Callable

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


def split_by(rope: Callable) -> Callable:
    """``rope_split``, made of a backend's ``rope``."""

    def rope_split(qkv: torch.Tensor, heads: int, positions: torch.Tensor, theta: float) -> tuple[torch.Tensor, ...]:
        q, k, v = split(qkv, heads)
        return *rope(q, k, positions, theta, False), v.contiguous()

    return rope_split


def join_by(rope: Callable) -> Callable:
    """``rope_join``, likewise."""

    def rope_join(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, theta: float
    ) -> torch.Tensor:
        return torch.cat((*rope(q, k, positions, theta, True), v), dim=-2)

    return rope_join
