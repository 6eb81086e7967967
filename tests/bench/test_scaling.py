"""The benchmark of several GPUs, as far as it goes without them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench import scaling
from bench.harness import Mismatch


def lines(*losses, speed=100.0):
    logged = [{"step": 5 * (i + 1), "lm": loss, "tokens_per_second": speed * (i + 1)} for i, loss in enumerate(losses)]
    return "".join(json.dumps(line) + "\n" for line in [{"step": 0, "parameters": 1}, *logged])


def test_runs_that_did_not_learn_fail(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(3.0, 2.5, 2.0, 1.5))
    assert scaling.speeds(path, 20) == [300, 400]  # without the lines in which it compiled
    with pytest.raises(Mismatch, match="expected 25 steps"):
        scaling.speeds(path, 25)
    for losses in ((1.0, 1.0, 2.0, 3.0), (3.0, float("nan"), 2.0, 1.0)):
        path.write_text(lines(*losses))
        with pytest.raises(Mismatch, match="the loss did not fall"):
            scaling.speeds(path, 20)


def test_cases_and_shares(tmp_path, monkeypatch, capsys):
    started = []

    def run(arguments, **_):
        folder = scaling.Path(arguments[arguments.index("train") + 1])
        gpus = int(arguments[arguments.index("--nproc-per-node") + 1])
        started.append((gpus, next(text for text in arguments if text.startswith("parallel="))))
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(lines(4.0, 3.0, 2.0, 1.0, speed=100.0 * (1 if gpus == 1 else 0.9 * gpus)))
        return SimpleNamespace(returncode=int(started[-1] == (2, "parallel=fsdp")), stderr="out of memory", stdout="")

    monkeypatch.setattr(scaling.subprocess, "run", run)
    monkeypatch.setattr(scaling.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(scaling, "environment", lambda _: {"card": "A Card"})
    assert scaling.main(["--only", "token", "--steps", "20", "--out", str(tmp_path)]) == 1  # one failed
    assert started == [(1, "parallel=ddp"), *((n, f"parallel={kind}") for n in (2, 4) for kind in ("ddp", "fsdp"))]
    result = json.loads((tmp_path / "scaling-a-card-partial.json").read_text())
    assert result["complete"] and [row["failed"] for row in result["rows"]] == [None, None, "out of memory", None, None]
    assert [row.get("efficiency") for row in result["rows"]] == [1, *(pytest.approx(0.9) if i != 1 else None
                                                                      for i in range(4))]  # fmt: skip
    other = ["--batch", "8", "--train", "precision=float32", "--gpus", "1", "--steps", "20", "--out", str(tmp_path)]
    assert scaling.main(other) == 0
    path = tmp_path / "scaling-batch-8-train-precision-float32-a-card.json"
    assert json.loads(path.read_text())["variant"] == "batch 8, train precision=float32"
    monkeypatch.setattr(scaling.torch.cuda, "device_count", lambda: 2)
    assert scaling.main(["--gpus", "1", "4"]) == 2
    assert "2 CUDA devices are visible, of 4" in capsys.readouterr().err
    monkeypatch.setattr(scaling.torch.cuda, "device_count", lambda: 0)
    assert scaling.main([]) == 2 and "0 CUDA devices are visible, of 2" in capsys.readouterr().err


def test_chart_is_drawn(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        pytest.importorskip("matplotlib.figure").Figure, "savefig", lambda f, *_, **__: figures.append(f)
    )
    rows = [
        {"case": "mor", "gpus": gpus, "parallel": kind, "failed": failed, "tokens_per_second": speed}
        for gpus, kind, failed, speed in [(1, "ddp", None, 100.0), (2, "ddp", None, 190.0), (2, "fsdp", "why", None)]
    ]
    scaling.compare(rows)
    scaling.chart({"environment": {"card": "A", "torch": "2", "triton": "3"}, "rows": rows}, tmp_path / "chart.png")
    (axes,) = figures[0].axes
    assert [bar.get_width() for bar in axes.patches] == [100.0, 190.0]
    assert [line.get_xdata()[0] for line in axes.lines] == [pytest.approx(200.0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mor, 1 GPU", "mor, 2 GPUs, ddp"]
