from __future__ import annotations

import torch

from .. import _checks
from .._numeric import wide

LARGEST = 448.0  # of e4m3


def turned(x, positions, theta):
    """x (n, heads, d) turned by the positions, not rounded back from the dtype that angles are computed in."""
    x = x.to(wide(x.dtype))
    return x if positions is None else torch.ops.mor_kernels.rope(x, None, positions, theta, False, "eager")[0]


def stored(x, dtype, scale):
    """x (n, G, d) as a cache of ``dtype`` holds it; float8 as its bytes, which PyTorch can index."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    x = x if scale is None else x / scale[:, None]
    return x.clamp(-LARGEST, LARGEST).to(torch.float32).to(dtype).view(torch.uint8)


def check_slots(op, k_cache, slots):
    _checks.indices(op, "slots", slots, k_cache.shape[0] * k_cache.shape[1])
    _checks.distinct(op, "slots", slots, "slot")


def check_append(op, k_cache, v_cache, slots, **read):
    check_slots(op, k_cache, slots)
    _checks.apart(op, {"k_cache": k_cache, "v_cache": v_cache}, slots=slots, **read)


def check_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, k_scale, v_scale):
    read = {"k": k, "v": v, "q": q, "positions": positions, "k_scale": k_scale, "v_scale": v_scale}
    check_append("kv_append_", k_cache, v_cache, slots, **read)


def append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, k_scale, v_scale):
    out_q = k.new_empty(0) if q is None else turned(q, positions, theta).to(q.dtype)
    if 0 in (slots.shape[0], k_cache.shape[0] * k_cache.shape[1]):
        return out_q
    # A lane of padding repeats the write of the first real lane (or, without any, of slot 0 itself): the same value to
    # the same place, so nothing else is touched and nothing waits for the device.
    page_size = k_cache.shape[1]
    real = slots >= 0
    first = real.int().argmax(0, keepdim=True)  # indexing with a tensor of no dimensions would wait for the device
    home = slots[first].clamp(min=0)
    slot = torch.where(real, slots, home)
    page, offset = slot // page_size, slot % page_size
    for new, cache, scale in ((turned(k, positions, theta), k_cache, k_scale), (v, v_cache, v_scale)):
        new = stored(new, cache.dtype, scale)
        cache = cache.view(new.dtype)
        spare = torch.where(real[first, None, None], new[first], cache[home // page_size, home % page_size])
        cache.index_put_((page, offset), torch.where(real[:, None, None], new, spare))
    return out_q


def append(k, v, k_cache, v_cache, slots):
    k_cache, v_cache = (t.clone(memory_format=torch.contiguous_format) for t in (k_cache, v_cache))
    append_in_place(k, v, k_cache, v_cache, slots, None, None, 1.0, None, None)
    return k_cache, v_cache


def append_backward(d_k_cache, d_v_cache, slots):
    """Gradients of the old caches: zeros at the slots."""
    slots = torch.where(slots >= 0, slots, d_k_cache.shape[0] * d_k_cache.shape[1])
    gradients = []
    for d_cache in (d_k_cache, d_v_cache):
        num_pages, page_size, *rest = d_cache.shape
        d_old = d_cache.new_empty(num_pages * page_size + 1, *rest)  # the last slot takes what -1 brings
        d_old[:-1] = d_cache.flatten(0, 1)
        d_old[slots] = 0
        gradients.append(d_old[:-1].view(num_pages, page_size, *rest).clone())
    return tuple(gradients)


def _flat_slots(page_table, cu_seqlens, total, page_size):
    """Flat slot of each of ``total`` packed tokens, and whether there is such a token."""
    rows, max_pages = page_table.shape
    index = torch.arange(total, device=page_table.device, dtype=torch.int32)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True).clamp(max=rows - 1)
    place = index - cu_seqlens[row]
    live = index < cu_seqlens[-1]
    page = page_table[row, (place // page_size).clamp(max=max_pages - 1)].to(torch.int64)
    return torch.where(live, page * page_size + place % page_size, 0), live[:, None, None]


def check_lookup(k_cache, v_cache, page_table, cu_seqlens, total):
    op, (num_pages, page_size) = "kv_lookup", k_cache.shape[:2]
    if int(cu_seqlens[-1]) > total:
        _checks.fail(op, "total", f"at least cu_seqlens[-1] = {int(cu_seqlens[-1])}", total)
    _checks.offsets(op, "cu_seqlens", cu_seqlens, total)
    lens, room = cu_seqlens.diff(), page_table.shape[1] * page_size
    if len(lens) and int(lens.max()) > room:
        _checks.fail(op, "page_table", f"pages for {int(lens.max())} tokens a row", f"room for {room}")
    _checks.pages(op, page_table, lens, num_pages, page_size)


def lookup(k_cache, v_cache, page_table, cu_seqlens, total):
    num_pages, page_size, *rest = k_cache.shape
    dtype = k_cache.dtype
    if dtype == torch.float8_e4m3fn:  # PyTorch indexes bytes, not float8
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if 0 in (*page_table.shape, num_pages * page_size, total):
        return tuple(t.new_zeros(total, *rest).view(dtype) for t in (k_cache, v_cache))
    slot, live = _flat_slots(page_table, cu_seqlens, total, page_size)
    page, offset = slot // page_size, slot % page_size
    return tuple(torch.where(live, cache[page, offset], 0).view(dtype) for cache in (k_cache, v_cache))


def lookup_backward(d_k, d_v, page_table, cu_seqlens, num_pages, page_size):
    total, *rest = d_k.shape
    if 0 in (*page_table.shape, num_pages * page_size, total):
        return tuple(d.new_zeros(num_pages, page_size, *rest) for d in (d_k, d_v))
    slot, live = _flat_slots(page_table, cu_seqlens, total, page_size)
    gradients = []
    for d in (d_k, d_v):  # rows may share pages, so their gradients add up
        d_cache = d.new_zeros(num_pages * page_size, *rest).index_add_(0, slot, torch.where(live, d, 0))
        gradients.append(d_cache.view(num_pages, page_size, *rest))
    return tuple(gradients)
