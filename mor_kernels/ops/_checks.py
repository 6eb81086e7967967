"""Argument checks. Each message names the op, the argument, what was expected and what came."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import torch

from ._indices import candidate_positions, find

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
    # Dynamo, which knows dense tensors alone, doesn't trace these questions in a backward pass
    if not torch.compiler.is_compiling() and (value.layout != torch.strided or value.is_nested):
        fail(op, argument, "a dense tensor", "a nested one" if value.is_nested else value.layout)
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
        fail(op, argument, f"a whole number of at least {least}", repr(value))


def number(op: str, argument: str, value: Any, positive: bool = False) -> float:
    """``value`` (symbolic ones count) as a float; ``positive``: finite, and above 0 in fp32."""
    fits = isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    if not fits or positive and not torch.finfo(torch.float32).tiny <= value < math.inf:
        fail(op, argument, "a finite number > 0 in fp32" if positive else "a number", repr(value))
    return float(value)


def no_gradient(op: str, *tensors: torch.Tensor | None, instead: str = "serving has none") -> None:
    """None of the tensors needs a gradient, which ``op`` doesn't have."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(f"{op}: expected no argument that needs a gradient ({instead}), got one")


def choice(op: str, argument: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        fail(op, argument, " or ".join(map(repr, allowed)), repr(value))


def state(op: str, argument: str, value: object, kind: type) -> None:
    """``value`` is a named tuple of this kind, whose tensors errors call ``argument.field``."""
    if not isinstance(value, kind):
        fail(op, argument, kind.__name__, type(value).__name__)


def written(op: str, **tensors: torch.Tensor) -> None:
    """The tensors, which are written in place, are not expanded."""
    for argument, t in tensors.items():
        if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride())):
            found = f"an expanded tensor, strides {t.stride()}"
            fail(op, argument, "elements with a place in memory each", found)


# What follows looks at values and addresses, and is for the function ``check=`` of an op, see ``_dispatch.define``.

DEBUG = os.environ.get("MOR_DEBUG", "0") not in ("", "0")


def looked_at(backend: str, device: torch.device) -> bool:
    """Whether values are: by eager on the CPU, where that waits for nothing; in debug mode by all backends on every
    device, but not while a CUDA graph is captured."""
    if not DEBUG:
        return backend == "eager" and device.type == "cpu"
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def indices(op: str, argument: str, values: torch.Tensor | None, limit: int, least: int = -1) -> None:
    """``values`` are in ``least``..limit - 1."""
    if values is not None and values.numel():
        low, high = (int(bound) for bound in values.aminmax())
        if low < least or high >= limit:
            fail(op, argument, f"values of at least {least} and at most {limit - 1}", low if low < least else high)


def distinct(op: str, argument: str, values: torch.Tensor, what: str = "index") -> None:
    """No number from 0 on comes twice in a row (..., n) of ``values``."""
    ordered = values.sort(-1).values
    twice = ordered[..., 1:][(ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)]
    if len(twice):
        found = values.tolist() if values.numel() < 9 else f"{int(twice[0])} more than once"
        fail(op, argument, f"each {what} at most once", found)


def ascending(op: str, argument: str, positions: torch.Tensor) -> None:
    """Rows (B, n) of positions ascend, and end with -1 as often as need be."""
    end = torch.iinfo(positions.dtype).max
    ends = torch.where(positions >= 0, positions, end)
    if not ((ends.diff(dim=1) > 0) | (ends[:, 1:] == end)).all():
        fail(op, argument, "ascending positions, then -1", "others")


def candidates(op: str, positions: torch.Tensor | None, length: int) -> None:
    """Positions (B, C) of a sequence of ``length``, ascending."""
    if positions is not None:
        indices(op, "candidates", positions, length)
        ascending(op, "candidates", positions)


def kept(
    op: str,
    argument: str,
    positions: torch.Tensor,
    scored: int,
    candidates: torch.Tensor | None,
    seqlens: torch.Tensor | None,
) -> None:
    """Positions (B, k) are some of the candidates, ascending."""
    index, valid = candidate_positions(len(positions), scored, candidates, seqlens, positions.device)
    if not ((find(positions, candidates, index, valid) < scored) | (positions == -1)).all():
        fail(op, argument, "candidates of their own sequence, or -1", "others")
    ascending(op, argument, positions)


def offsets(op: str, argument: str, cu_seqlens: torch.Tensor, total: int) -> None:
    """``cu_seqlens`` begins with 0, ascends, and ends at no more than ``total``."""
    values = cu_seqlens.tolist()
    if values[0] != 0 or values != sorted(values) or values[-1] > total:
        fail(op, argument, f"0 first, then ascending to at most {total}", values if len(values) < 9 else "others")


def pages(op: str, page_table: torch.Tensor, lens: torch.Tensor, num_pages: int, page_size: int) -> None:
    """Rows (R, max_pages) have the pages that so many tokens (R,) need."""
    used = torch.arange(page_table.shape[1], device=lens.device) * page_size < lens[:, None]
    wrong = page_table[used & ((page_table < 0) | (page_table >= num_pages))]
    if len(wrong):
        fail(op, "page_table", f"pages in 0..{num_pages - 1} for the tokens there are", int(wrong[0]))


def accounts(
    op: str,
    argument: str,
    lengths: torch.Tensor,
    owned: torch.Tensor,
    page_table: torch.Tensor,
    free_pages: torch.Tensor,
    free_count: torch.Tensor,
) -> None:
    """What rows hold and what is free of ``argument``, a ``Pages``, are pages, and no more of them than there are."""
    max_pages, num_pages = page_table.shape[1], free_pages.shape[0]
    indices(op, f"{argument}.owned", owned, max_pages + 1, 0)
    if held := int(owned.sum()):
        holds = torch.arange(max_pages, device=owned.device) < owned[:, None]
        indices(op, f"{argument}.page_table", torch.where(holds, page_table, 0), num_pages, 0)
    indices(op, f"{argument}.free_count", free_count, num_pages + 1 - held, 0)
    indices(op, f"{argument}.free_pages", free_pages[: int(free_count)], num_pages, 0)


def apart(op: str, results: dict[str, torch.Tensor], **inputs: torch.Tensor | None) -> None:
    """``results``, which are written in place, share memory neither with each other nor with ``inputs``; nor do two
    elements of one of them."""
    for argument, t in results.items():
        least = 1
        for stride, size in sorted(zip(t.stride(), t.shape)):
            if size > 1 and stride < least:
                fail(op, argument, "elements with a place in memory each", f"strides {t.stride()}")
            least += (size - 1) * stride
    names = list(results)
    for i, name in enumerate(names):
        for argument, other in [*((n, results[n]) for n in names[i + 1 :]), *inputs.items()]:
            if other is not None and _meet(results[name], other):
                fail(op, argument, f"memory that {name} has no part of", "a tensor that shares some")


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors share memory, unless their addresses tell, or those modulo a stride as of views side by side."""
    if 0 in (a.numel(), b.numel()):
        return False
    between = b.data_ptr() - a.data_ptr()
    dims = [[(n, s * t.element_size()) for n, s in zip(t.shape, t.stride()) if n > 1] for t in (a, b)]

    def span(t: int, below: float) -> int:
        return sum((n - 1) * s for n, s in dims[t] if s < below) + (a, b)[t].element_size()

    if between >= span(0, float("inf")) or -between >= span(1, float("inf")):
        return False
    strides = {s for _, s in dims[0] + dims[1] if s}
    for stride in strides:
        if all(s % stride == 0 for s in strides if s >= stride):
            if span(0, stride) <= between % stride <= stride - span(1, stride):
                return False
    return True
