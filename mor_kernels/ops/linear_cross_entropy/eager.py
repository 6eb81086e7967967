from __future__ import annotations

from .. import _checks
from .._numeric import wide


def check(logits, targets, gradient):
    wrong = targets[(targets < 0) & (targets != -100) | (targets >= logits.shape[1])]
    if len(wrong):
        expected = f"-100, or values of at least 0 and at most {logits.shape[1] - 1}"
        _checks.fail("linear_cross_entropy", "targets", expected, int(wrong[0]))


def cross_entropy_(logits, targets, gradient):
    """Losses (n,) of logits (n, V), 0 for a negative target; with ``gradient`` the logits become theirs."""
    if not logits.numel():
        return logits.new_zeros(len(logits), dtype=wide(logits.dtype))
    none, at = (targets < 0)[:, None], targets.clamp(min=0)[:, None]
    scores = logits.log_softmax(1, dtype=wide(logits.dtype))
    negated = scores.gather(1, at)
    if gradient:
        logits.copy_(scores.exp_().scatter_(1, at, negated.expm1()).masked_fill_(none, 0))
    return negated.neg_().masked_fill_(none, 0)[:, 0]


def scaled(x, factor, dtype):
    """x * factor, rounded once; PyTorch would round the factor to the dtype of x first."""
    return (x.to(factor.dtype) * factor).to(dtype)
