from __future__ import annotations

import torch.nn.functional as F

from .._numeric import wide
from ..kv.eager import append_in_place, check_append
from ..rms_norm import eager as norm
from ..swiglu import eager as gates

OF_SQUARES = 32  # columns whose squares are summed up


def product(x, weight, norm_weight, squares, eps):
    """In fp32 (fp64 for fp64), not rounded."""
    x, weight = x.to(wide(x.dtype)), weight.to(wide(weight.dtype))
    if norm_weight is not None:
        x = norm.add_rms_norm(x, None, norm_weight.to(x.dtype), eps, x.dtype)[1]
    y = F.linear(x, weight)
    return y if squares is None else y * rstd_of(squares, x.shape[1], eps)


def rstd_of(squares, width, eps):
    """(n, 1)"""
    return (squares.sum(1, keepdim=True) / width + eps).rsqrt()


def for_next_norm(y, gains):
    """y, and what a layer that is given its squares reads: y times the gains, and sums of squares of 32 columns each;
    without gains, nothing of either."""
    dtype = wide(y.dtype)
    if gains is None:
        return y, y.new_empty(0), y.new_empty(0, dtype=dtype)
    columns = y.shape[1]
    padded = F.pad(y.to(dtype), (0, -columns % OF_SQUARES))
    return y, y * gains, padded.view(len(y), -(-columns // OF_SQUARES), OF_SQUARES).square().sum(2)


def as_heads(y, heads, k_cache):
    """Queries, keys and values, views (n, heads, d) of their projection."""
    groups, width = k_cache.shape[2:]
    return y.view(y.shape[0], heads + 2 * groups, width).split((heads, groups, groups), 1)


def decode_linear(x, weight, norm_weight, squares, eps, residual, next_norm_weight, gated, prefetch):
    y = product(x, weight, norm_weight, squares, eps)
    if gated:
        y = gates.swiglu(y)
    y = (y if residual is None else y + residual.to(y.dtype)).to(x.dtype)
    return for_next_norm(y, next_norm_weight)


def check_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, squares, eps, prefetch):
    read = {"x": x, "weight": weight, "positions": positions, "norm_weight": norm_weight, "squares": squares}
    check_append("decode_qkv_", k_cache, v_cache, slots, **read)


def decode_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, squares, eps, prefetch):
    q, k, v = as_heads(product(x, weight, norm_weight, squares, eps), heads, k_cache)
    return append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, None, None).to(x.dtype)
