"""Configurations and weights of the training code that the paper's authors published.

Their repository is raymin0223/mixture_of_recursions. A run there is described by a YAML file, on top of the
``config.json`` of a Llama; the checkpoints are those of Hugging Face's trainer. docs/authors.md has the table of names.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ..files import check_extent, read_json, read_text
from .config import LARGEST, MoRConfig, fail
from .convert import is_foreign

# Every name that their code reads. Those that only concern how a run is started, saved and shown, its data and its
# optimizer have no influence on what a model computes, and are ignored.
RUN = frozenset(
    "name wandb wandb_mode wandb_entity wandb_project wandb_run_name wandb_run_id wandb_watch output_dir tensorboard "
    "tensorboard_dir resume_from_checkpoint resume_step dataset weights total_batch_size per_device_train_batch_size "
    "batch_size_rampup_steps add_bos_token global_shuffling local_shuffling tokenizer model model_name_or_path "
    "attn_implementation use_pretrained_weights lr_scheduler_type lr_scheduler_kwargs learning_rate adam_beta1 "
    "adam_beta2 weight_decay precision max_grad_norm stop_steps save_interval save_steps fixed_save_steps "
    "save_total_limit logging_steps dataloader_num_workers gradient_checkpointing deepspeed evaluation".split()
)
SECTIONS = {
    "": RUN | {"recursive", "kv_sharing", "relaxation", "mor", "model_config", "max_length", "num_train_steps",
               "num_warmup_steps", "gradient_accumulation_steps"},
    # ignored: initialization, which is where training starts from
    "recursive": {"enable", "base_depth", "num_recursion", "sharing", "ln_share", "initialization"},
    # ignored: all but enable and update_cache, which their code replaces by those of "recursive"
    "kv_sharing": {"enable", "base_depth", "num_recursion", "sharing", "update_cache"},
    "relaxation": {"enable", "skip_first_loop", "method", "lora", "prompt"},
    "mor": {"enable", "type", "capacity", "rand_router", "router_type", "z_loss", "z_coeff", "temp", "expert", "token"},
    # ignored: include_first, which is about what is logged
    "mor.expert": {"cap_warmup_step", "router_func", "alpha", "sampling", "include_first", "coeff", "gating"},
    "mor.token": {"bal_warmup_step", "router_func", "alpha", "balancing", "coeff", "u", "gating"},
}  # fmt: skip
LARGEST_YAML = 1 << 16  # characters, for which PyYAML may take seconds
SHARINGS = ("cycle", "sequence", "middle_cycle", "middle_sequence")


def authors_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    dense: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    **changes: Any,
) -> MoRConfig:
    """The configuration of a model that computes what the authors' code does by its configuration.

    Args:
        source: their YAML file (which needs PyYAML) or the same as JSON, as a path or parsed; or a checkpoint's folder
            that has the one YAML file beside its ``config.json``.
        dense: the Llama's ``config.json``: path, folder or parsed. Default: the one in the folder ``source``.
        changes: fields of :class:`MoRConfig` that override what was found.

    Raises:
        ValueError: a name isn't known, or what it asks for isn't computed here; the message names it.
        ImportError: a YAML file, and no PyYAML.
    """
    fields, llama, file = _read(source, dense)
    try:
        return _config(fields, llama, changes)
    except ValueError as error:
        if not file:
            raise
        raise ValueError(f"{file}: {error}") from None


def _config(fields: Mapping[str, Any], llama: dict[str, Any], changes: Mapping[str, Any]) -> MoRConfig:
    root = _Section(fields, "")
    recursive, kv, relaxation, mor = (root.section(name) for name in ("recursive", "kv_sharing", "relaxation", "mor"))
    expert, token = mor.section("expert"), mor.section("token")
    for section in (recursive, kv, relaxation, mor):
        section.choice("enable", (True, False), False)
    relaxation.choice("enable", (False,), False)

    own = root.get("model_config", {})
    if not isinstance(own, Mapping):
        root.refuse("model_config", "a mapping", type(own).__name__)
    llama |= own
    if "hidden_size" in own and "num_attention_heads" in own:
        for name in ("hidden_size", "num_attention_heads"):
            if not isinstance(own[name], int) or own[name] < 1:
                root.refuse(f"model_config.{name}", "an integer of at least 1", repr(own[name]))
        llama["head_dim"] = own["hidden_size"] // own["num_attention_heads"]
    if root.get("max_length") is not None:
        llama["max_position_embeddings"] = root.get("max_length")

    enabled = recursive.get("enable", False)
    found: dict[str, Any] = {"num_recursions": recursive.whole("num_recursion") if enabled else 1}
    if enabled:
        found["sharing"] = recursive.choice("sharing", SHARINGS)
        found["share_norms"] = recursive.choice("ln_share", (True, False))
        if found["num_recursions"] == 1:  # a model of so many layers, each used once
            llama["num_hidden_layers"] = recursive.whole("base_depth")
            recursive.choice("sharing", ("cycle", "sequence"))
            found["share_norms"] = True
    routed = mor.get("enable", False)
    if enabled and not routed:
        found["tie_word_embeddings"] = False  # whatever the Llama's says, their model for that has a head of its own
    if kv.get("enable", False):
        recursive.choice("enable", (True,), False)
        # with "sequence" theirs shares between the uses of a layer, in place of between recursions
        recursive.choice("sharing", ("cycle", "middle_cycle"))
        hybrid = kv.choice("update_cache", (True, False), False)
        if routed:
            mor.choice("type", ("expert",) if hybrid else ("expert", "token"))
        # the cache that they make for "cycle", and the model without routers, don't look at update_cache
        found["kv"] = "hybrid" if hybrid and routed and found["sharing"] == "middle_cycle" else "shared"
    if routed:
        recursive.choice("enable", (True,), False)
        mor.choice("rand_router", (False,), False)
        if found["num_recursions"] == 1:
            recursive.refuse("num_recursion", "at least 2 with mor.enable", 1)
        found["router_arch"] = mor.choice("router_type", ("linear", "mlp", "wide_mlp"))
        if found["router_arch"] != "linear":
            found["router_expansion"] = 2  # in the published code both are as wide
        found |= {"router_temperature": mor.number("temp", 1.0), "router_temperature_at": "state"}
        found["z_coeff"] = mor.number("z_coeff", 0.001) if mor.choice("z_loss", (True, False), False) else 0.0
        if mor.choice("type", ("expert", "token")) == "expert":
            recursive.choice("sharing", ("cycle", "middle_cycle"))
            found |= _expert_choice(root, mor, expert, found["num_recursions"], changes)
        else:
            recursive.choice("sharing", ("middle_cycle",))  # with "cycle" their model can't be called
            found |= _token_choice(token)
    return MoRConfig.from_llama(llama, **{**found, **changes})


def _expert_choice(
    root: _Section, mor: _Section, expert: _Section, recursions: int, changes: Mapping[str, Any]
) -> dict[str, Any]:
    activation = expert.choice("router_func", (None, "sigmoid", "tanh"), None)
    sampling = expert.choice("sampling", (None, "aux_loss", "aux_router"), None)
    found: dict[str, Any] = {"router": "expert_choice", "rank": "score", "residual": "block"}
    found["router_activation"] = activation or "none"
    found["alpha"] = expert.number("alpha", above=0) if activation else 1.0  # without a function there is no scale
    found["gate"] = _gate(expert)
    found["aux"] = {None: "none", "aux_loss": "loss", "aux_router": "router"}[sampling]
    # an auxiliary router has an optimizer of its own, which takes its loss as it is
    found["aux_coeff"] = 1.0 if sampling == "aux_router" else expert.number("coeff", 0.01)
    capacity = mor.get("capacity")
    if capacity is not None:
        try:
            found["capacities"] = tuple(float(part) for part in capacity.split(","))
        except (AttributeError, ValueError):
            mor.refuse("capacity", "numbers with commas between them, or null", repr(capacity))
        if len(found["capacities"]) != recursions:
            mor.refuse("capacity", f"{recursions} numbers, one a recursion", repr(capacity))
    if "cap_warmup_steps" not in changes:
        found["cap_warmup_steps"] = _cap_warmup_steps(root, expert)
    return found


def _cap_warmup_steps(root: _Section, expert: _Section) -> int:
    """Optimizer steps; theirs counts forward passes, which are gradient_accumulation_steps a step."""
    passes = expert.get("cap_warmup_step")
    if passes is not None:
        passes = expert.whole("cap_warmup_step", least=0)
        return passes and math.ceil(passes / root.whole("gradient_accumulation_steps"))
    if root.get("num_warmup_steps") is None and root.get("num_train_steps") is not None:
        return int(root.whole("num_train_steps") * 0.05)
    return root.whole("num_warmup_steps", least=0)


def _token_choice(token: _Section) -> dict[str, Any]:
    activation = token.choice("router_func", ("softmax", "sigmoid"), "softmax")
    alpha = token.number("alpha", 1.0 if activation == "softmax" else 0.1, above=0)
    if token.get("bal_warmup_step"):
        token.refuse("bal_warmup_step", "0, which is also right for a model that is past it",
                     token.get("bal_warmup_step"))  # fmt: skip
    return {
        "router": "token_choice",
        "router_activation": activation,
        "alpha": alpha,
        "gate": _gate(token),
        "balance": token.choice("balancing", ("loss", "loss_free")),
        "balance_scope": "batch",
        # theirs takes the mean of, and adds the bias to, alpha times the probabilities
        "balance_coeff": alpha * token.number("coeff", 0.01),
        "bias_update_rate": token.number("u", 0.001) / alpha,
    }


def _gate(section: _Section) -> str:
    return "exit_only" if section.choice("gating", ("weighted", "additive"), "weighted") == "weighted" else "none"


class _Section:
    """One level of their configuration. Entries that are null count as absent where there is a default."""

    def __init__(self, fields: Mapping[str, Any] | None, path: str) -> None:
        self.path, self.fields = path, {} if fields is None else fields
        if not isinstance(self.fields, Mapping):
            fail(path or "config", "a mapping", type(fields).__name__)
        if unknown := sorted(map(str, self.fields.keys() - SECTIONS[path])):
            fail(path or "config", "names that the authors' code knows", f"also {', '.join(unknown)}")

    def section(self, name: str) -> _Section:
        return _Section(self.fields.get(name), f"{self.path}.{name}".lstrip("."))

    def refuse(self, name: str, expected: str, got: object) -> NoReturn:
        fail(f"{self.path}.{name}".lstrip("."), expected, got)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def choice(self, name: str, allowed: Sequence[object], *default: object) -> Any:
        value = self.get(name, *default)
        if value not in allowed:
            self.refuse(name, " or ".join("null" if a is None else str(a) for a in allowed), repr(value))
        return value

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        value = self.get(name, default)
        try:
            found = float(value)  # 1e-5 is text to PyYAML
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found) or (above is not None and found <= above):
            self.refuse(name, "a number" if above is None else f"a number > {above}", repr(value))
        return found

    def whole(self, name: str, least: int = 1) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
            self.refuse(name, f"an integer from {least} to {LARGEST}", repr(value))
        return value


def _read(
    source: str | os.PathLike[str] | Mapping[str, Any], dense: str | os.PathLike[str] | Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], dict[str, Any], str]:
    """Their fields, the Llama's as a copy, and the file of the former, if any."""
    if not isinstance(source, Mapping) and os.path.isdir(source):
        files = _yaml_files(source)
        if len(files) != 1:
            fail(str(source), "the one YAML file of its training configuration beside the checkpoint", f"{files}")
        source, dense = files[0], source if dense is None else dense
    if dense is None:
        fail("dense", "the config.json of the Llama", "none")
    fields, file = (source, "") if isinstance(source, Mapping) else (_parse(source), os.fspath(source))
    if isinstance(dense, Mapping):
        return fields, dict(dense), file
    path = os.path.join(dense, "config.json") if os.path.isdir(dense) else dense
    found = _parse(path)
    if not isinstance(found, Mapping):
        fail(str(path), "the configuration of the Llama", type(found).__name__)
    return fields, dict(found), file


def _yaml_files(folder: str | os.PathLike[str]) -> list[str]:
    return sorted(path for end in ("yaml", "yml") for path in glob.glob(os.path.join(folder, f"*.{end}")))


def _parse(path: str | os.PathLike[str]) -> Any:
    try:
        if str(path).endswith(".json"):
            return read_json(path)
        text = read_text(path)
        if len(text) > LARGEST_YAML:
            raise ValueError(f"more than {LARGEST_YAML} characters")
        try:
            import yaml
        except ImportError:
            raise ImportError(f"{path}: expected PyYAML to read it (pip install pyyaml), or the same as JSON") from None
        try:
            found = yaml.safe_load(text)
        except Exception as error:  # YAMLError, and all that its constructors raise at what is no number or date
            raise ValueError(error) from None
        check_extent(found)  # aliases make much of little
        return found
    except ValueError as error:
        raise ValueError(f"{path}: expected a configuration, got: {error}") from None


def is_authors(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a checkpoint of the authors' code: Hugging Face's, and of their class or with a YAML file."""
    if not is_foreign(folder):
        return False
    classes = read_json(os.path.join(folder, "config.json")).get("architectures")
    return isinstance(classes, list) and "MoRLlamaForCausalLM" in classes or bool(_yaml_files(folder))


def authors_to_state(
    theirs: dict[str, torch.Tensor], config: MoRConfig, names: Iterable[str], source: str
) -> dict[str, torch.Tensor]:
    """The tensors of ``names``, as files of ours have them, from a checkpoint of the authors' code.

    Their state dict has a shared layer once for each use. Copies that are missing, since whoever wrote the file left
    out what it had already, are fine; copies that differ are an error.
    """
    places, state = _places(config, names), {}
    if unknown := sorted(theirs.keys() - {place for copies in places.values() for place in copies}):
        raise ValueError(f"{source}: expected the tensors of such a model only, got also {unknown[0]}")
    for own, copies in places.items():
        state[own] = _same(theirs, copies, source)
    if "router_bias" in state:  # see balance_coeff
        assert config.alpha is not None  # as MoRConfig stores it
        state["router_bias"] = state["router_bias"].float() / config.alpha
    return state


def _same(tensors: Mapping[str, torch.Tensor], copies: Sequence[str], source: str) -> torch.Tensor:
    """What all of the copies that are there are."""
    there = [name for name in copies if name in tensors]
    if not there:
        raise ValueError(f"{source}: expected {copies[0]}, found none")
    for name in there[1:]:
        if not torch.equal(tensors[name], tensors[there[0]]):
            hint = ""
            if ".self_attn." in name:
                hint = " (their code before commit 82c97f29 doesn't share attention's weights in expert-choice)"
            raise ValueError(f"{source}: {name}: expected the values of {there[0]}, its copy, got others{hint}")
    return tensors[there[0]]


def _places(config: MoRConfig, names: Iterable[str]) -> dict[str, list[str]]:
    """For each of our names those of its copies in their state dict (without ``model.`` in front)."""
    own, count = int(config.has_own_ends), config.num_recursions
    each = len(config.recursion_layers[0])

    def layer(recursion: int, slot: int) -> str:
        if config.router == "expert_choice":
            return f"layers.{own + recursion}.block.{slot}"
        if config.router == "token_choice":
            return f"layers.{own}.block_list.{recursion}.{slot}"
        return f"layers.{own + recursion * each + slot}"

    uses: dict[int, list[str]] = {i: [] for i in range(config.num_unique_layers)}
    for r, layers in enumerate(config.recursion_layers):
        for place, unique in enumerate(layers):
            uses[unique].append(layer(r, place))
    if own:
        blocks = {"expert_choice": count, "token_choice": 1, "none": count * each}[config.router]
        uses[0], uses[config.num_unique_layers - 1] = ["layers.0"], [f"layers.{1 + blocks}"]

    parts = {"weight": "weight", "up.weight": "0.weight", "down.weight": "2.weight"}
    places: dict[str, list[str]] = {}
    for name in names:
        kind, *rest = name.split(".", 1)
        if kind == "layers":
            i, part = rest[0].split(".", 1)
            places[name] = [f"{use}.{part}" for use in uses[int(i)]]
        elif kind == "norms":
            recursion, slot, part = rest[0].split(".", 2)
            places[name] = [f"{layer(int(recursion), int(slot))}.{part}"]
        elif kind in ("routers", "aux_routers"):
            recursion, part = rest[0].split(".", 1)
            router = "mor_router" if kind == "routers" else "mlp_router"
            places[name] = [f"layers.{own + int(recursion)}.{router}.router.{parts[part]}"]
        elif kind == "router_bias":
            places[name] = [f"layers.{own}.router_bias"]
        else:
            tied = name == "embed_tokens.weight" and config.tie_word_embeddings
            places[name] = [name, "lm_head.weight"] if tied else [name]
    return places
