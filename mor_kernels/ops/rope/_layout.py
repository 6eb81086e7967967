from __future__ import annotations

import torch


def batched(x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, d), a view if its strides allow, with contiguous heads."""
    length = x.shape[-3] if x.dim() > 2 else 1
    x = x.reshape(x.shape[:-2].numel() // length, length, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()
