"""Cross-entropy and its gradient at the speed of memory, a program a row, which is read twice and written once.

    loss = log(sum) + (m - z_t);  d_z = exp(z - m) / sum, at the target exp(-loss) - 1
    m = max z,  sum = sum of exp(z - m)

The first time through the row the maximum and the sum are kept up to date; the second time goes backwards, so that what
was read last, and is in a cache, comes first. Infinite logits and NaN make NaN as in PyTorch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

BLOCK = 8192  # columns that a program handles at once
LANE = 32  # columns of them a thread: half as many take longer by a tenth
SCALED = 2048  # elements of a program: 16 a thread
ALIGNED = 8  # columns that are loaded at once, if rows begin at multiples of so many: 16 bytes of halves


@triton.jit
def _expm1(x):
    """exp(x) - 1 of x <= 0, to a few units in the last place."""
    # near 0, where exp(x) - 1 would cancel, the series
    near = 1 + x / 6 * (1 + x / 7)
    near = 1 + x / 3 * (1 + x / 4 * (1 + x / 5 * near))
    return tl.where(x > -0.3, x * (1 + x / 2 * near), tl.exp(x) - 1)


@triton.jit
def _zero(row, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        tl.store(row + start + columns, tl.zeros([BLOCK], row.dtype.element_ty), mask=columns < width - start)


@triton.jit(do_not_specialize=["units"])
def _cross_entropy(logits, targets, losses, units, ALIGNED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """A row's loss, and with GRADIENT its gradient in place of it; of a negative target both are 0, and the row isn't
    read. The loss for a target past the end is NaN."""
    width = units * ALIGNED
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * width
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + n)
    if target < 0:
        tl.store(losses + n, 0.0)
        if GRADIENT:
            _zero(row, width, BLOCK)
    else:
        z_t = tl.load(row + target, mask=target < width, other=float("nan")).to(tl.float32)
        largest = tl.full((), -float("inf"), tl.float32)
        shift = tl.full((), 0.0, tl.float32)  # the largest so far; 0 while that is -inf
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            z = tl.load(row + start + columns, mask=columns < width - start, other=-float("inf")).to(tl.float32)
            before = largest
            largest = tl.maximum(largest, tl.max(z, 0))
            shift = tl.where(largest == -float("inf"), 0.0, largest)
            sums = sums * tl.exp(before - shift) + tl.exp(z - shift)
        total = tl.sum(sums, 0)
        loss = tl.log(total) + (shift - z_t)
        tl.store(losses + n, loss)
        if GRADIENT:
            scale, at_target = 1 / total, _expm1(-loss)
            last = (width - 1) // BLOCK * BLOCK
            for start in range(0, width, BLOCK):
                here = last - start
                mask = columns < width - here
                z = tl.load(row + here + columns, mask=mask, other=0.0).to(tl.float32)
                d_z = tl.where(columns == (target - here).to(tl.int32), at_target, tl.exp(z - shift) * scale)
                tl.store(row + here + columns, d_z.to(row.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(x, factor, out, n, BLOCK: tl.constexpr):
    """out = factor * x, rounded; Triton is to know whether n is a multiple of 16, so that it loads 16 bytes at once.
    Not one with attention's ``_finish``, so that a profile tells of which the time is."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(x + at, mask=at < n).to(tl.float32) * tl.load(factor)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=at < n)


def cross_entropy_(logits, targets, gradient):
    n, width = logits.shape
    if not width:
        return logits.new_zeros(n, dtype=torch.float32)
    losses = logits.new_empty(n, dtype=torch.float32)
    if n:
        rows = logits.contiguous()
        aligned = math.gcd(width, ALIGNED)
        block = min(triton.next_power_of_2(max(width, 16)), BLOCK)
        _cross_entropy[(n,)](
            rows, targets.contiguous(), losses, width // aligned,
            ALIGNED=aligned, GRADIENT=gradient, BLOCK=block, num_warps=max(block // (32 * LANE), 1),
        )  # fmt: skip
        if gradient and rows is not logits:
            logits.copy_(rows)
    return losses


def scaled(x, factor, dtype):
    out = x.new_empty(x.shape, dtype=dtype)
    if n := out.numel():
        _scaled[(triton.cdiv(n, SCALED),)](x.contiguous(), factor, out, n, BLOCK=SCALED, num_warps=4)
    return out
