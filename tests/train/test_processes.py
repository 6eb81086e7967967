from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def jobs():
    """Takes lines as jobs.py has them, and gives statuses."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, str(root / "tests" / "train" / "jobs.py")], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.fixture
def run(jobs, data, tmp_path):
    """Runs a job and returns what it prints."""

    def run(kind, *arguments):
        printed = tmp_path / "printed"
        line = json.dumps([[kind, str(data), str(tmp_path), *arguments], str(printed)])
        print(line, file=jobs.stdin, flush=True)
        assert jobs.stdout.readline() == "0\n", printed.read_text() if printed.exists() else "jobs.py has ended"
        return printed.read_text()

    return run


@pytest.mark.parametrize("kind, stride", [("train", 8), ("prepare", 2)])
def test_killed_at_any_moment(run, kind, stride):
    """kill -9 before each few file operations and inside optimizer steps; then finishing gives the
    losses, weights, shards and file names of a run that was never killed."""
    assert "finished with the same result each time" in run(kind, stride)


# FSDP2 of torch 2.6 runs on GPUs only.
fsdp_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="needs FSDP2 on a CPU")


@fsdp_on_cpu
def test_gradients_and_collectives_of_two_processes(run):
    """Uneven loads leave gradients those of one process; each shared layer is gathered and reduced once a step."""
    assert "the same gradients" in run("gradients")


@fsdp_on_cpu
@pytest.mark.parametrize("router", ["expert", "token"])
def test_runs_of_several_processes(run, router):
    """They equal those of one, exactly if resumed by as many, and can be resumed by fewer, more, and in other parts."""
    assert "the same runs" in run("parallel", router)


@fsdp_on_cpu
def test_killed_while_several_processes_train(run):
    assert "nothing is lost" in run("parallel-kill")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_and_no_step_waits(run):
    assert "no step waits, and losses are equal" in run("gpus")


def test_nothing_holds_the_process_group(run):
    assert "nothing is held" in run("end")
