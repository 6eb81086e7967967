from __future__ import annotations

import torch


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
