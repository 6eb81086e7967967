from __future__ import annotations

import torch

from .. import _checks
from .._numeric import activate, bounded, wide


def check(x, update, logits, recursions, weight, last, replayed, aux_weight, activation, alpha, temperature, residual):
    op = "depth_step_"
    _checks.indices(op, "recursions", recursions, weight.shape[0])
    read = {"update": update, "recursions": recursions, "weight": weight, "last": last, "replayed": replayed}
    _checks.apart(op, {"x": x, "logits": logits}, **read, aux_weight=aux_weight)


def depth_step(
    x, update, logits, recursions, weight, last, replayed, aux_weight, activation, alpha, temperature, residual
):
    routers = weight.shape[0]
    there = (recursions >= 0) & (recursions < routers)
    dtype = wide(torch.promote_types(x.dtype, update.dtype))
    gates = torch.where(logits.isnan(), 0, bounded(alpha * activate(bounded(logits), activation)))
    f, old, g = update.to(dtype), x.to(dtype), gates.to(dtype)[:, None]
    new = {"block": lambda: old + g * f, "delta": lambda: old + g * (f - old), "none": lambda: g * f}[residual]()
    x.copy_(torch.where(there[:, None], new.to(x.dtype), x))

    following = recursions + 1
    scored = there & (following < routers)
    state, column = x.to(logits.dtype), torch.where(scored, following, 0)[:, None]

    def score(weight):
        every = torch.nn.functional.linear(state, weight.to(state.dtype))
        return every.gather(1, column)[:, 0] / logits.new_full((), temperature)  # not times its reciprocal

    own = score(weight)
    logits.copy_(torch.where(scored, own, logits))
    goes_on = own > 0 if aux_weight is None else (score(aux_weight) > 0) & ~own.isnan()
    if replayed is not None:
        goes_on = goes_on | replayed
    return goes_on & scored & (following < (routers if last is None else last))
