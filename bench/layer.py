"""What a layer does beside attention, and the loss, forward and backward, against plain PyTorch and Liger Kernel.

    python bench/layer.py [--quick] [--only "swiglu"] [--out DIR]

Inputs are random normal bf16, of a 360M model and of a 1.7B one. Matrix products are PyTorch's in all of them; a time
has those of the forward pass, of the inputs' gradient and of the weights'. Liger, where installed, has its fastest
kernel for the purpose; its cross-entropy asks the device twice a call, so that no graph can hold it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from bench.harness import COMPILE, ROUNDOFF, Case, Implementation, close, main, our_backends
from mor_kernels import ops

TOKENS = 32768
NORM = ((TOKENS, 960, 1600), (TOKENS, 960, 5120), (TOKENS, 2048, 16384))  # tokens, hidden size, outputs
SWIGLU = ((TOKENS, 2560, 960), (TOKENS, 8192, 2048))  # tokens, intermediate size, hidden size
ROPE = ((16, 2048, 15, 5, 64), (16, 2048, 32, 8, 64))  # sequences, length, heads, key/value heads, width
LOSS = ((TOKENS, 960, 49152), (TOKENS, 2048, 49152))  # tokens, hidden size, vocabulary
EPS, THETA, BF16 = 1e-5, 10000.0, 2  # bytes
# A result is rounded, and in a backward pass the product before it is, which is of its size. What a product sums up is
# rounded as well: by 0.4 roundoffs of the product's size on average, and six times that at the worst of many millions.
ROUNDINGS, SUMS = 2, 5


def norm_plain(x, add, gain, weight):
    total = x + add
    return total, F.linear(F.rms_norm(total, gain.shape, gain, EPS), weight)


def swiglu_plain(gate_up, weight):
    gate, up = gate_up.chunk(2, -1)
    return (F.linear(F.silu(gate) * up, weight),)


def rope_plain(qkv, heads, positions):
    half, groups = qkv.shape[-1] // 2, (qkv.shape[-2] - heads) // 2
    wide = torch.promote_types(qkv.dtype, torch.float32)
    frequency = THETA ** (-torch.arange(half, device=qkv.device, dtype=wide) / half)
    angle = (positions[..., None] * frequency)[..., None, :]
    q, k, v = qkv.split((heads, groups, groups), -2)
    cos, sin = angle.cos(), angle.sin()

    def turn(x):
        first, second = x.to(wide).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    return turn(q), turn(k), v


def loss_plain(x, weight, targets):
    return (F.cross_entropy(F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32)), targets),)


class Liger:
    """Its calls on our inputs."""

    def __init__(self):
        from liger_kernel.ops import fused_add_rms_norm, fused_linear_cross_entropy, rope, swiglu

        self._norm = fused_add_rms_norm.LigerFusedAddRMSNormFunction.apply
        self._swiglu = swiglu.LigerFusedGateUpSiLUMulFunction.apply
        self._rope = rope.LigerRopeFunction.apply
        self._loss = fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction.apply

    def norm(self, x, add, gain, weight):
        h, total = self._norm(x, add, gain, EPS)
        return total, F.linear(h, weight)

    def swiglu(self, gate_up, weight):
        return (F.linear(self._swiglu(gate_up), weight),)

    def rope(self, qkv, heads, positions):
        half, groups = qkv.shape[-1] // 2, (qkv.shape[-2] - heads) // 2
        frequency = THETA ** (-torch.arange(half, device=qkv.device) / half)
        angle = (positions[..., None] * frequency).repeat(1, 1, 2)
        q, k, v = (t.transpose(1, 2) for t in qkv.split((heads, groups, groups), -2))
        q, k = self._rope(q, k, angle.cos(), angle.sin())
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def loss(self, x, weight, targets):
        """The gradient of weight summed up in fp32, as it is in ours; by default it would be in bf16."""
        return (self._loss(x, weight, targets, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)[0],)


def norm_ours(x, add, gain, weight, backend):
    return ops.rms_norm_linear(x, gain, weight, EPS, add=add, backend=backend)


def swiglu_ours(gate_up, weight, backend):
    return (ops.swiglu_linear(gate_up, weight, backend=backend),)


def rope_ours(qkv, heads, positions, backend):
    return ops.rope_qkv(qkv, heads, positions, THETA, backend=backend)


def loss_ours(x, weight, targets, backend):
    return (ops.linear_cross_entropy(x, weight, targets, backend=backend) / len(x),)


class Inputs:
    """What a function takes (``tensors``, which gradients reach, and ``others``), and the gradients of what it gives.

    A weight (O, D) is scaled so that outputs are of the size of the inputs.
    """

    def __init__(self, seed: int, device: str, inputs: dict, outputs: dict, others: Callable):
        generator = torch.Generator(device).manual_seed(seed)

        def normal(name, shape):
            values = torch.randn(shape, generator=generator, device=device)
            if name == "gain":  # a few columns that are far larger than others would err more than these allow
                values = 1 + values / 8
            return (values * shape[-1] ** -0.5 if name == "weight" else values).bfloat16()

        self.tensors = [normal(name, shape).requires_grad_() for name, shape in inputs.items()]
        self.grads = [
            normal(name, shape) if shape else torch.ones((), device=device) for name, shape in outputs.items()
        ]
        self.others = others(generator)


def both_ways(function: Callable, tensors: list, others: tuple, grads: list) -> tuple:
    """Outputs, and the gradients of ``tensors`` where those of the outputs are ``grads``."""
    outputs = function(*tensors, *others)
    return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, tensors, grads)


def check(plain: Callable, names: tuple[str, ...], inputs: Inputs, got: tuple, ours: bool) -> float:
    """Against plain PyTorch in float64, and its autograd."""
    doubles = [t.detach().double().requires_grad_() for t in inputs.tensors]
    want = both_ways(plain, doubles, inputs.others, [grad.double() for grad in inputs.grads])
    worst = 0.0
    for name, values, exact in zip(names, got, want, strict=True):
        allowed = (1 if ours else 4) * ROUNDOFF * (ROUNDINGS * exact.abs() + SUMS * exact.square().mean().sqrt())
        worst = max(worst, close(name, values, exact, allowed))
    return worst


class Cases:
    """The cases on ``device``; ``compiled`` makes the compiled rivals."""

    def __init__(self, device: str, compiled: Callable):
        self.device, self.compiled = device, compiled
        self.liger = Liger() if device == "cuda" and importlib.util.find_spec("liger_kernel") else None

    def _case(self, op, shape, kernel, inputs, outputs, *, plain, own, liger, others=lambda generator: (), flops=None):
        """``kernel`` is our operator under ``op``, which the backends are those of; ``liger`` a method of Liger's."""
        rivals = {"eager": plain, "compile": self.compiled(plain)}
        if self.liger:
            rivals["Liger"] = getattr(self.liger, liger)
        ours = {
            label: functools.partial(own, backend=name) for label, name in our_backends(kernel, self.device).items()
        }

        def prepare(function, s):
            return functools.partial(both_ways, function, s.tensors, s.others, s.grads)

        numbers = sum(math.prod(shape) for shape in (*inputs.values(), *outputs.values()))
        return Case(
            f"{op} fwd+bwd",
            shape,
            2 * BF16 * numbers,  # each read or written, and its gradient
            lambda seed: Inputs(seed, self.device, inputs, outputs, others),
            functools.partial(check, plain, (*outputs, *(f"d_{name}" for name in inputs))),
            tuple(
                Implementation(form, functools.partial(prepare, function), ours=form in ours)
                for form, function in {**rivals, **ours}.items()
            ),
            flops=flops,
        )

    def norm(self, tokens, width, out):
        rows = (tokens, width)
        return self._case(
            "rms_norm_linear", f"n{tokens} D{width} O{out}", "add_rms_norm",
            {"x": rows, "add": rows, "gain": (width,), "weight": (out, width)}, {"total": rows, "y": (tokens, out)},
            plain=norm_plain, own=norm_ours, liger="norm", flops=6 * tokens * width * out,
        )  # fmt: skip

    def swiglu(self, tokens, inner, width):
        return self._case(
            "swiglu_linear", f"n{tokens} F{inner} D{width}", "swiglu",
            {"gate_up": (tokens, 2 * inner), "weight": (width, inner)}, {"y": (tokens, width)},
            plain=swiglu_plain, own=swiglu_ours, liger="swiglu", flops=6 * tokens * inner * width,
        )  # fmt: skip

    def rope(self, batch, length, heads, groups, width):
        def others(generator):
            return heads, torch.arange(length, device=self.device).expand(batch, length)

        q, k = ((batch, length, count, width) for count in (heads, groups))
        return self._case(
            "rope_qkv", f"B{batch} N{length} H{heads}/{groups} d{width}", "rope_split",
            {"qkv": (batch, length, heads + 2 * groups, width)}, {"q": q, "k": k, "v": k},
            plain=rope_plain, own=rope_ours, liger="rope", others=others,
        )  # fmt: skip

    def loss(self, tokens, width, vocabulary):
        def others(generator):
            return (torch.randint(vocabulary, (tokens,), generator=generator, device=self.device),)

        return self._case(
            "linear_cross_entropy", f"n{tokens} D{width} V{vocabulary}", "cross_entropy_",
            {"x": (tokens, width), "weight": (vocabulary, width)}, {"loss": ()},
            plain=loss_plain, own=loss_ours, liger="loss", others=others, flops=6 * tokens * width * vocabulary,
        )  # fmt: skip


def make_cases(
    device: str = "cuda", compiled: Callable = COMPILE, *, norm=NORM, swiglu=SWIGLU, rope=ROPE, loss=LOSS
) -> list[Case]:
    cases = Cases(device, compiled)
    return [
        *(cases.norm(*shape) for shape in norm),
        *(cases.swiglu(*shape) for shape in swiglu),
        *(cases.rope(*shape) for shape in rope),
        *(cases.loss(*shape) for shape in loss),
    ]


if __name__ == "__main__":
    sys.exit(main("layer", __doc__, make_cases))
