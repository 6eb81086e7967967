"""Scatter-back at the speed of memory: each row is read once and written once.

With f the update of a kept row x, g its gate (1 without gates) and dy the gradient of the new row y:

========= ================ ============ ============== ===================
residual  y                d_x          d_update       d_gates
========= ================ ============ ============== ===================
"block"   x + g * f        dy           g * dy         sum dy * f
"delta"   x + g * (f - x)  (1 - g) * dy g * dy         sum dy * (f - x)
"none"    g * f            0            g * dy         sum dy * f
========= ================ ============ ============== ===================

What passes over the whole stream goes by position and looks up the slot of each, :func:`.._triton.place`; what touches
kept rows alone goes by slot. A position has one slot at most, so every sum is one program's, and nothing is atomic. An
index outside the sequence counts as -1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._layout import contiguous, strides
from .._triton import combine, inverse_of, place, tile

# A program waits for an index before it can ask for a row, so it takes many small ones to keep the memory busy: with
# four times as many elements each, the forward takes 1.2 times and the backward of "delta" 1.7 times as long.
ELEMENTS = 2048


@triton.jit
def _at(base, rows, d, stride_row, stride_d):
    """Addresses of elements ``d`` of ``rows``."""
    return base + rows.to(tl.int64)[:, None] * stride_row + d.to(tl.int64)[None, :] * stride_d


@triton.jit
def _gate(gates, slots, there):
    """(rows, 1) gates, 0 where there is no slot."""
    if gates is None:
        g = tl.where(there, 1.0, 0.0)
    else:
        g = tl.load(gates + slots, mask=there, other=0.0)
    return g[:, None]


@triton.jit(do_not_specialize=["length", "k"])
def _scatter(
    x, update, indices, inverse, gates, out, length, k, x_b, x_n, x_d, f_b, f_k, f_d,
    D: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[n] = the new row where n has a slot, else x[n]."""
    tiles = tl.cdiv(length, ROWS)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < length
    columns = (d < D)[None, :]
    j = place(indices + b * k, inverse + b * length, n, k, inside)
    kept = j >= 0
    read = inside & (j < 0) if RESIDUAL == "none" else inside
    row = tl.load(_at(x + b * x_b, n, d, x_n, x_d), mask=read[:, None] & columns, other=0.0)
    f = tl.load(_at(update + b * f_b, j, d, f_k, f_d), mask=kept[:, None] & columns, other=0.0)
    new = combine(row, f, _gate(gates, b * k + j, kept), RESIDUAL).to(row.dtype)
    tl.store(_at(out + b * length * D, n, d, D, 1), tl.where(kept[:, None], new, row), mask=inside[:, None] & columns)


@triton.jit
def _slots(indices, program, length, k, ROWS: tl.constexpr):
    """A program's sequence, slots, and their positions (negative for none)."""
    tiles = tl.cdiv(k, ROWS)
    b = (program // tiles).to(tl.int64)
    j = program % tiles * ROWS + tl.arange(0, ROWS)
    n = tl.load(indices + b * k + j, mask=j < k, other=-1)
    return b, j, tl.where(n < length, n, -1)


@triton.jit(do_not_specialize=["length", "k"])
def _in_place(
    x, update, indices, gates, length, k, x_b, x_n, x_d, f_b, f_k, f_d,
    D: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """x[n] = the new row where n has a slot."""
    b, j, n = _slots(indices, tl.program_id(0), length, k, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    kept = n >= 0
    mask = kept[:, None] & (d < D)[None, :]
    rows = _at(x + b * x_b, n, d, x_n, x_d)
    row = 0.0 if RESIDUAL == "none" else tl.load(rows, mask=mask, other=0.0)
    f = tl.load(_at(update + b * f_b, j, d, f_k, f_d), mask=mask, other=0.0)
    new = combine(row, f, _gate(gates, b * k + j, kept), RESIDUAL)
    tl.store(rows, new.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "k"])
def _backward_of_slots(
    d_out, update, indices, gates, d_update, d_gates, length, k, y_b, y_n, y_d, f_b, f_k, f_d,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d_update and d_gates of "block", 0 where there is no position."""
    b, j, n = _slots(indices, tl.program_id(0), length, k, ROWS)
    kept = n >= 0
    g = _gate(gates, b * k + j, kept)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        columns = (d < D)[None, :]
        mask = kept[:, None] & columns
        dy = tl.load(_at(d_out + b * y_b, n, d, y_n, y_d), mask=mask, other=0.0).to(tl.float32)
        if gates is not None:
            f = tl.load(_at(update + b * f_b, j, d, f_k, f_d), mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(dy * f, axis=1)
        d_f = (g * dy).to(d_update.dtype.element_ty)
        tl.store(_at(d_update + b * k * D, j, d, D, 1), d_f, mask=(j < k)[:, None] & columns)
    if gates is not None:
        tl.store(d_gates + b * k + j, total, mask=j < k)


@triton.jit
def _zero_slots_of_none(
    indices, program, d_update, d_gates, length, k, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    b, j, n = _slots(indices, program, length, k, ROWS)
    none = (j < k) & (n < 0)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        zero = tl.zeros([ROWS, WIDTH], d_update.dtype.element_ty)
        tl.store(_at(d_update + b * k * D, j, d, D, 1), zero, mask=none[:, None] & (d < D)[None, :])
    if d_gates is not None:
        tl.store(d_gates + b * k + j, tl.zeros([ROWS], tl.float32), mask=none)


@triton.jit
def _backward_of_positions(
    d_out, x, update, indices, inverse, gates, d_x, d_update, d_gates, program, length, k,
    y_b, y_n, y_d, x_b, x_n, x_d, f_b, f_k, f_d,
    D: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, ROWS)
    b = (program // tiles).to(tl.int64)
    n = program % tiles * ROWS + tl.arange(0, ROWS)
    inside = n < length
    j = place(indices + b * k, inverse + b * length, n, k, inside)
    kept = j >= 0
    g = _gate(gates, b * k + j, kept)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        columns = (d < D)[None, :]
        mask = kept[:, None] & columns
        d_row = tl.load(_at(d_out + b * y_b, n, d, y_n, y_d), mask=inside[:, None] & columns, other=0.0)
        dy = d_row.to(tl.float32)
        if gates is not None:
            f = tl.load(_at(update + b * f_b, j, d, f_k, f_d), mask=mask, other=0.0).to(tl.float32)
            if RESIDUAL == "delta":
                f -= tl.load(_at(x + b * x_b, n, d, x_n, x_d), mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(dy * f, axis=1)
        tl.store(_at(d_update + b * k * D, j, d, D, 1), (g * dy).to(d_update.dtype.element_ty), mask=mask)
        kept_row = (1.0 - g) * dy if RESIDUAL == "delta" else tl.zeros_like(dy)
        d_row = tl.where(kept[:, None], kept_row.to(d_row.dtype), d_row)
        tl.store(_at(d_x + b * length * D, n, d, D, 1), d_row, mask=inside[:, None] & columns)
    if gates is not None:
        tl.store(d_gates + b * k + j, total, mask=kept)


@triton.jit(do_not_specialize=["batch", "length", "k"])
def _scatter_backward(
    d_out, x, update, indices, inverse, gates, d_x, d_update, d_gates, batch, length, k,
    y_b, y_n, y_d, x_b, x_n, x_d, f_b, f_k, f_d,
    D: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All gradients of "delta" and "none": programs of positions, then programs that fill the slots of index -1."""
    program = tl.program_id(0)
    by_position = batch * tl.cdiv(length, ROWS)
    if program < by_position:
        _backward_of_positions(
            d_out, x, update, indices, inverse, gates, d_x, d_update, d_gates, program, length, k,
            y_b, y_n, y_d, x_b, x_n, x_d, f_b, f_k, f_d, D, RESIDUAL, ROWS, WIDTH,
        )  # fmt: skip
    else:
        _zero_slots_of_none(indices, program - by_position, d_update, d_gates, length, k, D, ROWS, WIDTH)


def scatter_back(x, update, indices, gates, residual):
    out = x.new_empty(x.shape)
    if out.numel():
        batch, length, width = x.shape
        size = tile(width, ELEMENTS, 4)
        indices, gates = contiguous(indices, gates)
        _scatter[(batch * triton.cdiv(length, size.rows), triton.cdiv(width, size.width))](
            x, update, indices, inverse_of(indices, length), gates, out, length, indices.shape[1],
            *x.stride(), *update.stride(),
            D=width, RESIDUAL=residual, ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip
    return out


def scatter_back_in_place(x, update, indices, gates, residual):
    if x.numel() and update.numel():
        batch, k, width = update.shape
        size = tile(width, ELEMENTS, 4)
        _in_place[(batch * triton.cdiv(k, size.rows), triton.cdiv(width, size.width))](
            x, update, *contiguous(indices, gates), x.shape[1], k, *x.stride(), *update.stride(),
            D=width, RESIDUAL=residual, ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip


def scatter_back_backward(d_out, x, update, indices, gates, dtype, residual):
    (batch, length, width), k = d_out.shape, indices.shape[1]
    d_x = d_out.new_empty(0 if residual == "block" else d_out.shape)
    d_update = d_out.new_empty(batch, k, width, dtype=dtype)
    d_gates = None if gates is None else gates.new_empty(gates.shape)
    indices, gates = contiguous(indices, gates)
    size = tile(width, ELEMENTS, 4)
    by_slot = batch * triton.cdiv(k, size.rows)
    constants = {"D": width, "ROWS": size.rows, "WIDTH": size.width, "num_warps": size.num_warps}
    if residual == "block":
        if by_slot:
            _backward_of_slots[(by_slot,)](
                d_out, update, indices, gates, d_update, d_gates, length, k, *d_out.stride(), *strides(update),
                **constants,
            )  # fmt: skip
    elif by_slot + d_x.numel():
        _scatter_backward[(batch * triton.cdiv(length, size.rows) + by_slot,)](
            d_out, x, update, indices, inverse_of(indices, length), gates, d_x, d_update, d_gates, batch, length, k,
            *d_out.stride(), *strides(x), *strides(update), RESIDUAL=residual, **constants,
        )  # fmt: skip
    return d_x, d_update, d_out.new_empty(0) if d_gates is None else d_gates
