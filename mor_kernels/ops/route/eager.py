"""Routing in plain PyTorch: the fallback for any device, and what the kernels are compared with."""

from __future__ import annotations

import torch

from .. import _checks
from .._indices import candidate_positions, find, flat_rows, locate
from .._numeric import activate, bounded, wide
from ..gather.eager import gather_backward, gather_batched


def _take(values: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """values (B, C) at local (B, k) where 0 <= local < C, else 0."""
    padded = torch.nn.functional.pad(values, (0, 1))
    inside = (local >= 0) & (local < values.shape[1])
    return padded.gather(1, torch.where(inside, local, values.shape[1]))


def check(x, weight, logits, candidates, seqlens, indices, *_):
    _checks.candidates("route", candidates, x.shape[1])
    if indices is not None:
        scored = x.shape[1] if candidates is None else candidates.shape[1]
        _checks.kept("route", "indices", indices, scored, candidates, seqlens)


def route(x, weight, logits, candidates, seqlens, indices, k, activation, alpha, temperature, rank):
    batch, length, width = x.shape
    scored = length if candidates is None else candidates.shape[1]
    position, valid = candidate_positions(batch, scored, candidates, seqlens, x.device)
    if weight is not None:
        dtype = wide(x.dtype)
        logits = torch.mv(x.flatten(0, 1).to(dtype), weight.to(dtype)).view(batch, length)
        logits = logits if candidates is None else _take(logits, candidates)
    # a number would be divided by as its reciprocal on a GPU, and other logits would tie than elsewhere
    logits = torch.where(valid, bounded(logits / logits.new_full((), temperature)), 0)

    if indices is None:
        key = logits if rank == "logit" else bounded((alpha * activate(logits, activation)).to(x.dtype))
        key = torch.where(valid & ~logits.isnan(), key, -torch.inf)
        best, order = key.sort(dim=-1, descending=True, stable=True)
        kept = best[:, :k] > -torch.inf
        local = torch.where(kept, order[:, :k], scored).sort(dim=-1).values
        indices = torch.where(local < scored, position.gather(1, local.clamp(max=max(scored - 1, 0))), -1)
    else:
        local = find(indices, candidates, position, valid)  # what is no candidate counts as none
        indices = torch.where(local < scored, indices, -1)

    chosen = indices >= 0
    kept_logits = _take(logits, local)
    gates = torch.where(chosen & ~kept_logits.isnan(), bounded(alpha * activate(kept_logits, activation)), 0)
    rows = gather_batched(x, indices)
    return rows, indices, gates, logits, chosen.sum(-1, dtype=torch.int32)


def route_backward(
    d_rows, d_gates, d_logits, x, weight, logits, candidates, seqlens, indices, activation, alpha, temperature
):
    batch, length, width = x.shape
    dtype = logits.dtype
    scored = length if candidates is None else candidates.shape[1]
    position, valid = candidate_positions(batch, scored, candidates, seqlens, x.device)
    chosen = indices >= 0
    local = locate(indices, candidates, scored)

    value = activate(_take(logits, local), activation)
    slope = {"sigmoid": value * (1 - value), "tanh": 1 - value * value, "none": torch.ones_like(value)}[activation]
    through_gate = torch.where(chosen & ~value.isnan(), d_gates * alpha * slope, 0)
    d_logits = torch.where(valid, d_logits, 0)
    d_logits = torch.nn.functional.pad(d_logits, (0, 1)).scatter_add(1, local, through_gate)[:, :scored] / temperature

    d_rows = d_rows.flatten(0, 1).to(dtype)
    d_x = gather_backward(d_rows, flat_rows(indices, length), batch * length).view(batch, length, width)
    if weight is None:
        return d_x.to(x.dtype), x.new_empty(0), d_logits
    d_score = torch.zeros(batch, length + 1, dtype=dtype, device=x.device)
    d_score.scatter_(1, torch.where(valid, position, length), torch.where(valid, d_logits, 0))
    d_score = d_score[:, :length]
    scored_rows = torch.zeros(batch, length + 1, dtype=torch.bool, device=x.device)
    scored_rows = scored_rows.scatter_(1, torch.where(valid, position, length), True)[:, :length, None]
    d_x = d_x + d_score[..., None] * weight.to(dtype)
    scored_rows = torch.where(scored_rows, x, 0).to(dtype).flatten(0, 1)
    d_weight = torch.mv(scored_rows.T, d_score.reshape(-1)).to(weight.dtype)
    return d_x.to(x.dtype), d_weight, d_logits.new_empty(0)
