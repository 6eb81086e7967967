"""Choosing the next token of each lane."""

from __future__ import annotations

import torch

from .. import _checks
from .._dispatch import deferred, define, resolve
from . import eager

# Triton's is eager's: without sums in shared memory it would have to sort the logits, too. Numbers are handed on as the
# bits of float64, since tensors of that dtype are left to eager.
_sample = define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position, "
    "str backend) -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
    eager=eager.sample,
    triton=eager.sample,
    cuda=deferred(f"{__name__}.cuda", "sample"),
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Choose one token a lane, by the settings of each; no gradient.

    Temperature 0 is the likeliest token (ties: the lowest id). Otherwise temperature, top-k, top-p and min-p, in this
    order, leave some tokens, and the token is the inverse of their cumulative distribution, likeliest first and ties
    in order of their ids, at a number that ``seed`` and ``position`` alone make (splitmix64; Steele, Lea and Flood,
    2014), so it depends on nothing but the lane's own arguments. Weights are whole numbers, whose sums are exact; what
    rounds is each token's exponential and the sum that divides them, in float64. Backends and devices round these
    differently, by a last digit or so, and then choose another token, at fewer than one position in 2**30.

    Args:
        logits: (n, V), V at least 1; bf16, fp16, fp32 or fp64; any strides. NaN and -inf are never chosen, and +inf is
            likelier than any number.
        temperature: (n,) fp32 or fp64, finite, as the other numbers.
        top_k: (n,) int64: keep the k likeliest tokens and those tied with the k-th; 0 keeps all.
        top_p: (n,) fp32 or fp64: keep the likeliest tokens up to and including the one at which their mass reaches
            top_p; 1 keeps all.
        min_p: (n,) fp32 or fp64: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        seed: (n,) int64.
        position: (n,) int64 from 0; negative for lanes of padding, whose logits aren't read by kernels.
        backend: see :func:`route`.

    Returns:
        (n,) int64 token ids; -1 for padding and for a lane without a single number or +inf among its logits.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "sample"
    _checks.tensor(op, "logits", logits, ("n", "V"))
    n = logits.shape[0]
    if not logits.shape[1]:
        _checks.fail(op, "logits", "at least one token", 0)
    for name, numbers in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        _checks.tensor(op, name, numbers, (n,), (torch.float32, torch.float64), logits)
    for name, numbers in (("top_k", top_k), ("seed", seed), ("position", position)):
        _checks.tensor(op, name, numbers, (n,), (torch.int64,), logits)
    named = resolve(op, backend, logits)
    temperature, top_p, min_p = (t.detach().double().view(torch.int64) for t in (temperature, top_p, min_p))
    return _sample(logits.detach(), temperature, top_k, top_p, min_p, seed, position, named)
