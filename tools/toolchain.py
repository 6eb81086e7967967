"""What the CUDA kernels are built with: nvcc, CMake, Ninja and pybind11. setup.py, bootstrap.py and check_package.py
ask here; run as a script, it prints what pip has to install before this interpreter can build them.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

NVCC = (12, 0)  # the first to know sm_90a
TOOLS = {"cmake": (3, 24), "ninja": (1, 11), "pybind11": (2, 13)}  # as pyproject.toml has them


def choice():
    """What MOR_CUDA asks for: "0", without the kernels; "1", not without them; "auto", where they can be built."""
    value = os.environ.get("MOR_CUDA") or "auto"
    if value not in ("0", "1", "auto"):
        sys.exit(f"MOR_CUDA: expected 0, 1 or auto, got {value!r}")
    return value


def find_nvcc():
    """The path of nvcc, or None. CUDA_HOME and CUDA_PATH name a folder, and no other is taken in its place."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return shutil.which("nvcc", path=os.path.join(os.environ[name], "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_tool(name):
    """The first one that works and is recent enough, on PATH (where a shim of pip's may lead nowhere) or beside this
    interpreter; or None."""
    for folder in [*os.get_exec_path(), sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]:
        path = shutil.which(name, path=folder)
        if path and version(path) >= TOOLS[name]:
            return path
    return None


def version(path):
    """(major, minor) that an executable prints, (0, 0) if it doesn't run."""
    try:
        printed = subprocess.check_output([path, "--version"], stderr=subprocess.DEVNULL, universal_newlines=True)
    except (OSError, subprocess.CalledProcessError):
        return 0, 0
    return numbers(printed)


def numbers(text):
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


def has_pybind11():
    try:
        import pybind11
    except ImportError:
        return False
    return numbers(pybind11.__version__) >= TOOLS["pybind11"]


def lacking():
    """What pip would have to install, as it is told."""
    there = {name: find_tool(name) for name in ("cmake", "ninja")}
    there["pybind11"] = has_pybind11()
    return ["{}>={}.{}".format(name, *TOOLS[name]) for name, found in there.items() if not found]


def no_nvcc():
    """Why there is no nvcc to build with; None if there is."""
    path = find_nvcc()
    if path is None:
        named = [name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        where = f"in {named[0]}={os.environ[named[0]]}" if named else "on PATH or in /usr/local/cuda/bin"
        return f"there is no nvcc {where}"
    found = version(path)
    if found == (0, 0):
        return f"{path} doesn't run"
    return None if found >= NVCC else "{} is of CUDA {}.{}, older than {}.{}".format(path, *found, *NVCC)


def refusal():
    """Why the kernels can't be built here; None if they can."""
    reason = no_nvcc()
    if reason is None and lacking():
        reason = f"there is nvcc, but not {', '.join(lacking())}"
    return reason


if __name__ == "__main__" and choice() != "0" and no_nvcc() is None:
    print(*lacking(), sep="\n")
