"""Texts, and the tokenizers that make tokens of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..files import as_value_error

SEPARATOR = "<|endoftext|>"
_OTHER_SEPARATORS = ("<|end_of_text|>", "</s>", "<eos>")  # in tokenizers that other models brought along
_PIECE = 1 << 20  # characters encoded as one string
_WORD = 2000  # characters in one word, or one gap, that a tokenizer is trained on
_SUFFIXES = (".txt", ".md", ".jsonl")

Source = str | Path | Sequence[str | Path]


def documents(source: Source) -> Iterator[str]:
    """The documents of a source, one string each, empty ones left out.

    A source is one of, or a list of:

    - a .jsonl file (a document a line, in its field "text"), or any other file of text (a document, or several
      separated by `<|endoftext|>`), in UTF-8;
    - a folder, searched recursively for .txt, .md and .jsonl files in the order of their names;
    - "python-docs": the language reference in English that comes with every Python (about 0.5 MB);
    - "hf:NAME[:SUBSET][:SPLIT]": a Hugging Face dataset with a column "text", streamed through the package `datasets`
      (SPLIT is "train" by default; "hf:NAME::SPLIT" names a split without a subset).
    """
    if not isinstance(source, (str, Path)):
        for part in source:
            yield from documents(part)
    elif source == "python-docs":
        from pydoc_data.topics import topics

        yield from topics.values()
    elif str(source).startswith("hf:"):
        yield from _hugging_face(str(source))
    else:
        yield from _files(Path(source))


def _hugging_face(source: str) -> Iterator[str]:
    name, subset, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise ValueError(f'source: expected "hf:NAME[:SUBSET][:SPLIT]", got "{source}"')
    try:
        import datasets
    except ImportError:
        how = "pip install mor-kernels[datasets]"
        raise ImportError(f'source "{source}" needs the package `datasets`: {how}') from None
    for row in datasets.load_dataset(name, subset or None, split=split or "train", streaming=True):
        if "text" not in row:
            raise ValueError(f'source "{source}": expected a column "text", found {sorted(row)}')
        if row["text"]:
            yield row["text"]


def _files(path: Path) -> Iterator[str]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"{path}: expected .txt, .md or .jsonl files, found none")
    elif not path.exists():
        raise FileNotFoundError(f'{path}: not found; a source is a file, a folder, "python-docs" or "hf:NAME"')
    else:
        files = [path]
    for file in files:
        try:
            with open(file, encoding="utf-8-sig") as lines:
                yield from _json_lines(file, lines) if file.suffix.lower() == ".jsonl" else _plain_text(lines)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8 text ({error})") from None


def _json_lines(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ValueError(f'{file}:{number}: expected a JSON object with a string "text", got {line[:80].strip()}')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{file}:{number}: expected text, got half a surrogate pair, "
                             f"\\u{ord(text[error.start]):04x}") from None
        if text:
            yield text


def _plain_text(lines: Iterable[str]) -> Iterator[str]:
    document: list[str] = []
    for line in lines:
        head, *tails = line.split(SEPARATOR)
        document.append(head)
        for tail in tails:
            if text := "".join(document).strip("\n"):
                yield text
            document = [tail]
    if text := "".join(document).strip("\n"):
        yield text


def pieces(text: str) -> list[str]:
    """Cuts a long text where a run of white space begins, which byte-level BPE never puts inside a token."""
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        end = max(text.rfind("\n", start + 1, start + _PIECE), text.rfind(" ", start + 1, start + _PIECE))
        while end > start and text[end - 1].isspace():
            end -= 1
        end = end if end > start else start + _PIECE
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _cut_words(text: str) -> Iterator[str]:
    """Cuts runs with no white space, or of nothing else: the time to train a BPE grows with their length squared."""
    start = 0
    for run in re.finditer(rf"(?<!\S)\S{{{_WORD + 1},}}|(?<!\s)\s{{{_WORD + 1},}}", text):
        for end in range(run.start() + _WORD, run.end(), _WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def train_tokenizer(source: Source, vocab_size: int = 8192, *, sample_chars: int = 100_000_000) -> Tokenizer:
    """Trains a byte-level BPE on the first `sample_chars` characters of a source; token 0 is `<|endoftext|>`.

    The vocabulary has at most `vocab_size` tokens, fewer where a small text holds no more pairs to merge.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size: expected at least 257 (256 bytes and {SEPARATOR}), got {vocab_size}")

    def sample() -> Iterator[str]:
        left = sample_chars
        for text in documents(source):
            for piece in pieces(text[:left]):
                yield from _cut_words(piece)
            left -= len(text)
            if left <= 0:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[SEPARATOR], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Opens a tokenizer.json; truncation and padding that it may ask for are switched off."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found, expected a tokenizer's file")
    with as_value_error(f"{path}: not a tokenizer.json that the package `tokenizers` can read"):
        text = path.read_text(encoding="utf-8")
        json.loads(text, object_hook=_check_merges)
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # a template of tokens that there aren't makes it panic at any text
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{path}: expected a tokenizer with a vocabulary, got one of no tokens")
    return tokenizer


def _check_merges(found: dict[str, Any]) -> dict[str, Any]:
    """The package cuts a BPE's prefix off the second part of each merge unseen, by bytes: where that is within a
    character, it takes what is left for a text, and the process aborts."""
    prefix, merges = found.get("continuing_subword_prefix"), found.get("merges")
    if prefix and isinstance(prefix, str) and isinstance(merges, list):
        for merge in merges:
            second = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
            second.encode()[len(prefix.encode()) :].decode()
    return found


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, without those that a tokenizer would put around it."""
    # it can't where it knows no token for what it doesn't know
    with as_value_error("tokenizer: expected one that can encode the text, got"):
        return tokenizer.encode(text, add_special_tokens=False).ids


def separator_id(tokenizer: Tokenizer) -> int:
    """The token put between documents: `<|endoftext|>`, or the end-of-text token of another model's tokenizer."""
    for token in (SEPARATOR, *_OTHER_SEPARATORS):
        if (index := tokenizer.token_to_id(token)) is not None:
            return index
    raise ValueError(f"tokenizer: expected a token {SEPARATOR} or one of {', '.join(_OTHER_SEPARATORS)}, found none")


def needed_vocab_size(tokenizer: Tokenizer) -> int:
    """The rows that a model's embedding needs for all of a tokenizer's tokens."""
    return max(tokenizer.get_vocab().values()) + 1  # not the number of tokens: ids may have gaps
