"""Attention over ragged, paged keys/values: what decoding asks of a cache (paper, section "KV Caching Strategies").

Each lane of the batch has some queries and reads one row of the page table. Recursion-wise caching reads the row of the
lane's own recursion; recursive sharing reads the first recursion's, with absolute positions; the hybrid strategy reads
a page table with a page a token, whose entries say for each position where the keys that count for it stand.
"""

from __future__ import annotations

import torch

from .. import _checks
from .._dispatch import deferred, define, resolve
from ..kv import STORED, check_caches
from . import eager
from ._parts import ENTRY, empty_schedule, most_parts, schedule_size


def _too_wide(q: torch.Tensor, *_: object) -> str | None:
    return f"heads of width {q.shape[2]} are more than its kernels' 256" if q.shape[2] > 256 else None


_schedule = define(
    "attention_schedule(Tensor k_lens, int heads, int groups, SymInt queries, int width, int item_size, "
    "Tensor? rows, Tensor? cu_seqlens_q, bool split, str backend) -> Tensor",
    fake=empty_schedule,
    check=eager.check_schedule,
    eager=lambda *arguments: empty_schedule(*arguments).zero_(),
    triton=deferred(f"{__name__}.triton", "attention_schedule"),
    cuda=deferred(f"{__name__}.cuda", "attention_schedule"),
)
_op = define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor k_lens, Tensor(a!)? schedule, "
    "Tensor? rows, Tensor? cu_seqlens_q, Tensor? q_positions, Tensor? k_scale, Tensor? v_scale, float scale, "
    "str backend) -> Tensor",
    fake=lambda q, *_: q.new_empty(q.shape),
    check=eager.check,
    eager=eager.paged_attention,
    triton=deferred(f"{__name__}.triton", "paged_attention"),
    cuda=deferred(f"{__name__}.cuda", "paged_attention", refuses=_too_wide),
)


def attention_schedule(
    k_lens: torch.Tensor,
    heads: int,
    groups: int,
    queries: int,
    *,
    rows: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    split: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """How :func:`paged_attention` splits its lanes, worked out once for all layers that share the lengths; on the
    device, so that a CUDA graph replays right whatever the lengths have become.

    Args:
        k_lens: (R,) int32, as in :func:`paged_attention`.
        heads: query heads, H.
        groups: key/value heads, G.
        queries: n, with those of padding.
        rows: (R,) int64, as there.
        cu_seqlens_q: (R+1,) int32, as there.
        k_cache: whose width and dtype the split suits best; it is not read. Default: width 64, 16 bits.
        split: False leaves each lane whole, so that what it gets doesn't depend on the lengths of others, bit for bit.
        backend: as there. What "eager" returns is for "eager" alone.

    Returns:
        int32, for calls with these arguments on one stream, which use it to count.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "attention_schedule"
    _checks.tensor(op, "k_lens", k_lens, ("R",), (torch.int32,))
    for name, number in (("heads", heads), ("groups", groups)):
        _checks.whole(op, name, number, 1)
    if heads % groups:
        _checks.fail(op, "groups", f"a number that divides the {heads} query heads", groups)
    _checks.whole(op, "queries", queries)
    _check_lanes(op, k_lens, queries, rows, cu_seqlens_q)
    suited = (64, 2)
    if k_cache is not None:
        _checks.tensor(op, "k_cache", k_cache, ("num_pages", "page_size", groups, "d"), STORED)
        suited = (k_cache.shape[3], k_cache.dtype.itemsize)
    return _schedule(k_lens, heads, groups, queries, *suited, rows, cu_seqlens_q, split, resolve(op, backend, k_lens))


def _check_lanes(
    op: str, k_lens: torch.Tensor, queries: int, rows: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None
) -> None:
    lanes = k_lens.shape[0]
    if rows is not None:
        _checks.tensor(op, "rows", rows, (lanes,), (torch.int64,), k_lens)
    if cu_seqlens_q is not None:
        _checks.tensor(op, "cu_seqlens_q", cu_seqlens_q, (lanes + 1,), (torch.int32,), k_lens)
    elif queries != lanes:
        _checks.fail(
            op, "cu_seqlens_q", f"where the queries of each lane begin, for {queries} of {lanes} lanes", "None"
        )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    k_lens: torch.Tensor,
    *,
    schedule: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    q_positions: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of a few queries a lane over the lane's row of a paged cache; for serving, so no gradient (paper,
    section "KV Caching Strategies").

    Rows of any lengths share a call: long ones are split among programs. Any number of queries is right; a kernel for
    many queries a lane (a whole prompt) is :func:`attention_varlen`.

    Args:
        q: (n, H, d) queries, one lane after another; bf16, fp16, fp32 or fp64; any strides. Softmax and sums are in
            fp32 (fp64 for fp64), whatever a row's length.
        k_cache: (num_pages, page_size, G, d), of q's dtype, or of one that fits into it: float8_e4m3fn, and 16 bits for
            q of 32. H a multiple of G; query head h uses head h // (H/G).
        v_cache: (num_pages, page_size, G, d), likewise.
        page_table: (rows, max_pages) int32; entries past a row's length are not read.
        k_lens: (R,) int32 keys that each lane may see, those of its own queries included; 0 is welcome.
        schedule: of :func:`attention_schedule`, for the same lengths, rows and queries. Default: made anew, which is a
            launch more.
        rows: (R,) int64 line of the page table that each lane reads, -1 for a lane of padding. Default: its own index.
        cu_seqlens_q: (R+1,) int32, from 0, ascending: where each lane's queries begin. Default: one query a lane.
        q_positions: (n,) integers, the index among its lane's keys of the last one that a query sees. Default: the
            queries are the lane's newest tokens, in order.
        k_scale: (G,) fp32 scales of a float8 cache; None for 1.
        v_scale: (G,) fp32, likewise.
        softmax_scale: default d ** -0.5.
        backend: see :func:`route`.

    Returns:
        (n, H, d), dtype of q; zeros where a query sees nothing, and for queries of padding.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "paged_attention"
    check_caches(op, k_cache, v_cache, k_scale, v_scale)
    _checks.tensor(op, "q", q, ("n", "H", k_cache.shape[3]), like=k_cache)
    heads, width = q.shape[1:]
    groups = k_cache.shape[2]
    if 0 in (heads, width):
        _checks.fail(op, "q", "at least one head, and a width of at least 1", tuple(q.shape))
    if groups == 0 or heads % groups:
        _checks.fail(op, "k_cache", f"a number of heads that divides the {heads} query heads", groups)
    if torch.promote_types(q.dtype, _kept(k_cache.dtype, q.dtype)) != q.dtype:
        _checks.fail(op, "k_cache", f"the dtype of q, {q.dtype}, or one that fits into it", k_cache.dtype)
    _checks.tensor(op, "page_table", page_table, ("rows", "max_pages"), (torch.int32,), q)
    _checks.tensor(op, "k_lens", k_lens, ("R",) if rows is not None else page_table.shape[:1], (torch.int32,), q)
    _check_lanes(op, k_lens, q.shape[0], rows, cu_seqlens_q)
    if q_positions is not None:
        _checks.tensor(op, "q_positions", q_positions, (q.shape[0],), _checks.INTEGERS, q)
    _checks.no_gradient(op, q, k_cache, v_cache, k_scale, v_scale, instead="use kv_lookup and attention_varlen")
    scale = width**-0.5 if softmax_scale is None else _checks.number(op, "softmax_scale", softmax_scale)
    named = resolve(op, backend, q, k_cache)
    if schedule is not None:
        _checks.tensor(op, "schedule", schedule, ("numbers",), (torch.int32,), q)
        least = schedule_size(most_parts(k_lens.shape[0], heads, groups, q.shape[0], cu_seqlens_q), groups, 1)
        if schedule.shape[0] < least or (schedule.shape[0] - least) % ENTRY:
            wanted = f"{least} numbers, or more by a multiple of {ENTRY}, as attention_schedule returns for these lanes"
            _checks.fail(op, "schedule", wanted, schedule.shape[0])
        if not schedule.is_contiguous():
            _checks.fail(op, "schedule", "a contiguous tensor", f"strides {schedule.stride()}")
    lengths = k_lens, schedule, rows, cu_seqlens_q
    return _op(q, k_cache, v_cache, page_table, *lengths, q_positions, k_scale, v_scale, scale, named)


def _kept(dtype: torch.dtype, like: torch.dtype) -> torch.dtype:
    """float8 fits into every other dtype; PyTorch promotes it to none."""
    return like if dtype == torch.float8_e4m3fn else dtype
