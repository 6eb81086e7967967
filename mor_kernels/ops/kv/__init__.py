"""Ragged, paged keys/values: append to and lookup of one row a (sequence, recursion).

A cache is (num_pages, page_size, G, d). A row owns a list of pages (its line of the page table) and a length; the token
at index i of a row lives in flat slot ``page_table[row, i // page_size] * page_size + i % page_size``. A cache of
float8_e4m3fn has a scale a head: what it holds times the scale is the value.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from ..gather import gather
from ..rope import rope
from . import eager

STORED = (*_checks.FLOATS, torch.float8_e4m3fn)


def _like_caches(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return k_cache.new_empty(k_cache.shape), v_cache.new_empty(v_cache.shape)


def _fake_lookup(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, cu_seqlens: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = k_cache.new_empty(total, *k_cache.shape[2:])
    return rows, torch.empty_like(rows)


def _fake_lookup_backward(
    d_k: torch.Tensor,
    d_v: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_pages: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    cache = d_k.new_empty(num_pages, page_size, *d_k.shape[1:])
    return cache, torch.empty_like(cache)


_append = define(
    "kv_append(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots, str backend) -> (Tensor, Tensor)",
    fake=_like_caches,
    check=lambda k, v, k_cache, v_cache, slots: eager.check_slots("kv_append", k_cache, slots),
    eager=eager.append,
    triton=deferred(f"{__name__}.triton", "append"),
    cuda=deferred(f"{__name__}.cuda", "append"),
)
_append_in_place = define(
    "kv_append_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? q, "
    "Tensor? positions, float theta, Tensor? k_scale, Tensor? v_scale, str backend) -> Tensor",
    fake=lambda k, v, k_cache, v_cache, slots, q, *_: k.new_empty(0) if q is None else q.new_empty(q.shape),
    check=eager.check_in_place,
    eager=eager.append_in_place,
    triton=deferred(f"{__name__}.triton", "append_in_place"),
    cuda=deferred(f"{__name__}.cuda", "append_in_place"),
)
_append_backward = define(
    "kv_append_backward(Tensor d_k_cache, Tensor d_v_cache, Tensor slots, str backend) -> (Tensor, Tensor)",
    fake=lambda d_k_cache, d_v_cache, _: tuple(t.new_empty(t.shape) for t in (d_k_cache, d_v_cache)),
    eager=eager.append_backward,
    triton=deferred(f"{__name__}.triton", "append_backward"),
    cuda=deferred(f"{__name__}.cuda", "append_backward"),
)
_lookup = define(
    "kv_lookup(Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor cu_seqlens, SymInt total, str backend)"
    " -> (Tensor, Tensor)",
    fake=_fake_lookup,
    check=eager.check_lookup,
    eager=eager.lookup,
    triton=deferred(f"{__name__}.triton", "lookup"),
    cuda=deferred(f"{__name__}.cuda", "lookup"),
)
_lookup_backward = define(
    "kv_lookup_backward(Tensor d_k, Tensor d_v, Tensor page_table, Tensor cu_seqlens, SymInt num_pages, "
    "SymInt page_size, str backend) -> (Tensor, Tensor)",
    fake=_fake_lookup_backward,
    eager=eager.lookup_backward,
    triton=deferred(f"{__name__}.triton", "lookup_backward"),
    cuda=deferred(f"{__name__}.cuda", "lookup_backward"),
)


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(slots)
        ctx.dtype, ctx.backend = k.dtype, backend
        return _append(k, v, k_cache, v_cache, slots, backend)

    @staticmethod
    @first_order("kv_append")
    def backward(ctx: Any, d_k_cache: torch.Tensor, d_v_cache: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        new = (gather(t.flatten(0, 1), slots, backend=ctx.backend).to(ctx.dtype) for t in (d_k_cache, d_v_cache))
        old = (None, None)
        if any(ctx.needs_input_grad[2:4]):
            old = _append_backward(d_k_cache, d_v_cache, slots, ctx.backend)
        return *new, *old, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        total: int,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(page_table, cu_seqlens)
        ctx.scalars = (k_cache.shape[0], k_cache.shape[1], backend)
        return _lookup(k_cache, v_cache, page_table, cu_seqlens, total, backend)

    @staticmethod
    @first_order("kv_lookup")
    def backward(ctx: Any, d_k: torch.Tensor, d_v: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*_lookup_backward(d_k, d_v, *ctx.saved_tensors, *ctx.scalars), *[None] * 4)


def check_caches(
    op: str,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Checks of every op that reads or writes caches."""
    _checks.tensor(op, "k_cache", k_cache, ("num_pages", "page_size", "G", "d"), STORED)
    _checks.tensor(op, "v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), k_cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _checks.tensor(op, name, scale, (k_cache.shape[2],), (torch.float32,), k_cache)
            if k_cache.dtype != torch.float8_e4m3fn:
                _checks.fail(op, name, f"None, for caches of {k_cache.dtype}", "a tensor")


def _check_append(
    op: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    theta: float,
) -> float:
    _checks.tensor(op, "k", k, ("n", *k_cache.shape[2:]), like=k_cache)
    _checks.tensor(op, "v", v, tuple(k.shape), (k.dtype,), k_cache)
    _checks.tensor(op, "slots", slots, (k.shape[0],), (torch.int64,), k_cache)
    if positions is not None:
        _checks.tensor(op, "positions", positions, (k.shape[0],), _checks.INTEGERS, k_cache)
        if k.shape[2] % 2:
            _checks.fail(op, "k", "an even last dimension, to turn by positions", k.shape[2])
    return _checks.number(op, "theta", theta, positive=True)


def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    theta: float = 10000.0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New caches with the tokens' keys and values in their slots; differentiable, the given caches stay as they are
    (paper, section "KV Caching Strategies").

    With one page a sequence (k_cache of shape (B, N, G, d), slot b*N + position) this is the hybrid strategy's fresh
    keys/values over the shared ones.

    Args:
        k: (n, G, d) keys, rounded to the caches' dtype.
        v: (n, G, d) values, likewise.
        k_cache: (num_pages, page_size, G, d); bf16, fp16, fp32 or fp64.
        v_cache: (num_pages, page_size, G, d), likewise.
        slots: (n,) int64 flat slots ``page * page_size + offset``, each at most once; -1 writes nowhere.
        positions: (n,) integers by which the keys are first turned, see :func:`rope`; None for keys that are as they
            should be.
        theta: base of the frequencies.
        backend: see :func:`route`.

    Returns:
        Two new caches; gradients reach k, v and the given caches.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "kv_append"
    check_caches(op, k_cache, v_cache)
    if k_cache.dtype == torch.float8_e4m3fn:
        _checks.fail(op, "k_cache", "a dtype that has gradients (float8 is for kv_append_)", k_cache.dtype)
    theta = _check_append(op, k, v, k_cache, v_cache, slots, positions, theta)
    if positions is not None:
        k = rope(k, positions, theta, backend=backend)
    return apply(_Append, k, v, k_cache, v_cache, slots, resolve(op, backend, k_cache, k))


def kv_append_(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    theta: float = 10000.0,
    q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | None:
    """As :func:`kv_append`, into the given caches and in one launch; for serving, so no gradient.

    Args:
        k: (n, G, d), as in :func:`kv_append`.
        v: (n, G, d), as there.
        k_cache: as there, changed in place; also float8_e4m3fn: numbers beyond 448 scales are written as 448. Any
            strides.
        v_cache: likewise.
        slots: (n,) int64, as there.
        positions: (n,) integers, as there.
        theta: as there.
        q: (n, H, d) queries of the same tokens, to be turned by ``positions`` in the same launch.
        k_scale: (G,) fp32 scales > 0 of a float8 cache; None for 1.
        v_scale: (G,) fp32, likewise.
        backend: see :func:`route`.

    Returns:
        (n, H, d), the turned queries, of every token; None without q.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "kv_append_"
    check_caches(op, k_cache, v_cache, k_scale, v_scale)
    _checks.written(op, k_cache=k_cache, v_cache=v_cache)
    theta = _check_append(op, k, v, k_cache, v_cache, slots, positions, theta)
    if q is not None:
        _checks.tensor(op, "q", q, (k.shape[0], "H", k.shape[2]), like=k)
        if positions is None:
            _checks.fail(op, "positions", "positions, where q goes", "None")
    floats = (q, k, v, k_cache, v_cache, k_scale, v_scale)
    _checks.no_gradient(op, *floats, instead="use kv_append")
    named = resolve(op, backend, k_cache, k, q)
    out = _append_in_place(k, v, k_cache, v_cache, slots, q, positions, theta, k_scale, v_scale, named)
    return None if q is None else out


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
        k_cache: (num_pages, page_size, G, d); bf16, fp16, fp32, fp64; also float8_e4m3fn, without scales and
            without gradients.
        v_cache: (num_pages, page_size, G, d), likewise.
        page_table: (R, max_pages) int32, the pages of each row; entries past a row's length are not read.
        cu_seqlens: (R+1,) int32, from 0, ascending: where each row begins in the result.
        total: rows of the result, at least cu_seqlens[-1]; those past it are zeros.
        backend: see :func:`route`.

    Returns:
        Keys and values, (total, G, d) each, dtype of the caches. Gradients reach the caches.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "kv_lookup"
    check_caches(op, k_cache, v_cache)
    _checks.tensor(op, "page_table", page_table, ("R", "max_pages"), (torch.int32,), k_cache)
    _checks.tensor(op, "cu_seqlens", cu_seqlens, (page_table.shape[0] + 1,), (torch.int32,), k_cache)
    _checks.whole(op, "total", total)
    if k_cache.dtype == torch.float8_e4m3fn:
        return _lookup(k_cache, v_cache, page_table, cu_seqlens, total, resolve(op, backend, k_cache))
    return apply(_Lookup, k_cache, v_cache, page_table, cu_seqlens, total, resolve(op, backend, k_cache))
