"""What the Triton kernels of several ops share.

Kernels load any dtype and compute in fp32. Sizes that change from call to call (lengths, k) are never specialised on,
so that a new one compiles nothing. Offsets are int64 before they are multiplied by a stride.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def bounded(value, largest):
    """Infinities as the largest finite number; NaN stays."""
    value = tl.where(value > largest, largest, value)
    return tl.where(value < -largest, -largest, value)


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


class Tile(NamedTuple):
    """Rows that a program handles at once, columns of them (a power of two), and its warps."""

    rows: int
    width: int
    num_warps: int


def tile(width: int, elements: int, num_warps: int) -> Tile:
    """Whole rows as long as they fit into ``elements``, which each kernel chooses once, whatever the length."""
    columns = min(triton.next_power_of_2(max(width, 16)), elements)
    return Tile(max(elements // columns, 1), columns, num_warps)


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
