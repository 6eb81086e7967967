"""The package without optional packages, without a GPU and without side effects of its import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*arguments, **env):
    finished = subprocess.run(
        [sys.executable, *arguments], cwd=HERE.parents[1], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_import_brings_neither_triton_nor_cuda():
    run(
        "-c",
        "import sys, torch; import mor_kernels, mor_kernels.ops, mor_kernels.model; "
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'; "
        "assert 'triton' not in sys.modules, 'Triton was imported'; "
        "assert 'mor_kernels._C' not in sys.modules, 'the CUDA kernels were imported'",
    )


@pytest.mark.skipif(importlib.util.find_spec("mor_kernels._C") is None, reason="installed without CUDA kernels")
def test_the_cuda_kernels_import_without_torch_and_gpu():
    run(
        "-c",
        "import sys, mor_kernels._C as _C; assert 'torch' not in sys.modules; "
        "assert _C.cuda and _C.architectures and _C.device_refusal()",
        CUDA_VISIBLE_DEVICES="",
    )


def test_every_operator_works_without_optional_packages_and_gpu():
    run(str(HERE / "bare.py"), CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(HERE.parents[1]))
