from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import _checks
from .._indices import candidate_positions, locate
from .._numeric import bounded, wide


def _targets(logits, kept, candidates, seqlens):
    """Which candidates were kept, and which are real, (B, C) each."""
    batch, scored = logits.shape
    _, valid = candidate_positions(batch, scored, candidates, seqlens, logits.device)
    local = locate(kept, candidates, scored)
    target = torch.zeros(batch, scored + 1, dtype=torch.bool, device=logits.device).scatter_(1, local, True)
    return target[:, :scored], valid


def check_aux(logits, kept, candidates, seqlens):
    _checks.candidates("aux_loss", candidates, torch.iinfo(torch.int64).max)
    _checks.kept("aux_loss", "kept", kept, logits.shape[1], candidates, seqlens)


def aux_loss(logits, kept, candidates, seqlens):
    """Also returns the number of real candidates, at least 1, and (B, C) the slope of each one's loss."""
    target, valid = _targets(logits, kept, candidates, seqlens)
    logits = bounded(logits.to(wide(logits.dtype)))
    each = -F.logsigmoid(torch.where(target, logits, -logits))
    count = valid.sum().clamp(min=1)
    slope = torch.where(valid, logits.sigmoid() - target.to(logits.dtype), 0)
    return torch.where(valid, each, 0).sum() / count, count, slope


def aux_loss_backward(d_loss, count, slope, logits, kept, candidates, seqlens):
    return (slope * (d_loss / count)).to(logits.dtype)


def z_loss(logits, valid):
    valid = logits.new_ones(logits.shape[:2], dtype=torch.bool) if valid is None else valid
    square = bounded(logits.to(wide(logits.dtype))).logsumexp(-1).square()
    count = valid.sum().clamp(min=1)
    return torch.where(valid, square, 0).sum() / count, count


def z_loss_backward(d_loss, count, logits, valid):
    logits_wide = bounded(logits.to(wide(logits.dtype)))
    d_logits = logits_wide.softmax(-1) * (2 * logits_wide.logsumexp(-1, keepdim=True) * (d_loss / count))
    d_logits = d_logits if valid is None else torch.where(valid[..., None], d_logits, 0)
    return d_logits.to(logits.dtype)


def _by_group(values, scope):
    """(B, N, ...) as (groups, tokens, ...)."""
    return values.reshape(1, -1, *values.shape[2:]) if scope == "batch" else values


def check_balance(probs, depths, scope):
    _checks.indices("balance_loss", "depths", depths, probs.shape[2] + 1, 0)


def balance_loss(probs, depths, scope):
    """Also returns the groups that have tokens, at least 1, and in each (groups, Nr) the loss's slope along p_i."""
    dtype, experts = wide(probs.dtype), probs.shape[-1]
    probs, depths = _by_group(probs, scope), _by_group(depths, scope)
    real = depths > 0
    chosen = (depths[..., None] == torch.arange(1, experts + 1, device=depths.device)).sum(1)
    tokens = real.sum(1, keepdim=True).clamp(min=1)
    slope = experts * chosen.to(dtype) / tokens / tokens
    count = real.any(1).sum().clamp(min=1)
    return (slope * torch.where(real[..., None], probs.to(dtype), 0).sum(1)).sum() / count, count, slope


def balance_loss_backward(d_loss, count, slope, probs, depths, scope):
    d_p = torch.where(_by_group(depths, scope)[..., None] > 0, (slope * (d_loss / count))[:, None], 0)
    return d_p.to(probs.dtype).reshape(probs.shape)
