"""The command ``mor-kernels``: doctor, train, eval, generate, depth, scores, serve."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

# A tiny model that learns the language reference of Python in about two minutes on two cores.
DEMO_MODEL = {
    "vocab_size": 1024, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "num_recursions": 3,
    "router": "expert_choice", "cap_warmup_steps": 40,
}  # fmt: skip
DEMO_TRAIN = {
    "steps": 200, "batch_size": 16, "sequence_length": 128, "learning_rate": 4e-3, "eval_every": 100,
    "checkpoint_every": 100, "validation": 0.03,
}  # fmt: skip
# What a --config file may say. "processes" is what run.json says about torchrun, and is compared with it.
CONFIG_KEYS = {"preset": str, "source": list, "tokenizer": str, "max_tokens": int, "init": str, "model": dict,
               "train": dict, "processes": int}  # fmt: skip
# All that a run writes; --fresh removes nothing else.
RUN_FILES = (
    "data/meta.json", "data/tokens-*.npy", "data/tokenizer.json", "data/.tmp-*", "checkpoints/step-*",
    "checkpoints/.tmp-*", "model/config.json", "model/model.safetensors", "model/modeling_mor.py",
    "model/tokenizer.json", "model/tokenizer_config.json", "model/generation_config.json", "metrics.jsonl",
    "curves.png", "run.json",
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
    train.format_help = lambda: usage() + _settings()  # type: ignore[method-assign]  # only when asked for, since it imports PyTorch
    add = train.add_argument
    add("out", type=Path, help="folder of the run: data, checkpoints, metrics, curves.png and the model")
    add("--config", type=Path, metavar="FILE.json", help="the options below from a file, such as an earlier run's "
        "run.json; those of the command line come first")  # fmt: skip
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
    add("--init", metavar="FOLDER[:HOW]", help="start from a dense Llama checkpoint, a Hugging Face folder, whose "
        "sizes and tokenizer are taken; HOW is stepwise (default), average, lower, upper or random")  # fmt: skip
    add("--fresh", action="store_true", help="remove what an earlier run left in the folder, and start anew")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="the loss of a text, and accuracies on tasks")
    _model_arguments(evaluate)
    add = evaluate.add_argument
    add("--text", action="append", default=[], metavar="TEXT", help="file or folder of text, as --source of train; "
        "each document is read alone; may be repeated")  # fmt: skip
    add("--task", action="append", default=[], type=Path, metavar="FILE", help="a .jsonl or .jsonl.gz file with lines "
        '{"choices": [[context, continuation], ...], "gold": index}; may be repeated')  # fmt: skip
    add("--mode", choices=["threshold", "topk"], default="threshold",
        help="how expert-choice routes: as decoding does, or as in training, which looks at later tokens")  # fmt: skip
    add("--limit", type=int, help="read no more than this many documents of a text, and examples of a task")
    add("--window", type=int, help="tokens of text read at a time (default: as many as the model can)")
    add("--stride", type=int, help="tokens by which the window moves on (default: the window, so that blocks are read)")
    add("--batch-tokens", type=int, help="tokens of a batch, padding included (default: 16384 on CUDA, else 2048)")
    add("--precision", choices=["auto", "float32", "bfloat16"], default="auto",
        help="auto: bfloat16 on CUDA, as in training, else that of the weights")  # fmt: skip
    add("--json", type=Path, metavar="OUT", help="also write the results to this file")
    evaluate.set_defaults(run=_eval)

    generate = commands.add_parser("generate", help="continue a text")
    _model_arguments(generate)
    generate.add_argument(
        "--prompt", action="append", help="may be repeated; default: from the beginning of a document"
    )
    add = generate.add_argument
    add("--max-tokens", type=int, default=128, help="most tokens to generate (default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: %(default)s)")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all (default: %(default)s)")
    add("--top-p", type=float, default=0.95, help="keep the likeliest tokens, until they have this share of the "
        "probability (default: %(default)s)")  # fmt: skip
    add("--min-p", type=float, default=0.0, help="keep tokens at least this times as likely as the likeliest (default: "
        "%(default)s)")  # fmt: skip
    generate.add_argument("--seed", type=int, help="the same seed gives the same text")
    generate.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    generate.add_argument(
        "--depth", action="store_true", help="colour each token by the recursions spent on choosing it"
    )
    generate.set_defaults(run=_generate)

    depth = commands.add_parser("depth", help="show how many recursions each token of a text takes")
    _text_arguments(depth)
    depth.add_argument("--html", type=Path, help="also write a page of HTML")
    depth.add_argument("--png", type=Path, help="also draw how many tokens have which depth")
    depth.set_defaults(run=_depth)

    scores = commands.add_parser("scores", help="show router scores of the tokens kept and dropped at each recursion")
    _text_arguments(scores)
    scores.add_argument("--mode", choices=["threshold", "topk"], default="threshold",
        help="how expert-choice routes: as decoding does, or as in training, which looks at later tokens")  # fmt: skip
    scores.add_argument("--png", type=Path, help="also draw histograms")
    scores.set_defaults(run=_scores)

    serve = commands.add_parser(
        "serve",
        help="serve completions to clients of OpenAI's API",
        description="Serve /v1/completions until SIGTERM or Ctrl-C; docs/server.md describes it.",
    )
    _model_arguments(serve)
    add = serve.add_argument
    add("--name", help="what clients call the model (default: the folder's name)")
    add("--host", default="127.0.0.1", help="address to listen at; others than loopback open the server to "
        "all (default: %(default)s)")  # fmt: skip
    add("--port", type=int, default=8000, help="0 takes any that is free, and tells which (default: %(default)s)")
    add("--api-key", default=os.environ.get("MOR_API_KEY") or None, metavar="KEY", help="clients must send it "
        "(default: the environment variable MOR_API_KEY, which other users of the machine don't see)")  # fmt: skip
    add("--max-sequences", type=int, default=32, help="requests that run at once (default: %(default)s)")
    add("--max-waiting", type=int, default=1024, help="requests that may wait; others are refused (default: "
        "%(default)s)")  # fmt: skip
    add("--cache-bytes", type=int, help="size of the cache (default: enough for all sequences at full length)")
    add("--precision", choices=["auto", "float32", "bfloat16"], default="auto",
        help="auto: bfloat16 on CUDA, else that of the weights")  # fmt: skip
    add("--batch-invariant", action="store_true", help="on CUDA: a request gets the same bits whatever runs beside it")
    serve.set_defaults(run=_serve)
    for command in (generate, depth):
        command.add_argument("--color", choices=["auto", "always", "never"], default="auto",
            help="auto: on a terminal, unless NO_COLOR is set")  # fmt: skip
    return parser


def _settings() -> str:
    from .model import MoRConfig
    from .model.config import CHOICES
    from .train import TrainConfig

    lines = [""]
    for option, config in (("--model", MoRConfig), ("--train", TrainConfig)):
        lines.append(f"{option} takes, with these defaults:")
        for field in dataclasses.fields(config):
            if field.default is not dataclasses.MISSING:
                among = f"  (one of {', '.join(CHOICES[field.name])})" if field.name in CHOICES else ""
                lines.append(f"  {field.name}={json.dumps(field.default)}{among}")
    return "\n".join(lines) + "\ndocs/api.md tells what they mean.\n"


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, help="folder of a run, of a model or of a Hugging Face Llama, with its tokenizer.json"
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, ...")


def _text_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    parser.add_argument("text", nargs="?", help="the text; default: what comes in on standard input")
    parser.add_argument("--file", type=Path, help="a file with the text")


def _assignments(option: str, texts: list[str], config: type) -> dict:
    """FIELD=VALUE texts as a dict; a value is a number, true, false, null, a list in brackets, or else a string."""
    known = _fields(config)
    chosen = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{option}: expected FIELD=VALUE with a field of {', '.join(sorted(known))}, got {text!r}")
        chosen[name] = _value(value)
    return chosen


def _fields(config: type) -> set[str]:
    """Names of the fields that a user sets: those with a default."""
    return {field.name for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING}


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
    import torch.distributed as dist

    from .model import MoRConfig
    from .model.config import SIZES
    from .model.convert import dense_config, read_dense
    from .train import TrainConfig
    from .train.loop import processes

    file = _read_config(options.config) if options.config else {}
    options.preset = options.preset or file.get("preset")
    here = Path.cwd()
    options.source = [_located(here, source) for source in options.source or file.get("source", [])]
    options.tokenizer = options.tokenizer or (Path(file["tokenizer"]) if "tokenizer" in file else None)
    options.max_tokens = options.max_tokens or file.get("max_tokens")
    demo = options.preset == "demo"
    fields = DEMO_MODEL if demo else SIZES.get(options.preset, {})
    fields = {**fields, **file.get("model", {}), **_assignments("--model", options.model, MoRConfig)}
    settings = {**(DEMO_TRAIN if demo else {}), **file.get("train", {})}
    settings |= _assignments("--train", options.train, TrainConfig)
    # What is wrong is said before anything is removed or written.
    init, how = _init(options.init or "", file.get("init", ""))
    dense = read_dense(init) if init else None
    if dense:
        fields = dense_config(init, **fields).to_dict()
        if options.tokenizer is None:
            options.tokenizer = Path(init) / "tokenizer.json"
            if not options.tokenizer.exists():
                raise ValueError(f"--tokenizer: expected that of {init}, which has no tokenizer.json, got none")
    MoRConfig(**fields), TrainConfig(data="", out="", **settings)
    device = settings.get("device", "auto")
    _device(device)

    with processes(device) as rank:
        count = dist.get_world_size() if dist.is_initialized() else 1
        if file.get("processes", count) != count:
            raise ValueError(
                f"processes: expected torchrun with {file['processes']}, as {options.config} says, got {count}; to "
                "train with another number, take it out of the file"
            )
        if rank == 0:
            _prepare(options, fields)
        record: dict[str, Any] = {"processes": count}
        if dense:
            record["init"] = f"{init}:{how}"
        if options.tokenizer:
            record["tokenizer"] = os.path.abspath(options.tokenizer)
        return _train_in_step(options.out, fields, settings, dense, how, rank, record)


def _read_config(path: Path) -> dict:
    """What a --config file says, its paths made absolute: a relative one starts at the file's folder."""
    from .files import read_json
    from .model import MoRConfig
    from .model.config import SIZES
    from .train import TrainConfig

    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object, got: {error}") from None
    if isinstance(found.get("source"), str):
        found["source"] = [found["source"]]
    sections = (("", found, CONFIG_KEYS), ("model", found.get("model"), _fields(MoRConfig)),
                ("train", found.get("train"), _fields(TrainConfig)))  # fmt: skip
    for section, values, known in sections:
        where = f"{path}: {section}" if section else f"{path}"
        for key in values if isinstance(values, dict) else ():
            if key not in known:
                raise ValueError(f"{where}: expected keys among {', '.join(sorted(known))}, got {key!r}")
    for key, value in list(found.items()):
        kind = CONFIG_KEYS[key]
        whole = kind is not list or isinstance(value, list) and all(isinstance(part, str) for part in value)
        if not (value is None or isinstance(value, kind) and not isinstance(value, bool) and whole):
            raise ValueError(f"{path}: {key}: expected {kind.__name__}{' of str' * (kind is list)}, got {value!r}")
        if value is None:
            del found[key]
    presets = ["demo", *SIZES]
    if found.get("preset", "demo") not in presets:
        raise ValueError(f"{path}: preset: expected one of {', '.join(presets)}, got {found['preset']!r}")
    if "source" in found:
        found["source"] = [_located(path.parent, source) for source in found["source"]]
    if "tokenizer" in found:
        found["tokenizer"] = os.path.abspath(path.parent / found["tokenizer"])
    if folder := found.get("init", "").partition(":")[0]:
        found["init"] = os.path.abspath(path.parent / folder) + found["init"][len(folder) :]
    return found


def _located(folder: Path, source: str) -> str:
    """A source with its path, if it is one, made absolute."""
    return source if source == "python-docs" or source.startswith("hf:") else os.path.abspath(folder / source)


def _init(*texts: str) -> tuple[str, str]:
    """Folder and how, each of the first FOLDER[:HOW] that has it."""
    parts = [text.partition(":") for text in texts]
    folder = next((folder for folder, _, _ in parts if folder), "")
    how = next((how for _, _, how in parts if how), "")
    if how and not folder:
        raise ValueError(f"--init: expected FOLDER:{how}, got no folder of a dense checkpoint")
    return os.path.abspath(folder) if folder else "", how or "stepwise"


def _train_in_step(
    out: Path, fields: dict, settings: dict, dense: dict | None, how: str, rank: int, record: dict
) -> int:
    """What every process of a run does once the data is there; ``record`` goes to run.json, beside the settings."""
    import torch
    import torch.distributed as dist

    from .model import MoR, MoRConfig
    from .model.hugging_face import write_tokenizer
    from .train import Tokens, TrainConfig, Trainer, load_tokenizer
    from .train.data import separator_id

    if dist.is_initialized():
        dist.barrier()
    tokens = Tokens(out / "data")
    config = MoRConfig(**{"vocab_size": tokens.vocab_size, **fields})
    settings = {"sequence_length": min(512, config.max_position_embeddings), **settings}
    chosen = TrainConfig(data=str(out / "data"), out=str(out), **settings)
    torch.manual_seed(chosen.seed)
    model = MoR.from_dense(dense, config, how) if dense else MoR(config)
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        layers = f"{config.num_hidden_layers} layers unrolled, {config.num_unique_layers} of them unique"
        print(f"{parameters / 1e6:.2f} M parameters, {layers}, {len(tokens):,} tokens", flush=True)
    trainer = Trainer(model, chosen)
    if rank == 0:  # once the trainer has found that these settings belong to what is in the folder
        _record(out, config, chosen, record)
    trainer.run()
    if not trainer.interrupted:
        trainer.save_model(out / "model")
    if rank == 0 and trainer.interrupted:
        print(f"stopped at step {trainer.step}; the same command goes on from there")
    elif rank == 0:
        tokenizer = load_tokenizer(tokens.tokenizer_file)
        separator = separator_id(tokenizer)
        text = tokenizer.id_to_token(separator)
        assert text is not None  # as the id is
        write_tokenizer(out / "model", tokens.tokenizer_file, text, separator,
                        config.max_position_embeddings)  # fmt: skip
        _summarise(trainer)
    return 130 if trainer.interrupted else 0


def _record(out: Path, config, settings, record: dict) -> None:
    """Write run.json, which --config reads."""
    from .files import read_json, write_atomic

    meta = read_json(out / "data" / "meta.json")
    source = meta.get("source", [])
    source = source if isinstance(source, list) else [source]
    given = meta.get("given_tokenizer_sha256")
    train = dataclasses.asdict(settings)
    for place in ("data", "out"):
        del train[place]
    found = {"source": [str(part) for part in source], "max_tokens": meta.get("max_tokens"),
             "tokenizer": os.path.abspath(out / "data" / "tokenizer.json") if given else None, **record,
             "model": config.to_dict(), "train": train}  # fmt: skip
    write_atomic(out / "run.json", lambda file: file.write((json.dumps(found, indent=1) + "\n").encode()))


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
    from .files import read_json
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
        if data.is_symlink():  # to another run's tokens, which are not this run's to remove
            data.unlink()
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
    found = read_json(data / "meta.json").get("source")
    if options.source and str(found) != str(source):  # which an earlier version wrote as text
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
    from .model import MoR, MoRConfig
    from .model.authors import is_authors
    from .model.convert import is_foreign
    from .train import latest, load_tokenizer
    from .train.data import needed_vocab_size

    folder, device = options.model, _device(options.device)
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


def _precision(name: str, weight) -> str:
    """The dtype that ``name`` stands for, of a model with this weight."""
    if name != "auto":
        return name
    return "bfloat16" if weight.device.type == "cuda" else str(weight.dtype).removeprefix("torch.")


def _eval(options) -> None:
    import torch

    from . import evaluate
    from .files import write_atomic
    from .train.data import documents

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
        tasks[name] = evaluate.read_task(path, options.limit)
    model, tokenizer = _load(options)
    weight = model.embed_tokens.weight
    precision = _precision(options.precision, weight)
    model = model.to(getattr(torch, precision))
    common = {"mode": options.mode, "batch_tokens": options.batch_tokens}
    # a parameter shared by layers is counted once
    parameters = sum(p.numel() for p in model.parameters())
    result = {"model": os.fspath(options.model), "parameters": parameters, "mode": options.mode, "limit": options.limit,
              "precision": precision, "text": {}, "tasks": {}}  # fmt: skip
    for source in options.text:
        found = evaluate.text_loss(model, tokenizer, documents(source), window=options.window, stride=options.stride,
                                   limit=options.limit, progress=Path(source).name, **common)  # fmt: skip
        result["text"][source] = found
        how = "blocks" if found["stride"] == found["window"] else f"a window moving by {found['stride']:,}"
        print(f"{Path(source).name}: {found['nats_per_token']:.4f} nats a token, perplexity {found['perplexity']:.2f}, "
              f"{found['bits_per_byte']:.4f} bits a byte, mean depth {found['depth']:.2f} ({found['tokens']:,} tokens, "
              f"{found['documents']:,} documents, {how} of {found['window']:,})", flush=True)  # fmt: skip
    for name, examples in tasks.items():
        found = result["tasks"][name] = evaluate.task_accuracy(model, tokenizer, examples, progress=name, **common)
        facts = [f"{k} {found[k]:.4f} ± {found[f'{k}_stderr']:.4f}" for k in ("acc", "acc_norm") if k in found]
        facts += [f"perplexity {found['perplexity']:.2f}"] if "perplexity" in found else []
        print(f"{name}: {', '.join(facts)} ({found['examples']:,} examples)", flush=True)
    if options.json:
        write_atomic(options.json, lambda file: file.write((json.dumps(result, indent=1) + "\n").encode()))


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


def _serve(options) -> None:
    import torch

    from . import server
    from .decode import Engine
    from .train.data import separator_id

    bound = server.bind(options.host, options.port)  # before the model is loaded, which may take a while
    model, tokenizer = _load(options)
    model = model.to(getattr(torch, _precision(options.precision, model.embed_tokens.weight)))
    engine = Engine(model, max_sequences=options.max_sequences, max_waiting=options.max_waiting, tokenizer=tokenizer,
                    cache_bytes=options.cache_bytes, eos_token_id=separator_id(tokenizer),
                    batch_invariant=options.batch_invariant)  # fmt: skip
    name = options.name or options.model.resolve().name
    app = server.create_app(engine, model_name=name, api_key=options.api_key)
    server.serve(app, bound, model_name=name, api_key=options.api_key is not None)


class _WithSpecialTokens:
    """A tokenizer that decodes special tokens as well, so that a text shows all of its tokens."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _read(options):
    """The model, its tokenizer and the tokens of the text that the command was given."""
    from . import show
    from .train.data import encode

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


def _routed(model, ids: list[int], mode: str):
    """Depths (n,), and router scores (n, Nr) or None, of tokens that are read in blocks of what the model takes."""
    import torch

    from . import show

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


def _depth(options) -> None:
    from . import show
    from .decode.text import TextStream

    model, tokenizer, ids = _read(options)
    depths, scores = _routed(model, ids, "threshold")
    depths, recursions = depths.tolist(), model.config.num_recursions
    said = [""] * len(ids) if scores is None else [show.describe(row, model.config) for row in scores.tolist()]
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


def _scores(options) -> None:
    from . import show

    model, _, ids = _read(options)
    config = model.config
    if config.router == "none":
        raise ValueError(f"{options.model}: expected a model with routers, got one of router='none'")
    depths, scores = _routed(model, ids, options.mode)
    found = show.split_scores(scores, depths, config)
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


def _name(options) -> str:
    """A run or model by its folder."""
    return os.path.basename(os.path.abspath(options.model))


if __name__ == "__main__":
    sys.exit(main())
