"""A linear layer with what goes before and after it, of any number of rows: the kernels of the norm and of SwiGLU, and
PyTorch's products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kv.triton import append_in_place
from ..rms_norm.triton import add_rms_norm
from ..swiglu.triton import swiglu
from .eager import as_heads


def product(x, weight, norm_weight, eps):
    return F.linear(x if norm_weight is None else add_rms_norm(x, None, norm_weight, eps, x.dtype)[1], weight)


def decode_linear(x, weight, norm_weight, eps, residual, gated, prefetch):
    if residual is not None and not gated:
        h = x if norm_weight is None else add_rms_norm(x, None, norm_weight, eps, x.dtype)[1]
        return torch.addmm(residual, h, weight.mT)  # rounded once
    y = product(x, weight, norm_weight, eps)
    if gated:
        y = swiglu(y)
    return y if residual is None else y + residual


def decode_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, eps, prefetch):
    q, k, v = as_heads(product(x, weight, norm_weight, eps), heads, k_cache)
    return append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, None, None)
