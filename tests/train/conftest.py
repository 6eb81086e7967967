from __future__ import annotations

import pytest
import torch
from tiny import SMALL

from mor_kernels.train import TrainConfig, prepare


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The language reference of Python, prepared with a vocabulary of 512 in several shards."""
    directory = tmp_path_factory.mktemp("data") / "tokens"
    prepare("python-docs", directory, vocab_size=512, shard_tokens=50_000)
    return directory


@pytest.fixture
def make_model():
    from mor_kernels.model import MoR, MoRConfig

    def make(seed=0, **changes):
        torch.manual_seed(seed)
        return MoR(MoRConfig(**{**SMALL, **changes}))

    return make


@pytest.fixture
def make_config(data, tmp_path):
    def make(**changes):
        default = {"data": str(data), "out": str(tmp_path / "out"), "steps": 8, "batch_size": 2, "sequence_length": 32,
                   "log_every": 1, "eval_every": 0, "checkpoint_every": 4, "progress": False,
                   "device": "cpu"}  # fmt: skip
        return TrainConfig(**{**default, **changes})

    return make
