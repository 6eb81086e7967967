from __future__ import annotations

import torch

from .._numeric import wide


def _halves(gate_up):
    # contiguous, since PyTorch's sigmoid on the CPU rounds by strides
    gate, up = gate_up.to(wide(gate_up.dtype)).contiguous().chunk(2, -1)
    return gate, up, gate.sigmoid()


def swiglu(gate_up):
    gate, up, sigma = _halves(gate_up)
    return (gate * sigma * up).to(gate_up.dtype)


def swiglu_backward_(d_h, gate_up):
    """The gradient of gate_up; d_h becomes h."""
    gate, up, sigma = _halves(gate_up)
    d, silu = d_h.to(gate.dtype), gate * sigma
    d_gate_up = torch.cat((d * up * sigma * (1 + gate * (1 - sigma)), d * silu), -1).to(gate_up.dtype)
    d_h.copy_(silu * up)
    return d_gate_up
