"""Rotary embedding by the kernel of ``csrc/rope.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import index_code, launch
from ._layout import batched, split


def rope(q, k, positions, theta, inverse):
    out_q, out_k = q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)
    if out_q.numel() + out_k.numel():
        q, k = batched(q), None if k is None else batched(k)
        batch, length, q_heads, width = q.shape
        k_heads = 0 if k is None else k.shape[2]
        positions, code = index_code(positions.reshape(batch, length))
        launch(
            _C.rope, q, k, positions, out_q, None if k is None else out_k, batch, length, q_heads, k_heads, width // 2,
            theta, inverse, *positions.stride(), *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]), code,
            q.dtype,
        )  # fmt: skip
    return out_q, out_k


def rope_split(qkv, heads, positions, theta):
    q, k, v = split(qkv, heads)
    return *rope(q, k, positions, theta, False), v.contiguous()


def rope_join(q, k, v, positions, theta):
    return torch.cat((*rope(q, k, positions, theta, True), v), dim=-2)
