"""The end of a recursion in one launch: a program a token.

The gate depends on the score that the last call left, not on the row, so that a row is read, combined, written and
scored piece by piece, and the weights are those of its own recursion's successor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._layout import contiguous
from .._triton import FLOAT_MAX, bounded, combine, gate

ELEMENTS = 4096  # of a row that a program holds at once


@triton.jit
def _step(
    x, update, logits, recursions, weight, last, replayed, aux_weight, goes_on, routers, alpha, temperature,
    x_n, x_d, f_n, f_d, logits_n,
    D: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    recursion = tl.load(recursions + i)
    logit = tl.load(logits + i * logits_n)
    there = (recursion >= 0) & (recursion < routers)
    following = recursion + 1
    scored = there & (following < routers)
    g = gate(bounded(logit, FLOAT_MAX), alpha, ACTIVATION)
    own = tl.zeros((WIDTH,), tl.float32)
    aux = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, D, WIDTH):
        d = (start + tl.arange(0, WIDTH)).to(tl.int64)
        inside = d < D
        # a lane of padding has a row as well: no load of the two waits for the recursion
        row = 0.0 if RESIDUAL == "none" else tl.load(x + i * x_n + d * x_d, mask=inside, other=0.0)
        f = tl.load(update + i * f_n + d * f_d, mask=inside, other=0.0)
        new = combine(row, f, g, RESIDUAL).to(x.dtype.element_ty)
        tl.store(x + i * x_n + d * x_d, new, mask=inside & there)
        new = new.to(tl.float32)
        own += new * tl.load(weight + following * D + d, mask=inside & scored, other=0.0).to(tl.float32)
        if aux_weight is not None:
            aux += new * tl.load(aux_weight + following * D + d, mask=inside & scored, other=0.0).to(tl.float32)
    score = tl.div_rn(tl.sum(own, 0), temperature)
    tl.store(logits + i * logits_n, score, mask=scored)
    on = score > 0
    if aux_weight is not None:
        on = (tl.div_rn(tl.sum(aux, 0), temperature) > 0) & (score == score)
    if replayed is not None:
        on = on | tl.load(replayed + i).to(tl.int1)
    on = on & scored
    if last is not None:
        on = on & (following < tl.load(last + i))
    tl.store(goes_on + i, on)


def depth_step(
    x, update, logits, recursions, weight, last, replayed, aux_weight, activation, alpha, temperature, residual
):
    n, width = x.shape
    goes_on = torch.empty(n, dtype=torch.bool, device=x.device)
    if n:
        columns = min(triton.next_power_of_2(max(width, 32)), ELEMENTS)
        # so few that no two warps hold the same element, which one might write before the other has read it
        num_warps = min(max(columns // 256, 1), 8)
        recursions, weight, last, replayed, aux_weight = contiguous(recursions, weight, last, replayed, aux_weight)
        _step[(n,)](
            x, update, logits, recursions, weight, last, replayed, aux_weight, goes_on,
            weight.shape[0], alpha, temperature, *x.stride(), *update.stride(), *logits.stride(),
            D=width, ACTIVATION=activation, RESIDUAL=residual, WIDTH=columns, num_warps=num_warps,
        )  # fmt: skip
    return goes_on
