"""The command ``mor-kernels``: doctor, train, generate, depth."""

from __future__ import annotations

import argparse
import contextlib
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
# All that a run writes; --fresh removes nothing else.
RUN_FILES = (
    "data/meta.json", "data/tokens-*.npy", "data/tokenizer.json", "data/.tmp-*", "checkpoints/step-*",
    "checkpoints/.tmp-*", "model/config.json", "model/model.safetensors", "model/tokenizer.json", "metrics.jsonl",
    "curves.png",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 after a message on stderr, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        return 130
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
    add(
        "--preset",
        choices=["demo", "135M", "360M", "730M", "1.7B"],
        help="a tiny demo, or a size of the paper (dense unless --model says router=...)",
    )
    add("--source", action="append", metavar="TEXT", help="file or folder of text, python-docs (default: the English "
        "language reference in every Python), or hf:NAME[:SUBSET][:SPLIT]; may be repeated")  # fmt: skip
    add("--tokenizer", type=Path, help="a tokenizer.json to use instead of training one")
    add("--max-tokens", type=int, help="read no more than this many tokens of the source")
    add(
        "--model",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of the model's configuration, see below",
    )
    add(
        "--train",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of the training's, see below",
    )
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
    """FIELD=VALUE texts as a dict; a value is a number, true, false, null, a list in brackets, or else a string."""
    known = {field.name for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING}
    chosen = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{option}: expected FIELD=VALUE with a field of {', '.join(sorted(known))}, got {text!r}")
        chosen[name] = _value(value)
    return chosen


def _value(text: str):
    for read in (json.loads, float):
        with contextlib.suppress(ValueError):
            value = read(text.lower() if text in ("True", "False") else text)
            return tuple(value) if isinstance(value, list) else value
    return text


def _doctor(options) -> None:
    from . import doctor

    doctor.main()


def _train(options) -> int:
    from .model import MoRConfig
    from .model.config import SIZES
    from .model.convert import read_dense
    from .train import TrainConfig
    from .train.loop import processes

    demo = options.preset == "demo"
    fields = DEMO_MODEL if demo else SIZES.get(options.preset, {})
    fields = {**fields, **_assignments("--model", options.model, MoRConfig)}
    settings = {**(DEMO_TRAIN if demo else {}), **_assignments("--train", options.train, TrainConfig)}
    # What is wrong is said before anything is removed or written.
    MoRConfig(**fields), TrainConfig(data="", out="", **settings)
    device = settings.get("device", "auto")
    _device(device)
    init, _, how = (options.init or "").partition(":")
    dense = read_dense(init) if init else None

    with processes(device) as rank:
        if rank == 0:
            _prepare(options, fields)
        return _train_in_step(options.out, fields, settings, dense, how or "stepwise", rank)


def _train_in_step(out: Path, fields: dict, settings: dict, dense: dict | None, how: str, rank: int) -> int:
    """What every process of a run does once the data is there."""
    import torch
    import torch.distributed as dist

    from .model import MoR, MoRConfig
    from .train import Tokens, TrainConfig, train

    if dist.is_initialized():
        dist.barrier()
    tokens = Tokens(out / "data")
    config = MoRConfig(**{"vocab_size": tokens.vocab_size, **fields})
    settings = {"sequence_length": min(512, config.max_position_embeddings), **settings}
    torch.manual_seed(settings.get("seed", 0))
    model = MoR.from_dense(dense, config, how) if dense else MoR(config)
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        layers = f"{config.num_hidden_layers} layers unrolled, {config.num_unique_layers} of them unique"
        print(f"{parameters / 1e6:.2f} M parameters, {layers}, {len(tokens):,} tokens", flush=True)
    trainer = train(model, TrainConfig(data=str(out / "data"), out=str(out), **settings))
    if not trainer.interrupted:
        trainer.save_model(out / "model")
    if rank == 0 and trainer.interrupted:
        print(f"stopped at step {trainer.step}; the same command goes on from there")
    elif rank == 0:
        shutil.copy(tokens.tokenizer_file, out / "model" / "tokenizer.json")
        _summarise(trainer)
    return 130 if trainer.interrupted else 0


def _summarise(trainer) -> None:
    metrics = [json.loads(line) for line in trainer.metrics.read_text().splitlines()]
    facts = []
    for name, fact in (
        ("lm", "training loss {:.3f} nats a token"),
        ("validation_loss", "held-out loss {:.3f} (causal routing, as in decoding)"),
    ):
        values = [line[name] for line in metrics if name in line]
        facts += [fact.format(values[-1])] if values else []
    print(f"{', '.join(facts)}; unigram entropy {trainer.unigram_entropy:.3f}")
    print(f"model in {trainer.out / 'model'}, curves in {trainer.out / 'curves.png'}")


def _prepare(options, fields: dict) -> None:
    """The run's token shards, from an earlier run of the same source or made now."""
    from .model import MoRConfig
    from .train import Tokens, load_tokenizer, prepare
    from .train.data import documents

    out, data, source = options.out, options.out / "data", options.source or ["python-docs"]
    if options.fresh or not (data / "meta.json").exists():
        if next(iter(documents(source)), None) is None:
            raise ValueError(f"--source: expected text, found none in {', '.join(source)}")
        if options.tokenizer:
            load_tokenizer(options.tokenizer)
    if options.fresh:
        for path in [path for pattern in RUN_FILES for path in out.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for folder in ("data", "checkpoints", "model"):
            with contextlib.suppress(OSError):  # it wasn't there, or holds somebody's files
                (out / folder).rmdir()
    if not (data / "meta.json").exists():
        print(f"preparing {', '.join(source)}", flush=True)
        vocabulary = fields.get("vocab_size", MoRConfig.vocab_size if options.preset else 8192)
        prepare(source, data, tokenizer=options.tokenizer, vocab_size=vocabulary, max_tokens=options.max_tokens)
        return
    Tokens(data)  # says what is wrong with them
    found = json.loads((data / "meta.json").read_text())["source"]
    if options.source and found != str(source):
        raise ValueError(f"--source: expected {found}, which {data} was made of (--fresh starts anew), got {source}")
    if (
        options.tokenizer
        and load_tokenizer(options.tokenizer).to_str() != load_tokenizer(data / "tokenizer.json").to_str()
    ):
        raise ValueError(f"--tokenizer: expected the one in {data} (--fresh starts anew), got {options.tokenizer}")


def _device(name: str) -> str:
    """The device that ``name`` stands for, or a ValueError if it isn't there."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected auto, cpu or a device of this machine, got {name!r}: {reason}") from None
    return name


def _load(options):
    """The model of a run's or a model's folder, in evaluation mode, and its tokenizer."""
    from .model import MoR
    from .train import latest, load_tokenizer

    folder, device = options.model, _device(options.device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the folder of a run or of a model, found none")
    checkpoint = latest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    places = [folder, folder / "model", *([checkpoint] if checkpoint else [])]
    weights = next((place for place in places if (place / "config.json").exists()), None)
    if weights is None:
        raise FileNotFoundError(f"{folder}: expected config.json, model/config.json or a whole checkpoint, found none")
    beside = [weights / "tokenizer.json", *(p / "data" / "tokenizer.json" for p in (folder, weights.parent.parent))]
    tokenizer = load_tokenizer(next((path for path in beside if path.exists()), beside[0]))
    model = MoR.from_pretrained(weights).to(device).eval()
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise ValueError(
            f"{weights}: expected a vocabulary of at least {tokenizer.get_vocab_size()}, which its "
            f"tokenizer has, got {model.config.vocab_size}"
        )
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
            depths = []
            for event in engine.stream(prompt, params):
                if not depths:  # the prompt has been accepted
                    print(("\n\n" if i else "") + prompt, end="")
                depths.append(event.depth)
                text = show.ansi(event.text, event.depth, recursions) if options.depth and color else event.text
                print(text, end="", flush=True)
            print()
            if options.depth:
                print(f"\n{show.legend(depths, recursions, color)}")


class _Whole:
    """A tokenizer that shows special tokens as well."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _depth(options) -> None:
    import torch

    from . import show
    from .decode.text import TextStream

    if options.file and options.text is not None:
        raise ValueError("text: expected none beside --file, got both")
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
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError("text: expected at least one token, got none")
    limit = model.config.max_position_embeddings
    if len(ids) > limit:
        print(f"showing the first {limit} of {len(ids)} tokens, as far as the model looks", file=sys.stderr)
    ids = ids[:limit]
    with torch.inference_mode():
        depths = model(torch.tensor([ids], device=model.embed_tokens.weight.device)).depths[0].tolist()
    stream = TextStream(_Whole(tokenizer))
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
