"""How kernels want their arguments to lie, whatever they are written in."""

from __future__ import annotations

import torch


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
