"""Lookup, then packed attention."""

from __future__ import annotations

import torch

from .. import _checks
from .._numeric import wide
from ._parts import unread

_ops = torch.ops.mor_kernels


def check_schedule(k_lens, heads, groups, queries, width, item_size, rows, cu_seqlens_q, split):
    op = "attention_schedule"
    if k_lens.numel() and int(k_lens.min()) < 0:
        _checks.fail(op, "k_lens", "values of at least 0", int(k_lens.min()))
    if cu_seqlens_q is not None:
        _checks.offsets(op, "cu_seqlens_q", cu_seqlens_q, queries)


def check(q, k_cache, v_cache, page_table, k_lens, schedule, rows, cu_seqlens_q, *_):
    op, (num_pages, page_size) = "paged_attention", k_cache.shape[:2]
    room = page_table.shape[1] * page_size
    if k_lens.numel() and (int(k_lens.min()) < 0 or int(k_lens.max()) > room):
        _checks.fail(op, "k_lens", f"0 to the {room} tokens that the page table has room for", k_lens.tolist())
    if rows is not None:
        _checks.indices(op, "rows", rows, page_table.shape[0])
        k_lens = torch.where(rows >= 0, k_lens, 0)
        page_table = torch.cat((page_table, page_table.new_full((1, page_table.shape[1]), -1)))[rows]
    if cu_seqlens_q is not None:
        _checks.offsets(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    _checks.pages(op, page_table, k_lens, num_pages, page_size)


def paged_attention(
    q, k_cache, v_cache, page_table, k_lens, schedule, rows, cu_seqlens_q, q_positions, k_scale, v_scale, scale
):
    if (out := unread(q, k_cache, page_table, k_lens)) is not None:
        return out
    n, lanes, device = q.shape[0], k_lens.shape[0], q.device
    if rows is not None:
        k_lens = torch.where(rows >= 0, k_lens, 0)
        page_table = page_table[rows.clamp(min=0)]
    cu_seqlens_k = torch.nn.functional.pad(k_lens.cumsum(0), (1, 0)).to(torch.int32)
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(lanes + 1, device=device, dtype=torch.int32)
    if q_positions is None:  # the queries are the newest tokens
        index = torch.arange(n, device=device, dtype=torch.int32)
        lane = torch.searchsorted(cu_seqlens_q[1:].contiguous(), index, right=True).clamp(max=lanes - 1)
        q_positions = k_lens[lane] - cu_seqlens_q[lane + 1] + index
    # sizes that are known without waiting for the device
    most_queries, most_keys = n, page_table.shape[1] * k_cache.shape[1]
    total = lanes * most_keys
    if device.type == "cpu":
        most_queries, most_keys = int(cu_seqlens_q.diff().max()), int(k_lens.max())
        total = int(cu_seqlens_k[-1])
    k, v = _ops.kv_lookup(k_cache, v_cache, page_table, cu_seqlens_k, total, "eager")
    dtype = wide(q.dtype) if k_scale is not None or v_scale is not None else q.dtype
    k, v = (t.to(dtype) if s is None else t.to(dtype) * s[:, None] for t, s in ((k, k_scale), (v, v_scale)))
    offsets = cu_seqlens_q, cu_seqlens_k, most_queries, most_keys
    out, _ = _ops.attention_varlen(q.to(dtype), k, v, None, None, *offsets, q_positions, scale, "eager")
    return out.to(q.dtype)
