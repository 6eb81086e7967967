"""What the launchers of the CUDA kernels (``csrc/``) share; they take addresses and a stream, see ``csrc/launch.h``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import _C

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
ACTIVATIONS = {"none": 0, "sigmoid": 1, "tanh": 2}
RESIDUALS = {"block": 0, "delta": 1, "none": 2}


def launch(function: Callable[..., None], *arguments: object) -> None:
    """Call a launcher with the addresses of tensors (0 for None), dtypes by their code, and other arguments as they
    are; on the current stream."""
    stream = 0 if hasattr(_C, "emulated") else torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    function(*map(_plain, arguments), stream)


def _plain(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, torch.dtype):
        return DTYPES[argument]
    return 0 if argument is None else argument


def index_code(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Integers of any kind as int64 (code 0) or int32 (code 1), which the kernels read."""
    if values.dtype not in (torch.int64, torch.int32):
        values = values.long()
    return values, int(values.dtype == torch.int32)


def inverse_of(indices: torch.Tensor, length: int) -> torch.Tensor:
    """(B, length) int32: where each position stands among its row of the contiguous indices (B, k). What no index names
    is left unwritten: only a j for which ``indices[b, j]`` is the position asked for is one."""
    batch, k = indices.shape
    inverse = torch.empty(batch, length, dtype=torch.int32, device=indices.device)
    launch(_C.invert, indices, inverse, batch, k, length)
    return inverse
