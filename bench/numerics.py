"""Errors against float64 as lengths and recursions grow, and training in bf16 beside fp32.

    python bench/numerics.py [--parts ops model training] [--data DIR] [--quick] [--out DIR] [--commit HASH]

ops: each backend of an operator, and PyTorch's own in the same dtype, against float64 of the same (rounded) inputs. An
error is relative: of a vector, the norm of the difference over the norm; of a list of numbers or of one, the difference
over their root mean square. model: logits of random weights that bf16 can hold, against the model in float64, with each
one's own choices of depth and with those of float64. training: the same steps from the same start in bf16 and in fp32,
on tokens that `prepare` wrote to DIR (default: a text that every Python has), beside another seed; its processes run
beside the other parts; one of the models is then compared as in the part before. A part replaces what the same file
recorded of it before. Without a GPU plain PyTorch is measured alone, since Triton's interpreter rounds otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import command_line, environment, new_figure, reason, require, result_path, title, write
from mor_kernels import ops
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.ops import _dispatch
from mor_kernels.train import Loader, Tokens, TrainConfig, Trainer, latest, prepare

PARTS = ("ops", "model", "training")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS, WIDTH, PAGE, LANES = 3, 64, 64, 4  # three heads of queries on one of keys, as in the paper's models
D = 576
FP8 = torch.float8_e4m3fn
THETA = 10000.0
AT_ONCE = 2**28  # numbers of a float64 intermediate
MATH_LONGEST, MASK_LONGEST = 16384, 32768  # where PyTorch holds all scores, or a mask of all pairs

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: int  # of a model's batch, or of its length where that is more
    model_lengths: tuple[int, ...]
    recursions: tuple[int, ...]
    length: int  # where recursions grow
    model: dict
    trained: dict
    train: dict


FULL = Sizes(
    lengths=(256, 1024, 4096, 16384, 65536, 131072), widths=(256, 576, 960, 2048, 8192),
    positions=(256, 1024, 4096, 16384, 65536, 131072, 2**20),
    tokens=8192, model_lengths=(256, 512, 1024, 2048, 4096, 8192), recursions=(1, 2, 3, 4, 6, 8), length=1024,
    model={"vocab_size": 8192},
    trained={"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 512, "cap_warmup_steps": 100},
    train={"steps": 2000, "batch_size": 16, "sequence_length": 512, "log_every": 10, "eval_every": 100},
)  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
QUICK = Sizes(
    lengths=(64, 128), widths=(64, 128), positions=(256, 2**20), tokens=64, model_lengths=(32,),
    recursions=(2,), length=32, model={**SMALL, "vocab_size": 128},
    trained={**SMALL, "num_hidden_layers": 5, "max_position_embeddings": 32, "cap_warmup_steps": 4},
    train={"steps": 10, "batch_size": 4, "sequence_length": 32, "log_every": 1, "eval_every": 5, "validation": 0.03},
)  # fmt: skip
LATE = 0.1  # share of the steps, the last ones, whose mean loss is compared


def errors(got: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """The largest relative error, and their root mean square."""
    require(got.shape == exact.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    difference = got.double() - exact
    if exact.dim() > 1:
        each = difference.norm(dim=-1) / exact.norm(dim=-1)
    else:
        each = difference.abs() / exact.square().mean().sqrt()
    found = {"max": each.max().item(), "rms": each.square().mean().sqrt().item()}
    require(all(map(math.isfinite, found.values())), "a result is not finite")
    return found


# Operators


@dataclass(frozen=True)
class Problem:
    """One operator on inputs of one dtype and size; each implementation gives the tensors that ``exact`` names."""

    op: str
    axis: str  # what grows
    n: int
    dtype: str
    exact: Tensors
    ours: dict[str, Callable[[], Tensors]]
    rivals: dict[str, Callable[[], Tensors]]


class Maker:
    """Problems on a device. Every one has the same random numbers, rounded to its dtype."""

    def __init__(self, device: str, sizes: Sizes):
        self.device, self.sizes = device, sizes

    def normal(self, seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(shape, generator=generator, device=self.device) * scale).to(dtype)

    def backends(self, op: str) -> list[str]:
        if self.device == "cpu":
            return ["eager"]
        names = (*_dispatch.BACKENDS, *_dispatch.SPECIALISTS)
        return [name for name in names if not _dispatch.unavailable(name, op, self.device)]

    def attention(self, n: int, dtype: str, subset: bool) -> Problem:
        """All queries, or every other one over all keys, as a recursion has with shared keys."""
        positions = torch.arange(int(subset), n, 1 + subset, device=self.device)
        shapes = ((len(positions), HEADS, WIDTH), (n, 1, WIDTH), (n, 1, WIDTH), (len(positions), HEADS, WIDTH))
        q, k, v, d_out = (self.normal(i, 1, *shape, dtype=DTYPES[dtype]) for i, shape in enumerate(shapes))

        def ours(backend):
            where = positions[None] if subset else None
            return lambda: named(lambda q, k, v: ops.attention(q, k, v, q_positions=where, backend=backend))

        def sdpa(backends=None):
            mask = torch.arange(n, device=self.device) <= positions[:, None] if subset else None

            def call(q, k, v):
                q, k, v = (t.transpose(1, 2).expand(-1, HEADS, -1, -1) for t in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, mask, is_causal=not subset).transpose(1, 2)

            with sdpa_kernel(backends) if backends else contextlib.nullcontext():
                return named(call)

        def named(call):
            out, *gradients = differentiated(call, (q, k, v), d_out)
            found = dict(zip(("out", "d_q", "d_k", "d_v"), (out, *gradients)))
            if not subset:  # the first query sees one key: its exact gradient is 0, to which nothing is relative
                found["d_q"] = found["d_q"][:, 1:]
            return found

        rivals = {}
        if not subset or n <= MASK_LONGEST:
            rivals["SDPA"] = sdpa
        if n <= MATH_LONGEST:
            rivals["SDPA math"] = lambda: sdpa([SDPBackend.MATH])
        out, d_q, d_k, d_v = exact_attention(q[0], k[0], v[0], d_out[0], positions)
        exact = {"out": out, "d_q": d_q if subset else d_q[:, 1:], "d_k": d_k, "d_v": d_v}
        name = "attention, half of the queries" if subset else "attention, causal"
        return Problem(name, "N", n, dtype, exact, {b: ours(b) for b in self.backends("attention")}, rivals)

    def decode(self, n: int, dtype: str, fp8: str | None = None) -> Problem:
        """A query a lane over ``n`` keys. ``fp8`` caches: against what the cache "held", or what was "given" to it."""
        q = self.normal(0, LANES, HEADS, WIDTH, dtype=DTYPES[dtype])
        k, v = (self.normal(i, LANES * n, 1, WIDTH, dtype=DTYPES[dtype]) for i in (1, 2))
        pages = LANES * n // PAGE
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(self.device)
        slots = (order[:, None] * PAGE + torch.arange(PAGE, device=self.device)).flatten()
        table, lens = order.int().view(LANES, -1), torch.full((LANES,), n, dtype=torch.int32, device=self.device)
        scales = [t.float().abs().amax().view(1) / 448 if fp8 else None for t in (k, v)]
        caches = [t.new_zeros(pages, PAGE, 1, WIDTH).to(FP8 if fp8 else t.dtype) for t in (k, v)]
        ops.kv_append_(k, v, *caches, slots, k_scale=scales[0], v_scale=scales[1])
        held = [t.flatten(0, 1).double()[slots] * (1 if s is None else s) for t, s in zip(caches, scales)]
        keys, values = held if fp8 != "given" else (k.double(), v.double())

        def attend(keys, values, q=q):
            keys, values = (t.view(LANES, 1, n, WIDTH).expand(-1, HEADS, -1, -1) for t in (keys, values))
            return {"out": F.scaled_dot_product_attention(q[:, :, None], keys, values)[:, :, 0]}

        def ours(backend):
            return lambda: {"out": ops.paged_attention(
                q, *caches, table, lens, k_scale=scales[0], v_scale=scales[1], backend=backend)}  # fmt: skip

        s = torch.einsum("lhd,lkd->lhk", q.double(), keys.view(LANES, n, WIDTH)) * WIDTH**-0.5
        exact = torch.einsum("lhk,lkd->lhd", s.softmax(-1), values.view(LANES, n, WIDTH))
        name = "decode" if fp8 is None else f"decode, fp8 cache, against what was {fp8}"
        backends = self.backends("paged_attention")
        rival = {"SDPA": lambda: attend(*(t.to(q.dtype) for t in held))}
        return Problem(name, "N", n, dtype, {"out": exact}, {b: ours(b) for b in backends}, rival)

    def route(self, axis: str, n: int, dtype: str) -> Problem:
        """Logits, and which half of the tokens they keep: its error is the share that float64 wouldn't."""
        length, width = (n, D) if axis == "N" else (self.sizes.tokens, n)
        x, k = self.normal(0, 1, length, width, dtype=DTYPES[dtype]), length // 2
        weight = self.normal(1, width, dtype=DTYPES[dtype], scale=width**-0.5)
        exact = x[0].double() @ weight.double()
        best = exact.topk(k).indices

        def found(logits, kept):
            share = 1 - torch.isin(kept, best).double().mean()
            return {"logits": logits, "kept": 1 + share}

        def ours(backend):
            def call():
                routed = ops.route(x, weight, k, backend=backend)
                return found(routed.logits[0], routed.indices[0])

            return call

        def plain():
            logits = F.linear(x[0], weight[None])[:, 0]
            return found(logits, logits.topk(k).indices)

        # 1 and a share of tokens, so that its error relative to 1 is that share
        exact = {"logits": exact, "kept": torch.ones((), dtype=torch.float64, device=self.device)}
        return Problem("route", axis, n, dtype, exact, {b: ours(b) for b in self.backends("route")}, {"linear": plain})

    def rope(self, n: int, dtype: str) -> Problem:
        """256 positions up to ``n``."""
        positions = torch.arange(n - 256, n, device=self.device)
        x, half = self.normal(0, 256, HEADS, WIDTH, dtype=DTYPES[dtype]), WIDTH // 2

        def turn(x, in_dtype, angle_dtype):
            frequency = THETA ** (-torch.arange(half, device=self.device, dtype=angle_dtype) / half)
            angle = (positions[:, None].to(angle_dtype) * frequency)[:, None]
            cos, sin = angle.cos().to(in_dtype), angle.sin().to(in_dtype)
            first, second = x.to(in_dtype).chunk(2, -1)
            return {"out": torch.cat((first * cos - second * sin, second * cos + first * sin), -1)}

        ours = {b: lambda b=b: {"out": ops.rope(x, positions, THETA, backend=b)} for b in self.backends("rope")}
        rivals = {"as models do": lambda: turn(x, x.dtype, torch.float32)}
        return Problem("rope", "position", n, dtype, turn(x, torch.float64, torch.float64), ours, rivals)

    def rms_norm(self, n: int, dtype: str) -> Problem:
        x, d_out = (self.normal(i, n, D, dtype=DTYPES[dtype]) for i in (0, 1))
        weight = 1 + self.normal(2, D, dtype=DTYPES[dtype], scale=0.1)

        def named(call, to=lambda t: t):
            found = differentiated(call, [to(t) for t in (x, weight)], to(d_out))
            return dict(zip(("out", "d_x", "d_weight"), found))

        def plain(x, weight):
            return F.rms_norm(x, (D,), weight, 1e-5)

        def ours(backend):
            return lambda: named(lambda x, weight: ops.rms_norm(x, weight, backend=backend)[1])

        backends = {b: ours(b) for b in self.backends("add_rms_norm")}
        exact = named(plain, torch.Tensor.double)
        return Problem("rms_norm", "N", n, dtype, exact, backends, {"F.rms_norm": lambda: named(plain)})

    def linear_cross_entropy(self, n: int, dtype: str) -> Problem:
        vocabulary = self.sizes.model["vocab_size"]
        x = self.normal(0, n, D, dtype=DTYPES[dtype])
        weight = self.normal(1, vocabulary, D, dtype=DTYPES[dtype], scale=D**-0.5)
        generator = torch.Generator(self.device).manual_seed(2)
        targets = torch.randint(vocabulary, (n,), generator=generator, device=self.device)

        def named(call):
            one = torch.ones((), dtype=torch.float32, device=self.device)
            return dict(zip(("loss", "d_x", "d_weight"), differentiated(call, (x, weight), one)))

        def plain(x, weight):
            return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

        def ours(backend):
            return lambda: named(lambda x, weight: ops.linear_cross_entropy(x, weight, targets, backend=backend))

        exact = exact_cross_entropy(x, weight, targets)
        backends = {b: ours(b) for b in self.backends("cross_entropy_")}
        return Problem("linear_cross_entropy", "N", n, dtype, exact, backends, {"F.linear": lambda: named(plain)})

    def problems(self) -> Iterator[Problem]:
        sizes = self.sizes
        for dtype in DTYPES:
            for n in sizes.lengths:
                for subset in (False, True):
                    yield self.attention(n, dtype, subset)
            for n in sizes.lengths:
                yield self.decode(n, dtype)
                if dtype == "bf16":
                    yield self.decode(n, dtype, "held")
                    yield self.decode(n, dtype, "given")
            for axis, numbers in (("N", sizes.lengths), ("D", sizes.widths)):
                for n in numbers:
                    yield self.route(axis, n, dtype)
            for n in sizes.positions:
                yield self.rope(n, dtype)
            for n in sizes.lengths:
                yield self.rms_norm(n, dtype)
                yield self.linear_cross_entropy(n, dtype)


def differentiated(
    call: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor], d_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients of the inputs; of a batch of one, without that dimension."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = call(*leaves)
    return tuple(t.detach() for t in (out, *torch.autograd.grad(out, leaves, d_out)))


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, positions: torch.Tensor
) -> list[torch.Tensor]:
    """Output and gradients in float64, a block of queries at a time over the keys that it may see; positions ascend."""
    q, d_out = (t.double().transpose(0, 1) for t in (q, d_out))
    k, v = (t.double()[:, 0] for t in (k, v))
    out, d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    size = max(1, AT_ONCE // (HEADS * len(k)))
    for rows in (slice(i, i + size) for i in range(0, len(positions), size)):
        seen = int(positions[rows][-1]) + 1
        keys, values, d_rows = k[:seen], v[:seen], d_out[:, rows]
        s = q[:, rows] @ keys.T * WIDTH**-0.5
        s.masked_fill_(torch.arange(seen, device=k.device) > positions[rows, None], -torch.inf)
        p = s.softmax(-1)
        out[:, rows] = p @ values
        d_v[:seen] += p.flatten(0, 1).T @ d_rows.flatten(0, 1)
        d_s = p * (d_rows @ values.T - (d_rows * out[:, rows]).sum(-1, keepdim=True)) * WIDTH**-0.5
        d_q[:, rows] = d_s @ keys
        d_k[:seen] += d_s.flatten(0, 1).T @ q[:, rows].flatten(0, 1)
    return [t[None] for t in (out.transpose(0, 1), d_q.transpose(0, 1), d_k[:, None], d_v[:, None])]


def exact_cross_entropy(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Tensors:
    """Sum and gradients in float64, some rows at a time."""
    weight, loss, d_x = weight.double(), torch.zeros_like(x[0, 0], dtype=torch.float64), []
    d_weight = torch.zeros_like(weight)
    for rows, wanted in zip(x.split(AT_ONCE // len(weight)), targets.split(AT_ONCE // len(weight))):
        rows = rows.double()
        logits = rows @ weight.T
        loss += F.cross_entropy(logits, wanted, reduction="sum")
        d_logits = logits.softmax(-1)
        d_logits[torch.arange(len(wanted), device=x.device), wanted] -= 1
        d_x.append(d_logits @ weight)
        d_weight += d_logits.T @ rows
    return {"loss": loss, "d_x": torch.cat(d_x), "d_weight": d_weight}


def measured(problem: Problem) -> list[dict]:
    """A row for each implementation and result; none for a backend that doesn't take such arguments."""
    rows = []
    for ours, implementations in ((True, problem.ours), (False, problem.rivals)):
        for name, call in implementations.items():
            row = {"op": problem.op, "axis": problem.axis, "n": problem.n, "dtype": problem.dtype, "impl": name,
                   "ours": ours}  # fmt: skip
            try:
                found = call()
                rows += [row | {"of": of, **errors(found[of], exact), "failed": None} for of, exact in
                         problem.exact.items()]  # fmt: skip
            except Exception as error:
                if "is not available" not in str(error):
                    traceback.print_exc()
                    rows += [row | {"of": of, "failed": reason(error)} for of in problem.exact]
    return rows


def measure_ops(device: str, sizes: Sizes) -> list[dict]:
    rows: list[dict] = []
    for problem in Maker(device, sizes).problems():
        rows += measured(problem)
        del problem
    return rows


# The model

ROUTERS = {  # by what rows are called: router and mode
    "expert-choice, top-k": ("expert_choice", "topk"),
    "expert-choice, threshold": ("expert_choice", "threshold"),
    "token-choice": ("token_choice", "threshold"),
}


@contextlib.contextmanager
def replayed(model: MoR, depths: torch.Tensor) -> Iterator[None]:
    """Within, the model's tokens take these depths (B, N), whatever its routers say; gates stay its own."""
    route, choose, calls = ops.route, ops.choose_depths, itertools.count()

    def routed(x, weight, k, **options):
        indices = (depths > next(calls)).nonzero()[:, 1].view(len(depths), k)
        return route(x, weight, k, **{**options, "indices": indices})

    def chosen(*arguments, **options):
        return depths, choose(*arguments, **options).probs

    with mock.patch.object(ops, "route", routed), mock.patch.object(ops, "choose_depths", chosen):
        with mock.patch.object(model, "goes_on", lambda recursion, x: (depths > recursion).flatten()):
            yield


def compared(model: MoR, ids: torch.Tensor, mode: str) -> list[dict]:
    """A row for each dtype and kind of kernels: the share of tokens whose depth isn't float64's; errors of the logits
    of the others; and of all logits where depths are float64's."""
    rows = []
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids, mode=mode)
        for dtype in ("bf16", "fp32"):
            for kernels in ("eager", "auto") if ids.is_cuda else ("eager",):
                other = copy.deepcopy(model).to(DTYPES[dtype])
                with mock.patch.object(_dispatch, "_default_backend", kernels):
                    free = other(ids, mode=mode)
                    with replayed(other, exact.depths):
                        forced = other(ids, mode=mode)
                require(torch.equal(forced.depths, exact.depths), "the depths of float64 were not replayed")
                same = free.depths == exact.depths
                require(same.any(), "no token has float64's depth")
                found = {"": errors(free.logits[same], exact.logits[same]),
                         "replayed_": errors(forced.logits.flatten(0, 1), exact.logits.flatten(0, 1))}  # fmt: skip
                rows.append({
                    "dtype": dtype, "impl": "kernels" if kernels == "auto" else kernels, "ours": kernels == "auto",
                    "moved": 1 - same.double().mean().item(), "tokens": ids.numel(), "failed": None,
                    **{f"{prefix}{name}": value for prefix, of in found.items() for name, value in of.items()},
                })  # fmt: skip
    return rows


def rounded(model: MoR, device: str) -> MoR:
    """With weights that every dtype holds exactly, in evaluation mode."""
    return model.to(device).bfloat16().float().eval()


def measure_model(device: str, sizes: Sizes) -> list[dict]:
    """As the sequence grows with three recursions, and as recursions grow: a first and a last layer, and two that are
    shared by all recursions."""
    rows = []
    points = [("N", n, n, 3) for n in sizes.model_lengths]
    points += [("Nr", count, sizes.length, count) for count in sizes.recursions]
    for (name, (router, mode)), kv in itertools.product(ROUTERS.items(), ("recursion_wise", "shared")):
        for axis, n, length, recursions in points:
            config = MoRConfig.from_size("135M", num_hidden_layers=2 + 2 * recursions, num_recursions=recursions,
                                         router=router, kv=kv, max_position_embeddings=length,
                                         **sizes.model)  # fmt: skip
            torch.manual_seed(0)
            model = rounded(MoR(config), device)
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(config.vocab_size, (max(1, sizes.tokens // length), length), generator=generator)
            row = {"model": name, "kv": kv, "axis": axis, "n": n}
            rows += [row | found for found in compared(model, ids.to(device), mode)]
    return rows


def measure_trained(device: str, folder: Path, data: Path, sizes: Sizes) -> list[dict]:
    """The same of a trained model, on the tokens held out from it."""
    rows = []
    model = rounded(MoR.from_pretrained(latest(folder / "checkpoints")), device)
    settings = TrainConfig(data="", out="", **sizes.train)
    length = settings.sequence_length
    held_out = Loader(Tokens(data).split(settings.validation)[1], length, 1)
    count = min(held_out.windows, max(1, sizes.tokens // length))
    ids = torch.cat([held_out.batch(i)[0] for i in range(count)]).to(device)
    for name, (router, mode) in ROUTERS.items():
        if router == model.config.router:
            row = {"model": name, "kv": model.config.kv, "axis": "N", "n": length}
            rows += [row | found for found in compared(model, ids, mode)]
    return rows


# Training


class Undrawn(Trainer):
    def _plot(self) -> None:
        """The runs are drawn together."""


def trained(folder: Path, data: Path, precision: str, seed: int, sizes: Sizes) -> dict:
    """A run, whose losses are those of its metrics.jsonl; the seed is that of the weights and of the data's order."""
    torch.manual_seed(seed)
    fields = {**sizes.trained, "vocab_size": Tokens(data).vocab_size, "num_recursions": 3, "router": "expert_choice"}
    steps = sizes.train["steps"]
    config = TrainConfig(data=str(data), out=str(folder), precision=precision, seed=seed, checkpoint_every=steps,
                         progress=False, **sizes.train)  # fmt: skip
    Undrawn(MoR(MoRConfig(**fields)), config).run()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [(line["step"], line["lm"]) for line in lines if "lm" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    late = [loss for step, loss in training if step > (1 - LATE) * steps]
    return {"precision": precision, "seed": seed, "training": training, "validation": validation,
            "late": statistics.mean(late), "last": validation[-1][1], "failed": None}  # fmt: skip


RUNS = [(precision, seed) for precision in ("float32", "bfloat16") for seed in (0, 1)]


def start(pool: ProcessPoolExecutor | None, scratch: Path, data: Path, sizes: Sizes) -> list[Future]:
    """All runs side by side, or without a pool one after the other."""
    begun = []
    for precision, seed in RUNS:
        arguments = (scratch / f"{precision}-{seed}", data, precision, seed, sizes)
        if pool:
            begun.append(pool.submit(trained, *arguments))
        else:
            begun.append(Future())
            begun[-1].set_result(trained(*arguments))
    return begun


def collected(begun: list[Future]) -> list[dict]:
    rows = []
    for (precision, seed), run in zip(RUNS, begun):
        try:
            rows.append(run.result())
        except Exception as error:
            traceback.print_exc()
            rows.append({"precision": precision, "seed": seed, "failed": reason(error)})
    return rows


def differences(rows: list[dict]) -> dict[str, tuple[dict, dict]]:
    """Pairs of runs that differ in one thing."""
    runs = {(row["precision"], row["seed"]): row for row in rows if not row["failed"]}
    pairs = {}
    for seed in (0, 1):
        pairs[f"bf16 - fp32, seed {seed}"] = ("bfloat16", seed), ("float32", seed)
    for precision, short in (("float32", "fp32"), ("bfloat16", "bf16")):
        pairs[f"seed 1 - seed 0, {short}"] = (precision, 1), (precision, 0)
    return {name: (runs[a], runs[b]) for name, (a, b) in pairs.items() if a in runs and b in runs}


# Charts

COLORS = {"bf16": "#d55e00", "fp16": "#009e73", "fp32": "#0072b2"}
MARKERS = dict(zip((*_dispatch.BACKENDS, *_dispatch.SPECIALISTS), "o^sDPX"))


def chart(result: dict, path: Path) -> None:
    """A figure for each part, beside the file."""
    for part, draw in (("ops", draw_ops), ("model", draw_model), ("training", draw_training)):
        if part in result["parts"]:
            figure = draw(result["parts"][part]["rows"])
            figure.suptitle(title(result), fontsize=10)
            figure.savefig(path.with_name(f"{path.stem}-{part}.png"), dpi=110)


def _finish(axes, name: str, x: str) -> None:
    axes.set_title(name, fontsize=8)
    axes.set_xlabel(x, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure, axes_of_all) -> None:
    handles = {}
    for axes in axes_of_all:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def draw_ops(rows: list[dict]):
    """Root mean squares by what grows: color is the dtype, lines with markers are ours and dashed ones PyTorch's."""
    rows = [row for row in rows if not row["failed"] and row["rms"] > 0]
    groups = list(dict.fromkeys((row["op"], row["of"], row["axis"]) for row in rows))
    columns = 4
    lines = -(-len(groups) // columns)
    figure = new_figure(12, 0.8 + 2.1 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (op, of, axis) in zip(panels, groups):
        group = [row for row in rows if (row["op"], row["of"], row["axis"]) == (op, of, axis)]
        for dtype, ours, impl in dict.fromkeys((row["dtype"], row["ours"], row["impl"]) for row in group):
            line = sorted((row["n"], row["rms"]) for row in group if (row["dtype"], row["impl"]) == (dtype, impl))
            style = {"marker": MARKERS[impl], "markersize": 4} if ours else {"linestyle": "--", "color": "dimgray"}
            label = f"{impl}, {dtype}" if ours else "PyTorch's own"
            axes.plot(*zip(*line), **{"color": COLORS[dtype], "linewidth": 1, **style}, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _finish(axes, f"{op}: {of}", axis)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    _legend(figure, panels[: len(groups)])
    return figure


def draw_model(rows: list[dict]):
    """A column for each router; above, the share of tokens with another depth than float64's, and below, the error of
    the logits where depths are float64's."""
    kinds = [(value, axis) for value in ("moved", "replayed_rms") for axis in ("N", "Nr")]
    figure = new_figure(12, 10)
    panels = figure.subplots(len(kinds), len(ROUTERS), squeeze=False)
    names = {"moved": "tokens of another depth", "replayed_rms": "error of logits"}
    for across, (value, axis) in zip(panels, kinds):
        for axes, name in zip(across, ROUTERS):
            group = [row for row in rows if (row["model"], row["axis"]) == (name, axis)]
            for kv, dtype, impl in dict.fromkeys((row["kv"], row["dtype"], row["impl"]) for row in group):
                line = [(row["n"], row[value]) for row in group
                        if (row["kv"], row["dtype"], row["impl"]) == (kv, dtype, impl)]  # fmt: skip
                axes.plot(*zip(*line), "-" if kv == "shared" else "--", color=COLORS[dtype], linewidth=1, markersize=4,
                          marker="o" if impl == "kernels" else "x", label=f"{impl}, {dtype}, {kv}")  # fmt: skip
            if axis == "N":
                axes.set_xscale("log", base=2)
            else:
                axes.set_xticks(sorted({row["n"] for row in group}))
            if value == "replayed_rms":
                axes.set_yscale("log")
            _finish(axes, f"{name}: {names[value]}", "N, three recursions" if axis == "N" else "recursions")
    _legend(figure, panels.flatten())
    return figure


def draw_training(rows: list[dict]):
    """Losses, and how they differ: of bf16 and fp32 from the same start, and of two seeds."""
    figure = new_figure(12, 4.5)
    panels = figure.subplots(1, 3)
    for row in (row for row in rows if not row["failed"]):
        short = {"float32": "fp32", "bfloat16": "bf16"}[row["precision"]]
        for axes, of in zip(panels, ("training", "validation")):
            style = "-" if row["seed"] == 0 else ":"
            axes.plot(*zip(*row[of]), style, color=COLORS[short], linewidth=1, label=f"{short}, seed {row['seed']}")
            _finish(axes, f"{of} loss, nats", "step")
    for (name, pair), color in zip(differences(rows).items(), ("#d55e00", "#e69f00", "#0072b2", "#56b4e9")):
        steps = [step for step, _ in pair[0]["validation"]]
        gaps = [a - b for (_, a), (_, b) in zip(*(run["validation"] for run in pair))]
        panels[2].plot(steps, gaps, color=color, marker=".", linewidth=1, label=name)
    _finish(panels[2], "difference of validation losses, nats", "step")
    for axes in panels:
        axes.legend(fontsize=7, frameon=False)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = command_line("numerics", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--data", type=Path, metavar="DIR", help="tokens to train on, as prepare wrote them")
    parser.add_argument("--quick", action="store_true", help="small sizes, also without a GPU")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        print("No CUDA device is visible, and --quick was not given. Nothing was measured.", file=sys.stderr)
        return 2
    sizes = QUICK if options.quick else FULL
    where = environment(options.commit)
    result: dict = {"benchmark": "numerics", "environment": where, "complete": False, "parts": {}}
    path = result_path(options.out, result, options.quick)
    if path.exists():
        result["parts"] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    began = time.perf_counter()

    def done(part: str, rows: list[dict], **more: list[dict]) -> int:
        result["parts"][part] = {**{name: where[name] for name in ("commit", "dirty", "date")}, "rows": rows, **more}
        result["complete"] = set(result["parts"]) == set(PARTS)
        write(result, path)
        print(f"{part}: {len(rows)} rows, {time.perf_counter() - began:.0f} s", flush=True)
        return sum(row["failed"] is not None and row.get("ours", True) for row in rows)

    failed = 0
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if "training" in options.parts:
            pool = None
            if not options.quick:
                spawn = multiprocessing.get_context("spawn")
                pool = stack.enter_context(ProcessPoolExecutor(len(RUNS), mp_context=spawn))
            data = options.data or prepare("python-docs", scratch / "data", vocab_size=1024).directory
            begun = start(pool, scratch, data, sizes)
        if "ops" in options.parts:
            failed += done("ops", measure_ops(device, sizes))
        if "model" in options.parts:
            failed += done("model", measure_model(device, sizes))
        if "training" in options.parts:
            rows, (precision, seed) = collected(begun), RUNS[0]
            model_rows = []
            if not rows[0]["failed"]:
                model_rows = measure_trained(device, scratch / f"{precision}-{seed}", data, sizes)
            failed += done("training", rows, model=model_rows)
    chart(result, path)
    print(f"written to {path}")
    if failed:
        print(f"{failed} rows of ours FAILED", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
