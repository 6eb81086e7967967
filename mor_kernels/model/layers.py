"""The Llama layer, the routers and the per-recursion adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops._numeric import wide
from .config import MoRConfig

# project(keys=True) -> (..., H + 2G, d), queries, keys and values of tokens as projected; keys=False: (..., H, d)
Project = Callable[..., Tensor]
# attend(project, heads, positions, theta) -> (..., H, d), attention for tokens at positions (...); it turns queries and
# keys by their positions
Attend = Callable[[Project, int, Tensor, float], Tensor]
# see Layer.serve, as of its attend(x, normed, attention, norm, positions, theta) -> (n, H, d)
Normed = Sequence[Tensor]
Serve = Callable[[Tensor, Normed | None, "Attention", "RMSNorm", Tensor, float], Tensor]
# adapter("q" | "v", x) -> what a recursion adds to that projection
Adapter = Callable[[str, Tensor], Tensor]


NORMS_INSIDE = 32  # tokens up to which a norm inside of a product takes less time than one that is handed on


class RMSNorm(nn.RMSNorm):
    eps: float  # a number, where PyTorch's may be None


class Norms(nn.Module):
    """A layer's two norms, for layers that recursions share without them."""

    def __init__(self, config: MoRConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class TokenNorm(NamedTuple):
    """A norm with gains of each token's own."""

    weight: Tensor  # (n, D)
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class TokenNorms(NamedTuple):
    input_layernorm: TokenNorm
    post_attention_layernorm: TokenNorm


def norm_linear(norm: RMSNorm | TokenNorm, x: Tensor, weight: Tensor, add: Tensor | None) -> tuple[Tensor, Tensor]:
    """(n, D), and (n, D) to add or None -> their sum, and the product of its norm."""
    if not isinstance(norm, TokenNorm):
        return ops.rms_norm_linear(x, norm.weight, weight, norm.eps, add=add)
    x = x if add is None else x + add
    return x, F.linear(norm(x), weight)


class Attention(nn.Module):
    def __init__(self, config: MoRConfig) -> None:
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, d
        self.qkv_proj = nn.Linear(width, (self.heads + 2 * self.groups) * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, width, bias=False)

    def project(
        self, norm: RMSNorm | TokenNorm, x: Tensor, add: Tensor | None, adapter: Adapter | None, keys: bool
    ) -> tuple[Tensor, Tensor]:
        """(n, D), and (n, D) to add or None -> their sum, and of its norm (n, (H + 2G) d), or (n, H d) without keys."""
        q_width, k_width = self.heads * self.head_dim, self.groups * self.head_dim
        weight = self.qkv_proj.weight if keys else self.qkv_proj.weight[:q_width]
        if adapter is None:
            return norm_linear(norm, x, weight, add)
        x = x if add is None else x + add
        h = norm(x)
        q = adapter("q", h)
        extra = torch.cat((q, q.new_zeros(len(q), k_width), adapter("v", h)), -1) if keys else q
        return x, F.linear(h, weight) + extra


class MLP(nn.Module):
    def __init__(self, config: MoRConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), for tokens in any layout (..., D) at ``positions`` (...).

    What enters is x + add, and what leaves is a pair as well: a sum is left to the norm that reads it, which is one
    kernel with it.
    """

    def __init__(self, config: MoRConfig, norms: bool = True) -> None:
        """norms=False: it has none, and is given those of a recursion."""
        super().__init__()
        if norms:
            self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        if norms:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)
        self.theta = config.rope_theta

    def forward(
        self,
        x: Tensor,
        add: Tensor | None,
        positions: Tensor,
        attend: Attend,
        adapter: Adapter | None = None,
        given: Norms | TokenNorms | None = None,
    ) -> tuple[Tensor, Tensor]:
        norms = self if given is None else given
        view = torch.ops.aten._unsafe_view  # no views for autograd: FSDP2 warns of hooks on them
        lead, d = x.shape[:-1], self.self_attn.head_dim

        def flat(t: Tensor) -> Tensor:
            return view(t.contiguous(), (lead.numel(), t.shape[-1]))

        x, add = flat(x), None if add is None else flat(add)

        def project(keys: bool = True) -> Tensor:
            nonlocal x
            x, y = self.self_attn.project(norms.input_layernorm, x, add, adapter, keys)
            return view(y, (*lead, y.shape[-1] // d, d))

        attended = attend(project, self.self_attn.heads, positions, self.theta)
        attended = self.self_attn.o_proj(view(attended, (len(x), attended.shape[-2:].numel())))
        x, gate_up = norm_linear(norms.post_attention_layernorm, x, self.mlp.gate_up_proj.weight, attended)
        add = ops.swiglu_linear(gate_up, self.mlp.down_proj.weight)
        return view(x, (*lead, x.shape[-1])), view(add, (*lead, x.shape[-1]))

    def serve(
        self, x: Tensor, normed: Normed | None, positions: Tensor, attend: Serve, next_norm: RMSNorm | None
    ) -> tuple[Tensor, Normed | None]:
        """The sum of what :meth:`forward` returns, for a few tokens (n, D) while decoding: three launches and those
        of attend(x, normed, attention, norm, positions, theta) -> (n, H, d), which projects as well. Nothing writes
        weights meanwhile.

        normed: x times the gains of this layer's norm, and sums of the squares of x; or None, and it is normalised
        here. Returns the sum, and the same for the norm that follows, if that is given and such are wanted.
        """
        linear, attention, mlp = functools.partial(ops.decode_linear, prefetch=True), self.self_attn, self.mlp
        attended = attend(x, normed, attention, self.input_layernorm, positions, self.theta).flatten(1)
        norm, gate_up, down = self.post_attention_layernorm, mlp.gate_up_proj.weight, mlp.down_proj.weight
        if len(x) <= NORMS_INSIDE:
            x = linear(attended, attention.o_proj.weight, residual=x)
            h = linear(x, gate_up, norm_weight=norm.weight, eps=norm.eps, gated=True)
        else:
            x, scaled, squares = linear(attended, attention.o_proj.weight, residual=x, next_norm_weight=norm.weight)
            h = linear(scaled, gate_up, squares=squares, eps=norm.eps, gated=True)
            if next_norm is not None:
                x, *normed = linear(h, down, residual=x, next_norm_weight=next_norm.weight)
                return x, normed
        return linear(h, down, residual=x), None


class Router(nn.Module):
    """Linear, or two layers with GELU (paper, appendix "Details of Design Configurations"); no biases."""

    def __init__(self, config: MoRConfig, out: int, auxiliary: bool = False) -> None:
        super().__init__()
        self.linear = config.router_arch == "linear"
        at_state = config.router_temperature_at == "state"
        self.temperature = 1.0 if auxiliary and at_state else config.router_temperature
        self.divides_state = at_state and not self.linear  # of a linear router that is the same
        width = config.hidden_size
        if self.linear:
            self.weight = nn.Parameter(torch.empty(out, width))
        else:
            assert config.router_expansion is not None  # as MoRConfig stores it
            hidden = width * config.router_expansion
            self.up = nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> fp32 logits (..., out), divided by the temperature; fp64 for fp64 x."""
        x = x / self.temperature if self.divides_state else x
        x, weight = (x, self.weight) if self.linear else (F.gelu(self.up(x)), self.down.weight)
        dtype = wide(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), weight.to(dtype))
        return logits if self.divides_state else logits / self.temperature


class LoRA(nn.Module):
    """What one recursion adds to one layer's query and value projections: B (A x)."""

    def __init__(self, config: MoRConfig) -> None:
        super().__init__()
        width, rank = config.hidden_size, config.lora_rank
        self.q_a = nn.Parameter(torch.empty(rank, width))
        self.q_b = nn.Parameter(torch.empty(config.num_attention_heads * config.head_dim, rank))
        self.v_a = nn.Parameter(torch.empty(rank, width))
        self.v_b = nn.Parameter(torch.empty(config.num_key_value_heads * config.head_dim, rank))

    def forward(self, name: str, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, getattr(self, f"{name}_a")), getattr(self, f"{name}_b"))


def mixed_adapter(adapters: list[LoRA], recursion: Tensor) -> Adapter:
    """An adapter for tokens (n, D) that are at different recursions (n,)."""

    def add(name: str, x: Tensor) -> Tensor:
        a, b = (torch.stack([getattr(m, f"{name}_{half}") for m in adapters])[recursion] for half in "ab")
        return torch.einsum("nor,nri,ni->no", b, a, x)

    return add


def mixed_norms(norms: list[Norms], recursion: Tensor) -> TokenNorms:
    """Norms for tokens (n, D) that are at different recursions (n,)."""

    def each(name: str) -> TokenNorm:
        of = [getattr(m, name) for m in norms]
        return TokenNorm(torch.stack([norm.weight for norm in of])[recursion], of[0].eps)

    return TokenNorms(each("input_layernorm"), each("post_attention_layernorm"))
