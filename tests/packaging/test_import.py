"""The package without optional packages, without a GPU and without side effects of its import."""

import os
import subprocess
import sys
from pathlib import Path

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
        "assert 'triton' not in sys.modules, 'Triton was imported'",
    )


def test_every_operator_works_without_optional_packages_and_gpu():
    run(str(HERE / "bare.py"), CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(HERE.parents[1]))
