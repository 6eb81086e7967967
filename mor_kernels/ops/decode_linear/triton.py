"""A linear layer with what goes before and after it, of any number of rows: the kernels of the norm and of SwiGLU, and
PyTorch's products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kv.triton import append_in_place
from ..rms_norm.triton import add_rms_norm
from ..swiglu.triton import swiglu
from .eager import as_heads, for_next_norm, rstd_of


def product(x, weight, norm_weight, squares, eps):
    """In the dtype of x; with squares in fp32, which nobody has rounded again."""
    y = F.linear(x if norm_weight is None else add_rms_norm(x, None, norm_weight, eps, x.dtype)[1], weight)
    return y if squares is None else y * rstd_of(squares, x.shape[1], eps)


def decode_linear(x, weight, norm_weight, squares, eps, residual, next_norm_weight, gated, prefetch):
    return for_next_norm(_linear(x, weight, norm_weight, squares, eps, residual, gated), next_norm_weight)


def _linear(x, weight, norm_weight, squares, eps, residual, gated):
    if residual is not None and squares is None and not gated:
        h = x if norm_weight is None else add_rms_norm(x, None, norm_weight, eps, x.dtype)[1]
        return torch.addmm(residual, h, weight.mT)  # rounded once
    y = product(x, weight, norm_weight, squares, eps)
    if gated:
        y = swiglu(y)
    return (y if residual is None else y + residual).to(x.dtype)


def decode_qkv(x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, squares, eps, prefetch):
    q, k, v = as_heads(product(x, weight, norm_weight, squares, eps), heads, k_cache)
    return append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, None, None).to(x.dtype)
