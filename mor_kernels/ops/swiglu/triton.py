"""SwiGLU at the speed of memory: each pass reads what it needs once.

    h = silu(gate) up;  d_up = d_h silu(gate);  d_gate = d_h up sigma (1 + gate (1 - sigma)),  sigma = sigmoid(gate)

A program has a tile of rows by columns, whose width wastes as little as can be of the last one in a row: of 2,560
columns, five times 512.
"""

from __future__ import annotations

import triton
import triton.language as tl

BYTES = 4096  # of each tensor in a tile: 32 a thread, so that enough loads are on their way
WIDTHS = (1024, 512, 256, 128)  # of a tile, in columns; of a narrower row, all of it


@triton.jit
def _place(n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of this program's tile, and which of them are there."""
    pieces: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = program % pieces * COLUMNS + tl.arange(0, COLUMNS)
    return row[:, None], column[None, :], (row < n)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _load(gate_up, row, column, mask, stride, WIDTH: tl.constexpr):
    """gate, up and sigmoid(gate) in fp32."""
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    return gate, up, 1 / (1 + tl.exp(-gate))


@triton.jit(do_not_specialize=["n"])
def _swiglu(gate_up, h, n, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, mask = _place(n, WIDTH, ROWS, COLUMNS)
    gate, up, sigma = _load(gate_up, row, column, mask, stride, WIDTH)
    tl.store(h + row * WIDTH + column, (gate * sigma * up).to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n"])
def _swiglu_backward(
    d_h, gate_up, d_gate_up, n, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """d_h becomes h."""
    row, column, mask = _place(n, WIDTH, ROWS, COLUMNS)
    dtype = d_h.dtype.element_ty
    place = d_h + row * WIDTH + column
    d = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    gate, up, sigma = _load(gate_up, row, column, mask, stride, WIDTH)
    silu = gate * sigma
    target = d_gate_up + row * (2 * WIDTH) + column
    tl.store(target, (d * up * sigma * (1 + gate * (1 - sigma))).to(dtype), mask=mask)
    tl.store(target + WIDTH, (d * silu).to(dtype), mask=mask)
    tl.debug_barrier()  # other threads may write here than have read
    tl.store(place, (silu * up).to(dtype), mask=mask)


def columns_of(width: int) -> int:
    """Of a tile: the power of two that leaves the fewest unused in a row, the widest of equals."""
    if width <= WIDTHS[-1]:
        return triton.next_power_of_2(max(width, 16))
    return min(WIDTHS, key=lambda columns: -width % columns)


def _launch(kernel, gate_up, out, *d_h):
    gate_up = gate_up.flatten(0, -2)
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    columns = columns_of(width)
    rows = max(BYTES // gate_up.element_size() // columns, 1)
    kernel[(triton.cdiv(n, rows) * triton.cdiv(width, columns),)](
        *d_h, gate_up, out, n, gate_up.stride(0), WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=4
    )


def swiglu(gate_up):
    h = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if h.numel():
        _launch(_swiglu, gate_up, h)
    return h


def swiglu_backward_(d_h, gate_up):
    d_gate_up = gate_up.new_empty(gate_up.shape)
    if d_h.numel():
        rows = d_h.contiguous()
        _launch(_swiglu_backward, gate_up, d_gate_up, rows)
        if rows is not d_h:
            d_h.copy_(rows)
    return d_gate_up
