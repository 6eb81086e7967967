"""Everything that defines a model, as one frozen dataclass that is also its ``config.json``."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..files import read_json
from .hugging_face import describe

CHOICES = {
    "sharing": ("cycle", "middle_cycle", "sequence", "middle_sequence"),
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
ACTIVATIONS = {"expert_choice": ("sigmoid", "tanh", "none"), "token_choice": ("softmax", "sigmoid"), "none": (None,)}

# Paper, table "Key parameters of four model size variants".
SIZES = {
    "135M": {
        "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "360M": {
        "num_hidden_layers": 32, "hidden_size": 960, "num_attention_heads": 15, "num_key_value_heads": 5,
        "intermediate_size": 2560,
    },
    "730M": {
        "num_hidden_layers": 26, "hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 4096,
    },
    "1.7B": {
        "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 8192,
    },
}  # fmt: skip

# Kernels count in 32 bits; and layers are counted one by one, before a file has shown that it has them.
LARGEST, DEEPEST = 2**31 - 1, 10_000

# What a Hugging Face Llama's config.json has to say; what stands for an absent entry; and entries with one meaning that
# is computed here.
LLAMA_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
LLAMA_ONLY = {
    "hidden_act": ("silu", "swish"), "attention_bias": (False, None), "mlp_bias": (False, None),
    "sliding_window": (None, False), "quantization_config": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class MoRConfig:
    """A Llama-like model, made recursive by ``num_recursions`` and adaptive by ``router``.

    ``router="none"`` is the dense (vanilla) model for one recursion and the fixed-depth recursive model for more.
    Names are Hugging Face's where it has one. ``None`` asks for the router's default, which is what is stored then.

    Raises:
        ValueError: a field is out of range, or two don't fit together; the message names them.
    """

    vocab_size: int = 49152
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 30  #: of the unrolled model, at most 10,000
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    num_recursions: int = 1
    sharing: str = "middle_cycle"  #: cycle, middle_cycle, sequence, middle_sequence
    kv: str = "recursion_wise"  #: recursion_wise, shared, hybrid
    hybrid_base: str = "first"  #: hybrid: inactive positions keep the first, or the latest, recursion's keys/values

    router: str = "none"  #: none, expert_choice, token_choice
    router_arch: str = "linear"  #: linear, mlp (two layers, GELU), wide_mlp
    router_expansion: int | None = None  #: inner width of such a router over hidden_size; 1 for mlp, 4 for wide_mlp
    router_activation: str | None = None  #: expert-choice: sigmoid, tanh, none; token-choice: softmax, sigmoid
    alpha: float | None = None  #: scale of the gate; 0.1 for expert-choice, 1 for token-choice
    router_temperature: float = 1.0  #: divides the routers' logits
    #: logit; or state: it divides the state before the router, and leaves that of an auxiliary router as it is
    router_temperature_at: str = "logit"
    z_coeff: float = 0.0  #: of the router z-loss

    # expert-choice
    capacities: tuple[float, ...] | None = None  #: share of the tokens that each recursion keeps
    cap_warmup_steps: int = 0  #: optimizer steps over which capacities come down from 1
    rank: str = "logit"  #: logit, or score as the authors' code ranks, see :func:`mor_kernels.ops.route`
    residual: str = "block"  #: block, delta, see :func:`mor_kernels.ops.scatter_back`
    aux: str = "loss"  #: loss on the router itself, router (a second one, for inference), none
    aux_coeff: float = 0.001

    # token-choice
    #: exit_only as in the authors' code, every_step as in the paper's equation 2; none, which expert-choice can have
    #: as well: updates are added as they are
    gate: str = "exit_only"
    balance: str = "loss"  #: loss, loss_free (a bias on the choice alone), none
    balance_coeff: float = 0.1
    balance_scope: str = "sequence"  #: sequence, batch, see :func:`mor_kernels.ops.balance_loss`
    bias_update_rate: float = 0.001  #: of loss_free

    # relaxations of sharing
    share_norms: bool = True  #: False: norms of its own for each layer of the unrolled block
    lora_rank: int = 0  #: per-recursion LoRA on query and value projections
    recursion_encoding: bool = False  #: a learned vector multiplies the output of each recursion

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                fail(name, "one of " + ", ".join(allowed), repr(getattr(self, name)))
        self._check_types()
        if self.num_attention_heads % self.num_key_value_heads:
            fail("num_key_value_heads", f"a divisor of num_attention_heads {self.num_attention_heads}",
                  self.num_key_value_heads)  # fmt: skip
        if self.head_dim % 2:
            fail("head_dim", "an even number", self.head_dim)
        for name in ("router_temperature", "rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                fail(name, "a number > 0", getattr(self, name))
        if self.initializer_range < 0:
            fail("initializer_range", "at least 0", self.initializer_range)
        self._check_depth()
        expert = self.router == "expert_choice"
        if self.router_activation is None:
            object.__setattr__(self, "router_activation", ACTIVATIONS[self.router][0])
        if self.router_activation not in ACTIVATIONS[self.router]:
            fail("router_activation", f"one of {ACTIVATIONS[self.router]} for {self.router}", self.router_activation)
        if self.router_expansion is None and self.router_arch != "linear":
            object.__setattr__(self, "router_expansion", 1 if self.router_arch == "mlp" else 4)
        if self.alpha is None:
            object.__setattr__(self, "alpha", 0.1 if expert else 1.0)
        capacities = self.capacities
        if capacities is None and expert:
            capacities = tuple((self.num_recursions - r) / self.num_recursions for r in range(self.num_recursions))
        if capacities is not None:
            if not isinstance(capacities, (list, tuple)):
                fail("capacities", "a number for each recursion", repr(capacities))
            object.__setattr__(self, "capacities", tuple(capacities))
            self._check_capacities(tuple(capacities))

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.type.split(" ")[0]
            if value is None and "None" in field.type:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if kind == "bool" and not isinstance(value, bool):
                fail(field.name, "True or False", repr(value))
            if kind == "int":
                least = 0 if field.name in ("cap_warmup_steps", "lora_rank") else 1
                most = DEEPEST if field.name == "num_hidden_layers" else LARGEST
                if not whole or value < least:
                    fail(field.name, f"an integer of at least {least}", repr(value))
                if value > most:
                    fail(field.name, f"an integer of at most {most}", repr(value))
            if kind == "float" and not ((whole or isinstance(value, float)) and abs(value) <= sys.float_info.max):
                fail(field.name, "a number", repr(value))

    def _check_depth(self) -> None:
        own = 2 if self.sharing.startswith("middle") else 0
        shared, recursions = self.num_hidden_layers - own, self.num_recursions
        if shared < recursions or shared % recursions:
            below = max(shared // recursions, 0) * recursions + own
            near = [str(depth) for depth in (below, below + recursions) if depth > own]
            fail(
                "num_hidden_layers",
                f"a depth that divides into {recursions} recursions with sharing={self.sharing!r}"
                + (" besides an own first and last layer" if own else "")
                + f", nearest {' or '.join(near)}",
                self.num_hidden_layers,
            )

    def _check_capacities(self, capacities: tuple[float, ...]) -> None:
        if len(capacities) != self.num_recursions:
            fail("capacities", f"{self.num_recursions} numbers, one a recursion", capacities)
        for r, capacity in enumerate(capacities):
            if not (isinstance(capacity, (int, float)) and 0 < capacity <= 1):
                fail(f"capacities[{r}]", "a number in (0, 1]", capacity)
            if r and capacity > capacities[r - 1]:
                fail(f"capacities[{r}]", f"at most capacities[{r - 1}] = {capacities[r - 1]}, since a recursion "
                      "chooses among what the one before kept", capacity)  # fmt: skip
        if capacities[0] != 1:
            fail("capacities[0]", "1.0, since every token takes the first recursion", capacities[0])

    @classmethod
    def from_size(cls, size: str, **changes: Any) -> MoRConfig:
        """A configuration by the paper's name (table "Key parameters of four model size variants").

        Args:
            size: "135M", "360M", "730M" or "1.7B".
            changes: fields that are to be otherwise.

        Raises:
            ValueError: another size, or fields that don't fit.
        """
        if size not in SIZES:
            fail("size", "one of " + ", ".join(SIZES), repr(size))
        return cls(**{**SIZES[size], **changes})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MoRConfig:
        """The inverse of :meth:`to_dict`; ValueError for a name that isn't a field, as for a value out of range."""
        unknown = fields.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            fail("config", "known fields only", f"also {', '.join(sorted(unknown))}")
        return cls(**fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MoRConfig:
        """The configuration in a ``config.json``, as :meth:`.MoR.save_pretrained` or transformers wrote it."""
        try:
            fields = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path}: expected a model's JSON configuration, got: {error}") from None
        if "transformers_version" in fields:  # there are entries of its own, which it adds to from time to time
            fields = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        try:
            return cls.from_dict({name: value for name, value in fields.items() if name not in describe()})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """All fields by their names, defaults resolved."""
        return dataclasses.asdict(self)

    @classmethod
    def from_llama(cls, source: str | os.PathLike[str] | dict[str, Any], **changes: Any) -> MoRConfig:
        """The configuration of a Hugging Face Llama, by default as a dense model.

        Args:
            source: its ``config.json``, the folder that has it, or the parsed dict.
            changes: fields that make it recursive, such as ``num_recursions`` and ``router``; they override the file's,
                but for widths, depth and vocabulary, which must be the file's.

        Raises:
            ValueError: the file asks for what this library doesn't compute; the message says what.
        """
        name = "llama"
        found: Any = source
        if not isinstance(source, dict):
            name = os.path.join(source, "config.json") if os.path.isdir(source) else os.fspath(source)
            try:
                found = read_json(name)
            except ValueError as error:
                raise ValueError(f"{name}: expected the JSON configuration of a Llama, got: {error}") from None

        def refuse(field: str, expected: str, got: object) -> NoReturn:
            fail(f"{name}: {field}", expected, got)

        if not isinstance(found, dict) or found.get("model_type") != "llama":
            kind = found.get("model_type") if isinstance(found, dict) else type(found).__name__
            refuse("model_type", "'llama', the only architecture that is read", repr(kind))
        for field, allowed in LLAMA_ONLY.items():
            if found.get(field, allowed[0]) not in allowed:
                refuse(field, f"{allowed[0]!r}, since nothing else is computed here", repr(found[field]))
        for field in ("rope_scaling", "rope_parameters"):  # the older and the newer name
            rope = found.get(field) or {}
            if not isinstance(rope, dict):
                refuse(field, "its settings", repr(rope))
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
                refuse(field, "rotary embedding without scaling, of whole heads", rope)
        fields: dict[str, Any] = {}
        for field in LLAMA_SIZES:
            if field not in found:
                refuse(field, "the size of a Llama", "no such entry")
            fields[field] = found[field]
            if not isinstance(found[field], int) or found[field] < 1:
                refuse(field, "an integer of at least 1", repr(found[field]))
        heads = found["num_attention_heads"]
        # a missing entry means what it means to transformers
        fields["num_key_value_heads"] = found.get("num_key_value_heads") or heads
        fields["head_dim"] = found.get("head_dim") or found["hidden_size"] // heads
        for field, default in LLAMA_DEFAULTS.items():
            fields[field] = found.get(field, default)
        rope = {**found, **(found.get("rope_parameters") or {})}
        fields["rope_theta"] = rope.get("rope_theta", 10000.0)
        try:
            cls(**fields, sharing="cycle")  # which goes with any depth
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return cls.like(fields, name, **changes)

    @classmethod
    def like(cls, dense: dict[str, Any], source: str, **changes: Any) -> MoRConfig:
        """A model that takes over the weights of a dense one with fields ``dense``; ``source`` names it in errors."""
        sizes = (*LLAMA_SIZES, "num_key_value_heads", "head_dim")
        for field in sizes:
            if field in changes and changes[field] != dense[field]:
                fail(field, f"{dense[field]}, as in {source}", changes[field])
        return cls(**{**{field: dense[field] for field in (*sizes, *LLAMA_DEFAULTS, "rope_theta")}, **changes})

    @property
    def has_own_ends(self) -> bool:
        """Whether the first and last layers are outside the recursion."""
        return self.sharing.startswith("middle")

    @property
    def recursion_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each recursion the unique layers it applies, in order (paper, table "Parameter-sharing strategies")."""
        own = self.has_own_ends
        depth = self.num_hidden_layers - 2 * own
        each = depth // self.num_recursions
        cycle = "cycle" in self.sharing
        unrolled = [(i % each if cycle else i // self.num_recursions) + own for i in range(depth)]
        return tuple(tuple(unrolled[r * each : (r + 1) * each]) for r in range(self.num_recursions))

    @property
    def num_unique_layers(self) -> int:
        """Layers that have weights of their own, first and last included."""
        return len({i for layers in self.recursion_layers for i in layers}) + 2 * self.has_own_ends

    def kept(self, length: int, step: int | None = None) -> tuple[int, ...]:
        """Tokens of ``length`` that each recursion keeps at an optimizer step of the capacity warm-up (None: after)."""
        warm = 0.0
        if step is not None and step < self.cap_warmup_steps:
            warm = 0.5 * (1 + math.cos(math.pi * step / self.cap_warmup_steps))
        # the small number undoes a product such as 0.29 * 100 = 28.999...
        return tuple(math.floor((c + (1 - c) * warm) * length + 1e-6) for c in self.capacities or ())

    def flops(self, length: int, kept: Sequence[float] | None = None, *, training: bool = False) -> int:
        """Floating-point operations on one sequence of ``length`` tokens: a forward pass, or all of a training step.

        Counted are matrix products, head and routers included, at 2 a multiply-add, and attention at 4 * head_dim *
        num_attention_heads for each (query, key) pair that the mask keeps. Norms, activations, rotary embedding and
        softmax are left out, and so is what a kernel computes beyond the mask. ``training`` counts the products three
        times (forward, gradients of inputs and of weights) and attention 3.5 times: of its two products forward, the
        backward pass has five, as it computes the scores again. Recomputation for the sake of memory isn't counted.

        Args:
            length: tokens of the sequence.
            kept: tokens that each recursion takes, whole numbers or means. The default is, for expert-choice,
                ``kept(length)``; for token-choice, that depths are equally frequent, as the paper assumes; and without
                a router, everyone. Where queries look at the keys of all tokens ("shared", "hybrid"), kept tokens are
                taken to lie anywhere, so that a query sees (length + 1) / 2 keys on average.
            training: count a training step.

        Raises:
            ValueError: length or kept is out of range.
        """
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            fail("length", "an integer of at least 1", repr(length))
        count = self.num_recursions
        if kept is None:
            kept = self.kept(length) or (length,) * count
            if self.router == "token_choice":
                kept = [length * (count - r) / count for r in range(count)]
        falling = all(0 <= k <= before for k, before in zip(kept, (length, *kept)))
        if len(kept) != count or not falling:
            fail("kept", f"{count} non-increasing numbers from 0 to {length}", kept)

        width, heads, groups = self.hidden_size, self.num_attention_heads, self.num_key_value_heads

        def layer(queries: float, keys: float, rank: int) -> float:
            """Multiply-adds of the products of a layer; ``keys`` are the tokens whose keys and values it makes."""
            adapters = rank * (queries * (width + heads * self.head_dim) + keys * (width + groups * self.head_dim))
            projections = 2 * width * self.head_dim * (queries * heads + keys * groups)
            return projections + adapters + 3 * queries * width * self.intermediate_size

        everyone = length * (length + 1) / 2
        own = 2 * self.has_own_ends
        products = own * layer(length, length, 0) + length * width * self.vocab_size
        pairs = own * everyone
        for r, tokens in enumerate(kept):
            layers = len(self.recursion_layers[r])
            alone = self.kv == "recursion_wise"
            products += layers * layer(tokens, 0 if self.kv == "shared" and r else tokens, self.lora_rank)
            pairs += layers * (tokens * (tokens + 1) / 2 if alone else tokens * (length + 1) / 2)
            if self.router == "expert_choice":  # scores the tokens that the recursion before kept
                candidates = kept[r - 1] if r else length
                products += candidates * self._router_size(1) * (2 if self.aux == "router" else 1)
        if self.router == "token_choice":
            products += length * self._router_size(count)
        attention = 4 * self.head_dim * heads * pairs
        return round((3 * 2 * products + 3.5 * attention) if training else 2 * products + attention)

    def _router_size(self, outputs: int) -> int:
        if self.router_arch == "linear":
            return self.hidden_size * outputs
        assert self.router_expansion is not None  # of a router that isn't linear
        hidden = self.hidden_size * self.router_expansion
        return hidden * (self.hidden_size + outputs)


def fail(name: str, expected: str, got: object) -> NoReturn:
    """A ValueError about an argument or a field, in the form that all messages have."""
    raise ValueError(f"{name}: expected {expected}, got {str(got)[:1000]}")  # files may say anything
