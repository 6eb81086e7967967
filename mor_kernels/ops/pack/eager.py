from __future__ import annotations

import torch

from .._numeric import bounded, wide


def pack_depths(depths: torch.Tensor, num_recursions: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length = depths.shape
    total, device = batch * length, depths.device
    recursions = torch.arange(1, num_recursions + 1, device=device)
    kept = depths.reshape(1, total) >= recursions[:, None]
    place = torch.where(kept, kept.cumsum(1) - 1, total)  # the column past the end takes what is not kept
    indices = torch.full((num_recursions, total + 1), -1, dtype=torch.int64, device=device)
    indices.scatter_(1, place, torch.arange(total, device=device).expand_as(place))
    counts = kept.view(num_recursions, batch, length).sum(-1)
    cu_seqlens = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).to(torch.int32)
    return indices[:, :total].clone(), cu_seqlens


def choose_depths(logits, bias, valid, activation):
    logits = bounded(logits.to(wide(logits.dtype)))
    unknown = logits.isnan()
    logits = torch.where(unknown, torch.finfo(logits.dtype).min, logits)
    probs = logits.softmax(-1) if activation == "softmax" else logits.sigmoid()
    scores = logits if bias is None else probs + bias  # logits rank alike and don't saturate
    depths = torch.where(unknown | scores.isnan(), -torch.inf, scores).argmax(-1) + 1
    return depths if valid is None else torch.where(valid, depths, 0), probs


def choose_depths_backward(d_probs, logits, probs, activation):
    if activation == "softmax":
        d_logits = probs * (d_probs - (probs * d_probs).sum(-1, keepdim=True))
    else:
        d_logits = probs * (1 - probs) * d_probs
    return torch.where(logits.isfinite(), d_logits, 0).to(logits.dtype)
