"""Runs jobs in child processes, for test_processes.py.

jobs.py train|prepare DATA SCRATCH STRIDE: kills the job at every STRIDE-th of its moments and finishes it.
jobs.py parallel DATA SCRATCH: trains in two data-parallel processes, and in one with two micro-steps.

A program of its own because forked children may only use autograd if their parent never did.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import EXPERT, SMALL, TOKEN

from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train import Loader, Tokens, TrainConfig, latest, loop, prepare, train
from mor_kernels.train import data as data_module
from mor_kernels.train.data import documents

count, kill_at, watched = 0, -1, ""


def tick():
    """Counts a moment, and dies at the chosen one."""
    global count
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1


def audit(event, arguments):
    # Every file-system event inside the job's folder: open, rename, remove, mkdir, listdir, ...
    if watched and arguments and isinstance(arguments[0], (str, Path)) and str(arguments[0]).startswith(watched):
        tick()


def start(job, *arguments, **environment):
    """Calls `job(*arguments)` in a forked process and returns its number."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.environ.update(environment)
            job(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return pid


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def watch(job, folder, moment=-1):
    """Runs `job(folder)` and dies at `moment`; otherwise leaves the number of moments in a file."""
    global kill_at, watched
    kill_at, watched = moment, str(folder)
    job(folder)
    watched = ""
    (scratch / "moments").write_text(str(count))


def train_job(folder, kind=EXPERT, **changes):
    torch.manual_seed(0)
    model = MoR(MoRConfig(**SMALL, **kind))
    default = {"steps": 2, "batch_size": 1, "sequence_length": 16, "log_every": 1, "eval_every": 0,
               "checkpoint_every": 1, "keep": 1, "progress": False, "device": "cpu"}  # fmt: skip
    train(model, TrainConfig(data, str(folder), **{**default, **changes}))


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    return lines


def train_result(folder):
    lines = read_metrics(folder)
    path = latest(folder / "checkpoints")
    return lines, path.name, (path / "model.safetensors").read_bytes(), sorted(os.listdir(folder / "checkpoints"))


def prepare_job(folder):
    if not (folder / "meta.json").exists():
        prepare("python-docs", folder, tokenizer=data + "/tokenizer.json", shard_tokens=5_000, max_tokens=12_000)


def prepare_result(folder):
    Tokens(folder).verify()
    return Tokens(folder).fingerprint, sorted(os.listdir(folder))


def kill_everywhere(kind, stride):
    job, result = (train_job, train_result) if kind == "train" else (prepare_job, prepare_result)
    batch = Loader.batch
    Loader.batch = lambda self, *place: (tick(), batch(self, *place))[1]  # the moments inside an optimizer step
    texts = list(documents("python-docs"))[:12]
    data_module.documents = lambda source: iter(texts)
    data_module._BATCH = 10_000
    sys.addaudithook(audit)

    assert status(start(watch, job, scratch / "whole")) == 0
    expected, moments = result(scratch / "whole"), int((scratch / "moments").read_text())
    assert moments > 10, moments
    for moment in range(0, moments, stride):
        folder = scratch / str(moment)
        assert status(start(watch, job, folder, moment)) == -signal.SIGKILL, moment
        if kind == "prepare" and not (folder / "meta.json").exists():
            try:
                Tokens(folder)
            except FileNotFoundError as error:
                assert "interrupted" in str(error)
            else:
                raise AssertionError(f"{moment}: an unfinished preparation was opened")
        assert status(start(watch, job, folder)) == 0, f"killed at moment {moment}, it could not be finished"
        assert result(folder) == expected, f"killed at moment {moment}, it finished with another result"
        shutil.rmtree(folder)
    print(f"killed at {len(range(0, moments, stride))} of {moments} moments, finished with the same result each time")


def parallel():
    loop.plot_curves = lambda *_: None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, kind in (("expert", EXPERT), ("token", TOKEN)):
        changes = {"kind": kind, "steps": 3, "eval_every": 3, "eval_batches": 1, "checkpoint_every": 3}

        one, two = scratch / f"{name}-1", scratch / f"{name}-2"
        assert status(start(partial(train_job, one, batch_size=2, accumulation=2, **changes))) == 0
        job = partial(train_job, two, batch_size=2, **changes)
        processes = [start(job, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                     for rank in range(2)]  # fmt: skip
        assert [status(process) for process in processes] == [0, 0]
        for a, b in zip(read_metrics(one), read_metrics(two)):
            assert a.keys() == b.keys() and a["step"] == b["step"], (a, b)
            for key in ("loss", "gradient_norm", "depth_mix"):
                if key in a:
                    torch.testing.assert_close(torch.tensor(a[key]), torch.tensor(b[key]), rtol=1e-5, atol=1e-6)
        assert len(read_metrics(two)) == 5
        weights = [load_file(latest(folder / "checkpoints") / "model.safetensors") for folder in (one, two)]
        for key, tensor in weights[0].items():
            # the same sums in another order; a few fp32 roundings over three steps
            torch.testing.assert_close(tensor, weights[1][key], rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
    print("two processes equal two micro-steps")


if __name__ == "__main__":
    kind, data, scratch = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    if kind != "prepare":
        torch.optim.AdamW([torch.zeros(1)])  # imports a thousand modules, once for all children
    if kind == "parallel":
        parallel()
    else:
        kill_everywhere(kind, int(sys.argv[4]))
