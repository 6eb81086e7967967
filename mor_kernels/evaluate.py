"""How good a model is: the loss of text, and accuracies on tasks by the log-likelihood of continuations.

Everything comes down to :func:`score`, the log-likelihood of a continuation after its context, both as tokens;
:func:`text_loss` and :func:`task_accuracy` make such requests of documents and of tasks, as lm-evaluation-harness does.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from .decode.sampler import LOGITS_AT_ONCE
from .model import MoR
from .ops._numeric import wide
from .train.text import encode, separator_id

LONGEST_LINE = 1 << 24  # characters
LINE = '{"choices": [[context, continuation], ...], "gold": index}'

Request = tuple[Sequence[int], Sequence[int]]  # context, at least one token; continuation, likewise


class Score(NamedTuple):
    log_likelihood: float  #: nats, of the continuation after its context
    greedy: bool  #: whether the likeliest token at each place is the continuation's
    depth: float  #: mean recursions of the tokens that the model read


@torch.inference_mode()
def score(
    model: MoR, requests: Sequence[Request], *, mode: str = "threshold", batch_tokens: int | None = None,
    progress: str | None = None,
) -> list[Score]:  # fmt: skip
    """The score of each request (context, continuation), lists of tokens, in their order.

    Requests of similar lengths share a batch, padded to the right, which changes no result by more than rounding. With
    mode="topk", where the number of kept tokens depends on the padded length, only requests of one length do.

    Args:
        model: a MoR, in evaluation mode; it computes in the dtype of its weights, and probabilities in fp32.
        mode: how expert-choice routes, see :meth:`MoR.forward`; "topk" lets a token's depth depend on later tokens.
        batch_tokens: tokens of a batch, padding included; by default 16,384 on CUDA and 2,048 elsewhere. A request is
            never split.
        progress: label of a progress bar; None shows none.

    A context that doesn't fit into ``max_position_embeddings`` beside its continuation loses its beginning. ValueError
    if a continuation alone doesn't fit, or a list is empty.
    """
    device, limit = model.embed_tokens.weight.device, model.config.max_position_embeddings
    batch_tokens = batch_tokens or (16384 if device.type == "cuda" else 2048)
    rows = []
    for i, (context, continuation) in enumerate(requests):
        if not len(context) or not 1 <= len(continuation) <= limit:
            raise ValueError(
                f"requests[{i}]: expected a context of at least one token and a continuation of 1 to {limit}, which "
                f"the model's max_position_embeddings allows, got {len(context)} and {len(continuation)}"
            )
        # the last token is predicted, but not read
        rows.append(([*context, *continuation][-limit - 1 : -1], continuation))

    scores: dict[int, Score] = {}
    with tqdm(total=len(rows), desc=progress, leave=False, disable=None if progress else True) as bar:
        for batch in _batches([len(read) for read, _ in rows], batch_tokens, padded=mode != "topk"):
            for i, value in zip(batch, _score_batch(model, [rows[i] for i in batch], mode, device)):
                scores[i] = value
            bar.update(len(batch))
    return [scores[i] for i in range(len(rows))]


def _batches(lengths: list[int], batch_tokens: int, padded: bool) -> list[list[int]]:
    """Indices of requests, in batches; the longest first, so that what doesn't fit into memory shows at once."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        full = (len(batches[-1]) + 1) * longest > batch_tokens if batches else True
        if full or not padded and lengths[i] != longest:
            batches.append([])
        batches[-1].append(i)
    return batches


def _score_batch(model: MoR, rows: list[Request], mode: str, device: torch.device) -> list[Score]:
    longest = len(rows[0][0])
    ids = torch.tensor([[*read, *[0] * (longest - len(read))] for read, _ in rows], device=device)
    lengths = torch.tensor([len(read) for read, _ in rows], device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    output = model(ids, attention_mask=None if len(rows[-1][0]) == longest else real, mode=mode)

    owner = torch.tensor([row for row, (_, continuation) in enumerate(rows) for _ in continuation], device=device)
    wanted = torch.tensor([token for _, continuation in rows for token in continuation], device=device)
    numbers = [row * longest + len(read) - len(continuation) + i
               for row, (read, continuation) in enumerate(rows) for i in range(len(continuation))]  # fmt: skip
    places = torch.tensor(numbers, device=device)
    assert output.logits is not None  # which are asked for by default
    logits = output.logits.flatten(0, 1)
    likelihoods, hits = [], []
    for place, token in zip(*(t.split(max(1, LOGITS_AT_ONCE // logits.shape[1])) for t in (places, wanted))):
        chunk = logits[place].to(wide(logits.dtype))
        likelihoods.append(chunk.gather(1, token[:, None])[:, 0] - chunk.logsumexp(1))
        hits.append(chunk.argmax(1) == token)
    totals = torch.zeros(3, len(rows), dtype=torch.float64, device=device)
    totals[0].index_add_(0, owner, torch.cat(likelihoods).double())
    totals[1].index_add_(0, owner, (~torch.cat(hits)).double())
    totals[2] = output.depths.sum(1) / lengths  # 0 at padding
    return [Score(likelihood, misses == 0, depth) for likelihood, misses, depth in zip(*totals.tolist())]


def text_loss(
    model: MoR, tokenizer: Tokenizer, documents: Iterable[str], *, window: int | None = None, stride: int | None = None,
    limit: int | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The loss of documents, each read alone, after the token that separates documents.

    Args:
        documents: texts, as from :func:`mor_kernels.train.text.documents`.
        window: tokens that the model reads at a time; by default its ``max_position_embeddings``.
        stride: tokens by which the window moves on, each token being predicted once. The default is the window itself:
            blocks, the first tokens of which have little context. Less gives each token at least window - stride
            tokens of context, where the document has them, and costs window / stride times as much.
        limit: how many documents are read.
        options: see :func:`score`.

    Returns:
        "nats_per_token", "perplexity", "bits_per_byte" of UTF-8, mean "depth" of tokens, "tokens", "bytes",
        "documents", "window" and "stride".
    """
    longest = model.config.max_position_embeddings
    window = longest if window is None else window
    stride = window if stride is None else stride
    for name, value, most in (("window", window, longest), ("stride", stride, window)):
        if not 1 <= value <= most:
            raise ValueError(f"{name}: expected 1 to {most}, got {value}")
    separator = separator_id(tokenizer)
    requests, size, texts = [], 0, 0
    for text in islice(documents, limit):
        ids = encode(tokenizer, text)
        read = [separator, *ids]  # read[i] predicts ids[i]
        start = 0
        while start < len(ids):
            end = min(start + (stride if start else window), len(ids))
            requests.append((read[max(0, end - window) : start + 1], ids[start:end]))
            start = end
        size, texts = size + len(text.encode()), texts + 1
    if not requests:
        raise ValueError("documents: expected text, got none")
    scores = score(model, requests, **options)
    tokens = sum(len(continuation) for _, continuation in requests)
    loss = -math.fsum(found.log_likelihood for found in scores)
    depth = math.fsum(found.depth * len(continuation) for found, (_, continuation) in zip(scores, requests)) / tokens
    return {"nats_per_token": loss / tokens, "perplexity": _exp(loss / tokens), "depth": depth,
            "bits_per_byte": loss / math.log(2) / size, "tokens": tokens, "bytes": size, "documents": texts,
            "window": window, "stride": stride}  # fmt: skip


def read_task(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first ``limit`` examples of a task, a .jsonl or .jsonl.gz file with an example a line.

    A line is {"choices": [[context, continuation], ...], "gold": index}; "gold" of a single choice doesn't matter.
    """
    path = Path(path)
    examples: list[dict[str, Any]] = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        for number in count(1):
            try:
                line = lines.readline(LONGEST_LINE + 1)
            except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path}: expected UTF-8 text{' in gzip' * (path.suffix == '.gz')}: {error}") from None
            if not line or len(examples) == limit:
                break
            if len(line) > LONGEST_LINE:  # a few bytes of gzip may be gigabytes
                raise ValueError(f"{path}:{number}: expected at most {LONGEST_LINE} characters a line, got more")
            if not line.strip():
                continue
            try:
                examples.append(json.loads(line))
                good = _is_example(examples[-1])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                good = False
            if not good:
                raise ValueError(f"{path}:{number}: expected {LINE}, got {line.strip()[:80]}")
    if not examples:
        raise ValueError(f"{path}: expected lines {LINE}, found none")
    return examples


def _is_example(value: Any) -> bool:
    """Whether it is as :func:`read_task` says; what isn't may also raise an error of several types."""
    choices, gold = value["choices"], value.get("gold")
    pairs = [(context, continuation) for context, continuation in choices]
    "".join(part for pair in pairs for part in pair).encode()  # of strings, and half a surrogate pair is no text
    good = bool(pairs) and all(continuation.strip() for _, continuation in pairs)
    return good and (len(pairs) == 1 or type(gold) is int and 0 <= gold < len(pairs))


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of its continuation, as lm-evaluation-harness makes them.

    White space at the end of the context goes to the continuation; both are encoded as one text, which is then cut
    after as many tokens as the context has by itself. An empty context is the token that separates documents.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        return [separator_id(tokenizer)], encode(tokenizer, continuation)
    before = encode(tokenizer, bare)
    whole = encode(tokenizer, bare + continuation)
    return whole[: len(before)], whole[len(before) :]


def task_accuracy(
    model: MoR, tokenizer: Tokenizer, examples: Sequence[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """Accuracy, zero-shot, on examples as :func:`read_task` gives them; ``options`` are those of :func:`score`.

    "acc" takes the choice whose continuation has the largest log-likelihood, "acc_norm" the largest for each byte of
    it, the white space at its beginning left out. Ties go to the first. Where there is one choice, it is right if
    greedy decoding gives all of it, and there is no "acc_norm"; "perplexity" of the continuation is reported instead.

    Returns:
        "acc", "acc_norm" or "perplexity", "examples", and the standard errors "acc_stderr" and "acc_norm_stderr".
    """
    requests = []
    for i, example in enumerate(examples):
        for context, continuation in example["choices"]:
            requests.append(encode_pair(tokenizer, context, continuation))
            if not requests[-1][1]:
                raise ValueError(
                    f"examples[{i}]: expected a continuation with tokens of its own, but {continuation!r} and the end "
                    f"of {context[-20:]!r} are one token"
                )
    scores = iter(score(model, requests, **options))
    right, right_by_byte, singles = [], [], []
    for example in examples:
        found = [next(scores) for _ in example["choices"]]
        if len(found) == 1:
            right.append(found[0].greedy)
            singles.append(found[0].log_likelihood)
            continue
        plain = [choice.log_likelihood for choice in found]
        sizes = [len(continuation.lstrip().encode()) for _, continuation in example["choices"]]
        by_byte = [value / size for value, size in zip(plain, sizes)]
        right.append(plain.index(max(plain)) == example["gold"])
        right_by_byte.append(by_byte.index(max(by_byte)) == example["gold"])
    result = {"acc": sum(right) / len(right), "acc_stderr": _standard_error(right), "examples": len(right)}
    if right_by_byte:
        result["acc_norm"] = sum(right_by_byte) / len(right_by_byte)
        result["acc_norm_stderr"] = _standard_error(right_by_byte)
    if singles:
        result["perplexity"] = _exp(-math.fsum(singles) / len(singles))
    return result


def _standard_error(hits: list[bool]) -> float:
    share = sum(hits) / len(hits)
    return math.sqrt(share * (1 - share) / max(len(hits) - 1, 1))


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
