"""Learning rates as plain functions of the optimizer step."""

from __future__ import annotations

import math


def trapezoid(step: int, steps: int, peak: float, *, warmup: float = 0.05, cooldown: float = 0.2) -> float:
    """Rate of optimizer step `step` (from 0) of `steps`: linear warm-up, plateau at `peak`, linear cool-down.

    `warmup` and `cooldown` are shares of `steps` (paper, appendix "Expanded Results of IsoFLOP Analysis"; it takes the
    warm-up as a share of its smallest budget's steps). The paper's equation has a rate of exactly 0 at step 0; here the
    warm-up is shifted by one step, so that no step is wasted and the last warm-up step reaches the peak. A checkpoint
    from the plateau can be resumed with another `steps`, as the paper does for its compute budgets.
    """
    up, down = round(warmup * steps), round(cooldown * steps)
    return peak * min(1.0, (step + 1) / max(up, 1), max(steps - step, 0) / max(down, 1))


def cosine(step: int, steps: int, peak: float, *, warmup: float = 0.05) -> float:
    """Rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then half a cosine from `peak` towards 0.

    `warmup` is a share of `steps`.
    """
    up = round(warmup * steps)
    if step < up:
        return peak * (step + 1) / up
    return peak * 0.5 * (1 + math.cos(math.pi * min((step - up) / max(steps - up, 1), 1.0)))
