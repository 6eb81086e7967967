"""Index arithmetic that ops share: positions within sequences, rows of the flattened batch, places among candidates."""

from __future__ import annotations

import torch


def flat_rows(indices: torch.Tensor, length: int) -> torch.Tensor:
    """(B, k) positions within sequences of ``length`` -> (B*k,) rows of the flattened batch, -1 for none."""
    first = torch.arange(indices.shape[0], device=indices.device)[:, None] * length
    return torch.where(indices >= 0, indices + first, -1).reshape(-1)


def candidate_positions(
    batch: int, scored: int, candidates: torch.Tensor | None, seqlens: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute position (B, C) and validity (B, C) of every candidate; all positions without ``candidates``."""
    position = torch.arange(scored, device=device).expand(batch, scored) if candidates is None else candidates
    valid = position >= 0
    if seqlens is not None:
        valid = valid & (position < seqlens[:, None])
    return position, valid


def locate(indices: torch.Tensor, candidates: torch.Tensor | None, scored: int) -> torch.Tensor:
    """Where each of the positions (B, k) stands among the ascending ``candidates`` (B, C); ``scored`` for none."""
    if candidates is None:
        return torch.where(indices >= 0, indices.clamp(max=scored), scored)
    end = torch.iinfo(torch.int64).max  # -1 stands at the end of a row
    ascending, wanted = (torch.where(t >= 0, t, end).contiguous() for t in (candidates, indices))
    return torch.where(indices >= 0, torch.searchsorted(ascending, wanted), scored)


def find(
    indices: torch.Tensor, candidates: torch.Tensor | None, position: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """As :func:`locate`, but ``scored`` for what is none of the candidates, whose positions and validity are given."""
    scored = position.shape[1]
    if not scored:
        return torch.zeros_like(indices)
    local = locate(indices, candidates, scored)
    inside = local.clamp(max=scored - 1)
    found = (local < scored) & (position.gather(1, inside) == indices) & valid.gather(1, inside)
    return torch.where(found, local, scored)
