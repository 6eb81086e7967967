"""The Llama layer, the routers and the per-recursion adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..ops._numeric import wide
from .config import MoRConfig

KV = Callable[[], tuple[torch.Tensor, torch.Tensor]]
# attend(q, kv, positions, theta) -> like q: attention for queries (..., H, d) of tokens at positions (...). kv() gives
# the keys and values (..., G, d) of the same tokens, and is called only where the strategy needs them. Queries and keys
# come as they were projected: attend applies ops.rope, together where it needs both.
Attend = Callable[[torch.Tensor, KV, torch.Tensor, float], torch.Tensor]
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
        self.head_dim, self.theta = d, config.rope_theta

    def forward(self, x, positions, attend: Attend, adapter: Adapter | None):
        def project(linear, name):
            y = linear(x) if adapter is None or name == "k" else linear(x) + adapter(name, x)
            return y.unflatten(-1, (y.shape[-1] // self.head_dim, self.head_dim))

        def kv():
            return project(self.k_proj, "k"), project(self.v_proj, "v")

        out = attend(project(self.q_proj, "q"), kv, positions, self.theta)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: MoRConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), for tokens in any layout (..., D) at ``positions`` (...)."""

    def __init__(self, config: MoRConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, positions, attend: Attend, adapter: Adapter | None = None):
        x = x + self.self_attn(self.input_layernorm(x), positions, attend, adapter)
        return x + self.mlp(self.post_attention_layernorm(x))


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
