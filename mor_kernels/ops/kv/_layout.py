"""Caches and page tables as the kernels want them."""

from __future__ import annotations

import torch


def entries_by_page(
    page_table: torch.Tensor, cu_seqlens: torch.Tensor, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the page table by the page that they name, and where those of each page begin; those past their row's
    end name none."""
    used = torch.arange(page_table.shape[1], device=page_table.device) * page_size < cu_seqlens.diff()[:, None]
    used = used & (page_table >= 0) & (page_table < num_pages)
    named, entries = torch.where(used, page_table, num_pages).flatten().sort(stable=True)
    return entries, torch.searchsorted(named, torch.arange(num_pages + 1, device=named.device, dtype=named.dtype))


def side_by_side(cache: torch.Tensor) -> torch.Tensor:
    """(num_pages, page_size, G * d), a token's numbers side by side: a view, but where heads are far apart."""
    cache = cache.flatten(2)
    return cache if cache.stride(2) == 1 else cache.contiguous()
