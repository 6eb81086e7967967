"""Token-choice routing: depths, and the packed (ragged) form of every recursion's tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from .._numeric import wide
from . import eager


class Packed(NamedTuple):
    """What :func:`pack_depths` returns, one row a recursion."""

    indices: torch.Tensor  #: (Nr, B*N) int64: rows of the flattened (B*N) batch, ascending; -1 past cu_seqlens[r, -1]
    cu_seqlens: torch.Tensor  #: (Nr, B+1) int32: where each sequence's tokens begin among them


def _fake(depths: torch.Tensor, num_recursions: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length = depths.shape
    return (
        depths.new_empty(num_recursions, batch * length, dtype=torch.int64),
        depths.new_empty(num_recursions, batch + 1, dtype=torch.int32),
    )


_pack = define(
    "pack_depths(Tensor depths, SymInt num_recursions, str backend) -> (Tensor indices, Tensor cu_seqlens)",
    fake=_fake,
    eager=eager.pack_depths,
    triton=deferred(f"{__name__}.triton", "pack_depths"),
)


def pack_depths(depths: torch.Tensor, num_recursions: int, *, backend: str | None = None) -> Packed:
    """The tokens that each recursion works on, in order and without gaps.

    Recursion r (from 1) takes the tokens whose depth is at least r. The output's shape doesn't depend on the depths, so
    nothing waits for the device; :func:`gather` and :func:`scatter_back` skip the -1 at the end of a row, and a caller
    who knows a bound on the number of tokens may cut the row there.

    Args:
        depths: (B, N) int64 or int32, the number of recursions that a token takes; 0 for padding.
        num_recursions: Nr.
        backend: see :func:`route`.

    Returns:
        :class:`Packed`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("pack_depths", "depths", depths, ("B", "N"), _checks.INTEGERS)
    _checks.whole("pack_depths", "num_recursions", num_recursions, 1)
    if depths.numel() >= 2**31:
        _checks.fail("pack_depths", "depths", "fewer than 2**31 tokens, which cu_seqlens can count", depths.numel())
    return Packed(*_pack(depths, num_recursions, resolve("pack_depths", backend, depths)))


class Depths(NamedTuple):
    """What :func:`choose_depths` returns."""

    depths: torch.Tensor  #: (B, N) int64: 1..Nr; 0 at padding
    probs: torch.Tensor  #: (B, N, Nr) fp32 (fp64 for fp64): softmax or sigmoid of the logits


_choose = define(
    "choose_depths(Tensor logits, Tensor? bias, Tensor? valid, str activation, str backend)"
    " -> (Tensor depths, Tensor probs)",
    fake=lambda logits, *_: (
        logits.new_empty(logits.shape[:-1], dtype=torch.int64),
        logits.new_empty(logits.shape, dtype=wide(logits.dtype)),
    ),
    eager=eager.choose_depths,
    triton=deferred(f"{__name__}.triton", "choose_depths"),
)
_choose_backward = define(
    "choose_depths_backward(Tensor d_probs, Tensor logits, Tensor probs, str activation, str backend) -> Tensor",
    fake=lambda d_probs, logits, *_: logits.new_empty(logits.shape),
    eager=eager.choose_depths_backward,
    triton=deferred(f"{__name__}.triton", "choose_depths_backward"),
)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        valid: torch.Tensor | None,
        activation: str,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        depths, probs = _choose(logits, bias, valid, activation, backend)
        ctx.mark_non_differentiable(depths)
        ctx.save_for_backward(logits, probs)
        ctx.activation, ctx.backend = activation, backend
        return depths, probs

    @staticmethod
    @first_order("choose_depths")
    def backward(
        ctx: Any, _: torch.Tensor | None, d_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        return _choose_backward(d_probs, *ctx.saved_tensors, ctx.activation, ctx.backend), None, None, None, None


def choose_depths(
    logits: torch.Tensor,
    *,
    activation: str = "softmax",
    bias: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    backend: str | None = None,
) -> Depths:
    """Token-choice: each token's depth is the expert with the best score, ties to the shallower (paper, equation 2).

    A logit that is not a number is never chosen unless all are (then depth 1); infinite ones count as the largest
    finite number. Neither gets a gradient.

    Args:
        logits: (B, N, Nr) router outputs, already divided by the temperature; bf16, fp16, fp32 or fp64.
        activation: "softmax" or "sigmoid".
        bias: (Nr,) floats, added to the scores for the choice only (loss-free balancing).
        valid: (B, N) bool, False at padding; its depth is 0.
        backend: see :func:`route`.

    Returns:
        :class:`Depths`; gradients reach ``logits`` through ``probs``.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    _checks.tensor("choose_depths", "logits", logits, ("B", "N", "Nr"))
    _checks.choice("choose_depths", "activation", activation, ("softmax", "sigmoid"))
    if logits.shape[-1] == 0:
        _checks.fail("choose_depths", "logits", "at least one recursion", 0)
    if bias is not None:
        _checks.tensor("choose_depths", "bias", bias, (logits.shape[-1],), like=logits)
    if valid is not None:
        _checks.tensor("choose_depths", "valid", valid, tuple(logits.shape[:2]), (torch.bool,), logits)
    backend = resolve("choose_depths", backend, logits, bias)
    return Depths(*apply(_Choose, logits, bias, valid, activation, backend))
