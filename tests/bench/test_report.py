"""README.md has the tables that the recorded results give, and the tables say what was measured."""

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


def test_readme_is_up_to_date():
    assert report.main(["--check"]) == 0


def test_readme_has_the_sections_to_write():
    assert {"routing", "attn_flops", "kv"} <= {
        found[2] for found in report.SECTION.finditer(report.README.read_text(encoding="utf-8"))
    }


def test_an_outdated_readme_is_told_and_then_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    before = "above\n<!-- bench:routing -->\nold\n<!-- /bench -->\nbelow\n"
    report.README.write_text(before)
    assert report.main(["--check"]) == 1 and "out of date" in capsys.readouterr().err
    assert report.README.read_text() == before
    monkeypatch.setattr(report, "chart", lambda result, path: None)
    assert report.main([]) == 0 and report.main(["--check"]) == 0
    text = report.README.read_text()
    assert text.startswith("above\n") and text.endswith("<!-- /bench -->\nbelow\n") and "old" not in text


def test_without_results_it_says_so(tmp_path):
    assert report.section("routing", tmp_path) == "No result has been recorded yet.\n"


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
