"""The benchmark of decoding without a GPU: depths, what is counted, floors, a whole run of tiny models, its table."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from bench import decode, report
from bench.harness import Mismatch
from mor_kernels.decode import Engine
from mor_kernels.decode.engine import Event
from mor_kernels.model import MoRConfig, config

TINY = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}  # fmt: skip
ENVIRONMENT = {"card": "A Card", "torch": "2.11", "triton": "3.6", "cuda": "13.0", "driver": "580", "python": "3.12",
               "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02T03:04:05+00:00"}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def quickly():
    """Few tokens, on one thread: threads that wait for tiny operations take a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    checked, decode.CHECKED = decode.CHECKED, 5
    yield
    decode.CHECKED = checked
    torch.set_num_threads(threads)


def tiny(**changes):
    return decode.random_model(MoRConfig(**{**TINY, **changes}), "cpu")


MOR = {"num_recursions": 3, "router": "expert_choice"}


def test_depths_have_the_mix_and_depend_on_nothing_else():
    positions, seeds = (t.flatten() for t in torch.meshgrid(torch.arange(256), torch.arange(400), indexing="ij"))
    for mix in ((0.25,) * 4, (1 / 3,) * 3, (0.5, 0.5), (0.1, 0.2, 0.7), (0.5, 0.0, 0.5)):
        depths = decode.drawn(positions, seeds, decode.bounds_of(mix, CPU))
        assert depths.dtype == torch.int64 and depths.shape == positions.shape
        decode.mixed_as(torch.bincount(depths, minlength=len(mix) + 1)[1:].tolist(), mix)
        order = torch.randperm(len(positions))
        assert torch.equal(decode.drawn(positions[order], seeds[order], decode.bounds_of(mix, CPU)), depths[order])
    meta = (t.to("meta") for t in (positions, seeds, decode.bounds_of((0.5, 0.5), CPU)))
    assert decode.drawn(*meta).shape == positions.shape  # without numbers, so nothing waits for them
    grid = decode.drawn(positions, seeds, decode.bounds_of((0.25,) * 4, CPU)).view(256, 400).double()
    for near in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):  # neither neighbours nor requests are alike
        assert abs(near.mean().item() - 2.5**2) < 0.05
    with pytest.raises(Mismatch, match="depth 1: 350 of 1000 tokens, expected 0.2500"):
        decode.mixed_as([350, 150, 250, 250], (0.25,) * 4)


def test_mixes_of_the_capacities():
    models = {subject.name: subject for subject in decode.subjects("360M", "meta")}
    assert models["mor-4"].mix == (0.25,) * 4 and models["mor-3"].mix == pytest.approx((1 / 3,) * 3)
    assert models["mor-4-token"].mix == models["mor-4-hybrid"].mix == (0.25,) * 4
    assert models["recursive-4"].mix is models["vanilla-34"].mix is None
    assert decode.capacity_mix(models["recursive-4"].config) == (0, 0, 0, 1)
    assert decode.capacity_mix(models["vanilla-32"].config) == (1,)
    assert decode.reaching([1, 1, 2]) == [1, 0.75, 0.5]
    assert decode.deepest((0.25,) * 4, 1) == 2.5 and 3.99 < decode.deepest((0.25,) * 4, 32) < 4
    draws = decode.drawn(torch.arange(9000), torch.arange(9000), decode.bounds_of((0.6, 0.3, 0.1), CPU))
    assert decode.deepest((0.6, 0.3, 0.1), 3) == pytest.approx(
        draws.view(-1, 3).amax(1).double().mean().item(), abs=0.05
    )


def test_models_and_what_they_are_compared_with():
    models = decode.subjects("360M", "meta")
    names = ["vanilla-32", "vanilla-34", "mor-2", "mor-3", "mor-4", "mor-4-shared", "recursive-4"]
    assert [subject.name for subject in models] == [*names, "mor-4-hybrid", "mor-4-token"]
    for subject in models:
        assert subject.vanilla == f"vanilla-{34 if '4' in subject.name else 32}"
        assert subject.config.num_hidden_layers == (34 if "4" in subject.name else 32)
    cases = {s.name: [(p.case, p.slots) for p in decode.points(s, s is models[0], False)] for s in models}
    both = [("32 sequences", 32), ("same bytes", None)]
    assert cases["vanilla-34"] == cases["mor-4-shared"] == cases["recursive-4"] == both
    assert cases["mor-4-hybrid"] == cases["mor-4-token"] == both[:1]
    assert cases["vanilla-32"] == [*both, ("8 sequences", 8), ("128 sequences", 128), ("512 sequences", 512)]
    for name, batch in (("mor-2", 42), ("mor-3", 48), ("mor-4", 51)):
        assert cases[name] == [both[0], ("paper's batch", batch), both[1]]


def test_bytes_are_those_of_the_protocol():
    """Of the design's table for 360M at a mean context of 128: MB of weights, and of keys and values."""
    models = {subject.name: subject for subject in decode.subjects("360M", "meta")}
    weights = {name: decode.weight_bytes(models[name].load()) / 1e6 for name in ("vanilla-32", "mor-3")}
    assert weights == {"vanilla-32": pytest.approx(724, abs=1), "mor-3": pytest.approx(331, abs=1)}
    vanilla = {"depth_histogram": [5], "context": 128, "passes": 32, "tokens": 3200, "ticks": 100}
    three = {"depth_histogram": [5, 5, 5], "context": 128, "passes": 32, "tokens": 1600, "ticks": 100}

    def read(name, facts):
        return decode.read_bytes(models[name].config, torch.bfloat16, facts) / 1e6

    assert read("vanilla-32", vanilla) == pytest.approx(168, abs=0.5)
    assert read("mor-3", three) == pytest.approx(46, abs=0.5)
    shared = {**three, "depth_histogram": [5, 5, 5, 5]}
    assert read("mor-4-shared", shared) == pytest.approx(1280 * 128 * (32 * 8 + 16 * 2) / 1e6)
    untied = decode.random_model(dataclasses.replace(models["mor-3"].config, tie_word_embeddings=False), "meta")
    assert decode.weight_bytes(untied) / 1e6 == pytest.approx(331, abs=1)


def test_a_cache_of_the_same_size_holds_more_sequences():
    models = {subject.name: subject for subject in decode.subjects("360M", "meta")}
    assert decode.mean_context(256, 0) == 128.5 and decode.mean_context(256, 64) == 136.5

    def each(name):
        mix = models[name].mix or decode.capacity_mix(models[name].config)
        return decode.sequence_bytes(models[name].config, torch.bfloat16, mix, 136.5)

    assert each("vanilla-34") == 1280 * 34 * 144 and each("recursive-4") == 1280 * (32 + 2) * 144
    assert each("mor-4") == 1280 * (8 * (2.5 * 136.5 + 4 * 7.5) + 2 * 144)
    assert each("mor-4-shared") == 1280 * 10 * 144


def test_lengths_are_the_same_for_every_model():
    lengths = decode.lengths_of(100, 20_000, 256, 64, 2048)
    assert lengths == decode.lengths_of(100, 20_000, 256, 64, 2048) and len(lengths) == 20_100
    first, rest = (torch.tensor(part).double() for part in (lengths[:100], lengths[100:]))
    assert rest.mean() == pytest.approx(256, abs=2) and rest.std() == pytest.approx(64, abs=2)
    assert first.mean() == pytest.approx(128, abs=25) and first.std() > 60
    assert decode.lengths_of(2, 50, 4, 4, 6) != [] and set(decode.lengths_of(2, 50, 4, 4, 6)) <= set(range(1, 7))


def event(request, depth=1):
    return Event(request, 7, "", depth)


def test_what_came_in_the_window_is_counted():
    log = [(0.0, [event(1), event(0)]), (1.0, [event(0, 3)]), (3.0, [event(1, 2), event(0, 2)]), (3.5, []),
           (4.0, [event(2)]), (9.0, [event(0)])]  # fmt: skip
    found = decode.of_events(log, 1, 5, 3)
    assert found["tokens"] == 4 and found["depth_histogram"] == [1, 2, 1]
    assert found["context"] == (2 + 2 + 3 + 1) / 4  # keys that they saw
    assert found["token_ms"]["p50"] == 2000 and found["token_ms"]["p99"] == pytest.approx(3000, abs=30)


@pytest.mark.parametrize("fields", [{}, {"num_recursions": 3}, MOR, {**MOR, "kv": "shared"}])
def test_requests_side_by_side_are_those_alone(fields):
    model = tiny(**fields)
    mix = (0.2, 0.3, 0.5) if "router" in fields else None
    decode.check(model, mix)


def test_wrong_tokens_and_depths_are_caught(monkeypatch):
    generate = Engine.generate

    def shifted(self, prompts, params=None):
        return [
            dataclasses.replace(c, tokens=[(t + len(prompts) // 5) % 50 for t in c.tokens])
            for c in generate(self, prompts, params)
        ]

    monkeypatch.setattr(Engine, "generate", shifted)
    with pytest.raises(Mismatch, match="request 0 differs from the same alone"):
        decode.check(tiny(), None)
    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(decode.Forced, "_recorded", lambda self, positions, seeds: torch.ones_like(positions))
    with pytest.raises(Mismatch, match="request 0: depths"):
        decode.check(tiny(**MOR), (0.2, 0.3, 0.5))


@pytest.mark.parametrize("fields", [{}, MOR])
def test_a_steady_window_is_measured(fields, monkeypatch):
    monkeypatch.setattr(decode, "PROFILED", 2)
    mix = (0.25, 0.25, 0.5) if fields else None
    engine = decode.engine_of(tiny(**fields), mix, 100, max_sequences=4)
    lengths = decode.lengths_of(4, 24, 6, 2, 64)
    found = decode.serve(engine, lengths, 6, profile=not fields)
    assert found["sequences"] == 4 and found["requests"] == 28 and found["preemptions"] == 0
    # a request's first tick takes its token to the block, without a pass
    assert 0.75 < found["occupancy"] <= 1 and found["passes"] == pytest.approx(4 * found["occupancy"])
    assert sum(found["depth_histogram"]) == found["tokens"] < sum(lengths) - 4 * 6
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(found["tokens"])
    assert found["tick_ms"] * found["ticks"] == pytest.approx(1e3 * found["seconds"])
    assert 2 < found["context"] < 6 and 0 < found["token_ms"]["p50"] <= found["token_ms"]["p99"]
    assert sum(found["all_depths"]) == sum(lengths)
    if not fields:
        assert found["kernels"]["count"] > 10 and "by_kind" in found["kernels"]
    if fields:
        decode.mixed_as(found["all_depths"], mix)
        taken = sum(depth * count for depth, count in enumerate(found["depth_histogram"], 1))
        # but for tokens that are under way at either end, and prompts, which are no slot's pass
        assert taken == pytest.approx(found["passes"] * found["ticks"], abs=3 * (4 + found["requests"]))
    for lengths in ([3] * 4, [6] * 6):
        with pytest.raises(Mismatch, match=f"{len(lengths)} requests are too few"):
            decode.serve(decode.engine_of(tiny(), None, 100, max_sequences=4), lengths, 6)


def test_an_engine_that_stands_still_is_told(monkeypatch):
    engine = decode.engine_of(tiny(), None, 100, max_sequences=2)
    monkeypatch.setattr(engine, "step", list)
    with pytest.raises(Mismatch, match="no token came in 1000 steps, and 3 requests are left"):
        decode.serve(engine, [3] * 3, 6)


def test_kernels_are_counted_by_tick():
    found = decode.per_tick([("nvjet_1", 80, 4.0), ("paged_attention_kernel", 40, 2.0), ("_rope", 8, 0.8)], 8)
    assert found["count"] == 16 and found["by_kind"] == {"matmul": 0.5, "attention": 0.25, "elementwise": 0.1}
    assert list(found["longest"])[0] == "80 x nvjet_1"


@pytest.fixture
def small(monkeypatch):
    """A whole run in some seconds, on a CPU."""
    monkeypatch.setitem(config.SIZES, "tiny", {**TINY, "num_hidden_layers": 4})
    monkeypatch.setattr(decode, "RECURSIVE", {"mor-2": decode.RECURSIVE["mor-2"]})
    for name, value in {"SEQUENCES": 3, "ALONE": (2,), "PAPER": {"mor-2": 4}, "REQUESTS": 4, "ALONE_REQUESTS": 4,
                        "ROUNDS": 4, "QUICK_ROUNDS": 4, "QUICK": "mor-2"}.items():  # fmt: skip
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(decode, "environment", lambda commit: ENVIRONMENT)
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 4e12)
    return ["--size", "tiny", "--mean", "4", "--sigma", "1", "--resident", "4"]


def test_a_whole_run(small, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    checked = []
    monkeypatch.setattr(decode, "check", lambda model, mix: checked.append(mix))
    folder = tmp_path / "run"
    tiny(**{**MOR, "num_recursions": 2, "num_hidden_layers": 4}, kv="shared").save_pretrained(folder)
    assert decode.main([*small, "--out", str(tmp_path), "--model", str(folder)], "cpu") == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("decode-*.json")
    assert path.stem == "decode-size-tiny-mean-4-sigma-1.0-resident-4-a-card"
    assert path.with_suffix(".png").stat().st_size > 10_000
    result = json.loads(path.read_text())
    ours = [row for row in result["rows"] if not row["model"].startswith("transformers")]
    assert result["complete"] and result["cache_bytes"] > 0 and not any(row["failed"] for row in ours)
    assert checked == [None, (0.5, 0.5), None, None]
    assert list(dict.fromkeys(row["model"] for row in ours)) == [
        "vanilla-4", "mor-2", "mor-2, lockstep", "vanilla of run", "trained run", "trained run, lockstep",
    ]  # fmt: skip
    rows = {(row["case"], row["model"]): row for row in ours}
    for row in ours:
        assert row["x_vanilla"] > 0 and (row["x_vanilla"] == 1) == (row["model"] == row["vanilla"])
    mor, vanilla = rows["paper's batch", "mor-2"], rows["3 sequences", "vanilla-4"]
    assert mor["sequences"] == 4 and mor["x_vanilla"] == mor["tokens_per_second"] / vanilla["tokens_per_second"]
    assert mor["floor_ms"] == 1e3 * (mor["weight_bytes"] + mor["kv_bytes"]) / 4e12
    same = {row["model"]: row for row in ours if row["case"] == "same bytes"}
    assert same["vanilla-4"]["sequences"] == 4 < same["trained run"]["sequences"]
    assert same["vanilla-4"]["cache_bytes"] <= result["cache_bytes"]
    assert {row["mix"] for row in same.values()} == {"fixed", "forced", "routed"}
    alone, step = rows["3 sequences", "mor-2"], rows["3 sequences", "mor-2, lockstep"]
    assert step["tokens_per_second"] == pytest.approx(3e3 / step["deepest"] / alone["tick_ms"])

    text = report.section("decode", tmp_path)
    assert f"[Chart](../bench/results/{path.stem}.png)" in text
    cases = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][2:]
    assert list(dict.fromkeys(cases)) == [case for case, before in zip(cases, ["", *cases]) if case != before]
    assert text.count("\n| ") == len(result["rows"]) + 2 and "| case | model | sequences | tokens/s |" in text
    printed = capsys.readouterr().out
    assert "mor-2, lockstep" in printed and str(path) in printed


def test_parts_of_a_run(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode, "check", lambda model, mix: None)
    monkeypatch.setattr(decode, "chart", lambda result, path: None)
    assert decode.main([*small, "--only", "paper", "--out", str(tmp_path)], "cpu") == 0
    (path,) = tmp_path.glob("decode-*-partial.json")
    assert [(row["case"], row["model"]) for row in json.loads(path.read_text())["rows"]] == [("paper's batch", "mor-2")]
    assert decode.main([*small, "--quick", "--only", "3", "--out", str(tmp_path)], "cpu") == 0
    assert [(row["case"], row["model"]) for row in json.loads(path.read_text())["rows"]] == [
        ("3 sequences", "vanilla-4"), ("3 sequences", "mor-2"), ("3 sequences", "mor-2, lockstep"),
    ]  # fmt: skip
    assert decode.main([*small, "--only", "nothing like it"], "cpu") == 2
    assert "no such case" in capsys.readouterr().err


def test_a_model_that_fails_its_check_is_not_timed(small, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "chart", lambda result, path: None)
    monkeypatch.setattr(decode.Forced, "_recorded", lambda self, positions, seeds: torch.ones_like(positions))
    assert decode.main([*small, "--only", "mor-2", "--out", str(tmp_path)], "cpu") == 1
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3 and all(row["failed"].startswith("Mismatch: request 1: depths") for row in rows)
    path.rename(tmp_path / "decode-a-card.json")  # a partial one has no table
    line = next(line for line in report.section("decode", tmp_path).splitlines() if "mor-2" in line)
    assert line.startswith("| 3 sequences | mor-2 | - | failed | - |")


def test_a_mix_that_is_not_the_one_asked_for_fails(small, monkeypatch):
    monkeypatch.setattr(decode, "check", lambda model, mix: None)
    monkeypatch.setattr(decode.Forced, "_recorded", lambda self, positions, seeds: torch.ones_like(positions))
    subject = decode.subjects("tiny", "cpu")[-1]
    options = SimpleNamespace(mean=4, sigma=1.0, quick=False, profile=False)
    (row,) = decode.measure(subject, decode.points(subject, False, False)[:1], 4e12, 10**6, options)
    assert row["failed"].startswith("Mismatch: depth 1")


def test_transformers_has_the_same_weights():
    pytest.importorskip("transformers")
    model = tiny()
    for cache in ("dynamic", "static"):
        row = decode.transformers_row(model, "vanilla-5", cache, 5)
        assert row["failed"] is None and row["tokens"] == 5 * decode.SEQUENCES
        assert math.isclose(row["tokens_per_second"], row["tokens"] / row["seconds"])


def test_without_transformers_it_says_so(monkeypatch):
    monkeypatch.setitem(decode.sys.modules, "transformers", None)
    assert decode.transformers_row(tiny(), "vanilla-5", "dynamic", 5)["failed"].startswith(
        "transformers isn't installed"
    )


def test_without_a_gpu_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode.torch.cuda, "is_available", lambda: False)
    assert decode.main(["--out", str(tmp_path)]) == 2
    assert "No CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        decode.main(["--vanilla", "folder"])
