"""Argument checks. Each message names the op, the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, TypeVar

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
Given = TypeVar("Given", torch.Tensor, torch.Tensor | None)


def fail(op: str, argument: str, expected: object, got: object) -> NoReturn:
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def tensor(
    op: str,
    argument: str,
    value: object,
    shape: tuple,
    dtypes: Iterable[torch.dtype] = FLOATS,
    like: torch.Tensor | None = None,
) -> None:
    """``value`` is a tensor of ``shape`` (a number stands for itself, a name for any size, "..." at either end for any
    number of them), of one of ``dtypes``, on the device of ``like``."""
    if not isinstance(value, torch.Tensor):
        fail(op, argument, "a tensor", type(value).__name__)
    named = tuple(n for n in shape if n != "...")
    sizes = tuple(value.shape)
    if len(named) < len(shape):
        sizes = sizes[: len(named)] if shape[-1] == "..." else sizes[max(len(sizes) - len(named), 0) :]
    if len(sizes) != len(named) or any(not isinstance(n, str) and n != m for n, m in zip(named, sizes)):
        fail(op, argument, f"shape ({', '.join(map(str, shape))})", f"({', '.join(map(str, value.shape))})")
    if value.dtype not in dtypes:
        fail(op, argument, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in dtypes), value.dtype)
    if like is not None and value.device != like.device:
        fail(op, argument, f"device {like.device}", value.device)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast, where it is on, computes products with ``x`` in."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def one_dtype(op: str, **tensors: Given) -> list[Given]:
    """The tensors, by the names of their arguments, as autocast wants them, or else all of the first one's dtype."""
    (name, first), *_ = tensors.items()
    assert first is not None  # an argument that is required
    if dtype := autocast_dtype(first):
        return [None if t is None else t.to(dtype) for t in tensors.values()]
    for argument, t in tensors.items():
        if t is not None and t.dtype != first.dtype:
            fail(op, argument, f"the dtype of {name}, {first.dtype}", t.dtype)
    return list(tensors.values())


def whole(op: str, argument: str, value: object, least: int = 0) -> None:
    """``value`` is a whole number (symbolic ones count) of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < least:
        fail(op, argument, f"a whole number of at least {least}", value)


# On the CPU the values of index tensors are looked at as well, since that waits for nothing there. On another device a
# negative index means "none", and one too large may or may not be told by PyTorch.


def indices(op: str, argument: str, values: torch.Tensor | None, limit: int) -> None:
    """``values`` are in -1..limit - 1."""
    if values is not None and values.device.type == "cpu" and values.numel():
        low, high = (int(bound) for bound in values.aminmax())
        if low < -1 or high >= limit:
            fail(op, argument, f"values of at least -1 and at most {limit - 1}", low if low < -1 else high)


def offsets(op: str, argument: str, cu_seqlens: torch.Tensor, total: int) -> None:
    """``cu_seqlens`` begins with 0, ascends, and ends at no more than ``total``."""
    if cu_seqlens.device.type == "cpu":
        values = cu_seqlens.tolist()
        if values[0] != 0 or values != sorted(values) or values[-1] > total:
            fail(op, argument, f"0 first, then ascending to at most {total}", values if len(values) < 9 else "others")


def choice(op: str, argument: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        fail(op, argument, " or ".join(map(repr, allowed)), repr(value))
