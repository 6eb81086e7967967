"""The README's Python runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 5
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["x"].grad is not None and len(namespace["done"][0].tokens) == 5


def test_every_operator_is_shown():
    from mor_kernels import ops

    shown = set(re.findall(r"\bops\.(\w+)\(", README)) | {"kv_append"}
    assert {"route", "scatter_back", "attention", "attention_varlen", "gather", "pack_depths", "kv_lookup"} <= shown
    assert {"paged_attention", "attention_schedule", "take_pages_", "commit_pages_", "free_pages_"} <= shown
    assert {"depth_step_", "sample", "decode_linear", "decode_qkv_", "advance_"} <= shown
    assert shown <= set(ops.__all__)
