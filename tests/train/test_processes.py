from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import SMALL

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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_and_no_step_waits(data, tmp_path):
    assert "no step waits, and losses are equal" in run("gpus", data, tmp_path)


def test_nothing_holds_the_process_group():
    """One that is held keeps gloo's threads running while the interpreter ends, which aborts some runs."""
    script = """
import gc, sys
import torch
import torch.distributed as dist
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train.loop import processes

def train_in_parts():
    from mor_kernels.train.parallel import Shards

    model = MoR(MoRConfig(**SMALL))
    shards = Shards(model, torch.device("cpu"), bf16=False)
    ids = torch.arange(16).view(2, 8)
    model(ids, ids).loss.backward()
    shards.end()
    torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
    model.state_dict()["norm.weight"].full_tensor()

with processes("cpu"):
    import torch._dynamo  # as an optimizer does
    dist.barrier()
    if hasattr(torch.cpu.Stream, "record_event"):  # FSDP2 runs on a CPU
        train_in_parts()
    groups = list(dist.distributed_c10d._world.pg_map)
gc.collect()
references = [sys.getrefcount(group) for group in groups]  # the list's, the variable's and the argument
sys.exit(0 if set(references) == {3} else f"{references} references")
"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    script = f"SMALL = {SMALL}\n{script}"
    result = subprocess.run(
        [*command, sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
