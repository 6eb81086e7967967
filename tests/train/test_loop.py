from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import EXPERT, FIXED, TOKEN

from mor_kernels.graphs import without_workspace
from mor_kernels.train import Loader, Tokens, TrainConfig, Trainer, latest, loop, plot_curves, prepare, train
from mor_kernels.train.passes import Graphs


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    if "curves" not in request.node.name:  # they take most of the time of a tiny run
        monkeypatch.setattr(loop, "plot_curves", lambda *_: None)


def metrics(trainer):
    lines = [json.loads(line) for line in trainer.metrics.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def at_step(trainer, step, action):
    """Calls `action` when the trainer asks for the data of optimizer step `step` (from 0)."""
    batch = trainer.loader.batch

    def wrapped(now, micro=0):
        if now == step and micro == 0:
            action()
        return batch(now, micro)

    trainer.loader.batch = wrapped


def interrupt(trainer, step, number=signal.SIGINT):
    at_step(trainer, step, lambda: os.kill(os.getpid(), number))


def assert_same_state(a, b):
    for name, tensor in a.model.state_dict().items():
        assert torch.equal(tensor, b.model.state_dict()[name]), name
    for index, entry in a.optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, b.optimizer.state_dict()["state"][index][key]), (index, key)


# Resuming


@pytest.mark.parametrize("kind, log_every", [(EXPERT, 1), (EXPERT, 3), (TOKEN, 3), (FIXED, 3)],
                         ids=["expert", "expert-log-3", "token", "fixed"])
def test_interrupted_run_equals_an_unbroken_one(make_model, make_config, tmp_path, kind, log_every):
    changes = {"log_every": log_every, "accumulation": 2, "eval_every": 3, "eval_batches": 1, "schedule": "cosine"}
    whole = train(make_model(**kind), make_config(out=str(tmp_path / "whole"), **changes))
    config = make_config(out=str(tmp_path / "broken"), **changes)
    # In the middle of the capacity warm-up, of an evaluation interval and of a log interval; then once more after it.
    for step in (1, 6):
        part = Trainer(make_model(seed=step - 1, **kind), config)
        interrupt(part, step)
        part.run()
        assert part.interrupted and part.step == step + 1
        torch.rand(step)
    resumed = train(make_model(seed=3, **kind), config)
    assert not resumed.interrupted and resumed.step == 8
    assert_same_state(whole, resumed)
    assert metrics(whole) == metrics(resumed)
    if kind is TOKEN:  # moved an odd number of times, so not back at 0
        assert part.model.router_bias.abs().sum() > 0
    if kind is EXPERT and log_every == 1:
        kept = [line["kept"] for line in metrics(whole) if "kept" in line]
        assert kept[0] == [32, 32] and kept[-1] == [32, 16] and len({tuple(k) for k in kept}) > 3


def test_going_on_after_the_end(make_model, make_config):
    first = train(make_model(**EXPERT), make_config(steps=4))
    again = train(make_model(seed=1, **EXPERT), make_config(steps=4))
    assert_same_state(first, again)
    assert train(make_model(**EXPERT), make_config(steps=6)).step == 6
    with pytest.raises(ValueError, match=r"steps: expected at least 6, the step of .*step-00000006, got 5"):
        Trainer(make_model(**EXPERT), make_config(steps=5))


def test_metrics_after_the_checkpoint_are_dropped(make_model, make_config):
    config = make_config(steps=4)
    trainer = train(make_model(**EXPERT), config)
    before = metrics(trainer)
    with open(trainer.metrics, "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n[1]\n3\n{"loss": 1.0}\n{"step": 6, "lo')
    resumed = Trainer(make_model(**EXPERT), config)
    assert metrics(resumed) == before


@pytest.mark.parametrize("changes, message", [
    ({"seed": 1}, r"trained on other data; seed: expected 0 \(checkpoint\), got 1"),
    ({"sequence_length": 16}, "sequence_length: expected 32 .* got 16"),
    ({"batch_size": 4}, "sequences per step: expected 2 .* got 4"),
    ({"validation": 0.2}, "validation: expected 0.01 .* got 0.2"),
    ({"steps": 1}, "steps: expected at least 2"),
])
def test_resuming_with_other_settings(make_model, make_config, changes, message):
    train(make_model(**EXPERT), make_config(steps=2))
    with pytest.raises(ValueError, match=message):
        Trainer(make_model(**EXPERT), make_config(**{"steps": 2, **changes}))


def test_resuming_with_other_data_or_model(make_model, make_config, tmp_path):
    train(make_model(**EXPERT), make_config(steps=2))
    other = tmp_path / "other"
    prepare("python-docs", other, vocab_size=300, max_tokens=20_000)
    with pytest.raises(ValueError, match=r"trained on other data; tokens: expected \w+ \(checkpoint\), got \w+"):
        Trainer(make_model(**EXPERT), make_config(data=str(other)))
    with pytest.raises(ValueError, match=r"another model; vocab_size: expected 512 \(checkpoint\), got 600"):
        Trainer(make_model(**EXPERT, vocab_size=600), make_config())
    with pytest.raises(FileExistsError, match="a checkpoint of another run; set resume"):
        Trainer(make_model(**EXPERT), make_config(resume=False))


def test_damaged_checkpoints_are_named_on_resuming(make_model, make_config, tmp_path, recwarn):
    config = make_config(checkpoint_every=2)
    whole = train(make_model(**EXPERT), config)
    (whole.checkpoints / "step-00000008" / "trainer.safetensors").unlink()
    (whole.checkpoints / "step-00000006" / "checkpoint.json").write_text("{")
    (whole.checkpoints / ".tmp-step-00000010").mkdir()
    with pytest.warns(UserWarning) as caught:
        resumed = Trainer(make_model(seed=1, **EXPERT), config)
    assert resumed.step == 4 and not (whole.checkpoints / ".tmp-step-00000010").exists()
    assert [re.sub(".*/step", "step", str(w.message).partition(": ")[0]) for w in caught] == [
        "step-00000006", "step-00000008"]
    assert re.search("going on from step-00000004: .*trainer.safetensors: not found", str(caught[1].message))
    resumed.run()
    assert_same_state(whole, resumed)
    train(make_model(**EXPERT), config)  # they have been replaced; nothing to warn of
    assert not recwarn.list


def test_nothing_but_damaged_checkpoints(make_model, make_config):
    trainer = train(make_model(**EXPERT), make_config(steps=1))
    before = trainer.metrics.read_text()
    path = latest(trainer.checkpoints)
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(10)
    message = r"checkpoints: expected a complete checkpoint to go on from, found none; remove it to start anew\. .*10$"
    for resume in (True, False):
        with pytest.raises(ValueError, match=message):
            Trainer(make_model(**EXPERT), make_config(resume=resume))
    assert path.exists() and trainer.metrics.read_text() == before
    shutil.rmtree(trainer.checkpoints)
    assert Trainer(make_model(**EXPERT), make_config()).step == 0


@pytest.mark.parametrize("changes", [{"weight_decay": 0.5}, {"betas": (0.5, 0.6)}])
def test_optimizer_settings_may_change_on_resuming(make_model, make_config, changes):
    train(make_model(**EXPERT), make_config(steps=2))
    groups = Trainer(make_model(**EXPERT), make_config(**changes)).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [changes.get("weight_decay", 0.1), 0]
    assert [tuple(group["betas"]) for group in groups] == [changes.get("betas", (0.9, 0.95))] * 2


def test_micro_steps_and_batch_size_may_change_on_resuming(make_model, make_config):
    train(make_model(**EXPERT), make_config(steps=2, batch_size=4))
    assert train(make_model(**EXPERT), make_config(steps=3, batch_size=2, accumulation=2)).step == 3


# Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_stops(make_model, make_config, number):
    trainer = Trainer(make_model(**EXPERT), make_config())
    before = signal.getsignal(number)
    interrupt(trainer, 2, number)
    trainer.run()
    assert trainer.interrupted and latest(trainer.checkpoints).name == "step-00000003"
    assert signal.getsignal(number) is before


def test_second_signal_stops_at_once(make_model, make_config, request):
    # The parent may have made us ignore it, as nohup does.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = Trainer(make_model(**EXPERT), make_config())

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(trainer, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert latest(trainer.checkpoints) is None


def poison(tensor):
    with torch.no_grad():
        tensor.fill_(float("nan"))


@pytest.mark.parametrize("log_every", [1, 100])
def test_loss_that_is_not_finite(make_model, make_config, log_every):
    trainer = Trainer(make_model(**EXPERT), make_config(checkpoint_every=2, log_every=log_every))
    at_step(trainer, 5, lambda: poison(trainer.model.norm.weight))
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 6, .*checkpoint: .*step-00000004\. A lower"):
        trainer.run()
    assert [path.name for path in sorted(trainer.checkpoints.iterdir())] == ["step-00000002", "step-00000004"]
    assert "NaN" not in trainer.metrics.read_text()
    assert train(make_model(**EXPERT), trainer.config).step == 8


def test_gradient_that_is_not_finite(make_model, make_config):
    trainer = Trainer(make_model(**EXPERT), make_config(checkpoint_every=1, log_every=100))
    weight = trainer.model.norm.weight
    at_step(trainer, 3, lambda: weight.register_hook(lambda gradient: gradient * float("inf")))
    with pytest.raises(FloatingPointError, match="gradient_norm is (nan|inf) at step 4"):
        trainer.run()
    assert latest(trainer.checkpoints).name == "step-00000003"


def test_weights_that_are_not_finite(make_model, make_config, monkeypatch):
    trainer = Trainer(make_model(**EXPERT), make_config(checkpoint_every=1))
    monkeypatch.setattr(trainer.optimizer, "step", lambda: poison(trainer.model.norm.weight))
    with pytest.raises(FloatingPointError, match="weights are not finite after step 1, so no checkpoint was written"):
        trainer.run()
    assert latest(trainer.checkpoints) is None


# The step


def test_accumulation_equals_a_big_batch(make_model, make_config, tmp_path):
    # The same text whatever the Python. A window that begins with one token twice has two equal states, a tie that
    # rounding may decide otherwise in another batch size; this text has none in the windows that are read.
    letters = np.random.RandomState(1).choice(list("abcdefghij klmnop"), 20_000)
    (tmp_path / "text.txt").write_text("".join(letters))
    prepare(tmp_path / "text.txt", tmp_path / "tokens", vocab_size=512)
    runs = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        out = str(tmp_path / str(batch_size))
        config = make_config(data=str(tmp_path / "tokens"), out=out, batch_size=batch_size, accumulation=accumulation)
        runs.append(train(make_model(**EXPERT).double(), config))
    for big, small in zip(metrics(runs[0])[1:], metrics(runs[1])[1:]):
        assert small["loss"] == pytest.approx(big["loss"], rel=1e-6)  # read as fp32
        assert small["gradient_norm"] == pytest.approx(big["gradient_norm"], rel=1e-6)
        assert small["depth_mix"] == big["depth_mix"]
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters()):
        # fp64 sums in another order; Adam divides by sqrt(v) + 1e-8, which magnifies 1e-16 at most a hundred million
        # times where a gradient is nothing but rounding, times the rate.
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_optimizer_settings(make_model, make_config):
    trainer = Trainer(make_model(**EXPERT, recursion_encoding=True, lora_rank=2), make_config())
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trainer.optimizer.defaults["betas"] == (0.9, 0.95)
    for name, parameter in trainer.model.named_parameters():
        vector = name.endswith("norm.weight") or name == "recursion_encoding"
        assert decay[id(parameter)] == (0 if vector else 0.1), name
    assert len(decay) == len(list(trainer.model.parameters()))


def test_gradient_is_clipped_and_rate_follows_the_schedule(make_model, make_config, monkeypatch):
    trainer = Trainer(make_model(**EXPERT), make_config(clip=1e-3, steps=20, learning_rate=1.0, checkpoint_every=20))
    seen = []
    step = trainer.optimizer.step

    def record():
        total = sum(p.grad.square().sum() for p in trainer.model.parameters() if p.grad is not None).sqrt()
        seen.append((float(total), [group["lr"] for group in trainer.optimizer.param_groups]))
        if len(seen) < 3:
            step()

    monkeypatch.setattr(trainer.optimizer, "step", record)
    trainer.run()
    assert all(norm == pytest.approx(1e-3, rel=1e-3) for norm, _ in seen)
    assert [rates for _, rates in seen][15:] == [pytest.approx([rate] * 2) for rate in (1.0, 1.0, 0.75, 0.5, 0.25)]


def test_router_bias_moves_once_a_step(make_model, make_config):
    trainer = train(make_model(**TOKEN), make_config(steps=1, accumulation=3))
    # One update of 0.01 on counts of the whole step, however many micro-steps there are.
    assert trainer.model.router_bias.abs().tolist() == pytest.approx([0.01, 0.01])


def test_metrics_and_curves(make_model, make_config, data):
    config = make_config(steps=4, log_every=2, eval_every=2, eval_batches=2)
    trainer = train(make_model(**EXPERT), config)
    lines = [json.loads(line) for line in trainer.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 2, 4, 4]
    assert lines[0]["training_tokens"] == pytest.approx(0.99 * len(Tokens(data)), rel=1e-3)
    assert lines[0]["unigram_entropy"] == trainer.unigram_entropy
    assert lines[0]["device"] and lines[0]["torch"] == torch.__version__ and "triton" in lines[0]
    logged, evaluated = lines[1], lines[2]
    assert logged["loss"] == pytest.approx(logged["lm"] + 0.001 * logged["aux"])
    assert len(logged["depth_mix"]) == 2 and sum(logged["depth_mix"]) == pytest.approx(1)
    assert {"aux", "gradient_norm", "learning_rate", "tokens_per_second", "kept", "sampling_accuracy"} <= logged.keys()
    assert {"validation_loss", "validation_loss_topk", "validation_depth_mix"} <= evaluated.keys()
    assert (trainer.out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_evaluation_is_in_threshold_mode_on_held_out_tokens(make_model, make_config, data):
    trainer = Trainer(make_model(**EXPERT), make_config(eval_every=1, eval_batches=3, validation=0.05))
    with torch.no_grad():
        trainer.model.routers[1].weight.mul_(100)  # depths that differ between the modes
    result = trainer.evaluate()
    held_out = Tokens(data).split(0.05)[1][:]
    for mode, suffix in (("threshold", ""), ("topk", "_topk")):
        total = 0.0
        for step in range(3):
            inputs, targets = trainer.held_out.batch(step)
            assert all(row in held_out for row in inputs.unique().numpy())
            logits = trainer.model.eval()(inputs, mode=mode).logits
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() / 3
        assert result[f"validation_loss{suffix}"] == pytest.approx(total, rel=1e-5)
    assert result["validation_depth_mix_topk"] == [0.5, 0.5] != result["validation_depth_mix"]


def test_bfloat16(make_model, make_config, tmp_path):
    whole = train(make_model(**EXPERT), make_config(steps=2, precision="bfloat16"))
    assert all(p.dtype == torch.float32 for p in whole.model.parameters())
    assert metrics(whole)[-1]["loss"] < 7
    exact = train(make_model(**EXPERT), make_config(steps=2, out=str(tmp_path / "exact"), precision="float32"))
    for a, b in zip(metrics(whole)[1:], metrics(exact)[1:]):
        assert a["loss"] != b["loss"] and a["loss"] == pytest.approx(b["loss"], rel=2**-6)
    trainer = Trainer(exact.model, replace(whole.config, eval_every=1, out=str(tmp_path / "evaluated")))
    results = [trainer.evaluate()]
    trainer.bf16 = False
    results.append(trainer.evaluate())
    assert results[0] != results[1]
    assert results[0]["validation_loss"] == pytest.approx(results[1]["validation_loss"], rel=2**-6)


def test_seed_orders_the_data(make_model, make_config, data, tmp_path):
    for seed in (0, 5):
        trainer = Trainer(make_model(), make_config(seed=seed, out=str(tmp_path / str(seed))))
        expected = Loader(Tokens(data).split(0.01)[0], 32, 2, seed=seed).batch(3)[0]
        assert torch.equal(trainer.loader.batch(3)[0], expected)
    assert not torch.equal(Loader(Tokens(data).split(0.01)[0], 32, 2).batch(3)[0], expected)


def test_ranks_share_the_training_and_the_held_out_data(make_model, make_config, tmp_path, monkeypatch):
    config = make_config(eval_every=1, validation=0.1, batch_size=4)
    alone = Trainer(make_model(), config)
    monkeypatch.setattr(loop.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("mor_kernels.train.parallel.share", lambda model: None)
    monkeypatch.setattr(Trainer, "_agree_on", lambda *_: None)
    ranks = []
    for rank in range(2):
        monkeypatch.setattr(loop.dist, "get_rank", lambda rank=rank: rank)
        ranks.append(Trainer(make_model(), replace(config, batch_size=2, out=str(tmp_path / str(rank)))))
    for name in ("loader", "held_out"):
        divided = torch.cat([getattr(trainer, name).batch(1)[0] for trainer in ranks])
        assert torch.equal(divided, getattr(alone, name).batch(1)[0])


@pytest.mark.parametrize("changes, message", [
    ({"steps": 0}, "steps: expected at least 1, got 0"),
    ({"log_every": 0}, "log_every: expected at least 1, got 0"),
    ({"schedule": "step"}, "schedule: expected one of trapezoid, cosine, got 'step'"),
    ({"precision": "float16"}, "precision: expected one of auto, float32, bfloat16, got 'float16'"),
    ({"parallel": "tensor"}, "parallel: expected one of ddp, fsdp, got 'tensor'"),
    ({"warmup": 0.9}, "warmup, cooldown: expected shares that sum to at most 1, got 0.9, 0.2"),
    ({"warmup": float("nan")}, "warmup, cooldown: expected shares .* got nan, 0.2"),
    ({"cooldown": -0.1}, "warmup, cooldown: expected shares .* got 0.05, -0.1"),
    ({"data": Path("x")}, r"data: expected a string, got PosixPath\('x'\)"),
    ({"device": 0}, "device: expected a string, got 0"),
    ({"schedule": None}, "schedule: expected a string, got None"),
    ({"steps": "10"}, "steps: expected an integer, got '10'"),
    ({"steps": 10.0}, "steps: expected an integer, got 10.0"),
    ({"batch_size": True}, "batch_size: expected an integer, got True"),
    ({"cuda_graphs": 1}, "cuda_graphs: expected true, false or null, got 1"),
    ({"resume": None}, "resume: expected true or false, got None"),
    ({"resume": "no"}, "resume: expected true or false, got 'no'"),
    ({"warmup": "0.1"}, "warmup: expected a number, got '0.1'"),
    ({"clip": False}, "clip: expected a number, got False"),
    ({"clip": 0}, "clip: expected a number above 0, got 0"),
    ({"clip": float("nan")}, "clip: expected a number above 0, got nan"),
    ({"weight_decay": -0.1}, "weight_decay: expected a finite number of at least 0, got -0.1"),
    ({"learning_rate": 0.0}, "learning_rate: expected a finite number above 0, got 0.0"),
    ({"learning_rate": float("inf")}, "learning_rate: expected a finite number above 0, got inf"),
    ({"eval_every": -1}, "eval_every: expected at least 0, got -1"),
    ({"seed": -1}, "seed: expected at least 0, got -1"),
    ({"validation": 0}, r"validation: expected a share in \(0, 1\), got 0"),
    ({"validation": 1.0}, r"validation: expected a share in \(0, 1\), got 1.0"),
    ({"betas": 0.9}, r"betas: expected two numbers in \[0, 1\), got 0.9"),
    ({"betas": (0.9,)}, r"betas: expected two numbers .* got \(0.9,\)"),
    ({"betas": (0.9, 1)}, r"betas: expected two numbers .* got \(0.9, 1\)"),
    ({"betas": (-0.1, 0.9)}, r"betas: expected two numbers .* got \(-0.1, 0.9\)"),
    ({"betas": ("0.9", 0.9)}, r"betas: expected two numbers .* got \('0.9', 0.9\)"),
])
def test_settings_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"data": "data", "out": "out", **changes})


def test_settings_at_the_ends_of_their_ranges():
    TrainConfig("", "", weight_decay=0, eval_every=0, seed=0, betas=[0, 0.999], clip=float("inf"), learning_rate=1,
                warmup=0, cooldown=1)


def test_parts_need_several_processes(make_model, make_config):
    with pytest.raises(ValueError, match='parallel: expected "ddp" for a single process, got "fsdp", which divides'):
        train(make_model(), make_config(parallel="fsdp"))


def test_model_that_does_not_fit(make_model, make_config):
    with pytest.raises(ValueError, match="model vocab_size: expected at least 512, .* got 400"):
        Trainer(make_model(vocab_size=400), make_config())
    with pytest.raises(ValueError, match="sequence_length: expected at most the model's .* 64, got 65"):
        Trainer(make_model(), make_config(sequence_length=65))
    with pytest.raises(ValueError, match=r"validation: expected a share of at least 0.0001\d, one window .* got"):
        Trainer(make_model(), make_config(validation=0.0001, eval_every=1))


@pytest.mark.parametrize("count", [80, 90, 97, 3_333, 31_600])
def test_advice_on_the_validation_share_works(make_model, make_config, tmp_path, count):
    prepare("python-docs", tmp_path / "tokens", vocab_size=300, max_tokens=count)
    config = make_config(data=str(tmp_path / "tokens"), validation=0.001, eval_every=1)
    with pytest.raises(ValueError, match="validation: expected a share of at least") as caught:
        Trainer(make_model(), config)
    share = float(re.search(r"at least ([\d.]+),", str(caught.value))[1])
    assert share < 1.1 * 33 / count + 0.001
    assert Trainer(make_model(), replace(config, validation=share)).held_out.windows == 1


def test_too_few_tokens(make_model, make_config, tmp_path):
    prepare("python-docs", tmp_path / "tokens", vocab_size=300, max_tokens=65)
    config = make_config(data=str(tmp_path / "tokens"), eval_every=1)
    message = r"expected at least 66 tokens, .* training and one in the validation share, found 65 in .*tokens$"
    with pytest.raises(ValueError, match=message):
        Trainer(make_model(), config)
    with pytest.raises(ValueError, match="expected at least 33 tokens .* found 32 in the training share of"):
        Trainer(make_model(), replace(config, eval_every=0, validation=0.5))
    assert Trainer(make_model(), replace(config, eval_every=0)).loader.windows == 1


@pytest.mark.parametrize("steps", [0, 1])
def test_damaged_data_is_found_at_the_start(make_model, make_config, data, tmp_path, steps):
    shutil.copytree(data, tmp_path / "copy")
    if steps:  # and on resuming
        train(make_model(), make_config(data=str(tmp_path / "copy"), steps=steps))
    with open(tmp_path / "copy" / "tokens-00002.npy", "r+b") as file:
        file.seek(3000)
        file.write(b"\xff\xff\xff")
    with pytest.raises(ValueError, match=r"tokens-00002\.npy: damaged, expected SHA-256"):
        Trainer(make_model(), make_config(data=str(tmp_path / "copy")))


def test_curves_without_matplotlib(make_model, make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match="curves.png was not drawn: it needs matplotlib"):
        trainer = train(make_model(), make_config(steps=1, eval_every=1))
    assert trainer.step == 1


def test_curves_of_an_empty_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "unigram_entropy": 5.0}\n')
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


def test_curves_that_are_drawn(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    logged = [{"step": step, "loss": 5.0, "lm": 4.5 / step, "depth_mix": [0.25, 0.75], "learning_rate": 0.1 * step}
              for step in (1, 2, 3)]
    lines = [{"step": 0, "unigram_entropy": 5.0}, *logged, {"step": 3, "validation_loss": 2.0}, [1],
             {"step": 3, "validation_loss_topk": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    loss, depth, rate = drawn[0].axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in loss.lines}
    assert curves["training"] == [[1, 4.5], [2, 2.25], [3, 1.5]]
    assert curves["validation"] == [[3, 2]] and curves["validation, top-k (looks ahead)"] == [[3, 1.5]]
    assert set(curves["unigram entropy"][0]) == {0, 5}
    assert [area.get_label() for area in depth.collections] == ["depth 1", "depth 2"]
    assert rate.lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_loss_falls_below_the_unigram_entropy(make_model, make_config):
    model = make_model(**EXPERT, initializer_range=0.05)
    trainer = train(model, make_config(steps=120, batch_size=8, sequence_length=64, learning_rate=1e-2, log_every=20,
                                       eval_every=120, checkpoint_every=120))
    last = metrics(trainer)[-1]
    # 0.7 to 1.1 nats below it, with five seeds and the texts of two Pythons
    assert last["validation_loss"] < trainer.unigram_entropy - 0.3
    assert last["validation_loss_topk"] < trainer.unigram_entropy - 0.3


def test_importing_needs_no_optional_package():
    blocked = "import sys; sys.modules.update({'matplotlib': None, 'datasets': None, 'triton': None}); "
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", blocked + "import mor_kernels.train"], check=True, cwd=root)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}], ids=["default", "eager"])
@pytest.mark.parametrize("kind", [EXPERT, {**EXPERT, "cap_warmup_steps": 0}, FIXED], ids=["warmup", "expert", "fixed"])
def test_no_host_synchronisation_in_a_step(make_model, make_config, kind, settings):
    trainer = Trainer(make_model(**kind), make_config(device="cuda", **settings))
    for trainer.step in range(3):
        trainer._train_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step = 3
        trainer._train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [EXPERT, TOKEN], ids=["expert", "token"])
def test_on_a_gpu(make_model, make_config, kind):
    config = make_config(device="cuda", accumulation=2, eval_every=4)
    part = Trainer(make_model(**kind), config)
    assert part.bf16 and part.graphs is not None
    interrupt(part, 2)
    part.run()
    trainer = train(make_model(seed=1, **kind), config)
    assert trainer.step == 8 and metrics(trainer)[-1]["validation_loss"] < 7


def test_cuda_graphs_are_refused_where_they_cannot_be(make_model, make_config):
    with pytest.raises(ValueError, match="cuda_graphs: expected false without a GPU, got true"):
        Trainer(make_model(**EXPERT), make_config(cuda_graphs=True))
    assert Trainer(make_model(**EXPERT), make_config()).graphs is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "settings, kv",
    [
        ({}, {}),
        ({"accumulation": 2}, {}),
        ({"activation_checkpointing": True}, {}),
        ({}, {"kv": "shared"}),
        ({}, {"kv": "hybrid"}),
        ({}, {"kv": "hybrid", "hybrid_base": "latest"}),
    ],
)
@pytest.mark.parametrize("kind", [{**EXPERT, "cap_warmup_steps": 3}, TOKEN], ids=["expert", "token"])
def test_cuda_graphs_train_as_without_them(make_model, make_config, tmp_path, kind, settings, kv):
    """Through a warm-up of capacities, whose steps aren't captured, an evaluation in between, and a resumed run."""
    runs = []
    for name, graphs in (("plain", False), ("graphs", True)):
        config = make_config(device="cuda", out=str(tmp_path / name), steps=12, eval_every=9, cuda_graphs=graphs,
                             precision="float32", **settings)  # fmt: skip
        train(make_model(**kind, **kv), replace(config, steps=10))
        trainer = train(make_model(seed=1, **kind, **kv), config)
        assert bool(trainer.graphs and trainer.graphs.graphs) == graphs
        runs.append([line for line in metrics(trainer) if "loss" in line])
    assert len(runs[0]) == len(runs[1]) == 12
    for a, b in zip(*runs):
        # what is compiled, and what a graph holds, may sum in another order
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), a["step"]
        assert a["depth_mix"] == pytest.approx(b["depth_mix"], abs=0.02)  # a token near a tie
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-3)


@pytest.mark.parametrize("has_api", [True, False])
def test_cublas_is_without_a_workspace_only_within(monkeypatch, has_api):
    """Of Hopper, and of who hasn't said otherwise."""
    variable, before, sizes = "CUBLAS_WORKSPACE_CONFIG", 2**25, [2**25]

    def api(size=None):
        sizes.extend([] if size is None else [size])
        return sizes[-1]

    def without():
        return sizes[-1] == 0 if has_api else os.environ.get(variable) == ":0:0"

    monkeypatch.delenv(variable, raising=False)
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)
    if has_api:
        monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", api, raising=False)
    for capability, given, deterministic in (((9, 0), None, False), ((8, 0), None, False), ((9, 0), ":4096:8", False),
                                             ((9, 0), None, True)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda found=deterministic: found)
        if given:
            monkeypatch.setenv(variable, given)
        with pytest.raises(KeyError), without_workspace():
            assert without() == (capability == (9, 0) and not given and not deterministic)
            raise KeyError
        assert os.environ.get(variable) == given and sizes[-1] == before
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [0, 1], ids=lambda index: f"cuda:{index}")
def test_graphs_share_memory_and_gradients_outlive_them(device):
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    generator = torch.Generator(f"cuda:{device}").manual_seed(0)
    x, weight = (torch.randn(n, 2048, generator=generator, device=generator.device) for n in (64, 2048))
    weight.requires_grad_()

    def pass_of(rows):
        product = x[:rows] @ weight.detach()
        return product.square().sum(), 2 * x[:rows].T @ product

    def forward_backward(rows, x):
        loss = (x[:rows] @ weight).square().sum()
        loss.backward()
        return [loss.detach()]

    def same(a, b):  # fp32 sums of up to 2,048 products, in any order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())

    graphs, used = Graphs([weight], forward_backward), []
    for rows in (64, 32, 48, 16, 64):
        weight.grad = None
        (loss,) = graphs(rows, x)
        want_loss, want = pass_of(rows)
        same(loss, want_loss)
        same(weight.grad, want)
        used.append(torch.cuda.memory_reserved(x.device))
    assert len(graphs.graphs) == 4 and used[-1] - used[1] < weight.nbytes
    graphs(32, x)  # adds to the gradient of 64, which is in the memory of both
    same(weight.grad, want + pass_of(32)[1])
    before = weight.grad.clone()
    del graphs
    torch.cuda.empty_cache()
    torch.full((2048, 2048), torch.nan, device=x.device)  # would take that memory, were it free
    assert torch.equal(weight.grad, before)
