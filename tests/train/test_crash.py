from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind, stride", [("train", 3), ("prepare", 1)])
def test_killed_at_any_moment(data, tmp_path, kind, stride):
    """kill -9 before each (for training: each third) file operation and inside optimizer steps; then finishing gives
    the losses, weights, shards and file names of a run that was never killed."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "train" / "crash.py"), kind, str(data), str(tmp_path), str(stride)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "each finished with the result of the unbroken run" in run.stdout
