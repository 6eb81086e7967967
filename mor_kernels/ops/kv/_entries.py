"""What the kernels of a lookup's backward are given."""

from __future__ import annotations

import torch


def entries_by_page(page_table, cu_seqlens, num_pages, page_size):
    """Entries of the page table by the page that they name, and where those of each page begin; those past their row's
    end name none."""
    used = torch.arange(page_table.shape[1], device=page_table.device) * page_size < cu_seqlens.diff()[:, None]
    used = used & (page_table >= 0) & (page_table < num_pages)
    named, entries = torch.where(used, page_table, num_pages).flatten().sort(stable=True)
    return entries, torch.searchsorted(named, torch.arange(num_pages + 1, device=named.device, dtype=named.dtype))
