"""Everything is in pyproject.toml, but for the CUDA kernels: mor_kernels._C, which CMake builds where there is nvcc.

MOR_CUDA=0 leaves them out, and with MOR_CUDA=1 it is an error if they can't be built. MOR_CUDA_ARCHS is what they are
compiled for, as in CMAKE_CUDA_ARCHITECTURES; MAX_JOBS, how many compilers run at once; CMAKE_ARGS are handed on.
torch is never imported: a build serves every version of it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402

# CMake reads these once, and keeps what they said
VARIABLES = ("MOR_CUDA_ARCHS", "CMAKE_ARGS", "CXX", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAHOSTCXX")


class BuildKernels(build_ext):
    def build_extension(self, extension):
        import pybind11

        nvcc, cmake, ninja = toolchain.find_nvcc(), *map(toolchain.find_tool, ("cmake", "ninja"))
        # Not self.build_temp: an editable install gets a new one each time, and would compile everything anew.
        folder = ROOT / "build" / f"cmake-{self.plat_name}-{sys.implementation.cache_tag}"
        versions = subprocess.check_output([nvcc, "--version"], text=True) + sys.version
        made_by = "\n".join([str(folder), nvcc, versions, sys.base_prefix, *map(repr, map(os.environ.get, VARIABLES))])
        stamp = folder / "made_by.txt"
        if not stamp.exists() or stamp.read_text() != made_by:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            stamp.write_text(made_by)
        archs = os.environ.get("MOR_CUDA_ARCHS")
        # Ninja, pybind11 and perhaps Python are in a build environment of pip's that the folder outlives.
        configure = [
            cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_CUDA_COMPILER={nvcc}",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *([f"-DMOR_CUDA_ARCHS={archs}"] if archs else []), *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]  # fmt: skip
        build = [cmake, "--build", folder, "--parallel", os.environ.get("MAX_JOBS") or str(os.cpu_count())]
        for command in (configure, build):
            if subprocess.run(command).returncode:
                sys.exit("The CUDA kernels were not built, see above; MOR_CUDA=0 installs mor-kernels without them.")
        built = Path(self.get_ext_fullpath(extension.name))
        built.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / built.name, built)


def extensions():
    choice = toolchain.choice()
    editable = "editable_wheel" in sys.argv
    if not editable and "bdist_wheel" not in sys.argv and "build_ext" not in sys.argv:
        return []  # metadata, or the sources
    reason = "MOR_CUDA=0" if choice == "0" else toolchain.refusal()
    if reason is None:
        return [Extension("mor_kernels._C", [])]
    if choice == "1":
        sys.exit(f"MOR_CUDA=1, but the CUDA kernels can't be built: {reason}.")
    if choice == "0" and editable:
        for built in ROOT.glob("mor_kernels/_C*.so"):
            built.unlink()
    print(f"mor-kernels is built without its CUDA kernels: {reason}.")
    return []


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
