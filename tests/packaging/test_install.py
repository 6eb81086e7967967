"""The source distribution, the wheel built from it without CUDA kernels, and that wheel installed."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tools import check_package, toolchain

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
    return check_package.copy_source(tmp_path_factory.mktemp("source") / "mor-kernels")


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


def test_the_source_distribution_holds_what_the_kernels_are_built_from_and_nothing_else(sdist):
    assert check_package.sdist_faults(sdist) == []


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert check_package.wheel_faults(wheel) == []


def test_what_lacks_and_what_does_not_belong_is_told(wheel, tmp_path):
    """In a wheel that is said to have kernels."""
    other = tmp_path / wheel.name.replace("py3-none-any", "cp311-cp311-linux_x86_64")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(other, "w") as file:
        for name in whole.namelist():
            if name != "mor_kernels/ops/_dispatch.py":
                file.writestr(name, whole.read(name))
        file.writestr("tests/test_cli.py", "")
    assert check_package.wheel_faults(other) == [
        f"{other.name}: expected one extension mor_kernels._C, found []",
        f"{other.name} lacks mor_kernels/ops/_dispatch.py",
        f"{other.name} holds tests/test_cli.py, which doesn't belong there",
    ]
    with zipfile.ZipFile(other, "a") as file:
        file.writestr("mor_kernels/_C.cpython-311-x86_64-linux-gnu.so", "")
    assert len(check_package.wheel_faults(other)) == 2


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
