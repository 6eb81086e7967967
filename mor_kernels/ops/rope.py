"""Rotary position embedding at absolute positions."""

from __future__ import annotations

import torch

from . import _checks
from ._numeric import wide


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Rotate queries or keys by their positions (NeoX half-split pairs: dimension i with i + d/2).

    Args:
        x: (..., H, d), d even.
        positions: (...) integers, absolute positions (at every recursion, not a row's length or index).
        theta: base of the frequencies.

    Returns:
        Like x; angles and products are in fp32 (fp64 for fp64 x).
    """
    _checks.tensor("rope", "x", x, ("...", "H", "d"))
    _checks.tensor("rope", "positions", positions, tuple(x.shape[:-2]), _checks.INTEGERS, x)
    half, odd = divmod(x.shape[-1], 2)
    if odd:
        _checks.fail("rope", "x", "an even last dimension", x.shape[-1])
    dtype = wide(x.dtype)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (positions[..., None].to(dtype) * frequency)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
