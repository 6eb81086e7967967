"""Rotary embedding at the speed of memory, one launch for queries and keys; the backward turns by the negative angle.

    out[i] = x[i] cos(a) - x[i + half] sin(a);  out[i + half] = x[i + half] cos(a) + x[i] sin(a)
    a = position * theta^(-i / half)

A program holds the cosines and sines of a tile of tokens and goes through some of the heads, of the queries and then of
the keys; few tokens have their heads spread over more programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._triton import cos_sin, frequencies, step_of
from ._layout import batched

BYTES = 2048  # of each half of a head, in a tile: 16 a thread
PROGRAMS = 2048  # enough to fill a GPU


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
    cos, sin = cos_sin(position[:, None] * frequencies(step_high, step_low, BITS)[None, :])
    mask = inside[:, None] & (i < HALF)[None, :]
    first = program % shares * share
    last = tl.minimum(first + share, q_heads + k_heads)
    _rotate(q, out_q, cos, sin, b * q_b + n * q_n, token, i, mask, q_h, q_heads, first, tl.minimum(last, q_heads), HALF)
    if k is not None:
        first = tl.maximum(first - q_heads, 0)
        _rotate(k, out_k, cos, sin, b * k_b + n * k_n, token, i, mask, k_h, k_heads, first, last - q_heads, HALF)


def rope(q, k, positions, theta, inverse):
    out_q, out_k = q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)
    if out_q.numel() + out_k.numel():
        half = q.shape[-1] // 2
        q, k = batched(q), None if k is None else batched(k)
        batch, length, q_heads, _ = q.shape
        k_heads = 0 if k is None else k.shape[2]
        positions = positions.reshape(batch, length)
        bits = (half - 1).bit_length()
        tile = max(BYTES // q.element_size() >> bits, 1)
        tiles = triton.cdiv(batch * length, tile)
        share = triton.cdiv(q_heads + k_heads, min(triton.cdiv(PROGRAMS, tiles), q_heads + k_heads))
        shares = triton.cdiv(q_heads + k_heads, share)
        _rope[(tiles * shares,)](
            q, k, positions, out_q, None if k is None else out_k, *step_of(theta, half), -1 if inverse else 1,
            batch * length, length, share, shares, q_heads, k_heads,
            *positions.stride(), *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]),
            HALF=half, BITS=bits, TOKENS=tile, num_warps=4,
        )  # fmt: skip
    return out_q, out_k
