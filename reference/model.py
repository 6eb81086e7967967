"""A whole Mixture-of-Recursions language model, run one sequence at a time on lists of tokens.

A Llama whose middle layers form a block that is applied up to Nr times with the same weights. After each pass some
tokens leave, and only the others take the next one; a router decides which. ``ReferenceMoR.expert_choice`` and
``ReferenceMoR.token_choice`` are the two ways to decide, and the heart of this file.

A configuration is a dict with the fields of ``DEFAULTS``; weights are a dict of tensors named as in ``state_shapes``.
Recursions are numbered from 1 in the paper and from 0 in this code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import ops

DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,  # after unrolling, so not the number of layers that have weights
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "num_recursions": 1,
    "sharing": "middle_cycle",
    "router": "none",  # with num_recursions 1 an ordinary Llama, else every token takes every recursion, without gates
    "router_arch": "linear",
    "router_expansion": None,  # 1 for mlp, 4 for wide_mlp
    "router_activation": None,  # sigmoid for expert_choice, softmax for token_choice
    "alpha": None,  # 0.1 for expert_choice, 1.0 for token_choice
    "router_temperature": 1.0,
    "router_temperature_at": "logit",  # or at the state, before the router, and then not for auxiliary routers
    "rank": "logit",
    "residual": "block",  # expert_choice only
    "gate": "exit_only",  # token_choice only, but for "none"
    "capacities": None,  # Nr/Nr, ..., 2/Nr, 1/Nr
    "cap_warmup_steps": 0,
    "kv": "recursion_wise",
    "hybrid_base": "first",
    "aux": "loss",  # expert_choice only
    "aux_coeff": 0.001,
    "z_coeff": 0.0,
    "balance": "loss",  # token_choice only
    "balance_coeff": 0.1,
    "balance_scope": "sequence",
    "bias_update_rate": 0.001,
    "share_norms": True,
    "lora_rank": 0,
    "recursion_encoding": False,
}

CHOICES = {
    "sharing": ("middle_cycle", "cycle", "sequence", "middle_sequence"),
    "router": ("none", "expert_choice", "token_choice"),
    "router_arch": ("linear", "mlp", "wide_mlp"),
    "rank": ("logit", "score"),
    "residual": ("block", "delta"),
    "router_temperature_at": ("logit", "state"),
    "gate": ("exit_only", "every_step", "none"),
    "kv": ("recursion_wise", "shared", "hybrid"),
    "hybrid_base": ("first", "latest"),
    "aux": ("loss", "router", "none"),
    "balance": ("loss", "loss_free", "none"),
    "balance_scope": ("sequence", "batch"),
}


def complete(config: dict) -> dict:
    """The configuration with every missing field at its default."""
    unknown = sorted(set(config) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"config: expected the fields of DEFAULTS, got also {unknown}")
    c = DEFAULTS | config
    expert = c["router"] == "expert_choice"
    if c["router_activation"] is None:
        c["router_activation"] = "sigmoid" if expert else "softmax"
    if c["alpha"] is None:
        c["alpha"] = 0.1 if expert else 1.0
    if c["router_expansion"] is None:
        c["router_expansion"] = 4 if c["router_arch"] == "wide_mlp" else 1
    if c["capacities"] is None:
        Nr = c["num_recursions"]
        c["capacities"] = [(Nr - r) / Nr for r in range(Nr)]
    for name, allowed in CHOICES.items():
        if c[name] not in allowed:
            raise ValueError(f"{name}: expected one of {allowed}, got {c[name]!r}")
    return c


def unroll(config: dict) -> tuple[list[int], list[list[int]], list[int]]:
    """Which layer's weights run where: (layers before the recursions, layers of each recursion, layers after them).

    9 layers and 3 recursions give (0,1,2) three times for "cycle", and (0,0,0), (1,1,1), (2,2,2) for "sequence". The
    "middle" variants do that between a first and a last layer of their own.
    """
    c = complete(config)
    L, Nr = c["num_hidden_layers"], c["num_recursions"]
    middle = c["sharing"].startswith("middle")
    shared = L - 2 if middle else L
    if shared < Nr or shared % Nr != 0:
        nearest = sorted({max(1, n) * Nr + L - shared for n in (shared // Nr, shared // Nr + 1)})
        raise ValueError(
            f"num_hidden_layers: {c['sharing']} with {Nr} recursions needs a depth like {nearest}, got {L}"
        )
    K = shared // Nr  # layers with weights of their own inside the block
    if c["sharing"].endswith("cycle"):
        order = [layer % K for layer in range(shared)]
    else:
        order = [layer // Nr for layer in range(shared)]
    if middle:
        order = [layer + 1 for layer in order]
    recursions = [order[r * K : (r + 1) * K] for r in range(Nr)]
    return ([0], recursions, [K + 1]) if middle else ([], recursions, [])


def kept_counts(config: dict, num_positions: int, step: int | None = None) -> list[int]:
    """How many tokens each recursion keeps of a sequence of that padded length, at an optimizer step.

    During the first cap_warmup_steps the capacities fall from 1 to their targets along half a cosine; no step means
    the targets.
    """
    c = complete(config)
    counts = []
    for target in c["capacities"]:
        capacity = target
        if step is not None and step < c["cap_warmup_steps"]:
            capacity = target + (1 - target) * 0.5 * (1 + math.cos(math.pi * step / c["cap_warmup_steps"]))
        counts.append(math.floor(capacity * num_positions + 1e-6))
    return counts


def state_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model. Layers are numbered by their weights, so each appears once."""
    c = complete(config)
    D, V, Nr = c["hidden_size"], c["vocab_size"], c["num_recursions"]
    q_width, kv_width = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    first, recursions, last = unroll(c)

    shapes = {"embed_tokens.weight": (V, D)}
    for i in sorted({*first, *(i for layers in recursions for i in layers), *last}):
        if c["share_norms"] or i in (*first, *last):
            shapes[f"layers.{i}.input_layernorm.weight"] = (D,)
            shapes[f"layers.{i}.post_attention_layernorm.weight"] = (D,)
        shapes[f"layers.{i}.self_attn.q_proj.weight"] = (q_width, D)
        shapes[f"layers.{i}.self_attn.k_proj.weight"] = (kv_width, D)
        shapes[f"layers.{i}.self_attn.v_proj.weight"] = (kv_width, D)
        shapes[f"layers.{i}.self_attn.o_proj.weight"] = (D, q_width)
        shapes[f"layers.{i}.mlp.gate_proj.weight"] = (c["intermediate_size"], D)
        shapes[f"layers.{i}.mlp.up_proj.weight"] = (c["intermediate_size"], D)
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (D, c["intermediate_size"])
    if not c["share_norms"]:
        for r in range(Nr):
            for slot in range(len(recursions[r])):
                shapes[f"norms.{r}.{slot}.input_layernorm.weight"] = (D,)
                shapes[f"norms.{r}.{slot}.post_attention_layernorm.weight"] = (D,)
    shapes["norm.weight"] = (D,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)

    routers = {"none": [], "expert_choice": [f"routers.{r}" for r in range(Nr)], "token_choice": ["routers.0"]}
    names = list(routers[c["router"]])
    if c["router"] == "expert_choice" and c["aux"] == "router":
        names += [f"aux_routers.{r}" for r in range(Nr)]
    outputs = Nr if c["router"] == "token_choice" else 1
    for name in names:
        if c["router_arch"] == "linear":
            shapes[f"{name}.weight"] = (outputs, D)
        else:
            hidden = D * c["router_expansion"]
            shapes[f"{name}.up.weight"] = (hidden, D)
            shapes[f"{name}.down.weight"] = (outputs, hidden)
    if c["router"] == "token_choice" and c["balance"] == "loss_free":
        shapes["router_bias"] = (Nr,)

    if c["lora_rank"] > 0:
        for r in range(Nr):
            for slot in range(len(recursions[r])):
                for letter, width in (("q", q_width), ("v", kv_width)):
                    shapes[f"lora.{r}.{slot}.{letter}_a"] = (c["lora_rank"], D)
                    shapes[f"lora.{r}.{slot}.{letter}_b"] = (width, c["lora_rank"])
    if c["recursion_encoding"]:
        shapes["recursion_encoding"] = (Nr, D)
    return shapes


def random_state(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random float64 weights for tests: large enough that every one matters and that tokens' depths differ."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in state_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name or name == "recursion_encoding":
            state[name] = 1.0 + 0.1 * noise
        elif name == "router_bias":
            state[name] = (0.1 * noise).float()  # kept in float32 whatever the type of the model
        elif name == "embed_tokens.weight" or "routers." in name:
            state[name] = 0.5 * noise
        else:
            state[name] = 0.2 * noise
    return state


@dataclass
class Trace:
    """What happened to one sequence. Positions count its real tokens only: padding is already gone."""

    logits: Tensor  # (n, V)
    kept: list[list[int]]  # for each recursion, the positions that took it, ascending
    candidates: list[list[int]] = field(default_factory=list)  # expert-choice: who could have taken it
    router_logits: list[Tensor] = field(default_factory=list)  # expert-choice: (C,) for each recursion's candidates
    aux_logits: list[Tensor] = field(default_factory=list)  # likewise, of the auxiliary routers
    choice: ops.DepthChoice | None = None  # token-choice


@dataclass
class Result:
    logits: Tensor  # (B, T, V), zeros at padding
    loss: Tensor | None  # with targets: cross-entropy plus each routing loss times its coefficient
    losses: dict[str, Tensor]  # "lm", "aux", "z", "balance", as they apply, before coefficients
    depths: Tensor  # (B, T) int64: how many recursions each token took, 0 at padding
    routing: list[list[list[int]]]  # for each recursion and sequence: the columns of ``tokens`` that took it, ascending


class ReferenceMoR:
    """config: see ``DEFAULTS``; state: see ``state_shapes``. Computes in float64 if the embeddings are float64, else
    in float32. Gradients flow to the tensors of ``state``."""

    def __init__(self, config: dict, state: dict[str, Tensor]):
        self.config = complete(config)
        self.first, self.recursions, self.last = unroll(self.config)
        expected = state_shapes(self.config)
        if set(state) != set(expected):
            raise ValueError(f"state: these names are missing or unknown: {sorted(set(state) ^ set(expected))}")
        dtype = ops.widen(state["embed_tokens.weight"]).dtype
        self.weights = {}
        for name, shape in expected.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(f"state[{name!r}]: expected shape {shape}, got {tuple(state[name].shape)}")
            self.weights[name] = state[name].to(dtype)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mode: str = "topk",
        ks: tuple[int, ...] | None = None,
    ) -> Result:
        """tokens (B, T); targets (B, T) already shifted, -100 to ignore; attention_mask (B, T), nonzero at real tokens.

        Padding may lie anywhere: it is taken out first, and the remaining tokens have positions 0, 1, 2, ...
        mode matters to expert-choice only. "topk" is for training: recursion r keeps the ks[r] best tokens, which
        looks at the future. "threshold" is for inference: each token decides by itself.
        """
        if mode not in ("topk", "threshold"):
            raise ValueError(f"mode: expected topk or threshold, got {mode!r}")
        B, T = tokens.shape
        if ks is None:
            ks = kept_counts(self.config, T)
        logits = self.weights["embed_tokens.weight"].new_zeros(B, T, self.config["vocab_size"])
        depths = torch.zeros(B, T, dtype=torch.int64)
        routing = [[[] for _ in range(B)] for _ in self.recursions]
        traces = []
        for b in range(B):
            columns = [t for t in range(T) if attention_mask is None or attention_mask[b, t]]
            if not columns:
                continue
            trace = self.run_sequence(tokens[b, columns], mode, ks)
            traces.append(trace)
            logits[b, columns] = trace.logits
            for r, kept in enumerate(trace.kept):
                routing[r][b] = [columns[position] for position in kept]
                depths[b, routing[r][b]] += 1

        losses = self.routing_losses(traces, mode)
        loss = None
        if targets is not None:
            real = torch.ones_like(targets) if attention_mask is None else attention_mask
            flat = targets.masked_fill(real == 0, -100).flatten()
            total = F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=-100, reduction="sum")
            losses = {"lm": total / max(int((flat != -100).sum()), 1)} | losses
            loss = losses["lm"]
            for name in ("aux", "z", "balance"):
                if name in losses:
                    loss = loss + self.config[f"{name}_coeff"] * losses[name]
        return Result(logits, loss, losses, depths, routing)

    def run_sequence(self, tokens: Tensor, mode: str, ks: tuple[int, ...]) -> Trace:
        """One sequence of n real tokens, from embeddings to logits."""
        everyone = list(range(len(tokens)))
        x = self.weights["embed_tokens.weight"][tokens]  # (n, D)
        for i in self.first:
            x = self.layer(i, x, everyone, Memory("recursion_wise"))
        if self.config["router"] == "expert_choice":
            x, trace = self.expert_choice(x, mode, ks)
        elif self.config["router"] == "token_choice":
            x, trace = self.token_choice(x)
        else:
            x, trace = self.fixed_depth(x)
        for i in self.last:
            x = self.layer(i, x, everyone, Memory("recursion_wise"))
        head = "embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        trace.logits = self.rms_norm("norm", x) @ self.weights[head].T
        return trace

    def fixed_depth(self, x: Tensor) -> tuple[Tensor, Trace]:
        """Every token takes every recursion, and there is no gate. One recursion makes an ordinary Transformer."""
        everyone = list(range(len(x)))
        memories = self.new_memories()
        for r in range(len(self.recursions)):
            x = self.block(r, x, everyone, memories)
        return x, Trace(logits=x, kept=[everyone for _ in self.recursions])

    def expert_choice(self, x: Tensor, mode: str, ks: tuple[int, ...]) -> tuple[Tensor, Trace]:
        """Each recursion has a router, which picks tokens among those that the recursion before it picked.

        x (n, D). A picked token's state becomes x + g f(x), or x + g (f(x) - x), with f the block and the gate
        g = alpha * G(logit), or 1 with gate "none"; the others' stays.
        """
        c = self.config
        trace = Trace(logits=x, kept=[])
        memories = self.new_memories()
        candidates = list(range(len(x)))
        for r in range(len(self.recursions)):
            states = x[candidates]
            logits = ops.bounded(self.router(f"routers.{r}", states)[:, 0])  # (C,)
            deciding = logits
            if c["aux"] == "router":
                # The auxiliary router learns to imitate the choice, without influence on what it looks at.
                aux_logits = ops.bounded(self.router(f"aux_routers.{r}", states.detach())[:, 0])
                trace.aux_logits.append(aux_logits)
                deciding = aux_logits
            logit_of = dict(zip(candidates, logits.unbind(), strict=True))
            gate_of = {i: ops.gate(logit, c["router_activation"], c["alpha"]) for i, logit in logit_of.items()}

            if r == 0:
                kept = candidates  # the first recursion takes every token, whatever its logit
            elif mode == "topk":
                kept = ops.keep_best(ops.strengths(logit_of, gate_of, c["rank"], x.dtype), ks[r])
            else:
                # A logit, not the gate, is compared: alpha scales the gate.
                going_on = dict(zip(candidates, (deciding > 0).tolist(), strict=True))
                kept = [i for i in candidates if going_on[i] and not logit_of[i].isnan()]

            rows = list(x)
            for i, fx in zip(kept, self.block(r, x[kept], kept, memories), strict=True):
                gate = 1.0 if c["gate"] == "none" else gate_of[i]
                rows[i] = ops.combine(x[i], fx, gate, c["residual"])
            x = torch.stack(rows)
            trace.candidates.append(candidates)
            trace.router_logits.append(logits)
            trace.kept.append(kept)
            candidates = kept
        return x, trace

    def token_choice(self, x: Tensor) -> tuple[Tensor, Trace]:
        """One router looks at each token before the first recursion and fixes how many recursions it takes.

        x (n, D). With x1 the state at entry, f the block and i the depth, a token leaves with x1 + g^i s, where s is
        f applied i times (gate "exit_only"), or with x1 + s, where each application is s <- g^r f(s) ("every_step") or
        just s <- f(s) ("none").
        """
        c = self.config
        Nr = len(self.recursions)
        choice = ops.choose_depths(
            self.router("routers.0", x)[None],
            bias=self.weights.get("router_bias"),
            activation=c["router_activation"],
            alpha=c["alpha"],
        )
        depths, gates = choice.depths[0].tolist(), choice.gates[0]  # gates (n, Nr)
        trace = Trace(logits=x, kept=[], choice=choice)
        memories = self.new_memories()
        states = list(x)
        for r in range(Nr):
            active = [i for i, depth in enumerate(depths) if depth >= r + 1]
            entering = torch.stack([states[i] for i in active]) if active else x[:0]
            for i, fx in zip(active, self.block(r, entering, active, memories), strict=True):
                leaves_now = depths[i] == r + 1
                if c["gate"] == "every_step" or (c["gate"] == "exit_only" and leaves_now):
                    fx = gates[i, r] * fx
                states[i] = x[i] + fx if leaves_now else fx
            trace.kept.append(active)
        return torch.stack(states), trace

    def block(self, r: int, x: Tensor, positions: list[int], memories: list[Memory]) -> Tensor:
        """f at recursion r, on the tokens x (m, D) at these positions: a layer for each slot, one after another."""
        for slot, i in enumerate(self.recursions[r]):
            lora = f"lora.{r}.{slot}" if self.config["lora_rank"] > 0 else None
            norms = f"layers.{i}" if self.config["share_norms"] else f"norms.{r}.{slot}"
            x = self.layer(i, x, positions, memories[slot], r, lora, norms)
        if self.config["recursion_encoding"]:
            x = x * self.weights["recursion_encoding"][r]
        return x

    def layer(
        self,
        i: int,
        x: Tensor,
        positions: list[int],
        memory: Memory,
        r: int = 0,
        lora: str | None = None,
        norms: str | None = None,
    ) -> Tensor:
        """A Llama layer with the weights of number i, on the tokens x (m, D) at these positions. norms names another
        place to find its two norms."""
        norms = norms or f"layers.{i}"
        x = x + self.self_attention(i, self.rms_norm(f"{norms}.input_layernorm", x), positions, memory, r, lora)
        y = self.rms_norm(f"{norms}.post_attention_layernorm", x)
        mlp = f"layers.{i}.mlp"
        hidden = F.silu(self.linear(f"{mlp}.gate_proj", y)) * self.linear(f"{mlp}.up_proj", y)
        return x + self.linear(f"{mlp}.down_proj", hidden)

    def self_attention(
        self, i: int, y: Tensor, positions: list[int], memory: Memory, r: int, lora: str | None
    ) -> Tensor:
        """Each token sees the keys at positions up to its own, whichever of them the memory offers."""
        c = self.config
        d, theta = c["head_dim"], c["rope_theta"]
        name = f"layers.{i}.self_attn"
        where = torch.tensor(positions, dtype=torch.int64)

        def project(letter: str) -> Tensor:
            out = self.linear(f"{name}.{letter}_proj", y)
            if lora is not None and letter in "qv":
                out = out + y @ self.weights[f"{lora}.{letter}_a"].T @ self.weights[f"{lora}.{letter}_b"].T
            return out.unflatten(-1, (-1, d))  # (m, heads, d)

        def fresh() -> dict[int, tuple[Tensor, Tensor]]:
            k, v = ops.rope(project("k"), where, theta), project("v")
            return {position: (k[row], v[row]) for row, position in enumerate(positions)}

        q = ops.rope(project("q"), where, theta)
        offered = memory.offer(r, fresh)
        key_positions = sorted(offered)
        outputs = q.new_zeros(q.shape)
        if positions:
            keys = torch.stack([offered[position][0] for position in key_positions])
            values = torch.stack([offered[position][1] for position in key_positions])
            for row, position in enumerate(positions):
                seen = sum(1 for key_position in key_positions if key_position <= position)
                outputs[row], _ = ops.attend(q[row], keys[:seen], values[:seen], d**-0.5)
        return self.linear(f"{name}.o_proj", outputs.flatten(1))

    def router(self, name: str, x: Tensor) -> Tensor:
        """Logits (m, outputs) of the states x (m, D): linear, or two layers with GELU between them; no biases."""
        if self.config["router_temperature_at"] == "state" and name.startswith("routers."):
            x = x / self.config["router_temperature"]
        if self.config["router_arch"] == "linear":
            out = self.linear(name, x)
        else:
            out = self.linear(f"{name}.down", F.gelu(self.linear(f"{name}.up", x)))
        return out if self.config["router_temperature_at"] == "state" else out / self.config["router_temperature"]

    def routing_losses(self, traces: list[Trace], mode: str) -> dict[str, Tensor]:
        """The losses that train the routers. At inference, expert-choice makes no top-k choice to learn from."""
        c = self.config
        losses = {}
        if not traces:
            return losses
        if c["router"] == "expert_choice" and mode == "topk":
            aux = z = 0
            for r in range(len(self.recursions)):
                candidates = pad([torch.tensor(trace.candidates[r], dtype=torch.int64) for trace in traces], -1)
                kept = pad([torch.tensor(trace.kept[r], dtype=torch.int64) for trace in traces], -1)
                logits = pad([trace.router_logits[r] for trace in traces], 0.0)
                learning = pad([trace.aux_logits[r] for trace in traces], 0.0) if c["aux"] == "router" else logits
                aux = aux + ops.aux_loss(learning, candidates, kept)
                z = z + ops.z_loss(logits, candidates >= 0)
            if c["aux"] != "none":
                losses["aux"] = aux
            if c["z_coeff"] != 0:
                losses["z"] = z
        if c["router"] == "token_choice":
            depths = pad([trace.choice.depths[0] for trace in traces], 0)
            if c["balance"] == "loss":
                probs = pad([trace.choice.probs[0] for trace in traces], 0.0)
                losses["balance"] = ops.balance_loss(probs, depths, c["balance_scope"])
            if c["z_coeff"] != 0:
                losses["z"] = ops.z_loss(pad([trace.choice.logits[0] for trace in traces], 0.0), depths > 0)
        return losses

    def new_memories(self) -> list[Memory]:
        """The keys and values of one sequence, kept apart for each slot of the block."""
        return [Memory(self.config["kv"], self.config["hybrid_base"]) for _ in self.recursions[0]]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]


class Memory:
    """The keys and values that one slot of the block remembers of one sequence: {position: (key, value)}."""

    def __init__(self, kv: str, hybrid_base: str = "first"):
        self.kv, self.hybrid_base = kv, hybrid_base
        self.remembered: dict[int, tuple[Tensor, Tensor]] = {}

    def offer(self, r: int, fresh: Callable[[], dict[int, tuple[Tensor, Tensor]]]) -> dict[int, tuple[Tensor, Tensor]]:
        """What the tokens at recursion r may attend to. fresh() computes keys and values of these tokens."""
        if self.kv == "recursion_wise":
            return fresh()  # the tokens of this recursion see one another
        if r == 0:
            self.remembered = fresh()
            return self.remembered
        if self.kv == "shared":
            return self.remembered  # every recursion sees what the first one computed, for all tokens
        merged = self.remembered | fresh()  # hybrid: tokens of this recursion as they are now, the others as before
        if self.hybrid_base == "latest":
            self.remembered = merged
        return merged


def pad(rows: list[Tensor], value: float) -> Tensor:
    """Rows of different lengths, stacked, each filled up at its end."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
