"""The command ``mor-kernels``: doctor, train, eval, generate, depth, scores, serve. Here is what can be asked for;
:mod:`.train.command` and :mod:`.commands` do it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path


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


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int | None]:
    """A command that is imported when it runs: PyTorch takes seconds, which --help needn't wait for."""

    def run(options: argparse.Namespace) -> int | None:
        return getattr(importlib.import_module(module, __package__), function)(options)

    return run


def _doctor(options: argparse.Namespace) -> None:
    from . import doctor

    doctor.main()


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
    _add_train(train)
    train.set_defaults(run=_later(".train.command", "train"))

    evaluate = commands.add_parser("eval", help="the loss of a text, and accuracies on tasks")
    _add_evaluate(evaluate)
    evaluate.set_defaults(run=_later(".commands", "evaluate"))

    generate = commands.add_parser("generate", help="continue a text")
    _add_generate(generate)
    generate.set_defaults(run=_later(".commands", "generate"))

    depth = commands.add_parser("depth", help="show how many recursions each token of a text takes")
    _add_text(depth)
    _add_color(depth)
    depth.add_argument("--html", type=Path, help="also write a page of HTML")
    depth.add_argument("--png", type=Path, help="also draw how many tokens have which depth")
    depth.set_defaults(run=_later(".commands", "depth"))

    scores = commands.add_parser("scores", help="show router scores of the tokens kept and dropped at each recursion")
    _add_text(scores)
    _add_mode(scores)
    scores.add_argument("--png", type=Path, help="also draw histograms")
    scores.set_defaults(run=_later(".commands", "scores"))

    serve = commands.add_parser(
        "serve",
        help="serve completions to clients of OpenAI's API",
        description="Serve /v1/completions until SIGTERM or Ctrl-C; docs/server.md describes it.",
    )
    _add_serve(serve)
    serve.set_defaults(run=_later(".commands", "serve"))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    def format_help() -> str:  # imports PyTorch, only when asked for
        from .train.command import settings_help

        return usage() + settings_help()

    usage = parser.format_help
    parser.format_help = format_help  # type: ignore[method-assign]
    add = parser.add_argument
    add("out", type=Path, help="folder of the run: data, checkpoints, metrics, curves.png and the model")
    add("--config", type=Path, metavar="FILE.json", help="the options below from a file, such as an earlier run's "
        "run.json; those of the command line come first")  # fmt: skip
    add(
        "--preset",
        choices=["demo", "135M", "360M", "730M", "1.7B"],  # PRESETS, to be had without PyTorch
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


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_mode(parser)
    _add_precision(parser)
    add = parser.add_argument
    add("--text", action="append", default=[], metavar="TEXT", help="file or folder of text, as --source of train; "
        "each document is read alone; may be repeated")  # fmt: skip
    add("--task", action="append", default=[], type=Path, metavar="FILE", help="a .jsonl or .jsonl.gz file with lines "
        '{"choices": [[context, continuation], ...], "gold": index}; may be repeated')  # fmt: skip
    add("--limit", type=int, help="read no more than this many documents of a text, and examples of a task")
    add("--window", type=int, help="tokens of text read at a time (default: as many as the model can)")
    add("--stride", type=int, help="tokens by which the window moves on (default: the window, so that blocks are read)")
    add("--batch-tokens", type=int, help="tokens of a batch, padding included (default: 16384 on CUDA, else 2048)")
    add("--json", type=Path, metavar="OUT", help="also write the results to this file")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_color(parser)
    add = parser.add_argument
    add("--prompt", action="append", help="may be repeated; default: from the beginning of a document")
    add("--max-tokens", type=int, default=128, help="most tokens to generate (default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: %(default)s)")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all (default: %(default)s)")
    add("--top-p", type=float, default=0.95, help="keep the likeliest tokens, until they have this share of the "
        "probability (default: %(default)s)")  # fmt: skip
    add("--min-p", type=float, default=0.0, help="keep tokens at least this times as likely as the likeliest (default: "
        "%(default)s)")  # fmt: skip
    add("--seed", type=int, help="the same seed gives the same text")
    add("--stop", action="append", default=[], help="end before this string; may be repeated")
    add("--depth", action="store_true", help="colour each token by the recursions spent on choosing it")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_precision(parser)
    add = parser.add_argument
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
    add("--batch-invariant", action="store_true", help="on CUDA: a request gets the same bits whatever runs beside it")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, help="folder of a run, of a model or of a Hugging Face Llama, with its tokenizer.json"
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, ...")


def _add_text(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("text", nargs="?", help="the text; default: what comes in on standard input")
    parser.add_argument("--file", type=Path, help="a file with the text")


def _add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=["threshold", "topk"], default="threshold",
        help="how expert-choice routes: as decoding does, or as in training, which looks at later tokens")  # fmt: skip


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto",
        help="auto: bfloat16 on CUDA, as in training, else that of the weights")  # fmt: skip


def _add_color(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto",
        help="auto: on a terminal, unless NO_COLOR is set")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
