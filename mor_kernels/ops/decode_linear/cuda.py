"""Linear layers of few rows by the kernel of ``csrc/decode_linear.cu``."""

from __future__ import annotations

from ... import _C
from .._cuda import index_code, launch

PLAN = (0, 0)  # rows of the weight that a block has, and parts of K; 0: as the launcher chooses


def decode_linear(x, weight, norm_weight, eps, residual, gated, prefetch):
    (n, width), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    y = x.new_empty(n, columns)
    if y.numel():
        launch(
            _C.decode_linear, x, weight, None if norm_weight is None else norm_weight.contiguous(), residual, y, eps, n,
            width, columns, x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), gated,
            prefetch, *PLAN, x.dtype,
        )  # fmt: skip
    return y


def decode_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, eps, prefetch):
    n, (pages, page_size, groups, width) = x.shape[0], k_cache.shape
    q = x.new_empty(n, heads, width)
    if n:
        positions, code = index_code(positions.contiguous())
        launch(
            _C.decode_qkv, x, weight, norm_weight.contiguous(), slots.contiguous(), positions, q, k_cache, v_cache, eps,
            theta, n, x.shape[1], heads, groups, width, max(page_size, 1), pages * page_size, x.stride(0),
            weight.stride(0), (*k_cache.stride()[:3], *v_cache.stride()[:3]), prefetch, PLAN[1], code,
        )  # fmt: skip
    return q
