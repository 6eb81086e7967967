"""Recursive models from dense Llama-architecture checkpoints."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from ..files import read_json, read_weights
from .config import MoRConfig
from .hugging_face import MODEL_TYPE

# A matrix of the model, which one product serves, and the matrices that files hold in its place, as Hugging Face does.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# several names may have one tensor there
CONVERT = (
    "python -c \"import sys, torch; from safetensors.torch import save_file; save_file({n: t.clone() for f in "
    "sys.argv[1:] for n, t in torch.load(f, weights_only=True).items()}, 'model.safetensors')\" pytorch_model*.bin"
)
INITS = ("stepwise", "average", "lower", "upper", "random")


def read_dense(dense: str | os.PathLike[str] | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a Hugging Face Llama checkpoint, by our names (no ``model.`` in front)."""
    source = "dense"
    if not isinstance(dense, dict):
        source = os.fspath(dense)
        dense = _read_folder(source)
    found = {name.removeprefix("model."): tensor for name, tensor in dense.items() if "rotary_emb" not in name}
    if twice := sorted(name for name in found if name in dense and f"model.{name}" in dense):
        raise ValueError(f"{source}: expected a tensor by one name, got {twice[0]} and model.{twice[0]}")
    return found


def _read_folder(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of all safetensors files in a folder. An index of them says nothing that they don't say, and isn't
    read."""
    if not (files := sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))):
        expected = f"{folder}: expected a folder with *.safetensors files"
        if glob.glob(os.path.join(glob.escape(folder), "*.bin")):
            raise FileNotFoundError(f"{expected}, found *.bin files only, pickles, which aren't opened, since that may "
                                    f"run what is in them; if you trust whoever made them: {CONVERT}")  # fmt: skip
        raise FileNotFoundError(f"{expected}, found none")
    found: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    for file in files:
        for name, tensor in read_weights(file).items():
            if name in found:
                raise ValueError(f"{file}: {name}: expected each tensor in one file, got it also in {origin[name]}")
            found[name], origin[name] = tensor, file
    return found


def separate(tensors: dict[str, torch.Tensor], config: MoRConfig) -> dict[str, torch.Tensor]:
    """What is named as a model's parameters are (its state dict, their gradients), as it is named in files. Views."""
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    sizes = {"qkv_proj": (queries, keys, keys), "gate_up_proj": (config.intermediate_size,) * 2}
    separated: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        joined = next((joined for joined in JOINED if f".{joined}." in name), None)
        if joined:
            parts = tensor.split(sizes[joined])
            separated |= {name.replace(joined, part): piece for part, piece in zip(JOINED[joined], parts)}
        else:
            separated[name] = tensor
    return separated


def join(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of :func:`separate`."""
    joined = dict(tensors)
    for whole, parts in JOINED.items():
        for name in [name for name in joined if f".{parts[0]}." in name]:
            pieces = [joined.pop(name.replace(parts[0], part)) for part in parts]
            joined[name.replace(parts[0], whole)] = torch.cat(pieces)
    return joined


def dense_config(folder: str | os.PathLike[str], **changes: Any) -> MoRConfig:
    """The configuration of a model that takes its weights from the dense one in ``folder``, with ``changes``.

    The folder's ``config.json`` is Hugging Face's for a Llama (see :meth:`MoRConfig.from_llama`) or that of a dense
    model of ours.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: expected the configuration of a dense model, found none")
    if is_foreign(folder):
        return MoRConfig.from_llama(path, **changes)
    dense = MoRConfig.load(path)
    if dense.num_recursions > 1 or dense.router != "none":
        got = f"num_recursions={dense.num_recursions}, router={dense.router!r}"
        raise ValueError(f"{path}: expected a dense model (num_recursions=1, router='none'), got {got}")
    return MoRConfig.like(dense.to_dict(), path, **changes)


def is_foreign(folder: str | os.PathLike[str]) -> bool:
    """Whether the ``config.json`` in ``folder`` is of another model than ours, whose type it names."""
    try:
        return read_json(os.path.join(folder, "config.json")).get("model_type", MODEL_TYPE) != MODEL_TYPE
    except (OSError, ValueError):
        return False  # MoRConfig.load says what is wrong


def _sources(pool: list[int], shared: list[int], unrolled: list[int], init: str) -> dict[int, list[int]]:
    """For each shared layer the dense layers of the pool that it is the mean of."""
    count = len(shared)
    if init == "average":
        return {layer: [dense for dense, used in zip(pool, unrolled) if used == layer] for layer in shared}
    steps: Sequence[int]
    if init == "stepwise":  # evenly spaced, the pool's first and last included
        steps = [round(i * (len(pool) - 1) / max(count - 1, 1)) for i in range(count)]
    else:
        steps = range(count) if init == "lower" else range(len(pool) - count, len(pool))
    return {layer: [pool[step]] for layer, step in zip(shared, steps)}


def dense_origins(
    dense: dict[str, torch.Tensor], config: MoRConfig, init: str, shapes: dict[str, torch.Tensor], source: str
) -> dict[str, list[str]]:
    """For each tensor of the recursive model, of which ``shapes`` has all, the dense ones that it is the mean of.

    Embedding, final norm, head and (with a "middle" sharing) the first and last layers are the dense model's. A shared
    layer is, by ``init``: "stepwise" a dense layer at even steps, "lower" or "upper" one of the first or last dense
    layers, "average" the mean of the dense layers that it stands for when unrolled, "random" a new one. Routers and
    adapters are new. With one recursion all but "random" give the dense model.
    """
    if init not in INITS:
        raise ValueError(f"init: expected one of {', '.join(INITS)}, got {init!r}")
    numbers = [int(found[1]) for name in dense if (found := re.match(r"layers\.([0-9]{1,9})\.", name))]
    depth = 1 + max(numbers, default=-1)
    if depth != config.num_hidden_layers:
        raise ValueError(f"{source}: expected num_hidden_layers = {config.num_hidden_layers} layers, got {depth}")
    own = config.has_own_ends
    unrolled = [layer for layers in config.recursion_layers for layer in layers]
    shared = sorted(set(unrolled))
    origin = {}
    if init != "random":
        origin = _sources(list(range(own, depth - own)), shared, unrolled, init)
    if own:
        origin |= {0: [0], config.num_unique_layers - 1: [depth - 1]}

    parts = {name.split(".", 2)[2] for name in shapes if name.startswith("layers.")}
    parts |= {name.split(".", 3)[3] for name in shapes if name.startswith("norms.")}
    known = {f"layers.{i}.{part}" for i in range(depth) for part in parts}
    known |= {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    if unknown := sorted(dense.keys() - known):
        raise ValueError(f"{source}: expected the tensors of a Llama without biases, got also {unknown[0]}")

    origins = {}
    for name, value in shapes.items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            names = [f"layers.{i}.{rest}" for i in origin.get(int(layer), [])]
        elif name.startswith("norms."):  # each starts as the shared layer's would
            _, recursion, slot, rest = name.split(".", 3)
            shared_layer = config.recursion_layers[int(recursion)][int(slot)]
            names = [f"layers.{i}.{rest}" for i in origin.get(shared_layer, [])]
        elif name == "lm_head.weight":  # a tied dense checkpoint has the embedding only
            names = [name if name in dense else "embed_tokens.weight"]
        else:
            names = [name] if name in ("embed_tokens.weight", "norm.weight") else []
        missing = [n for n in names if n not in dense]
        if missing:
            raise ValueError(f"{source}: expected a Llama checkpoint with {missing[0]}, found none")
        for n in names:
            if dense[n].shape != value.shape:
                raise ValueError(f"{source}: {n}: expected shape {tuple(value.shape)}, got {tuple(dense[n].shape)}")
        origins[name] = names
    tied = "lm_head.weight" in dense and "lm_head.weight" not in shapes
    if tied and not torch.equal(dense["lm_head.weight"], dense["embed_tokens.weight"]):
        raise ValueError(
            f"{source}: expected a head tied to the embedding (tie_word_embeddings=True), got one of its own"
        )
    return origins
