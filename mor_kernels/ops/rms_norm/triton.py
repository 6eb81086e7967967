"""RMSNorm at the speed of memory: each pass reads what it needs once.

    s = x + add,  r = 1 / sqrt(mean s^2 + eps),  u = s r,  h = u w
    d_s = d_s (of the sum itself) + r (d_u - u mean(d_u u)),  d_u = d_h w;  d_w = sum over rows of d_h u

A program has whole rows, each in the registers of as few warps as can be: their means take no shared memory then. In
the backward pass it goes through many tiles of rows and sums d_w up on the way; another kernel adds the sums of all
programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._dispatch import properties
from .._triton import sum_rows

ELEMENTS = 4096  # of a tile: 32 a thread; half as many if rows aren't whole vectors, and each has its own address
PROGRAMS = 3  # of the backward pass for each multiprocessor: registers have room for so many at once


@triton.jit
def _place(row, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where the elements of rows are, and which of them are there."""
    column = tl.arange(0, BLOCK)[None, :]
    return row[:, None] * WIDTH + column, (row < n)[:, None] & (column < WIDTH)


@triton.jit
def _gains(weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    return tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["n"])
def _add_rms_norm(x, add, weight, total, h, rstd, eps, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, mask = _place(row, n, WIDTH, BLOCK)
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if add is not None:
        rounded = (s + tl.load(add + at, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        s = rounded.to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(s * s, 1) / WIDTH + eps)
    tl.store(rstd + row, r, mask=row < n)
    tl.store(h + at, (s * r[:, None] * _gains(weight, WIDTH, BLOCK)).to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n"])
def _add_rms_norm_backward(
    d_h, d_total, total, rstd, weight, d, h, parts, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    w = _gains(weight, WIDTH, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * ROWS
    while start < n:  # a range can't have this bound in the interpreter of Triton 3.2
        row = start + tl.arange(0, ROWS)
        at, mask = _place(row, n, WIDTH, BLOCK)
        r = tl.load(rstd + row, mask=row < n, other=0.0)[:, None]
        unit = tl.load(total + at, mask=mask, other=0.0).to(tl.float32) * r
        gradient = tl.load(d_h + at, mask=mask, other=0.0).to(tl.float32)
        d_sum = tl.load(d_total + at, mask=mask, other=0.0).to(tl.float32)
        if h is not None:
            tl.store(h + at, (unit * w).to(h.dtype.element_ty), mask=mask)
        sums += gradient * unit
        gradient *= w
        mean = tl.sum(gradient * unit, 1)[:, None] / WIDTH
        tl.store(d + at, (d_sum + r * (gradient - unit * mean)).to(d.dtype.element_ty), mask=mask)
        start += tl.num_programs(0) * ROWS
    column = tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0) * WIDTH + column, tl.sum(sums, 0), mask=column < WIDTH)


def _tile(width):
    """Rows, columns and warps of a tile."""
    block, elements = triton.next_power_of_2(max(width, 16)), ELEMENTS if width % 8 == 0 else ELEMENTS // 2
    return {"WIDTH": width, "ROWS": max(elements // block, 1), "BLOCK": block,
            "num_warps": min(max(4 * block // elements, 4), 32)}  # fmt: skip


def add_rms_norm(x, add, weight, eps, dtype):
    n, width = x.shape
    total = x.new_empty(0) if add is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, add.dtype))
    h, rstd = x.new_empty(x.shape, dtype=dtype), x.new_empty(n, dtype=torch.float32)
    if n:
        constants = _tile(width)
        # A square fused with the addition of what another lane sends is not rounded, that lane's is, and so each lane
        # of a narrow row would have another mean. The backward pass has one, and is to give h anew bit for bit.
        _add_rms_norm[(triton.cdiv(n, constants["ROWS"]),)](
            x.contiguous(), None if add is None else add.contiguous(), weight.contiguous(), total, h, rstd, eps, n,
            **constants, enable_fp_fusion=False,
        )  # fmt: skip
    return total, h, rstd


def add_rms_norm_backward(d_h, d_total, total, rstd, weight, again):
    n, width = total.shape
    constants = _tile(width)
    multiprocessors = properties(total.device)[0] or 132  # in the interpreter an H100's
    programs = min(triton.cdiv(n, constants["ROWS"]), PROGRAMS * multiprocessors)
    d, h = torch.empty_like(total), torch.empty_like(d_h) if again else None
    parts = rstd.new_empty(programs, width)
    if n:
        _add_rms_norm_backward[(programs,)](
            d_h.contiguous(), d_total.contiguous(), total.contiguous(), rstd, weight.contiguous(), d, h, parts, n,
            **constants,
        )  # fmt: skip
    return d, h if again else d_h.new_empty(0), sum_rows(parts, weight.dtype)
