"""Choosing the next token: parameters of a request and a sampler vectorised over lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Every value is checked; a wrong one is a ValueError.

    max_tokens: most tokens to generate, at least 1.
    temperature: 0 takes the likeliest token, otherwise the logits are divided by it.
    top_k: keep the k likeliest tokens and those tied with the k-th; 0 keeps all.
    top_p: keep the likeliest tokens up to and including the one at which their mass reaches top_p; in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1].
    seed: in [0, 2**63); the same seed gives the same tokens whatever runs beside. None draws one at random.
    stop_token_ids: tokens that end the request, besides the engine's end-of-sequence token.
    stop: strings that end the request; the text ends before them. They need a tokenizer.
    ignore_eos: go on after the engine's end-of-sequence token.
    logprobs: None for none; n for the log-probabilities of the chosen token and of the n likeliest, before temperature
        and filters.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        def need(ok: bool, name: str, expected: str):
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

        def whole(value, low: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= low

        def number(value) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        need(whole(self.max_tokens, 1), "max_tokens", "a whole number of at least 1")
        need(number(self.temperature) and self.temperature >= 0, "temperature", "a number of at least 0")
        need(whole(self.top_k, 0), "top_k", "a whole number of at least 0 (0 keeps all)")
        need(number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        need(number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number in [0, 1]")
        seeded = whole(self.seed, 0) and self.seed < 2**63
        need(self.seed is None or seeded, "seed", "None or a whole number in [0, 2**63)")
        need(self.logprobs is None or whole(self.logprobs, 0), "logprobs", "None or a whole number of at least 0")
        need(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        ids, strings = self.stop_token_ids, self.stop
        listed = not isinstance(ids, (str, int)) and all(whole(i, 0) for i in ids)
        need(listed, "stop_token_ids", "a sequence of token ids")
        listed = not isinstance(strings, str) and all(isinstance(s, str) and s for s in strings)
        need(listed, "stop", "a sequence of non-empty strings")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "stop", tuple(strings))


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
    """Choose one token a lane.

    logits (n, V) of any float dtype; the rest (n,): temperature, top_p, min_p float, top_k, seed, position int64.
    Returns token ids (n,) int64. Temperature 0 is the likeliest token (ties: the lowest id). Otherwise the inverse of
    the cumulative distribution of `filtered`, at `uniform(seed, position)`. NaN logits are never chosen; a lane without
    a single number among its logits gives -1.
    """
    clean = _finite(logits)
    chosen = clean.argmax(-1)
    hot = temperature > 0
    if bool(hot.any()):
        weights, tokens = filtered(logits, torch.where(hot, temperature, 1.0), top_k, top_p, min_p)
        cdf = weights.cumsum(-1)
        total = cdf[:, -1:]
        target = torch.minimum((uniform(seed, position)[:, None] * total.double()).long(), total - 1)
        rank = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
        chosen = torch.where(hot, tokens.gather(1, rank).squeeze(1), chosen)
    return torch.where(clean.amax(-1) == -math.inf, -1, chosen)


def log_probabilities(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the raw logits (n, V): of the chosen tokens (n,) and of the `top` likeliest.

    Returns (n,), then values (n, top) and token ids (n, top), in float32 or, for float64 logits, float64.
    """
    log = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    values, tokens = log.topk(top, dim=-1)
    return log.gather(1, chosen[:, None]).squeeze(1), values, tokens
