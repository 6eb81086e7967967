"""Numerical rules that all ops share."""

from __future__ import annotations

from collections.abc import Callable

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums and gates are computed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bounded(logits: torch.Tensor) -> torch.Tensor:
    """Infinite logits as the largest finite numbers, so that they rank and gate as such; NaN stays."""
    largest = torch.finfo(logits.dtype).max
    return logits.clamp(-largest, largest)


def activate(logits: torch.Tensor, activation: str) -> torch.Tensor:
    """G of the paper for one logit a token."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    functions = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": torch.clone}
    return functions[activation](logits)
