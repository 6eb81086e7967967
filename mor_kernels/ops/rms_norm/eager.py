from __future__ import annotations

from .._numeric import wide


def add_rms_norm(x, add, weight, eps, dtype):
    total = x if add is None else x + add
    values = total.to(wide(total.dtype)).contiguous()  # PyTorch on the CPU adds up in an order that strides decide
    rstd = (values.square().mean(1) + eps).rsqrt()
    h = (values * rstd[:, None] * weight).to(dtype)
    return x.new_empty(0) if add is None else total, h, rstd


def add_rms_norm_backward(d_h, d_total, total, rstd, weight, again):
    dtype = total.dtype
    total, of_h, d_total = (t.to(rstd.dtype).contiguous() for t in (total, d_h, d_total))
    unit = total * rstd[:, None]
    gradient = of_h * weight
    through = rstd[:, None] * (gradient - unit * (gradient * unit).mean(1, keepdim=True))
    h = (unit * weight).to(d_h.dtype) if again else d_h.new_empty(0)
    return (d_total + through).to(dtype), h, (of_h * unit).sum(0).to(weight.dtype)
