"""Attention over paged keys by the kernels of ``csrc/paged_attention.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import index_code, launch
from .._layout import contiguous
from ._parts import WHOLE, empty_schedule, most_parts, queries_of_a_tile, ranges_in, unread

LEAST_KEYS = 256  # a part isn't worth its merging for fewer
UNIT = 64  # keys: parts begin at multiples of so many


def attention_schedule(k_lens, heads, groups, queries, width, item_size, rows, cu_seqlens_q, split):
    lanes = k_lens.shape[0]
    out = empty_schedule(k_lens, heads, groups, queries, width, item_size, rows, cu_seqlens_q, split)
    parts = most_parts(lanes, heads, groups, queries, cu_seqlens_q)
    block_q, ranges = queries_of_a_tile(lanes, heads // groups, queries, cu_seqlens_q), ranges_in(out, parts, groups)
    launch(
        _C.attention_schedule, *contiguous(k_lens, rows, cu_seqlens_q), out, lanes, queries, parts, groups, block_q,
        UNIT, ranges, LEAST_KEYS // UNIT if split else WHOLE,
    )  # fmt: skip
    return out


def paged_attention(
    q, k_cache, v_cache, page_table, k_lens, schedule, rows, cu_seqlens_q, q_positions, k_scale, v_scale, scale
):
    if (out := unread(q, k_cache, page_table, k_lens)) is not None:
        return out
    n, heads, width = q.shape
    out = q.new_empty(q.shape)
    lanes, (page_size, groups) = k_lens.shape[0], k_cache.shape[1:3]
    if schedule is None:
        item_size = k_cache.dtype.itemsize
        schedule = attention_schedule(k_lens, heads, groups, n, width, item_size, rows, cu_seqlens_q, split=True)
    code = 0
    if q_positions is not None:
        q_positions, code = index_code(q_positions.contiguous())
    group = heads // groups
    parts = most_parts(lanes, heads, groups, n, cu_seqlens_q)
    block_q = queries_of_a_tile(lanes, group, n, cu_seqlens_q)
    lines, pitch = parts * groups * block_q * group, -(-width // 4) * 4
    partial = torch.empty(lines * (pitch + 2), dtype=torch.float32, device=q.device)
    launch(
        _C.paged_attention, q, k_cache, v_cache, page_table.contiguous(), schedule, q_positions,
        *contiguous(k_scale, v_scale), out, partial, partial[lines * pitch :], scale, parts,
        ranges_in(schedule, parts, groups), k_cache.shape[0], *page_table.shape, page_size, heads, groups, width,
        block_q, q.stride(), k_cache.stride(), v_cache.stride(), code, q.dtype, k_cache.dtype,
    )  # fmt: skip
    return out
