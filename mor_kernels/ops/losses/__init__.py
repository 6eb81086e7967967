"""Router losses and metrics (paper, appendices "Routing Strategy" and "Router Performance Evaluation Metrics").

Losses are means without their coefficients, computed and returned in fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._numeric import wide
from . import eager


def _define(
    name: str, arguments: str, check: Callable = lambda *_: None, **saved: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A loss is two ops: the value, and its gradient for the first argument. What the latter needs of the former's sums
    are the tensors ``saved``, name -> fake."""
    tensors = ", ".join(f"Tensor {tensor}" for tensor in saved)
    forward = define(
        f"{name}({arguments}, str backend) -> (Tensor loss, {tensors})",
        fake=lambda t, *rest: (t.new_empty((), dtype=wide(t.dtype)), *(fake(t, *rest) for fake in saved.values())),
        check=check,
        eager=getattr(eager, name),
        triton=deferred(f"{__name__}.triton", name),
    )
    backward = define(
        f"{name}_backward(Tensor d_loss, {tensors}, {arguments}, str backend) -> Tensor",
        fake=lambda _, *args: args[len(saved)].new_empty(args[len(saved)].shape),
        eager=getattr(eager, f"{name}_backward"),
        triton=deferred(f"{__name__}.triton", f"{name}_backward"),
    )

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            loss, *sums = forward(*args)
            ctx.save_for_backward(*sums, *[a for a in args if isinstance(a, torch.Tensor)])
            ctx.args = [None if isinstance(a, torch.Tensor) else a for a in args]
            ctx.is_tensor = [isinstance(a, torch.Tensor) for a in args]
            return loss

        @staticmethod
        @first_order(name)
        def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            tensors = iter(ctx.saved_tensors)
            sums = [next(tensors) for _ in saved]
            args = [next(tensors) if t else a for t, a in zip(ctx.is_tensor, ctx.args)]
            return (backward(d_loss, *sums, *args), *[None] * (len(args) - 1))

    return functools.partial(apply, Loss)


def _fake_count(t: torch.Tensor, *_: object) -> torch.Tensor:
    return t.new_empty((), dtype=torch.int64)


def _fake_aux_slope(logits: torch.Tensor, *_: object) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=wide(logits.dtype))


def _fake_balance_slope(probs: torch.Tensor, depths: torch.Tensor, scope: str) -> torch.Tensor:
    return probs.new_empty(1 if scope == "batch" else probs.shape[0], probs.shape[2], dtype=wide(probs.dtype))


_aux = _define(
    "aux_loss",
    "Tensor logits, Tensor kept, Tensor? candidates, Tensor? seqlens",
    eager.check_aux,
    count=_fake_count,
    slope=_fake_aux_slope,
)
_z = _define("z_loss", "Tensor logits, Tensor? valid", count=_fake_count)
_balance = _define(
    "balance_loss",
    "Tensor probs, Tensor depths, str scope",
    eager.check_balance,
    count=_fake_count,
    slope=_fake_balance_slope,
)


def aux_loss(
    logits: torch.Tensor,
    kept: torch.Tensor,
    *,
    candidates: torch.Tensor | None = None,
    seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Binary cross-entropy of router logits against "was kept", mean over all candidates of the batch (0 without any).

    Trains the router itself (auxiliary loss) or a second one on detached states (auxiliary router) to tell, without a
    look at later tokens, which tokens a recursion keeps (paper, appendix "Routing Strategy").

    Args:
        logits: (B, C) as :func:`route` returns them; bf16, fp16, fp32 or fp64.
        kept: (B, k) int64, the kept positions, ascending, all of them candidates, -1 at the end (``Routed.indices``).
        candidates: (B, C) int64, ascending, -1 at the end, as given to :func:`route`; default all positions.
        seqlens: (B,) integers as given to :func:`route`.
        backend: see :func:`route`.

    Returns:
        A scalar, fp32 (fp64 for fp64); gradients reach logits.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("aux_loss", "logits", logits, ("B", "C"))
    _checks.tensor("aux_loss", "kept", kept, (logits.shape[0], "k"), (torch.int64,), logits)
    if candidates is not None:
        _checks.tensor("aux_loss", "candidates", candidates, tuple(logits.shape), (torch.int64,), logits)
    if seqlens is not None:
        _checks.tensor("aux_loss", "seqlens", seqlens, (logits.shape[0],), _checks.INTEGERS, logits)
    return _aux(logits, kept, candidates, seqlens, resolve("aux_loss", backend, logits))


def z_loss(logits: torch.Tensor, *, valid: torch.Tensor | None = None, backend: str | None = None) -> torch.Tensor:
    """Router z-loss: mean of the squared logsumexp over the experts; with one logit a token, mean of its square (paper,
    appendix "Details of Design Configurations").

    Args:
        logits: (B, C) one logit a token (expert-choice), or (B, N, Nr) (token-choice); bf16, fp16, fp32 or fp64.
        valid: (B, C) or (B, N) bool, which tokens count; default all.
        backend: see :func:`route`.

    Returns:
        A scalar, fp32 (fp64 for fp64), 0 where no token counts; gradients reach logits.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("z_loss", "logits", logits, ("...",))
    if logits.dim() not in (2, 3):
        _checks.fail("z_loss", "logits", "shape (B, C) or (B, N, Nr)", tuple(logits.shape))
    if logits.dim() == 3 and logits.shape[-1] == 0:
        _checks.fail("z_loss", "logits", "at least one expert", 0)
    if valid is not None:
        _checks.tensor("z_loss", "valid", valid, tuple(logits.shape[:2]), (torch.bool,), logits)
    return _z(logits if logits.dim() == 3 else logits[..., None], valid, resolve("z_loss", backend, logits))


def balance_loss(
    probs: torch.Tensor, depths: torch.Tensor, *, scope: str = "sequence", backend: str | None = None
) -> torch.Tensor:
    """Load balancing of token-choice: sum over experts of f_i * P_i, 1 where the load is even (paper, appendix "Routing
    Strategy").

    f_i = Nr x the share of tokens of depth i, P_i = the mean of p_i; both over the real tokens of a sequence, and the
    mean over the sequences that have any ("sequence", as in the paper), or over the whole micro-batch ("batch").

    Args:
        probs: (B, N, Nr) routing probabilities; bf16, fp16, fp32 or fp64.
        depths: (B, N) int64 or int32, 1..Nr, 0 at padding.
        scope: "sequence" or "batch".
        backend: see :func:`route`.

    Returns:
        A scalar, fp32 (fp64 for fp64); gradients reach probs.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("balance_loss", "probs", probs, ("B", "N", "Nr"))
    if probs.shape[-1] == 0:
        _checks.fail("balance_loss", "probs", "at least one expert", 0)
    _checks.tensor("balance_loss", "depths", depths, tuple(probs.shape[:2]), _checks.INTEGERS, probs)
    _checks.choice("balance_loss", "scope", scope, ("sequence", "batch"))
    return _balance(probs, depths, scope, resolve("balance_loss", backend, probs))


def router_bias_update(bias: torch.Tensor, counts: torch.Tensor, rate: float = 0.001) -> torch.Tensor:
    """Loss-free balancing: ``bias + rate * sign(mean(counts) - counts)`` (paper, appendix "Routing Strategy").

    Args:
        bias: (Nr,) floats, added to the scores for the choice only, see :func:`choose_depths`.
        counts: (Nr,) integers or floats, tokens that chose each expert in the step, summed over data-parallel ranks by
            the caller.
        rate: by how much a bias moves.

    Returns:
        (Nr,), the new bias; the given one stays as it is.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
    """
    _checks.tensor("router_bias_update", "bias", bias, ("Nr",))
    _checks.tensor(
        "router_bias_update", "counts", counts, tuple(bias.shape), (*_checks.INTEGERS, *_checks.FLOATS), bias
    )
    rate, counts = _checks.number("router_bias_update", "rate", rate), counts.to(torch.float64)
    return bias + rate * torch.sign(counts.mean() - counts).to(bias.dtype)


def dead_token_ratio(kept: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Share of positions that no sequence of the batch keeps at the last recursion (paper, appendix "Router Performance
    Evaluation Metrics").

    Args:
        kept: (B, N) bool, whether the last recursion keeps the token.
        valid: (B, N) bool, False at padding: of the positions at which some sequence has a token. Default: of all.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
    """
    _checks.tensor("dead_token_ratio", "kept", kept, ("B", "N"), (torch.bool,))
    valid = torch.ones_like(kept) if valid is None else valid
    _checks.tensor("dead_token_ratio", "valid", valid, tuple(kept.shape), (torch.bool,), kept)
    there = valid.any(0)
    return (there & ~kept.any(0)).sum().to(torch.float32) / there.sum().clamp(min=1)


def sampling_accuracy(predicted: torch.Tensor, kept: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Share of candidates whose causal decision equals the top-k choice (paper, appendix "Router Performance Evaluation
    Metrics").

    Args:
        predicted: (...) bool, whether the token would be taken without a look at later ones.
        kept: (...) bool, whether it was among the k best.
        valid: (...) bool, which are candidates; default all.

    Returns:
        A scalar, fp32.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
    """
    _checks.tensor("sampling_accuracy", "kept", kept, ("...",), (torch.bool,))
    _checks.tensor("sampling_accuracy", "predicted", predicted, tuple(kept.shape), (torch.bool,), kept)
    valid = torch.ones_like(kept) if valid is None else valid
    _checks.tensor("sampling_accuracy", "valid", valid, tuple(kept.shape), (torch.bool,), kept)
    return ((predicted == kept) & valid).sum().to(torch.float32) / valid.sum().clamp(min=1)


def max_vio(counts: torch.Tensor) -> torch.Tensor:
    """MaxVio, the largest relative overload of an expert: (max load - mean load) / mean load (paper, appendix "Router
    Performance Evaluation Metrics").

    Args:
        counts: (Nr,) integers or floats, tokens that chose each expert.

    Returns:
        A scalar, fp32; 0 without tokens.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
    """
    _checks.tensor("max_vio", "counts", counts, ("Nr",), (*_checks.INTEGERS, *_checks.FLOATS))
    mean = counts.to(torch.float32).mean()
    return torch.where(mean > 0, (counts.max() - mean) / mean, 0)


def routing_entropy(probs: torch.Tensor) -> torch.Tensor:
    """Entropy, in nats, of the experts' average probabilities; ln Nr when balanced (paper, appendix "Router Performance
    Evaluation Metrics").

    Args:
        probs: (tokens, Nr) floats, of each token summing to 1.

    Returns:
        A scalar, fp32 (fp64 for fp64).

    Raises:
        ValueError: an argument doesn't fit; the message names it.
    """
    _checks.tensor("routing_entropy", "probs", probs, ("tokens", "Nr"))
    return torch.special.entr(probs.to(wide(probs.dtype)).mean(0)).sum()
