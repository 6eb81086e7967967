"""Runs a job in child processes that are killed at every one of its steps, and finishes each; see test_crash.py.

Usage: crash.py train|prepare DATA SCRATCH STRIDE (a file of its own: forked children may only use autograd if their
parent never did).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch
from tiny import EXPERT, SMALL

from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train import Loader, Tokens, TrainConfig, latest, prepare, train
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


def child(job, folder, moment=-1):
    """Runs `job(folder)` in a process that dies at `moment`; returns its exit status, and how many moments it saw."""
    global kill_at, watched
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            kill_at, watched = moment, str(folder)
            job(folder)
            watched = ""
            os.write(writer, str(count).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        seen = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(seen or 0)


def train_job(folder):
    torch.manual_seed(0)
    model = MoR(MoRConfig(**SMALL, **EXPERT))
    train(model, TrainConfig(data, str(folder), steps=3, batch_size=1, sequence_length=16, log_every=1, eval_every=0,
                             checkpoint_every=1, keep=1, progress=False))


def train_result(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    path = latest(folder / "checkpoints")
    return lines, path.name, (path / "model.safetensors").read_bytes(), sorted(os.listdir(folder / "checkpoints"))


def prepare_job(folder):
    if not (folder / "meta.json").exists():
        prepare("python-docs", folder, tokenizer=data + "/tokenizer.json", shard_tokens=5_000, max_tokens=12_000)


def prepare_result(folder):
    Tokens(folder).verify()
    return Tokens(folder).fingerprint, sorted(os.listdir(folder))


if __name__ == "__main__":
    kind, data, scratch, stride = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    job, result = (train_job, train_result) if kind == "train" else (prepare_job, prepare_result)
    torch.set_num_threads(1)
    batch = Loader.batch
    Loader.batch = lambda self, *place: (tick(), batch(self, *place))[1]  # the moments inside an optimizer step
    if kind == "prepare":
        from mor_kernels.train import data as module

        texts = list(documents("python-docs"))[:12]
        module.documents = lambda source: iter(texts)
        module._BATCH = 10_000
    sys.addaudithook(audit)

    status, moments = child(job, scratch / "whole")
    assert status == 0 and moments > 10, (status, moments)
    expected = result(scratch / "whole")
    killed = 0
    for moment in range(0, moments, stride):
        folder = scratch / str(moment)
        status, _ = child(job, folder, moment)
        assert status == -signal.SIGKILL, (moment, status)
        if kind == "prepare" and not (folder / "meta.json").exists():
            try:
                Tokens(folder)
            except FileNotFoundError as error:
                assert "interrupted" in str(error)
            else:
                raise AssertionError(f"{moment}: an unfinished preparation was opened")
        status, _ = child(job, folder)
        assert status == 0, f"killed at moment {moment}, it could not be finished"
        assert result(folder) == expected, f"killed at moment {moment}, it finished with another result"
        shutil.rmtree(folder)
        killed += 1
    print(f"killed {killed} times, each finished with the result of the unbroken run")
