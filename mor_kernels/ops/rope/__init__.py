"""Rotary position embedding at absolute positions (Su et al., 2021, "RoFormer", section 3.2)."""

from __future__ import annotations

from typing import Any, overload

import torch

from .. import _checks
from .._dispatch import apply, deferred, define, first_order, resolve
from . import eager
from ._layout import join_by, split, split_by

_cuda = deferred(f"{__name__}.cuda", "rope")
INTEGERS = (*_checks.INTEGERS, torch.int16, torch.int8, torch.uint8)

_rope = define(
    "rope(Tensor q, Tensor? k, Tensor positions, float theta, bool inverse, str backend) -> (Tensor, Tensor)",
    fake=lambda q, k, *_: (q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)),
    eager=eager.rope,
    triton=deferred(f"{__name__}.triton", "rope"),
    cuda=_cuda,
)
_split = define(
    "rope_split(Tensor qkv, int heads, Tensor positions, float theta, str backend) -> (Tensor, Tensor, Tensor)",
    fake=lambda qkv, heads, *_: tuple(part.new_empty(part.shape) for part in split(qkv, heads)),
    eager=split_by(eager.rope),
    triton=deferred(f"{__name__}.triton", "rope_split"),
    cuda=split_by(_cuda),
)
_join = define(
    "rope_join(Tensor q, Tensor k, Tensor v, Tensor positions, float theta, str backend) -> Tensor",
    fake=lambda q, k, *_: q.new_empty(*q.shape[:-2], q.shape[-2] + 2 * k.shape[-2], q.shape[-1]),
    eager=join_by(eager.rope),
    triton=deferred(f"{__name__}.triton", "rope_join"),
    cuda=join_by(_cuda),
)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor, theta: float, backend: str
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(positions)
        ctx.scalars = (theta, backend)
        out_q, out_k = _rope(q, k, positions, theta, False, backend)
        return out_q if k is None else (out_q, out_k)

    @staticmethod
    @first_order("rope")
    def backward(
        ctx: Any, d_q: torch.Tensor, d_k: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:  # a rotation's transpose turns back
        (positions,) = ctx.saved_tensors
        theta, backend = ctx.scalars
        out_q, out_k = _rope(d_q, d_k, positions, theta, True, backend)
        return out_q, None if d_k is None else out_k, None, None, None


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, heads: int, positions: torch.Tensor, theta: float, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(positions)
        ctx.scalars = (theta, backend)
        return _split(qkv, heads, positions, theta, backend)

    @staticmethod
    @first_order("rope_qkv")
    def backward(
        ctx: Any, d_q: torch.Tensor, d_k: torch.Tensor, d_v: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        (positions,) = ctx.saved_tensors
        theta, backend = ctx.scalars
        return _join(d_q, d_k, d_v, positions, theta, backend), None, None, None, None


@overload
def rope(
    x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0, *, backend: str | None = None
) -> torch.Tensor: ...
@overload
def rope(
    x: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, theta: float = 10000.0, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rope(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    theta: float = 10000.0,
    *,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries or keys, or both at once, by their positions (NeoX half-split pairs).

    Dimensions i and i + d/2 of a head are a pair, which turns by the angle ``position * theta ** (-2i / d)``.

    Args:
        x: (..., H, d), d even; bf16, fp16, fp32 or fp64; any strides. Or a pair (q, k) of them, of one dtype, that
            differ in the number of heads alone; views of a fused projection are welcome.
        positions: (...) integers, absolute positions (at every recursion, not a row's length or index).
        theta: base of the frequencies.
        backend: see :func:`route`.

    Returns:
        Like x, a pair for a pair; gradients reach x. Products are in fp32 (fp64 for fp64 x), rounded once; angles lose
        nothing at far positions (but on Apple's GPUs, which have no fp64).

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "rope"
    name, k = "x", None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            _checks.fail(op, "x", "a tensor or a pair of them", f"{len(x)} of them")
        name, (q, k) = "q", x
    else:
        q = x
    _checks.tensor(op, name, q, ("...", "H", "d"))
    lead, width = tuple(q.shape[:-2]), q.shape[-1]
    if width % 2:
        _checks.fail(op, name, "an even last dimension", width)
    if name == "q":
        _checks.tensor(op, "k", k, (*lead, "G", width), like=q)
        assert k is not None
        if k.dtype != q.dtype:
            _checks.fail(op, "k", f"the dtype of q, {q.dtype}", k.dtype)
    _checks.tensor(op, "positions", positions, lead, INTEGERS, q)
    theta = _checks.number(op, "theta", theta, positive=True)
    return apply(_Rope, q, k, positions, theta, resolve(op, backend, q))


def rope_qkv(
    qkv: torch.Tensor, heads: int, positions: torch.Tensor, theta: float = 10000.0, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take a fused projection apart, and rotate its queries and keys as :func:`rope` does.

    One kernel each way: nothing but queries, keys and values is kept for the backward pass of attention, and their
    gradients come back as one tensor, for one matrix product.

    Args:
        qkv: (..., H + 2G, d), d even: heads of queries, then of keys, then of values; dtypes and strides as in rope.
        heads: H, at least 1.
        positions: see :func:`rope`.
        theta: see :func:`rope`.
        backend: see :func:`route`.

    Returns:
        q, k and v, (..., H, d), (..., G, d) and (..., G, d), contiguous; v is a copy. Gradients reach qkv.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "rope_qkv"
    _checks.tensor(op, "qkv", qkv, ("...", "H+2G", "d"))
    _checks.whole(op, "heads", heads, 1)
    if qkv.shape[-2] < heads or (qkv.shape[-2] - heads) % 2:
        _checks.fail(op, "qkv", f"{heads} heads of queries, and as many of keys as of values", qkv.shape[-2])
    if qkv.shape[-1] % 2:
        _checks.fail(op, "qkv", "an even last dimension", qkv.shape[-1])
    _checks.tensor(op, "positions", positions, tuple(qkv.shape[:-2]), INTEGERS, qkv)
    theta = _checks.number(op, "theta", theta, positive=True)
    return apply(_RopeQKV, qkv, heads, positions, theta, resolve(op, backend, qkv, registered="rope_split"))
