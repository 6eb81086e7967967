"""The parameters of a request, by which its tokens are chosen (``ops.sample``), and log-probabilities of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ops._numeric import wide

LOGITS_AT_ONCE = 1 << 24  # brought to fp32 together where there are many rows: 64 MB


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Args:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 takes the likeliest token, otherwise the logits are divided by it.
        top_k: keep the k likeliest tokens and those tied with the k-th; 0 keeps all.
        top_p: keep the likeliest tokens up to and including the one at which their mass reaches top_p; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the likeliest; in [0, 1].
        seed: in [0, 2**63); the same seed gives the same tokens whatever runs beside. None draws one at random.
        stop_token_ids: tokens that end the request, besides the engine's end-of-sequence token.
        stop: strings that end the request; the text ends before them. They need a tokenizer.
        ignore_eos: go on after the engine's end-of-sequence token.
        logprobs: None for none; n for the log-probabilities of the chosen token and of the n likeliest, before
            temperature and filters.

    Raises:
        ValueError: a value is out of range; the message names it.
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

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

        def whole(value: object, low: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= low

        def number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        need(whole(self.max_tokens, 1), "max_tokens", "a whole number of at least 1")
        need(number(self.temperature) and self.temperature >= 0, "temperature", "a number of at least 0")
        need(whole(self.top_k, 0), "top_k", "a whole number of at least 0 (0 keeps all)")
        need(number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        need(number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number in [0, 1]")
        seeded = self.seed is None or whole(self.seed, 0) and self.seed < 2**63
        need(seeded, "seed", "None or a whole number in [0, 2**63)")
        need(self.logprobs is None or whole(self.logprobs, 0), "logprobs", "None or a whole number of at least 0")
        need(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        ids, strings = self.stop_token_ids, self.stop
        listed = not isinstance(ids, (str, int)) and all(whole(i, 0) for i in ids)
        need(listed, "stop_token_ids", "a sequence of token ids")
        listed = not isinstance(strings, str) and all(isinstance(s, str) and s for s in strings)
        need(listed, "stop", "a sequence of non-empty strings")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "stop", tuple(strings))


def log_probabilities(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the raw logits (n, V): of the chosen tokens (n,) and of the `top` likeliest.

    Returns (n,), then values (n, top) and token ids (n, top), in float32 or, for float64 logits, float64.
    """
    log = logits.to(wide(logits.dtype)).log_softmax(-1)
    values, tokens = log.topk(top, dim=-1)
    return log.gather(1, chosen[:, None]).squeeze(1), values, tokens
