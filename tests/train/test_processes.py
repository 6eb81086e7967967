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


def test_nothing_holds_the_process_group():
    """One that is held keeps gloo's threads running while the interpreter ends, which aborts some runs."""
    script = """
import gc, sys
import torch.distributed as dist
from mor_kernels.train.loop import processes

with processes("cpu"):
    import torch._dynamo  # as an optimizer does
    group = dist.group.WORLD
    dist.barrier()
gc.collect()
sys.exit(0 if sys.getrefcount(group) <= 2 else f"{sys.getrefcount(group)} references")  # the name's, and the argument
"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
