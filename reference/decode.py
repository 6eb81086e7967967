"""Generation without any cache: for every new token, the whole sequence so far is computed anew.

This is what decoding with a cache has to reproduce, token for token and depth for depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.model import ReferenceMoR


@dataclass
class Generated:
    tokens: list[int]  # the prompt and the new tokens
    logits: Tensor  # (new tokens, V): what each new token was picked from
    depths: list[int]  # recursions of every position that was computed: all but the last new token's


def greedy(logits: Tensor, position: int) -> int:
    """The likeliest token, the lowest id among equals."""
    return int((logits == logits.max()).nonzero()[0])


@torch.no_grad()
def generate(
    model: ReferenceMoR,
    prompt: list[int],
    max_new_tokens: int,
    pick: Callable[[Tensor, int], int] = greedy,
    stop: tuple[int, ...] = (),
) -> Generated:
    """Continue a prompt of at least one token, up to max_new_tokens or a token of ``stop``, which is then the last.

    pick(logits (V,), position) returns the token to put at that position.
    """
    if not prompt:
        raise ValueError("prompt: expected at least one token, got none")
    tokens, new_logits, depths = list(prompt), [], []
    for _ in range(max_new_tokens):
        result = model.forward(torch.tensor([tokens]), mode="threshold")
        depths = result.depths[0].tolist()
        new_logits.append(result.logits[0, -1])
        tokens.append(pick(new_logits[-1], len(tokens)))
        if tokens[-1] in stop:
            break
    V = model.config["vocab_size"]
    return Generated(tokens, torch.stack(new_logits) if new_logits else torch.zeros(0, V), depths)
