"""What the ways to the engine cost: its own `generate`, transformers' `generate()`, the server, the server streaming.

    python bench/serve.py [--size 360M] [--clients 64] [--requests 256] [--tokens 128] [--out DIR]

All serve the same requests to the same MoR-4 with random weights, sampled, so many at once as there are clients; the
clients of the server are plain sockets, in a process of their own. With a batch-invariant engine each text is compared
with the engine's; otherwise 16 bits let them differ. Rates are medians of five runs, after one that compiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.harness import (
    ROOT,
    command_line,
    environment,
    lacks_gpu,
    new_figure,
    paper_config,
    require,
    result_path,
    save_bars,
    variant_of,
    write,
)
from mor_kernels.decode import Engine, SamplingParams
from mor_kernels.model import MoR

PROMPT = list(range(100, 120))
RUNS = 5
DRAWING = {"temperature": 0.8, "top_k": 50}


def tokenizer_of(vocabulary: int) -> Tokenizer:
    """A word for each token."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[int]:
    """A server of the engine in a thread, as the command has it; its port."""
    import uvicorn

    from mor_kernels.server import bind, create_app

    bound = bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(engine, model_name="model"), log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    bound.listen(config.backlog)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        require(thread.is_alive(), "the server has not started")
        time.sleep(0.05)
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


async def client(port: int, bodies: list[bytes], streams: bool) -> list[bytes]:
    """One connection that sends its requests one after another; their answers."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: model\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    for body in bodies:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).lower()
        require(b" 200 " in said[:20], said.decode())
        answer = b""
        if not streams:
            answer = await reader.readexactly(int(said.split(b"content-length:")[1].split()[0]))
        while streams and not answer.endswith(b"0\r\n\r\n"):  # the end of a chunked body
            require(more := await reader.read(1 << 16), "the stream has no end")
            answer += more
        answers.append(answer)
    writer.close()
    return answers


def text_of(answer: bytes, streams: bool) -> str:
    if not streams:
        return json.loads(answer)["choices"][0]["text"]
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def clients(port: int, number: int, requests: int, tokens: int, streams: bool) -> None:
    """The clients' process: prints the seconds that all requests took, and their texts in the order of their seeds."""
    common = {"model": "model", "prompt": PROMPT, "max_tokens": tokens, "stream": streams, **DRAWING}
    bodies = [json.dumps({**common, "seed": seed}).encode() for seed in range(requests)]
    each = requests // number

    async def all_at_once() -> list[bytes]:
        found = await asyncio.gather(*(client(port, bodies[i : i + each], streams) for i in range(0, requests, each)))
        return [answer for answers in found for answer in answers]

    start = time.perf_counter()
    answers = asyncio.run(all_at_once())
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "texts": [text_of(answer, streams) for answer in answers]}))


def by_clients(port: int, options: argparse.Namespace, streams: bool) -> tuple[float, list[str]]:
    numbers = [str(n) for n in (port, options.clients, options.requests, options.tokens, int(streams))]
    done = subprocess.run([sys.executable, __file__, "--client", *numbers], cwd=ROOT, capture_output=True, text=True)
    require(done.returncode == 0, done.stderr[-2000:])
    found = json.loads(done.stdout)
    return found["seconds"], found["texts"]


def timed(run: Callable[[], list[str]]) -> tuple[float, list[str]]:
    start = time.perf_counter()
    texts = run()
    return time.perf_counter() - start, texts


def ways(model: MoR, options: argparse.Namespace, invariant: bool) -> Iterator[tuple[str, Callable]]:
    """Name of each way, and what serves all requests once and returns seconds and texts."""
    tokenizer = tokenizer_of(model.config.vocab_size)
    params = [SamplingParams(options.tokens, seed=seed, **DRAWING) for seed in range(options.requests)]

    def new() -> Engine:
        return Engine(model, max_sequences=options.clients, tokenizer=tokenizer, batch_invariant=invariant)

    engine = new()
    yield "engine", lambda: timed(lambda: [c.text for c in engine.generate([PROMPT] * options.requests, params)])
    if not invariant:  # transformers' rows have seeds of their own
        from mor_kernels.hf import MoRConfig as HFConfig
        from mor_kernels.hf import MoRForCausalLM

        with torch.device("meta"):
            wrapped = MoRForCausalLM(HFConfig.of(model.config))
        wrapped.model, wrapped.engine_options = model, {"max_sequences": options.clients}
        rows = torch.tensor([PROMPT] * options.requests, device=model.embed_tokens.weight.device)

        def generate() -> list[str]:
            found = wrapped.generate(rows, max_new_tokens=options.tokens, do_sample=True, **DRAWING)
            return [tokenizer.decode(row) for row in found[:, len(PROMPT) :].tolist()]

        yield "transformers' generate()", lambda: timed(generate)
    with serving(new()) as port:
        for streams in (False, True):
            yield "server" + ", streaming" * streams, lambda: by_clients(port, options, streams)  # noqa: B023


def measure(model: MoR, options: argparse.Namespace, invariant: bool) -> list[dict]:
    rows, wanted = [], None
    for name, run in ways(model, options, invariant):
        row = {"case": "batch invariant" if invariant else "bf16", "way": name, "failed": None}
        try:
            run()  # compiles, and captures graphs
            found = [run() for _ in range(RUNS)]
            for _, texts in found:
                require(len(texts) == options.requests, f"{len(texts)} texts of {options.requests} requests")
                require(all(len(text.split()) == options.tokens for text in texts), "texts of other lengths")
                wanted = wanted or texts  # the engine's come first
                others = sum(text != want for text, want in zip(texts, wanted))
                require(not invariant or not others, f"{others} texts aren't the engine's")
            rates = [options.requests * options.tokens / seconds for seconds, _ in found]
            row |= {"tokens_per_second": statistics.median(rates), "least": min(rates), "most": max(rates)}
        except AssertionError as error:
            row["failed"] = str(error)
        rows.append(row)
        print(f"{row['case']:16} {name:26} {row['failed'] or format(row['tokens_per_second'], '9,.0f')}", flush=True)
    return rows


def chart(result: dict, path: Path) -> None:
    """Bars of tokens a second, by engine and way."""
    rows = [row for row in result["rows"] if not row["failed"]]
    figure = new_figure(9, 1.2 + 0.3 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        speed = row["tokens_per_second"]
        axes.barh(y, speed, height=0.75, color="silver" if row["way"] == "engine" else "#56b4e9")
        axes.text(speed, y, f"{speed:,.0f} ", va="center", ha="right", fontsize=8)
    save_bars(figure, [f"{row['case']}: {row['way']}" for row in rows], "tokens a second", result, path)


def main(argv: list[str] | None = None) -> int:
    parser = command_line("serve", __doc__)
    parser.add_argument("--size", default="360M", help="of the model, a name of the paper's")
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--client", type=int, nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.client:
        *numbers, streams = options.client
        clients(*numbers, bool(streams))
        return 0
    if options.clients < 1 or options.requests < options.clients or options.requests % options.clients:
        parser.error(f"--requests: expected a multiple of --clients {options.clients}, got {options.requests}")
    if lacks_gpu():
        return 2
    config = paper_config(options.size, num_recursions=4, router="expert_choice", alpha=1.0)
    torch.manual_seed(0)
    model = MoR(config).to("cuda", torch.bfloat16).eval()
    result = {"benchmark": "serve", "variant": variant_of(parser, options, ["size", "clients", "requests", "tokens"]),
              "environment": environment(options.commit), "complete": False, "rows": []}  # fmt: skip
    path = result_path(options.out, result, False)
    for invariant in (False, True):
        result["rows"] += measure(model, options, invariant)
        write(result, path)
    result["complete"] = True
    write(result, path)
    chart(result, path.with_suffix(".png"))
    print(f"written to {path}")
    return int(any(row["failed"] for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
