"""What this machine has and which backends work on it: the first thing to look at, and to paste into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import __version__
from .ops import _dispatch

PACKAGES = ("triton", "numpy", "safetensors", "tokenizers", "tqdm", "matplotlib", "datasets", "flash-attn-4",
            "transformers", "accelerate", "lm-eval", "fastapi", "uvicorn")  # fmt: skip
VARIABLES = ("MOR_BACKEND", "MOR_DEBUG", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


def report() -> dict:
    """Versions, GPUs and backends.

    Returns:
        A dict of plain values, printable as JSON. ``packages`` maps a name to its version, or None: not installed.
        ``backends`` maps a name to None if the backend works here (on the GPU if there is one), or to the reason.
    """
    return {
        "mor_kernels": __version__,
        "path": str(Path(__file__).parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cuda_kernels": _kernels(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "backends": {name: _unavailable(name) for name in (*_dispatch.BACKENDS, *_dispatch.SPECIALISTS)},
    }


def _unavailable(backend: str) -> str | None:
    """Without a GPU some work on the CPU, interpreted or emulated; what doesn't is said of a GPU."""
    if not torch.cuda.is_available() and _dispatch.unavailable(backend, device="cpu") is None:
        return None
    return _dispatch.unavailable(backend)


def package_version(package: str) -> str | None:
    """None where it isn't installed."""
    try:
        return version(package)  # from its metadata: importing Triton would be slow, and could fail
    except PackageNotFoundError:
        return None


def _kernels() -> str:
    try:
        extension = _dispatch.load_extension()
    except ImportError as error:
        return f"not there: {error}"
    return f"built by CUDA {extension.cuda} for {extension.architectures}"


def _gpu(index: int) -> str:
    try:
        gpu = torch.cuda.get_device_properties(index)
    except RuntimeError as error:  # a driver that doesn't start, or a process forked from one that had used CUDA
        return f"not usable: {error}"
    return f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"


def main() -> None:
    """Print the report, one fact a line."""
    facts = report()
    lines = {
        "mor-kernels": f"{facts['mor_kernels']} in {facts['path']}",
        "Python": f"{facts['python']}, {facts['executable']}",
        "platform": facts["platform"],
        "torch": facts["torch"],
        "CUDA": facts["cuda"] or "not in this build of torch",
        "GPU": "; ".join(facts["gpus"]) or "none visible",
        "CUDA kernels": facts["cuda_kernels"],
        **{name: found or "not installed" for name, found in facts["packages"].items()},
        **facts["environment"],
        **{f"{name} backend": reason or "works" for name, reason in facts["backends"].items()},
    }
    width = max(map(len, lines))
    for name, fact in lines.items():
        print(f"{name:<{width}}  {fact}")


if __name__ == "__main__":
    main()
