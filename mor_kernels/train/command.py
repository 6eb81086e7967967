"""The command ``train``: a run's settings, from options and a file; its folder, its data, and the loop over them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..files import TEMPORARY, read_json, write_json
from ..model import MoR, MoRConfig
from ..model.config import CHOICES, SIZES
from ..model.convert import dense_config, read_dense
from ..model.hugging_face import write_tokenizer
from .config import TrainConfig
from .data import Tokens, prepare
from .loop import Trainer, find_device, processes
from .metrics import read_metrics
from .text import documents, load_tokenizer, separator_id

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
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]]  # fields of the model's configuration, and of the training's
PRESETS = {"demo": (DEMO_MODEL, DEMO_TRAIN), **{size: (fields, {}) for size, fields in SIZES.items()}}
DEFAULT_SOURCE = "python-docs"
# What a --config file may say. "processes" is what run.json says about torchrun, and is compared with it.
CONFIG_KEYS = {"preset": str, "source": list, "tokenizer": str, "max_tokens": int, "init": str, "model": dict,
               "train": dict, "processes": int}  # fmt: skip
# All that a run writes; --fresh removes nothing else.
RUN_FILES = (
    "data/meta.json", "data/tokens-*.npy", "data/tokenizer.json", "checkpoints/step-*", "model/config.json",
    "model/model.safetensors", "model/modeling_mor.py", "model/tokenizer.json", "model/tokenizer_config.json",
    "model/generation_config.json", "metrics.jsonl", "curves.png", "run.json",
    *(f"{folder}{TEMPORARY}*" for folder in ("data/", "checkpoints/", "model/", "")),
)  # fmt: skip


@dataclasses.dataclass
class Run:
    """What a run is asked to be."""

    out: Path
    fresh: bool  # what an earlier run left is removed first
    preset: str | None
    source: list[str]  # paths are absolute; none: DEFAULT_SOURCE, or that of the data which is there
    tokenizer: Path | None
    max_tokens: int | None
    fields: dict[str, Any]  # of MoRConfig
    settings: dict[str, Any]  # of TrainConfig
    init: str  # folder of a dense checkpoint, absolute, or ""
    how: str  # the model comes from it
    processes: int | None  # how many there have to be


def train(options: argparse.Namespace) -> int:
    """Train as the options say; returns 130 where that was interrupted, else 0. What is wrong with them is a ValueError
    before anything is removed or written."""
    run = _read_run(options)
    dense = read_dense(run.init) if run.init else None
    if run.init:
        run.fields = dense_config(run.init, **run.fields).to_dict()
        if run.tokenizer is None:
            run.tokenizer = Path(run.init) / "tokenizer.json"
            if not run.tokenizer.exists():
                raise ValueError(f"--tokenizer: expected that of {run.init}, which has no tokenizer.json, got none")
    MoRConfig(**run.fields), TrainConfig(data="", out="", **run.settings)  # for their checks
    device = run.settings.get("device", "auto")
    find_device(device)

    with processes(device) as rank:
        count = dist.get_world_size() if dist.is_initialized() else 1
        if run.processes not in (None, count):
            raise ValueError(
                f"processes: expected torchrun with {run.processes}, as {options.config} says, got {count}; to train "
                "with another number, take it out of the file"
            )
        if rank == 0:
            _prepare(run)
        if dist.is_initialized():
            dist.barrier()
        return _train_prepared(run, dense, rank, count)


def _read_run(options: argparse.Namespace) -> Run:
    """The options, and a --config file where they say nothing."""
    file = read_config(options.config) if options.config else {}
    preset = options.preset or file.get("preset")
    fields, settings = PRESETS[preset] if preset else ({}, {})
    init, how = _first_init(options.init or "", file.get("init", ""))
    here = Path.cwd()
    return Run(
        out=options.out,
        fresh=options.fresh,
        preset=preset,
        source=[_located(here, source) for source in options.source or file.get("source", [])],
        tokenizer=options.tokenizer or (Path(file["tokenizer"]) if "tokenizer" in file else None),
        max_tokens=options.max_tokens or file.get("max_tokens"),
        fields={**fields, **file.get("model", {}), **_assignments("--model", options.model, MoRConfig)},
        settings={**settings, **file.get("train", {}), **_assignments("--train", options.train, TrainConfig)},
        init=init,
        how=how,
        processes=file.get("processes"),
    )


def read_config(path: Path) -> dict[str, Any]:
    """What a --config file says, its paths made absolute: a relative one starts at the file's folder."""
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object, got: {error}") from None
    if isinstance(found.get("source"), str):
        found["source"] = [found["source"]]
    sections = (("", found, CONFIG_KEYS), ("model", found.get("model"), _settable(MoRConfig)),
                ("train", found.get("train"), _settable(TrainConfig)))  # fmt: skip
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
    if found.get("preset", "demo") not in PRESETS:
        raise ValueError(f"{path}: preset: expected one of {', '.join(PRESETS)}, got {found['preset']!r}")
    if "source" in found:
        found["source"] = [_located(path.parent, source) for source in found["source"]]
    if "tokenizer" in found:
        found["tokenizer"] = os.path.abspath(path.parent / found["tokenizer"])
    if folder := found.get("init", "").partition(":")[0]:
        found["init"] = os.path.abspath(path.parent / folder) + found["init"][len(folder) :]
    return found


def _located(folder: Path, source: str) -> str:
    """A source with its path, if it is one, made absolute."""
    return source if source == DEFAULT_SOURCE or source.startswith("hf:") else os.path.abspath(folder / source)


def _first_init(*texts: str) -> tuple[str, str]:
    """Folder and how, each of the first FOLDER[:HOW] that has it."""
    parts = [text.partition(":") for text in texts]
    folder = next((folder for folder, _, _ in parts if folder), "")
    how = next((how for _, _, how in parts if how), "")
    if how and not folder:
        raise ValueError(f"--init: expected FOLDER:{how}, got no folder of a dense checkpoint")
    return os.path.abspath(folder) if folder else "", how or "stepwise"


def _settable(config: type) -> dict[str, Any]:
    """The fields that a user sets, those with a default, and that."""
    return {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}


def _assignments(option: str, texts: list[str], config: type) -> dict[str, Any]:
    """FIELD=VALUE texts as a dict; a value is a number, true, false, null, a list in brackets, or else a string."""
    known = _settable(config)
    chosen = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{option}: expected FIELD=VALUE with a field of {', '.join(sorted(known))}, got {text!r}")
        chosen[name] = _value(value)
    return chosen


def _value(text: str) -> Any:
    for read in (json.loads, float):
        with contextlib.suppress(ValueError):
            value = read(text.lower() if text in ("True", "False") else text)
            return tuple(value) if isinstance(value, list) else value
    return text


def settings_help() -> str:
    """What --model and --train take, with the defaults, as lines for --help."""
    lines = [""]
    for option, config in (("--model", MoRConfig), ("--train", TrainConfig)):
        lines.append(f"{option} takes, with these defaults:")
        for name, default in _settable(config).items():
            among = f"  (one of {', '.join(CHOICES[name])})" if name in CHOICES else ""
            lines.append(f"  {name}={json.dumps(default)}{among}")
    return "\n".join(lines) + "\ndocs/api.md tells what they mean.\n"


def _prepare(run: Run) -> None:
    """The run's token shards, from an earlier run of the same source or made now."""
    data, source = run.out / "data", run.source or [DEFAULT_SOURCE]
    if run.fresh or not (data / "meta.json").exists():
        if next(iter(documents(source)), None) is None:
            raise ValueError(f"--source: expected text, found none in {', '.join(source)}")
        if run.tokenizer:
            load_tokenizer(run.tokenizer)
    if run.fresh:
        _remove(run.out)
    if (data / "meta.json").exists():
        _check_data(run, data)
        return
    print(f"preparing {', '.join(source)}", flush=True)
    vocabulary = run.fields.get("vocab_size", MoRConfig.vocab_size if run.preset else 8192)
    prepare(source, data, tokenizer=run.tokenizer, vocab_size=vocabulary, max_tokens=run.max_tokens)


def _remove(out: Path) -> None:
    """What an earlier run left."""
    data = out / "data"
    if data.is_symlink():  # to another run's tokens, which are not this run's to remove
        data.unlink()
    for path in [path for pattern in RUN_FILES for path in out.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in ("data", "checkpoints", "model"):
        with contextlib.suppress(OSError):  # it wasn't there, or holds somebody's files
            (out / folder).rmdir()


def _check_data(run: Run, data: Path) -> None:
    """A ValueError unless the tokens that are there are those that the run asks for."""
    Tokens(data)  # says what is wrong with them
    found = read_json(data / "meta.json").get("source")
    if run.source and str(found) != str(run.source):  # which an earlier version wrote as text
        made_of = f"{found}, which {data} was made of (--fresh starts anew)"
        raise ValueError(f"--source: expected {made_of}, got {run.source}")
    if run.tokenizer and load_tokenizer(run.tokenizer).to_str() != load_tokenizer(data / "tokenizer.json").to_str():
        raise ValueError(f"--tokenizer: expected the one in {data} (--fresh starts anew), got {run.tokenizer}")


def _record(run: Run, config: MoRConfig, settings: TrainConfig, count: int) -> None:
    """Write run.json, which --config reads."""
    meta = read_json(run.out / "data" / "meta.json")
    source = meta.get("source", [])
    source = source if isinstance(source, list) else [source]
    tokenizer = run.tokenizer
    if tokenizer is None and meta.get("given_tokenizer_sha256"):
        tokenizer = run.out / "data" / "tokenizer.json"
    train = dataclasses.asdict(settings)
    for place in ("data", "out"):
        del train[place]
    found = {"source": [str(part) for part in source], "max_tokens": meta.get("max_tokens"),
             "tokenizer": os.path.abspath(tokenizer) if tokenizer else None, "processes": count}  # fmt: skip
    if run.init:
        found["init"] = f"{run.init}:{run.how}"
    write_json(run.out / "run.json", {**found, "model": config.to_dict(), "train": train})


def _train_prepared(run: Run, dense: dict[str, torch.Tensor] | None, rank: int, count: int) -> int:
    """What every one of ``count`` processes does once the data is there."""
    out = run.out
    tokens = Tokens(out / "data")
    config = MoRConfig(**{"vocab_size": tokens.vocab_size, **run.fields})
    settings = {"sequence_length": min(512, config.max_position_embeddings), **run.settings}
    chosen = TrainConfig(data=str(out / "data"), out=str(out), **settings)
    torch.manual_seed(chosen.seed)
    model = MoR.from_dense(dense, config, run.how) if dense else MoR(config)
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        layers = f"{config.num_hidden_layers} layers unrolled, {config.num_unique_layers} of them unique"
        print(f"{parameters / 1e6:.2f} M parameters, {layers}, {len(tokens):,} tokens", flush=True)
    trainer = Trainer(model, chosen)
    if rank == 0:  # once the trainer has found that these settings belong to what is in the folder
        _record(run, config, chosen, count)
    trainer.run()
    if trainer.interrupted:
        if rank == 0:
            print(f"stopped at step {trainer.step}; the same command goes on from there")
        return 130
    trainer.save_model(out / "model")
    if rank == 0:
        tokenizer = load_tokenizer(tokens.tokenizer_file)
        separator = separator_id(tokenizer)
        text = tokenizer.id_to_token(separator)
        assert text is not None  # as the id is
        write_tokenizer(out / "model", tokens.tokenizer_file, text, separator, config.max_position_embeddings)
        _summarise(trainer)
    return 0


def _summarise(trainer: Trainer) -> None:
    metrics = read_metrics(trainer.metrics)
    facts = []
    for name, fact in (
        ("lm", "training loss {:.3f} nats a token"),
        ("validation_loss", "held-out loss {:.3f} (causal routing, as in decoding)"),
    ):
        values = [line[name] for line in metrics if name in line]
        facts += [fact.format(values[-1])] if values else []
    print(f"{', '.join(facts)}; unigram entropy {trainer.unigram_entropy:.3f}")
    print(f"model in {trainer.out / 'model'}, curves in {trainer.out / 'curves.png'}")
