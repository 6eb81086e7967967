"""Files that the library reads, whoever wrote them: nothing in them is run, and what is wrong is a ValueError. And how
it writes: a file is there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

TEMPORARY = ".tmp-"  # names of what isn't whole yet begin so
# Far above what such files have, and little enough to be read by any machine in seconds.
LARGEST_JSON, LARGEST_HEADER = 16 << 20, 4 << 20  # bytes
VALUES, LEVELS, DIGITS = 10**6, 100, 300  # of a JSON text; a number of more digits is none that a float could be
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class OtherVersion(ValueError):
    """A file is as another version of this library writes it."""


def parse_json(text: str) -> Any:
    """What a JSON text says; a ValueError tells what is wrong with it. NaN and infinities are numbers."""
    try:
        found = json.loads(text, object_pairs_hook=_once_each, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"more than {LEVELS} levels") from None
    check_extent(found)
    return found


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def check_extent(value: Any) -> None:
    """A ValueError for what has so many parts, or so deep, that to compare or print it would be the end."""
    waiting, count = [(value, 1)], 0
    while waiting:
        part, level = waiting.pop()
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple, set)) else ()
        count += 1
        if level > LEVELS:
            raise ValueError(f"more than {LEVELS} levels")
        if count + len(waiting) + len(parts) > VALUES:
            raise ValueError(f"more than {VALUES} values")
        waiting += [(inner, level + 1) for inner in parts]


def read_text(path: str | os.PathLike[str]) -> str:
    """A small file of UTF-8 text. A ValueError tells what is wrong with it."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("no regular file")
    with open(path, "rb") as file:
        content = file.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON} bytes")
    return content.decode("utf-8-sig")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file. A ValueError tells what is wrong with it, but not which file it is."""
    found = parse_json(read_text(path))
    if not isinstance(found, dict):
        raise ValueError(type(found).__name__)
    return found


def check_version(found: dict[str, Any], newest: int, fields: Collection[str], path: Path) -> None:
    """Raises OtherVersion if "format" in a file is above ``newest``, and ValueError for fields that aren't known."""
    version = found.get("format")
    if type(version) is int and version > newest:
        got = f"expected format {newest}, got {version}"
        raise OtherVersion(f"{path}: written by a newer version of mor-kernels, {got}")
    if version != newest or isinstance(version, bool):
        raise ValueError(f"no format {newest}")
    if unknown := sorted(found.keys() - fields):
        raise ValueError(f"unknown {unknown[0]!r}")


def has_form(value: Any, form: Any) -> bool:
    """Whether a value is of a type; or a dict of the fields in `form`, one of the form of the other."""
    if isinstance(form, dict):
        same = isinstance(value, dict) and value.keys() == form.keys()
        return same and all(has_form(value[name], form[name]) for name in form)
    return type(value) is form


@contextlib.contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Whatever is raised within becomes a ValueError that begins with ``what``: packages written in Rust raise bare
    Exceptions, and where they panic what isn't one, of a class that can't be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error


def read_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; their memory is the file, mapped, and what is written there stays private."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}: expected a safetensors file, got no regular one")
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > LARGEST_HEADER:
        most = f"with a header of at most {LARGEST_HEADER} bytes"
        raise ValueError(f"{path}: expected a safetensors file {most}, got one of {header}")
    # a shape may make torch raise whatever it likes
    with as_value_error(f"{path}: expected a safetensors file, got a corrupt one"):
        return load_file(path)


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Those of a model, which are numbers in floating point; they may be infinite or NaN."""
    tensors = read_tensors(path)
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHTS:
            raise ValueError(f"{path}: {name}: expected {', '.join(map(str, WEIGHTS))}, got {tensor.dtype}")
    return tensors


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write a file by; at the end that is flushed to disk and renamed to `path`."""
    path = Path(path)
    aside = path.with_name(f"{TEMPORARY}{path.name}")
    aside.unlink(missing_ok=True)  # it may be a link to another file
    yield aside
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def write_atomic(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Calls `write(file)` for what `path` is to be, see :func:`replacing`."""
    with replacing(path) as aside, open(aside, "xb") as file:
        write(file)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """:func:`write_atomic` of a text, as UTF-8."""
    write_atomic(path, lambda file: file.write(text.encode()))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """:func:`write_text` of a value as JSON, made to be read by people as well."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def file_hash(path: str | os.PathLike[str]) -> str:
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
