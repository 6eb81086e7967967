from __future__ import annotations

import torch.nn.functional as F

from .. import _checks
from .._numeric import wide
from ..kv.eager import append_in_place
from ..rms_norm import eager as norm
from ..swiglu import eager as gates


def product(x, weight, norm_weight, eps):
    """In fp32 (fp64 for fp64), not rounded."""
    x, weight = x.to(wide(x.dtype)), weight.to(wide(weight.dtype))
    if norm_weight is not None:
        x = norm.add_rms_norm(x, None, norm_weight.to(x.dtype), eps, x.dtype)[1]
    return F.linear(x, weight)


def as_heads(y, heads, k_cache):
    """Queries, keys and values, views (n, heads, d) of their projection."""
    groups, width = k_cache.shape[2:]
    return y.view(y.shape[0], heads + 2 * groups, width).split((heads, groups, groups), 1)


def decode_linear(x, weight, norm_weight, eps, residual, gated, prefetch):
    y = product(x, weight, norm_weight, eps)
    if gated:
        y = gates.swiglu(y)
    return (y if residual is None else y + residual.to(y.dtype)).to(x.dtype)


def decode_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, eps, prefetch):
    _checks.indices("decode_qkv_", "slots", slots, k_cache.shape[0] * k_cache.shape[1])
    q, k, v = as_heads(product(x, weight, norm_weight, eps), heads, k_cache)
    return append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, None, None).to(x.dtype)
