"""Rotary embedding at the speed of memory, one launch for queries and keys; the backward turns by the negative angle.

    out[i] = x[i] cos(a) - x[i + half] sin(a);  out[i + half] = x[i + half] cos(a) + x[i] sin(a)
    a = position * theta^(-i / half)

A program holds the cosines and sines of a tile of tokens and goes through some of the heads, of the queries and then of
the keys; few tokens have their heads spread over more programs. Values of a fused projection are copied on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._layout import strides
from .._triton import cos_sin, frequencies, quotient, step_of
from ._layout import batched, split

BYTES = 2048  # of each half of a head, in a tile: 16 a thread
PROGRAMS = 4096  # so many that the last of them keep a GPU busy for little of the time


@triton.jit
def _rotate(x, out, cos, sin, rows, out_rows, i, mask, x_h, head, last, HALF: tl.constexpr):
    """Heads from ``head`` to ``last`` of a tile of tokens; their rows begin at ``rows`` of x, and at ``out_rows``."""
    source = x + rows[:, None] + i[None, :]
    target = out + out_rows[:, None] + i[None, :]
    while head < last:  # a range can't have these bounds in the interpreter of Triton 3.2
        a = tl.load(source + head * x_h, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + head * x_h + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + head * 2 * HALF, (a * cos - b * sin).to(out.dtype.element_ty), mask=mask)
        tl.store(target + head * 2 * HALF + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=mask)
        head += 1


@triton.jit
def _copy(x, out, rows, out_rows, i, mask, x_h, head, last, HALF: tl.constexpr):
    source = x + rows[:, None] + i[None, :]
    target = out + out_rows[:, None] + i[None, :]
    while head < last:
        for at in tl.static_range(0, 2 * HALF, HALF):
            tl.store(target + head * 2 * HALF + at, tl.load(source + head * x_h + at, mask=mask, other=0.0), mask=mask)
        head += 1


@triton.jit(
    do_not_specialize=[
        "direction", "tokens", "length", "share", "shares", "q_heads", "k_heads", "v_heads", "p_b", "p_n",
    ],
)  # fmt: skip
def _rope(
    q, k, v, positions, out_q, out_k, out_v, step_high, step_low, direction, tokens, length, share, shares,
    q_heads, k_heads, v_heads, p_b, p_n, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_q_n, out_k_n, out_v_n,
    HALF: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tokens and heads of out_q, out_k and out_v, which is copied; token b * length + n stands at (b, n)."""
    program = tl.program_id(0)
    token = (program // shares).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    b = quotient(token, length, tokens)
    n = token - b * length
    i = tl.arange(0, 2**BITS)
    inside = token < tokens
    position = tl.load(positions + b * p_b + n * p_n, mask=inside, other=0).to(tl.int64) * direction
    cos, sin = cos_sin(position[:, None] * frequencies(step_high, step_low, BITS)[None, :])
    mask = inside[:, None] & (i < HALF)[None, :]
    first = (program % shares * share).to(tl.int64)
    last = tl.minimum(first + share, q_heads + k_heads + v_heads)
    rows, out_rows = b * q_b + n * q_n, token * out_q_n
    _rotate(q, out_q, cos, sin, rows, out_rows, i, mask, q_h, first, tl.minimum(last, q_heads), HALF)
    if k is not None:
        first, last = tl.maximum(first - q_heads, 0), last - q_heads
        rows, out_rows = b * k_b + n * k_n, token * out_k_n
        _rotate(k, out_k, cos, sin, rows, out_rows, i, mask, k_h, first, tl.minimum(last, k_heads), HALF)
    if v is not None:
        first, last = tl.maximum(first - k_heads, 0), last - k_heads
        _copy(v, out_v, b * v_b + n * v_n, token * out_v_n, i, mask, v_h, first, last, HALF)


def _launch(tensors, outs, apart, positions, theta, inverse):
    """Queries, keys and values, the last or the last two perhaps None, into outs, whose tokens are so far apart."""
    if not sum(out.numel() for out in outs if out is not None):
        return
    tensors = [None if t is None else batched(t) for t in tensors]
    q = tensors[0]
    batch, length, _, width = q.shape
    heads = [0 if t is None else t.shape[2] for t in tensors]
    half, positions = width // 2, positions.reshape(batch, length)
    bits = (half - 1).bit_length()
    tile = max(BYTES // q.element_size() >> bits, 1)
    tiles = triton.cdiv(batch * length, tile)
    share = triton.cdiv(sum(heads), min(triton.cdiv(PROGRAMS, tiles), sum(heads)))
    shares = triton.cdiv(sum(heads), share)
    _rope[(tiles * shares,)](
        *tensors, positions, *outs, *step_of(theta, half), -1 if inverse else 1, batch * length, length, share, shares,
        *heads, *positions.stride(), *(stride for t in tensors for stride in strides(t)), *apart,
        HALF=half, BITS=bits, TOKENS=tile, num_warps=4,
    )  # fmt: skip


def rope(q, k, positions, theta, inverse):
    out_q, out_k = q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)
    apart = (q.shape[-2:].numel(), 0 if k is None else k.shape[-2:].numel(), 0)
    _launch((q, k, None), (out_q, None if k is None else out_k, None), apart, positions, theta, inverse)
    return out_q, out_k


def rope_split(qkv, heads, positions, theta):
    parts = split(qkv, heads)
    outs = [part.new_empty(part.shape) for part in parts]
    _launch(parts, outs, [part.shape[-2:].numel() for part in parts], positions, theta, False)
    return tuple(outs)


def rope_join(q, k, v, positions, theta):
    joined = q.new_empty(*q.shape[:-2], q.shape[-2] + 2 * k.shape[-2], q.shape[-1])
    _launch((q, k, v), split(joined, q.shape[-2]), (joined.shape[-2:].numel(),) * 3, positions, theta, True)
    return joined
