"""Runs jobs in child processes, for test_processes.py: those that standard input names, by a line of JSON each with the
arguments below and a file for what is printed; answers each with the status of its process.

train|prepare DATA SCRATCH STRIDE: kills the job at every STRIDE-th of its moments and finishes it.
gradients DATA SCRATCH: two processes' gradients and collectives, where one has no token at deep recursions.
parallel DATA SCRATCH ROUTER: trains in one process and in several, and goes on in another number of them.
gpus DATA SCRATCH: steps on two GPUs, which may not wait for them, and the losses of one.
parallel-kill DATA SCRATCH: kills one of two processes, in the middle of a checkpoint among other places.
end DATA SCRATCH: two processes leave their group and end as any Python does.

A program of its own because forked children may only use autograd if their parent never did; one for all jobs because
its imports take longer than some of them.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import EXPERT, SMALL, TOKEN

from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.convert import separate
from mor_kernels.train import Loader, Tokens, TrainConfig, Trainer, latest, loop, prepare, train
from mor_kernels.train import data as data_module
from mor_kernels.train.text import documents

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
    settings = {**default, **changes}
    with loop.processes(settings["device"]):
        trainer = train(model, TrainConfig(data, str(folder), **settings))
        if trainer.world_size > 1:
            trainer.save_model(folder / "model")


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


def group_of(size):
    """What torchrun tells the processes of a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def together(job, *arguments, size=2, check=True):
    """Calls `job(*arguments)` in `size` processes of a group. If one dies, the others are ended, as torchrun does."""
    environment = group_of(size)
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    running = {start(job, *arguments, **rank, **environment) for rank in ranks}
    results = []
    while running:
        process, result = os.wait()
        running.discard(process)
        results.append(os.waitstatus_to_exitcode(result))
        if results[-1]:
            for other in running:
                os.kill(other, signal.SIGKILL)
    assert not check or not any(results), results
    return results


def assert_same_run(a, b, exact=False):
    """Two runs logged the same losses and ended with the same weights."""
    for one, other in zip(read_metrics(a), read_metrics(b), strict=True):
        if exact:
            assert one == other, (one, other)
        assert one.keys() == other.keys() and one["step"] == other["step"], (one, other)
        for key, value in one.items():
            if value is None or isinstance(value, str):  # where it was made
                assert value == other[key], (one, other)
                continue
            # The same sums in another order: a few fp32 roundings. A token on the border of two depths may move, one
            # of the hundred or so of a step.
            close = {"rtol": 0, "atol": 0.02} if "mix" in key or key in DISCRETE else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(torch.tensor(value), torch.tensor(other[key]), **close, msg=f"{key} {a} {b}")
    paths = [latest(folder / "checkpoints") for folder in (a, b)]
    assert paths[0].name == paths[1].name
    weights = [load_file(path / "model.safetensors") for path in paths]
    states = [{name: tensor for name, tensor in load_file(path / "trainer.safetensors").items()
               if name.startswith("optimizer.")} for path in paths]
    for key, tensor in weights[0].items():
        # Adam divides by the gradient's size, which magnifies roundings where a gradient is next to nothing
        close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(tensor, weights[1][key], **close, msg=f"{key} {a} {b}")
    if (b / "model").exists():
        model = MoR.from_pretrained(b / "model")
        saved = separate(model.state_dict(), model.config)
        assert all(torch.equal(saved[key], tensor) for key, tensor in weights[1].items())
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.shape == states[1][name].shape, name  # whole, however many processes had it
        assert not exact or torch.equal(tensor, states[1][name]), name


DISCRETE = ("sampling_accuracy", "dead_token_ratio", "max_vio")


def parallel(router):
    loop.plot_curves = lambda *_: None
    changes = {"kind": {"expert": EXPERT, "token": TOKEN}[router], "steps": 4, "eval_every": 2, "eval_batches": 1,
               "checkpoint_every": 2, "keep": 2, "log_every": 2, "accumulation": 2}  # fmt: skip
    alone = partial(train_job, batch_size=1, **{**changes, "accumulation": 4, "eval_batches": 2})  # the same batches
    divided = {kind: partial(train_job, batch_size=1, parallel=kind, **changes) for kind in ("ddp", "fsdp")}

    def half(name, finished):
        """A copy of a finished run, as if it had ended at its first checkpoint."""
        shutil.copytree(finished, scratch / name)
        shutil.rmtree(latest(scratch / name / "checkpoints"))
        shutil.rmtree(scratch / name / "model", ignore_errors=True)
        return scratch / name

    one = scratch / "one"
    assert status(start(alone, one)) == 0
    for kind, job in divided.items():
        whole = scratch / kind
        together(job, whole)
        assert_same_run(one, whole)
        resumed = half(f"{kind}-resumed", whole)
        together(job, resumed)
        assert_same_run(whole, resumed, exact=True)
    moved = half("one-fsdp", one)
    together(divided["fsdp"], moved)
    assert_same_run(one, moved)
    moved = half("fsdp-one", scratch / "fsdp")
    assert status(start(alone, moved)) == 0
    assert_same_run(one, moved)
    if router == "expert":
        for kind, finished in (("ddp", "fsdp"), ("fsdp", "ddp")):
            moved = half(f"{finished}-{kind}", scratch / finished)
            together(divided[kind], moved)
            assert_same_run(one, moved)
        # A sum of three depends on its order, which may not depend on how long the processes have run.
        whole = scratch / "three"
        together(divided["ddp"], whole, size=3)
        resumed = half("three-resumed", whole)
        together(divided["ddp"], resumed, size=3)
        assert_same_run(whole, resumed, exact=True)

    def elsewhere():
        folder = scratch / "ddp" if os.environ["RANK"] == "0" else scratch / "nowhere"
        try:
            divided["ddp"](folder)
        except ValueError as error:
            assert "out: expected a folder that all processes share" in str(error), error
        else:
            raise AssertionError("two processes went on from different checkpoints")

    together(elsewhere)
    print("the same runs")


def parallel_kill():
    from torch.distributed.tensor import DTensor

    full_tensor = DTensor.full_tensor  # once a step, and for each tensor of a checkpoint
    DTensor.full_tensor = lambda self: (tick(), full_tensor(self))[1]
    sys.addaudithook(audit)

    def job(folder, rank=-1, moment=-1):
        global kill_at, watched
        watched = str(folder)
        kill_at = moment if int(os.environ["RANK"]) == rank else -1
        train_job(folder, parallel="fsdp")
        watched = ""

    save = Trainer.save

    def save_and_note(trainer):
        save(trainer)
        (scratch / f"moments-{os.environ['RANK']}").write_text(str(count))

    Trainer.save = save_and_note
    together(job, scratch / "whole")
    expected = train_result(scratch / "whole")
    whole = [int((scratch / f"moments-{rank}").read_text()) for rank in (0, 1)]  # up to the end of the last checkpoint
    for rank, kills in ((0, 3), (1, 2)):
        moments = whole[rank]
        assert moments > 100, moments
        for kill in range(kills):
            # the last one in the last checkpoint
            moment = (2 * kill + 1) * moments // (2 * kills)
            folder = scratch / f"{rank}-{moment}"
            assert -signal.SIGKILL in together(job, folder, rank, moment, check=False)
            together(job, folder)
            assert train_result(folder) == expected, f"process {rank} killed at moment {moment}: another result"
    print("nothing is lost")


def gpus():
    for kind in ("ddp", "fsdp"):
        together(gpu_job, kind)
    for router in (EXPERT, TOKEN):
        job = partial(train_job, kind=router, device="cuda", precision="float32", steps=9, batch_size=2)
        folders = [scratch / f"{router['router']}-{name}" for name in ("one", "ddp", "fsdp")]
        assert status(start(partial(job, accumulation=2), folders[0])) == 0
        for folder, kind in zip(folders[1:], ("ddp", "fsdp")):
            together(partial(job, parallel=kind), folder)
            for one, other in zip(read_metrics(folders[0]), read_metrics(folder), strict=True):
                # sums in another order, over nine steps
                assert math.isclose(one.get("loss", 0), other.get("loss", 0), rel_tol=1e-4), (kind, one, other)
    print("no step waits, and losses are equal")


def gpu_job(kind):
    with loop.processes("cuda"):
        torch.manual_seed(0)
        model = MoR(MoRConfig(**SMALL, **{**EXPERT, "cap_warmup_steps": 0}))
        trainer = Trainer(model, TrainConfig(
            data, str(scratch / kind), batch_size=2, accumulation=2, sequence_length=32, eval_every=0, parallel=kind
        ))  # fmt: skip
        assert trainer.bf16 and (trainer.graphs is None) == (kind == "fsdp")
        for trainer.step in range(3):
            trainer._train_step()
        torch.cuda.set_sync_debug_mode("error")
        trainer.step = 3
        trainer._train_step()
        torch.cuda.set_sync_debug_mode("default")
        trainer.step = 4
        trainer.save()


def gradients():
    together(gradients_job)
    print("the same gradients")


def gradients_job():
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from mor_kernels.train.parallel import Shards, average_gradients, share

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                seen[function._opname.strip("_")] += 1
            return function(*args, **(kwargs or {}))

    vocabulary, micro_steps = SMALL["vocab_size"], 2

    def whole(value):
        return value.full_tensor() if isinstance(value, DTensor) else value

    def batch(rank, micro, length):
        ids = torch.randint(vocabulary // 2, (2, length), generator=torch.Generator().manual_seed(2 * rank + micro))
        return ids + rank * (vocabulary // 2)

    def make(kind, recursions, **changes):
        torch.manual_seed(0)
        middle = "middle" in changes.get("sharing", "middle")
        layers = {"num_recursions": recursions, "num_hidden_layers": 2 * recursions + 2 * middle}
        model = MoR(MoRConfig(**{**SMALL, **kind, **layers, **changes}))
        model.activation_checkpointing = recursions == 3
        if model.config.router == "token_choice":  # process 0's tokens take all recursions, process 1's only one
            with torch.no_grad():
                model.embed_tokens.weight[:, 0] = torch.arange(vocabulary).lt(vocabulary // 2) * 6.0 - 3
                model.routers[0].weight[:, 0] = torch.arange(recursions) * 3.0
                model.router_bias.zero_()
        return model

    relaxed = {"lora_rank": 2, "recursion_encoding": True}  # each recursion has parameters of its own
    with loop.processes("cpu") as rank:
        for kind, recursions, changes in (
            (EXPERT, 2, {}),
            (EXPERT, 3, {"aux": "router", "aux_coeff": 0.0, **relaxed, "kv": "shared"}),  # with unused parameters
            (TOKEN, 3, {"sharing": "cycle", **relaxed}),
            (TOKEN, 2, {"sharing": "cycle", "kv": "hybrid", "gate": "every_step"}),
        ):
            token = kind is TOKEN
            # Expert-choice keeps no token of process 1's sequences, of one token each, after the first recursion.
            lengths = (16, 16) if token else (16, 1)
            alone, depths = make(kind, recursions, **changes), []
            for micro in range(micro_steps):
                for other in range(2):
                    ids = batch(other, micro, lengths[other])
                    output = alone(ids, ids)
                    (output.loss / 2 / micro_steps).backward()
                    depths.append(output.depths.flatten())
                    assert output.depths.max() == (1 if other else recursions)
            alone.update_router_bias(torch.cat(depths) if rank == 0 else torch.zeros(0, dtype=torch.int64))
            norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])

            for parallel in ("ddp", "fsdp"):
                model = make(kind, recursions, **changes)
                if rank:
                    torch.nn.init.zeros_(model.norm.weight)  # another one's weights count
                share(model)
                shards = Shards(model, torch.device("cpu"), bf16=False) if parallel == "fsdp" else None
                parameters = dict(model.named_parameters())
                for _ in range(2):
                    seen, depths = Counter(), []
                    with Collectives():
                        for micro in range(micro_steps):
                            if shards:
                                shards.begin(micro == micro_steps - 1)
                            ids = batch(rank, micro, lengths[rank])
                            output = model(ids, ids)
                            (output.loss / micro_steps).backward()
                            depths.append(output.depths)
                        if shards:
                            shards.end()
                        else:
                            average_gradients(parameters.values())
                    case = f"{kind} {recursions} {parallel} {rank}"
                    for (name, want), (own_name, got) in zip(alone.named_parameters(), parameters.items(), strict=True):
                        assert name == own_name and isinstance(got, DTensor) == (parallel == "fsdp")
                        assert (want.grad is None) == (got.grad is None), f"{case} {name}"
                        if want.grad is not None:
                            # fp32 sums in another order
                            difference = (whole(got.grad) - want.grad).abs().max()
                            assert difference <= 1e-5 * want.grad.abs().max() + 1e-7, f"{case} {name} {difference}"
                    total = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
                    torch.testing.assert_close(whole(total), norm)
                    reduced = sum(parameter.grad is not None for parameter in parameters.values())
                    for parameter in parameters.values():
                        parameter.grad = None
                    # The shared layers and the root once a step, whatever the recursions and micro-steps; the ends, as
                    # FSDP2 does: the first one before and after, since it is freed, the last one once.
                    ends = 2 * model.config.has_own_ends
                    groups = len(model.layers) + 1
                    gathers = groups - ends + ends // 2 * 3 * micro_steps
                    if parallel == "fsdp":
                        assert seen == {"allgather_base": gathers, "reduce_scatter_base": groups}, f"{case} {seen}"
                    else:
                        assert seen == {"allreduce": reduced}, f"{case} {seen}"
                if token:
                    model.update_router_bias(torch.cat(depths))
                    assert torch.equal(model.router_bias, alone.router_bias), case
                    assert model.router_bias.sign().tolist() == ([-1, 1, -1] if recursions == 3 else [0, 0]), case

        # bf16: everything gathered is bf16, what the optimizer sees is fp32, and so is the bias
        model = make(TOKEN, 2)
        ids = batch(rank, 0, 16)
        want = model(ids, ids).loss.item()
        shards = Shards(model, torch.device("cpu"), bf16=True)
        parameters, dtypes = list(model.parameters()), set()
        model.layers[1].register_forward_pre_hook(lambda layer, _: dtypes.update(p.dtype for p in layer.parameters()))
        loss = model(ids, ids).loss
        loss.backward()
        shards.end()
        assert dtypes == {torch.bfloat16} and loss.dtype == model.router_bias.dtype == torch.float32
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in parameters)
        assert loss.item() != want and abs(loss.item() / want - 1) < 2**-6


def end():
    """One that is held keeps gloo's threads running while the interpreter ends, which aborts some runs."""
    import torch.distributed as dist

    def train_in_parts():
        from mor_kernels.train.parallel import Shards

        model = MoR(MoRConfig(**SMALL))
        shards = Shards(model, torch.device("cpu"), bf16=False)
        ids = torch.arange(16).view(2, 8)
        model(ids, ids).loss.backward()
        shards.end()
        torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
        model.state_dict()["norm.weight"].full_tensor()

    environment = group_of(2)
    other = os.fork()
    rank = str(int(not other))
    os.environ.update(environment, RANK=rank, LOCAL_RANK=rank)
    with loop.processes("cpu"):
        dist.barrier()
        if hasattr(torch.cpu.Stream, "record_event"):  # FSDP2 runs on a CPU
            train_in_parts()
        groups = list(dist.distributed_c10d._world.pg_map)
    gc.collect()
    references = [sys.getrefcount(group) for group in groups]  # the list's, the variable's and the argument
    assert set(references) == {3}, f"{references} references"
    assert not other or status(other) == 0
    print("nothing is held")


def main(kind, data_folder, scratch_folder, *rest):
    global data, scratch
    data, scratch = data_folder, Path(scratch_folder)
    jobs = {"gradients": gradients, "gpus": gpus, "parallel": parallel, "parallel-kill": parallel_kill, "end": end}
    if kind in jobs:
        jobs[kind](*rest)
    else:
        kill_everywhere(kind, int(rest[0]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # it warns of what it can't hook into
    torch.optim.AdamW([torch.zeros(1)])  # imports a thousand modules, once for all children
    for line in sys.stdin:
        arguments, printed = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.alarm(300)
            file = os.open(printed, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1), os.dup2(file, 2)
            main(*arguments)
            break
        print(status(pid), flush=True)
