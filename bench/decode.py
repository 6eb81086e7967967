"""Tokens a second of decoding: vanilla, fixed-depth and MoR models in the same engine, by continuous batching.

    python bench/decode.py [--size 360M] [--mean 256] [--sigma 64] [--model FOLDER [--vanilla FOLDER]] [--profile]
                           [--quick] [--only "mor-4"] [--out DIR] [--commit HASH]

Vanilla is the engine with one recursion and as many layers; weights are random bf16. Requests have an empty prompt and
a length of their own, normally distributed, and are greedy. Appends, first and last layers, head, sampling and
admission are included. What is timed begins when all slots have been full for as long as a mean request takes, and ends
when no request waits any more; so that slots don't end together, the first request of each is cut to a random share.
Depths are forced, a hash of (request, position), to the mix that the capacities of training make: with Nr recursions
each depth has 1/Nr of the tokens. A trained model (--model) is measured as it routes by itself.

Cases: 32 sequences for all; the paper's batch, 42, 48 and 51 sequences for MoR-2, 3 and 4, against vanilla's 32; "same
bytes", as many sequences as a cache of the same size holds in the mean; and vanilla alone with few and many. Before a
model is timed, requests that are decoded side by side must equal each decoded alone, in fp32; afterwards every request
must have its length, and the depths the mix that was asked for.

The floor is what a tick must read, at the rate of a copy: all weights once, and the keys and values that the queries of
the tick see by the mean context and the mix of depths of what was timed. "Lockstep", where the batch waits for its
deepest token, is not run but worked out from the measured tick: B / (E[deepest of B] * tick) tokens a second.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from bench.harness import (
    close,
    command_line_of_cases,
    copy_bandwidth,
    environment,
    format_cells,
    lacks_gpu,
    new_figure,
    paper_config,
    reason,
    require,
    result_path,
    title,
    variant_of,
    write,
)
from bench.train import grouped, kernels_of
from mor_kernels.decode import Completion, Engine, SamplingParams
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.config import LLAMA_SIZES
from mor_kernels.model.convert import separate
from mor_kernels.ops.sample.eager import uniform

RECURSIVE = {
    **{f"mor-{r}": {"num_recursions": r, "router": "expert_choice", "kv": "recursion_wise"} for r in (2, 3, 4)},
    "mor-4-shared": {"num_recursions": 4, "router": "expert_choice", "kv": "shared"},
    "recursive-4": {"num_recursions": 4},
    "mor-4-hybrid": {"num_recursions": 4, "router": "expert_choice", "kv": "hybrid"},
    "mor-4-token": {"num_recursions": 4, "router": "token_choice", "kv": "recursion_wise"},
}
ONCE = ("mor-4-hybrid", "mor-4-token")  # measured in the first case alone: their ticks are of many kernels
SEQUENCES, ALONE = 32, (8, 128, 512)
PAPER = {"mor-2": 42, "mor-3": 48, "mor-4": 51}
QUICK = "mor-4"  # and its vanilla
REQUESTS, ROUNDS = 1000, 5  # at least so many requests, and so many for each slot
ALONE_REQUESTS, QUICK_ROUNDS = 256, 3
CHECKED = 40  # tokens of the longest request that is compared with itself alone
PAGE = 16
SPARE = 0.05  # of a cache: what sequences hold together varies by 2 % of it
PROFILED = 8  # steps
IDLE = 1000  # steps without a token, after which an engine that has work is taken to stand still
BOS = 0
CAPACITY = (
    f"(1 - {SPARE}) * bytes / (2 * G * d * itemsize * (L * sum over rows of (share * context + waste) + ends * "
    f"(context + waste))), waste = {(PAGE - 1) / 2} tokens of a last page"
)
LOCKSTEP = "tokens/s = B / (E[deepest of B] * tick), E[deepest of B] = sum over d of 1 - P(depth <= d)**B"


# Depths


def drawn(positions: Tensor, seeds: Tensor, bounds: Tensor) -> Tensor:
    """Depths (n,) int64, a pure function of position and seed; bounds (Nr - 1,) float64 are the shares of depths up to
    1, 2, ..."""
    return 1 + (uniform(~seeds, positions)[:, None] >= bounds).sum(1)  # ~: not the numbers that tokens are drawn by


def bounds_of(mix: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(mix, dtype=torch.float64, device=device).cumsum(0)[:-1]


class Forced(Engine):
    """Every token takes a depth that is drawn from ``mix``, the shares of depths 1, 2, ..., whatever the router says;
    a request's seed draws its depths."""

    def __init__(self, model: MoR, mix: Sequence[float], seeds: int, **options):
        # drawn beforehand: in a tick this is one launch more than a model needs that routes by itself
        device, positions = model.embed_tokens.weight.device, model.config.max_position_embeddings
        grid = torch.meshgrid(torch.arange(seeds), torch.arange(positions), indexing="ij")
        drawings = drawn(*(t.flatten() for t in reversed(grid)), bounds_of(mix, torch.device("cpu")))
        self._drawn = drawings.view(seeds, positions).to(device)
        super().__init__(model, **options)

    def _recorded(self, positions: Tensor, seeds: Tensor) -> Tensor:
        return self._drawn[seeds, positions]


def engine_of(model: MoR, mix: Sequence[float] | None, seeds: int, **options) -> Engine:
    """For requests with seeds below ``seeds``."""
    options |= {"page_size": PAGE, "bos_token_id": BOS}
    return Engine(model, **options) if mix is None else Forced(model, mix, seeds, **options)


def capacity_mix(config: MoRConfig) -> tuple[float, ...]:
    """Shares of depths 1, 2, ... if as many tokens go on as in training, all of them equal where tokens choose, which
    their balance is for; without a router all take every recursion."""
    if config.router == "token_choice":
        return (1 / config.num_recursions,) * config.num_recursions
    reach = [*(config.capacities or (1,) * config.num_recursions), 0]
    return tuple(a - b for a, b in zip(reach, reach[1:]))


def settle() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reaching(mix: Sequence[float]) -> list[float]:
    """Shares of the tokens that take recursion 1, 2, ..."""
    return [sum(mix[r:]) / sum(mix) for r in range(len(mix))]


def deepest(mix: Sequence[float], count: int) -> float:
    """The expectation of the deepest of ``count`` tokens."""
    return sum(1 - (1 - share) ** count for share in reaching(mix))


# Models


@dataclass(frozen=True)
class Subject:
    """A model to measure, and the vanilla one that it is compared with."""

    name: str
    config: MoRConfig
    load: Callable[[], MoR]
    mix: tuple[float, ...] | None  # forced; None: as the model routes by itself
    vanilla: str


def random_model(config: MoRConfig, device: str, dtype: torch.dtype = torch.bfloat16) -> MoR:
    torch.manual_seed(0)
    with torch.device(device):
        return MoR(config).to(dtype).eval()


def pretrained(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> MoR:
    return MoR.from_pretrained(folder).to(device, dtype).eval()


def subjects(size: str, device: str) -> list[Subject]:
    """Random models of a size: vanilla ones of the depths that occur, then those with recursions."""
    configs = {name: paper_config(size, **changes) for name, changes in RECURSIVE.items()}
    depths = sorted({config.num_hidden_layers for config in configs.values()})
    configs = {f"vanilla-{depth}": MoRConfig.from_size(size, num_hidden_layers=depth) for depth in depths} | configs
    return [
        Subject(
            name, config, functools.partial(random_model, config, device),
            capacity_mix(config) if config.router != "none" else None, f"vanilla-{config.num_hidden_layers}",
        )
        for name, config in configs.items()
    ]  # fmt: skip


def trained_subjects(folder: Path, vanilla: Path | None, device: str) -> list[Subject]:
    """A trained model, and its vanilla counterpart: a trained one, or a random one of the same depth."""
    folder = folder.resolve()
    config = MoRConfig.load(folder / "config.json")
    if vanilla:
        other, load = MoRConfig.load(vanilla / "config.json"), functools.partial(pretrained, vanilla, device)
    else:
        other = MoRConfig.like(config.to_dict(), str(folder))
        load = functools.partial(random_model, other, device)
    name = f"trained {vanilla.resolve().name}" if vanilla else f"vanilla of {folder.name}"
    return [
        Subject(name, other, load, None, name),
        Subject(f"trained {folder.name}", config, functools.partial(pretrained, folder, device), None, name),
    ]


# Verification


def check(model: MoR, mix: Sequence[float] | None) -> None:
    """Requests decoded side by side against each decoded alone, in fp32; lengths and depths as asked for."""
    engine = engine_of(copy.deepcopy(model).float(), mix, 5, max_sequences=3)
    drawing = {"temperature": 1.0, "top_k": 8}  # every other request
    params = [
        SamplingParams(max_tokens=CHECKED * (i + 1) // 5, ignore_eos=True, seed=i, **(drawing if i % 2 else {}))
        for i in range(5)
    ]
    together = engine.generate([[]] * len(params), params)
    for i, (found, wanted) in enumerate(zip(together, params)):
        (alone,) = engine.generate([[]], wanted)
        require(found == alone, f"request {i} differs from the same alone: {found} and {alone}")
        has_length(i, found, wanted.max_tokens)
        if mix is not None:
            positions = torch.arange(wanted.max_tokens)
            depths = drawn(positions, torch.full_like(positions, wanted.seed), bounds_of(mix, positions.device))
            require(found.depths == depths.tolist(), f"request {i}: depths {found.depths}, not {depths.tolist()}")


def has_length(request: int, found: Completion, length: int) -> None:
    ending = found.finish_reason, len(found.tokens)
    require(ending == ("length", length), f"request {request}: expected {length} tokens, got {ending}")


def mixed_as(histogram: Sequence[int], mix: Sequence[float]) -> None:
    """Shares of depths within five standard deviations of those that they are drawn from."""
    count = sum(histogram)
    for depth, (found, share) in enumerate(zip(histogram, mix), 1):
        allowed = 5 * math.sqrt(share * (1 - share) / count) + 1e-9
        require(
            abs(found / count - share) <= allowed,
            f"depth {depth}: {found} of {count} tokens, expected {share:.4f} of them",
        )


# Serving


def lengths_of(slots: int, requests: int, mean: float, sigma: float, limit: int) -> list[int]:
    """Of ``requests``, and before them of one for each slot that is cut to a random share."""
    generator = torch.Generator().manual_seed(0)
    lengths = mean + sigma * torch.randn(requests + slots, generator=generator)
    lengths[requests:] *= torch.rand(slots, generator=generator)
    return lengths.roll(slots).round().clamp(1, limit).long().tolist()


def serve(engine: Engine, lengths: list[int], mean: float, profile: bool = False) -> dict:
    """Serve requests of these lengths, and say what the steady part of it was like."""
    slots = engine.max_sequences
    ids = [
        engine.submit([], SamplingParams(max_tokens=length, ignore_eos=True, seed=seed))
        for seed, length in enumerate(lengths)
    ]
    log, begun, tokens, ended, idle = [], set(), 0, 0, 0  # log: when, and the events that came
    few = f"{len(ids)} requests are too few: none waits when {slots} have run for their mean time"

    def step() -> list:
        nonlocal tokens, ended, idle
        require(ended < len(ids), few)
        events = engine.step()
        log.append((time.perf_counter(), events))
        tokens += len(events)
        ended += len([event for event in events if event.finish_reason])
        idle = 0 if events else idle + 1
        require(idle < IDLE, f"no token came in {IDLE} steps, and {len(ids) - ended} requests are left")
        return events

    def now() -> tuple[float, dict, int]:
        settle()
        return time.perf_counter(), engine.metrics(), len(log)

    gc.disable()  # it would go through all events of the run again and again
    try:
        while len(begun) < slots:
            begun.update(event.request for event in step())
        full = tokens
        while tokens < full + slots * mean:
            step()
        first, before, start = now()
        while ended < len(ids) - slots:
            step()
        last, after, stop = now()
        require(stop > start, few)
        facts = {}
        if profile:
            activity = "CUDA" if engine.device.type == "cuda" else "CPU"
            with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, activity)]) as profiler:
                for _ in range(PROFILED):
                    step()
                *_, done, _ = now()
            facts["kernels"] = per_tick(kernels_of(profiler), done["ticks"] - after["ticks"])
        while ended < len(ids):
            step()
    finally:
        gc.enable()
    outcomes = [engine.collect(i) for i in ids]
    for i, (outcome, length) in enumerate(zip(outcomes, lengths)):
        has_length(i, outcome, length)
    require(tokens == sum(lengths), f"expected {sum(lengths)} tokens of all requests, got {tokens}")

    seconds, ticks = last - first, after["ticks"] - before["ticks"]
    passes = [m["occupancy"] * m["ticks"] * slots for m in (before, after)]
    facts |= {
        "sequences": slots, "requests": len(ids), "seconds": seconds, "ticks": ticks, "tick_ms": 1e3 * seconds / ticks,
        "passes": (passes[1] - passes[0]) / ticks, "occupancy": (passes[1] - passes[0]) / (ticks * slots),
        "preemptions": after["preemptions"] - before["preemptions"],
        **{name: after[name] for name in ("pages_in_use", "pages", "cache_bytes")},
        "all_depths": engine.metrics()["depth_histogram"], **of_events(log, start, stop, engine.config.num_recursions),
    }  # fmt: skip
    return facts | {"tokens_per_second": facts["tokens"] / seconds}


def of_events(log: list[tuple[float, list]], start: int, stop: int, recursions: int) -> dict:
    """Of the tokens that came in steps ``start`` to ``stop``: how many, their depths, the mean number of keys that they
    saw at full depth, and the time since the token before of the same request."""
    step = np.repeat(np.arange(len(log)), [len(events) for _, events in log])
    when = np.array([seconds for seconds, _ in log])[step]
    request, depth = (
        np.fromiter((getattr(event, name) for _, events in log for event in events), int, len(step))
        for name in ("request", "depth")
    )
    order = np.argsort(request, kind="stable")
    request, depth, step, when = (values[order] for values in (request, depth, step, when))
    first = np.flatnonzero(np.diff(request, prepend=-1))
    rank = np.arange(len(request)) - np.repeat(first, np.diff(first, append=len(request)))
    timed = (start <= step) & (step < stop)
    gaps = 1e3 * np.diff(when, prepend=0)[timed & (rank > 0)]
    return {
        "tokens": int(timed.sum()),
        "depth_histogram": np.bincount(depth[timed], minlength=recursions + 1)[1:].tolist(),
        "context": float(rank[timed].mean() + 1),  # the first token of a request saw one key, the prompt's
        "token_ms": {f"p{p}": float(np.percentile(gaps, p)) for p in (50, 99)},
    }


def per_tick(kernels: list[tuple[str, int, float]], ticks: int) -> dict:
    """Kernels of a tick: how many, and milliseconds by what they are for and by name."""
    count = sum(count for _, count, _ in kernels) / ticks
    return {"count": count, **grouped((name, count, ms / ticks) for name, count, ms in kernels)}


# What a tick reads, and a cache holds


def token_bytes(config: MoRConfig, dtype: torch.dtype) -> int:
    """Keys and values of a token in a layer."""
    return 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize


def weight_bytes(model: MoR) -> int:
    """All that a tick reads of the weights: of an embedding with a head beside it only some rows."""
    total = sum(p.nbytes for p in model.parameters())
    return total - (0 if model.lm_head is None else model.embed_tokens.weight.nbytes)


def read_bytes(config: MoRConfig, dtype: torch.dtype, facts: dict) -> float:
    """Keys and values that the queries of a mean tick see: in the block at the recursion that each is at, and once a
    token in the first and last layer. A recursion's row holds the tokens that reached it, and is read by them."""
    reach, keys = reaching(facts["depth_histogram"]), facts["context"]
    if config.kv == "recursion_wise":
        keys *= sum(share**2 for share in reach) / sum(reach)
    block = facts["passes"] * len(config.recursion_layers[0]) * keys
    ends = 2 * config.has_own_ends * facts["tokens"] / facts["ticks"] * facts["context"]
    return token_bytes(config, dtype) * (block + ends)


def mean_context(mean: float, sigma: float) -> float:
    """Tokens of a sequence in the steady state: long ones are met more often, at any of their positions."""
    return ((mean**2 + sigma**2) / mean + 1) / 2


def sequence_bytes(config: MoRConfig, dtype: torch.dtype, mix: Sequence[float], context: float) -> float:
    """What a sequence holds of the cache in the mean; half of a row's last page is empty."""
    waste = (PAGE - 1) / 2
    rows = [1] if config.kv == "shared" else reaching(mix)
    block = len(config.recursion_layers[0]) * sum(share * context + waste for share in rows)
    return token_bytes(config, dtype) * (block + 2 * config.has_own_ends * (context + waste))


# Cases


@dataclass(frozen=True)
class Point:
    case: str
    slots: int | None  # None: as many as the cache holds
    requests: int = 0  # at least


def points(subject: Subject, alone: bool, quick: bool) -> list[Point]:
    found = [Point(f"{SEQUENCES} sequences", SEQUENCES, REQUESTS)]
    if subject.name in PAPER:
        found.append(Point("paper's batch", PAPER[subject.name], REQUESTS))
    if quick or subject.name in ONCE:
        return found
    found.append(Point("same bytes", None, REQUESTS))
    return found + [Point(f"{count} sequences", count, ALONE_REQUESTS) for count in ALONE if alone]


def measure(subject: Subject, todo: list[Point], bandwidth: float, cache_bytes: int, options) -> list[dict]:
    """A row for each point; ``failed`` holds the reason if the check or the serving failed."""
    rows = [
        {"case": point.case, "model": subject.name, "vanilla": subject.vanilla, "failed": None,
         "mix": "forced" if subject.mix else "fixed" if subject.config.router == "none" else "routed"}
        for point in todo
    ]  # fmt: skip
    config, mix = subject.config, subject.mix or capacity_mix(subject.config)
    try:
        model = subject.load()
        check(model, subject.mix)
    except Exception as error:
        traceback.print_exc()
        return [row | {"failed": reason(error)} for row in rows]
    dtype, weights = model.embed_tokens.weight.dtype, weight_bytes(model)
    for row, point in zip(rows, todo):
        try:
            slots, size = point.slots, {"cache_bytes": cache_bytes}
            if slots is None:
                each = sequence_bytes(config, dtype, mix, mean_context(options.mean, options.sigma))
                slots = max(1, int((1 - SPARE) * cache_bytes / each))
            requests = QUICK_ROUNDS * slots if options.quick else max(point.requests, ROUNDS * slots)
            lengths = lengths_of(slots, requests, options.mean, options.sigma, config.max_position_embeddings)
            if point.slots is not None:  # enough for all
                each = 1 if config.kv == "shared" else config.num_recursions
                size = {"num_pages": slots * each * -(-max(lengths) // PAGE)}
            engine = engine_of(model, subject.mix, len(lengths), max_sequences=slots, max_waiting=len(lengths), **size)
            facts = serve(engine, lengths, options.mean, options.profile)
            if row["mix"] == "routed":
                mix = facts["depth_histogram"]
            else:
                mixed_as(facts["all_depths"], mix)
            read = read_bytes(config, dtype, facts)
            row |= facts | {
                "weight_bytes": weights, "kv_bytes": read, "floor_ms": 1e3 * (weights + read) / bandwidth,
                "gb_per_second": (weights + read) / facts["tick_ms"] / 1e6,
            }  # fmt: skip
            del engine
        except Exception as error:
            traceback.print_exc()
            row["failed"] = reason(error)
        if torch.cuda.is_available():
            gc.collect()  # an engine may refer to itself
            torch.cuda.empty_cache()
    return rows


def lockstep(row: dict) -> dict:
    """The row of the same model if the whole batch waited for its deepest token."""
    steps = deepest(row["depth_histogram"], row["sequences"])
    speed = row["sequences"] / steps / row["tick_ms"] * 1e3
    kept = {name: row[name] for name in ("case", "vanilla", "failed", "mix", "sequences", "tick_ms")}
    return kept | {
        "model": f"{row['model']}, lockstep", "derived": LOCKSTEP, "deepest": steps, "tokens_per_second": speed,
    }  # fmt: skip


def compare(rows: list[dict]) -> None:
    """Puts into each row how many times as fast as vanilla it is; the paper's batches are compared with 32 sequences of
    vanilla."""
    speeds = {(row["case"], row["model"]): row["tokens_per_second"] for row in rows if not row["failed"]}
    for row in rows:
        case = f"{SEQUENCES} sequences" if row["case"] == "paper's batch" else row["case"]
        if not row["failed"] and (vanilla := speeds.get((case, row["vanilla"]))):
            row["x_vanilla"] = row["tokens_per_second"] / vanilla


# Hugging Face


def hugging_face(model: MoR):
    """transformers' Llama with the weights of a vanilla model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, weight = model.config, model.embed_tokens.weight
    same = (*LLAMA_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
            "tie_word_embeddings")  # fmt: skip
    theta = {"rope_theta": config.rope_theta}
    found = LlamaConfig(
        **{name: getattr(config, name) for name in same}, bos_token_id=BOS, eos_token_id=None, pad_token_id=None,
        **theta, rope_parameters={"rope_type": "default", **theta},  # the older and the newer name
    )  # fmt: skip
    with torch.device(weight.device):
        other = LlamaForCausalLM(found).to(weight.dtype).eval()
    state = separate(model.state_dict(), config)
    state = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in state.items()}
    missing, unknown = other.load_state_dict(state, strict=False)
    require(not unknown and set(missing) <= {"lm_head.weight"}, f"transformers lacks {unknown}, and wants {missing}")
    return other


@torch.no_grad()
def transformers_row(model: MoR, vanilla: str, cache: str, tokens: int) -> dict:
    """``generate`` of transformers, greedy, on the weights of a vanilla model, after a comparison of logits in fp32."""
    row = {"case": f"{SEQUENCES} sequences", "model": f"transformers, {cache} cache", "vanilla": vanilla,
           "failed": None, "mix": "fixed", "sequences": SEQUENCES}  # fmt: skip
    try:
        import transformers

        device = model.embed_tokens.weight.device
        ids = torch.randint(model.config.vocab_size, (2, 16), device=device)
        exact = copy.deepcopy(model).float()
        want = exact(ids).logits.double()
        close("logits", hugging_face(exact)(ids).logits, want, 1e-3 * want.square().mean().sqrt())
        del exact
        other = hugging_face(model)
        ids = torch.full((SEQUENCES, 1), BOS, device=device)
        options = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        if cache == "static":
            options["cache_implementation"] = "static"
        for _ in range(2):  # the first compiles
            settle()
            began = time.perf_counter()
            out = other.generate(ids, **options)
            settle()
            seconds = time.perf_counter() - began
        require(out.shape == (SEQUENCES, 1 + tokens), f"transformers generated {tuple(out.shape)}")
        return row | {
            "transformers": transformers.__version__, "seconds": seconds, "tokens": SEQUENCES * tokens,
            "tokens_per_second": SEQUENCES * tokens / seconds, "tick_ms": 1e3 * seconds / tokens,
        }  # fmt: skip
    except ImportError as error:
        return row | {"failed": f"transformers isn't installed: {error}"}
    except Exception as error:
        traceback.print_exc()
        return row | {"failed": reason(error)}


# Output

COLUMNS = (("case", -15), ("model", -26), ("sequences", 9), ("tokens/s", 10), ("x vanilla", 9), ("tick ms", 8),
           ("floor ms", 8), ("x floor", 7), ("GB/s", 6), ("resident", 8), ("occupied", 8), ("context", 7),
           ("p50 ms", 7), ("p99 ms", 7), ("preempted", 9), ("depths, %", -1))  # fmt: skip


def cells(row: dict) -> list[str]:
    """A row of the table, what was not measured as -."""

    def of(name, form):
        return format(row[name], form) if name in row else "-"

    if row["failed"]:
        return [row["case"], row["model"], of("sequences", "d"), "failed", *["-"] * (len(COLUMNS) - 4)]
    total = sum(row.get("depth_histogram", ()))
    return [
        row["case"], row["model"], of("sequences", "d"), of("tokens_per_second", ",.0f"), of("x_vanilla", ".2f"),
        of("tick_ms", ".3f"), of("floor_ms", ".3f"),
        f"{row['tick_ms'] / row['floor_ms']:.2f}" if "floor_ms" in row else "-", of("gb_per_second", ".0f"),
        of("passes", ".0f"), of("occupancy", ".1%"), of("context", ".0f"),
        *(f"{row['token_ms'][p]:.2f}" if "token_ms" in row else "-" for p in ("p50", "p99")), of("preemptions", "d"),
        " ".join(f"{100 * count / total:.1f}" for count in row["depth_histogram"]) if total else "-",
    ]  # fmt: skip


def by_case(rows: list[dict]) -> dict[str, list[dict]]:
    cases = dict.fromkeys(row["case"] for row in rows)
    return {case: [row for row in rows if row["case"] == case] for case in cases}


def show(row: dict) -> None:
    print(format_cells(cells(row), COLUMNS), row["failed"] or "", flush=True)
    if kernels := row.get("kernels"):
        kinds = ", ".join(f"{kind} {ms:.4f}" for kind, ms in kernels["by_kind"].items())
        print(f"  {kernels['count']:.0f} kernels a tick; ms: {kinds}")
        for name, ms in kernels["longest"].items():
            print(f"  {ms:9.4f}  {name}")


def chart(result: dict, path: Path) -> None:
    """Bars of tokens a second, by case."""
    rows = [row for row in result["rows"] if not row["failed"]]
    groups = by_case(rows)
    figure = new_figure(10, 1.5 + 0.2 * (len(rows) + 2 * len(groups)))
    axes = figure.subplots()
    y, ticks = 0.0, []
    for case, bars in groups.items():
        ticks.append((y + (len(bars) - 1) / 2, case))
        for row in bars:
            own = row["model"] == row["vanilla"] or "transformers" in row
            color = "silver" if own else "#f2b98f" if "derived" in row else "#d55e00"
            axes.barh(y, row["tokens_per_second"], height=0.9, color=color)
            ratio = f", {row['x_vanilla']:.2f} x" if "x_vanilla" in row else ""
            label = f" {row['model']}, {row['sequences']}: {row['tokens_per_second']:,.0f}{ratio}"
            axes.text(row["tokens_per_second"], y, label, va="center", fontsize=6)
            y += 1
        y += 1.5
    axes.set_xlabel("tokens a second; x: times vanilla's; grey: vanilla and transformers, pale: in lockstep")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(title(result), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.01)
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * 1.3)  # room for the labels
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None, device: str = "cuda") -> int:
    """Returns 0; 1 if a row of ours failed; 2 without a GPU or without a case."""
    parser = command_line_of_cases("decode", __doc__)
    parser.add_argument("--size", default="360M", help="of the paper: 135M, 360M, 730M, 1.7B")
    parser.add_argument("--mean", type=int, default=256, help="tokens of a request")
    parser.add_argument("--sigma", type=float, default=64.0, help="their standard deviation")
    parser.add_argument("--resident", type=int, default=1024, help='sequences of the deepest vanilla model that the '
                        'cache of "same bytes" holds')  # fmt: skip
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a trained model, measured besides the others")
    parser.add_argument("--vanilla", type=Path, metavar="FOLDER", help="what it is compared with; by default a random "
                        "model of its depth")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="list the kernels of a tick as well")
    options = parser.parse_args(argv)
    if options.vanilla and not options.model:
        parser.error("--vanilla: expected beside --model")
    if device == "cuda" and lacks_gpu():
        return 2
    began = time.perf_counter()
    models = subjects(options.size, device)
    vanillas = [subject for subject in models if subject.name == subject.vanilla]  # by depth
    each = sequence_bytes(vanillas[-1].config, torch.bfloat16, (1,), mean_context(options.mean, options.sigma))
    cache_bytes = math.ceil(options.resident * each / (1 - SPARE))
    if options.quick:
        by_name = {subject.name: subject for subject in models}
        models = [subject for subject in models if subject.name in (QUICK, by_name[QUICK].vanilla)]
    if options.model:
        models += trained_subjects(options.model, options.vanilla, device)
    todo = {
        subject: [
            point
            for point in points(subject, subject is vanillas[0], options.quick)
            if options.only in f"{point.case} {subject.name}"
        ]
        for subject in models
    }
    caches = [] if options.quick else [
        cache for cache in ("dynamic", "static")
        if options.only in f"{SEQUENCES} sequences transformers, {cache} cache"
    ]  # fmt: skip
    if not any(todo.values()) and not caches:
        print(f"--only {options.only}: no such case", file=sys.stderr)
        return 2
    result = {
        "benchmark": "decode",
        "variant": variant_of(parser, options, ["size", "mean", "sigma", "resident"]),
        "environment": environment(options.commit),
        "copy_bandwidth": copy_bandwidth(),
        "lengths": f"N({options.mean}, {options.sigma:g}), greedy, empty prompt",
        "cache_bytes": cache_bytes, "capacity": CAPACITY, "complete": False, "rows": [],
    }  # fmt: skip
    if device == "cuda":
        torch.cuda.empty_cache()
    path = result_path(options.out, result, options.quick or options.only)
    print(title(result), flush=True)
    print(format_cells([name for name, _ in COLUMNS], COLUMNS), flush=True)

    def add(rows: list[dict]) -> None:
        result["rows"] += rows
        compare(result["rows"])
        write(result, path)
        for row in rows:
            show(row)

    for subject, wanted in todo.items():
        rows = measure(subject, wanted, result["copy_bandwidth"], cache_bytes, options) if wanted else []
        add(rows)
        routed = subject.config.router != "none"
        add([lockstep(row) for row in rows if routed and row["case"] == f"{SEQUENCES} sequences" and not row["failed"]])
    if caches:
        model = vanillas[0].load()
        for cache in caches:
            add([transformers_row(model, vanillas[0].name, cache, options.mean)])
    result["complete"] = True
    write(result, path)
    chart(result, path.with_suffix(".png"))
    print(f"{time.perf_counter() - began:.0f} s; written to {path}")
    return int(any(row["failed"] and not row["model"].startswith("transformers") for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
