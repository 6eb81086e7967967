from __future__ import annotations

import torch

from .._numeric import wide


def rope(q, k, positions, theta, inverse):
    dtype, half = wide(q.dtype), q.shape[-1] // 2
    # an fp32 angle at position 2^20 would be off by 0.06 radians; Apple's GPUs have nothing wider
    exact = torch.float32 if q.device.type == "mps" else torch.float64
    frequency = theta ** (-torch.arange(half, device=q.device, dtype=exact) / half)
    angle = (positions[..., None].to(exact) * frequency)[..., None, :]
    cos, sin = angle.cos().to(dtype), (-angle.sin() if inverse else angle.sin()).to(dtype)

    def rotate(x):
        first, second = x.to(dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    return rotate(q), q.new_empty(0) if k is None else rotate(k)
