"""From text to token shards to batches.

`prepare` turns a source into a folder of memory-mapped shards, `Tokens` opens one, `Loader` cuts batches from it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ..files import (
    TEMPORARY,
    OtherVersion,
    as_value_error,
    check_version,
    file_hash,
    has_form,
    read_json,
    write_atomic,
    write_json,
    write_text,
)
from .text import Source, documents, load_tokenizer, needed_vocab_size, pieces, separator_id, train_tokenizer

_BATCH = 1 << 22  # characters encoded together


def prepare(source: Source, directory: str | Path, *, tokenizer: str | Path | None = None, vocab_size: int = 8192,
            shard_tokens: int = 100_000_000, max_tokens: int | None = None) -> Tokens:
    """Tokenizes a source into `directory` and opens the result.

    With `tokenizer`, a tokenizer.json, that one is used and copied; otherwise a byte-level BPE of `vocab_size` tokens
    is trained on the source. Each document is followed by the separator token. The folder holds tokenizer.json,
    shards tokens-00000.npy, ... of `shard_tokens` uint16 (or uint32) tokens, and meta.json. Every file is renamed into
    place when it is whole and meta.json comes last, so a preparation that was killed can only be started anew.
    `max_tokens` ends the preparation early, for sources that are too large to be read whole. meta.json tells what the
    tokens were made of: "source", "max_tokens" and "given_tokenizer_sha256" (None where the tokenizer was trained).
    """
    for name, value in (("max_tokens", max_tokens), ("shard_tokens", shard_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    directory = Path(directory)
    if (directory / "meta.json").exists():
        raise FileExistsError(f"{directory}: holds prepared tokens already; open them with Tokens(), or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in [*directory.glob("tokens-*.npy"), *directory.glob(f"{TEMPORARY}*")]:
        leftover.unlink()

    saved = directory / "tokenizer.json"
    if tokenizer is None:
        write_text(saved, train_tokenizer(source, vocab_size).to_str())
    else:
        load_tokenizer(tokenizer)
        content = Path(tokenizer).read_bytes()
        write_atomic(saved, lambda file: file.write(content))
    encoder = load_tokenizer(saved)
    separator, size = separator_id(encoder), needed_vocab_size(encoder)

    dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
    shards: list[dict] = []
    waiting, count, total = [], 0, 0

    def write_shard(tokens: np.ndarray) -> None:
        path = directory / f"tokens-{len(shards):05d}.npy"
        write_atomic(path, lambda file: np.save(file, tokens))
        shards.append({"file": path.name, "tokens": len(tokens), "bytes": path.stat().st_size,
                       "sha256": file_hash(path)})

    for tokens in _encode(documents(source), encoder, separator):
        tokens = tokens.astype(dtype)[: None if max_tokens is None else max_tokens - total]
        waiting.append(tokens)
        count, total = count + len(tokens), total + len(tokens)
        if count >= shard_tokens:
            joined = np.concatenate(waiting)
            whole = count - count % shard_tokens
            for start in range(0, whole, shard_tokens):
                write_shard(joined[start:start + shard_tokens])
            waiting, count = [joined[whole:]], count - whole
        if total == max_tokens:
            break
    if not total:
        raise ValueError(f"source {source}: expected text, found none")
    if count:
        write_shard(np.concatenate(waiting))
    digest = file_hash(saved)
    meta = {"format": 1, "vocab_size": size, "separator": separator, "dtype": dtype.name, "tokenizer_sha256": digest,
            "source": str(source) if isinstance(source, (str, Path)) else [str(part) for part in source],
            "max_tokens": max_tokens,
            "given_tokenizer_sha256": None if tokenizer is None else digest, "shards": shards}
    write_json(directory / "meta.json", meta)
    return Tokens(directory)


def _encode(texts: Iterable[str], tokenizer: Tokenizer, separator: int) -> Iterator[np.ndarray]:
    waiting: list[tuple[str, bool]] = []  # pieces of text, and whether each ends a document
    size = 0  # of them, in characters

    def encoded() -> np.ndarray:
        ids: list[int] = []
        with as_value_error("tokenizer: expected one that can encode the source, got"):
            encodings = tokenizer.encode_batch([piece for piece, _ in waiting], add_special_tokens=False)
        for (_, last), encoding in zip(waiting, encodings):
            ids += encoding.ids
            if last:
                ids.append(separator)
        return np.array(ids, dtype=np.int64)

    for text in texts:
        *parts, end = pieces(text)
        waiting += [*((part, False) for part in parts), (end, True)]
        size += len(text)
        if size >= _BATCH:
            yield encoded()
            waiting, size = [], 0
    if waiting:
        yield encoded()


_META = {"format": int, "vocab_size": int, "separator": int, "dtype": str, "tokenizer_sha256": str, "shards": list}
_SHARD = {"file": str, "tokens": int, "bytes": int, "sha256": str}


def _read_meta(meta: dict[str, Any], index: Path) -> tuple[list[tuple[Any, ...]], int, int]:
    """(file, tokens, bytes, SHA-256) of each shard, vocabulary and separator; a ValueError tells what is wrong."""
    check_version(meta, 1, {*_META, "source", "max_tokens", "given_tokenizer_sha256"}, index)
    for field, kind in _META.items():
        if not has_form(meta.get(field), kind):
            raise ValueError(f"{field} isn't {kind.__name__}")
    size, separator = meta["vocab_size"], meta["separator"]
    if not 0 <= separator < size <= 1 << 32 or meta["dtype"] not in ("uint16", "uint32"):
        raise ValueError("vocab_size, separator or dtype out of range")
    if not meta["shards"]:
        raise ValueError("no shards")
    for number, shard in enumerate(meta["shards"]):
        # of this name, so that no file is opened elsewhere
        if not (has_form(shard, _SHARD) and shard["file"] == f"tokens-{number:05d}.npy" and shard["tokens"] > 0):
            raise ValueError(f"shard {number} isn't {', '.join(_SHARD)} of tokens-{number:05d}.npy")
    return [tuple(shard[field] for field in _SHARD) for shard in meta["shards"]], size, separator


class Tokens:
    """A prepared folder opened as one long sequence: `len(tokens)`, and `tokens[a:b]` as an int64 array.

    Opening checks that each file is there and has its size; `verify()` also reads everything and compares checksums.
    Raises FileNotFoundError for a missing file and ValueError for a damaged one, naming file, expected and found.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        index = self.directory / "meta.json"
        if not index.exists():
            raise FileNotFoundError(f"{index}: not found; the folder was never prepared, or the preparation was "
                                    "interrupted: run `prepare` (again)")
        try:
            meta = read_json(index)
            self.shards, self.vocab_size, self.separator = _read_meta(meta, index)
        except OtherVersion:
            raise
        except ValueError as error:
            raise ValueError(f"{index}: damaged, expected the index that `prepare` writes ({error})") from None
        dtype, tokenizer_hash = np.dtype(meta["dtype"]), meta["tokenizer_sha256"]

        self.tokenizer_file = self.directory / "tokenizer.json"
        if not self.tokenizer_file.is_file():
            raise FileNotFoundError(f"{self.tokenizer_file}: not found, expected the tokenizer of these tokens")
        if (found := file_hash(self.tokenizer_file)) != tokenizer_hash:
            raise ValueError(f"{self.tokenizer_file}: not the tokenizer of these tokens, expected SHA-256 "
                             f"{tokenizer_hash}, found {found}")

        self._maps = []
        for name, count, size, _ in self.shards:
            path = self.directory / name
            if not path.is_file():
                raise FileNotFoundError(f"{path}: not found, expected a shard of {count} tokens")
            if (found := path.stat().st_size) != size:
                raise ValueError(f"{path}: {'truncated' if found < size else 'damaged'}, expected {size} bytes, "
                                 f"found {found}")
            try:  # not np.load, which opens archives as well
                array = np.lib.format.open_memmap(path, mode="r")
            except Exception as error:  # of any type: NumPy has Python parse the header
                raise ValueError(f"{path}: damaged, expected a .npy file: {error}") from None
            if array.shape != (count,) or array.dtype != dtype:
                raise ValueError(f"{path}: damaged, expected {count} tokens of {dtype}, found "
                                 f"{array.shape} of {array.dtype}")
            self._maps.append(array)
        self._ends = np.cumsum([len(array) for array in self._maps])
        self._start, self._stop = 0, int(self._ends[-1])
        self._part = ""  # in messages
        content = [self.vocab_size, tokenizer_hash, [digest for *_, digest in self.shards]]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Without the shards, which a process that is spawned opens by itself, and doesn't get a copy of."""
        return {name: value for name, value in vars(self).items() if name != "_maps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._maps = [np.load(self.directory / name, mmap_mode="r") for name, *_ in self.shards]

    def verify(self) -> None:
        """Reads every shard and raises ValueError if one's checksum has changed, or a token isn't in the vocabulary."""
        for (name, _, _, digest), array in zip(self.shards, self._maps):
            if (found := file_hash(self.directory / name)) != digest:
                raise ValueError(f"{self.directory / name}: damaged, expected SHA-256 {digest}, found {found}")
            if (most := int(array.max())) >= self.vocab_size:
                raise ValueError(f"{self.directory / name}: expected tokens below {self.vocab_size}, found {most}")

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ValueError unless a model of `vocab_size` has a row for every token of this folder's tokenizer."""
        if vocab_size < self.vocab_size:
            raise ValueError(f"model vocab_size: expected at least {self.vocab_size}, the tokens of "
                             f"{self.tokenizer_file}, got {vocab_size}")

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        start, stop = start + self._start, stop + self._start
        arrays = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            offset = int(self._ends[shard]) - len(self._maps[shard])
            piece = self._maps[shard][start - offset:stop - offset]
            arrays.append(piece.astype(np.int64))
            start, shard = start + len(piece), shard + 1
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)

    def split(self, validation: float = 0.01) -> tuple[Tokens, Tokens]:
        """(training, validation): the last `validation` share of the tokens is held out."""
        if not 0 < validation < 1:
            raise ValueError(f"validation: expected a share in (0, 1), got {validation}")
        train, held_out = copy.copy(self), copy.copy(self)
        train._stop = held_out._start = self._stop - math.ceil(validation * len(self))
        train._part, held_out._part = "the training share of ", "the validation share of "
        return train, held_out


def unigram_entropy(tokens: Tokens) -> float:
    """Entropy of the token frequencies, in nats: the loss of the best model that ignores the context."""
    counts = np.zeros(tokens.vocab_size, np.int64)
    for start in range(0, len(tokens), 1 << 24):
        counts += np.bincount(tokens[start:start + (1 << 24)], minlength=tokens.vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class Loader:
    """Shuffled windows of `sequence_length` + 1 tokens, a pure function of the step.

    The tokens are cut into windows that overlap by one token, so that each token but the first is a target once an
    epoch; each epoch has its own order. The samples of a step are the same however they are divided into micro-steps
    and ranks, so accumulation, or more GPUs, with the same product `batch_size * accumulation * world_size` train on
    the same data. There is no state: resuming needs nothing but the step.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, batch_size: int, *, accumulation: int = 1, rank: int = 0,
                 world_size: int = 1, seed: int = 0):
        self.windows = (len(tokens) - 1) // sequence_length
        if self.windows < 1:
            raise ValueError(f"sequence_length: expected at least {sequence_length + 1} tokens for windows of "
                             f"{sequence_length}, found {len(tokens)} in {tokens._part}{tokens.directory}")
        self.tokens, self.sequence_length, self.batch_size = tokens, sequence_length, batch_size
        self.accumulation, self.rank, self.world_size, self.seed = accumulation, rank, world_size, seed
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # Raw bits of a bit generator, unlike Generator.permutation, are promised not to change between NumPy
            # versions, so a resumed run goes on in the same order after an upgrade.
            bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.windows)
            self._orders = {e: order for e, order in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = np.argsort(bits, kind="stable")
        return self._orders[epoch]

    def batch(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), int64 (batch_size, sequence_length), of micro-step `micro` of optimizer step `step`."""
        first = ((step * self.accumulation + micro) * self.world_size + self.rank) * self.batch_size
        rows = []
        for sample in range(first, first + self.batch_size):
            epoch, place = divmod(sample, self.windows)
            start = int(self._order(epoch)[place]) * self.sequence_length
            rows.append(self.tokens[start:start + self.sequence_length + 1])
        window = torch.from_numpy(np.stack(rows))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
