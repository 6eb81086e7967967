from __future__ import annotations

import torch.nn.functional as F

from .._numeric import wide
from ..rms_norm import eager as norm
from ..swiglu import eager as gates


def product(x, weight, norm_weight, eps):
    """In fp32 (fp64 for fp64), not rounded."""
    x, weight = x.to(wide(x.dtype)), weight.to(wide(weight.dtype))
    if norm_weight is not None:
        x = norm.add_rms_norm(x, None, norm_weight.to(x.dtype), eps, x.dtype)[1]
    return F.linear(x, weight)


def decode_linear(x, weight, norm_weight, eps, residual, gated, prefetch):
    y = product(x, weight, norm_weight, eps)
    if gated:
        y = gates.swiglu(y)
    return (y if residual is None else y + residual.to(y.dtype)).to(x.dtype)
