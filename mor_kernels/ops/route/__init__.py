"""Expert-choice routing: router score, top-k and token gather in one op (paper, section "Routing Strategies")."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._numeric import wide
from . import eager


class Routed(NamedTuple):
    """What :func:`route` returns; k tokens a sequence, fewer where a sequence has fewer candidates."""

    rows: torch.Tensor  #: (B, k, D), dtype of x: the kept tokens; zeros past counts
    indices: torch.Tensor  #: (B, k) int64: their absolute positions, ascending; -1 past counts
    gates: torch.Tensor  #: (B, k) fp32 (fp64 for fp64 x): alpha * G(logit); 0 past counts
    logits: torch.Tensor  #: (B, C), or (B, N) without candidates, fp32 (fp64 for fp64 x); 0 where there is no candidate
    counts: torch.Tensor  #: (B,) int32: tokens kept


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    logits: torch.Tensor | None,
    candidates: torch.Tensor | None,
    seqlens: torch.Tensor | None,
    indices: torch.Tensor | None,
    k: int,
    activation: str,
    alpha: float,
    temperature: float,
    rank: str,
) -> tuple[torch.Tensor, ...]:
    batch, length, width = x.shape
    scored = length if candidates is None else candidates.shape[1]
    dtype = wide(x.dtype)
    return (
        x.new_empty(batch, k, width),
        x.new_empty(batch, k, dtype=torch.int64),
        x.new_empty(batch, k, dtype=dtype),
        x.new_empty(batch, scored, dtype=dtype),
        x.new_empty(batch, dtype=torch.int32),
    )


def _fake_backward(
    d_rows: torch.Tensor,
    d_gates: torch.Tensor,
    d_logits: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    logits: torch.Tensor,
    candidates: torch.Tensor | None,
    seqlens: torch.Tensor | None,
    indices: torch.Tensor,
    *scalars: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d_x, and the gradient of the weight or of the ready logits; the other of the two is empty."""
    if weight is None:
        return x.new_empty(x.shape), x.new_empty(0), d_logits.new_empty(d_logits.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_logits.new_empty(0)


_forward = define(
    "route(Tensor x, Tensor? weight, Tensor? logits, Tensor? candidates, Tensor? seqlens, Tensor? indices, SymInt k, "
    "str activation, float alpha, float temperature, str rank, str backend)"
    " -> (Tensor rows, Tensor indices, Tensor gates, Tensor logits, Tensor counts)",
    fake=_fake,
    check=eager.check,
    eager=eager.route,
    triton=deferred(f"{__name__}.triton", "route"),
    cuda=deferred(f"{__name__}.cuda", "route"),
)
_backward = define(
    "route_backward(Tensor d_rows, Tensor d_gates, Tensor d_logits, Tensor x, Tensor? weight, Tensor logits, "
    "Tensor? candidates, Tensor? seqlens, Tensor indices, str activation, float alpha, float temperature, str backend)"
    " -> (Tensor d_x, Tensor d_weight, Tensor d_logits)",
    fake=_fake_backward,
    eager=eager.route_backward,
    triton=deferred(f"{__name__}.triton", "route_backward"),
    cuda=deferred(f"{__name__}.cuda", "route_backward"),
)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        logits: torch.Tensor | None,
        candidates: torch.Tensor | None,
        seqlens: torch.Tensor | None,
        indices: torch.Tensor | None,
        k: int,
        activation: str,
        alpha: float,
        temperature: float,
        rank: str,
        backend: str,
    ) -> tuple[torch.Tensor, ...]:
        rows, indices, gates, logits, counts = _forward(
            x, weight, logits, candidates, seqlens, indices, k, activation, alpha, temperature, rank, backend
        )
        ctx.save_for_backward(x, weight, logits, candidates, seqlens, indices)
        ctx.scalars = (activation, alpha, temperature, backend)
        ctx.mark_non_differentiable(indices, counts)
        return rows, indices, gates, logits, counts

    @staticmethod
    @first_order("route")
    def backward(
        ctx: Any,
        d_rows: torch.Tensor,
        _d_indices: torch.Tensor | None,
        d_gates: torch.Tensor,
        d_logits: torch.Tensor,
        _d_counts: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, logits, candidates, seqlens, indices = ctx.saved_tensors
        d_x, d_weight, d_logits = _backward(
            d_rows, d_gates, d_logits, x, weight, logits, candidates, seqlens, indices, *ctx.scalars
        )
        from_weight = weight is not None
        return (d_x, d_weight if from_weight else None, None if from_weight else d_logits, *[None] * 9)


def route(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    k: int,
    *,
    logits: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
    seqlens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    activation: str = "sigmoid",
    alpha: float = 0.1,
    temperature: float = 1.0,
    rank: str = "logit",
    backend: str | None = None,
) -> Routed:
    """Score every candidate token, keep the k best of each sequence, and gather their rows (paper, section "Routing
    Strategies", equation 1).

    ``logit = x . weight / temperature`` (fp32 accumulation, fp64 for fp64 ``x``), ``gate = alpha * G(logit)``.
    Tokens are ranked by logit, descending, ties by the lower position, so that the choice is the same on every backend
    and in every run. A token whose logit is not a number is never kept (the NaN stays visible in ``logits``); infinite
    logits count as the largest finite number. Gradients reach ``x`` (through rows, gates and logits) and ``weight`` or
    ``logits``.

    Args:
        x: (B, N, D) hidden states entering the recursion; bf16, fp16, fp32 or fp64; any strides.
        weight: (D,) linear router; None when ``logits`` is given.
        k: tokens to keep of each sequence, 0 <= k <= number of candidates.
        logits: (B, C) outputs of another router in place of ``x . weight``, fp32 (fp64 for fp64 ``x``).
        candidates: (B, C) int64, ascending absolute positions among which to choose (what the previous recursion kept),
            -1 for none at the end of a row. Default: all N.
        seqlens: (B,) integers; positions at and past it are padding and never kept.
        indices: (B, k) int64, a recorded choice to repeat (ascending, -1 at the end of a row) instead of a new one.
        activation: G, "sigmoid", "tanh" or "none".
        alpha: factor of the gate.
        temperature: divides ``x . weight``, > 0; ready ``logits`` are taken to be divided already.
        rank: "logit"; or "score", which ranks ``alpha * G(logit)`` in the dtype of x as the authors' code does, with
            the ties that this brings.
        backend: "eager", "triton" or "cuda"; default the best for the device, or ``MOR_BACKEND``.

    Returns:
        :class:`Routed`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("route", "x", x, ("B", "N", "D"))
    batch, length, width = x.shape
    scored = length
    if candidates is not None:
        _checks.tensor("route", "candidates", candidates, (batch, "C"), (torch.int64,), x)
        scored = candidates.shape[1]
    if (weight is None) == (logits is None):
        _checks.fail("route", "weight, logits", "exactly one of them", "both" if weight is not None else "neither")
    if weight is not None:
        _checks.tensor("route", "weight", weight, (width,), like=x)
    else:
        _checks.tensor("route", "logits", logits, (batch, scored), (wide(x.dtype),), x)
    if seqlens is not None:
        _checks.tensor("route", "seqlens", seqlens, (batch,), _checks.INTEGERS, x)
    _checks.whole("route", "k", k)
    if k > scored:
        _checks.fail("route", "k", f"at most the {scored} candidates", k)
    if indices is not None:
        _checks.tensor("route", "indices", indices, (batch, k), (torch.int64,), x)
    _checks.choice("route", "activation", activation, ("sigmoid", "tanh", "none"))
    _checks.choice("route", "rank", rank, ("logit", "score"))
    alpha = _checks.number("route", "alpha", alpha)
    temperature = _checks.number("route", "temperature", temperature, positive=True)
    tensors = (x, weight, logits, candidates, seqlens, indices)
    scalars = (activation, alpha, temperature, rank)
    return Routed(*apply(_Route, *tensors, k, *scalars, resolve("route", backend, x, weight, logits)))
