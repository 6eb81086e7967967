"""Checkpoints that a crash at any moment leaves either whole or absent.

A checkpoint is a folder `step-00000100` with config.json and model.safetensors (so it is also a model folder for
`from_pretrained`), trainer.pt (optimizer, RNG states), trainer.json (step and settings) and checkpoint.json (size and
SHA-256 of the others). It is written under a temporary name beside the others, flushed to disk and renamed.

A model that several processes hold in parts is written in the same format, whole, by the first of them, so any number
of processes can go on from it, and a crash of any of them is the same as a crash of one. torch.distributed.checkpoint
would write the parts in parallel, but opens a checkpoint with pickle, which runs what is in it, and is no model folder.
Its gain is small here: recursions share their parameters, of which the paper's largest model has 1.7 billion in all.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._pytree import tree_map

from ..model import MoR
from ..model.hugging_face import describe

_TEMPORARY = ".tmp-"
_FILES = {"config.json", "model.safetensors", "trainer.json", "trainer.pt"}


def write_atomic(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write(file)` on a temporary file beside `path`, flushes it to disk and renames it to `path`."""
    path = Path(path)
    aside = path.with_name(f"{_TEMPORARY}{path.name}")
    with open(aside, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync(path.parent)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under a checkpoint's name.
    aside = path.with_name(f"{_TEMPORARY}removed-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside)


def _check_sizes(path: Path) -> dict[str, str]:
    """The SHA-256 that each file of a checkpoint should have; raises if one is missing or has another size."""
    index = path / "checkpoint.json"
    if not index.exists():
        raise FileNotFoundError(f"{index}: not found, so {path} is not a complete checkpoint")
    try:
        entries = json.loads(index.read_text())["files"]
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
        if absent := _FILES - files.keys():
            raise ValueError(f"no {', '.join(sorted(absent))}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: damaged, expected sizes and hashes of the checkpoint's files ({error!r})") from None
    for name, (size, _) in files.items():
        file = path / name
        if not file.exists():
            raise FileNotFoundError(f"{file}: not found, expected a file of {size} bytes")
        if file.stat().st_size != size:
            raise ValueError(f"{file}: damaged, expected {size} bytes, found {file.stat().st_size}")
    return {name: digest for name, (_, digest) in files.items()}


def _fault(path: Path) -> str | None:
    """Why a checkpoint is not complete, or None if it is."""
    try:
        _check_sizes(path)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path for path in directory.glob("step-*") if not _fault(path))


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`, or None; anything incomplete is passed over."""
    found = _checkpoints(Path(directory))
    return found[-1] if found else None


def incomplete(directory: str | Path) -> dict[Path, str]:
    """The folders `step-*` that `latest` passes over, oldest first, each with what is wrong with it."""
    folders = sorted(path for path in Path(directory).glob("step-*") if path.is_dir())
    return {path: fault for path in folders if (fault := _fault(path))}


def tidy(directory: str | Path, keep: int) -> None:
    """Removes what a crash may have left in `directory`, and all but the last `keep` checkpoints."""
    directory = Path(directory)
    for leftover in directory.glob(f"{_TEMPORARY}*"):
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
         tensors: dict[str, Any], *, keep: int = 3) -> Path:
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
    aside = directory / f"{_TEMPORARY}{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()

    model.save_pretrained(aside, model_state)
    numpy_state: Any = np.random.get_state()  # a tuple; a dict if it were asked for
    name, keys, *rest = numpy_state
    rng: dict[str, Any] = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}
    (aside / "trainer.json").write_text(json.dumps({"step": step, "rng": rng, "state": state}))
    rng = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    torch.save({"optimizer": optimizer_state, "rng": rng, "tensors": tensors}, aside / "trainer.pt")
    files = {file.name: {"bytes": file.stat().st_size, "sha256": file_hash(file)} for file in sorted(aside.iterdir())}
    (aside / "checkpoint.json").write_text(json.dumps({"files": files}, indent=1))
    for file in [*aside.iterdir(), aside]:
        sync(file)

    if path.exists():  # incomplete: nothing of value
        _remove(path)
    os.rename(aside, path)
    sync(directory)
    tidy(directory, keep)
    return path


def load(path: str | Path, model: MoR, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Puts a checkpoint into `model`, `optimizer` and the RNGs; returns (step, state, tensors) as given to `save`.

    Raises FileNotFoundError for a missing file and ValueError for a damaged one or for a checkpoint of another model,
    naming the file, what was expected and what was found. Nothing is changed unless every file has passed. Settings
    of the optimizer (betas, weight decay, ...) stay those of `optimizer`; only its state comes from the checkpoint.
    """
    path = Path(path)
    for name, digest in _check_sizes(path).items():
        if (found := file_hash(path / name)) != digest:
            raise ValueError(f"{path / name}: damaged, expected SHA-256 {digest}, found {found}; remove this folder to "
                             "go on from the one before")

    saved = json.loads((path / "config.json").read_text())
    saved = {name: value for name, value in saved.items() if name not in describe()}
    given = json.loads(json.dumps(model.config.to_dict()))
    differences = [f"{key}: expected {saved.get(key)!r} (checkpoint), got {given.get(key)!r}"
                   for key in sorted(saved.keys() | given.keys()) if saved.get(key) != given.get(key)]
    if differences:
        raise ValueError(f"{path / 'config.json'}: checkpoint of another model; " + "; ".join(differences))

    trainer = json.loads((path / "trainer.json").read_text())
    # Several processes of a machine share the file's pages, of which each copies its part.
    loaded = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True, mmap=dist.is_initialized())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in loaded["optimizer"]["state"].items():
        for key, value in entry.items():
            if index < len(parameters) and value.shape == parameters[index].shape:  # not a count of steps
                entry[key] = _divided(value, parameters[index])
    for saved_group, group in zip(loaded["optimizer"]["param_groups"], optimizer.param_groups):
        saved_group.update({key: value for key, value in group.items() if key != "params"})
    try:
        optimizer.load_state_dict(loaded["optimizer"])
    except ValueError as error:
        raise ValueError(f"{path / 'trainer.pt'}: optimizer state doesn't fit this optimizer: {error}") from None
    own = model.state_dict()
    weights = model.checked(load_file(path / "model.safetensors"), str(path / "model.safetensors"))
    model.load_state_dict({name: _divided(value, own[name]) for name, value in weights.items()})

    version, internal, gauss = trainer["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(trainer["rng"]["numpy"]))
    torch.set_rng_state(loaded["rng"]["torch"])
    if len(loaded["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(loaded["rng"]["cuda"])
    return trainer["step"], trainer["state"], loaded["tensors"]
