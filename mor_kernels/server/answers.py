"""What a completion becomes in an answer, whole or in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..decode import Completion, Event
from ..decode.text import TextStream, decode
from .requests import CompletionRequest, Prompt


class Choice:
    """Makes the tokens of a choice into parts of an answer."""

    def __init__(self, index: int, prompt: Prompt, body: CompletionRequest, tokenizer, name: Callable):
        self.index, self.prompt, self.tokenizer, self.name = index, prompt, tokenizer, name
        self.wants_logprobs, self.wants_depths = body.logprobs is not None, bool(body.depths)
        self.offset = 0  # of the next character in the text
        self.characters = TextStream(tokenizer)
        self.count = 0

    def echo(self, scores) -> dict:
        """The prompt; scores are its tokens' log-probabilities and their likeliest tokens."""
        part = self._part(self.prompt.text, self.prompt.ids, scores)
        self.offset, self.characters = len(self.prompt.text), TextStream(self.tokenizer)
        return part

    def events(self, events: Sequence[Event]) -> dict:
        """What has come out since the last part."""
        found = [e for e in events if e.token is not None]
        self.count += len(found)
        scores = [(e.logprob, e.top_logprobs) for e in found]
        tokens = [e.token for e in found if e.token is not None]
        part = self._part("".join(e.text for e in events), tokens, scores, [e.depth for e in found])
        part["finish_reason"] = events[-1].finish_reason
        return part

    def whole(self, completion: Completion, echo: dict | None) -> dict:
        self.count = len(completion.tokens)
        scores = list(zip(completion.logprobs or (), completion.top_logprobs or ()))
        depths = completion.depths[len(completion.prompt) - 1 :][: self.count]
        part = self._part(completion.text or "", completion.tokens, scores, depths)
        part["finish_reason"] = completion.finish_reason
        if echo:
            part["text"] = echo["text"] + part["text"]
            if self.wants_logprobs:
                part["logprobs"] = {key: echo["logprobs"][key] + part["logprobs"][key] for key in part["logprobs"]}
        return part

    def _part(self, text: str, tokens: Sequence[int], scores, depths: Sequence[int] = ()) -> dict:
        part = {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}
        if self.wants_logprobs:
            part["logprobs"] = self._logprobs(tokens, scores)
        if self.wants_depths:
            part["depths"] = list(depths)
        return part

    def _logprobs(self, tokens: Sequence[int], scores) -> dict:
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, (logprob, likeliest) in zip(tokens, scores):
            name, length = self.name(token)
            found["tokens"].append(name)
            found["token_logprobs"].append(_finite(logprob))
            top: dict[str, float | None] = {}
            for other, value in (*likeliest, (token, logprob)) if likeliest is not None else ():
                top.setdefault(self.name(other)[0], _finite(value))  # of tokens of one name the likeliest
            found["top_logprobs"].append(top or None)  # None of a prompt's first token
            more = len(self.characters.push(token))
            # unfinished characters may come out before its own; a part of a character is where that is
            found["text_offset"].append(self.offset + (max(more - length, 0) if length is not None else 0))
            self.offset += more
        return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def token_name(tokenizer, token: int) -> tuple[str, int | None]:
    """What a token is called: its text, a special one's name, or its id if it is a part of a character; and how many
    characters it has, None of such a part."""
    text = decode(tokenizer, [token, token])[len(decode(tokenizer, [token])) :]  # a text's first space may be dropped
    name = text
    if not text and hasattr(tokenizer, "id_to_token"):
        name = tokenizer.id_to_token(token)
    if not name or "\ufffd" in text:
        name = f"token_id:{token}"
    return name, None if "\ufffd" in text else len(text)


def usage(prompts: Sequence[Prompt], choices: Sequence[Choice]) -> dict:
    read, generated = sum(len(prompt.ids) for prompt in prompts), sum(choice.count for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}
