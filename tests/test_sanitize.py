"""The script for compute-sanitizer calls what it should, as far as can be told without a GPU."""

from __future__ import annotations

import pytest
import torch

from mor_kernels.ops._dispatch import unavailable
from tests import sanitize

PARTS = {part for parts in sanitize.PARTS.values() for part in parts} - {sanitize.paged}  # which takes long


@pytest.mark.parametrize("part", sorted(PARTS, key=lambda part: part.__name__), ids=lambda part: part.__name__)
def test_arguments_fit(monkeypatch, part):
    """Of fewer calls than a GPU gets, with what PyTorch computes."""
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    monkeypatch.setattr(sanitize, "BACKEND", "eager")
    for shapes in ("ROWS", "LONG", "DEPTHS", "LANES", "LINEARS", "LAYERS", "LOGITS", "DENSE", "CACHES"):
        monkeypatch.setattr(sanitize, shapes, getattr(sanitize, shapes)[:1])
    torch.use_deterministic_algorithms(False)
    part()


def test_what_is_not_called_is_told(monkeypatch):
    if reason := unavailable("triton", device=sanitize.DEVICE):
        pytest.skip(reason)
    monkeypatch.setitem(sanitize.PARTS, "triton", ())
    with pytest.raises(SystemExit, match=r"not called: add_rms_norm, .*, take_pages_"):
        sanitize.main(["--backend", "triton"])
