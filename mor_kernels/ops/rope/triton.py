"""Rotary embedding at the speed of memory, one launch for queries and keys; the backward turns by the negative angle.

    out[i] = x[i] cos(a) - x[i + half] sin(a);  out[i + half] = x[i + half] cos(a) + x[i] sin(a)
    a = position * theta^(-i / half)

A program holds the cosines and sines of a tile of tokens and goes through some of the heads, of the queries and then of
the keys; few tokens have their heads spread over more programs.

An fp32 angle at position 2^20 would be off by 0.06 radians, and CUDA's sine of a large angle needs a table in local
memory. So angles are counted in turns, as 64-bit fractions of one: with f = 2^64 theta^(-i / half) / 2 pi, rounded, the
product position * f modulo 2^64, which is what integers compute, has lost nothing but whole turns. Its distance to the
nearest quarter of a turn goes through polynomials in fp32 (Cephes, Moshier 1992), and the quarter swaps and signs them.
"""

from __future__ import annotations

import ctypes
import math

import torch
import triton
import triton.language as tl

TURNS_PER_RADIAN = tl.constexpr(1 / (2 * math.pi))
RADIANS = tl.constexpr(2 * math.pi / 2**64)  # in a 64-bit fraction of a turn
BYTES = 2048  # of each half of a head, in a tile: 16 a thread
PROGRAMS = 2048  # enough to fill a GPU


@triton.jit
def _frequencies(step_high, step_low, BITS: tl.constexpr):
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
def _cos_sin(turn):
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


@triton.jit
def _rotate(x, out, cos, sin, rows, token, i, mask, x_h, heads, head, last, HALF: tl.constexpr):
    """Heads from ``head`` to ``last`` of a tile of tokens; their rows begin at ``rows`` of x."""
    source = x + rows[:, None] + i[None, :]
    target = out + (token * heads * 2 * HALF)[:, None] + i[None, :]
    while head < last:  # a range can't have these bounds in the interpreter of Triton 3.2
        a = tl.load(source + head * x_h, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + head * x_h + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + head * 2 * HALF, (a * cos - b * sin).to(out.dtype.element_ty), mask=mask)
        tl.store(target + head * 2 * HALF + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=mask)
        head += 1


@triton.jit(
    do_not_specialize=["direction", "tokens", "length", "share", "shares", "q_heads", "k_heads", "p_b", "p_n"],
)
def _rope(
    q, k, positions, out_q, out_k, step_high, step_low, direction, tokens, length, share, shares, q_heads, k_heads,
    p_b, p_n, q_b, q_n, q_h, k_b, k_n, k_h,
    HALF: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tokens and heads of out_q and out_k; token b * length + n stands at (b, n)."""
    program = tl.program_id(0).to(tl.int64)
    token = program // shares * TOKENS + tl.arange(0, TOKENS)
    b, n = token // length, token % length
    i = tl.arange(0, 2**BITS)
    inside = token < tokens
    position = tl.load(positions + b * p_b + n * p_n, mask=inside, other=0).to(tl.int64) * direction
    cos, sin = _cos_sin(position[:, None] * _frequencies(step_high, step_low, BITS)[None, :])
    mask = inside[:, None] & (i < HALF)[None, :]
    first = program % shares * share
    last = tl.minimum(first + share, q_heads + k_heads)
    _rotate(q, out_q, cos, sin, b * q_b + n * q_n, token, i, mask, q_h, q_heads, first, tl.minimum(last, q_heads), HALF)
    if k is not None:
        first = tl.maximum(first - q_heads, 0)
        _rotate(k, out_k, cos, sin, b * k_b + n * k_n, token, i, mask, k_h, k_heads, first, last - q_heads, HALF)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, d), a view if its strides allow, with contiguous heads."""
    length = x.shape[-3] if x.dim() > 2 else 1
    x = x.reshape(x.shape[:-2].numel() // length, length, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def rope(q, k, positions, theta, inverse):
    out_q, out_k = q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)
    if out_q.numel() + out_k.numel():
        half = q.shape[-1] // 2
        q, k = _batched(q), None if k is None else _batched(k)
        batch, length, q_heads, _ = q.shape
        k_heads = 0 if k is None else k.shape[2]
        positions = positions.reshape(batch, length)
        bits = (half - 1).bit_length()
        tile = max(BYTES // q.element_size() >> bits, 1)
        tiles = triton.cdiv(batch * length, tile)
        share = triton.cdiv(q_heads + k_heads, min(triton.cdiv(PROGRAMS, tiles), q_heads + k_heads))
        shares = triton.cdiv(q_heads + k_heads, share)
        step = theta ** (-1 / half)
        high = ctypes.c_float(step).value
        _rope[(tiles * shares,)](
            q, k, positions, out_q, None if k is None else out_k, high, step - high, -1 if inverse else 1,
            batch * length, length, share, shares, q_heads, k_heads,
            *positions.stride(), *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]),
            HALF=half, BITS=bits, TOKENS=tile, num_warps=4,
        )  # fmt: skip
    return out_q, out_k
