"""Token-choice in Triton: depths and probabilities in one launch, their packed form in two, one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from .._triton import FLOAT_MAX

CHUNK = 1024  # tokens, or tokens x recursions, that a program works on


@triton.jit(do_not_specialize=["total"])
def _count(depths, counts, total, CHUNK: tl.constexpr):
    """counts[r, chunk] = how many of the chunk's tokens take recursion r + 1."""
    chunk, r = tl.program_id(0), tl.program_id(1)
    token = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    depth = tl.load(depths + token, mask=token < total, other=0)
    tl.store(counts + r.to(tl.int64) * tl.num_programs(0) + chunk, tl.sum((depth > r).to(tl.int32), 0))


@triton.jit(do_not_specialize=["total", "batch", "length"])
def _pack(depths, counts, indices, cu_seqlens, total, batch, length, CHUNK: tl.constexpr):
    """A chunk of the flattened tokens, whatever their sequences, at one recursion.

    A token's place is the number of those before it that take the recursion: in earlier chunks, by their counts, and in
    this one. The place of a sequence's first token is where the sequence begins.
    """
    chunk, r, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    before = tl.zeros((CHUNK,), tl.int32)
    everywhere = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, chunks, CHUNK):
        other = first + tl.arange(0, CHUNK)
        count = tl.load(counts + r * chunks + other, mask=other < chunks, other=0)
        before += tl.where(other < chunk, count, 0)
        everywhere += count
    kept = tl.sum(everywhere, 0)

    token = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = token < total
    takes = tl.load(depths + token, mask=inside, other=0) > r
    place = tl.sum(before, 0) + tl.cumsum(takes.to(tl.int32), 0) - takes.to(tl.int32)
    tl.store(indices + r * total + place, token, mask=takes)
    tl.store(indices + r * total + token, -1, mask=inside & (token >= kept))
    b = token // length
    tl.store(cu_seqlens + r * (batch + 1) + b, place, mask=inside & (token == b * length))
    if chunk == 0:
        tl.store(cu_seqlens + r * (batch + 1) + batch, kept)


def pack_depths(depths: torch.Tensor, num_recursions: int) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, length), total = depths.shape, depths.numel()
    indices = depths.new_empty(num_recursions, total, dtype=torch.int64)
    if not total:
        return indices, depths.new_zeros(num_recursions, batch + 1, dtype=torch.int32)
    cu_seqlens = depths.new_empty(num_recursions, batch + 1, dtype=torch.int32)
    depths, grid = depths.contiguous(), (triton.cdiv(total, CHUNK), num_recursions)
    counts = depths.new_empty(num_recursions, grid[0], dtype=torch.int32)
    _count[grid](depths, counts, total, CHUNK=CHUNK, num_warps=4)
    _pack[grid](depths, counts, indices, cu_seqlens, total, batch, length, CHUNK=CHUNK, num_warps=4)
    return indices, cu_seqlens


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logits, bias, valid, depths, probs, tokens, experts, SOFTMAX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """p = softmax(logits) or sigmoid(logits); depth = 1 + the first i of the largest logit, or of p_i + bias_i."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)
    inside, is_expert = token < tokens, expert < experts
    at = token[:, None] * experts + expert[None, :]
    mask = inside[:, None] & is_expert[None, :]
    logit = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    unknown = logit != logit
    logit = tl.where(unknown, -FLOAT_MAX, tl.minimum(tl.maximum(logit, -FLOAT_MAX), FLOAT_MAX))
    if SOFTMAX:
        logit = tl.where(is_expert[None, :], logit, -float("inf"))
        p = tl.exp(logit - tl.max(logit, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
    else:
        p = 1 / (1 + tl.exp(-logit))
    tl.store(probs + at, p, mask=mask)

    score = logit
    if bias is not None:
        score = p + tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    score = tl.where(unknown | (score != score) | (expert >= experts)[None, :], -float("inf"), score)
    depth = tl.argmax(score, 1, tie_break_left=True).to(tl.int64) + 1
    if valid is not None:
        depth = tl.where(tl.load(valid + token, mask=inside, other=0) != 0, depth, 0)
    tl.store(depths + token, depth, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _choose_backward(
    d_probs, logits, probs, d_logits, tokens, experts, SOFTMAX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """d_logit_i = p_i (d_p_i - sum_j p_j d_p_j) for softmax, p_i (1 - p_i) d_p_i for sigmoid; 0 unless it is finite."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)
    at = token[:, None] * experts + expert[None, :]
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    p = tl.load(probs + at, mask=mask, other=0.0)
    d_p = tl.load(d_probs + at, mask=mask, other=0.0)
    logit = tl.load(logits + at, mask=mask, other=0.0).to(tl.float32)
    if SOFTMAX:
        d_logit = p * (d_p - tl.sum(p * d_p, 1)[:, None])
    else:
        d_logit = p * (1 - p) * d_p
    d_logit = tl.where(tl.abs(logit) <= FLOAT_MAX, d_logit, 0.0)
    tl.store(d_logits + at, d_logit.to(d_logits.dtype.element_ty), mask=mask)


def _launch(kernel, *tensors, tokens, experts, activation):
    width = triton.next_power_of_2(experts)
    rows = max(CHUNK // width, 1)
    if tokens:
        kernel[(triton.cdiv(tokens, rows),)](
            *tensors, tokens, experts, SOFTMAX=activation == "softmax", ROWS=rows, WIDTH=width, num_warps=4
        )


def choose_depths(
    logits: torch.Tensor, bias: torch.Tensor | None, valid: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    (*shape, experts), logits = logits.shape, logits.contiguous()
    depths = logits.new_empty(shape, dtype=torch.int64)
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    bias, valid = contiguous(bias, valid)
    _launch(_choose, logits, bias, valid, depths, probs, tokens=depths.numel(), experts=experts, activation=activation)
    return depths, probs


def choose_depths_backward(
    d_probs: torch.Tensor, logits: torch.Tensor, probs: torch.Tensor, activation: str
) -> torch.Tensor:
    d_probs, logits = d_probs.contiguous(), logits.contiguous()
    d_logits = torch.empty_like(logits)
    tokens = logits.shape[:-1].numel()
    _launch(
        _choose_backward, d_probs, logits, probs.contiguous(), d_logits,
        tokens=tokens, experts=logits.shape[-1], activation=activation,
    )  # fmt: skip
    return d_logits
