from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


# FSDP2 of torch 2.6 runs on GPUs only.
fsdp_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="needs FSDP2 on a CPU")


@fsdp_on_cpu
def test_gradients_and_collectives_of_two_processes(data, tmp_path):
    """Uneven loads leave gradients those of one process; each shared layer is gathered and reduced once a step."""
    assert "the same gradients" in run("gradients", data, tmp_path)


@fsdp_on_cpu
@pytest.mark.parametrize("router", ["expert", "token"])
def test_runs_of_several_processes(data, tmp_path, router):
    """They equal those of one, exactly if resumed by as many, and can be resumed by fewer, more, and in other parts."""
    assert "the same runs" in run("parallel", data, tmp_path, router)


@fsdp_on_cpu
def test_killed_while_several_processes_train(data, tmp_path):
    assert "nothing is lost" in run("parallel-kill", data, tmp_path)


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
