from __future__ import annotations

import torch
import torch.nn.functional as F

from .._indices import candidate_positions, locate
from .._numeric import bounded, wide


def _targets(logits, kept, candidates, seqlens):
    """Whether "was kept" (B, C) in the losses' dtype, and which candidates are real (B, C)."""
    batch, scored = logits.shape
    _, valid = candidate_positions(batch, scored, candidates, seqlens, logits.device)
    local = locate(kept, candidates, scored)
    target = torch.zeros(batch, scored + 1, dtype=wide(logits.dtype), device=logits.device).scatter_(1, local, 1.0)
    return target[:, :scored], valid


def aux_loss(logits, kept, candidates, seqlens):
    target, valid = _targets(logits, kept, candidates, seqlens)
    logits = torch.where(valid, bounded(logits.to(target.dtype)), 0)
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.where(valid, each, 0).sum() / valid.sum().clamp(min=1)


def aux_loss_backward(d_loss, logits, kept, candidates, seqlens):
    target, valid = _targets(logits, kept, candidates, seqlens)
    d_logits = (logits.to(target.dtype).sigmoid() - target) * (d_loss / valid.sum().clamp(min=1))
    return torch.where(valid, d_logits, 0).to(logits.dtype)


def _count(logits, valid):
    return logits[..., 0].numel() if valid is None else valid.sum()


def z_loss(logits, valid):
    square = bounded(logits.to(wide(logits.dtype))).logsumexp(-1).square()
    square = square if valid is None else torch.where(valid, square, 0)
    count = torch.as_tensor(_count(logits, valid), device=logits.device).clamp(min=1)
    return square.sum() / count


def z_loss_backward(d_loss, logits, valid):
    logits_wide = bounded(logits.to(wide(logits.dtype)))
    count = torch.as_tensor(_count(logits, valid), device=logits.device).clamp(min=1)
    d_logits = logits_wide.softmax(-1) * (2 * logits_wide.logsumexp(-1, keepdim=True) * (d_loss / count))
    d_logits = d_logits if valid is None else torch.where(valid[..., None], d_logits, 0)
    return d_logits.to(logits.dtype)


def _groups(probs, depths, scope):
    """probs and one-hot depths as (groups, tokens, Nr), whether a token is real, and tokens in each group."""
    experts = probs.shape[-1]
    if scope == "batch":
        probs, depths = probs.reshape(1, -1, experts), depths.reshape(1, -1)
    real = depths > 0
    chosen = depths[..., None] == torch.arange(1, experts + 1, device=depths.device)
    return probs.to(wide(probs.dtype)), chosen, real, real.sum(1).clamp(min=1)


def balance_loss(probs, depths, scope):
    p, chosen, real, tokens = _groups(probs, depths, scope)
    f = p.shape[-1] * chosen.sum(1).to(p.dtype) / tokens[:, None]
    mean_p = torch.where(real[..., None], p, 0).sum(1) / tokens[:, None]
    return (f * mean_p).sum() / real.any(1).sum().clamp(min=1)


def balance_loss_backward(d_loss, probs, depths, scope):
    p, chosen, real, tokens = _groups(probs, depths, scope)
    f = p.shape[-1] * chosen.sum(1).to(p.dtype) / tokens[:, None]
    d_p = f * (d_loss / real.any(1).sum().clamp(min=1)) / tokens[:, None]
    return torch.where(real[..., None], d_p[:, None], 0).to(probs.dtype).reshape(probs.shape)
