"""What every test shares: seeds, hypothesis settings, and memory that shows when it was read before it was written."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU the kernels run in Triton's interpreter

settings.register_profile(
    "default", deadline=None, max_examples=int(os.environ.get("MOR_EXAMPLES", "25")), derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _deterministic():
    """A fixed seed, and PyTorch's deterministic mode, which also fills uninitialised memory with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
