"""The Mixture-of-Recursions language model, assembled from the operators."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..files import read_weights, replacing, write_json
from ..ops._indices import flat_rows
from ..ops._numeric import activate, bounded, wide
from ..ops.decode_linear import is_fused
from .authors import authors_config, authors_to_state
from .config import MoRConfig, fail
from .convert import dense_origins, join, read_dense, separate
from .hugging_face import describe, write_loader
from .keys_values import BatchedKeyValues, PackedKeyValues
from .layers import Layer, LoRA, Norms, RMSNorm, Router, mixed_adapter, mixed_norms

if TYPE_CHECKING:
    from ..decode.cache import Plan

# depths, losses and metrics, as in MoROutput
Routing = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
Layout = TypeVar("Layout", BatchedKeyValues, PackedKeyValues)
Part = TypeVar("Part")
Mixed = TypeVar("Mixed")


class MoROutput(NamedTuple):
    """What :class:`MoR` returns."""

    logits: Tensor | None  #: (B, T, V); zeros at padding; None if they weren't asked for
    #: language model loss plus the router losses times their coefficients; None without targets
    loss: Tensor | None
    losses: dict[str, Tensor]  #: "lm", "aux", "z", "balance" as they apply, without coefficients
    depths: Tensor  #: (B, T) int64: recursions that each token took; 0 at padding
    metrics: dict[str, Tensor]  #: "sampling_accuracy", "dead_token_ratio"; "max_vio", "entropy"
    router_logits: Tensor | None = None  #: (B, T, Nr) fp32 (fp64 of fp64 states) if asked for, see the call


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return sum(terms)  # type: ignore[return-value]  # of at least one


def _own(
    parts: list[list[Part]], slot: int, recursion: int | Tensor, mixed: Callable[[list[Part], Tensor], Mixed]
) -> Part | Mixed | None:
    """What a recursion has of its own for a layer's slot, ``mixed`` for tokens at different ones; None if there are no
    such parts."""
    if not len(parts):
        return None
    return mixed([own[slot] for own in parts], recursion) if isinstance(recursion, Tensor) else parts[recursion][slot]


class MoR(nn.Module):
    """A Llama-like Transformer whose shared block of layers is applied 1..Nr times to each token.

    ``MoR(config)(input_ids, targets)`` trains; in ``eval()`` mode the same call routes causally, as decoding does.
    """

    router_bias: Tensor | None

    def __init__(self, config: MoRConfig) -> None:
        super().__init__()
        self.config = config
        recursions = config.num_recursions
        # Compute each layer anew in the backward pass, from its input, in place of keeping what it computed: the
        # routers' choices stay, since no router is in a layer.
        self.activation_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        ends = (0, config.num_unique_layers - 1) if config.has_own_ends else ()
        layers = (Layer(config, norms=config.share_norms or i in ends) for i in range(config.num_unique_layers))
        self.layers = cast("list[Layer]", nn.ModuleList(layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        expert, token = config.router == "expert_choice", config.router == "token_choice"
        self.routers = cast("list[Router]", nn.ModuleList(Router(config, 1) for _ in range(recursions * expert)))
        if token:
            self.routers.append(Router(config, recursions))
        aux = expert and config.aux == "router"
        auxiliary = (Router(config, 1, auxiliary=True) for _ in range(recursions * aux))
        self.aux_routers = cast("list[Router]", nn.ModuleList(auxiliary))
        loss_free = token and config.balance == "loss_free"
        self.register_buffer("router_bias", torch.zeros(recursions, dtype=torch.float32) if loss_free else None)
        slots = len(config.recursion_layers[0])
        lora = (nn.ModuleList(LoRA(config) for _ in range(slots)) for _ in range(recursions * (config.lora_rank > 0)))
        self.lora = cast("list[list[LoRA]]", nn.ModuleList(lora))
        norms = (
            nn.ModuleList(Norms(config) for _ in range(slots)) for _ in range(recursions * (not config.share_norms))
        )
        self.norms = cast("list[list[Norms]]", nn.ModuleList(norms))
        self.recursion_encoding = None
        if config.recursion_encoding:
            self.recursion_encoding = nn.Parameter(torch.empty(recursions, config.hidden_size))
        self._initialise()

    def _apply(self, *args: Any, **kwargs: Any) -> MoR:
        bias = self.router_bias
        super()._apply(*args, **kwargs)
        if bias is not None and self.router_bias is not None:  # steps of 0.001 would be lost in bf16
            self.router_bias = bias.to(self.router_bias.device)
        return self

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight") or name == "recursion_encoding":
                parameter.fill_(1.0)
            elif name.endswith(("q_b", "v_b")):
                parameter.zero_()  # a recursion's adapter starts as nothing
            else:
                parameter.normal_(0.0, self.config.initializer_range)

    # Pieces, shared with the decoding engine: tokens in any layout (..., D).

    def block(self, x: Tensor, recursion: int | Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """f of one recursion.

        Args:
            x: (..., D); positions: (...) absolute.
            recursion: its number from 0; or (n,) int64 for tokens (n, D) at different recursions, where all recursions
                share their layers (sharing "cycle" and "middle_cycle").
            attend: attend(slot, project, heads, positions, theta), see layers.py and keys_values.py.
        """
        add: Tensor | None = None
        for slot, index in enumerate(self._layers_at(recursion)):
            adapter = _own(self.lora, slot, recursion, mixed_adapter)
            norms = _own(self.norms, slot, recursion, mixed_norms)
            x, add = self._layer(index, x, add, positions, functools.partial(attend, slot), adapter, norms)
        return self._encoded(x if add is None else x + add, recursion)

    def serve(self, x: Tensor, recursion: int | Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """:meth:`block` for tokens (n, D) while decoding: plan.attend as there; or, for few tokens without adapters or
        norms of their own, plan.serve, see Layer.serve in layers.py."""
        if len(self.lora) or len(self.norms) or not is_fused(x):
            return self.block(x, recursion, positions, plan.attend)
        layers = self._layers_at(recursion)
        norms = [self.layers[index].input_layernorm for index in layers[1:]] + [None]
        normed = None
        for slot, (index, norm) in enumerate(zip(layers, norms)):
            attend = functools.partial(plan.serve, slot)
            x, normed = self.layers[index].serve(x, normed, positions, attend, norm)
        return self._encoded(x, recursion)

    def _layers_at(self, recursion: int | Tensor) -> tuple[int, ...]:
        return self.config.recursion_layers[recursion if isinstance(recursion, int) else 0]

    def _encoded(self, x: Tensor, recursion: int | Tensor) -> Tensor:
        """What a recursion put out, times its learned encoding, if there are such."""
        return x if self.recursion_encoding is None else x * self.recursion_encoding[recursion].to(x.dtype)

    def serve_first(self, x: Tensor, positions: Tensor, plan: Plan | None) -> Tensor:
        """:meth:`first_layer` likewise; plan is None for a model that has no own ends."""
        if plan is None or not is_fused(x):
            return self.first_layer(x, positions, None if plan is None else functools.partial(plan.attend, 0))
        return self.layers[0].serve(x, None, positions, functools.partial(plan.serve, 0), None)[0]

    def serve_last(self, x: Tensor, positions: Tensor, plan: Plan | None) -> Tensor:
        """:meth:`last_layer` likewise."""
        if plan is None or not is_fused(x):
            return self.last_layer(x, positions, None if plan is None else functools.partial(plan.attend, 1))
        x = self.layers[-1].serve(x, None, positions, functools.partial(plan.serve, 1), None)[0]
        return ops.rms_norm(x, self.norm.weight, self.norm.eps)[1]

    def _layer(self, index: int, x: Tensor, add: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        """See Layer in layers.py."""
        layer = self.layers[index]
        if self.activation_checkpointing and torch.is_grad_enabled():
            x, add = x if add is None else x + add, None  # one of them is kept
            return checkpoint(layer, x, add, *arguments, use_reentrant=False, preserve_rng_state=False)
        return layer(x, add, *arguments)

    def first_layer(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor] | None) -> Tensor:
        if self.config.has_own_ends:
            x, add = self._layer(0, x, None, positions, attend)
            x = x + add
        return x

    def last_layer(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor] | None) -> Tensor:
        """And the norm before the head."""
        add = None
        if self.config.has_own_ends:
            x, add = self._layer(-1, x, None, positions, attend)
        return ops.rms_norm(x, self.norm.weight, self.norm.eps, add=add)[1]

    @property
    def head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head_weight)

    def kept(self, length: int, step: int | None = None) -> tuple[int, ...]:
        """See :meth:`MoRConfig.kept`."""
        return self.config.kept(length, step)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        ks: tuple[int, ...] | None = None,
        bounds: tuple[int, ...] | None = None,
        mode: str | None = None,
        logits: bool = True,
        router_logits: bool = False,
    ) -> MoROutput:
        """Logits, loss and depths of a batch.

        Args:
            input_ids: (B, T) int64 or int32.
            targets: (B, T) int64, the token that follows each; -100 for none.
            attention_mask: (B, T) bool or integers, 0 at padding, which may be anywhere; a token's position is
                its rank among the real tokens of its row.
            ks: tokens that each recursion keeps, expert-choice in mode "topk"; default ``kept(T)``.
            bounds: numbers that the caller is sure of, token-choice: at most so many of the B * T tokens take each
                recursion. Nothing waits for the device then, and the results are NaN where more do.
            mode: "topk" (expert-choice as trained, looking at the whole sequence) or "threshold" (causal, as decoding
                does). Default "topk" in training and "threshold" in evaluation. Token-choice is causal in both.
            logits: False computes the loss from a few thousand tokens' logits at a time and returns none, which
                takes a fraction of the memory and less time.
            router_logits: also return the logits that the depths were chosen by. Expert-choice: [..., r] is that of the
                state entering recursion r (in "threshold" the auxiliary router's, where there is one; the first
                recursion's are the gates' alone), NaN where the token doesn't get there. Token-choice: those of all
                depths, without the bias of loss-free balancing. NaN at padding; None of a model without routers.

        Returns:
            :class:`MoROutput`.

        Raises:
            ValueError: an argument doesn't fit; the message names it.
        """
        mode = mode or ("topk" if self.training else "threshold")
        self._check(input_ids, targets, attention_mask, ks, bounds, mode)
        seqlens = order = None
        if attention_mask is not None:  # real tokens to the left, in order, so that lengths describe what is real
            real = attention_mask.bool()
            order = (~real).long().argsort(dim=1, stable=True)
            seqlens = real.sum(1)
            input_ids = input_ids.gather(1, order)
            if targets is not None:
                targets = torch.where(real, targets, -100).gather(1, order)

        length = input_ids.shape[1]
        ends = BatchedKeyValues(seqlens=seqlens)
        x, positions = self._enter(input_ids, ends)
        # router logits of each recursion (B, T)
        seen: list[Tensor] | None = [] if router_logits and self.config.router != "none" else None
        if self.config.router == "none":
            x, routing = self._fixed_depth(x, positions, seqlens)
        elif self.config.router == "token_choice":
            x, routing = self._token_choice(x, positions, seqlens, bounds, seen)
        elif mode == "topk":
            x, routing = self._expert_choice(x, ks or self.kept(length), seqlens, seen)
        else:
            x, routing = self._threshold(x, positions, seqlens, seen)
        depths, losses, metrics = routing
        scores = torch.stack(seen, -1) if seen else None
        x = self.last_layer(x, positions, functools.partial(ends.attend, 0))
        values = self.head(x) if logits else None

        loss = None
        if targets is not None:
            count = (targets != -100).sum().clamp(min=1)
            if values is not None:
                rows = values.flatten(0, 1).to(wide(values.dtype))
                total = F.cross_entropy(rows, targets.flatten(), ignore_index=-100, reduction="sum")
            else:
                total = ops.linear_cross_entropy(x, self.head_weight, targets)
            losses = {"lm": total / count, **losses}
            coefficients = {
                "lm": 1.0,
                "aux": self.config.aux_coeff,
                "z": self.config.z_coeff,
                "balance": self.config.balance_coeff,
            }
            loss = _sum(coefficients[name] * value for name, value in losses.items())
        if order is not None:
            back = order.argsort(dim=1)
            depths = depths.gather(1, back)
            if scores is not None:
                scores = scores.gather(1, back[..., None].expand_as(scores))
            if values is not None:
                values = torch.where(real[..., None], values.gather(1, back[..., None].expand_as(values)), 0)
        return MoROutput(values, loss, losses, depths, metrics, scores)

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's may return anything

    def _enter(self, input_ids: Tensor, ends: BatchedKeyValues) -> tuple[Tensor, Tensor]:
        """States entering the first recursion, and positions."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        x = self.embed_tokens(input_ids)
        return self.first_layer(x, positions, functools.partial(ends.attend, 0)), positions

    def _check(
        self,
        input_ids: Tensor,
        targets: Tensor | None,
        attention_mask: Tensor | None,
        ks: Sequence[int] | None,
        bounds: Sequence[int] | None,
        mode: str,
    ) -> None:
        integers = (torch.int64, torch.int32)
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in integers:
            got = getattr(input_ids, "dtype", type(input_ids).__name__)
            fail(
                "input_ids",
                "int64 or int32 of shape (B, T)",
                f"{got} of shape {tuple(getattr(input_ids, 'shape', ()))}",
            )
        if input_ids.shape[1] > self.config.max_position_embeddings:
            fail("input_ids", f"at most {self.config.max_position_embeddings} positions", input_ids.shape[1])
        for name, value in (("targets", targets), ("attention_mask", attention_mask)):
            if value is not None and (not isinstance(value, Tensor) or value.shape != input_ids.shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                fail(name, f"the shape of input_ids, {tuple(input_ids.shape)}", got)
        if targets is not None and targets.dtype != torch.int64:
            fail("targets", "int64", targets.dtype)
        known = f"ids from 0 to {self.config.vocab_size - 1}, below vocab_size"
        for name, ids, expected in (("input_ids", input_ids, known), ("targets", targets, f"-100 or {known}")):
            # where looking at values waits for nothing
            if ids is not None and ids.device.type == "cpu" and not torch.compiler.is_compiling():
                wrong = (ids < 0) | (ids >= self.config.vocab_size)
                wrong = wrong & (ids != -100) if name == "targets" else wrong
                if wrong.any():
                    fail(name, expected, int(ids[wrong][0]))
        if mode not in ("topk", "threshold"):
            fail("mode", "'topk' or 'threshold'", repr(mode))
        recursions, length = self.config.num_recursions, input_ids.shape[1]

        def falling(numbers: Sequence[int], most: int) -> bool:
            if not isinstance(numbers, (tuple, list)) or len(numbers) != recursions:
                return False
            whole = all(isinstance(n, (int, torch.SymInt)) and n >= 0 for n in numbers)
            return whole and all(a >= b for a, b in zip((most, *numbers), numbers))

        if ks is not None:
            if self.config.router != "expert_choice" or mode != "topk":
                fail("ks", "none but for expert_choice in mode 'topk'", ks)
            if not (falling(ks, length) and ks[0] == length):
                fail("ks", f"{recursions} non-increasing numbers, the first {length}", ks)
        if bounds is not None:
            if self.config.router != "token_choice":
                fail("bounds", "none but for token_choice", bounds)
            if not falling(bounds, input_ids.numel()):
                fail("bounds", f"{recursions} non-increasing numbers, the first at most {input_ids.numel()}", bounds)

    def _key_values(self, kind: type[Layout], before: Layout | None, **layout: Any) -> Layout:
        return kind(self.config.kv, self.config.hybrid_base, before, **layout)

    def _packed(
        self, before: PackedKeyValues | None, indices: Tensor, cu_seqlens: Tensor, longest: int, places: Tensor,
        length: int,
    ) -> PackedKeyValues:  # fmt: skip
        """Of tokens (n,), rows of the flattened batch; ``places`` (B * N,) says where rows stand among real tokens."""
        where = indices.clamp(min=0)
        return self._key_values(
            PackedKeyValues, before, positions=where % length, cu_seqlens=cu_seqlens, max_seqlen=longest,
            places=torch.where(indices >= 0, places[where], -1),
        )  # fmt: skip

    def _real(self, positions: Tensor, seqlens: Tensor | None) -> Tensor:
        """(B, N) bool: tokens that are not padding."""
        return torch.ones_like(positions, dtype=torch.bool) if seqlens is None else positions < seqlens[:, None]

    def _fixed_depth(self, x: Tensor, positions: Tensor, seqlens: Tensor | None) -> tuple[Tensor, Routing]:
        """Every token takes every recursion; no gates. Also the dense model, as one recursion."""
        key_values = None
        for r in range(self.config.num_recursions):
            key_values = self._key_values(BatchedKeyValues, key_values, seqlens=seqlens)
            x = self.block(x, r, positions, key_values.attend)
        depths = torch.where(self._real(positions, seqlens), self.config.num_recursions, 0)
        return x, (depths, {}, {})

    def _expert_choice(
        self, x: Tensor, ks: Sequence[int], seqlens: Tensor | None, seen: list[Tensor] | None = None
    ) -> tuple[Tensor, Routing]:
        """Each recursion keeps the best k of the tokens that the one before kept (paper, equation 1)."""
        config = self.config
        assert config.router_activation is not None and config.alpha is not None  # as MoRConfig stores them
        batch, length, _ = x.shape
        everyone = torch.arange(length, device=x.device).expand(batch, length)
        everyone = torch.where(self._real(everyone, seqlens), everyone, -1)
        key_values = None
        depths = torch.zeros(batch, length + 1, dtype=torch.int64, device=x.device)
        aux, z, accuracies = [], [], []
        kept = None
        for r, k in enumerate(ks):
            router = self.routers[r]
            routed = ops.route(
                x,
                router.weight[0] if router.linear else None,
                k,
                logits=None if router.linear else router(self._candidate_rows(x, kept))[..., 0],
                candidates=kept,
                seqlens=seqlens,
                indices=None if r else everyone,  # the first recursion takes every token, whatever its logit
                activation=config.router_activation,
                alpha=config.alpha,
                temperature=config.router_temperature if router.linear else 1.0,  # its own forward divides
                rank=config.rank,
            )
            positions = routed.indices.clamp(min=0)
            key_values = self._key_values(
                BatchedKeyValues, key_values, seqlens=seqlens, indices=routed.indices, counts=routed.counts
            )
            update = self.block(routed.rows, r, positions, key_values.attend)

            deciding = routed.logits
            if len(self.aux_routers):
                deciding = self.aux_routers[r](self._candidate_rows(x.detach(), kept))[..., 0]
            if config.aux != "none" and config.aux_coeff:
                aux.append(ops.aux_loss(deciding, routed.indices, candidates=kept, seqlens=seqlens))
            candidates = everyone if kept is None else kept
            if seen is not None:
                places = torch.where(candidates >= 0, candidates, length)
                row = routed.logits.new_full((batch, length + 1), torch.nan)
                seen.append(row.scatter(1, places, routed.logits)[:, :length])
            if config.z_coeff:
                z.append(ops.z_loss(routed.logits, valid=candidates >= 0))

            depths.scatter_(1, torch.where(routed.indices >= 0, routed.indices, length), r + 1)
            gates = None if config.gate == "none" else routed.gates
            x = ops.scatter_back(x, update, routed.indices, gates, residual=config.residual)
            if r:
                chosen = depths.gather(1, candidates.clamp(min=0)) == r + 1
                accuracies.append(ops.sampling_accuracy(deciding.detach() > 0, chosen, candidates >= 0))
            kept = routed.indices
        depths = depths[:, :length]
        losses = {name: _sum(terms) for name, terms in (("aux", aux), ("z", z)) if terms}
        metrics = {"dead_token_ratio": ops.dead_token_ratio(depths == config.num_recursions, everyone >= 0)}
        if accuracies:
            metrics["sampling_accuracy"] = torch.stack(accuracies).mean()
        return x, (depths, losses, metrics)

    @staticmethod
    def _candidate_rows(x: Tensor, kept: Tensor | None) -> Tensor:
        if kept is None:
            return x
        rows = ops.gather(x.flatten(0, 1), flat_rows(kept, x.shape[1]))
        return rows.view(*kept.shape, x.shape[-1])

    def _threshold(
        self, x: Tensor, positions: Tensor, seqlens: Tensor | None, seen: list[Tensor] | None = None
    ) -> tuple[Tensor, Routing]:
        """Expert-choice without a look at later tokens: a token goes on while the deciding logit is positive."""
        config = self.config
        key_values = None
        shape, length = x.shape, x.shape[1]
        depths = self._real(positions, seqlens).long()
        x = x.flatten(0, 1)
        places = depths.flatten().cumsum(0) - 1
        # without gradients, in place: the stream is this call's own
        scatter_back = ops.scatter_back if torch.is_grad_enabled() else ops.scatter_back_
        for r in range(config.num_recursions):
            if seen is not None:
                decided = (self.aux_routers or self.routers)[r](x).view(shape[:2])
                seen.append(torch.where(depths >= max(r, 1), decided, torch.nan))
            if r:
                depths = torch.where((depths == r) & self.goes_on(r, x).view(shape[:2]), r + 1, depths)
            packed = ops.pack_depths((depths > r).int(), 1)
            ((indices, cu_seqlens, longest),) = self._trim(packed, length)
            rows = ops.gather(x, indices)
            key_values = self._packed(key_values, indices, cu_seqlens, longest, places, length)
            update = self.block(rows, r, key_values.positions, key_values.attend)
            gates = None if config.gate == "none" else self.expert_gates(r, rows)
            x = scatter_back(x, update, indices, gates, residual=config.residual)
        return x.view(shape), (depths, {}, {})

    def goes_on(self, recursion: int, x: Tensor) -> Tensor:
        """Expert-choice at inference: whether states (..., D) kept so far enter ``recursion`` >= 1, bool (...).

        The unscaled logit decides, of the auxiliary router where there is one; what is no number doesn't go on.
        """
        logits = self.routers[recursion](x)[..., 0]
        if len(self.aux_routers):
            return (self.aux_routers[recursion](x)[..., 0] > 0) & ~logits.isnan()
        return logits > 0

    def expert_gates(self, recursion: int, x: Tensor) -> Tensor:
        """Expert-choice: fp32 gates (...) of states (..., D) entering ``recursion``, as in :func:`ops.route`."""
        logits = self.routers[recursion](x)[..., 0]
        activation, alpha = self.config.router_activation, self.config.alpha
        assert activation is not None and alpha is not None  # see _expert_choice
        gates = bounded(alpha * activate(bounded(logits), activation))
        return torch.where(logits.isnan(), 0, gates)

    def choose_depths(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Token-choice: router logits, depths (B, N) and probabilities (B, N, Nr) of states (B, N, D) entering the
        first recursion; the gate of recursion r is ``alpha * probs[..., r]``."""
        activation = self.config.router_activation
        assert activation is not None  # see _expert_choice
        logits = self.routers[0](x)
        return logits, *ops.choose_depths(logits, activation=activation, bias=self.router_bias, valid=valid)

    def bounds(self, input_ids: Tensor) -> tuple[int, ...]:
        """Token-choice: how many of the tokens (B, T) take each recursion, rounded up to sixteenths of B * T, for
        ``forward(bounds=)``. Few different numbers come out of it, so that a CUDA graph can serve each; it waits for
        the device, after the first layer."""
        # not without gradients, where the compiler may round otherwise and a token then choose another depth
        x, _ = self._enter(input_ids, BatchedKeyValues())
        recursions = torch.arange(self.config.num_recursions, device=x.device)
        counts = (self.choose_depths(x)[1][..., None] > recursions).sum((0, 1)).tolist()
        step = max(math.ceil(input_ids.numel() / 16), 1)
        return tuple(min(math.ceil(count / step) * step, input_ids.numel()) for count in counts)

    def _token_choice(
        self, x: Tensor, positions: Tensor, seqlens: Tensor | None, bounds: Sequence[int] | None,
        seen: list[Tensor] | None = None,
    ) -> tuple[Tensor, Routing]:  # fmt: skip
        """Each token takes the recursions up to the depth that the router gave it at the outset (paper, equation 2)."""
        config = self.config
        assert config.alpha is not None  # see _expert_choice
        key_values = None
        shape, length = x.shape, x.shape[1]
        real = self._real(positions, seqlens)
        logits, depths, probs = self.choose_depths(x, real)
        if seen is not None:
            seen.extend(torch.where(real[..., None], logits, torch.nan).unbind(-1))
        gates = (config.alpha * probs).flatten(0, 1)
        start = state = x.flatten(0, 1)
        places = real.flatten().cumsum(0) - 1
        if bounds is not None:  # kernels read where places say
            places = torch.where(places < bounds[0], places, -1)
        packed = ops.pack_depths(depths, config.num_recursions)
        for r, (indices, cu_seqlens, longest) in enumerate(self._trim(packed, length, bounds)):
            key_values = self._packed(key_values, indices, cu_seqlens, longest, places, length)
            update = self.block(ops.gather(state, indices), r, key_values.positions, key_values.attend)
            gate = ops.gather(gates[:, r], indices) if config.gate == "every_step" else None
            state = ops.scatter_back(state, update, indices, gate, residual="none")
        exit_gate = None
        if config.gate == "exit_only":
            exit_gate = gates.gather(1, depths.view(-1, 1).clamp(min=1) - 1)[:, 0]
        everyone = torch.where(real.flatten(), torch.arange(len(start), device=x.device), -1)
        x = ops.scatter_back(start, state, everyone, exit_gate).view(shape)
        if bounds is not None:  # tokens beyond them were left out: no number says so, and nothing waits for the device
            excess = torch.stack([count > bound for count, bound in zip(packed.cu_seqlens[:, -1], bounds)])
            x = torch.where(excess.any(), torch.nan, x)

        losses = {"z": ops.z_loss(logits, valid=real)} if config.z_coeff else {}
        if config.balance == "loss" and config.balance_coeff:
            losses["balance"] = ops.balance_loss(probs, depths, scope=config.balance_scope)
        recursions = torch.arange(1, config.num_recursions + 1, device=x.device)
        with torch.no_grad():
            share = torch.where(real[..., None], probs, 0).sum((0, 1)) / real.sum().clamp(min=1)
            metrics = {
                "max_vio": ops.max_vio((depths[..., None] == recursions).sum((0, 1))),
                "entropy": ops.routing_entropy(share[None] / share.sum()),  # probabilities of "sigmoid" don't sum to 1
            }
        return x, (depths, losses, metrics)

    @staticmethod
    def _trim(packed: ops.Packed, length: int, bounds: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor, int]]:
        """Each recursion's (indices, cu_seqlens, bound on a sequence's tokens), cut to the tokens there are, or to so
        many that the caller is sure of.

        Reading how many there are waits for the device once; a compiled graph keeps the full, static size instead.
        """
        if bounds is not None:
            # cut alike where there are more, since kernels read what cu_seqlens says
            return [(i[:n], c.clamp(max=n), length) for i, c, n in zip(packed.indices, packed.cu_seqlens, bounds)]
        if torch.compiler.is_compiling():
            return [(i, c, length) for i, c in zip(packed.indices, packed.cu_seqlens)]
        lengths = F.pad(packed.cu_seqlens.diff(dim=1), (0, 1))  # one more, since a batch may have no rows
        sizes = torch.stack((packed.cu_seqlens[:, -1], lengths.amax(1))).T.tolist()
        return [(i[:n], c, m) for i, c, (n, m) in zip(packed.indices, packed.cu_seqlens, sizes)]

    @torch.no_grad()
    def update_router_bias(self, depths: Tensor) -> None:
        """Loss-free balancing, once an optimizer step: depths of the step's tokens, on this rank; no-op without it."""
        if self.router_bias is None:
            return
        recursions = torch.arange(1, self.config.num_recursions + 1, device=depths.device)
        counts = (depths.reshape(-1, 1) == recursions).sum(0)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        self.router_bias.copy_(ops.router_bias_update(self.router_bias, counts, self.config.bias_update_rate))

    def save_pretrained(self, directory: str | os.PathLike[str], state: dict[str, Tensor] | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors``, each aside and then renamed, and what transformers needs to
        load them (:mod:`mor_kernels.hf`).

        ``state`` is the model's state dict, if that is divided among processes and somebody put it together.
        """
        os.makedirs(directory, exist_ok=True)
        weights, config = (os.path.join(directory, name) for name in ("model.safetensors", "config.json"))
        state = separate(self.state_dict() if state is None else state, self.config)
        with replacing(weights) as aside:
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, aside, {"format": "pt"})
        write_json(config, {**describe(), **self.config.to_dict()})
        write_loader(directory)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], **changes: Any) -> MoR:
        """A saved model, in the dtype that it was saved in; ``changes`` override fields of its configuration.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is corrupt or of another model; the message says which.
        """
        weights, config = (os.path.join(directory, name) for name in ("model.safetensors", "config.json"))
        for path in (config, weights):
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{path}: expected a saved model's file, found none")
        found = MoRConfig.from_dict({**MoRConfig.load(config).to_dict(), **changes})
        state = read_weights(weights)
        cls.check_state(found, state, weights)
        model = cls(found).to(state["embed_tokens.weight"].dtype)
        model.load_checked(state, weights)
        return model

    @classmethod
    def check_state(cls, config: MoRConfig, state: dict[str, Tensor], source: str) -> None:
        """A ValueError unless a model of this configuration has these tensors in its file. It takes no memory to find
        out, whatever the configuration says."""
        cls._empty(config, state, source).check_tensors(state, source)

    @classmethod
    def _empty(cls, config: MoRConfig, state: dict[str, Tensor], source: str) -> MoR:
        """A model without memory, unless there are not even as many tensors in its file as it has layers."""
        if config.num_unique_layers > len(state):
            raise ValueError(f"{source}: expected the tensors of {config.num_unique_layers} layers, got {len(state)}")
        try:
            with torch.device("meta"):
                return cls(config)
        except (RuntimeError, TypeError) as error:  # no tensor can have such a size
            raise ValueError(f"{source}: expected a model's tensors, but of its configuration: {error}") from None

    def load_checked(self, state: dict[str, Tensor], source: str) -> None:
        """Load what a model's file holds, or say what differs from this one's."""
        self.load_state_dict(self.checked(state, source))

    def checked(self, state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """What a model's file holds as this model's state dict; a ValueError where names or shapes differ."""
        self.check_tensors(state, source)
        return join(state)

    def check_tensors(self, state: dict[str, Tensor], source: str) -> None:
        """A ValueError where names or shapes in a model's file aren't this model's."""
        shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self.state_dict().items()}
        own = separate(shapes, self.config)
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise ValueError(
                f"{source}: expected the model's tensors, got without {missing[:3]}, besides {unknown[:3]}"
            )
        for name, value in own.items():
            if state[name].shape != value.shape:
                raise ValueError(
                    f"{source}: {name}: expected shape {tuple(value.shape)}, got {tuple(state[name].shape)}"
                )

    @classmethod
    def from_dense(
        cls, dense: str | os.PathLike[str] | dict[str, Tensor], config: MoRConfig, init: str = "stepwise"
    ) -> MoR:
        """A recursive model from a dense Llama-architecture one, in PyTorch's default dtype ("uptraining"; paper,
        appendix "Expanded Results of Parameter Sharing Strategy").

        Args:
            dense: folder of a Hugging Face checkpoint (``*.safetensors``), or its state dict.
            config: the recursive model; widths and ``num_hidden_layers`` are the dense model's, which
                :meth:`MoRConfig.from_llama` reads from the folder.
            init: how a shared layer comes from the dense ones: "stepwise" is one at even steps, "lower" or "upper" one
                of the first or last, "average" the mean of those that it stands for when unrolled, "random" a new one.
                Embedding, norm, head and own ends are the dense model's, routers and adapters new.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it isn't a Llama's, or another depth or width than the configuration's; the message names it.
        """
        source = "dense" if isinstance(dense, dict) else os.fspath(dense)
        dense = read_dense(dense)
        shapes = separate(cls._empty(config, dense, source).state_dict(), config)
        origins = dense_origins(dense, config, init, shapes, source)
        model = cls(config)
        state = separate(model.state_dict(), config)
        for name, names in origins.items():
            if names:
                state[name] = torch.stack([dense[n].to(state[name].dtype) for n in names]).mean(0)
        model.load_checked(state, source)
        return model

    @classmethod
    def from_authors(cls, source: str | os.PathLike[str] | dict[str, Tensor], config: MoRConfig | None = None) -> MoR:
        """A model trained by the code that the paper's authors published, in the dtype that it was saved in.

        In evaluation their code still keeps the k best of the whole sequence, which ``mode="topk"`` does here.

        Args:
            source: folder of a checkpoint (``*.safetensors``), or its state dict.
            config: see :func:`.authors.authors_config`, which reads it from the folder by default.

        Raises:
            FileNotFoundError, ValueError: something is missing, unknown or of another model, or copies of a shared
                tensor differ; the message names it.
        """
        config = authors_config(source) if config is None else config
        name = "state dict" if isinstance(source, dict) else os.fspath(source)
        theirs = read_dense(source)
        empty = cls._empty(config, theirs, name)
        state = authors_to_state(theirs, config, separate(empty.state_dict(), config), name)
        empty.check_tensors(state, name)
        model = cls(config).to(state["embed_tokens.weight"].dtype)
        model.load_checked(state, name)
        return model
