"""One schema an op, backends plug in, and a backend that the caller named is never replaced by another.

An op is declared once with :func:`define`: its ``torch.library`` schema, its fake implementation (shapes and dtypes,
for ``torch.compile`` and ``opcheck``) and one function a backend. The public function of the op checks its arguments,
asks :func:`resolve` which backend serves the call, and hands that name to the registered op as its last argument.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from . import _checks
from ._measured import in_order

BACKENDS = ("eager", "triton", "cuda")
SPECIALISTS = ("hopper", "cudnn", "fa4")  # serve some arguments of some ops: our kernels for Hopper, and libraries
NAMESPACE = "mor_kernels"

try:
    _library = torch.library.Library(NAMESPACE, "DEF")
except RuntimeError as error:
    raise ImportError(
        f"{__name__} was imported in this process before, from another path or until it was removed from sys.modules; "
        "PyTorch registers operators once a process"
    ) from error
_implementations: dict[str, dict[str, Callable]] = {}
_choices: dict[str, Callable] = {}

# Read once: an environment variable read inside a compiled function would be frozen into the graph without notice.
_default_backend = os.environ.get("MOR_BACKEND") or "auto"


def define(
    schema: str,
    *,
    fake: Callable,
    check: Callable = lambda *_: None,
    choose: Callable = lambda *_: (),
    **backends: Callable,
) -> Callable:
    """Declare ``mor_kernels::<schema>`` and return the callable op.

    ``schema`` ends with ``str backend``; ``fake`` and every backend's function take the arguments before it, and so
    do ``choose``, which names the specialists that are faster than Triton for them on this GPU, the fastest first, and
    ``check``, which raises a ``ValueError`` for values that don't fit, where these are looked at.
    """
    name = schema.partition("(")[0]
    _implementations[name] = backends
    _choices[name] = choose

    def run(*args: Any) -> Any:
        *arguments, backend = args
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        device = tensors[0].device
        if backend == "auto":
            backend = _best(name, tensors, arguments)
        elif reason := _refusal(name, backend, tensors) or _unfit(name, backend, arguments):
            raise RuntimeError(f"{name}: backend={backend!r} is not available: {reason}")
        if _checks.looked_at(backend, device):
            check(*arguments)
        with contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(device.type):  # an implementation chooses its own precision
                stack.enter_context(torch.autocast(device.type, enabled=False))
            if device.type == "cuda" and device.index != torch.cuda.current_device():  # where kernels are launched
                stack.enter_context(torch.cuda.device(device))
            results = _contiguous(backends[backend](*arguments))
        if backend != "eager":  # PyTorch doesn't see a kernel's writes
            for tensor in (arguments[i] for i in written):
                if tensor is not None:
                    torch.autograd.graph.increment_version(tensor)
        return results

    def run_fake(*args: Any) -> Any:
        return fake(*args[:-1])

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, NAMESPACE), name)
    written = [i for i, a in enumerate(op.default._schema.arguments) if a.alias_info and a.alias_info.is_write]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run_fake, lib=_library)
    return op


def _contiguous(
    outputs: torch.Tensor | tuple[torch.Tensor, ...] | None,
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """Outputs as the fake implementations promise them: contiguous whatever the inputs' strides."""
    if isinstance(outputs, tuple):
        return tuple(t.contiguous() for t in outputs)
    return None if outputs is None else outputs.contiguous()


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, with a tensor that comes twice (one ``cu_seqlens`` for queries and keys) as two, since Dynamo
    doesn't trace it otherwise."""
    distinct: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and any(argument is other for other in distinct):
            argument = argument.view_as(argument)
        distinct.append(argument)
    return function.apply(*distinct)


class _Read:
    """The context of a backward pass, of which what was saved is read: activation checkpointing allows that once."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Undifferentiable(torch.autograd.Function):
    """Gradients as they are, and what they depend on: a path to that, at whose beginning stands an error."""

    @staticmethod
    def forward(ctx: Any, message: str, number: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.message = message
        return tensors[:number]

    @staticmethod
    def backward(ctx: Any, *_: object) -> NoReturn:
        raise RuntimeError(ctx.message)


def first_order(op: str) -> Callable[[Callable[..., tuple]], Callable[..., tuple]]:
    """Decorate a ``backward`` whose gradients can't be differentiated again: who tries gets an error. What they depend
    on are the incoming gradients and what was saved.

    PyTorch's ``once_differentiable`` tells nobody if no incoming gradient is to be differentiated, or if the inputs are
    named: then second derivatives lack this op's share.
    """
    message = f"{op}: its gradients can't be differentiated: there are no second derivatives"

    def decorate(backward: Callable[..., tuple]) -> Callable[..., tuple]:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            read = _Read(ctx)
            with torch.no_grad():
                found = backward(read, *gradients)
            return _Undifferentiable.apply(message, len(found), *found, *gradients, *read.saved_tensors)

        return run

    return decorate


def deferred(module: str, function: str, refuses: Callable = lambda *_: None) -> Callable:
    """``function`` of ``module``, which is imported at the first call: Triton or the CUDA kernels may be absent.

    ``refuses(*arguments)`` tells why it can't serve these, which are right; None if it can.
    """
    load = functools.cache(lambda: getattr(importlib.import_module(module), function))

    def run(*arguments: Any) -> Any:
        return load()(*arguments)

    run.refuses = refuses  # type: ignore[attr-defined]  # for _unfit
    return run


def unavailable(
    backend: str,
    op: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Why ``backend`` can't serve ``op`` (any op if None) on ``device`` for ``dtype``; None if it can."""
    if backend not in (*BACKENDS, *SPECIALISTS):
        return f"expected one of {', '.join((*BACKENDS, *SPECIALISTS))} or auto, got {backend!r}"
    if not any(backend in table for name, table in _implementations.items() if op in (None, name)):
        return f"this version has no {backend} implementation of {op or 'any op'}"
    if backend == "eager":
        return None
    if dtype == torch.float64:
        return "float64 is computed by the eager backend alone"
    if backend in ("triton", "hopper") and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if backend == "cuda":
        try:
            extension = load_extension()
        except ImportError as error:
            return str(error)
    if torch.device(device or "cuda").type == "cpu":
        if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            return None
        if backend == "cuda" and hasattr(extension, "emulated"):  # by tests/emulator
            return None
        return "the tensors are on the CPU" + (", which needs TRITON_INTERPRET=1" if backend == "triton" else "")
    if not torch.cuda.is_available() or torch.version.hip:
        return "no CUDA device is visible"
    if torch.cuda._is_in_bad_fork():
        return "this process was forked from one that had used CUDA; it must be spawned"
    if backend == "fa4" and not _installed("flash_attn.cute"):
        return "flash-attn-4 is not installed; pip install mor-kernels[fa4]"
    if backend == "cudnn" and not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    capability = torch.cuda.get_device_capability(device)
    if backend == "hopper":
        if capability != (9, 0):
            return f"it needs compute capability 9.0 (H100), not {capability}"
        found = importlib.import_module("triton").__version__
        old = tuple(int(part) for part in found.split(".")[:2]) < (3, 6)
        return f"it needs Triton 3.6 or newer, not {found}" if old else None
    least, name = ((9, 0), "9.0 (H100)") if backend in SPECIALISTS else ((8, 0), "8.0 (A100)")
    if capability < least:
        return f"it needs compute capability {name} or newer, not {capability}"
    return _unsupported(extension, device, capability) if backend == "cuda" else None


@functools.cache
def properties(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the first number of the compute capability; zeros for what stands in for a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major


def load_extension() -> ModuleType:
    """``mor_kernels._C``, the CUDA kernels.

    Raises:
        ImportError: it isn't there or can't be loaded, with the reason.
    """
    if importlib.util.find_spec("mor_kernels._C") is None:
        raise ImportError(
            "mor-kernels was installed without its CUDA kernels; install it with nvcc on PATH, MOR_CUDA=1"
        )
    return importlib.import_module("mor_kernels._C")


def _unsupported(extension: ModuleType, device: torch.device | str | None, capability: tuple[int, int]) -> str | None:
    """Why the GPU or its driver can't run the CUDA kernels; None if it can."""
    with torch.cuda.device(device):
        refusal = extension.device_refusal()
    built = f"the kernels were built by CUDA {extension.cuda} for {extension.architectures}"
    return f"{refusal}; {built}, and the GPU has compute capability {capability}" if refusal else None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


_cached = functools.cache(unavailable)  # what is asked of a GPU or a dtype doesn't change while the process runs


def _refusal(op: str, backend: str, tensors: list[torch.Tensor]) -> str | None:
    """Why ``backend`` can't serve ``op`` on ``tensors``; None if it can."""
    for device, dtype in {(t.device, t.dtype) for t in tensors}:
        if reason := (_cached if device.type == "cuda" else unavailable)(backend, op, device, dtype):
            return reason
    return None


def _unfit(op: str, backend: str, arguments: list) -> str | None:
    """Why ``backend``, which is there, can't serve these arguments; None if it can."""
    refuses = getattr(_implementations[op][backend], "refuses", None)
    return refuses(*arguments) if refuses else None


def _best(op: str, tensors: list[torch.Tensor], arguments: list) -> str:
    """Where kernels run natively: a specialist that was measured faster and is there, or else Triton or CUDA, whichever
    was measured faster or is there; for what none of them computes, eager."""
    if tensors[0].is_cuda:
        for backend in (*_choices[op](*arguments), *in_order(op, arguments)):
            if not (_refusal(op, backend, tensors) or _unfit(op, backend, arguments)):
                return backend
    return "eager"


def named_backend(backend: str | None = None) -> str:
    """What ``backend=`` or else ``MOR_BACKEND`` names, or "auto"."""
    return backend or _default_backend


def resolve(op: str, backend: str | None, *tensors: torch.Tensor | None, registered: str | None = None) -> str:
    """The backend for ``op`` on ``tensors``: the one that ``backend=`` or ``MOR_BACKEND`` names. "auto" stays, and
    becomes the best there is when the op runs. In a compiled graph that is when a named one is asked after, too, since
    Dynamo doesn't trace the questions.

    ``registered``: the name of the registered op, if it isn't ``op``, which errors name.

    Raises:
        RuntimeError: a backend was named and isn't there, with the reason; or derivatives were asked for that no op
            has: PyTorch itself would take those of serving's for 0.
    """
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{op}: expected neither a transform of torch.func nor forward-mode differentiation around it: it has no "
            "derivatives but those of torch.autograd.grad and backward"
        )
    named = named_backend(backend)
    if named == "auto" or torch.compiler.is_compiling():
        return named
    reason = _refusal(registered or op, named, [t for t in tensors if t is not None])
    if reason is not None:
        source = "backend" if backend else "MOR_BACKEND"
        raise RuntimeError(f"{op}: {source}={named!r} is not available: {reason}")
    return named
