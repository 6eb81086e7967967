"""README.md and docs/speed.md have the tables that the recorded results give, and these say what was measured."""

import json

import pytest

from bench import report

ENVIRONMENT = {"card": "A Card", "torch": "2.11", "triton": "3.6", "cuda": "13.0", "driver": "580", "python": "3.12",
               "commit": "0123456789abcdef", "dirty": True, "date": "2026-01-02T03:04:05+00:00"}  # fmt: skip


def row(impl, ms, ours=False, failed=None, case="B2"):
    return {"case": case, "op": "route", "impl": impl, "ours": ours, "bytes": 10, "floor_ms": 0.1, "ms": ms, "p20": ms,
            "p80": ms, "timing": "graph", "error": 0.1, "failed": failed}  # fmt: skip


ROWS = [row("eager gather", 0.5), row("eager index_select", 0.4), row("compile", 0.35), row("triton", 0.125, ours=True)]


def write(folder, rows, name="routing-a-card", complete=True, **more):
    result = {"benchmark": "routing", "environment": ENVIRONMENT, "copy_bandwidth": 3e12, "complete": complete,
              "rows": rows, **more}  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(result))


def sections(page):
    return [found[2] for found in report.SECTION.finditer(page.read_text(encoding="utf-8"))]


def test_the_pages_are_up_to_date():
    assert report.main(["--check"]) == 0


def test_the_pages_have_the_sections_to_write():
    readme, speed = map(sections, report.PAGES)
    assert readme == ["summary"]
    assert sorted(speed) == ["attn_flops", "decode", "kv", "layer", "routing", "scaling", "serve", "train"]


def test_every_full_result_has_its_chart():
    for benchmark in sections(report.PAGES[1]):
        for path in report.results(benchmark, report.RESULTS):
            assert path.with_suffix(".png").exists(), f"{path.stem}: run python bench/report.py"


def test_an_outdated_page_is_told_and_then_written(tmp_path, monkeypatch, capsys):
    pages = [tmp_path / name for name in ("README.md", "speed.md")]
    monkeypatch.setattr(report, "PAGES", pages)
    before = "above\n<!-- bench:routing -->\nold\n<!-- /bench -->\nbelow\n"
    for page in pages:
        page.write_text(before)
    assert report.main(["--check"]) == 1
    assert capsys.readouterr().err.count("out of date") == 2
    assert [page.read_text() for page in pages] == [before, before]
    monkeypatch.setattr(report, "chart", lambda result, path: None)
    assert report.main([]) == 0 and report.main(["--check"]) == 0
    text = pages[1].read_text()
    assert text.startswith("above\n") and text.endswith("<!-- /bench -->\nbelow\n") and "old" not in text


def test_the_summary_has_a_figure_of_each_kind_beside_the_best_rival(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "CARD", "A Card")
    lines = [
        ("attention", "attn_flops", "", "subset forward", "B4 N5"), ("top-k", "routing", "", "route", "B2"),
        ("a step", "train", "", "train step", "mor-2"), ("larger", "train", "size 1.7B", "train step", "mor-2"),
        ("alone", "train", "", "train step", "recursive-2"), ("decoding", "decode", "", "mor-3", "32 sequences"),
        ("decoding", "decode", "", "vanilla-32", "32 sequences"), ("layer", "layer", "", "not measured", "n1"),
    ]  # fmt: skip
    monkeypatch.setattr(report, "SUMMARY", lines)
    write(tmp_path, FLOPS_ROWS, "attn_flops-a-card", benchmark="attn_flops")
    write(tmp_path, ROWS)
    elsewhere = ENVIRONMENT | {"card": "Another", "torch": "2.12"}
    write(tmp_path, [row("eager", 9.0), row("triton", 1.0, ours=True)], "routing-another", environment=elsewhere)
    write(tmp_path, STEP_ROWS, "train-a-card", benchmark="train")
    write(tmp_path, STEP_ROWS, "train-size-1.7b-a-card", benchmark="train", variant="size 1.7B")
    speeds = {"mor-3": 45e3, "vanilla-32": 3e4, "transformers, static cache": 6e3, "transformers, dynamic cache": 5e3}
    decoded = [{"case": "32 sequences", "model": model, "vanilla": "vanilla-32", "failed": None,
                "tokens_per_second": speed} for model, speed in speeds.items()]  # fmt: skip
    write(tmp_path, decoded, "decode-a-card", benchmark="decode")
    assert report.section("summary", tmp_path).splitlines() == [
        "A Card, torch 2.11, Triton 3.6:",
        "",
        "|  | case | ours | best rival | times as fast |",
        "| --- | --- | --- | --- | --- |",
        "| attention | B4 N5 | 250 TFLOP/s | fa4 + lists: 333 TFLOP/s | 0.75 |",
        "| top-k | B2 | 0.125 ms | `torch.compile`: 0.35 ms | 2.80 |",
        "| a step | mor-2 | 161.0 ms, 18.0 GiB | plain PyTorch, compiled: 300.0 ms, 36.0 GiB | 1.86 |",
        "| larger | mor-2 | 161.0 ms, 18.0 GiB | plain PyTorch, compiled: 300.0 ms, 36.0 GiB | 1.86 |",
        "| alone | recursive-2 | 190.0 ms, 24.0 GiB | - | - |",
        "| decoding | mor-3, 32 sequences | 45,000 tokens/s | vanilla-32: 30,000 tokens/s | 1.50 |",
        "| decoding | vanilla-32, 32 sequences | 30,000 tokens/s | transformers, static cache: 6,000 tokens/s | 5.00 |",
    ]


def test_the_summary_shows_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "CARD", "A Card")
    lines = [("top-k", "routing", "", "route", "B2"), ("decoding", "decode", "", "mor-3", "32 sequences")]
    monkeypatch.setattr(report, "SUMMARY", lines)
    write(tmp_path, [row("eager", 0.5), row("triton", None, True, "wrong")])
    decoded = [{"case": "32 sequences", "model": "mor-3", "vanilla": "vanilla-32", "failed": "wrong"}]
    write(tmp_path, decoded, "decode-a-card", benchmark="decode")
    text = report.section("summary", tmp_path)
    assert "| top-k | B2 | failed | eager: 0.5 ms | - |" in text
    assert "| decoding | mor-3, 32 sequences | failed | - | - |" in text


def test_table_of_a_layer_names_liger(tmp_path):
    rows = [row("eager", 0.5), row("compile", 0.4), row("Liger", 0.25), row("triton", 0.125, ours=True)]
    more = [row("Liger", None, failed="out of memory", case="B3"), row("triton", 0.2, ours=True, case="B3")]
    write(tmp_path, rows + more, "layer-a-card")
    text = report.section("layer", tmp_path)
    assert "| route | B2 | 0.125 | 0.1 | 1.25 | 0.5 | 0.4 | 0.25 | 2.00 |" in text
    assert "| route | B3 | 0.2 | 0.1 | 2.00 | - | - | failed | - |" in text


def test_without_results_it_says_so(tmp_path):
    for benchmark in ("routing", "summary"):
        assert report.section(benchmark, tmp_path) == "No result has been recorded yet.\n"


def test_table_of_several_gpus(tmp_path):
    one, two = {"tokens_per_second": 1e5, "efficiency": 1}, {"tokens_per_second": 19e4, "efficiency": 0.95}
    kinds = [(1, "ddp", one), (2, "ddp", two), (2, "fsdp", {"failed": "out of memory"})]
    rows = [{"case": "mor-3", "gpus": gpus, "parallel": kind, "failed": None, **facts} for gpus, kind, facts in kinds]
    result = {"benchmark": "scaling", "environment": ENVIRONMENT, "complete": True, "rows": rows}
    (tmp_path / "scaling-a-card.json").write_text(json.dumps(result))
    text = report.section("scaling", tmp_path)
    for line in ("| mor-3 | 1 | - | 100,000 | 100.0 |", "| mor-3 | 2 | ddp | 190,000 | 95.0 |",
                 "| mor-3 | 2 | fsdp | failed | - |", "A Card, torch 2.11, Triton 3.6; driver 580"):  # fmt: skip
        assert line in text
    assert "[Chart](../bench/results/scaling-a-card.png)" in text


def test_table_takes_the_best_rival(tmp_path):
    write(tmp_path, ROWS)
    text = report.section("routing", tmp_path)
    assert "| route | B2 | 0.125 | 0.1 | 1.25 | 0.4 | 0.35 | 2.80 |" in text
    for fact in ("A Card", "torch 2.11", "3.00 TB/s", "0123456789 with changes", "2026-01-02", "routing-a-card.png"):
        assert fact in text
    assert "not finished" not in text


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([row("eager", 0.4), row("triton", None, True, "wrong")], "| route | B2 | failed | 0.1 | - | 0.4 | - | - |"),
        ([row("eager", 0.4)], "| route | B2 | - | 0.1 | - | 0.4 | - | - |"),
        ([row("eager", None, failed="wrong"), row("ours, eager", 0.2, True)],
         "| route | B2 | 0.2 (ours, eager) | 0.1 | 2.00 | - | - | - |"),
    ],
)  # fmt: skip
def test_what_is_missing_or_failed_is_shown(rows, line, tmp_path):
    write(tmp_path, rows, complete=False)
    text = report.section("routing", tmp_path)
    assert line in text and "not finished" in text


def flops_row(impl, ms, ours=False, failed=None, case="B4 N5", op="causal forward"):
    return row(impl, ms, ours, failed, case) | {"op": op, "flops": 10**12}


FLOPS_ROWS = [
    flops_row("flex", 5.0), flops_row("sdpa flash (FA2)", 4.0), flops_row("flash-attn (FA2)", 2.5),
    flops_row("sdpa cudnn", None, failed="why"), flops_row("fa4", 2.0), flops_row("triton", 2.0, ours=True),
    flops_row("hopper", 1.8, ours=True), flops_row("default", 1.6, ours=True),
    flops_row("flex", 8.0, op="subset forward"), flops_row("flex + mask", 9.0, op="subset forward"),
    flops_row("fa4 + lists", 3.0, op="subset forward"), flops_row("triton", 4.0, ours=True, op="subset forward"),
    flops_row("torch varlen (FA2)", 8.0, op="ragged forward"),
    flops_row("triton", None, True, "wrong", op="ragged forward"),
]  # fmt: skip


def test_operations_have_a_table_of_their_own(tmp_path):
    write(tmp_path, FLOPS_ROWS, "attn_flops-a-card", matmul_flops_per_second=800e12)
    text = report.section("attn_flops", tmp_path)
    for line in (
        "| operator | case | triton, TFLOP/s | hopper | % of matmul | default "
        "| FlexAttention | cuDNN | FA2 | FA4 | x Flex | x best |",
        "| causal forward | B4 N5 | 500 | 556 | 69 | 625 | 200 | failed | 400 | 500 | 2.78 | 1.11 |",
        "| subset forward | B4 N5 | 250 | - | 31 | - | 125 | - | - | - | 2.00 | 0.75 |",
        "| ragged forward | B4 N5 | failed | - | - | - | - | - | 125 | - | - | - |",
    ):
        assert line in text.splitlines()
    assert "matrix product 800 TFLOP/s" in text


def test_a_variant_has_a_table_of_its_own(tmp_path):
    write(tmp_path, ROWS)
    write(tmp_path, ROWS, "routing-size-1.7b-a-card", variant="size 1.7B")
    text = report.section("routing", tmp_path)
    assert text.index("A Card, torch 2.11") < text.index("size 1.7B, A Card, torch 2.11")
    assert text.count("| route | B2 |") == 2 and "(../bench/results/routing-size-1.7b-a-card.png)" in text


def test_partial_results_do_not_count(tmp_path):
    write(tmp_path, ROWS, "routing-a-card-partial")
    assert "No result" in report.section("routing", tmp_path)


def test_a_table_of_bytes_has_rates_and_a_library(tmp_path):
    rows = [row("eager", 0.5), row("FlashInfer", 0.25), row("triton", 0.125, ours=True)]
    rows = [r | {"bytes": 3 * 10**8} for r in rows]
    write(tmp_path, rows, "kv-a-card")
    assert "| route | B2 | 0.125 | 0.1 | 2400 | 80 | 0.5 | - | 0.25 | 2.00 |" in report.section("kv", tmp_path)
    write(tmp_path, [row("eager", 0.5), row("triton", None, True, "wrong")], "kv-a-card")
    assert "| route | B2 | failed | 0.1 | - | - | 0.5 | - | - | - |" in report.section("kv", tmp_path)


def step_row(case, impl, ms, flops, gib, by_kind, ours=True):
    return row(impl, ms, ours, case=case) | {
        "op": "train step", "flops": flops, "floor_ms": flops / 8e11, "tokens": 32768, "parameters": 361_800_000,
        "peak_bytes": gib * 2**30, "start_seconds": 60.0, "by_kind": by_kind, "longest": {"2 x nvjet": ms / 2},
    }  # fmt: skip


def failed_step(case, impl, flops, ours=True):
    return row(impl, None, ours, "wrong", case) | {"op": "train step", "flops": flops, "floor_ms": flops / 8e11}


STEP_ROWS = [
    step_row("vanilla", "plain", 250.0, 80e12, 40, {"matmul": 120.0, "attention": 60.0, "elementwise": 50.0}, False),
    step_row("vanilla", "ours, graph", 200.0, 80e12, 25.25, {"matmul": 120.0, "attention": 40.0, "copies": 1.25}),
    step_row("recursive-2", "ours, graph", 190.0, 80e12, 24, {"matmul": 110.0}),
    step_row("mor-2", "plain", 300.0, 64e12, 36, {"matmul": 95.0, "routing": 70.5}, False),
    step_row("mor-2", "ours, graph", 161.0, 64e12, 18, {"matmul": 95.0, "routing": 5.0}),
    failed_step("mor-3", "plain", 60e12, False),
    step_row("mor-3", "ours, graph", 150.0, 60e12, 16, {"attention": 30.0}),
    failed_step("mor-4", "ours, graph", 59e12),
]


def test_training_steps_have_tables_of_their_own(tmp_path):
    write(tmp_path, STEP_ROWS, "train-a-card", matmul_flops_per_second=800e12)
    lines = report.section("train", tmp_path).splitlines()
    at = lines.index("Where the time goes:")
    assert lines[2:at] == [
        "| model | parameters, M | plain, ms | ours, ms | tokens/s | TFLOP/s | % of matmul | plain, GiB | ours, GiB "
        "| x plain | memory / plain | time / vanilla | FLOPs / vanilla |",
        "| --- " * 13 + "|",
        "| vanilla | 362 | 250.0 | 200.0 | 163,840 | 400 | 50.0 | 40.0 | 25.2 | 1.25 | 0.63 | 1.000 | 1.000 |",
        "| recursive-2 | 362 | - | 190.0 | 172,463 | 421 | 52.6 | - | 24.0 | - | - | 0.950 | 1.000 |",
        "| mor-2 | 362 | 300.0 | 161.0 | 203,528 | 398 | 49.7 | 36.0 | 18.0 | 1.86 | 0.50 | 0.805 | 0.800 |",
        "| mor-3 | 362 | failed | 150.0 | 218,453 | 400 | 50.0 | failed | 16.0 | - | - | 0.750 | 0.750 |",
        "| mor-4 | - | - | failed | - | - | - | - | failed | - | - | - | - |",
        "",
    ]
    assert lines[at + 1 :] == [
        "",
        "| model |  | matmul, ms | attention, ms | routing, ms | elementwise, ms | copies, ms | all, ms |",
        "| --- " * 8 + "|",
        "| vanilla | plain | 120.0 | 60.0 | 0.0 | 50.0 | 0.0 | 230.0 |",
        "| vanilla | ours | 120.0 | 40.0 | 0.0 | 0.0 | 1.2 | 161.2 |",
        "| mor-2 | plain | 95.0 | 0.0 | 70.5 | 0.0 | 0.0 | 165.5 |",
        "| mor-2 | ours | 95.0 | 0.0 | 5.0 | 0.0 | 0.0 | 100.0 |",
        "| mor-3 | ours | 0.0 | 30.0 | 0.0 | 0.0 | 0.0 | 30.0 |",
    ]


def test_training_steps_without_vanilla_or_plain(tmp_path):
    write(tmp_path, [STEP_ROWS[2]], "train-a-card", matmul_flops_per_second=800e12)
    text = report.section("train", tmp_path)
    assert text.endswith("| recursive-2 | 362 | - | 190.0 | 172,463 | 421 | 52.6 | - | 24.0 | - | - | - | - |\n")
    rows = [failed_step("vanilla", "plain", 80e12, False), failed_step("vanilla", "ours, graph", 80e12)]
    write(tmp_path, rows, "train-a-card", matmul_flops_per_second=800e12)
    line = "| vanilla | - | failed | failed | - | - | - | failed | failed | - | - | - | - |\n"
    assert report.section("train", tmp_path).endswith(line)


def test_training_steps_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path, STEP_ROWS, "train-a-card", matmul_flops_per_second=800e12)
    (path, result), *_ = report.results("train", tmp_path).items()
    report.chart(result, path.with_suffix(".png"))
    assert path.with_suffix(".png").stat().st_size > 10_000
