"""What follows the block when expert-choice decodes: gated update, next router's score and the choice to go on."""

from __future__ import annotations

import torch

from .. import _checks
from .._dispatch import deferred, define, resolve
from .._numeric import wide
from ..scatter_back import RESIDUALS
from . import eager

_step = define(
    "depth_step_(Tensor(a!) x, Tensor update, Tensor(b!) logits, Tensor recursions, Tensor weight, Tensor? last, "
    "Tensor? replayed, Tensor? aux_weight, str activation, float alpha, float temperature, str residual, str backend)"
    " -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape[0], dtype=torch.bool),
    check=eager.check,
    eager=eager.depth_step,
    triton=deferred(f"{__name__}.triton", "depth_step"),
    cuda=deferred(f"{__name__}.cuda", "depth_step"),
)


def depth_step_(
    x: torch.Tensor,
    update: torch.Tensor,
    logits: torch.Tensor,
    recursions: torch.Tensor,
    weight: torch.Tensor,
    *,
    last: torch.Tensor | None = None,
    replayed: torch.Tensor | None = None,
    aux_weight: torch.Tensor | None = None,
    activation: str = "sigmoid",
    alpha: float = 0.1,
    temperature: float = 1.0,
    residual: str = "block",
    backend: str | None = None,
) -> torch.Tensor:
    """End a recursion of tokens that each are at their own, in one launch; for serving, so no gradient (paper, equation
    1, with a threshold in place of the percentile).

    With x a token's state that entered recursion r, f its row of ``update`` and ``gate = alpha * G(logit)``, which is 0
    for a logit that is not a number, the new state is as in :func:`scatter_back`: x + gate * f for the residual
    "block", x + gate * (f - x) for "delta", gate * f for "none". It is rounded and written into x. Its score by the
    router of recursion r + 1, new x . weight[r + 1] / temperature, is written into ``logits``, ready for the next call;
    after the last recursion the logit stays as it was. A token goes on if r + 1 < last and that score is positive.

    Args:
        x: (n, D) states; bf16, fp16, fp32 or fp64; any strides.
        update: (n, D), what the block made of them; may have another floating dtype, and shares no memory with x.
        logits: (n,) fp32 (fp64 for fp64 x): the score of each state by the router of the recursion that it entered. Of
            states that enter the first recursion: ``x . weight[0] / temperature``.
        recursions: (n,) int64, from 0; -1 for lanes of padding, whose row and logit stay as they are.
        weight: (Nr, D) linear routers, one a recursion.
        last: (n,) int64, recursions that a token takes at the most; default Nr.
        replayed: (n,) bool, tokens that go on to ``last`` whatever their score; default none.
        aux_weight: (Nr, D) auxiliary routers: a token goes on if their score is positive, and its own is a number.
        activation: G, "sigmoid", "tanh" or "none".
        alpha: factor of the gate.
        temperature: divides ``x . weight``, > 0.
        residual: see above.
        backend: see :func:`route`.

    Returns:
        (n,) bool: which tokens take another recursion; padding doesn't.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "depth_step_"
    _checks.tensor(op, "x", x, ("n", "D"))
    n, width = x.shape
    _checks.tensor(op, "update", update, (n, width), like=x)
    _checks.tensor(op, "logits", logits, (n,), (wide(x.dtype),), x)
    _checks.tensor(op, "recursions", recursions, (n,), (torch.int64,), x)
    _checks.tensor(op, "weight", weight, ("Nr", width), like=x)
    if not weight.shape[0]:
        _checks.fail(op, "weight", "at least one router", 0)
    if last is not None:
        _checks.tensor(op, "last", last, (n,), (torch.int64,), x)
    if replayed is not None:
        _checks.tensor(op, "replayed", replayed, (n,), (torch.bool,), x)
    if aux_weight is not None:
        _checks.tensor(op, "aux_weight", aux_weight, tuple(weight.shape), like=x)
    _checks.choice(op, "activation", activation, ("sigmoid", "tanh", "none"))
    _checks.choice(op, "residual", residual, RESIDUALS)
    alpha = _checks.number(op, "alpha", alpha)
    temperature = _checks.number(op, "temperature", temperature, positive=True)
    _checks.written(op, x=x, logits=logits)
    floats = (x, update, logits, weight, aux_weight)
    _checks.no_gradient(op, *floats)
    tensors = (x, update, logits, recursions, weight, last, replayed, aux_weight)
    return _step(*tensors, activation, alpha, temperature, residual, resolve(op, backend, *floats))
