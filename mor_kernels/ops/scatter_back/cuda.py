"""Scatter-back by the kernels of ``csrc/scatter_back.cu``."""

from __future__ import annotations

from ... import _C
from .._cuda import RESIDUALS, inverse_of, launch
from .._layout import contiguous, strides


def scatter_back(x, update, indices, gates, residual):
    out = x.new_empty(x.shape)
    if out.numel():
        indices, gates = contiguous(indices, gates)
        inverse = inverse_of(indices, x.shape[1])
        _launch(x, update, indices, inverse, gates, out, residual)
    return out


def scatter_back_in_place(x, update, indices, gates, residual):
    if x.numel() and update.numel():
        _launch(x, update, *contiguous(indices), None, *contiguous(gates), x, residual)


def _launch(x, update, indices, inverse, gates, out, residual):
    (batch, length, width), k = x.shape, indices.shape[1]
    launch(
        _C.scatter_back, x, update, indices, inverse, gates, out, batch, length, k, *x.stride(), *update.stride(),
        width, RESIDUALS[residual], x.dtype, update.dtype,
    )  # fmt: skip


def scatter_back_backward(d_out, x, update, indices, gates, dtype, residual):
    (batch, length, width), k = d_out.shape, indices.shape[1]
    d_x = d_out.new_empty(0 if residual == "block" else d_out.shape)
    d_update = d_out.new_empty(batch, k, width, dtype=dtype)
    d_gates = None if gates is None else gates.new_empty(gates.shape)
    indices, gates = contiguous(indices, gates)
    if batch * k + d_x.numel():
        inverse = None if residual == "block" else inverse_of(indices, length)
        launch(
            _C.scatter_back_backward, d_out, x, update, indices, inverse, gates, d_x, d_update, d_gates,
            batch, length, k, *d_out.stride(), *strides(x), *strides(update), width, RESIDUALS[residual], d_out.dtype,
            dtype,
        )  # fmt: skip
    return d_x, d_update, d_out.new_empty(0) if d_gates is None else d_gates
