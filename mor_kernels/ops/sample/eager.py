from __future__ import annotations

import math

import torch
from torch import Tensor

_ONE = 2.0**62  # probability 1 as an integer weight


def _int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX = ((30, _int64(0xBF58476D1CE4E5B9)), (27, _int64(0x94D049BB133111EB)))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; int64's own keeps the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    for bits, factor in _MIX:  # int64 products wrap, as the unsigned ones of the definition do
        x = (x ^ _shift(x, bits)) * factor
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """float64 in [0, 1) from int64 seeds and positions of the same shape: the position-th output of splitmix64.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014). A pure function of its
    arguments in integers, so it depends neither on the batch nor on the device. The state starts at a mixed seed, so
    that no two seeds give shifted copies of one stream.
    """
    state = _splitmix64(seed + _GAMMA) + (position + 1) * _GAMMA
    return _shift(_splitmix64(state), 11).double() * 2.0**-53


def _finite(logits: Tensor) -> Tensor:
    """Logits as float64 in which NaN is never chosen and +inf beats every number without making softmax a NaN."""
    return torch.nan_to_num(logits.double(), nan=-math.inf, posinf=torch.finfo(torch.float64).max / 4, neginf=-math.inf)


def filtered(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution that is sampled: temperature, then top-k, top-p, min-p, in Hugging Face's order.

    logits (n, V); temperature above 0, top_p, min_p (n,) float; top_k (n,) int.
    Returns weights (n, V) int64, likeliest first, and the token ids (n, V) int64 in that order; equally likely tokens
    stand in order of their ids. Weights are probabilities in units of 2**-62 before what top-p and min-p take away,
    zero where filtered. Their sums are exact in any order, so they are the same on every device.
    """
    # the likeliest token stands at 0 before the division, so that a tiny temperature can't overflow
    scores, tokens = _finite(logits).sort(dim=-1, descending=True, stable=True)
    scores = (scores - scores[:, :1]) / temperature.double()[:, None]
    last = (torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1]) - 1)[:, None]
    probs = scores.masked_fill(scores < scores.gather(1, last), -math.inf).softmax(-1)
    weights = (probs * _ONE).long()
    before = (weights.cumsum(-1) - weights).double() / _ONE
    keep = (before < top_p.double()[:, None]) | (top_p >= 1)[:, None]  # the token that crosses top_p is kept
    keep &= probs >= min_p.double()[:, None] * probs[:, :1]
    return weights * keep, tokens


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    temperature, top_p, min_p = (bits.view(torch.float64) for bits in (temperature, top_p, min_p))
    clean = _finite(logits)
    chosen = clean.argmax(-1)
    hot = temperature > 0
    if hot.device.type != "cpu" or bool(hot.any()):  # elsewhere that would wait for the device
        weights, tokens = filtered(logits, torch.where(hot, temperature, 1.0), top_k, top_p, min_p)
        cdf = weights.cumsum(-1)
        total = cdf[:, -1:]
        target = torch.minimum((uniform(seed, position)[:, None] * total.double()).long(), total - 1)
        rank = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
        chosen = torch.where(hot, tokens.gather(1, rank).squeeze(1), chosen)
    return torch.where((clean.amax(-1) == -math.inf) | (position < 0), -1, chosen)
