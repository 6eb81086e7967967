"""Checkpoints that a crash at any moment leaves either whole or absent.

A checkpoint is a folder `step-00000100` with config.json and model.safetensors (so it is also a model folder for
`from_pretrained`), trainer.safetensors and trainer.json (optimizer, RNG states, step and settings) and checkpoint.json
(size and SHA-256 of the others). It is written under a temporary name beside the others, flushed to disk and renamed.

A model that several processes hold in parts is written in the same format, whole, by the first of them, so any number
of processes can go on from it, and a crash of any of them is the same as a crash of one. torch.distributed.checkpoint
would write the parts in parallel, but opens a checkpoint with pickle, which runs what is in it, and is no model folder.
Its gain is small here: recursions share their parameters, of which the paper's largest model has 1.7 billion in all.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._pytree import tree_map

from ..files import (
    TEMPORARY,
    OtherVersion,
    check_version,
    file_hash,
    has_form,
    read_json,
    read_tensors,
    read_weights,
    sync,
)
from ..model import MoR
from ..model.hugging_face import LOADER, describe

_FORMAT = 2  # the first one had no number, and trainer.pt in place of trainer.safetensors
_FILES = {"config.json", "model.safetensors", "trainer.json", "trainer.safetensors"}
_TRAINER = {"step": int, "rng": {"python": list, "numpy": list}, "state": dict,
            "optimizer": {"groups": list, "numbers": dict}}  # fmt: skip
# What Adam can't do without, where it has begun
_ADAM = ("step", "exp_avg", "exp_avg_sq")


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under a checkpoint's name.
    aside = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside)


def _check_sizes(path: Path) -> dict[str, str]:
    """The SHA-256 that each file of a checkpoint should have; raises if one is missing or has another size."""
    index = path / "checkpoint.json"
    if not index.exists():
        raise FileNotFoundError(f"{index}: not found, so {path} is not a complete checkpoint")
    try:
        found = read_json(index)
        entries = found.get("files")
        if not isinstance(entries, dict):
            raise ValueError("no files")
        if "format" not in found and "trainer.pt" in entries:
            raise OtherVersion(f"{path}: written by an earlier version of mor-kernels, with the optimizer's state in "
                               "trainer.pt, a pickle, which isn't opened, since that may run what is in it; "
                               "MoR.from_pretrained reads the model")  # fmt: skip
        if absent := _FILES - entries.keys():
            raise ValueError(f"no {', '.join(sorted(absent))}")
        check_version(found, _FORMAT, {"format", "files"}, index)
        if unknown := sorted(entries.keys() - _FILES - {LOADER}):  # nor is a file anywhere else than in the folder
            raise ValueError(f"unknown {unknown[0]!r}")
        for name, entry in entries.items():
            if not has_form(entry, {"bytes": int, "sha256": str}):
                raise ValueError(f"no size and hash of {name}")
    except OtherVersion:
        raise
    except ValueError as error:
        raise ValueError(f"{index}: damaged, expected sizes and hashes of the checkpoint's files ({error})") from None
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    for name, (size, _) in files.items():
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file}: not found, expected a file of {size} bytes")
        if file.stat().st_size != size:
            raise ValueError(f"{file}: damaged, expected {size} bytes, found {file.stat().st_size}")
    return {name: digest for name, (_, digest) in files.items()}


def _fault(path: Path) -> str | None:
    """Why a checkpoint is not complete, or None if it is. Raises if it is another version's, not to be passed over."""
    try:
        _check_sizes(path)
    except OtherVersion:
        raise
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _folders(directory: Path) -> list[Path]:
    """The folders of a folder that have a checkpoint's name, oldest first."""
    named = [path for path in directory.glob("step-*") if re.fullmatch("step-[0-9]{8,18}", path.name)]
    return sorted(filter(Path.is_dir, named), key=lambda path: int(path.name.removeprefix("step-")))


def _checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return [path for path in _folders(directory) if not _fault(path)]


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`, or None; anything incomplete is passed over."""
    found = _checkpoints(Path(directory))
    return found[-1] if found else None


def incomplete(directory: str | Path) -> dict[Path, str]:
    """The folders `step-*` that `latest` passes over, oldest first, each with what is wrong with it."""
    return {path: fault for path in _folders(Path(directory)) if (fault := _fault(path))}


def tidy(directory: str | Path, keep: int) -> None:
    """Removes what a crash may have left in `directory`, and all but the last `keep` checkpoints."""
    directory = Path(directory)
    for leftover in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    for old in _checkpoints(directory)[:-keep]:
        _remove(old)


def whole(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """A state dict whose DTensors are gathered to the CPU, one after another, or None where `keep` is false.

    All processes have to call it. Other tensors are left as they are.
    """

    def gather(value: Any) -> Any:
        if not hasattr(value, "full_tensor"):
            return value
        full = value.full_tensor()
        return full.cpu() if keep else None

    return tree_map(gather, state)


def _divided(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which all processes have, in parts if `like` is."""
    if not hasattr(like, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor  # importing it takes a second

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]  # a DTensor


def save(directory: str | Path, step: int, model: MoR, optimizer: torch.optim.Optimizer, state: dict[str, Any],
         tensors: dict[str, torch.Tensor], *, keep: int = 3) -> Path:
    """Writes checkpoint `step` into `directory` and returns its folder; then only the last `keep` are left.

    `state` is anything JSON can hold, `tensors` a dict of tensors; both come back from `load`. The RNG states of
    python, numpy, torch and CUDA are saved with them. Raises FileExistsError if the step has been saved already. Of
    several processes all have to call it, and the first one writes.
    """
    directory = Path(directory)
    path = directory / f"step-{step:08d}"
    if not _fault(path):
        raise FileExistsError(f"{path}: a checkpoint of step {step} exists already")
    writes = not dist.is_initialized() or dist.get_rank() == 0
    model_state, optimizer_state = whole(model.state_dict(), writes), whole(optimizer.state_dict(), writes)
    if not writes:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / f"{TEMPORARY}{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()

    model.save_pretrained(aside, model_state)
    numpy_state: Any = np.random.get_state()  # a tuple; a dict if it were asked for
    name, keys, *rest = numpy_state
    flat = {f"tensors.{name}": tensor for name, tensor in tensors.items()}
    flat["rng.torch"] = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    flat |= {f"rng.cuda.{i}": generator for i, generator in enumerate(on_gpus)}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entry in optimizer_state["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                flat[f"optimizer.{index}.{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    save_file({name: tensor.contiguous() for name, tensor in flat.items()}, aside / "trainer.safetensors")
    groups = [len(group["params"]) for group in optimizer_state["param_groups"]]
    rng = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}
    trainer = {"step": step, "rng": rng, "state": state, "optimizer": {"groups": groups, "numbers": numbers}}
    (aside / "trainer.json").write_text(json.dumps(trainer))
    files = {file.name: {"bytes": file.stat().st_size, "sha256": file_hash(file)} for file in sorted(aside.iterdir())}
    (aside / "checkpoint.json").write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))
    for file in [*aside.iterdir(), aside]:
        sync(file)

    if path.exists():  # incomplete: nothing of value
        _remove(path)
    os.rename(aside, path)
    sync(directory)
    tidy(directory, keep)
    return path


def load(path: str | Path, model: MoR, optimizer: torch.optim.Optimizer,
         check: Callable[[int, dict[str, Any], dict[str, torch.Tensor]], object] | None = None,
         ) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]]:  # fmt: skip
    """Puts a checkpoint into `model`, `optimizer` and the RNGs; returns (step, state, tensors) as given to `save`.

    Raises FileNotFoundError for a missing file and ValueError for a damaged one or for a checkpoint of another model,
    naming the file, what was expected and what was found. Nothing is changed unless every file has passed, and
    `check`, called with what is returned, has raised nothing. Settings of the optimizer (betas, weight decay, ...) stay
    those of `optimizer`; only its state comes from the checkpoint.
    """
    path = Path(path)
    for name, digest in _check_sizes(path).items():
        if (found := file_hash(path / name)) != digest:
            raise ValueError(f"{path / name}: damaged, expected SHA-256 {digest}, found {found}; remove this folder to "
                             "go on from the one before")

    file = path / "config.json"
    try:
        saved = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file}: expected a model's JSON configuration, got: {error}") from None
    saved = {name: value for name, value in saved.items() if name not in describe()}
    given = json.loads(json.dumps(model.config.to_dict()))
    differences = [f"{key}: expected {saved.get(key)!r} (checkpoint), got {given.get(key)!r}"
                   for key in sorted(saved.keys() | given.keys()) if saved.get(key) != given.get(key)]
    if differences:
        raise ValueError(f"{file}: checkpoint of another model; " + "; ".join(differences))
    file = path / "model.safetensors"
    weights = model.checked(read_weights(file), str(file))

    trainer, tensors = _read_trainer(path)
    step, state = trainer["step"], trainer["state"]
    on_cpu = tensors["rng"].pop("torch")
    on_gpus = [tensors["rng"][f"cuda.{i}"] for i in range(len(tensors["rng"]))]
    if len(on_gpus) != torch.cuda.device_count():
        on_gpus = []
    try:
        version, internal, gauss = trainer["rng"]["python"]
        python, numpy = (version, tuple(internal), gauss), tuple(trainer["rng"]["numpy"])
        _try_rng(python, numpy, on_cpu, on_gpus)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged, expected states of random number generators, got: {error}") from None
    optimizer_state = _optimizer_state(path, trainer["optimizer"], tensors["optimizer"], optimizer)
    if check:
        check(step, state, tensors["tensors"])

    # From here on nothing is left that could be wrong with a file.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in optimizer_state["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                entry[key] = _taken(value, parameters[index])
    optimizer.load_state_dict(optimizer_state)
    own = model.state_dict()
    model.load_state_dict({name: _divided(value, own[name]) for name, value in weights.items()})
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(on_cpu)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)
    return step, state, {name: tensor.clone() for name, tensor in tensors["tensors"].items()}


def _read_trainer(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """What trainer.json says, and the tensors of trainer.safetensors by the first part of their names."""
    file = path / "trainer.json"
    try:
        found = read_json(file)
        if not has_form(found, _TRAINER) or found["step"] < 0:
            raise ValueError("other fields")
    except ValueError as error:
        raise ValueError(f"{file}: damaged, expected what `save` writes ({error})") from None
    file = path / "trainer.safetensors"
    tensors: dict[str, dict[str, torch.Tensor]] = {"optimizer": {}, "rng": {}, "tensors": {}}
    # Several processes of a machine share the file's pages, of which each copies its part.
    for name, tensor in read_tensors(file).items():
        kind, _, rest = name.partition(".")
        if kind not in tensors:
            raise ValueError(f"{file}: {name}: expected a name that begins with {', '.join(tensors)}")
        tensors[kind][rest] = tensor
    wanted = {"torch", *(f"cuda.{i}" for i in range(len(tensors["rng"]) - 1))}
    if tensors["rng"].keys() != wanted:
        raise ValueError(f"{file}: expected rng.torch, and rng.cuda.0 and so on, got {sorted(tensors['rng'])[:9]}")
    return found, tensors


def _try_rng(python: Any, numpy: Any, on_cpu: torch.Tensor, on_gpus: list[torch.Tensor]) -> None:
    """Raises an error of any of several types if these aren't states of random number generators."""
    version, _, gauss = python
    if version != 3 or not (gauss is None or isinstance(gauss, float)):
        raise ValueError(f"python: version {version!r}, {gauss!r}")
    random.Random().setstate(python)
    name, keys, place, has_gauss, cached = numpy
    # NumPy believes what it's told: another place would be one outside of its memory.
    if not (name == "MT19937" and isinstance(keys, list) and len(keys) == 624 and all(type(k) is int for k in keys)
            and type(place) is int and 0 <= place <= 624 and has_gauss in (0, 1) and isinstance(cached, float)):
        raise ValueError(f"numpy: {name!r}, {place!r}, {has_gauss!r}, {cached!r}")
    np.random.RandomState().set_state(numpy)
    torch.Generator().set_state(on_cpu)
    for device, state in enumerate(on_gpus):
        torch.Generator(f"cuda:{device}").set_state(state)


def _optimizer_state(path: Path, saved: dict[str, Any], tensors: dict[str, torch.Tensor],
                     optimizer: torch.optim.Optimizer) -> dict[str, Any]:  # fmt: skip
    """The optimizer's state dict, its tensors whole and still the file's; raises ValueError if it doesn't fit."""
    file, fault = path / "trainer.safetensors", "optimizer state doesn't fit this optimizer"
    groups = [len(group["params"]) for group in optimizer.param_groups]
    if saved["groups"] != groups:
        raise ValueError(f"{path / 'trainer.json'}: {fault}: expected groups of {groups} parameters, got "
                         f"{str(saved['groups'])[:200]}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}

    def place(index: str, key: str) -> dict[str, Any]:
        if not (re.fullmatch("0|[1-9][0-9]{0,8}", index) and int(index) < len(parameters) and key):
            raise ValueError(f"{path}: {fault}: expected a state of one of {len(parameters)} parameters, got "
                             f"{index}.{key}")
        return state.setdefault(int(index), {})

    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        entry, shape = place(index, key), tuple(parameters[int(index)].shape)
        if tuple(tensor.shape) not in ((), shape) or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{file}: {fault}: optimizer.{name}: expected a number, or shape {shape}, got "
                             f"{tensor.dtype} of {tuple(tensor.shape)}")
        entry[key] = tensor
    for index, values in saved["numbers"].items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            entry = place(index, key)
            if key in entry or not (value is None or isinstance(value, (bool, int, float, str))):
                raise ValueError(f"{path / 'trainer.json'}: {fault}: {index}.{key}: expected a number of its own, got "
                                 f"{type(value).__name__}")
            entry[key] = value
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        for number, entry in state.items():
            shape = parameters[number].shape
            for key in _ADAM:
                if getattr(entry.get(key), "shape", None) != (() if key == "step" else shape):
                    wanted = f"optimizer.{number}.{key}, {'a number' if key == 'step' else f'of shape {tuple(shape)}'}"
                    raise ValueError(f"{file}: {fault}: expected {wanted}")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _taken(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's state, not the file's any more: in parts, and on its device, if it has its shape."""
    if value.shape != parameter.shape or not value.dim():
        return value.clone()
    return _divided(value, parameter) if hasattr(parameter, "full_tensor") else value.to(parameter.device, copy=True)
