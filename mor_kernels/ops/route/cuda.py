"""Routing by the kernels of ``csrc/route.cu`` and ``csrc/route_backward.cu``."""

from __future__ import annotations

import torch

from ... import _C
from .._cuda import ACTIVATIONS, inverse_of, launch
from .._layout import contiguous

IN_FLIGHT = 36 * 2**20  # bytes of rows scored and copied before a sequence's own are copied: what L2 holds


def route(x, weight, logits, candidates, seqlens, indices, k, activation, alpha, temperature, rank):
    batch, length, width = x.shape
    scored = length if candidates is None else candidates.shape[1]
    recorded, ready, weight, candidates, seqlens = contiguous(indices, logits, weight, candidates, seqlens)
    if weight is not None and weight.dtype != x.dtype:
        weight = weight.float()
    rows = x.new_empty(batch, k, width)
    indices = torch.empty(batch, k, dtype=torch.int64, device=x.device)
    gates = torch.empty(batch, k, dtype=torch.float32, device=x.device)
    words = torch.empty(batch * (scored + k), dtype=torch.float32, device=x.device)
    counts = (torch.empty if words.numel() else torch.zeros)(batch, dtype=torch.int32, device=x.device)
    if words.numel():
        launch(
            _C.route, x, weight, ready, candidates, seqlens, recorded, rows, indices, gates, words, counts,
            batch, length, scored, k, width, *x.stride(), int(seqlens is not None and seqlens.dtype == torch.int32),
            ACTIVATIONS[activation], alpha, temperature, torch.finfo(x.dtype).max if rank == "score" else 0.0,
            IN_FLIGHT, x.dtype, x.dtype if weight is None else weight.dtype,
        )  # fmt: skip
    return rows, indices, gates, words[: batch * scored].view(batch, scored), counts


def route_backward(
    d_rows, d_gates, d_logits, x, weight, logits, candidates, seqlens, indices, activation, alpha, temperature
):
    (batch, length, width), k, scored = x.shape, indices.shape[1], logits.shape[1]
    d_rows, d_gates, d_logits, logits, indices = contiguous(d_rows, d_gates, d_logits, logits, indices)
    weight, candidates, seqlens = contiguous(weight, candidates, seqlens)
    d_x = torch.empty(batch, length, width, dtype=x.dtype, device=x.device)
    blocks = _C.route_backward_blocks(batch * length)
    d_weight = partial = d_ready = None
    if weight is None:
        # what is no candidate is not visited
        d_ready = torch.empty_like(d_logits) if candidates is None else torch.zeros_like(d_logits)
    else:
        d_weight = torch.empty_like(weight)
        partial = torch.empty(blocks, width, dtype=torch.float32, device=x.device)
    of_candidates = None if candidates is None else inverse_of(candidates, length)
    launch(
        _C.route_backward, d_rows, d_gates, d_logits, x, weight, logits, candidates, of_candidates, seqlens, indices,
        inverse_of(indices, length), d_x, d_weight, d_ready, partial, blocks, batch, length, scored, k, width,
        *x.stride(), int(seqlens is not None and seqlens.dtype == torch.int32), ACTIVATIONS[activation], alpha,
        temperature, x.dtype, x.dtype if weight is None else weight.dtype,
    )  # fmt: skip
    if weight is None:
        return d_x, x.new_empty(0), d_ready
    return d_x, d_weight, d_logits.new_empty(0)
