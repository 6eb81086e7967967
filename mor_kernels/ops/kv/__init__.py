"""Ragged, paged keys/values: append to and lookup of one row a (sequence, recursion).

A cache is (num_pages, page_size, G, d). A row owns a list of pages (its line of the page table) and a length; the token
at index i of a row lives in flat slot ``page_table[row, i // page_size] * page_size + i % page_size``.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import _checks
from .._dispatch import apply, define, resolve
from . import eager


def _like_caches(k, v, k_cache, v_cache, slots):
    return k_cache.new_empty(k_cache.shape), v_cache.new_empty(v_cache.shape)


def _fake_append_backward(d_k_cache, d_v_cache, slots):
    rows = d_k_cache.new_empty(slots.shape[0], *d_k_cache.shape[2:])
    return rows, torch.empty_like(rows), d_k_cache.new_empty(d_k_cache.shape), d_v_cache.new_empty(d_v_cache.shape)


def _fake_lookup(k_cache, v_cache, page_table, cu_seqlens, total):
    rows = k_cache.new_empty(total, *k_cache.shape[2:])
    return rows, torch.empty_like(rows)


def _fake_lookup_backward(d_k, d_v, page_table, cu_seqlens, num_pages, page_size):
    cache = d_k.new_empty(num_pages, page_size, *d_k.shape[1:])
    return cache, torch.empty_like(cache)


_append = define(
    "kv_append(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots, str backend) -> (Tensor, Tensor)",
    fake=_like_caches,
    eager=eager.append,
)
_append_in_place = define(
    "kv_append_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, str backend) -> ()",
    fake=lambda *_: None,
    eager=eager.append_in_place,
)
_append_backward = define(
    "kv_append_backward(Tensor d_k_cache, Tensor d_v_cache, Tensor slots, str backend)"
    " -> (Tensor d_k, Tensor d_v, Tensor d_k_old, Tensor d_v_old)",
    fake=_fake_append_backward,
    eager=eager.append_backward,
)
_lookup = define(
    "kv_lookup(Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor cu_seqlens, SymInt total, str backend)"
    " -> (Tensor, Tensor)",
    fake=_fake_lookup,
    eager=eager.lookup,
)
_lookup_backward = define(
    "kv_lookup_backward(Tensor d_k, Tensor d_v, Tensor page_table, Tensor cu_seqlens, SymInt num_pages, "
    "SymInt page_size, str backend) -> (Tensor, Tensor)",
    fake=_fake_lookup_backward,
    eager=eager.lookup_backward,
)


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, k_cache, v_cache, slots, backend):
        ctx.save_for_backward(slots)
        ctx.dtype, ctx.backend = k.dtype, backend
        return _append(k, v, k_cache, v_cache, slots, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_k_cache, d_v_cache):
        d_k, d_v, d_k_cache, d_v_cache = _append_backward(d_k_cache, d_v_cache, *ctx.saved_tensors, ctx.backend)
        return d_k.to(ctx.dtype), d_v.to(ctx.dtype), d_k_cache, d_v_cache, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k_cache, v_cache, page_table, cu_seqlens, total, backend):
        ctx.save_for_backward(page_table, cu_seqlens)
        ctx.scalars = (k_cache.shape[0], k_cache.shape[1], backend)
        return _lookup(k_cache, v_cache, page_table, cu_seqlens, total, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_k, d_v):
        return (*_lookup_backward(d_k, d_v, *ctx.saved_tensors, *ctx.scalars), *[None] * 4)


def _check_caches(op, k_cache, v_cache):
    _checks.tensor(op, "k_cache", k_cache, ("num_pages", "page_size", "G", "d"))
    _checks.tensor(op, "v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), k_cache)


def _check_append(op, k, v, k_cache, v_cache, slots):
    _check_caches(op, k_cache, v_cache)
    _checks.tensor(op, "k", k, ("n", *k_cache.shape[2:]), like=k_cache)
    _checks.tensor(op, "v", v, tuple(k.shape), (k.dtype,), k_cache)
    _checks.tensor(op, "slots", slots, (k.shape[0],), (torch.int64,), k_cache)


def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New caches with the tokens' keys and values in their slots; differentiable, the given caches stay as they are.

    With one page a sequence (k_cache of shape (B, N, G, d), slot b*N + position) this is the hybrid strategy's fresh
    keys/values over the shared ones.

    Args:
        k, v: (n, G, d), rounded to the caches' dtype.
        k_cache, v_cache: (num_pages, page_size, G, d); bf16, fp16, fp32 or fp64.
        slots: (n,) int64 flat slots ``page * page_size + offset``, each at most once; -1 writes nowhere.

    Returns:
        Two new caches.
    """
    _check_append("kv_append", k, v, k_cache, v_cache, slots)
    return apply(_Append, k, v, k_cache, v_cache, slots, resolve("kv_append", backend, k_cache))


def kv_append_(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """As :func:`kv_append`, writing into the given caches; for serving, so no gradient.

    Raises:
        RuntimeError: gradients are on and an argument needs one.
    """
    _check_append("kv_append_", k, v, k_cache, v_cache, slots)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (k, v, k_cache, v_cache)):
        raise RuntimeError("kv_append_: expected no argument that needs a gradient (use kv_append), got one")
    _append_in_place(k, v, k_cache, v_cache, slots, resolve("kv_append_", backend, k_cache))


def kv_lookup(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total: int,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The live keys and values of some rows, packed one row after another; differentiable bit-exact copies.

    Args:
        k_cache, v_cache: (num_pages, page_size, G, d).
        page_table: (R, max_pages) int32, the pages of each row; entries past a row's length are not read.
        cu_seqlens: (R+1,) int32, from 0, ascending: where each row begins in the result.
        total: rows of the result, at least cu_seqlens[-1]; those past it are zeros.

    Returns:
        k, v: (total, G, d) each.
    """
    op = "kv_lookup"
    _check_caches(op, k_cache, v_cache)
    _checks.tensor(op, "page_table", page_table, ("R", "max_pages"), (torch.int32,), k_cache)
    _checks.tensor(op, "cu_seqlens", cu_seqlens, (page_table.shape[0] + 1,), (torch.int32,), k_cache)
    _checks.whole(op, "total", total)
    return apply(_Lookup, k_cache, v_cache, page_table, cu_seqlens, total, resolve(op, backend, k_cache))
