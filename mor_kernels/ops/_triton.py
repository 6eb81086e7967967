"""What the Triton kernels of several ops share.

Kernels load any dtype and compute in fp32. Sizes that change from call to call (lengths, k) are never specialised on,
so that a new one compiles nothing. Offsets are int64 before they are multiplied by a stride.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e38)  # below any score of attention, and finite: exp2(-inf - LEAST) is 0
TURNS_PER_RADIAN = tl.constexpr(1 / (2 * math.pi))
RADIANS = tl.constexpr(2 * math.pi / 2**64)  # in a 64-bit fraction of a turn


@triton.jit
def quotient(number, divisor, count):
    """number // divisor of int64 numbers below ``count``, and of others anything: of 32 bits if these hold the count,
    since a division of 64 takes a hundred instructions."""
    return (number.to(count.dtype) // divisor).to(tl.int64)


@triton.jit
def bounded(value, largest):
    """Infinities as the largest finite number; NaN stays."""
    value = tl.where(value > largest, largest, value)
    return tl.where(value < -largest, -largest, value)


@triton.jit
def activate(logit, ACTIVATION: tl.constexpr):
    """G(logit), to a few units in the last place."""
    if ACTIVATION == "sigmoid":
        return 1 / (1 + tl.exp(-logit))
    elif ACTIVATION == "tanh":
        e = tl.exp(-2 * tl.abs(logit))
        far = (1 - e) / (1 + e)
        square = logit * logit  # near 0, where 1 - e would cancel, the series
        near = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        return tl.where(tl.abs(logit) < 0.3, logit * near, tl.where(logit < 0, -far, far))
    else:
        return logit


@triton.jit
def gate(logit, alpha, ACTIVATION: tl.constexpr):
    """alpha * G(logit); 0 where the logit is not a number."""
    return tl.where(logit == logit, bounded(alpha * activate(logit, ACTIVATION), FLOAT_MAX), 0.0)


@triton.jit
def combine(x, f, g, RESIDUAL: tl.constexpr):
    """The new state, in fp32, of a state x, the block's f of it and the gate."""
    f = f.to(tl.float32)
    if RESIDUAL == "block":
        y = x.to(tl.float32) + g * f
    elif RESIDUAL == "delta":
        y = x.to(tl.float32) + g * (f - x.to(tl.float32))
    else:
        y = g * f
    return y


class Tile(NamedTuple):
    """Rows that a program handles at once, columns of them (a power of two), and its warps."""

    rows: int
    width: int
    num_warps: int


def tile(width: int, elements: int, num_warps: int) -> Tile:
    """Whole rows as long as they fit into ``elements``, which each kernel chooses once, whatever the length."""
    columns = min(triton.next_power_of_2(max(width, 16)), elements)
    return Tile(max(elements // columns, 1), columns, num_warps)


@triton.jit(do_not_specialize=["rows"])
def _sum_rows(x, out, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < width)


def sum_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (rows, width), a row from each program of a kernel, summed up and rounded: (width,), in an order that depends
    on the number of rows alone. PyTorch takes two kernels and several times as long."""
    rows, width = x.shape
    out = x.new_empty(width, dtype=dtype)
    if width:
        _sum_rows[(triton.cdiv(width, 16),)](x, out, rows, width, ROWS=512, WIDTH=16, num_warps=8)
    return out


@triton.jit(do_not_specialize=["length", "k"])
def _invert(indices, inverse, length, k, BLOCK: tl.constexpr):
    """inverse[b, indices[b, j]] = j; what no index names stays as it was, see :func:`inverse_of`."""
    blocks = tl.cdiv(k, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + b * k + j, mask=j < k, other=-1)
    tl.store(inverse + b * length + index, j, mask=(index >= 0) & (index < length))


def inverse_of(indices: torch.Tensor, length: int) -> torch.Tensor:
    """(B, length) int32: where each position stands among its row of the indices (B, k), in any order, -1 for none.

    What no index names is left unwritten, since filling would take another pass: only a j for which ``indices[b, j]``
    is the position asked for is one, see :func:`place`.
    """
    batch, k = indices.shape
    inverse = torch.empty(batch, length, dtype=torch.int32, device=indices.device)
    if batch and k:
        _invert[(batch * triton.cdiv(k, 1024),)](indices.contiguous(), inverse, length, k, BLOCK=1024, num_warps=4)
    return inverse


@triton.jit
def place(indices, inverse, position, k, mask):
    """Where ``position`` stands among ``indices`` (both of one row), or -1."""
    j = tl.load(inverse + position, mask=mask, other=-1)
    mask = mask & (j >= 0) & (j < k)
    return tl.where(mask & (tl.load(indices + j, mask=mask, other=-1) == position), j, -1)


@triton.jit
def find(ascending, position, count, mask):
    """Where ``position`` stands among ``count`` ascending positions, -1 at the end; or -1. For what is known ascending:
    a search of log4(count) steps, but no launch before."""
    stride = tl.full((), 1, tl.int64)
    while stride * 4 <= count:
        stride *= 4
    low = tl.zeros_like(position)  # all before it are smaller
    while stride > 0:
        smaller = tl.zeros_like(position)
        for step in tl.static_range(1, 4):
            at = low + (step * stride - 1)
            found = tl.load(ascending + at, mask=mask & (at < count), other=-1)
            smaller += ((found >= 0) & (found < position)).to(position.dtype)
        low += smaller * stride
        stride //= 4
    there = mask & (low < count)
    return tl.where(there & (tl.load(ascending + low, mask=there, other=-1) == position), low, -1)


# Rotary embedding. An fp32 angle at position 2^20 would be off by 0.06 radians, and CUDA's sine of a large one needs a
# table in local memory. So angles are counted in turns, as 64-bit fractions of one: with f = 2^64 theta^(-i / half) /
# 2 pi, rounded, the product position * f modulo 2^64, which is what integers compute, has lost nothing but whole turns.
# Its distance to the nearest quarter of a turn goes through polynomials in fp32 (Cephes, Moshier 1992), and the quarter
# swaps and signs them.


def step_of(theta: float, half: int) -> tuple[float, float]:
    """theta^(-1 / half) as the sum of two fp32, since Triton passes no fp64."""
    step = theta ** (-1 / half)
    high = ctypes.c_float(step).value
    return high, step - high


@triton.jit
def frequencies(step_high, step_low, BITS: tl.constexpr):
    """theta^(-i / half) in 64-bit fractions of a turn, less whole turns. The step theta^(-1 / half) comes as the sum of
    two fp32, since Triton passes no fp64; float64 exponentiation by squaring keeps its 48 bits."""
    i = tl.arange(0, 2**BITS)
    turns = tl.full((2**BITS,), TURNS_PER_RADIAN, tl.float64)
    power = tl.full((2**BITS,), step_high, tl.float64) + tl.full((2**BITS,), step_low, tl.float64)
    for bit in tl.static_range(BITS):
        turns = tl.where((i >> bit) & 1 == 1, turns * power, turns)
        power *= power
    return ((turns - tl.floor(turns + 0.5)) * 18446744073709551616.0).to(tl.int64)


@triton.jit
def cos_sin(turn):
    """Cosine and sine of a 64-bit fraction of a turn."""
    quarter = ((turn >> 61) + 1) >> 1  # the nearest, -2..2
    x = (turn - (quarter << 62)).to(tl.float32) * RADIANS  # at most pi / 4
    quarter = quarter.to(tl.int32)
    y = x * x
    sin = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 + y * -1.9515295891e-4))
    cos = 1.0 - 0.5 * y + y * y * (4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5))
    odd = (quarter & 1) == 1
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) == 2, -cos, cos), tl.where((quarter & 2) == 2, -sin, sin)


# Keys and values of 8 bits (e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity). They travel as
# uint8, since neither an A100 nor the interpreter has the type.


@triton.jit
def to_e4m3(x):
    """fp32 -> uint8, rounded to the nearest, ties to even; what is larger than 448 becomes 448, NaN stays."""
    largest: tl.constexpr = 448.0
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), largest)
    normal = size.to(tl.int32, bitcast=True)
    normal = (normal + 0x7FFFF + ((normal >> 20) & 1) >> 20) - (120 << 3)
    # below 2^-6 the last place is 2^-9: that of an fp32 number between 2^14 and 2^15
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 -> dtype, exactly."""
    if NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # the bits of an fp16 number that is 2^-8 of it, smaller ones included
        wide = x.to(tl.int16)
        value = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(dtype)


def has_float8() -> bool:
    """Whether the GPU that Triton compiles for converts e4m3 by itself."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return triton.runtime.driver.active.get_current_target().arch >= 89


@triton.jit
def last_at_most(ascending, value, count):
    """The last of ``count`` ascending numbers, the first of them at most ``value`` (n,), that is at most ``value``; 16
    are looked at at once, since each step waits for memory."""
    low = tl.zeros_like(value)
    step = tl.arange(0, 16)[None, :]
    stride = tl.full((), 1, tl.int32)
    while stride * 16 < count:
        stride *= 16
    while stride > 0:
        at = low[:, None] + step * stride
        there = at < count
        found = tl.load(ascending + at, mask=there, other=0)
        low += (tl.sum((there & (found <= value[:, None])).to(tl.int32), 1) - 1) * stride
        stride //= 16
    return low
