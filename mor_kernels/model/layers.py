"""The Llama layer, the routers and the per-recursion adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .. import ops
from ..ops._numeric import wide
from .config import MoRConfig

# project(keys=True) -> (..., H + 2G, d), queries, keys and values of tokens as projected; keys=False: (..., H, d)
Project = Callable[..., torch.Tensor]
# attend(project, heads, positions, theta) -> (..., H, d), attention for tokens at positions (...); it turns queries and
# keys by their positions
Attend = Callable[[Project, int, torch.Tensor, float], torch.Tensor]
# adapter("q" | "v", x) -> what a recursion adds to that projection
Adapter = Callable[[str, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self, config: MoRConfig):
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, d
        self.qkv_proj = nn.Linear(width, (self.heads + 2 * self.groups) * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, width, bias=False)

    def project(self, x, adapter: Adapter | None, keys: bool):
        """(n, D) -> (n, (H + 2G) d), or (n, H d) without keys."""
        q_width, k_width = self.heads * self.head_dim, self.groups * self.head_dim
        weight = self.qkv_proj.weight if keys else self.qkv_proj.weight[:q_width]
        y = F.linear(x, weight)
        if adapter is not None:
            q = adapter("q", x)
            y = y + (torch.cat((q, q.new_zeros(len(q), k_width), adapter("v", x)), -1) if keys else q)
        return y


class MLP(nn.Module):
    def __init__(self, config: MoRConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return ops.swiglu_linear(self.gate_up_proj(x), self.down_proj.weight)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), for tokens in any layout (..., D) at ``positions`` (...).

    What comes before attention and what comes after it treat each token alone: they take tokens as rows (n, D), so that
    each is compiled once for all recursions, batches and routings (:meth:`compile_rows`).
    """

    def __init__(self, config: MoRConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)
        self.theta = config.rope_theta

    def forward(self, x, positions, attend: Attend, adapter: Adapter | None = None):
        # no views for autograd: the compiler guards what they are views of, and FSDP2 warns of hooks on them
        view = torch.ops.aten._unsafe_view
        rows = view(x.contiguous(), (x.shape[:-1].numel(), x.shape[-1]))

        def project(keys=True):
            nonlocal rows
            (y, rows), d = self.before_attention(rows, adapter, keys), self.self_attn.head_dim
            return view(y, (*x.shape[:-1], y.shape[-1] // d, d))

        attended = attend(project, self.self_attn.heads, positions, self.theta)
        return view(self.after_attention(rows, view(attended, (len(rows), attended.shape[-2:].numel()))), x.shape)

    def before_attention(self, rows, adapter: Adapter | None, keys: bool):
        """Also returns the rows, so that the gradient that comes to them from after attention is added in here. Under
        another name: the compiler returns inputs themselves, past the gradients that it computes."""
        y = self.self_attn.project(self.input_layernorm(rows), adapter, keys)
        return y, torch.ops.aten._unsafe_view(rows, rows.shape)

    def after_attention(self, rows, attended):
        # As (1, n, D): of a sum of matrices alone the compiler would make an addmm, which copies the other one first.
        x = rows[None] + self.self_attn.o_proj(attended)[None]
        return (x + self.mlp(self.post_attention_layernorm(x))).squeeze(0)

    def compile_rows(self, **options) -> None:
        """Compile what treats each token alone for any number of tokens; options are torch.compile's."""
        for name in ("before_attention", "after_attention"):
            setattr(self, name, for_any_rows(getattr(self, name), **options))


def _compile(graph, inputs):
    """Inductor, told to compute norms anew next to what reads them in the backward pass, in place of keeping them: a
    fifth of a layer's activations for a percent of its time."""
    from torch._inductor.compile_fx import compile_fx  # seconds to import

    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs)


def for_any_rows(function: Callable, **options) -> Callable:
    """``function`` compiled once for any number of rows of the tensors among its arguments."""
    compiled = torch.compile(function, fullgraph=True, **{"backend": _compile, **options})

    def run(*arguments):
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return run


class Router(nn.Module):
    """Linear, or two layers with GELU (paper, appendix "Details of Design Configurations"); no biases."""

    def __init__(self, config: MoRConfig, out: int):
        super().__init__()
        self.temperature = config.temperature
        self.linear = config.router_arch == "linear"
        width = config.hidden_size
        if self.linear:
            self.weight = nn.Parameter(torch.empty(out, width))
        else:
            hidden = width if config.router_arch == "mlp" else 4 * width
            self.up = nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, out, bias=False)

    def forward(self, x):
        """(..., D) -> fp32 logits (..., out), divided by the temperature; fp64 for fp64 x."""
        x, weight = (x, self.weight) if self.linear else (F.gelu(self.up(x)), self.down.weight)
        dtype = wide(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), weight.to(dtype)) / self.temperature


class LoRA(nn.Module):
    """What one recursion adds to one layer's query and value projections: B (A x)."""

    def __init__(self, config: MoRConfig):
        super().__init__()
        width, rank = config.hidden_size, config.lora_rank
        self.q_a = nn.Parameter(torch.empty(rank, width))
        self.q_b = nn.Parameter(torch.empty(config.num_attention_heads * config.head_dim, rank))
        self.v_a = nn.Parameter(torch.empty(rank, width))
        self.v_b = nn.Parameter(torch.empty(config.num_key_value_heads * config.head_dim, rank))

    def forward(self, name, x):
        return F.linear(F.linear(x, getattr(self, f"{name}_a")), getattr(self, f"{name}_b"))


def mixed_adapter(adapters: list[LoRA], recursion: torch.Tensor) -> Adapter:
    """An adapter for tokens (n, D) that are at different recursions (n,)."""

    def add(name, x):
        a, b = (torch.stack([getattr(m, f"{name}_{half}") for m in adapters])[recursion] for half in "ab")
        return torch.einsum("nor,nri,ni->no", b, a, x)

    return add
