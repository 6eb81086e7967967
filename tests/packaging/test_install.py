"""The source distribution, the wheel built from it, and that wheel installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = max((int(d.version.split(".")[0]) for d in distributions(name="setuptools")), default=0)
pytestmark = pytest.mark.skipif(SETUPTOOLS < 77, reason="builds without network: setuptools 77 must be installed")


def run(*command, cwd, **env):
    finished = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    source = out / "source"  # a copy: setuptools builds inside the source, and what an earlier build left there gets in
    ignore = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run("-c", sdist, cwd=source)
    [archive] = out.glob("mor_kernels-*.tar.gz")
    run("-m", "pip", "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps", archive, "-w", out, cwd=out)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    version = wheel.name.split("-")[1]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mor_kernels").rglob("*.py")}
    assert {name for name in names if name.startswith("mor_kernels/")} == modules
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
