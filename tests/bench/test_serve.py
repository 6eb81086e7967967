"""The benchmark of ways to the engine, on a tiny model without a GPU; its clients are in this process."""

from __future__ import annotations

import contextlib
import io
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from bench import report, serve
from mor_kernels.model import MoR, MoRConfig

OPTIONS = SimpleNamespace(clients=2, requests=4, tokens=3)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MoRConfig(vocab_size=130, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=8, max_position_embeddings=32, num_recursions=4, alpha=1.0,
                       initializer_range=0.4, router="expert_choice")  # fmt: skip
    return MoR(config).eval()


def in_this_process(arguments, **_):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = serve.main(arguments[2:])
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr="")


def test_all_ways_serve_the_same_requests(model, monkeypatch):
    monkeypatch.setattr(serve, "RUNS", 1)
    monkeypatch.setattr(serve.subprocess, "run", in_this_process)
    rows = serve.measure(model, OPTIONS, invariant=False)
    assert [row["way"] for row in rows] == ["engine", "transformers' generate()", "server", "server, streaming"]
    assert not any(row["failed"] for row in rows) and all(row["tokens_per_second"] > 0 for row in rows)
    result = {"rows": rows, "environment": {"card": "A Card", "torch": "2.11", "triton": "3.6"}}
    lines = report.serve_table(result)
    assert len(lines) == 6 and lines[2].endswith("| 100 |")


@pytest.mark.parametrize(
    ("texts", "invariant", "message"),
    [
        (["t1 t2 t3"] * 3, False, "3 texts of 4 requests"),
        (["t1 t2 t3"] * 3 + ["t1 t2"], False, "texts of other lengths"),
        (["t1 t2 t3"] * 3 + ["t1 t2 t4"], True, "1 texts aren't the engine's"),
    ],
)
def test_texts_that_are_wrong_fail(model, monkeypatch, texts, invariant, message):
    right = ["t1 t2 t3"] * 4
    monkeypatch.setattr(serve, "ways", lambda *_: [("engine", lambda: (1.0, right)), ("server", lambda: (1.0, texts))])
    engine, server = serve.measure(model, OPTIONS, invariant)
    assert engine["failed"] is None
    assert server["failed"] == message and "tokens_per_second" not in server


def test_a_text_belongs_to_its_seed(model, monkeypatch):
    monkeypatch.setattr(serve.subprocess, "run", in_this_process)
    texts = {way: run()[1] for way, run in serve.ways(model, OPTIONS, invariant=False)}
    assert len(set(texts["engine"])) > 1
    assert texts["engine"] == texts["server"] == texts["server, streaming"]  # in fp32, on a CPU


def test_a_share_is_of_the_same_engine():
    measured = [("bf16", "engine", 200), ("bf16", "server", 150), ("other", "engine", 100), ("other", "server", 90)]
    rows = [{"case": c, "way": way, "failed": None, "tokens_per_second": speed} for c, way, speed in measured]
    rows.append({"case": "other", "way": "server, streaming", "failed": "no answer"})
    assert [line.split(" | ")[-1] for line in report.serve_table({"rows": rows})[2:]] == [
        "100 |", "75 |", "100 |", "90 |", "- |",
    ]  # fmt: skip


def test_streams_and_bodies_are_read():
    part = json.dumps({"choices": [{"text": "t1 "}]})
    stream = f"1a\r\ndata: {part}\n\n\r\n1a\r\ndata: {part}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n".encode()
    assert serve.text_of(stream, True) == "t1 t1 " and serve.text_of(part.encode(), False) == "t1 "
