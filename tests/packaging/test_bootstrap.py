"""When tools/bootstrap.py works on .venv and when it doesn't; a stand-in for .venv's python records its calls."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    project = ("pyproject.toml", "setup.py", "CMakeLists.txt", "csrc/bind.cpp")
    for name in (*project, "tools/bootstrap.py", "tools/toolchain.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
        echo "$@" >> {tmp_path}/calls
        if [ "$1" = tools/toolchain.py ]; then cat {tmp_path}/lacking; fi
        if [ -e {tmp_path}/broken ]; then case "$*" in *" -e "*) exit 1;; esac; fi
        """
    )
    (tmp_path / "lacking").write_text("")
    python.chmod(0o755)
    return tmp_path


def bootstrap(tree, *arguments, **variables):
    (tree / "calls").write_text("")
    command = [sys.executable, str(tree / "tools" / "bootstrap.py"), *arguments]
    env = {**os.environ, "PIP_NO_INDEX": "1", **variables}
    finished = subprocess.run(command, capture_output=True, text=True, env=env)
    return finished.returncode, (tree / "calls").read_text(), finished.stdout + finished.stderr


def test_an_environment_made_by_other_means_is_added_to_and_its_torch_kept(tree):
    status, calls, _ = bootstrap(tree, "--find")
    assert status == 0
    assert "-e .[dev]" in calls
    assert "install -q torch" not in calls


def test_nothing_is_run_until_the_project_changes(tree):
    bootstrap(tree, "--find")
    assert bootstrap(tree, "--find") == (0, "", "")
    (tree / "pyproject.toml").touch()
    assert bootstrap(tree, "--find") == (0, "", "")
    with (tree / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "-e .[dev]" in bootstrap(tree, "--find")[1]
    assert bootstrap(tree, "--find") == (0, "", "")


def test_another_interpreter_than_the_one_built_on_is_refused(tree):
    bootstrap(tree, "--find")
    status, calls, message = bootstrap(tree)
    assert (status, calls) == (1, "")
    assert "make clean" in message
    assert (tree / ".venv" / "bin" / "python").exists()


def test_an_interrupted_environment_is_made_anew(tree):
    (tree / ".venv" / ".bootstrap").write_text("Python\nunfinished\n")
    (tree / ".venv" / "left-over").touch()
    (tree / "pyproject.toml").unlink()  # nothing to install here, so it goes no further
    status, calls, _ = bootstrap(tree)
    assert (status, calls) == (1, "")
    assert not (tree / ".venv" / "left-over").exists()
    assert (tree / ".venv" / ".bootstrap").read_text().endswith("\nunfinished\n")


def test_a_changed_kernel_is_built(tree):
    bootstrap(tree, "--find")
    kernel = tree / "csrc" / "new.cu"
    for text in ("first", "second"):
        kernel.write_text(text)
        assert "-e .[dev]" in bootstrap(tree, "--find")[1]
        kernel.touch()
        assert bootstrap(tree, "--find") == (0, "", "")
    kernel.unlink()
    assert "-e .[dev]" in bootstrap(tree, "--find")[1]


def test_kernels_are_built_as_asked_and_by_the_nvcc_that_is_there(tree):
    bin = tree / "cuda" / "bin"
    for variables in ({"MOR_CUDA": "0"}, {"MOR_CUDA_ARCHS": "80"}, {"CUDA_HOME": str(bin.parent)}):
        bootstrap(tree, "--find")
        assert "-e .[dev]" in bootstrap(tree, "--find", **variables)[1]
        assert bootstrap(tree, "--find", **variables) == (0, "", "")
    bin.mkdir(parents=True)
    (bin / "nvcc").write_text("#!/bin/sh\n")
    (bin / "nvcc").chmod(0o755)
    assert "-e .[dev]" in bootstrap(tree, "--find", CUDA_HOME=str(bin.parent))[1]
    status, calls, message = bootstrap(tree, "--find", MOR_CUDA="yes")
    assert (status, calls) == (1, "")
    assert "MOR_CUDA: expected 0, 1 or auto, got 'yes'" in message


def test_what_builds_the_kernels_is_installed_before_them(tree):
    assert not any("ninja" in call for call in bootstrap(tree, "--find")[1].splitlines())
    (tree / "lacking").write_text("ninja>=1.11\npybind11>=2.13\n")
    (tree / "csrc" / "new.cu").touch()
    calls = bootstrap(tree, "--find")[1].splitlines()
    tools, package = (next(i for i, call in enumerate(calls) if end in call) for end in ("ninja>=1.11", "-e .[dev]"))
    assert calls[tools].endswith("ninja>=1.11 pybind11>=2.13")
    assert tools < package


def test_kernels_that_do_not_compile_are_an_error(tree):
    site = tree / ".venv" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    (site / "host.pth").touch()  # with which packages that can't be downloaded are done without
    (tree / "broken").touch()
    status, calls, message = bootstrap(tree, "--find")
    assert status == 1 and "MOR_CUDA=0" in message
    assert "mor_kernels.doctor" not in calls
    assert bootstrap(tree, "--find")[0] == 1
    (tree / "broken").unlink()
    assert bootstrap(tree, "--find")[0] == 0
