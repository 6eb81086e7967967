"""Build the source distribution and, from it, the wheel; look at what they hold; install the wheel into a fresh
environment and use it there (tests/packaging/smoke.py and bare.py), on the oldest and the newest Python and torch.

    make package                                              # oldest and newest
    python -m tools.check_package 3.11:2.13.0 /opt/python:    # Python's version or path, and torch's, or its newest

Packages come from pip, as for a user; torch is gigabytes. Where there is nvcc and MOR_CUDA isn't 0, the wheel is also
built with the CUDA kernels, and installed in place of the other.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tools import toolchain

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ("3.10:2.6.*", "3.13:")  # the oldest is what pyproject.toml declares
BUILT_FROM = {"pyproject.toml", "setup.py", "CMakeLists.txt", "tools/toolchain.py"}
DOCUMENTS = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}
EGG_INFO = ("PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt")
WRITTEN_BY_SETUPTOOLS = {"PKG-INFO", "setup.cfg", "MANIFEST.in", *(f"mor_kernels.egg-info/{name}" for name in EGG_INFO)}


def copy_source(target):
    """A copy to build in: setuptools builds inside the source, and what an earlier build left there gets in."""
    ignore = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so")
    return Path(shutil.copytree(ROOT, target, ignore=ignore))


def package():
    """Names of the files that an installation has, but for the compiled kernels."""
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("mor_kernels/**/*.py")}
    return modules | {"mor_kernels/py.typed"}


def sdist_faults(archive):
    """What is wrong with the files of a source distribution, a line each."""
    with tarfile.open(archive) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    kernels = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*")}
    return _differences(archive, names, package() | BUILT_FROM | DOCUMENTS | kernels | WRITTEN_BY_SETUPTOOLS)


def wheel_faults(wheel):
    """What is wrong with the files of a wheel, a line each."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        faults = [f"{wheel.name} has {name} twice" for name in {name for name in names if names.count(name) > 1}]
    _, version, tag = wheel.stem.split("-", 2)
    info = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    expected = package() | {f"mor_kernels-{version}.dist-info/{name}" for name in info}
    if tag != "py3-none-any":  # then it has kernels, for the Python and the machine that it names
        built = [name for name in names if re.fullmatch(r"mor_kernels/_C\.[\w-]+\.so", name)]
        expected |= set(built)
        if len(built) != 1:
            faults.append(f"{wheel.name}: expected one extension mor_kernels._C, found {built}")
    return faults + _differences(wheel, set(names), expected)


def _differences(archive, names, expected):
    lacking = [f"{archive.name} lacks {name}" for name in sorted(expected - names)]
    return lacking + [f"{archive.name} holds {name}, which doesn't belong there" for name in sorted(names - expected)]


def find_python(wanted):
    """The interpreter of a version such as 3.10, on PATH or among pyenv's, or of a path."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python{wanted}"), *sorted(pyenv.glob(f"versions/{wanted}.*/bin/python")), wanted]
    for python in filter(None, found):
        try:  # a shim on PATH may lead nowhere
            subprocess.run([python, "-c", ""], check=True, capture_output=True)
            return python
        except (OSError, subprocess.CalledProcessError):
            pass
    sys.exit(f"expected a Python such as 3.10, or the path of one, that is installed; got {wanted!r}")


def run(*command, quiet=False, **variables):
    """Run a command outside of the checkout; a quiet one is heard only if it fails."""
    print("+", *command, flush=True)
    environment = {**os.environ, **variables}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRITON_INTERPRET"):
        environment.pop(name, None)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quiet else {}
    finished = subprocess.run([str(part) for part in command], cwd=tempfile.gettempdir(), env=environment, **output)
    if finished.returncode:
        sys.exit(f"{finished.stdout or ''}\nfailed: {' '.join(map(str, command))}")


def new_environment(python, folder):
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def build(python, folder):
    """The wheels that this interpreter builds from the source distribution: without kernels, and with them or None."""
    source, out, with_kernels = copy_source(folder / "source"), folder / "dist", folder / "with_kernels"
    builder = new_environment(python, folder / "builder")
    run(builder, "-m", "pip", "install", "-q", "build")
    run(builder, "-m", "build", "--outdir", out, source, quiet=True, MOR_CUDA="0")
    [sdist], [pure] = out.glob("*.tar.gz"), out.glob("*.whl")
    faults, kernels = sdist_faults(sdist) + wheel_faults(pure), None
    if toolchain.choice() != "0" and toolchain.no_nvcc() is None:
        run(builder, "-m", "pip", "wheel", "--no-deps", sdist, "-w", with_kernels, quiet=True, MOR_CUDA="1")
        [kernels] = with_kernels.glob("*.whl")
        faults += wheel_faults(kernels)
    if faults:
        sys.exit("\n".join(faults))
    return pure, kernels


def check(python, torch, folder):
    """Build, install and use the package on one Python and torch."""
    pure, kernels = build(python, folder)
    fresh = new_environment(python, folder / "fresh")
    # a module is compiled when it is imported: most of torch never is
    run(fresh, "-m", "pip", "install", "-q", "--no-compile", pure, f"torch=={torch}" if torch else "torch")
    run(fresh, "-m", "pip", "check")
    tests = ROOT / "tests" / "packaging"
    run(fresh, tests / "smoke.py")
    run(fresh, tests / "bare.py")
    if kernels:
        run(fresh, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", kernels)
        run(fresh, tests / "smoke.py", "--kernels")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("environments", nargs="*", metavar="PYTHON:TORCH", default=ENVIRONMENTS)
    environments = [environment.rpartition(":")[::2] for environment in parser.parse_args().environments]
    if any(not python for python, _ in environments):
        parser.error("expected PYTHON:TORCH, such as 3.10:2.6.0")
    for python, torch in [(find_python(python), torch) for python, torch in environments]:
        with tempfile.TemporaryDirectory(prefix="mor-kernels-") as folder:
            check(python, torch, Path(folder))
    print("good:", *(":".join(environment) for environment in environments))


if __name__ == "__main__":
    main()
