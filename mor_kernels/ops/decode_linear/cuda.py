"""Linear layers of few rows by the kernel of ``csrc/decode_linear.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import index_code, launch
from .._layout import contiguous
from .eager import OF_SQUARES

# Rows of the weight that a block has, parts of K, and KB of shared memory for what a block has of both; 0: as the
# launcher chooses.
PLAN = (0, 0, 0)


def decode_linear(x, weight, norm_weight, squares, eps, residual, next_norm_weight, gated, prefetch):
    (n, width), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    y = x.new_empty(n, columns)
    scaled = x.new_empty((0,) if next_norm_weight is None else y.shape)
    next_squares = x.new_empty(
        (0,) if next_norm_weight is None else (n, -(-columns // OF_SQUARES)), dtype=torch.float32
    )
    if y.numel():
        launch(
            _C.decode_linear, x, weight, *contiguous(norm_weight, squares), residual, *contiguous(next_norm_weight), y,
            scaled, next_squares, eps, n, width, columns, _partial(squares), x.stride(0), weight.stride(0),
            0 if residual is None else residual.stride(0), gated, prefetch, *PLAN, x.dtype,
        )  # fmt: skip
    return y, scaled, next_squares


def decode_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, squares, eps, prefetch):
    n, (pages, page_size, groups, width) = x.shape[0], k_cache.shape
    q = x.new_empty(n, heads, width)
    if n:
        positions, code = index_code(positions.contiguous())
        launch(
            _C.decode_qkv, x, weight, *contiguous(norm_weight, squares, slots), positions, q, k_cache, v_cache, eps,
            theta, n, x.shape[1], heads, groups, width, max(page_size, 1), _partial(squares), pages * page_size,
            x.stride(0), weight.stride(0), (*k_cache.stride()[:3], *v_cache.stride()[:3]), prefetch, *PLAN[1:], code,
        )  # fmt: skip
    return q


def _partial(squares):
    return 0 if squares is None else squares.shape[1]
