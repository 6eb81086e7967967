"""The examples of docs/examples, compared with loops that say the same, and run as they stand."""

from __future__ import annotations

import importlib
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SIZES = {"vocab_size": 13, "width": 12, "heads": 3, "layers": 4, "length": 10}


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("nano_gpt", "mixture_of_depths", "mixture_of_recursions")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def tiny(kind, **changes):
    """In float64, with weights so large that tokens have scores of either sign, at these seeds."""
    torch.manual_seed(2 if kind.__name__ == "MixtureOfDepths" else 1)
    model = kind(**{**SIZES, **changes}).double()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=1.0 if "router" in name else 0.4)
    return model


def tokens(batch=3):
    return torch.randint(SIZES["vocab_size"], (batch, SIZES["length"]), generator=torch.Generator().manual_seed(1))


def chosen(model, logits, k):
    """The positions, ascending, that stay of those with these logits {position: logit}."""
    if model.training:
        return sorted(sorted(logits, key=lambda i: -logits[i])[:k])
    return [i for i in sorted(logits) if logits[i] > 0]


def plain_depths(model, ids):
    """Mixture-of-Depths, a sequence at a time and a token at a time."""
    x = model.token(ids) + model.position.weight[: ids.shape[1]]
    for block in model.blocks:
        if not hasattr(block, "router"):
            x = block(x)
            continue
        after = x.clone()
        for b, row in enumerate(x):
            logits = {i: float(state @ block.router) for i, state in enumerate(row)}
            kept = chosen(model, logits, round(block.capacity * len(row)))
            if kept:
                for i, made in zip(kept, block.block(row[kept][None])[0]):
                    after[b, i] = row[i] + 2 / (1 + math.exp(-logits[i])) * (made - row[i])
        x = after
    return model.head(model.norm(x))


def plain_recursions(model, ids):
    first, *shared, last = model.blocks
    x = first(model.token(ids) + model.position.weight[: ids.shape[1]])
    after = x.clone()
    for b, row in enumerate(x):
        kept = list(range(len(row)))
        for r, router in enumerate(model.routers):
            logits = {i: float(row[i] @ router) for i in kept}
            kept = chosen(model, logits, len(row) * (3 - r) // 3) if r else kept
            if not kept:
                break
            made = row[kept][None]
            for block in shared:
                made = block(made)
            row = row.clone()
            for i, update in zip(kept, made[0]):
                row[i] = row[i] + 0.1 / (1 + math.exp(-logits[i])) * update
        after[b] = row
    return model.head(model.norm(last(after)))


KINDS = {
    "depths": ("mixture_of_depths", "MixtureOfDepths", plain_depths, {}),
    "all": ("mixture_of_depths", "MixtureOfDepths", plain_depths, {"capacity": 1.0}),
    "recursions": ("mixture_of_recursions", "MixtureOfRecursions", plain_recursions, {}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_loop(examples, kind, training):
    module, name, plain, changes = KINDS[kind]
    model = tiny(getattr(examples[module], name), **changes).train(training)
    with torch.no_grad():
        got, want = model(tokens()), plain(model, tokens())
    # float64 on both sides: only the order of sums differs
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    shares = [block.kept for block in model.blocks[1::2]] if name == "MixtureOfDepths" else model.kept[1:]
    assert all(0 < share < 1 for share in shares) or kind == "all" and training


@pytest.mark.parametrize("kind", ["depths", "recursions"])
def test_later_tokens_change_nothing_where_text_is_written(examples, kind):
    module, name, _, _ = KINDS[kind]
    model = tiny(getattr(examples[module], name))
    ids = tokens(8)
    other = ids.clone()
    other[:, 6:] = (ids[:, 6:] + 1) % SIZES["vocab_size"]
    with torch.no_grad():
        for training in (False, True):
            a, b = (model.train(training)(i) for i in (ids, other))
            # float64: the shapes that the products are computed in may differ, and so the order of their sums
            same = torch.isclose(a[:, :6], b[:, :6], rtol=1e-10, atol=1e-10).all()
            assert same or training
        assert not same  # as top-k does
        assert not torch.isclose(a[:, 6:], b[:, 6:], rtol=1e-3).all()


@pytest.mark.parametrize("kind", ["depths", "recursions"])
def test_no_token_may_go_on(examples, kind):
    """Where no logit is above 0 the plain blocks are left, or the first recursion."""
    module, name, plain, _ = KINDS[kind]
    model = tiny(getattr(examples[module], name)).eval()
    for router in model.routers if kind == "recursions" else [block.router for block in model.blocks[1::2]]:
        torch.nn.init.zeros_(router)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), plain(model, tokens()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["depths", "recursions"])
def test_learns(examples, kind):
    module, name, _, _ = KINDS[kind]
    nano = examples["nano_gpt"]
    model = getattr(examples[module], name)(len(nano.LETTERS), width=24, heads=2, length=32)
    ids = tokens(2)
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())  # without the auxiliary loss
    loss.backward()
    routers = [p for name, p in model.named_parameters() if "router" in name]
    assert len(routers) == (2 if kind == "depths" else 3) and all(p.grad.abs().max() > 1e-8 for p in routers)
    before, after = nano.train(model, 25, batch_size=4)
    assert after < before - 0.5


@pytest.mark.parametrize("name", ["nano_gpt", "mixture_of_depths", "mixture_of_recursions"])
def test_runs_as_a_script(examples, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "2"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"held-out loss (\S+) before, (\S+) after 2 steps", printed).groups())
    assert after < before
    assert len(re.findall(r"\d+%", printed)) == {"nano_gpt": 0, "mixture_of_depths": 2}.get(name, 3)


def test_the_page_shows_what_the_examples_say():
    page = (EXAMPLES.parent / "own_model.md").read_text(encoding="utf-8")
    code = {line.strip() for path in EXAMPLES.glob("*.py") for line in path.read_text(encoding="utf-8").splitlines()}
    shown = [line.strip() for block in re.findall(r"```python\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(shown) >= 20 and not [line for line in shown if line not in code | {"...", ""}]
