"""The training loop: one optimizer step after another, exactly resumable."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Before a process group is made: imported afterwards, as TorchDynamo does, the defaults of its functions hold the group
# for ever, and gloo's threads still run when the process exits, which aborts it now and then.
import torch.distributed.nn
from tqdm import tqdm

from ..doctor import package_version
from ..files import has_form, sync
from ..model import MoR
from . import checkpoint
from .config import TrainConfig
from .data import Loader, Tokens, unigram_entropy
from .metrics import append, drop_after, plot_curves
from .passes import Graphs, parameters_in
from .schedule import cosine, trapezoid


def train(model: MoR, config: TrainConfig) -> Trainer:
    """Trains `model` (a MoR) and returns the finished Trainer.

    Under torchrun the processes train data-parallel: every one reads its share of each step's sequences, and the
    gradients are averaged. With parallel="fsdp" the parameters of `model` are DTensors then; each checkpoint is a
    folder for `MoR.from_pretrained`.
    """
    with processes(config.device):
        trainer = Trainer(model, config)
        trainer.run()
        return trainer


def find_device(name: str) -> str:
    """The device that ``name`` stands for: "auto" is CUDA where there is one. A ValueError if it isn't there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected auto, cpu or a device of this machine, got {name!r}: {reason}") from None
    return name


@contextmanager
def processes(device: str = "auto") -> Iterator[int]:
    """Joins the processes that torchrun started, if it did and they aren't joined yet; yields this one's rank."""
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if started:
        cuda = device == "auto" and torch.cuda.is_available() or device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        from . import parallel  # likewise before a process group is made

        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield dist.get_rank() if dist.is_initialized() else 0
    finally:
        if started:
            parallel.forget_groups()
            dist.destroy_process_group()
            gc.collect()  # a model in parts, which is in cycles, holds its groups too


class Trainer:
    """A run: the model, its optimizer and its place in the data.

    `run()` trains up to `config.steps`. A run stopped after any step and resumed gives, on the CPU, the same bits as
    one that was never stopped. Building it raises ValueError where model, data and checkpoint don't fit together.
    """

    def __init__(self, model: MoR, config: TrainConfig) -> None:
        self.config = config
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if config.parallel == "fsdp" and self.world_size == 1:
            raise ValueError('parallel: expected "ddp" for a single process, got "fsdp", which divides the model among '
                             "those that torchrun starts")
        self.device = torch.device(find_device(config.device))
        self.bf16 = config.precision == "bfloat16" or config.precision == "auto" and self.device.type == "cuda"
        self.model = model.to(self.device)
        self.model.activation_checkpointing = config.activation_checkpointing
        self.graphs = self._new_graphs()
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.metrics, self.checkpoints = self.out / "metrics.jsonl", self.out / "checkpoints"
        tokens = Tokens(config.data)
        part = self._load(tokens)
        self.shards = None
        if self.world_size > 1:
            from . import parallel  # only where it's needed: importing FSDP takes a second

            parallel.share(self.model)
            if config.parallel == "fsdp":
                self.shards = parallel.Shards(self.model, self.device, self.bf16)
        self.parameters, self.optimizer = self._new_optimizer()

        self.step = 0
        self.interrupted = False
        self.names: list[str] = []  # of the columns of `window`
        self.window: list[torch.Tensor] = []  # one row a step since the last log line, on the device
        self.depths = torch.zeros(model.config.num_recursions + 1, dtype=torch.int64, device=self.device)
        # The same of this process alone, since the last time that the processes shared it.
        self.own_window: list[torch.Tensor] = []
        self.own_depths = torch.zeros_like(self.depths)
        # What has to be the same for a resumed run to see the same data.
        self.data: dict[str, Any] = {
            "tokens": tokens.fingerprint, "seed": config.seed, "validation": config.validation,
            "sequence_length": config.sequence_length,
            "sequences per step": config.batch_size * config.accumulation * self.world_size,
        }  # fmt: skip
        path, incomplete = self._latest()
        if path:
            self._resume(path)
        if self.rank == 0:
            for folder, fault in incomplete.items():
                assert path is not None  # else _latest has raised
                warnings.warn(f"{folder}: not a complete checkpoint, going on from {path.name}: {fault}", stacklevel=2)
            tokens.verify()
        if not path:
            self.unigram_entropy = unigram_entropy(part)
        if self.rank == 0:
            checkpoint.tidy(self.checkpoints, config.keep)
            drop_after(self.metrics, self.step)
            if not self.metrics.stat().st_size:
                gpu = self.device.type == "cuda"
                self._write({"step": 0, "unigram_entropy": self.unigram_entropy, "training_tokens": len(part),
                             "parameters": sum(p.numel() for p in model.parameters()),
                             "device": torch.cuda.get_device_name(self.device) if gpu else "CPU",
                             "torch": str(torch.__version__), "triton": package_version("triton")})

    def _new_graphs(self) -> Graphs | None:
        wanted, on_gpu, fsdp = self.config.cuda_graphs, self.device.type == "cuda", self.config.parallel == "fsdp"
        if wanted and not on_gpu:
            raise ValueError("cuda_graphs: expected false without a GPU, got true")
        if wanted and fsdp:
            raise ValueError('cuda_graphs: expected false with parallel "fsdp", whose gathering and reducing can\'t be '
                             "part of a graph, got true")
        if wanted or wanted is None and on_gpu and not fsdp:
            return Graphs(self.model.parameters(), self._forward_backward)
        return None

    def _load(self, tokens: Tokens) -> Tokens:
        """Makes the loaders; returns the share of the tokens that is trained on."""
        config, longest = self.config, self.model.config.max_position_embeddings
        if config.sequence_length > longest:
            raise ValueError(f"sequence_length: expected at most the model's max_position_embeddings {longest}, got "
                             f"{config.sequence_length}")
        tokens.check_vocab(self.model.config.vocab_size)
        part, held_out = tokens.split(config.validation)
        place = {"rank": self.rank, "world_size": self.world_size}
        if config.eval_every:
            window = config.sequence_length + 1
            if len(tokens) < 2 * window:
                raise ValueError(f"sequence_length: expected at least {2 * window} tokens, for a window of "
                                 f"{config.sequence_length} in the training and one in the validation share, found "
                                 f"{len(tokens)} in {config.data}")
            if len(held_out) < window:
                share = window / len(tokens)
                digits = 1 - math.floor(math.log10(share))
                share = math.ceil(share * 10**digits) / 10**digits  # up, so that this share is enough
                raise ValueError(f"validation: expected a share of at least {share}, one window of sequence_length "
                                 f"{config.sequence_length}, got {config.validation} of {len(tokens)} tokens")
            self.held_out = Loader(held_out, config.sequence_length, config.batch_size, **place)
            whole = self.held_out.windows // (config.batch_size * self.world_size)
            self.eval_batches = max(1, min(config.eval_batches, whole))
        self.loader = Loader(part, config.sequence_length, config.batch_size, accumulation=config.accumulation,
                             seed=config.seed, **place)
        return part

    def _new_optimizer(self) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
        """The parameters, in the order in which it has them, and AdamW."""
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            # The recursion encoding is a table of elementwise gains, not a matrix that multiplies.
            decays = parameter.ndim >= 2 and name != "recursion_encoding"
            (matrices if decays else others).append(parameter)
        groups = [{"params": matrices, "weight_decay": self.config.weight_decay},
                  {"params": others, "weight_decay": 0.0}]
        return [*matrices, *others], torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=self.config.betas,
                                                       fused=self.device.type == "cuda")

    def _latest(self) -> tuple[Path | None, dict[Path, str]]:
        """The checkpoint to go on from, the same for all processes, and what is wrong with those passed over."""
        path, incomplete = checkpoint.latest(self.checkpoints), checkpoint.incomplete(self.checkpoints)
        if path and not self.config.resume:
            raise FileExistsError(f"{path}: a checkpoint of another run; set resume, or choose another `out`")
        if incomplete and not path:
            raise ValueError(f"{self.checkpoints}: expected a complete checkpoint to go on from, found none; remove it "
                             f"to start anew. {'; '.join(incomplete.values())}")
        self._agree_on(path)
        return path, incomplete

    def run(self) -> None:
        """Trains until `config.steps`, or until SIGINT or SIGTERM: then the step is finished, saved, and the run ends.

        Several processes stop together, at the next log line. Raises FloatingPointError when a loss or gradient isn't
        finite; the checkpoints are left as they were.
        """
        config = self.config
        with _signals() as stop, tqdm(total=config.steps, initial=self.step, unit="step", dynamic_ncols=True,
                                      disable=not config.progress or self.rank > 0) as bar:
            self._restart_clock()
            while self.step < config.steps and not self.interrupted:
                self._train_step()
                self.step += 1
                bar.update()
                last = self.step == config.steps
                self.interrupted = self._agreed(stop) and not last
                if last or self.step % config.log_every == 0:
                    self._log(bar)
                if config.eval_every and (last or self.step % config.eval_every == 0):
                    self._write({"step": self.step, **self.evaluate()})
                    self._plot()
                    self._restart_clock()
                if last or self.interrupted or self.step % config.checkpoint_every == 0:
                    self.save()
                    self._restart_clock()

    def _train_step(self) -> None:
        config, model = self.config, self.model
        if config.schedule == "trapezoid":
            self.rate = trapezoid(self.step, config.steps, config.learning_rate, warmup=config.warmup,
                                  cooldown=config.cooldown)
        else:
            self.rate = cosine(self.step, config.steps, config.learning_rate, warmup=config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.kept = model.kept(config.sequence_length, self.step)
        model.train()
        row: Any = 0  # a tensor after the first micro-step
        reached = []
        for micro in range(config.accumulation):
            if self.shards:
                self.shards.begin(last=micro == config.accumulation - 1)
            terms, depths = self._micro_step(*self._to_device(self.loader.batch(self.step, micro)))
            row = row + terms / config.accumulation
            reached.append(depths)
        if self.shards:
            self.shards.end()
        elif self.world_size > 1:
            from .parallel import average_gradients

            average_gradients(self.parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.shards:
            norm = norm.full_tensor()  # type: ignore[attr-defined]  # a DTensor: of all processes' parts
        torch.nn.utils.clip_grads_with_norm_(self.parameters, config.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        depths = torch.cat(reached)
        model.update_router_bias(depths)
        # Kept on the device: reading a number would make the host wait for it at every step.
        self.own_window.append(torch.cat([row, norm.reshape(1).float()]))
        self.own_depths += torch.stack([(depths == depth).sum() for depth in range(len(self.depths))])

    def _share_metrics(self) -> None:
        """Averages over the processes what each noted since the last time."""
        if not self.own_window:
            return
        rows = torch.stack(self.own_window)
        if self.world_size > 1:
            # Not all_reduce, whose order of summation depends on a number's place among the others, so that a resumed
            # run of three processes or more could log another last bit.
            everyone = [torch.empty_like(rows) for _ in range(self.world_size)]
            dist.all_gather(everyone, rows)
            rows = torch.stack(everyone).mean(0)
            dist.all_reduce(self.own_depths)
        self.window += rows.unbind()
        self.depths += self.own_depths
        self.own_window.clear()
        self.own_depths.zero_()

    def _micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds to the gradients; returns the losses and metrics, stacked, and the depths."""
        sizes = self.kept or None
        settled = self.kept == self.model.kept(self.config.sequence_length)  # capacities have been warmed up
        if not (self.graphs and settled):
            return self._forward_backward(sizes, inputs, targets)
        if self.model.config.router == "token_choice":
            with self._precision():
                sizes = self.model.bounds(inputs)
        terms, depths = self.graphs(sizes, inputs, targets)
        return terms, depths

    def _forward_backward(
        self, sizes: tuple[int, ...] | None, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sizes` of what each recursion takes: the model's `ks`, or its `bounds` for token-choice."""
        name = "bounds" if self.model.config.router == "token_choice" else "ks"
        with self._precision():
            taken: dict[str, Any] = {name: sizes}
            output = self.model(inputs, targets=targets, logits=False, **taken)
            assert output.loss is not None  # since there are targets
            (output.loss / self.config.accumulation).backward()
        terms = {"loss": output.loss, **output.losses, **output.metrics}
        self.names = [*terms, "gradient_norm"]
        return torch.stack([term.detach().float() for term in terms.values()]), output.depths

    def _precision(self) -> AbstractContextManager[None]:
        # `Shards` gathers in bf16 by itself
        return parameters_in(self.model, torch.bfloat16) if self.bf16 and not self.shards else nullcontext()

    def _to_device(self, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        if self.device.type == "cuda":
            return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in batch]
        return [tensor.to(self.device) for tensor in batch]

    def _agreed(self, stop: list[int]) -> bool:
        if self.world_size == 1:
            return bool(stop)
        if self.step % self.config.log_every:
            return False
        flag = torch.tensor(len(stop), device=self.device)
        dist.all_reduce(flag)
        return bool(flag)

    def _read_window(self) -> torch.Tensor:
        """Rows of the steps since the last log line, float64; raises FloatingPointError if one isn't finite."""
        self._share_metrics()
        rows = torch.stack(self.window).double().cpu()
        for step, row in enumerate(rows.tolist(), self.step - len(rows) + 1):
            for name, value in zip(self.names, row):
                if name in ("loss", "gradient_norm") and not math.isfinite(value):
                    kept = checkpoint.latest(self.checkpoints)
                    raise FloatingPointError(
                        f"{name} is {value} at step {step}, so training stopped; last good checkpoint: "
                        f"{kept or 'none'}. A lower learning_rate (now {self.config.learning_rate}) or a longer warmup "
                        "may help")
        return rows

    def _log(self, bar: tqdm) -> None:
        rows = self._read_window()
        counts = self.depths.tolist()
        mix = [count / max(sum(counts[1:]), 1) for count in counts[1:]]
        tokens = (self.step - self._clock[0]) * self.data["sequences per step"] * self.config.sequence_length
        speed = tokens / (time.perf_counter() - self._clock[1])
        line = {"step": self.step, **dict(zip(self.names, rows.mean(0).tolist())), "learning_rate": self.rate,
                "depth_mix": mix, "kept": list(self.kept), "tokens_per_second": speed}
        self.window.clear()
        self.depths.zero_()
        self._write(line)
        bar.set_postfix_str(f"loss {line['loss']:.3f}, {speed:,.0f} tokens/s, depths "
                            + "/".join(f"{share:.0%}" for share in mix))
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._clock = self.step, time.perf_counter()  # evaluation and saving don't count as training time

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Losses in nats on the held-out tokens (language modelling alone, without the routers' own terms).

        "validation_loss" routes by threshold, as generation does; expert-choice models also get
        "validation_loss_topk", which looks at the whole sequence and is only good for comparison with training.
        """
        self.model.eval()
        result: dict[str, Any] = {}
        modes = ("threshold", "topk") if self.model.config.router == "expert_choice" else ("threshold",)
        for mode in modes:
            total, counts = torch.zeros((), device=self.device), torch.zeros_like(self.depths)
            for step in range(self.eval_batches):
                inputs, targets = self._to_device(self.held_out.batch(step))
                with self._precision():
                    output = self.model(inputs, targets=targets, mode=mode, logits=False)
                total += output.losses["lm"] / (self.eval_batches * self.world_size)
                counts += torch.stack([(output.depths == depth).sum() for depth in range(len(counts))])
            if self.world_size > 1:
                dist.all_reduce(total)
                dist.all_reduce(counts)
            suffix = "" if mode == "threshold" else f"_{mode}"
            result[f"validation_loss{suffix}"] = total.item()
            result[f"validation_depth_mix{suffix}"] = (counts[1:] / counts[1:].sum()).tolist()
        self.model.train()
        if self.shards:
            self.shards.end()
        return result

    def save(self) -> None:
        """Writes a checkpoint of the current step, unless a loss, a gradient or a weight isn't finite."""
        if self.window or self.own_window:
            self._read_window()
        own: list[Any] = list(self.parameters)
        if self.shards:
            own = [parameter.to_local() for parameter in own]
        finite = torch.stack([parameter.isfinite().all() for parameter in own]).all().int()
        if self.world_size > 1:
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            raise FloatingPointError(f"weights are not finite after step {self.step}, so no checkpoint was written")
        if self.rank == 0:
            sync(self.metrics)
        state = {"config": asdict(self.config), "data": self.data, "unigram_entropy": self.unigram_entropy,
                 "names": self.names}
        window = torch.stack(self.window) if self.window else torch.empty(0, len(self.names), device=self.device)
        tensors = {"window": window, "depths": self.depths}
        checkpoint.save(self.checkpoints, self.step, self.model, self.optimizer, state, tensors, keep=self.config.keep)
        if self.world_size > 1:
            dist.barrier()

    def save_model(self, directory: str | Path) -> None:
        """Writes the model alone, for `from_pretrained`. Several processes all have to call it, within `processes`."""
        state = checkpoint.whole(self.model.state_dict(), self.rank == 0)
        if self.rank == 0:
            self.model.save_pretrained(directory, state)

    def _agree_on(self, path: Path | None) -> None:
        if self.world_size > 1:
            step = int(path.name.partition("-")[2]) if path else -1
            steps = torch.tensor([step, -step], device=self.device)
            dist.all_reduce(steps, dist.ReduceOp.MAX)
            if steps[0] != -steps[1]:
                raise ValueError(f"out: expected a folder that all processes share, but {self.out} has "
                                 f"{path.name if path else 'no checkpoint'} as its latest checkpoint for process "
                                 f"{self.rank}, and another for others")

    def _resume(self, path: Path) -> None:
        step, state, tensors = checkpoint.load(path, self.model, self.optimizer, partial(self._check_resumed, path))
        self.step, self.unigram_entropy, self.names = step, state["unigram_entropy"], state["names"]
        self.window = list(tensors["window"].to(self.device))
        self.depths = tensors["depths"].to(self.device)

    def _check_resumed(self, path: Path, step: int, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Raises ValueError unless the checkpoint is one of this run, before anything of it is taken over."""
        found = {name: (tensor.dtype, tensor.shape[-1:]) for name, tensor in tensors.items() if tensor.dim()}
        names = state.get("names")
        if not (has_form(state, {"config": dict, "data": dict, "unigram_entropy": float, "names": list})
                and isinstance(names, list) and all(isinstance(name, str) for name in names)
                and found == {"window": (torch.float32, (len(names),)), "depths": (torch.int64, self.depths.shape)}
                and [tensors[name].dim() for name in ("window", "depths")] == [2, 1]):  # fmt: skip
            raise ValueError(f"{path}: expected the state and tensors of a run of this model, got others")
        data = state["data"]
        different = [f"{key}: expected {data.get(key)} (checkpoint), got {value}"
                     for key, value in self.data.items() if data.get(key) != value]
        if different:
            raise ValueError(f"{path}: trained on other data; " + "; ".join(different))
        if step > self.config.steps:
            raise ValueError(f"steps: expected at least {step}, the step of {path}, got {self.config.steps}")

    def _write(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            append(self.metrics, line)

    def _plot(self) -> None:
        if self.rank == 0:
            try:
                plot_curves(self.metrics, self.out / "curves.png")
            except ImportError:
                how = "pip install mor-kernels[plot]"
                warnings.warn(f"curves.png was not drawn: it needs matplotlib ({how})", stacklevel=2)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that a first SIGINT or SIGTERM puts its number into; a second one acts as it always did."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        received.append(number)
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
