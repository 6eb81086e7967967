"""The source distribution, the wheel built from it without CUDA kernels, and that wheel installed."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tools import toolchain

ROOT = Path(__file__).parents[2]
SETUPTOOLS = max((int(d.version.split(".")[0]) for d in distributions(name="setuptools")), default=0)
pytestmark = pytest.mark.skipif(SETUPTOOLS < 77, reason="builds without network: setuptools 77 must be installed")


def run(*command, cwd, **env):
    finished = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "MOR_CUDA": "0", **env},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy: setuptools builds inside the source, and what an earlier build left there gets in."""
    copy = tmp_path_factory.mktemp("source") / "mor-kernels"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, copy, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run("-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=source)
    [archive] = out.glob("mor_kernels-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist):
    out = sdist.parent
    run("-m", "pip", "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps", sdist, "-w", out, cwd=out)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def test_the_source_distribution_holds_what_the_kernels_are_built_from(sdist):
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").iterdir()}
    assert sources | {"CMakeLists.txt", "setup.py", "tools/toolchain.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".o"))]


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    version = wheel.name.split("-")[1]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mor_kernels").rglob("*.py")}
    assert {name for name in names if name.startswith("mor_kernels/")} == modules | {"mor_kernels/py.typed"}
    rest = {name for name in names if not name.startswith("mor_kernels/")}
    info = f"mor_kernels-{version}.dist-info"
    assert rest == {
        f"{info}/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    }


def test_the_installed_package_imports(site, tmp_path):
    code = "import mor_kernels, mor_kernels.doctor; print(mor_kernels.__file__, mor_kernels.__version__)"
    file, version = run("-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert Path(file) == site / "mor_kernels" / "__init__.py"
    assert (site / f"mor_kernels-{version}.dist-info").is_dir()


def test_the_installed_command_runs(site, tmp_path):
    printed = subprocess.check_output(
        [site / "bin" / "mor-kernels", "--help"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, text=True
    )
    assert "train" in printed and "generate" in printed


def build(source, out, **variables):
    """Status and output of a wheel's build into ``out``."""
    finished = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"],
        cwd=source,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return finished.returncode, finished.stdout


def nvcc(folder, version):
    """A CUDA_HOME whose nvcc tells its version and compiles nothing."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\n[ "$*" = --version ] && echo "release {version}, V{version}.1"\n')
    path.chmod(0o755)
    return str(folder)


def test_without_nvcc_the_wheel_is_pure_and_says_why(source, tmp_path):
    status, printed = build(source, tmp_path, MOR_CUDA="", CUDA_HOME=str(tmp_path))
    assert status == 0, printed
    reason = f"mor-kernels is built without its CUDA kernels: there is no nvcc in CUDA_HOME={tmp_path}."
    assert printed.splitlines().count(reason) == 1
    assert [path.name.split("-", 2)[2] for path in tmp_path.glob("*.whl")] == ["py3-none-any.whl"]


def test_kernels_that_were_asked_for_are_not_left_out(source, tmp_path):
    status, printed = build(source, tmp_path, MOR_CUDA="1", CUDA_HOME=str(tmp_path))
    assert status and not list(tmp_path.glob("*.whl"))
    assert f"MOR_CUDA=1, but the CUDA kernels can't be built: there is no nvcc in CUDA_HOME={tmp_path}." in printed


def test_an_old_nvcc_is_refused_with_its_version(source, tmp_path):
    status, printed = build(source, tmp_path, MOR_CUDA="1", CUDA_HOME=nvcc(tmp_path, "11.8"))
    assert status and "nvcc is of CUDA 11.8, older than 12.0" in printed


@pytest.mark.skipif(bool(toolchain.lacking()), reason=f"needs {', '.join(toolchain.lacking())}")
def test_a_compiler_that_fails_is_an_error(source, tmp_path):
    status, printed = build(source, tmp_path, MOR_CUDA="auto", CUDA_HOME=nvcc(tmp_path, "12.4"))
    assert status and not list(tmp_path.glob("*.whl"))
    assert "MOR_CUDA=0 installs mor-kernels without them" in printed


def test_a_misspelt_choice_is_refused(source, tmp_path):
    status, printed = build(source, tmp_path, MOR_CUDA="banana")
    assert status and "MOR_CUDA: expected 0, 1 or auto, got 'banana'" in printed
