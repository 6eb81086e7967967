"""Router losses in Triton: two launches forward, one backward.

Sums are made in two stages, in an order that depends on the shapes alone: each program adds up its part, and one more
adds up the parts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from .._triton import FLOAT_MAX, bounded, find

BLOCK = 1024  # elements that a program works on at once
PARTS = 64  # programs among which the tokens of one group are divided, at most


@triton.jit
def _log1p(x):
    """log(1 + x) for 0 <= x <= 1, to a few units in the last place: what 1 + x loses of x is made up for."""
    more = 1 + x
    return tl.where(more == 1, x, tl.log(more) * (x / tl.where(more == 1, 1.0, more - 1)))


@triton.jit
def _write_part(each, valid, sums, counts):
    part = tl.program_id(0)
    tl.store(sums + part, tl.sum(each, 0))
    tl.store(counts + part, tl.sum(valid.to(tl.int32), 0))


@triton.jit(do_not_specialize=["parts"])
def _mean(sums, counts, loss, count, parts, BLOCK: tl.constexpr):
    """loss = the sum of all parts / count; count = their number of elements, at least 1."""
    total = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(sums + part, mask=part < parts, other=0.0)
        number += tl.load(counts + part, mask=part < parts, other=0)
    number = tl.maximum(tl.sum(number, 0), 1)
    tl.store(count, number)
    tl.store(loss, tl.sum(total, 0) / number.to(tl.float32))


def _mean_of(kernel, programs, *arguments, **constants):
    """Loss and count of what ``kernel`` writes the parts of."""
    like = arguments[0]
    sums = like.new_empty(programs, dtype=torch.float32)
    counts = like.new_empty(programs, dtype=torch.int32)
    loss, count = like.new_empty((), dtype=torch.float32), like.new_empty((), dtype=torch.int64)
    if programs:
        kernel[(programs,)](*arguments, sums, counts, **constants, num_warps=8)
    _mean[(1,)](sums, counts, loss, count, programs, BLOCK=BLOCK, num_warps=4)
    return loss, count


@triton.jit(do_not_specialize=["total", "scored", "k"])
def _aux(logits, kept, candidates, seqlens, slope, total, scored, k, sums, counts, BLOCK: tl.constexpr):
    """Each valid candidate: log(1 + exp(l)) - l where it was kept, log(1 + exp(l)) where not; its slope along l is
    sigmoid(l) - was kept."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < total
    logit = bounded(tl.load(logits + i, mask=valid, other=0.0).to(tl.float32), FLOAT_MAX)
    b = i // scored
    position = i - b * scored
    if candidates is not None:
        position = tl.load(candidates + i, mask=valid, other=-1)
        valid = valid & (position >= 0)
    if seqlens is not None:
        valid = valid & (position < tl.load(seqlens + b, mask=valid, other=0))
    target = find(kept + b * k, position, k, valid) >= 0
    wrong = tl.where(target, -logit, logit)  # how far on the wrong side
    each = tl.where(wrong > 0, wrong, 0.0) + _log1p(tl.exp(-tl.abs(logit)))
    _write_part(tl.where(valid, each, 0.0), valid, sums, counts)
    rise = 1 / (1 + tl.exp(-logit)) - target.to(tl.float32)
    tl.store(slope + i, tl.where(valid, rise, 0.0), mask=i < total)


@triton.jit(do_not_specialize=["total"])
def _aux_backward(d_loss, count, slope, d_logits, total, BLOCK: tl.constexpr):
    """d_l = slope * d_loss / count."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(d_loss) / tl.load(count).to(tl.float32)
    d_logit = tl.load(slope + i, mask=i < total, other=0.0) * scale
    tl.store(d_logits + i, d_logit.to(d_logits.dtype.element_ty), mask=i < total)


def aux_loss(logits, kept, candidates, seqlens):
    slope = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    tensors = contiguous(logits, kept, candidates, seqlens)
    total, scored, k = logits.numel(), logits.shape[1], kept.shape[1]
    return *_mean_of(_aux, triton.cdiv(total, BLOCK), *tensors, slope, total, scored, k, BLOCK=BLOCK), slope


def aux_loss_backward(d_loss, count, slope, logits, kept, candidates, seqlens):
    d_logits, total = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), logits.numel()
    if total:
        _aux_backward[(triton.cdiv(total, BLOCK),)](d_loss, count, slope, d_logits, total, BLOCK=BLOCK, num_warps=4)
    return d_logits


@triton.jit
def _logsumexp(logits, valid, tokens, experts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of logits: where they lie, which count, exp(l - max l), its sum, and logsumexp(l)."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)
    at = token[:, None] * experts + expert[None, :]
    real, is_expert = token < tokens, (expert < experts)[None, :]
    mask = real[:, None] & is_expert
    if valid is not None:
        real = real & (tl.load(valid + token, mask=real, other=0) != 0)
    logit = tl.load(logits + at, mask=real[:, None] & is_expert, other=0.0).to(tl.float32)
    logit = bounded(logit, FLOAT_MAX)
    logit = tl.where(is_expert, logit, -float("inf"))
    largest = tl.max(logit, 1)
    e = tl.exp(logit - largest[:, None])
    total = tl.sum(e, 1)
    return at, mask, real, e, total, largest + tl.log(total)


@triton.jit(do_not_specialize=["tokens"])
def _z(logits, valid, tokens, experts, sums, counts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Each valid token: logsumexp(l)^2."""
    _, _, real, _, _, lse = _logsumexp(logits, valid, tokens, experts, ROWS, WIDTH)
    _write_part(tl.where(real, lse * lse, 0.0), real, sums, counts)


@triton.jit(do_not_specialize=["tokens"])
def _z_backward(d_loss, count, logits, valid, d_logits, tokens, experts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """d_l_i = softmax(l)_i * 2 logsumexp(l) * d_loss / count."""
    at, mask, real, e, total, lse = _logsumexp(logits, valid, tokens, experts, ROWS, WIDTH)
    d_lse = 2 * lse * (tl.load(d_loss) / tl.load(count).to(tl.float32))
    d_logit = tl.where(real[:, None], e / total[:, None] * d_lse[:, None], 0.0)
    tl.store(d_logits + at, d_logit.to(d_logits.dtype.element_ty), mask=mask)


def _rows(logits):
    """Tokens, experts, and how many of them a program works on at once."""
    *shape, experts = logits.shape
    width = triton.next_power_of_2(experts)
    return math.prod(shape), experts, {"ROWS": max(BLOCK // width, 1), "WIDTH": width}


def z_loss(logits, valid):
    tokens, experts, size = _rows(logits)
    return _mean_of(_z, triton.cdiv(tokens, size["ROWS"]), *contiguous(logits, valid), tokens, experts, **size)


def z_loss_backward(d_loss, count, logits, valid):
    logits, valid = contiguous(logits, valid)
    d_logits = torch.empty_like(logits)
    tokens, experts, size = _rows(logits)
    if tokens:
        _z_backward[(triton.cdiv(tokens, size["ROWS"]),)](
            d_loss, count, logits, valid, d_logits, tokens, experts, **size, num_warps=4
        )
    return d_logits


@triton.jit(do_not_specialize=["tokens", "parts"])
def _balance_parts(probs, depths, sums, counts, tokens, experts, parts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A part of a group's tokens: by expert, the sum of their probabilities and how many chose it."""
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = tl.arange(0, WIDTH)
    is_expert = expert < experts
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    number = tl.zeros((ROWS, WIDTH), tl.int32)
    for first in range(part * ROWS, tokens, parts * ROWS):
        token = group * tokens + first + tl.arange(0, ROWS)
        depth = tl.load(depths + token, mask=first + tl.arange(0, ROWS) < tokens, other=0)
        mask = (depth > 0)[:, None] & is_expert[None, :]
        at = token[:, None] * experts + expert[None, :]
        total += tl.load(probs + at, mask=mask, other=0.0).to(tl.float32)
        number += (depth[:, None] == expert[None, :] + 1).to(tl.int32)
    out = (group * parts + part) * experts + expert
    tl.store(sums + out, tl.sum(total, 0), mask=is_expert)
    tl.store(counts + out, tl.sum(number, 0), mask=is_expert)


@triton.jit(do_not_specialize=["groups", "parts"])
def _balance(
    sums, counts, loss, count, slope, groups, parts, experts,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """slope_i = Nr (tokens that chose i) / tokens^2 in each group, so that f_i P_i = slope_i * the sum of p_i; the loss
    is their sum, mean over the groups that have tokens."""
    part, expert = tl.arange(0, PARTS)[None, :, None], tl.arange(0, WIDTH)
    losses = tl.zeros((GROUPS,), tl.float32)
    real = tl.zeros((GROUPS,), tl.int64)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        at = (group[:, None, None].to(tl.int64) * parts + part) * experts + expert[None, None, :]
        mask = (group < groups)[:, None, None] & (part < parts) & (expert < experts)[None, None, :]
        p = tl.sum(tl.load(sums + at, mask=mask, other=0.0), 1)
        chosen = tl.sum(tl.load(counts + at, mask=mask, other=0).to(tl.int64), 1)
        tokens = tl.sum(chosen, 1)
        each = tl.maximum(tokens, 1).to(tl.float32)[:, None]
        rise = experts * chosen.to(tl.float32) / each / each
        mask = (group < groups)[:, None] & (expert < experts)[None, :]
        tl.store(slope + group[:, None].to(tl.int64) * experts + expert[None, :], rise, mask=mask)
        losses += tl.sum(rise * p, 1)
        real += (tokens > 0).to(tl.int64)
    number = tl.maximum(tl.sum(real, 0), 1)
    tl.store(count, number)
    tl.store(loss, tl.sum(losses, 0) / number.to(tl.float32))


@triton.jit(do_not_specialize=["total", "tokens"])
def _balance_backward(
    d_loss, count, slope, depths, d_probs, total, tokens, experts, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """d_p_i = slope_i of the token's group * d_loss / count."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)
    real = tl.load(depths + token, mask=token < total, other=0) > 0
    is_expert = (expert < experts)[None, :]
    rise = slope + (token // tokens)[:, None] * experts + expert[None, :]
    rise = tl.load(rise, mask=real[:, None] & is_expert, other=0.0)
    d_p = rise * (tl.load(d_loss) / tl.load(count).to(tl.float32))
    out = d_probs + token[:, None] * experts + expert[None, :]
    tl.store(out, d_p.to(d_probs.dtype.element_ty), mask=(token < total)[:, None] & is_expert)


def _groups(depths, scope):
    """Groups of tokens, and the tokens of each."""
    return (1, depths.numel()) if scope == "batch" else depths.shape


def balance_loss(probs, depths, scope):
    probs, depths = contiguous(probs, depths)
    (groups, tokens), (_, experts, size) = _groups(depths, scope), _rows(probs)
    parts = min(triton.cdiv(tokens, size["ROWS"]), PARTS)
    sums = probs.new_empty(groups, parts, experts, dtype=torch.float32)
    counts = probs.new_empty(groups, parts, experts, dtype=torch.int32)
    if sums.numel():
        _balance_parts[(groups, parts)](probs, depths, sums, counts, tokens, experts, parts, **size, num_warps=4)
    loss, count = probs.new_empty((), dtype=torch.float32), probs.new_empty((), dtype=torch.int64)
    slope = probs.new_empty(groups, experts, dtype=torch.float32)
    width = size["WIDTH"]
    at_once = max(4 * BLOCK // (PARTS * width), 1)
    _balance[(1,)](
        sums, counts, loss, count, slope, groups, parts, experts,
        GROUPS=at_once, PARTS=PARTS, WIDTH=width, num_warps=8,
    )  # fmt: skip
    return loss, count, slope


def balance_loss_backward(d_loss, count, slope, probs, depths, scope):
    d_probs = probs.new_empty(probs.shape)
    (_, tokens), (total, experts, size) = _groups(depths, scope), _rows(probs)
    if total:
        _balance_backward[(triton.cdiv(total, size["ROWS"]),)](
            d_loss, count, slope, depths.contiguous(), d_probs, total, tokens, experts, **size, num_warps=4
        )
    return d_probs
