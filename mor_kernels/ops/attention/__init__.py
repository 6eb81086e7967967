"""Attention of a subset of the queries over shared keys/values (paper, section "KV Caching Strategies").

A query at position p sees the keys with index <= p. Positions are arguments, never guessed from a causal flag: among
kept tokens in ascending order a query's position is simply its own index (recursion-wise caching); over the keys and
values of the first recursion it is the token's absolute position (recursive sharing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._numeric import wide
from . import _choice, eager


def _lse(q: torch.Tensor, *shape: int) -> torch.Tensor:
    return q.new_empty(shape, dtype=wide(q.dtype))


def _like_inputs(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_fresh: torch.Tensor | None,
    v_fresh: torch.Tensor | None,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    return tuple(q.new_empty(0 if t is None else t.shape) for t in (q, k, v, k_fresh, v_fresh))


_forward = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? k_fresh, Tensor? v_fresh, Tensor? q_positions, Tensor? q_lens, "
    "Tensor? k_lens, float scale, str backend) -> (Tensor out, Tensor lse)",
    fake=lambda q, *_: (q.new_empty(q.shape), _lse(q, q.shape[0], q.shape[2], q.shape[1])),
    check=eager.check,
    eager=eager.attention,
    triton=deferred(f"{__name__}.triton", "attention", refuses=_choice.triton_refuses),
    hopper=deferred(f"{__name__}.hopper", "attention", refuses=_choice.hopper_refuses),
    cudnn=deferred(f"{__name__}.cudnn", "attention", refuses=_choice.cudnn_refuses),
    fa4=deferred(f"{__name__}.fa4", "attention", refuses=_choice.fa4_refuses),
    choose=_choice.choose,
)
_backward = define(
    "attention_backward(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor? k_fresh, Tensor? v_fresh, "
    "Tensor out, Tensor lse, Tensor? q_positions, Tensor? q_lens, Tensor? k_lens, float scale, str backend)"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_k_fresh, Tensor d_v_fresh)",
    fake=_like_inputs,
    eager=eager.attention_backward,
    triton=deferred(f"{__name__}.triton", "attention_backward", refuses=_choice.triton_refuses),
    hopper=deferred(f"{__name__}.hopper", "attention_backward", refuses=_choice.hopper_refuses_backward),
    cudnn=deferred(f"{__name__}.cudnn", "attention_backward", refuses=_choice.cudnn_refuses_backward),
    fa4=deferred(f"{__name__}.fa4", "attention_backward", refuses=_choice.fa4_refuses_backward),
    choose=_choice.choose_backward,
)
_forward_varlen = define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor? k_fresh, Tensor? v_fresh, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? q_positions, float scale, str backend)"
    " -> (Tensor out, Tensor lse)",
    fake=lambda q, *_: (q.new_empty(q.shape), _lse(q, q.shape[1], q.shape[0])),
    check=eager.check_varlen,
    eager=eager.attention_varlen,
    triton=deferred(f"{__name__}.triton", "attention_varlen", refuses=_choice.triton_refuses),
    hopper=deferred(f"{__name__}.hopper", "attention_varlen", refuses=_choice.hopper_refuses),
    fa4=deferred(f"{__name__}.fa4", "attention_varlen", refuses=_choice.fa4_refuses_varlen),
    choose=_choice.choose_varlen,
)
_backward_varlen = define(
    "attention_varlen_backward(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor? k_fresh, "
    "Tensor? v_fresh, Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, Tensor? q_positions, float scale, str backend)"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_k_fresh, Tensor d_v_fresh)",
    fake=_like_inputs,
    eager=eager.attention_varlen_backward,
    triton=deferred(f"{__name__}.triton", "attention_varlen_backward", refuses=_choice.triton_refuses),
    hopper=deferred(f"{__name__}.hopper", "attention_varlen_backward", refuses=_choice.hopper_refuses_backward),
    fa4=deferred(f"{__name__}.fa4", "attention_varlen_backward", refuses=_choice.fa4_refuses_varlen_backward),
    choose=_choice.choose_varlen_backward,
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_fresh: torch.Tensor | None,
        v_fresh: torch.Tensor | None,
        q_positions: torch.Tensor | None,
        q_lens: torch.Tensor | None,
        k_lens: torch.Tensor | None,
        scale: float,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)  # most callers ask for no log-sum-exp
        out, lse = _forward(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale, backend)
        ctx.save_for_backward(q, k, v, k_fresh, v_fresh, out, lse, q_positions, q_lens, k_lens)
        ctx.scalars = (scale, backend)
        return out, lse

    @staticmethod
    @first_order("attention")
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
        gradients = _backward(_filled(d_out, saved), d_lse, *saved, *ctx.scalars)
        return *_given(gradients, saved), *[None] * 5


class _AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        k_fresh: torch.Tensor | None, v_fresh: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
        q_positions: torch.Tensor | None, scale: float, backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        longest = max_seqlen_q, max_seqlen_k
        out, lse = _forward_varlen(
            q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, *longest, q_positions, scale, backend
        )
        ctx.save_for_backward(q, k, v, k_fresh, v_fresh, out, lse, cu_seqlens_q, cu_seqlens_k, q_positions)
        ctx.scalars = (scale, backend)
        ctx.longest = longest
        return out, lse

    @staticmethod
    @first_order("attention_varlen")
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        *tensors, q_positions = saved
        gradients = _backward_varlen(_filled(d_out, saved), d_lse, *tensors, *ctx.longest, q_positions, *ctx.scalars)
        return *_given(gradients, saved), *[None] * 7


def _filled(d_out: torch.Tensor | None, saved: Sequence[torch.Tensor]) -> torch.Tensor:
    """Zeros where only the log-sum-exp was differentiated."""
    return torch.zeros_like(saved[5]) if d_out is None else d_out


def _given(gradients: Sequence[torch.Tensor], saved: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Gradients of what was there."""
    return (None if t is None else gradient for t, gradient in zip(saved[:5], gradients))


def _prepare(
    op: str,
    lead: tuple[str, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_fresh: torch.Tensor | None,
    v_fresh: torch.Tensor | None,
    q_positions: torch.Tensor | None,
    softmax_scale: float | None,
) -> tuple[list[torch.Tensor | None], float]:
    """Checks that both forms share; q, k, v and the fresh ones as autocast wants them, and the scale."""
    _checks.tensor(op, "q", q, (*lead, "Tq", "H", "d"))
    heads, width = q.shape[-2:]
    _checks.tensor(op, "k", k, (*[q.shape[0]] * len(lead), "Tk", "G", width), like=q)
    _checks.tensor(op, "v", v, tuple(k.shape), like=q)
    groups = k.shape[-2]
    if width == 0:
        _checks.fail(op, "q", "a head width of at least 1", 0)
    if groups == 0 or heads % groups:
        _checks.fail(op, "k", f"a number of heads that divides the {heads} query heads", groups)
    if (k_fresh is None) != (v_fresh is None):
        _checks.fail(op, "v_fresh" if v_fresh is None else "k_fresh", "both of k_fresh and v_fresh, or neither", "None")
    if k_fresh is not None:
        if q_positions is None:
            _checks.fail(op, "q_positions", "positions, where k_fresh and v_fresh go", "None")
        for name, t in (("k_fresh", k_fresh), ("v_fresh", v_fresh)):
            _checks.tensor(op, name, t, (*q.shape[:-2], groups, width), like=q)
    tensors = _checks.one_dtype(op, q=q, k=k, v=v, k_fresh=k_fresh, v_fresh=v_fresh)
    return tensors, width**-0.5 if softmax_scale is None else _checks.number(op, "softmax_scale", softmax_scale)


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_positions: torch.Tensor | None = None,
    k_fresh: torch.Tensor | None = None,
    v_fresh: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    k_lens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_positions: torch.Tensor | None = None,
    k_fresh: torch.Tensor | None = None,
    v_fresh: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    k_lens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_positions: torch.Tensor | None = None,
    k_fresh: torch.Tensor | None = None,
    v_fresh: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    k_lens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Query-subset attention, batched: a query at position p sees keys 0..p of its sequence (paper, section "KV Caching
    Strategies").

    Args:
        q: (B, Tq, H, d) queries; bf16, fp16, fp32 or fp64; any strides. Softmax and sums are in fp32 (fp64 for fp64).
        k: (B, Tk, G, d) keys; H a multiple of G, query head h uses head h // (H/G). Views of a fused projection are
            welcome.
        v: (B, Tk, G, d) values.
        q_positions: (B, Tq) integers, each query's position counted in keys. Default: its index (plain causal).
        k_fresh: (B, Tq, G, d) keys of the queries' own tokens, which take the place of those at ``q_positions`` (hybrid
            strategy), without a merged copy on a GPU. Positions are then all different.
        v_fresh: (B, Tq, G, d) values likewise.
        q_lens: (B,) integers; queries at and past it are padding: output zeros, no gradient.
        k_lens: (B,) integers; keys at and past it are not seen, whatever they hold. So are keys past a sequence's last
            position, unless a library computes it; a NaN among the others reaches every query of its sequence.
        softmax_scale: default d ** -0.5.
        return_lse: also return the log-sum-exp of the scaled scores, (B, H, Tq) fp32 (fp64 for fp64), -inf where
            nothing is seen.
        backend: "eager"; "triton"; "hopper" (H100; bf16 and fp16, d of 64 or 128, nothing fresh; the backward takes 4
            bytes an element of q beside its results); or a library behind this op: "cudnn" (PyTorch's; as many queries
            as keys, without positions) or "fa4" (flash-attn-4, Hopper), both without lengths. The last three take a
            scale > 0 and add up the gradient of q in any order, which deterministic mode refuses. Default: the fastest
            as measured (``attention/_choice.py``); "triton" in deterministic mode.

    Returns:
        (B, Tq, H, d), dtype of q (the autocast dtype under autocast); zeros where a query sees nothing. With
        ``return_lse`` a pair. Gradients reach q, k, v and the fresh ones, through both.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "attention"
    tensors, scale = _prepare(op, ("B",), q, k, v, k_fresh, v_fresh, q_positions, softmax_scale)
    batch, queries = q.shape[:2]
    if q_positions is not None:
        _checks.tensor(op, "q_positions", q_positions, (batch, queries), _checks.INTEGERS, q)
    for name, lens in (("q_lens", q_lens), ("k_lens", k_lens)):
        if lens is not None:
            _checks.tensor(op, name, lens, (batch,), _checks.INTEGERS, q)
    out, lse = apply(_Attention, *tensors, q_positions, q_lens, k_lens, scale, resolve(op, backend, tensors[0]))
    return (out, lse) if return_lse else out


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    q_positions: torch.Tensor | None = None,
    k_fresh: torch.Tensor | None = None,
    v_fresh: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    q_positions: torch.Tensor | None = None,
    k_fresh: torch.Tensor | None = None,
    v_fresh: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    q_positions: torch.Tensor | None = None,
    k_fresh: torch.Tensor | None = None,
    v_fresh: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Query-subset attention, packed: sequence b owns queries cu_seqlens_q[b]:cu_seqlens_q[b+1], and keys likewise.

    Args:
        q: (total_q, H, d), as in :func:`attention`. Rows past the last sequence's end are padding: output zeros, no
            gradient.
        k: (total_k, G, d) likewise.
        v: (total_k, G, d) likewise.
        cu_seqlens_q: (B+1,) int32, from 0, ascending; sequences of length zero are welcome.
        cu_seqlens_k: (B+1,) int32 likewise.
        max_seqlen_q: bound on the lengths.
        max_seqlen_k: bound on the lengths.
        q_positions: (total_q,) integers, each query's position counted in keys of its sequence. Default: its index in
            the sequence (top-left aligned).
        k_fresh: (total_q, G, d), as in :func:`attention`.
        v_fresh: (total_q, G, d), as in :func:`attention`.
        softmax_scale: default d ** -0.5.
        return_lse: also return the log-sum-exp, (H, total_q) fp32 (fp64 for fp64), -inf where nothing is seen.
        backend: "eager", "triton", "hopper" as in :func:`attention`, or "fa4" (without positions, with one cu_seqlens
            for both; a NaN may then reach the neighbours of its sequence). Default: the fastest as measured; "triton"
            in deterministic mode.

    Returns:
        (total_q, H, d), dtype and zeros as in :func:`attention`, or a pair with the log-sum-exp. Gradients as there.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "attention_varlen"
    tensors, scale = _prepare(op, (), q, k, v, k_fresh, v_fresh, q_positions, softmax_scale)
    _checks.tensor(op, "cu_seqlens_q", cu_seqlens_q, ("B+1",), (torch.int32,), q)
    if cu_seqlens_q.shape[0] == 0:
        _checks.fail(op, "cu_seqlens_q", "at least one element", "none")
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _checks.whole(op, name, value)
    _checks.tensor(op, "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), (torch.int32,), q)
    if q_positions is not None:
        _checks.tensor(op, "q_positions", q_positions, (q.shape[0],), _checks.INTEGERS, q)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    named = resolve(op, backend, tensors[0])
    out, lse = apply(_AttentionVarlen, *tensors, *offsets, q_positions, scale, named)
    return (out, lse) if return_lse else out
