"""Rotary embedding by the kernel of ``csrc/rope.cu``."""

from __future__ import annotations

from ... import _C
from .._cuda import index_code, launch
from .._layout import strides
from ._layout import batched


def rope(q, k, positions, theta, inverse):
    out_q, out_k = q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)
    if out_q.numel() + out_k.numel():
        q, k = batched(q), None if k is None else batched(k)
        batch, length, q_heads, width = q.shape
        k_heads = 0 if k is None else k.shape[2]
        positions, code = index_code(positions.reshape(batch, length))
        launch(
            _C.rope, q, k, positions, out_q, None if k is None else out_k, batch, length, q_heads, k_heads, width // 2,
            theta, inverse, *positions.stride(), *strides(q), *strides(k), code,
            q.dtype,
        )  # fmt: skip
    return out_q, out_k
