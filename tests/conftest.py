"""What every test shares: seeds, hypothesis settings, and memory that shows when it was read before it was written."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from mor_kernels.ops.paged_attention import _parts

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU the kernels run in Triton's interpreter
    _parts.PROGRAMS = 8  # where each program that has nothing to do still takes a millisecond
    if importlib.util.find_spec("triton"):
        from triton.language.core import is_builtin
        from triton.runtime import interpreter

        interpreter_builder = interpreter.interpreter_builder
        if hasattr(interpreter_builder.options, "sanitize_overflow"):  # it builds checks, and then drops them
            interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)

        @functools.cache
        def names_of_builtins(package):
            return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

        def patch_builtin(package, *rest):
            """As the interpreter's own, which takes a third of its time: at each call of a function in a kernel, it
            goes again through all that the language has, to find that all of it is patched."""
            names = names_of_builtins(package)
            if names and is_builtin(getattr(package, names[0])):
                for name in names:
                    interpreter._patch_attr(package, name, getattr(package, name), *rest)

        interpreter._patch_builtin = patch_builtin

if emulate := os.environ.get("MOR_EMULATE"):  # the CUDA kernels on a CPU, too
    from tests import emulator

    if emulate not in ("1", "races"):
        raise ValueError(f"MOR_EMULATE: expected 1 or races, got {emulate}")
    sys.modules["mor_kernels._C"] = emulator.load(races=emulate == "races")

if importlib.util.find_spec("triton") and importlib.metadata.version("triton").startswith("3.9."):
    # Its interpreter spreads the truth of a comparison of scalars as numbers of what was compared, no mask to it.
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_splat = InterpreterBuilder.create_splat

    def create_splat_of_truth(self, ret_ty, arg):
        return create_splat(self, ret_ty, TensorHandle(arg.data, int1) if arg.data.dtype == bool else arg)

    InterpreterBuilder.create_splat = create_splat_of_truth

if importlib.util.find_spec("triton") and importlib.metadata.version("triton").startswith("3.2."):
    # Two faults of its interpreter, either of which writes where a kernel doesn't: it sums int32 to int64, and a store
    # then writes as many bytes; and it takes a mask of one element, False, for no mask.
    from triton.language import semantic
    from triton.runtime import interpreter

    to_tensor, store = interpreter.ReduceScanOpIneterface.to_tensor, semantic.store

    def to_tensor_of_dtype(self, result, dtype):
        tensor = to_tensor(self, result, dtype)
        tensor.handle.data = tensor.handle.data.astype(interpreter._get_np_dtype(dtype))
        return tensor

    def store_where_masked(pointer, value, mask, *rest):
        if not isinstance(getattr(mask, "handle", None), interpreter.TensorHandle) or mask.handle.data.any():
            return store(pointer, value, mask, *rest)

    interpreter.ReduceScanOpIneterface.to_tensor = to_tensor_of_dtype
    semantic.store = store_where_masked

settings.register_profile(
    "default", deadline=None, max_examples=int(os.environ.get("MOR_EXAMPLES", "25")), derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.register_profile(  # of a campaign, see tests/fuzz.py: time ends a test, and a table tells what it rejects
    "fuzz", settings.get_profile("default"), max_examples=10**6, derandomize=False, print_blob=True,
    phases=[Phase.reuse, Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)  # fmt: skip
settings.load_profile("fuzz" if "MOR_FUZZ" in os.environ else "default")


def pytest_collection_modifyitems(items):
    """What takes longest comes first, so that no worker waits for another one's in the end."""
    items.sort(key=lambda item: item.path.name not in ("test_aot.py", "test_processes.py"))


@pytest.fixture(autouse=True)
def _deterministic(request):
    """A fixed seed, and PyTorch's deterministic mode, which also fills uninitialised memory with NaN. It only warns
    where a test asks for the Hopper kernels, whose backward isn't deterministic."""
    torch.manual_seed(0)
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    torch.use_deterministic_algorithms(True, warn_only=parameters.get("backend") == "hopper")
    yield
    torch.use_deterministic_algorithms(False)
