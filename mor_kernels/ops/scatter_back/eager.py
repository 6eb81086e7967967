from __future__ import annotations

import torch

from .. import _checks
from .._numeric import wide
from ..gather.eager import gather


def _write(x: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of x with ``rows`` at ``indices``; what is negative goes to a row past the end, which is cut off."""
    out = x.new_empty(x.shape[0] + 1, x.shape[1])
    out[:-1] = x
    out[torch.where(indices >= 0, indices, len(x))] = rows.to(x.dtype)
    return out[:-1].clone()


def scatter_back(x, update, indices, gates, residual):
    _checks.indices("scatter_back", "indices", indices, x.shape[0])
    dtype = wide(torch.promote_types(x.dtype, update.dtype))
    f, kept = update.to(dtype), gather(x, indices).to(dtype)
    g = 1 if gates is None else gates.to(dtype)[:, None]
    row = {"block": lambda: kept + g * f, "delta": lambda: kept + g * (f - kept), "none": lambda: g * f}[residual]()
    return _write(x, indices, row)


def scatter_back_backward(d_out, x, update, indices, gates, residual):
    dtype = wide(torch.promote_types(x.dtype, update.dtype))
    dy, f = gather(d_out, indices).to(dtype), update.to(dtype)
    g = 1 if gates is None else gates.to(dtype)[:, None]
    d_update = (g * dy).to(update.dtype)
    if residual == "block":
        d_x = d_out.clone()
    elif residual == "delta":
        d_x = _write(d_out, indices, (1 - g) * dy)
        f = f - gather(x, indices).to(dtype)
    else:
        d_x = _write(d_out, indices, torch.zeros_like(dy))
    if gates is None:
        return d_x, d_update, update.new_empty(0)
    d_gates = (dy * torch.where(indices[:, None] >= 0, f, 0)).sum(-1).to(gates.dtype)
    return d_x, d_update, d_gates
