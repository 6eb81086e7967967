"""Training steps: ours against plain PyTorch under torch.compile.

    python bench/train.py [--size 360M] [--batch 16] [--length 2048] [--quick] [--out DIR] [--commit HASH] [MODEL ...]

A step is forward, backward, clipping and AdamW (fused) on fp32 weights that are computed with in bf16; everything but
the reading of data. Plain is the same model in plain PyTorch, compiled as a whole: SDPA with FlashAttention-2, topk,
sort, gather, scatter_add, and a cross-entropy of all logits. It has no token-choice and no shared keys and values; of
the models that it has, gradients are compared with its in fp32 before anything is timed, and of the others they must be
finite. Floating-point operations are the useful ones: of tokens that a recursion keeps, and pairs that the mask keeps.
Memory is the most that was allocated during a step, weights and optimizer included.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import (
    COMPILE,
    Case,
    Implementation,
    Samples,
    close,
    command_line_of_cases,
    elapsed,
    lacks_gpu,
    on_gpu,
    paper_config,
    require,
    variant_of,
)
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.convert import separate
from mor_kernels.train.passes import Graphs, parameters_in

CASES = {
    "vanilla": {},
    "recursive-2": {"num_recursions": 2},
    "recursive-3": {"num_recursions": 3},
    **{
        f"mor-{recursions}{kind}{kv}": {"num_recursions": recursions, "router": router, "kv": strategy}
        for kind, router in (("", "expert_choice"), ("-token", "token_choice"))
        for recursions in (2, 3, 4)
        for kv, strategy in (("", "recursion_wise"), ("-shared", "shared"))
    },
}
PLAIN = ("vanilla", "mor-2", "mor-3")  # compiling takes a minute each
WARMUP, STEPS, QUICK_STEPS = 4, 8, 4
CHECKED = 2  # sequences whose gradients are compared: in fp32 more would need more memory than some cards have
# Of a parameter's gradient, relative to its norm: twice the distance that plain PyTorch has in bf16, and a little.
# There it is 2 to 5 % after 30 layers, where some tokens change sides too.
TIMES_PLAIN, BESIDES = 2, 0.02
# What a kernel is for, by its name; the first that fits. The rest, rotary embedding and SwiGLU with it, is counted as
# elementwise.
KERNELS = {
    "elementwise": r"^triton_",  # Inductor's: their names list operations
    "attention": r"flash|fmha|sdpa|attention"
    r"|^_(forward(_narrow|_wide)?|backward(_q|_kv)?|prepare|finish|place|fill_tail|block_lists)$",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitK|matmul|decode_linear",
    "optimizer": r"multi_tensor|adam|lpnorm",
    "routing": r"route|scatter|gather|topk|sort|radix|select|histogram|invert|sum_partials|(append|merge|lookup)_kernel"
    r"|^_(in_place|backward_of_slots|logit_gradients|score|pack|choose|aux|balance|z|mean|append|merge|lookup)"
    r"|depth_step|sample_kernel|^_(advance|enter|leave|take|commit|free)$",
    "copies": r"memcpy|memset|copy|fill",
}
LONGEST = 20  # kernels whose names are kept


class Plain(torch.nn.Module):
    """A MoR's parameters, by the names of a Hugging Face Llama, and its loss computed by PyTorch alone (no router, or
    expert-choice with linear routers; keys and values recursion-wise; no padding)."""

    def __init__(self, model: MoR):
        super().__init__()
        self.config = model.config
        state = separate(model.state_dict(), model.config)
        self.weights = torch.nn.ParameterDict({name.replace(".", "/"): value.clone() for name, value in state.items()})

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, ks: tuple[int, ...]) -> torch.Tensor:
        config = self.config
        batch, length = ids.shape
        angles = torch.arange(length, device=ids.device)[:, None] * config.rope_theta ** (
            -torch.arange(0, config.head_dim, 2, device=ids.device) / config.head_dim
        )
        table = torch.stack((angles.cos(), angles.sin()))  # (2, N, d/2)

        def weight(name):
            return self.weights[f"{name}.weight".replace(".", "/")]

        def linear(x, name):
            return F.linear(x, weight(name))

        def norm(x, name):
            return F.rms_norm(x, (config.hidden_size,), weight(name), config.rms_norm_eps)

        def rotate(x, positions):
            cos, sin = (t[positions][:, :, None].to(x.dtype) for t in table)
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        def apply(layer, x, positions):
            attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
            h = norm(x, f"layers.{layer}.input_layernorm")
            q, k, v = (linear(h, f"{attention}.{name}_proj").unflatten(-1, (-1, config.head_dim)) for name in "qkv")
            q, k = rotate(q, positions), rotate(k, positions)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
            x = x + linear(out.transpose(1, 2).flatten(2), f"{attention}.o_proj")
            h = norm(x, f"layers.{layer}.post_attention_layernorm")
            h = F.silu(linear(h, f"{mlp}.gate_proj")) * linear(h, f"{mlp}.up_proj")
            return x + linear(h, f"{mlp}.down_proj")

        everyone = torch.arange(length, device=ids.device).expand(batch, length)
        x = apply(0, F.embedding(ids, weight("embed_tokens")), everyone)
        losses, kept = [], everyone
        for r, layers in enumerate(config.recursion_layers):
            rows, gates = x, None
            if config.router == "expert_choice":
                candidates = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))
                logits = candidates.float() @ weight(f"routers.{r}")[0].float()
                places = logits.topk(ks[r], sorted=False).indices.sort().values if r else everyone
                chosen = torch.zeros_like(logits).scatter(1, places, 1)
                losses.append(F.binary_cross_entropy_with_logits(logits, chosen))
                gates = config.alpha * logits.gather(1, places).sigmoid()
                kept = kept.gather(1, places)
                rows = candidates.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
            for layer in layers:
                rows = apply(layer, rows, kept)
            if gates is None:
                x = rows
            else:
                x = x.scatter_add(1, kept[..., None].expand_as(rows), (gates[..., None] * rows).to(x.dtype))
        x = apply(config.num_unique_layers - 1, x, everyone)
        scores = linear(norm(x, "norm"), "embed_tokens")
        loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())
        return loss + config.aux_coeff * sum(losses) if losses else loss


class Ours(torch.nn.Module):
    def __init__(self, model: MoR):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, ks: tuple[int, ...]) -> torch.Tensor:
        name = "bounds" if self.model.config.router == "token_choice" else "ks"
        return self.model(ids, targets=targets, logits=False, **{name: ks}).loss


class Step:
    """An optimizer step of a model, on the tokens of `inputs`."""

    def __init__(self, inputs: SimpleNamespace, how: str):
        torch.manual_seed(0)
        with torch.device(inputs.ids.device):
            model = MoR(inputs.config)
        self.inputs, self.how = inputs, how
        if how.startswith("plain"):
            self.model = Plain(model)
            self.loss = COMPILE(self.model) if how == "plain" else self.model
        else:
            self.model = self.loss = Ours(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=inputs.ids.is_cuda)  # fmt: skip
        self.forget_graphs()

    def captured(self) -> set:
        """Sizes that there are graphs for."""
        return set(self.graphs.graphs) if self.graphs else set()

    def forget_graphs(self) -> None:
        """So that the next step captures anew."""
        self.graphs = Graphs(self.model.parameters(), self.backward) if self.how == "ours, graph" else None

    def run(self) -> tuple[torch.Tensor]:
        """Forward and backward."""
        config, (_, length) = self.inputs.config, self.inputs.ids.shape
        ks = config.kept(length) or None
        if self.graphs and config.router == "token_choice":
            with parameters_in(self.model, torch.bfloat16):
                ks = self.model.model.bounds(self.inputs.ids)
        return (self.graphs or self.backward)(ks)

    def backward(self, ks: tuple[int, ...] | None, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor]:
        inputs = self.inputs
        backend = SDPBackend.FLASH_ATTENTION if dtype != torch.float32 else SDPBackend.EFFICIENT_ATTENTION
        with parameters_in(self.model, dtype), sdpa_kernel([backend, SDPBackend.MATH]):
            loss = self.loss(inputs.ids, inputs.targets, ks)
            loss.backward()
        return (loss.detach(),)

    def gradients(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        ks = self.inputs.config.kept(self.inputs.ids.shape[1]) or None
        (loss,) = self.run() if self.graphs else self.backward(ks, dtype)
        if self.how.startswith("plain"):
            found = {name.replace("/", "."): p.grad for name, p in self.model.weights.items()}
        else:
            found = separate({name: p.grad for name, p in self.model.model.named_parameters()}, self.inputs.config)
        return {"loss": loss, **found}

    def __call__(self) -> None:
        self.run()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(config: MoRConfig, batch: int, length: int, device: str, seed: int) -> SimpleNamespace:
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, length + 1), generator=generator, device=device)
    return SimpleNamespace(config=config, ids=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())


def check(inputs: SimpleNamespace, outputs: dict[str, torch.Tensor], ours: bool) -> float:
    """Gradients against those of plain PyTorch in fp32: the largest distance, as a share of what is allowed."""
    config = inputs.config
    require(all(value is not None for value in outputs.values()), "a parameter has no gradient")
    if config.router == "token_choice" or config.kv != "recursion_wise":  # plain PyTorch has none; the tests compare
        require(all(value.isfinite().all() for value in outputs.values()), "a gradient is not finite")
        return 0.0
    plain = Step(inputs, "plain eager")
    want = plain.gradients(torch.float32)
    plain.optimizer.zero_grad()
    loss = close("loss", outputs["loss"], want["loss"].double(), 0.01)

    def distances(found):
        return torch.stack([(found[name] - want[name]).norm() / want[name].norm() for name in want])

    zero = torch.zeros((), device=inputs.ids.device)
    allowed = TIMES_PLAIN * distances(plain.gradients()) + BESIDES
    return max(loss, close("gradients", distances(outputs), zero.expand(len(want)), allowed))


def kernel_table(step: Step) -> dict[str, dict[str, float]]:
    """What :func:`grouped` says of a step, of one that captures no graph: that takes several passes."""
    while True:
        captured = step.captured()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        if step.captured() == captured:
            break
    return grouped(kernels_of(profile))


def kernels_of(profile: torch.profiler.profile) -> list[tuple[str, int, float]]:
    """Names, counts and milliseconds of what the GPU was given."""
    return [
        (event.key, event.count, event.self_device_time_total / 1e3)
        for event in profile.key_averages()
        if not event.is_user_annotation  # a span of kernels, which are listed too
    ]


def grouped(kernels: Iterable[tuple[str, int, float]]) -> dict[str, dict[str, float]]:
    """Milliseconds by what kernels are for, and of the longest by name, from their names, counts and milliseconds."""
    groups, names = Counter(), Counter()
    for kernel, count, ms in kernels:
        fits = (group for group, pattern in KERNELS.items() if re.search(pattern, kernel, re.I))
        groups[next(fits, "elementwise")] += ms
        names[f"{count} x {kernel[:90]}"] += ms
    return {"by_kind": dict(groups.most_common()), "longest": dict(names.most_common(LONGEST))}


def sample(case: Case, implementation: Implementation, steps: int, *, shape: tuple[int, int], known: dict) -> Samples:
    """Milliseconds of steps on the full batch; in an implementation's first turn, memory and kernels as well."""
    began = time.perf_counter()
    inputs = make(case.make(0).config, *shape, "cuda", 1)
    gc.collect()  # earlier steps refer to themselves
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = Step(inputs, implementation.name)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    ms = elapsed(step, steps)
    facts = known.setdefault((case.name, implementation.name), {})
    if not facts:
        facts |= {
            "tokens": inputs.ids.numel(), "parameters": sum(p.numel() for p in step.model.parameters()),
            "start_seconds": time.perf_counter() - began, **kernel_table(step),
        }  # fmt: skip
        step.forget_graphs()  # a replay allocates nothing, and at the first capture the optimizer had no state yet
        torch.cuda.reset_peak_memory_stats()
        step()
        facts["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return Samples(ms, "events", facts=facts)


def cases(names: Iterable[str], size: str, batch: int, length: int) -> list[Case]:
    made = []
    for name in names:
        config = paper_config(size, max_position_embeddings=max(2048, length), **CASES[name])
        with torch.device("meta"):
            parameters = sum(p.numel() for p in MoR(config).parameters())
        hows = ["plain", "ours, graph"] if name in PLAIN else ["ours, graph"]
        made.append(
            Case(
                op="train step", name=name, nbytes=28 * parameters,  # what AdamW reads and writes
                make=functools.partial(make, config, CHECKED, length, "cuda"), check=check,
                implementations=tuple(
                    Implementation(how, functools.partial(_gradients, how), ours=how.startswith("ours")) for how in hows
                ),
                flops=batch * config.flops(length, training=True),
            )
        )  # fmt: skip
    return made


def _gradients(how: str, inputs: SimpleNamespace) -> Callable[[], dict[str, torch.Tensor]]:
    return Step(inputs, "plain eager" if how == "plain" else how).gradients  # compiled anew, plain would take a minute


def main(argv: list[str] | None = None) -> int:
    parser = command_line_of_cases("train", __doc__)
    parser.add_argument("--size", default="360M", help="of the paper: 135M, 360M, 730M, 1.7B")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}; if none is named, all at "
                        f"360M, and {', '.join(PLAIN)} at other sizes")  # fmt: skip
    options = parser.parse_args(argv)
    if unknown := set(options.models) - set(CASES):
        parser.error(f"MODEL: expected of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    if lacks_gpu():
        return 2
    models = options.models or (CASES if options.size == parser.get_default("size") else PLAIN)
    steps = QUICK_STEPS if options.quick else STEPS
    known: dict = {}
    return on_gpu(
        "train", lambda: cases(models, options.size, options.batch, options.length), options, bool(options.models),
        lambda case, implementation: sample(
            case, implementation, steps, shape=(options.batch, options.length), known=known
        ),
        variant_of(parser, options, ["size", "batch", "length"]),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
