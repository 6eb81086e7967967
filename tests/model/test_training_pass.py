"""What a training step adds to the forward pass: a loss without logits, compiled rows, activations computed anew."""

from __future__ import annotations

import pytest
import torch

from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train.passes import parameters_in
from tests.model.test_model import EXPERT, KV, TINY, TOKEN

ROUTERS = pytest.mark.parametrize("fields", [{"num_recursions": 2, "num_hidden_layers": 6}, EXPERT, TOKEN],
                                  ids=["none", "expert", "token"])  # fmt: skip


def test_loss_under_autocast():
    model = MoR(MoRConfig(**TINY, **EXPERT))
    x = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lean, full = (model.train()(x, x, logits=logits) for logits in (False, True))
    assert lean.loss.dtype == torch.float32
    torch.testing.assert_close(lean.loss, full.loss, rtol=2**-8, atol=0)  # logits were rounded to bf16 in both
    lean.loss.backward()
    assert model.embed_tokens.weight.grad.dtype == torch.float32


def step(model, x, dtype=torch.float64):
    model.zero_grad()
    with parameters_in(model, dtype):
        out = model(x, x, logits=False)
        out.loss.backward()
    return [out.loss.detach(), out.depths, *(parameter.grad for parameter in model.parameters())]


def same(one, other):
    for a, b in zip(one, other, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@ROUTERS
@pytest.mark.parametrize(
    ("kv", "tied"), [*((kv, False) for kv in KV), (KV[0], True)], ids=[*("-".join(kv.values()) for kv in KV), "tied"]
)
def test_activation_checkpointing_changes_nothing(fields, kv, tied):
    """Not a bit, and not a token's depth; the first forward's activations are gone when the backward pass begins."""
    torch.manual_seed(0)
    model = MoR(MoRConfig(**TINY, **fields, **kv, lora_rank=2, recursion_encoding=True)).double()
    if tied:
        for router in model.routers:
            torch.nn.init.zeros_(router.weight)
    x = torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(0))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        want, kept = step(model, x), sum(saved)
    model.activation_checkpointing = True
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        model(x, x, logits=False)
        assert sum(saved) < kept / 2
    same(step(model, x), want)


def test_parameters_in_another_dtype():
    torch.manual_seed(0)
    model = MoR(MoRConfig(**TINY, **EXPERT))
    x = torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(0))
    before = dict(model.named_parameters())
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].dtype))
    half = MoR(model.config)
    half.load_state_dict(model.state_dict())
    half.bfloat16()
    want = half(x, x, logits=False)
    want.loss.backward()
    got = step(model, x, torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert torch.equal(got[0], want.loss) and torch.equal(got[1], want.depths)
    for (name, parameter), other in zip(model.named_parameters(), half.parameters(), strict=True):
        assert parameter is before[name] and parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, other.grad.float()), name
    with pytest.raises(RuntimeError, match="stop"), parameters_in(model, torch.bfloat16):
        raise RuntimeError("stop")
    assert dict(model.named_parameters()) == before


def test_bounds_of_token_choice():
    """A static size in place of a number that is read from the device gives the same; too small a one, no number."""
    torch.manual_seed(0)
    for kv in KV:
        model = MoR(MoRConfig(**TINY, **TOKEN, **kv)).double()
        x = torch.randint(17, (3, 16), generator=torch.Generator().manual_seed(0))
        want = step(model, x)
        bounds = model.bounds(x)
        counts = [int((want[1] > r).sum()) for r in range(3)]
        assert bounds[0] == 48 and 48 > counts[1] > counts[2] > 0
        assert all(bound % 3 == 0 and count <= bound < count + 3 for bound, count in zip(bounds, counts))
        model.zero_grad()
        out = model(x, x, logits=False, bounds=bounds)
        out.loss.backward()
        got = [out.loss.detach(), out.depths, *(parameter.grad for parameter in model.parameters())]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        for few in ((48, counts[1] - 1, 0), (47, 40, 30), (0, 0, 0)):
            assert model(x, x, bounds=few).loss.isnan()
    for few in ((48, 48), (49, 1, 1), (48, 3, 4), (48, 1.5, 1), (48, 3, -1)):
        with pytest.raises(ValueError, match="bounds: expected 3 non-increasing numbers, the first at most 48, got"):
            model(x, bounds=few)
    with pytest.raises(ValueError, match="bounds: expected none but for token_choice"):
        MoR(MoRConfig(**TINY, **EXPERT))(x, bounds=(48, 40, 30))


def test_a_layer_keeps_no_norms_and_no_gated_values():
    """But its input, what follows attention, and gate and up; and what attention keeps."""
    config = MoRConfig(**{**TINY, "hidden_size": 56, "intermediate_size": 48, "num_hidden_layers": 3})
    model = MoR(config)
    x, add = (torch.randn(2, 10, 56, requires_grad=True) for _ in range(2))
    positions = torch.arange(10).expand(2, 10)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        model.layers[0](x, add, positions, lambda project, heads, *_: project()[..., :heads, :])
    sizes = [t.numel() // 20 for t in kept.values() if t.shape[0] == 20]
    heads = config.num_attention_heads * config.head_dim
    assert sorted(sizes) == sorted([1, 1, 56, 56, 2 * 48, heads]), sizes
