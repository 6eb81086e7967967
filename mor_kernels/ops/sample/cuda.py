"""The choice of the next token by the kernel of ``csrc/sample.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import launch

MOST = 2**20  # bytes of shared memory that the kernel may ask for: as the GPU has


def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    n, vocabulary = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        settings = (temperature, top_k, top_p, min_p, seed, position)
        launch(
            _C.sample, logits, *settings, tokens,
            n, vocabulary, logits.stride(0), [t.stride(0) for t in settings], MOST, logits.dtype,
        )  # fmt: skip
    return tokens
