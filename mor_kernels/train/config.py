"""The settings of a run, as one frozen dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# By the annotation of a setting: how messages call it, and the types that it may have.
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]]
_KINDS = {"str": ("a string", str), "int": ("an integer", int), "float": ("a number", (int, float)),
          "bool": ("true or false", bool), "bool | None": ("true, false or null", (bool, type(None)))}


def _is_a(kind: str, value: object) -> bool:
    return isinstance(value, _KINDS[kind][1]) and ("bool" in kind or not isinstance(value, bool))


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; the model has its own config. Raises ValueError for a setting out of range.

    A step trains on `batch_size * accumulation` sequences (times the number of data-parallel processes). `data` is a
    folder that `prepare` wrote, whose last `validation` share is held out; `out` receives metrics.jsonl, curves.png
    and checkpoints/.
    """

    data: str
    out: str
    steps: int = 1000  #: of the optimizer
    batch_size: int = 8  #: sequences of a micro-step, on each process
    accumulation: int = 1  #: micro-steps of a step
    sequence_length: int = 512  #: tokens
    learning_rate: float = 3e-3  #: the peak
    schedule: str = "trapezoid"  #: or "cosine"
    warmup: float = 0.05  #: share of the steps
    cooldown: float = 0.2  #: share of the steps, trapezoid only
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  #: on matrices only
    clip: float = 1.0  #: largest norm of the whole gradient; inf: no limit
    seed: int = 0  #: order of the training data
    validation: float = 0.01  #: share of the tokens that is held out, at their end
    device: str = "auto"  #: CUDA where there is one, else the CPU
    precision: str = "auto"  #: "float32", or "bfloat16": computed on copies of fp32 weights; auto: bfloat16 on CUDA
    #: launch a micro-step's forward and backward pass as one CUDA graph; null: on CUDA, but for "fsdp"
    cuda_graphs: bool | None = None
    activation_checkpointing: bool = False  #: compute each layer twice and keep its input only: less memory, more time
    parallel: str = "ddp"  #: under torchrun: each process has the whole model, or with "fsdp" a part of it
    log_every: int = 10  #: steps; a line has the means of so many
    eval_every: int = 100  #: steps; 0: never
    eval_batches: int = 8  #: of `batch_size` held-out sequences on each process, or as many as there are
    checkpoint_every: int = 100  #: steps
    keep: int = 3  #: checkpoints left on disk
    resume: bool = True  #: go on from the latest checkpoint in `out`, if there is one
    progress: bool = True  #: show a progress bar

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if field.name != "betas" and not _is_a(kind, value):
                raise ValueError(f"{field.name}: expected {_KINDS[kind][0]}, got {value!r}")
        for name in ("steps", "batch_size", "accumulation", "sequence_length", "log_every", "eval_batches",
                     "checkpoint_every", "keep"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for name in ("eval_every", "seed"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        # Written so that NaN fails. No clipping is clip=inf.
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate: expected a finite number above 0, got {self.learning_rate}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: expected a finite number of at least 0, got {self.weight_decay}")
        if not self.clip > 0:
            raise ValueError(f"clip: expected a number above 0, got {self.clip}")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation: expected a share in (0, 1), got {self.validation}")
        betas = self.betas
        if not (isinstance(betas, (tuple, list)) and len(betas) == 2
                and all(_is_a("float", beta) and 0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {betas!r}")
        for name, allowed in (("schedule", ("trapezoid", "cosine")), ("precision", ("auto", "float32", "bfloat16")),
                              ("parallel", ("ddp", "fsdp"))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
        if not (self.warmup >= 0 and self.cooldown >= 0 and self.warmup + self.cooldown <= 1):
            raise ValueError("warmup, cooldown: expected shares that sum to at most 1, got "
                             f"{self.warmup}, {self.cooldown}")
