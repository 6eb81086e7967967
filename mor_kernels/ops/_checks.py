"""Argument checks. Each message names the op, the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)


def fail(op: str, argument: str, expected: object, got: object) -> None:
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def tensor(
    op: str,
    argument: str,
    value: object,
    shape: tuple,
    dtypes: Iterable[torch.dtype] = FLOATS,
    like: torch.Tensor | None = None,
) -> None:
    """``value`` is a tensor of ``shape`` (a letter stands for any size, a number for itself), of one of ``dtypes``, on
    the device of ``like``."""
    if not isinstance(value, torch.Tensor):
        fail(op, argument, "a tensor", type(value).__name__)
    if value.dim() != len(shape) or any(not isinstance(n, str) and n != m for n, m in zip(shape, value.shape)):
        fail(op, argument, f"shape ({', '.join(map(str, shape))})", f"({', '.join(map(str, value.shape))})")
    if value.dtype not in dtypes:
        fail(op, argument, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in dtypes), value.dtype)
    if like is not None and value.device != like.device:
        fail(op, argument, f"device {like.device}", value.device)


def indices(op: str, argument: str, values: torch.Tensor | None, limit: int) -> None:
    """``values`` are below ``limit``. On the CPU only, where looking waits for nothing; a kernel doesn't look."""
    if values is not None and values.device.type == "cpu" and values.numel() and int(values.max()) >= limit:
        fail(op, argument, f"values of at most {limit - 1}", int(values.max()))


def choice(op: str, argument: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        fail(op, argument, " or ".join(map(repr, allowed)), repr(value))
