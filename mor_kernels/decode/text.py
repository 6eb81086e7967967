"""Text of a request as its tokens arrive: whole characters only, and never a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..files import as_value_error


class Decoder(Protocol):
    """What :class:`TextStream` asks of a tokenizer."""

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens."""
        ...


class Tokenizer(Protocol):
    """What :class:`.Engine` asks of a tokenizer: those of the libraries tokenizers and transformers have it."""

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens."""
        ...

    def encode(self, text: str, /) -> Any:
        """The tokens of a prompt, or an object whose ``ids`` they are."""
        ...


def decode(tokenizer: Decoder, ids: list[int]) -> str:
    """The text of tokens."""
    with as_value_error("tokenizer: expected one that can decode its tokens, got"):
        return tokenizer.decode(ids)


class TextStream:
    """Turns tokens into pieces of text that can be shown at once.

    A token may end inside a UTF-8 character, and a stop string may run over several tokens: what could still become
    part of either is held back. The pieces joined are the text, cut off before the first stop string to be completed.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.window: list[int] = []  # the last tokens; some tokenizers decode a token differently at the very start
        self.settled = 0  # tokens at the front of the window whose text is out, kept as context
        self.shown = 0  # characters out, of the window's text after that context
        self.held = ""  # characters that may begin a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become certain with this token. Sets `stopped` when a stop string is complete."""
        self.window.append(token)
        return self._release(self._new_characters())

    def flush(self) -> str:
        """What is still held back, once no token follows."""
        if self.stopped:
            return ""
        piece = self._release(self._new_characters(final=True))
        held, self.held = self.held, ""
        return piece + held

    def _new_characters(self, final: bool = False) -> str:
        context = decode(self.tokenizer, self.window[: self.settled]) if self.settled else ""
        text = decode(self.tokenizer, self.window)[len(context) :]
        certain = text
        if not final:  # an unfinished character of up to 3 bytes shows as up to 3 replacement characters
            certain = text.rstrip("\ufffd")
            certain = text[: max(len(certain), len(text) - 3)]
        new = certain[self.shown :]
        if certain == text:
            self.window, self.settled, self.shown = self.window[self.settled :], len(self.window) - self.settled, 0
        else:
            self.shown = max(self.shown, len(certain))
        return new

    def _release(self, new: str) -> str:
        text = self.held + new
        ends = [(text.find(s) + len(s), text.find(s)) for s in self.stop if s in text]
        if ends:  # the one completed first, however the text was cut into tokens
            self.stopped, self.held = True, ""
            return text[: min(ends)[1]]
        hold = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self.held = text[len(text) - hold :]
        return text[: len(text) - hold]
