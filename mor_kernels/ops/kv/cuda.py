"""Ragged paged keys and values by the kernels of ``csrc/kv.cu``."""

from __future__ import annotations

from ... import _C
from .._cuda import index_code, inverse_of, launch
from .._layout import contiguous, strides
from ._layout import entries_by_page, side_by_side


def append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, k_scale, v_scale):
    out_q = k.new_empty(0) if q is None else q.new_empty(q.shape)
    (tokens, heads, width), q_heads = k.shape, 0 if q is None else q.shape[1]
    slots_there = k_cache.shape[0] * k_cache.shape[1]
    if tokens * width * (q_heads + heads * slots_there):
        code = 0
        if positions is not None:
            positions, code = index_code(positions.contiguous())
        launch(
            _C.kv_append, q, k, v, slots.contiguous(), positions, out_q if q_heads else None, k_cache, v_cache,
            *contiguous(k_scale, v_scale), theta, tokens, slots_there, q_heads, heads, width, max(k_cache.shape[1], 1),
            (*strides(q), *k.stride(), *v.stride()),
            (*k_cache.stride(), *v_cache.stride()), code, k.dtype, k_cache.dtype,
        )  # fmt: skip
    return out_q


def _merged(k, v, k_cache, v_cache, slots):
    """Caches (num_pages, page_size, G, d) with k and v (n, G, d) at the slots, or zeros where they are None."""
    k_out, v_out = (t.new_empty(t.shape) for t in (k_cache, v_cache))
    if k_out.numel():
        length, width = k_out.shape[0] * k_out.shape[1], k_out[0, 0].numel()
        k, v, k_cache, v_cache, slots = contiguous(k, v, k_cache, v_cache, slots)
        launch(
            _C.kv_merge, k, v, k_cache, v_cache, slots, inverse_of(slots[None], length), k_out, v_out, len(slots),
            length, width, (k_out if k is None else k).dtype, k_out.dtype,
        )  # fmt: skip
    return k_out, v_out


def append(k, v, k_cache, v_cache, slots):
    return _merged(k, v, k_cache, v_cache, slots)


def append_backward(d_k_cache, d_v_cache, slots):
    return _merged(None, None, d_k_cache, d_v_cache, slots)


def lookup(k_cache, v_cache, page_table, cu_seqlens, total):
    out = [t.new_empty(total, *t.shape[2:]) for t in (k_cache, v_cache)]
    width = k_cache.shape[2] * k_cache.shape[3]
    if total * width == 0:
        return tuple(out)
    num_pages, page_size = k_cache.shape[:2]
    if 0 in (num_pages, page_size, *page_table.shape):
        return tuple(t.zero_() for t in out)
    k_cache, v_cache = side_by_side(k_cache), side_by_side(v_cache)
    launch(
        _C.kv_lookup, k_cache, v_cache, page_table.contiguous(), cu_seqlens.contiguous(), *out, total,
        *page_table.shape, num_pages, *k_cache.stride()[:2], *v_cache.stride()[:2], page_size, width,
        k_cache.dtype.itemsize,
    )  # fmt: skip
    return tuple(out)


def lookup_backward(d_k, d_v, page_table, cu_seqlens, num_pages, page_size):
    out = [t.new_empty(num_pages, page_size, *t.shape[1:]) for t in (d_k, d_v)]
    width, slots = d_k.shape[1] * d_k.shape[2], num_pages * page_size
    if slots * width == 0:
        return tuple(out)
    if 0 in (*page_table.shape, d_k.shape[0]):
        return tuple(t.zero_() for t in out)
    entries, first = entries_by_page(page_table, cu_seqlens, num_pages, page_size)
    launch(
        _C.kv_lookup_backward, *contiguous(d_k, d_v), entries, first, cu_seqlens.contiguous(), *out, slots,
        page_table.shape[1], page_size, width, d_k.dtype,
    )  # fmt: skip
    return tuple(out)
