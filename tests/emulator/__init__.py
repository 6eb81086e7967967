"""The CUDA kernels of ``csrc/`` on a CPU: ``MOR_EMULATE=1 pytest tests -k cpu-cuda`` runs every test of an operator
on them, for which g++ and the headers of CUDA suffice. It shows wrong indices, races with a copy and missing barriers,
and under ThreadSanitizer (``make races``) every race between the threads of a block, or of a cluster; not what a GPU's
memory does, and not what other blocks that run at once do to each other.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import toolchain  # noqa: E402

# glibc's fortified longjmp refuses to go from one stack to another
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-fvisibility=hidden", "-U_FORTIFY_SOURCE",
         '-DMOR_ARCHITECTURES="a CPU"', '-DMOR_CUDA_VERSION="none"', "-include", "emulator.h", "-x", "c++")  # fmt: skip


def load(races: bool = False) -> ModuleType:
    """``mor_kernels._C``, built anew where a source has changed; with ``races``, for ThreadSanitizer."""
    sources = sorted(p for p in (*ROOT.glob("csrc/*"), *HERE.glob("*")) if p.suffix in (".h", ".cuh", ".cu", ".cpp"))
    digest = hashlib.sha256(repr((FLAGS, races)).encode() + b"".join(p.name.encode() + p.read_bytes() for p in sources))
    built = ROOT / "build" / "emulator" / digest.hexdigest()[:16] / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # others may be building it, too
            os.replace(_build(sources, Path(folder), races), built)
    spec = importlib.util.spec_from_file_location("mor_kernels._C", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.emulated = True
    return module


def _build(sources: list[Path], folder: Path, races: bool) -> Path:
    import pybind11

    for path in sources:  # side by side: a header is looked for beside the file that includes it
        if path.parent == HERE or path.name != "instructions.cuh":
            (folder / path.name).write_bytes(path.read_bytes())
    includes = [f"-I{p}" for p in (_cuda_headers(), pybind11.get_include(), sysconfig.get_paths()["include"])]
    compiled = [p.name for p in sources if p.suffix in (".cu", ".cpp")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        watched = {".cu": ["-fsanitize=thread", "-g"], ".cpp": ["-DMOR_RACES"]} if races else {}
        commands = [
            ["g++", *includes, *FLAGS, *watched.get(Path(name).suffix, []), "-c", name, "-o", f"{name}.o"]
            for name in compiled
        ]
        list(pool.map(lambda command: subprocess.run(command, cwd=folder, check=True), commands))
    subprocess.run(["g++", "-shared", *(f"{name}.o" for name in compiled), "-o", "_C.so"], cwd=folder, check=True)
    return folder / "_C.so"


def _cuda_headers() -> Path:
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    if nvcc := toolchain.find_nvcc():
        homes.append(Path(nvcc).resolve().parents[1])
    for home in homes:
        if (home / "include" / "cuda_runtime.h").exists():
            return home / "include"
    raise FileNotFoundError(f"MOR_EMULATE: expected the headers of CUDA in {' or '.join(map(str, homes))}")
