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
    for name in ("pyproject.toml", "setup.py", "tools/bootstrap.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    return tmp_path


def bootstrap(tree, *arguments):
    (tree / "calls").write_text("")
    command = [sys.executable, str(tree / "tools" / "bootstrap.py"), *arguments]
    env = {**os.environ, "PIP_NO_INDEX": "1"}
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
