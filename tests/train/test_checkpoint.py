from __future__ import annotations

import json
import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from tiny import EXPERT, TOKEN

from mor_kernels.train import checkpoint


@pytest.fixture
def saved(tmp_path, make_model):
    """A model and optimizer that took a step, saved as step 5."""
    model = make_model(**TOKEN)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(32).view(2, 16)
    model(ids, targets=ids).loss.backward()
    optimizer.step()
    model.router_bias.copy_(torch.tensor([0.25, -0.25]))
    path = checkpoint.save(tmp_path, 5, model, optimizer, {"a": [1, "b"]}, {"t": torch.arange(3)})
    return path, model, optimizer


def fresh(make_model, **changes):
    model = make_model(seed=9, **{**TOKEN, **changes})
    return model, torch.optim.AdamW(model.parameters())


def test_round_trip(saved, make_model):
    path, model, optimizer = saved
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    other, other_optimizer = fresh(make_model)
    step, state, tensors = checkpoint.load(path, other, other_optimizer)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    assert (step, state) == (5, {"a": [1, "b"]}) and torch.equal(tensors["t"], torch.arange(3))
    assert other.router_bias.tolist() == [0.25, -0.25]
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    ours, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, entry in ours["state"].items():
        assert all(torch.equal(entry[key], theirs["state"][index][key]) for key in entry)


def test_is_a_model_folder(saved):
    path, model, _ = saved
    loaded = type(model).from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))


def test_only_the_last_are_kept(saved, tmp_path):
    _, model, optimizer = saved
    for step in (6, 7, 10):
        checkpoint.save(tmp_path, step, model, optimizer, {}, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007", "step-00000010"]
    assert checkpoint.latest(tmp_path).name == "step-00000010"


def test_a_good_checkpoint_is_not_overwritten(saved, tmp_path):
    path, model, optimizer = saved
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="step-00000005: a checkpoint of step 5 exists already"):
        checkpoint.save(tmp_path, 5, model, optimizer, {}, {})
    assert (path / "model.safetensors").read_bytes() == before


def test_latest_passes_over_incomplete_ones(saved, tmp_path):
    path, model, optimizer = saved
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for step in (6, 7, 8):
        checkpoint.save(tmp_path, step, model, optimizer, {}, {}, keep=9)
    with open(tmp_path / "step-00000008" / "trainer.safetensors", "r+b") as file:
        file.truncate(100)
    (tmp_path / "step-00000007" / "model.safetensors").unlink()
    (tmp_path / "step-00000006" / "checkpoint.json").write_text("{")
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / ".tmp-step-00000010").mkdir()
    assert checkpoint.latest(tmp_path) == path
    # They are replaced, and count for nothing when old ones are removed.
    checkpoint.save(tmp_path, 8, model, optimizer, {}, {}, keep=2)
    assert checkpoint.latest(tmp_path).name == "step-00000008" and path.exists()
    assert not (tmp_path / ".tmp-step-00000010").exists()


def index_missing(path):
    (path / "checkpoint.json").unlink()
    return FileNotFoundError, r"checkpoint\.json: not found, so .*step-00000005 is not a complete checkpoint"


def index_damaged(path):
    (path / "checkpoint.json").write_text('{"files": {"a": 1}}')
    return ValueError, r"checkpoint\.json: damaged, expected sizes and hashes"


def index_empty(path):
    (path / "checkpoint.json").write_text('{"files": {}}')
    files = r"config\.json, model\.safetensors, trainer\.json, trainer\.safetensors"
    return ValueError, rf"checkpoint\.json: damaged, .*no {files}"


def index_a_list(path):
    (path / "checkpoint.json").write_text('{"files": []}')
    return ValueError, r"checkpoint\.json: damaged, expected sizes and hashes"


def file_missing(path):
    (path / "model.safetensors").unlink()
    return FileNotFoundError, r"model\.safetensors: not found, expected a file of \d+ bytes"


def file_truncated(path):
    with open(path / "trainer.safetensors", "r+b") as file:
        file.truncate(100)
    return ValueError, r"trainer\.safetensors: damaged, expected \d+ bytes, found 100"


def file_changed(path):
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    message = r"expected SHA-256 \w+, found \w+; remove this folder to go on from the one before"
    return ValueError, r"step-00000005/model\.safetensors: damaged, " + message


@pytest.mark.parametrize("change", [index_missing, index_damaged, index_empty, index_a_list, file_missing,
                                    file_truncated, file_changed])
def test_damaged_checkpoint(saved, make_model, change):
    path, *_ = saved
    assert not checkpoint.incomplete(path.parent)
    kind, message = change(path)
    if change is not file_changed:  # only seen by reading all of it
        assert checkpoint.latest(path.parent) is None
        [(folder, fault)] = checkpoint.incomplete(path.parent).items()
        assert folder == path and re.search(message, fault)
    model, optimizer = fresh(make_model)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(kind, match=message):
        checkpoint.load(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and not optimizer.state


@pytest.mark.parametrize("changes, message", [
    ({"vocab_size": 600}, r"config\.json: checkpoint of another model; vocab_size: expected 512 \(.*\), got 600"),
    ({"hidden_size": 64, "alpha": 0.5}, r"alpha: expected 1\.0 .* got 0\.5; hidden_size: expected 32 .* got 64"),
    (EXPERT, r"router: expected 'token_choice' \(checkpoint\), got 'expert_choice'"),
])
def test_other_model(saved, make_model, changes, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved[0], *fresh(make_model, **changes))


def test_other_optimizer(saved, make_model):
    model, _ = fresh(make_model)
    with pytest.raises(ValueError, match=r"trainer\.json: optimizer state doesn't fit this optimizer"):
        checkpoint.load(saved[0], model, torch.optim.AdamW(list(model.parameters())[:2]))


def test_settings_of_the_optimizer_are_not_loaded(saved, make_model):
    model, _ = fresh(make_model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.7), weight_decay=0.3)
    checkpoint.load(saved[0], model, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.7) and optimizer.param_groups[0]["weight_decay"] == 0.3
    assert optimizer.state


def test_a_pickle_is_not_opened(saved, make_model):
    """Such as an earlier version left it, with a checkpoint.json that had no format."""
    path, model, optimizer = saved
    index = json.loads((path / "checkpoint.json").read_text())
    del index["format"]
    index["files"]["trainer.pt"] = index["files"].pop("trainer.safetensors")
    (path / "trainer.safetensors").rename(path / "trainer.pt")
    (path / "checkpoint.json").write_text(json.dumps(index))
    message = "step-00000005: written by an earlier version of mor-kernels, .* trainer.pt, a pickle"
    # It is not passed over as incomplete either, and so is never replaced.
    for use in (partial(checkpoint.load, path, model, optimizer), partial(checkpoint.latest, path.parent),
                partial(checkpoint.save, path.parent, 5, model, optimizer, {}, {})):
        with pytest.raises(ValueError, match=message):
            use()
    assert (path / "trainer.pt").exists()


def test_a_newer_version(saved, tmp_path):
    path, model, optimizer = saved
    index = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**index, "format": index["format"] + 1, "new": []}))
    with pytest.raises(ValueError, match=r"checkpoint\.json: written by a newer version .* expected format 2, got 3"):
        checkpoint.save(tmp_path, 5, model, optimizer, {}, {})
    (path / "checkpoint.json").write_text(json.dumps({**index, "new": []}))
    assert "unknown 'new'" in checkpoint.incomplete(tmp_path)[path]
