"""The Llama layer, the routers and the per-recursion adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..ops._numeric import wide
from .config import MoRConfig

# project(keys=True) -> the queries (..., H, d) of tokens, and their keys and values (..., G, d) unless keys=False
Project = Callable[..., Sequence[torch.Tensor]]
# attend(project, positions, theta) -> like the queries: attention for tokens at positions (...). Queries and keys come as
# they were projected: attend applies ops.rope, together where it needs both.
Attend = Callable[[Project, torch.Tensor, float], torch.Tensor]
# adapter("q" | "v", x) -> what a recursion adds to that projection
Adapter = Callable[[str, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self, config: MoRConfig):
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, width, bias=False)


class MLP(nn.Module):
    def __init__(self, config: MoRConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def forward(self, x, positions, attend: Attend, adapter: Adapter | None = None):
        rows = x.flatten(0, -2)

        def project(keys=True):
            projected = self.before_attention(rows, adapter, keys)
            return [y.view(*x.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim) for y in projected]

        attended = attend(project, positions, self.theta)
        out = self.after_attention(rows, attended.flatten(-2).flatten(0, -2))
        return torch.ops.aten._unsafe_view(out, x.shape)  # no view for autograd: FSDP2 warns of hooks on those

    def before_attention(self, rows, adapter: Adapter | None, keys: bool):
        x, attention = self.input_layernorm(rows), self.self_attn
        q = attention.q_proj(x) if adapter is None else attention.q_proj(x) + adapter("q", x)
        if not keys:
            return (q,)
        v = attention.v_proj(x) if adapter is None else attention.v_proj(x) + adapter("v", x)
        return q, attention.k_proj(x), v

    def after_attention(self, rows, attended):
        x = rows + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    def compile_rows(self, **options) -> None:
        """Compile what treats each token alone for any number of tokens; options are torch.compile's."""
        for name in ("before_attention", "after_attention"):
            setattr(self, name, for_any_rows(getattr(self, name), **options))


def for_any_rows(function: Callable, **options) -> Callable:
    """``function`` compiled once for any number of rows of the tensors among its arguments."""
    compiled = torch.compile(function, fullgraph=True, **options)

    def run(*arguments):
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        # Norms and products are computed anew, next to what reads them in the backward pass, in place of being kept:
        # a third of a layer's activations for a few percent of its time.
        with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
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
