"""The linear layers of a decoding step: few rows, and with each what goes before and after it."""

from __future__ import annotations

from typing import overload

import torch

from .. import _checks
from .._dispatch import deferred, define, named_backend, resolve, unavailable
from .._measured import few_rows
from .._numeric import wide
from ..kv import check_caches
from . import eager


def _refuses(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    squares: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    next_norm_weight: torch.Tensor | None,
    gated: bool,
    prefetch: bool,
) -> str | None:
    norms = norm_weight is not None or squares is not None or next_norm_weight is not None
    return _unread(x, weight, norm_weight, norms) or (
        "it reads rows of a residual whose elements lie side by side"
        if residual is not None and residual.shape[1] > 1 and residual.stride(1) != 1
        else None
    )


def _refuses_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    positions: torch.Tensor,
    theta: float,
    norm_weight: torch.Tensor | None,
    squares: torch.Tensor | None,
    eps: float,
    prefetch: bool,
) -> str | None:
    if k_cache.shape[3] not in (64, 128):
        return f"its heads are of width 64 or 128, not {k_cache.shape[3]}"
    if k_cache.dtype != x.dtype:
        return f"it writes caches of the dtype of x, {x.dtype}, not {k_cache.dtype}"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(3) != 1 or any(stride % 4 for stride in cache.stride()[:3]) or cache.data_ptr() % 8:
            return f"it writes 8 bytes at once, which the strides or address of {name} don't allow"
    return _unread(x, weight, norm_weight, True)


def _unread(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None, norms: bool) -> str | None:
    """Why the kernel can't read these; None if it can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"its tensor cores multiply bfloat16 and float16, not {x.dtype}"
    if x.dtype == torch.float16 and norms:
        return "it multiplies by the norm's gains before it divides by the norm, which float16 has no room for"
    read = [("x", x), ("weight", weight), *([] if norm_weight is None else [("norm_weight", norm_weight)])]
    for name, t in read:
        lead = t.stride(0) if t.dim() > 1 and t.shape[0] > 1 else 0
        if t.shape[-1] % 8 or lead % 8 or t.stride(-1) != 1 or t.data_ptr() % 16:
            return f"it reads 16 bytes at once, which the shape, strides or address of {name} don't allow"
    return None


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    squares: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    next_norm_weight: torch.Tensor | None,
    gated: bool,
    prefetch: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
    none = next_norm_weight is None
    partial = (0,) if none else (y.shape[0], -(-y.shape[1] // eager.OF_SQUARES))
    return y, x.new_empty((0,) if none else y.shape), x.new_empty(partial, dtype=wide(x.dtype))


_linear = define(
    "decode_linear(Tensor x, Tensor weight, Tensor? norm_weight, Tensor? squares, float eps, Tensor? residual, "
    "Tensor? next_norm_weight, bool gated, bool prefetch, str backend) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    eager=eager.decode_linear,
    triton=deferred(f"{__name__}.triton", "decode_linear"),
    cuda=deferred(f"{__name__}.cuda", "decode_linear", refuses=_refuses),
)

_qkv = define(
    "decode_qkv_(Tensor x, Tensor weight, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, int heads, "
    "Tensor positions, float theta, Tensor? norm_weight, Tensor? squares, float eps, bool prefetch, str backend) "
    "-> Tensor",
    fake=lambda x, weight, k_cache, v_cache, slots, heads, *_: x.new_empty(x.shape[0], heads, k_cache.shape[3]),
    check=eager.check_qkv,
    eager=eager.decode_qkv,
    triton=deferred(f"{__name__}.triton", "decode_qkv"),
    cuda=deferred(f"{__name__}.cuda", "decode_qkv", refuses=_refuses_heads),
)


@overload
def decode_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    next_norm_weight: None = None,
    gated: bool = False,
    prefetch: bool = False,
    backend: str | None = None,
) -> torch.Tensor: ...
@overload
def decode_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    next_norm_weight: torch.Tensor,
    gated: bool = False,
    prefetch: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
def decode_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    next_norm_weight: torch.Tensor | None = None,
    gated: bool = False,
    prefetch: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``h @ weight.T`` with h = x or ``rms_norm(x) * norm_weight``, gated or not, plus residual: one launch where a
    Llama layer while decoding takes two or three; for serving, so no gradient.

    Args:
        x: (n, K), few rows: 128 is many. Any number is right. bf16, fp16, fp32 or fp64.
        weight: (O, K); with ``gated`` (2O, K), gates and then values, of which y is silu(gates) * values.
        norm_weight: (K,), the norm's gains; None for no norm.
        squares: (n, P) fp32 (fp64 for fp64), in place of norm_weight: x is rows times the norm's gains, and the P
            numbers of a row add up to the sum of its squares before, as a call with next_norm_weight returns both. A
            norm so costs nothing.
        eps: added to the mean of squares.
        residual: (n, O), added to y in fp32.
        next_norm_weight: (O,), the gains of the norm that follows; not with gated. The rows times them have to fit into
            the dtype, which is why the fused kernel has no norms in fp16.
        gated: see ``weight``.
        prefetch: no kernel in flight on the stream writes weight or norm_weight, so that they may be read before the
            kernel that was launched last is over. That may write next_norm_weight.
        backend: see :func:`route`.

    All are of one dtype, which autocast leaves as it is; any strides, but only rows of elements side by side get the
    fused kernel.

    Returns:
        y, (n, O), dtype of x; with next_norm_weight (y, y * next_norm_weight, squares of y), each of which is of y as
        it was rounded, and the squares (n, ceil(O / 32)), sums of 32 columns each. Sums are in fp32 (fp64 for fp64).
        The fused kernel rounds x * norm_weight, and then nothing but the result; a row's result depends on no other
        row, nor, up to 128 of them, on how many there are. "triton" rounds between its kernels.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "decode_linear"
    _checks.tensor(op, "x", x, ("n", "K"))
    n, width = x.shape
    if not width:
        _checks.fail(op, "x", "at least one column", 0)
    _checks.tensor(op, "weight", weight, ("2O" if gated else "O", width), like=x)
    if gated and weight.shape[0] % 2:
        _checks.fail(op, "weight", "an even number of rows, gates and values", weight.shape[0])
    if norm_weight is not None:
        _checks.tensor(op, "norm_weight", norm_weight, (width,), like=x)
    _check_squares(op, squares, norm_weight, x)
    columns = weight.shape[0] // (2 if gated else 1)
    if residual is not None:
        _checks.tensor(op, "residual", residual, (n, columns), like=x)
    if next_norm_weight is not None:
        if gated:
            _checks.fail(op, "next_norm_weight", "None beside gated", "a tensor")
        _checks.tensor(op, "next_norm_weight", next_norm_weight, (columns,), like=x)
    tensors = {"x": x, "weight": weight, "norm_weight": norm_weight, "residual": residual,
               "next_norm_weight": next_norm_weight}  # fmt: skip
    _check_floats(op, tensors, squares)
    named = resolve(op, backend, *tensors.values())
    outputs = _linear(
        x,
        weight,
        norm_weight,
        squares,
        _checks.number(op, "eps", eps),
        residual,
        next_norm_weight,
        bool(gated),
        bool(prefetch),
        named,
    )
    return outputs[0] if next_norm_weight is None else outputs


def decode_qkv_(
    x: torch.Tensor,
    weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads: int,
    positions: torch.Tensor,
    theta: float = 10000.0,
    norm_weight: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 1e-5,
    prefetch: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """What a Llama layer does before attention while decoding, in one launch: :func:`decode_linear` with a norm, whose
    columns are queries, keys and values, and :func:`kv_append_` of them, with queries and keys turned.

    Args:
        x: (n, K), as in :func:`decode_linear`.
        weight: ((H + 2G) d, K): of the heads of queries, then of keys, then of values.
        k_cache: as in :func:`kv_append_`; a float8 cache has scales of 1.
        v_cache: likewise.
        slots: (n,) int64, as there.
        heads: H.
        positions: (n,) integers, as there.
        theta: as there.
        norm_weight: (K,), or None beside ``squares``; as in :func:`decode_linear`.
        squares: (n, P), as there.
        eps: as there.
        prefetch: as there.
        backend: see :func:`route`.

    Returns:
        (n, H, d), the turned queries, dtype of x. The fused kernel, for bf16, heads of width 64 or 128 and caches of
        x's dtype, rounds nothing between the product and what it writes.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "decode_qkv_"
    check_caches(op, k_cache, v_cache)
    _checks.written(op, k_cache=k_cache, v_cache=v_cache)
    _checks.tensor(op, "x", x, ("n", "K"), like=k_cache)
    n, width = x.shape
    if not width:
        _checks.fail(op, "x", "at least one column", 0)
    _checks.whole(op, "heads", heads, 1)
    groups, of_head = k_cache.shape[2:]
    _checks.tensor(op, "weight", weight, ((heads + 2 * groups) * of_head, width), like=x)
    if norm_weight is not None or squares is None:
        _checks.tensor(op, "norm_weight", norm_weight, (width,), like=x)
    _check_squares(op, squares, norm_weight, x)
    _checks.tensor(op, "slots", slots, (n,), (torch.int64,), x)
    _checks.tensor(op, "positions", positions, (n,), _checks.INTEGERS, x)
    if of_head % 2:
        _checks.fail(op, "k_cache", "heads of an even width, to turn by positions", of_head)
    theta = _checks.number(op, "theta", theta, positive=True)
    _check_floats(op, {"x": x, "weight": weight, "norm_weight": norm_weight}, k_cache, v_cache, squares)
    named = resolve(op, backend, x, weight, k_cache)
    return _qkv(
        x, weight, k_cache, v_cache, slots, heads, positions, theta, norm_weight, squares,
        _checks.number(op, "eps", eps), bool(prefetch), named,
    )  # fmt: skip


def is_fused(x: torch.Tensor) -> bool:
    """Whether rows like x (n, K) get the fused kernel where no backend is named. Other kernels are faster as a training
    step has them, where a sum is left to the norm that reads it."""
    named = named_backend()
    chosen = named == "cuda" or (named == "auto" and x.is_cuda and few_rows(x))
    return chosen and x.dtype == torch.bfloat16 and unavailable("cuda", "decode_linear", x.device) is None


def _check_squares(op: str, squares: torch.Tensor | None, norm_weight: torch.Tensor | None, x: torch.Tensor) -> None:
    if squares is None:
        return
    if norm_weight is not None:
        _checks.fail(op, "squares", "None beside norm_weight", "a tensor")
    _checks.tensor(op, "squares", squares, (x.shape[0], "P"), (wide(x.dtype),), x)
    if not squares.shape[1]:
        _checks.fail(op, "squares", "at least one column", 0)


def _check_floats(op: str, tensors: dict[str, torch.Tensor | None], *others: torch.Tensor | None) -> None:
    """The tensors are of one dtype; neither they nor the others need a gradient."""
    (name, first), *rest = tensors.items()
    assert first is not None
    for argument, t in rest:
        if t is not None and t.dtype != first.dtype:
            _checks.fail(op, argument, f"the dtype of {name}, {first.dtype}", t.dtype)
    _checks.no_gradient(op, *tensors.values(), *others)
