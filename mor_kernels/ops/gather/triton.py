"""Gather and its backward: one pass over what is written, rows read where an index names them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import inverse_of, place, tile


@triton.jit(do_not_specialize=["n", "length"])
def _gather(x, indices, rows, n, length, stride_m, stride_d, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """rows[j] = x[indices[j]], or 0 where there is none."""
    j = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    index = tl.load(indices + j, mask=j < n, other=-1)
    there = (index >= 0) & (index < length)
    columns = (d < width)[None, :]
    source = x + index[:, None] * stride_m + d[None, :].to(tl.int64) * stride_d
    row = tl.load(source, mask=there[:, None] & columns, other=0.0)
    tl.store(rows + j[:, None] * width + d[None, :], row, mask=(j < n)[:, None] & columns)


@triton.jit(do_not_specialize=["n", "length"])
def _gather_backward(d_rows, indices, inverse, d_x, n, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """d_x[m] = d_rows[j] where indices[j] = m, or 0 where there is none."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    j = place(indices, inverse, m, n, m < length).to(tl.int64)
    columns = (d < width)[None, :]
    row = tl.load(d_rows + j[:, None] * width + d[None, :], mask=(j >= 0)[:, None] & columns, other=0.0)
    tl.store(d_x + m[:, None] * width + d[None, :], row, mask=(m < length)[:, None] & columns)


def gather(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows = x.new_empty(indices.shape[0], *x.shape[1:])
    if rows.numel():
        flat = x.reshape(x.shape[0], rows[0].numel())
        width = flat.shape[1]
        size = tile(width, 2048, 4)
        _gather[(triton.cdiv(len(rows), size.rows), triton.cdiv(width, size.width))](
            flat, indices.contiguous(), rows, len(rows), len(flat), *flat.stride(), width,
            ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip
    return rows


def gather_backward(d_rows: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
    d_x = d_rows.new_empty(length, *d_rows.shape[1:])
    if d_x.numel():
        width = d_x[0].numel()
        size = tile(width, 2048, 4)
        indices = indices.contiguous()
        _gather_backward[(triton.cdiv(length, size.rows), triton.cdiv(width, size.width))](
            d_rows.contiguous(), indices, inverse_of(indices[None], length), d_x, len(indices), length, width,
            ROWS=size.rows, WIDTH=size.width, num_warps=size.num_warps,
        )  # fmt: skip
    return d_x
