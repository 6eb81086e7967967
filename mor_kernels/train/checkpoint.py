"""Checkpoints that a crash at any moment leaves either whole or absent.

A checkpoint is a folder `step-00000100` with config.json and model.safetensors (so it is also a model folder for
`from_pretrained`), trainer.pt (optimizer, RNG states), trainer.json (step and settings) and checkpoint.json (size and
SHA-256 of the others). It is written under a temporary name beside the others, flushed to disk and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file

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


def save(directory: str | Path, step: int, model, optimizer: torch.optim.Optimizer, state: dict, tensors: dict,
         *, keep: int = 3) -> Path:
    """Writes checkpoint `step` into `directory` and returns its folder; then only the last `keep` are left.

    `state` is anything JSON can hold, `tensors` a dict of tensors; both come back from `load`. The RNG states of
    python, numpy, torch and CUDA are saved with them. Raises FileExistsError if the step has been saved already.
    """
    directory = Path(directory)
    path = directory / f"step-{step:08d}"
    if not _fault(path):
        raise FileExistsError(f"{path}: a checkpoint of step {step} exists already")
    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / f"{_TEMPORARY}{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()

    model.save_pretrained(aside)
    name, keys, *rest = np.random.get_state()
    rng = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}
    (aside / "trainer.json").write_text(json.dumps({"step": step, "rng": rng, "state": state}))
    rng = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    torch.save({"optimizer": optimizer.state_dict(), "rng": rng, "tensors": tensors}, aside / "trainer.pt")
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


def load(path: str | Path, model, optimizer: torch.optim.Optimizer) -> tuple[int, dict, dict]:
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
    given = json.loads(json.dumps(model.config.to_dict()))
    differences = [f"{key}: expected {saved.get(key)!r} (checkpoint), got {given.get(key)!r}"
                   for key in sorted(saved.keys() | given.keys()) if saved.get(key) != given.get(key)]
    if differences:
        raise ValueError(f"{path / 'config.json'}: checkpoint of another model; " + "; ".join(differences))

    trainer = json.loads((path / "trainer.json").read_text())
    loaded = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
    for saved_group, group in zip(loaded["optimizer"]["param_groups"], optimizer.param_groups):
        saved_group.update({key: value for key, value in group.items() if key != "params"})
    try:
        optimizer.load_state_dict(loaded["optimizer"])
    except ValueError as error:
        raise ValueError(f"{path / 'trainer.pt'}: optimizer state doesn't fit this optimizer: {error}") from None
    model.load_checked(load_file(path / "model.safetensors"), str(path / "model.safetensors"))

    version, internal, gauss = trainer["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(trainer["rng"]["numpy"]))
    torch.set_rng_state(loaded["rng"]["torch"])
    if len(loaded["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(loaded["rng"]["cuda"])
    return trainer["step"], trainer["state"], loaded["tensors"]
