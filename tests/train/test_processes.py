from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run(*arguments):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "train" / "jobs.py"), *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("kind, stride", [("train", 8), ("prepare", 2)])
def test_killed_at_any_moment(data, tmp_path, kind, stride):
    """kill -9 before each few file operations and inside optimizer steps; then finishing gives the
    losses, weights, shards and file names of a run that was never killed."""
    assert "finished with the same result each time" in run(kind, data, tmp_path, stride)


def test_two_processes_equal_two_micro_steps(data, tmp_path):
    assert "two processes equal two micro-steps" in run("parallel", data, tmp_path)
