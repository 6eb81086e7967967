"""The command ``mor-kernels``: doctor, train, generate, depth."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

# A tiny model that learns the language reference of Python in about a minute on two cores.
DEMO_MODEL = {
    "vocab_size": 1024, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "num_recursions": 3,
    "router": "expert_choice", "cap_warmup_steps": 40,
}  # fmt: skip
DEMO_TRAIN = {
    "steps": 200, "batch_size": 16, "sequence_length": 128, "learning_rate": 4e-3, "eval_every": 100,
    "checkpoint_every": 100, "validation": 0.03,
}  # fmt: skip
RUN_FILES = ("data", "checkpoints", "model", "metrics.jsonl", "curves.png")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 1 after a message on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except BrokenPipeError:  # the reader of our output has had enough
        return 1
    except (ValueError, OSError, ImportError, RuntimeError, FloatingPointError) as error:
        print(f"mor-kernels {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mor-kernels", description="Mixture-of-Recursions language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what is installed, which backends work here, and why others don't")
    doctor.set_defaults(run=_doctor)

    train = commands.add_parser(
        "train",
        help="train a model",
        description="Train a model into a folder; the same command again goes on with it.",
    )
    usage = train.format_help
    train.format_help = lambda: usage() + _settings()  # only when asked for, since it imports PyTorch
    add = train.add_argument
    add("out", type=Path, help="folder of the run: data, checkpoints, metrics, curves.png and the model")
    add("--preset", choices=["demo", "135M", "360M", "730M", "1.7B"], help="a tiny demo, or a size of the paper")
    add("--source", action="append", metavar="TEXT", help="file or folder of text, python-docs (default: the English "
        "language reference in every Python), or hf:NAME[:SUBSET][:SPLIT]; may be repeated")  # fmt: skip
    add("--tokenizer", type=Path, help="a tokenizer.json to use instead of training one")
    add("--max-tokens", type=int, help="read no more than this many tokens of the source")
    add("--model", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the model's configuration, see below")
    add("--train", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the training's, see below")
    add("--init", metavar="FOLDER[:HOW]", help="start from a dense Llama checkpoint, a Hugging Face folder; HOW is "
        "stepwise (default), average, lower, upper or random")  # fmt: skip
    add("--fresh", action="store_true", help="remove what an earlier run left in the folder, and start anew")
    train.set_defaults(run=_train)

    generate = commands.add_parser("generate", help="continue a text")
    _model_arguments(generate)
    generate.add_argument(
        "--prompt", action="append", help="may be repeated; default: from the beginning of a document"
    )
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=0.95)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--seed", type=int, help="the same seed gives the same text")
    generate.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    generate.add_argument(
        "--depth", action="store_true", help="colour each token by the recursions spent on choosing it"
    )
    generate.set_defaults(run=_generate)

    depth = commands.add_parser("depth", help="show how many recursions each token of a text takes")
    _model_arguments(depth)
    depth.add_argument("text", nargs="?", help="the text; default: what comes in on standard input")
    depth.add_argument("--file", type=Path, help="a file with the text")
    depth.add_argument("--html", type=Path, help="also write a page of HTML")
    depth.set_defaults(run=_depth)
    return parser


def _settings() -> str:
    from .model import MoRConfig
    from .train import TrainConfig

    lines = [""]
    for option, config in (("--model", MoRConfig), ("--train", TrainConfig)):
        lines.append(f"{option} takes, with these defaults:")
        for field in dataclasses.fields(config):
            if field.default is not dataclasses.MISSING:
                lines.append(f"  {field.name}={json.dumps(field.default)}")
    return "\n".join(lines) + "\n"


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a run, or of a model with its tokenizer.json")
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, ...")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")


def _assignments(option: str, texts: list[str], config: type) -> dict:
    """FIELD=VALUE texts as a dict; a value is JSON, or else a string."""
    known = {field.name for field in dataclasses.fields(config)}
    chosen = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{option}: expected FIELD=VALUE with a field of {', '.join(sorted(known))}, got {text!r}")
        try:
            chosen[name] = json.loads(value)
        except ValueError:
            chosen[name] = value
        if isinstance(chosen[name], list):
            chosen[name] = tuple(chosen[name])
    return chosen


def _doctor(options) -> None:
    from . import doctor

    doctor.main()


def _train(options) -> None:
    from .model import MoR, MoRConfig
    from .model.config import SIZES
    from .train import Tokens, TrainConfig, prepare, train

    demo = options.preset == "demo"
    fields = DEMO_MODEL if demo else SIZES.get(options.preset, {})
    fields = {**fields, **_assignments("--model", options.model, MoRConfig)}
    settings = {**(DEMO_TRAIN if demo else {}), **_assignments("--train", options.train, TrainConfig)}
    MoRConfig(**fields), TrainConfig(data="", out="", **settings)  # a wrong one is said before anything is written

    out = options.out
    if options.fresh:
        for name in RUN_FILES:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    data, source = out / "data", options.source or ["python-docs"]
    if not (data / "meta.json").exists():
        print(f"preparing {', '.join(source)}", flush=True)
        vocabulary = fields.get("vocab_size", MoRConfig.vocab_size if options.preset else 8192)
        prepare(source, data, tokenizer=options.tokenizer, vocab_size=vocabulary, max_tokens=options.max_tokens)
    elif (found := json.loads((data / "meta.json").read_text())["source"]) != str(source) and options.source:
        raise ValueError(f"--source: expected {found}, which {data} was made of (--fresh starts anew), got {source}")
    tokens = Tokens(data)
    fields.setdefault("vocab_size", tokens.vocab_size)

    config = MoRConfig(**fields)
    settings.setdefault("sequence_length", min(512, config.max_position_embeddings))
    if options.init:
        folder, _, how = options.init.partition(":")
        model = MoR.from_dense(folder, config, how or "stepwise")
    else:
        import torch

        torch.manual_seed(settings.get("seed", 0))
        model = MoR(config)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {config.num_hidden_layers} layers unrolled, "
          f"{config.num_unique_layers} of them unique, {len(tokens):,} tokens", flush=True)  # fmt: skip
    trainer = train(model, TrainConfig(data=str(data), out=str(out), **settings))
    if trainer.rank:
        return
    if trainer.interrupted:
        print(f"stopped at step {trainer.step}; the same command goes on from there")
        return
    model.save_pretrained(out / "model")
    shutil.copy(tokens.tokenizer_file, out / "model" / "tokenizer.json")
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    final = next((line for line in reversed(metrics) if "validation_loss" in line), None)
    loss = next(line for line in reversed(metrics) if "lm" in line)["lm"]
    print(f"training loss {loss:.3f} nats a token", end="")
    if final:
        print(f", held-out loss {final['validation_loss']:.3f} (causal routing, as in decoding)", end="")
    print(f"; unigram entropy {trainer.unigram_entropy:.3f}\nmodel in {out / 'model'}, curves in {out / 'curves.png'}")


def _load(options):
    """The model of a run's or a model's folder, in evaluation mode, and its tokenizer."""
    import torch

    from .model import MoR
    from .train import latest, load_tokenizer

    folder = options.model
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the folder of a run or of a model, found none")
    places = {folder: folder, folder / "model": folder / "model"}  # of the weights, and of the tokenizer
    if (folder / "checkpoints").is_dir() and (checkpoint := latest(folder / "checkpoints")):
        places[checkpoint] = folder / "data"
    weights = next((place for place in places if (place / "config.json").exists()), None)
    if weights is None:
        raise FileNotFoundError(f"{folder}: expected config.json, model/config.json or a checkpoint, found none")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    model, tokenizer = (
        MoR.from_pretrained(weights).to(device).eval(),
        load_tokenizer(places[weights] / "tokenizer.json"),
    )
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise ValueError(f"{weights}: expected a vocabulary of at least {tokenizer.get_vocab_size()}, which its "
                         f"tokenizer has, got {model.config.vocab_size}")  # fmt: skip
    return model, tokenizer


def _generate(options) -> None:
    import torch

    from . import show
    from .decode import Engine, SamplingParams
    from .train.data import separator_id

    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k,
                            top_p=options.top_p, min_p=options.min_p, seed=options.seed, stop=options.stop)  # fmt: skip
    model, tokenizer = _load(options)
    color = show.use_color(options.color)
    recursions = model.config.num_recursions
    with torch.inference_mode():
        engine = Engine(model, max_sequences=1, tokenizer=tokenizer, eos_token_id=separator_id(tokenizer))
        for i, prompt in enumerate(options.prompt or [""]):
            print(("\n\n" if i else "") + prompt, end="", flush=True)
            depths = []
            for event in engine.stream(prompt, params):
                depths.append(event.depth)
                text = show.ansi(event.text, event.depth, recursions) if options.depth and color else event.text
                print(text, end="", flush=True)
            print()
            if options.depth:
                print(f"\n{show.legend(depths, recursions, color)}")


def _depth(options) -> None:
    import torch

    from . import show
    from .decode.text import TextStream

    if options.file and options.text is not None:
        raise ValueError("text: expected none beside --file, got both")
    text = options.file.read_text(encoding="utf-8") if options.file else options.text
    text = sys.stdin.read() if text is None else text
    model, tokenizer = _load(options)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError("text: expected at least one token, got none")
    limit = model.config.max_position_embeddings
    if len(ids) > limit:
        print(f"showing the first {limit} of {len(ids)} tokens, as far as the model looks", file=sys.stderr)
    ids = ids[:limit]
    with torch.inference_mode():
        depths = model(torch.tensor([ids], device=model.embed_tokens.weight.device)).depths[0].tolist()
    stream = TextStream(tokenizer)
    pieces = [(stream.push(token), depth) for token, depth in zip(ids, depths)]
    pieces[-1] = (pieces[-1][0] + stream.flush(), pieces[-1][1])

    color, recursions = show.use_color(options.color), model.config.num_recursions
    print("".join(show.ansi(piece, depth, recursions) if color else piece for piece, depth in pieces))
    print(f"\n{show.legend(depths, recursions, color)}")
    if options.html:
        options.html.write_text(show.page(pieces, recursions, "Recursion depth of each token"), encoding="utf-8")
        print(f"page in {os.fspath(options.html)}")


if __name__ == "__main__":
    sys.exit(main())
