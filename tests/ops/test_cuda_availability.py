"""Where the CUDA kernels can run, and what is said where they can't; what they compute, the tests of each op know."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch

from mor_kernels import doctor, ops
from mor_kernels.ops import _dispatch, _measured

NAME = "mor_kernels._C"
MISSING = "mor-kernels was installed without its CUDA kernels; install it with nvcc on PATH, MOR_CUDA=1"


@pytest.fixture
def absent(monkeypatch):
    """Modules that aren't installed."""
    names, find_spec = set(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in names else find_spec(name))
    return names


@pytest.fixture
def extension(monkeypatch):
    """One that runs on a GPU, which is there as far as it is asked for."""
    module = types.ModuleType(NAME)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    module.cuda, module.architectures, module.device_refusal = "13.0.88", "80 90a-real", lambda: ""
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(_dispatch, "_cached", _dispatch.unavailable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.version, "hip", None)
    return module


def test_kernels_that_are_not_there(absent):
    absent.add(NAME)
    assert _dispatch.unavailable("cuda", "gather", "cpu") == MISSING
    assert doctor.report()["cuda_kernels"] == f"not there: {MISSING}"
    with pytest.raises(RuntimeError, match="backend='cuda' is not available: mor-kernels was installed without"):
        ops.gather(torch.ones(2, 1), torch.tensor([1]), backend="cuda")


def test_kernels_that_do_not_load(tmp_path, monkeypatch):
    from importlib.machinery import EXTENSION_SUFFIXES

    import mor_kernels

    (tmp_path / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(mor_kernels, "__path__", [str(tmp_path)])
    assert str(tmp_path) in _dispatch.unavailable("cuda", "gather", "cpu")
    assert str(tmp_path) in doctor.report()["cuda_kernels"]


def test_kernels_that_are_there(extension):
    assert _dispatch.unavailable("cuda", "gather", "cuda") is None
    assert _dispatch.unavailable("cuda", "gather", "cpu") == "the tensors are on the CPU"
    assert "float64" in _dispatch.unavailable("cuda", "gather", "cuda", torch.float64)


def test_gpus_that_are_too_old_or_not_built_for(extension, monkeypatch):
    extension.device_refusal = lambda: "no kernel image is available for execution on the device"
    assert _dispatch.unavailable("cuda", "gather", "cuda") == (
        "no kernel image is available for execution on the device; the kernels were built by CUDA 13.0.88 for"
        " 80 90a-real, and the GPU has compute capability (9, 0)"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "8.0 (A100) or newer, not (7, 5)" in _dispatch.unavailable("cuda", "gather", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _dispatch.unavailable("cuda", "gather", "cuda") == "no CUDA device is visible"


@pytest.mark.parametrize(
    ("gone", "dtype", "chosen"),
    [
        ([], torch.float32, "triton"),
        (["triton"], torch.float32, "cuda"),
        (["triton", NAME], torch.float32, "eager"),
        (["triton"], torch.float64, "eager"),
    ],
)
def test_the_best_backend_by_what_is_installed(extension, absent, gone, dtype, chosen):
    if chosen == "triton":
        pytest.importorskip("triton")
    absent.update(gone)
    tensor = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype)
    assert _dispatch._best("gather", [tensor], [tensor, None]) == chosen


def test_what_was_measured_is_what_is_chosen():
    assert _measured.CHOICES.keys() <= _dispatch._implementations.keys()
    for op in _measured.CHOICES:
        assert {"triton", "cuda"} <= _dispatch._implementations[op].keys(), f"{op}: there is nothing to choose"
    stream, kept, few = torch.empty(1, 8, 1), torch.empty(1, 5, 1), torch.empty(1, 4, 1)
    gradients = [stream, stream, None, None, None, torch.float32]
    weight, logits = torch.empty(1), torch.empty(1, 8)
    many, long = (torch.empty(shape, device="meta") for shape in ((32, 2048, 960), (16, 4096, 960)))
    for op, arguments, first in [
        ("gather", [], "triton"),
        ("route", [stream, weight, None, None], "cuda"),
        ("route", [stream, None, logits, None], "triton"),
        ("route", [many, weight, None, None], "triton"),
        ("route", [long, weight, None, None], "cuda"),
        ("route", [long, weight, None, torch.empty(16, 1024, device="meta")], "triton"),
        ("scatter_back", [stream, kept], "cuda"),
        ("scatter_back_backward", [*gradients, "delta"], "cuda"),
        ("scatter_back_backward", [*gradients, "block"], "triton"),
        ("route_backward", [kept, None, None, stream], "triton"),
        ("route_backward", [few, None, None, stream], "cuda"),
    ]:
        assert _measured.in_order(op, arguments)[0] == first


def test_the_doctor_tells_what_was_built(extension, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.report()["cuda_kernels"] == "built by CUDA 13.0.88 for 80 90a-real"
