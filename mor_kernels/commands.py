"""The commands that use a model: eval, generate, depth, scores, serve. Each takes the options of ``__main__``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import show
from .decode import Engine, SamplingParams
from .decode.text import TextStream
from .evaluate import read_task, task_accuracy, text_loss
from .files import write_json
from .model import MoR, MoRConfig
from .model.authors import is_authors
from .model.convert import is_foreign
from .train import latest, load_tokenizer
from .train.loop import find_device
from .train.text import documents, encode, needed_vocab_size, separator_id


def _load(options: Namespace) -> tuple[MoR, Tokenizer]:
    """The model of a run's or a model's folder, in evaluation mode, and its tokenizer."""
    folder, device = options.model, find_device(options.device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the folder of a run or of a model, found none")
    weights = next((place for place in (folder, folder / "model") if (place / "config.json").exists()), None)
    weights = weights or latest(folder / "checkpoints")
    if weights is None:
        raise FileNotFoundError(f"{folder}: expected config.json, model/config.json or a whole checkpoint, found none")
    beside = [weights / "tokenizer.json", *(p / "data" / "tokenizer.json" for p in (folder, weights.parent.parent))]
    tokenizer = load_tokenizer(next((path for path in beside if path.exists()), beside[0]))
    if is_authors(weights):
        model = MoR.from_authors(weights)
    elif is_foreign(weights):
        model = MoR.from_dense(weights, MoRConfig.from_llama(weights))
    else:
        model = MoR.from_pretrained(weights)
    model = model.to(device).eval()
    if (needed := needed_vocab_size(tokenizer)) > model.config.vocab_size:
        raise ValueError(
            f"{weights}: expected a vocabulary of at least {needed}, which its tokenizer has, got "
            f"{model.config.vocab_size}"
        )
    return model, tokenizer


def _with_precision(model: MoR, name: str) -> MoR:
    """The model in the dtype that ``name`` stands for."""
    if name == "auto":
        name = "bfloat16" if model.embed_tokens.weight.device.type == "cuda" else "auto"
    return model if name == "auto" else model.to(getattr(torch, name))


def evaluate(options: Namespace) -> None:
    """The loss of texts, and accuracies on tasks."""
    if not options.text and not options.task:
        raise ValueError("--text, --task: expected at least one of them, got none")
    for name in ("limit", "window", "stride", "batch_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    # What is wrong with a file is said before the model is loaded.
    tasks = {}
    for path in options.task:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        if name in tasks:
            raise ValueError(f"--task: expected files of different names, got {name} twice")
        tasks[name] = read_task(path, options.limit)
    model, tokenizer = _load(options)
    model = _with_precision(model, options.precision)
    common = {"mode": options.mode, "batch_tokens": options.batch_tokens}
    # a parameter shared by layers is counted once
    parameters = sum(p.numel() for p in model.parameters())
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    result: dict[str, Any]
    result = {"model": os.fspath(options.model), "parameters": parameters, "mode": options.mode, "limit": options.limit,
              "precision": dtype, "text": {}, "tasks": {}}  # fmt: skip
    for source in options.text:
        found = text_loss(model, tokenizer, documents(source), window=options.window, stride=options.stride,
                          limit=options.limit, progress=Path(source).name, **common)  # fmt: skip
        result["text"][source] = found
        how = "blocks" if found["stride"] == found["window"] else f"a window moving by {found['stride']:,}"
        print(f"{Path(source).name}: {found['nats_per_token']:.4f} nats a token, perplexity {found['perplexity']:.2f}, "
              f"{found['bits_per_byte']:.4f} bits a byte, mean depth {found['depth']:.2f} ({found['tokens']:,} tokens, "
              f"{found['documents']:,} documents, {how} of {found['window']:,})", flush=True)  # fmt: skip
    for name, examples in tasks.items():
        found = result["tasks"][name] = task_accuracy(model, tokenizer, examples, progress=name, **common)
        facts = [f"{k} {found[k]:.4f} ± {found[f'{k}_stderr']:.4f}" for k in ("acc", "acc_norm") if k in found]
        facts += [f"perplexity {found['perplexity']:.2f}"] if "perplexity" in found else []
        print(f"{name}: {', '.join(facts)} ({found['examples']:,} examples)", flush=True)
    if options.json:
        write_json(options.json, result)


def generate(options: Namespace) -> None:
    """Continue each prompt, its text printed as it comes."""
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k,
                            top_p=options.top_p, min_p=options.min_p, seed=options.seed, stop=options.stop)  # fmt: skip
    model, tokenizer = _load(options)
    color = show.use_color(options.color)
    recursions = model.config.num_recursions
    with torch.inference_mode():
        engine = Engine(model, max_sequences=1, tokenizer=tokenizer, eos_token_id=separator_id(tokenizer))
        for i, prompt in enumerate(options.prompt or [""]):
            depths: list[int] = []
            for event in engine.stream(prompt, params):
                if not depths:  # the prompt has been accepted
                    print(("\n\n" if i else "") + prompt, end="")
                depths.append(event.depth)
                text = show.ansi(event.text, event.depth, recursions) if options.depth and color else event.text
                print(text, end="", flush=True)
            print()
            if options.depth:
                print(f"\n{show.legend(depths, recursions, color)}")


def serve(options: Namespace) -> None:
    """Serve completions until a signal."""
    from . import server  # its packages are optional

    bound = server.bind(options.host, options.port)  # before the model is loaded, which may take a while
    model, tokenizer = _load(options)
    model = _with_precision(model, options.precision)
    engine = Engine(model, max_sequences=options.max_sequences, max_waiting=options.max_waiting, tokenizer=tokenizer,
                    cache_bytes=options.cache_bytes, eos_token_id=separator_id(tokenizer),
                    batch_invariant=options.batch_invariant)  # fmt: skip
    name = options.name or options.model.resolve().name
    app = server.create_app(engine, model_name=name, api_key=options.api_key)
    server.serve(app, bound, model_name=name, api_key=options.api_key is not None)


class _WithSpecialTokens:
    """A tokenizer that decodes special tokens as well, so that a text shows all of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _load_and_read(options: Namespace) -> tuple[MoR, Tokenizer, list[int]]:
    """The model, its tokenizer and the tokens of the text that the command was given."""
    if options.file and options.text is not None:
        raise ValueError("text: expected none beside --file, got both")
    if options.png:  # what is wrong is said before the model is loaded
        show.require_plot()
    text = options.text
    if text is None:
        if not options.file and sys.stdin.isatty():
            print("reading the text from the keyboard; end it with Ctrl-D", file=sys.stderr)
        content = options.file.read_bytes() if options.file else sys.stdin.buffer.read()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{options.file or 'standard input'}: expected UTF-8 text: {error}") from None
    model, tokenizer = _load(options)
    ids = encode(tokenizer, text)
    if not ids:
        raise ValueError("text: expected at least one token, got none")
    return model, tokenizer, ids


def _route(model: MoR, ids: list[int], mode: str) -> tuple[Tensor, Tensor | None]:
    """Depths (n,), and router scores (n, Nr) or None, of tokens that are read in blocks of what the model takes."""
    window = model.config.max_position_embeddings
    if len(ids) > window:
        print(f"{len(ids):,} tokens, read in blocks of {window:,}, as many as the model looks at", file=sys.stderr)
    depths, scores = [], []
    with torch.inference_mode():
        for block in torch.tensor(ids, device=model.embed_tokens.weight.device).split(window):
            found = model(block[None], mode=mode, logits=False, router_logits=True)
            depths.append(found.depths[0].cpu())
            if found.router_logits is not None:
                scores.append(show.scores(found.router_logits[0], model.config).cpu())
    return torch.cat(depths), torch.cat(scores) if scores else None


def depth(options: Namespace) -> None:
    """How many recursions each token of a text takes."""
    model, tokenizer, ids = _load_and_read(options)
    routed, router_scores = _route(model, ids, "threshold")
    depths, recursions = routed.tolist(), model.config.num_recursions
    said = [""] * len(ids)
    if router_scores is not None:
        said = [show.describe(row, model.config) for row in router_scores.tolist()]
    stream = TextStream(_WithSpecialTokens(tokenizer))
    tokens = [show.Token(stream.push(token), token, *facts) for token, *facts in zip(ids, depths, said)]
    tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + stream.flush())

    color = show.use_color(options.color)
    print("".join(show.ansi(token.text, token.depth, recursions) if color else token.text for token in tokens))
    print(f"\n{show.legend(depths, recursions, color)}")
    title = f"Recursion depth of each token: {_name(options)}"
    if options.html:
        options.html.write_text(show.page(tokens, recursions, title), encoding="utf-8")
        print(f"page in {os.fspath(options.html)}")
    if options.png:
        show.depth_chart(depths, recursions, options.png, f"Recursion depth: {_name(options)}")
        print(f"chart in {os.fspath(options.png)}")


def scores(options: Namespace) -> None:
    """What routers say of the tokens that they keep, and of those that they drop."""
    model, _, ids = _load_and_read(options)
    config = model.config
    if config.router == "none":
        raise ValueError(f"{options.model}: expected a model with routers, got one of router='none'")
    depths, router_scores = _route(model, ids, options.mode)
    assert router_scores is not None  # since there are routers
    found = show.split_scores(router_scores, depths, config)
    for part in found:
        facts = []
        for values, word in zip((part.kept, part.dropped), show.words_for(config)):
            mean = f", mean {show.score_name(config)} {sum(values) / len(values):.2f}" if values else ""
            facts.append(f"{len(values):,} {word}{mean}")
        print(f"{part.name}: {'; '.join(facts)}")
    if options.png:
        expert = config.router == "expert_choice"
        # an auxiliary router decides by its own logits, and none decides in top-k
        threshold = 0.0 if expert and (options.mode == "threshold" or config.aux != "router") else None
        mode = f", {options.mode}" if expert else ""
        show.score_chart(found, config, options.png, f"Router scores: {_name(options)}{mode}", threshold)
        print(f"chart in {os.fspath(options.png)}")


def _name(options: Namespace) -> str:
    """A run or model by its folder."""
    return os.path.basename(os.path.abspath(options.model))
