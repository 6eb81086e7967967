from __future__ import annotations

import torch

from .. import _checks
from .._numeric import wide
from ..gather.eager import gather_batched


def _put_(x: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``rows`` (B, k, D) into x (B, N, D), those of index -1 nowhere."""
    if 0 in (*indices.shape, x.shape[1]):
        return
    # A slot of index -1 repeats the write of its sequence's first real slot (or, without any, writes row 0 as it is):
    # the same value to the same place, so nothing else is touched and nothing waits for the device.
    b = torch.arange(len(x), device=x.device)[:, None]
    real = indices >= 0
    first = real.int().argmax(1, keepdim=True)
    home = indices.gather(1, first).clamp(min=0)
    rows = rows.to(x.dtype)
    spare = torch.where(real.gather(1, first)[..., None], rows[b, first], x[b, home])
    x.index_put_((b, torch.where(real, indices, home)), torch.where(real[..., None], rows, spare))


def _gates(gates: torch.Tensor | None, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, k, 1), 0 for index -1."""
    gates = torch.ones(indices.shape, dtype=dtype, device=indices.device) if gates is None else gates.to(dtype)
    return torch.where(indices >= 0, gates, 0)[..., None]


def check(x, update, indices, gates, residual, op="scatter_back"):
    _checks.indices(op, "indices", indices, x.shape[1])
    _checks.distinct(op, "indices", indices)


def check_in_place(x, update, indices, gates, residual):
    check(x, update, indices, gates, residual, "scatter_back_")
    _checks.apart("scatter_back_", {"x": x}, update=update, indices=indices, gates=gates)


def scatter_back_in_place(x, update, indices, gates, residual):
    dtype = wide(torch.promote_types(x.dtype, update.dtype))
    f, kept, g = update.to(dtype), gather_batched(x, indices).to(dtype), _gates(gates, indices, dtype)
    row = {"block": lambda: kept + g * f, "delta": lambda: kept + g * (f - kept), "none": lambda: g * f}[residual]()
    _put_(x, indices, row)


def scatter_back(x, update, indices, gates, residual):
    out = x.clone(memory_format=torch.contiguous_format)
    scatter_back_in_place(out, update, indices, gates, residual)
    return out


def scatter_back_backward(d_out, x, update, indices, gates, dtype, residual):
    compute = wide(torch.promote_types(d_out.dtype, dtype))
    dy, g = gather_batched(d_out, indices).to(compute), _gates(gates, indices, compute)
    d_update = (g * dy).to(dtype)
    d_x, d_gates = d_out.new_empty(0), d_out.new_empty(0)
    if residual != "block":
        d_x = d_out.clone(memory_format=torch.contiguous_format)
        _put_(d_x, indices, (1 - g) * dy if residual == "delta" else torch.zeros_like(dy))
    if gates is not None:
        f = update.to(compute) - (gather_batched(x, indices).to(compute) if residual == "delta" else 0)
        d_gates = (dy * torch.where(indices[..., None] >= 0, f, 0)).sum(-1).to(gates.dtype)
    return d_x, d_update, d_gates
