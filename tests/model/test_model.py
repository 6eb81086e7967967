"""The assembled model against the independent reference: logits, depths, losses and every gradient, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.convert import separate
from reference.model import ReferenceMoR, random_state

TINY = {
    "vocab_size": 17,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
EXPERT = {"router": "expert_choice", "num_recursions": 3, "num_hidden_layers": 8, "z_coeff": 0.01, "aux_coeff": 0.1}
TOKEN = {"router": "token_choice", "num_recursions": 3, "num_hidden_layers": 8, "z_coeff": 0.01}
AT_STATE = {"router_temperature": 2.0, "router_temperature_at": "state"}
KV = [{"kv": "recursion_wise"}, {"kv": "shared"}, {"kv": "hybrid"}, {"kv": "hybrid", "hybrid_base": "latest"}]


def variants():
    """A covering choice of the switches: every value of each, and every pair of router kind and key/value strategy."""
    for router, kv in itertools.product((EXPERT, TOKEN), KV):
        yield {**router, **kv}
    for kv in KV:
        yield {"num_recursions": 2, "num_hidden_layers": 6, **kv}  # fixed depth
    yield {"num_hidden_layers": 3}  # vanilla
    yield {"num_hidden_layers": 3, "sharing": "cycle", "tie_word_embeddings": False}
    for sharing, router, kv in itertools.product(("cycle", "sequence", "middle_sequence"), (EXPERT, TOKEN), KV[:2]):
        yield {**router, **kv, "sharing": sharing, "num_hidden_layers": 8 if "middle" in sharing else 6}
    for arch in ("mlp", "wide_mlp"):
        yield {**EXPERT, "router_arch": arch}
        yield {**EXPERT, "router_arch": arch, "aux": "router", "router_temperature": 2.0}
        yield {**TOKEN, "router_arch": arch}
    for change in (
        {"residual": "delta"},
        {"router_activation": "tanh", "alpha": 1.0},
        {"router_activation": "none", "router_temperature": 0.5},
        {"aux": "router"},
        {"aux": "none"},
        {"capacities": (1.0, 0.9, 0.3)},
        {"rank": "score"},
        {"lora_rank": 2, "recursion_encoding": True},
        {"gate": "none", "router_arch": "mlp", "router_expansion": 3, **AT_STATE},
        {"aux": "router", **AT_STATE, "share_norms": False},
        {"lora_rank": 2, "kv": "shared", "sharing": "sequence", "num_hidden_layers": 6},
    ):
        yield {**EXPERT, **change}
    for change in (
        {"gate": "every_step"},
        {"gate": "every_step", "kv": "shared"},
        {"router_activation": "sigmoid", "alpha": 0.5},
        {"balance": "loss_free"},
        {"balance": "none"},
        {"balance_scope": "batch"},
        {"gate": "none", "share_norms": False, "sharing": "sequence", "num_hidden_layers": 6},
        {"lora_rank": 2, "recursion_encoding": True, "kv": "hybrid"},
    ):
        yield {**TOKEN, **change}


def name(fields):
    shown = {k: v for k, v in fields.items() if k not in ("num_hidden_layers", "z_coeff", "aux_coeff")}
    return "-".join(str(v) for v in shown.values())


MASKS = {
    "full": None,
    "ragged": torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 1, 0, 0], [0] * 9]
    ).bool(),
}


def pair(fields, seed=0):
    config = MoRConfig(**TINY, **fields)
    state = random_state(config.to_dict(), seed)
    model = MoR(config).double()
    model.load_checked(state, "random_state")
    reference = {key: value.clone().requires_grad_(key != "router_bias") for key, value in state.items()}
    return model, ReferenceMoR(config.to_dict(), reference), reference


def modes():
    """Every variant in training mode, and those with two modes in the other one as well."""
    for fields in variants():
        yield pytest.param(fields, "topk", id=f"{name(fields)}-topk")
        if fields.get("router") == "expert_choice":
            yield pytest.param(fields, "threshold", id=f"{name(fields)}-threshold")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("fields", "mode"), list(modes()))
def test_equals_reference(fields, mode, mask):
    model, oracle, weights = pair(fields)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY["vocab_size"], (4, 9), generator=generator)
    targets = torch.randint(TINY["vocab_size"], (4, 9), generator=generator)
    targets[0, 3] = -100
    mask = MASKS[mask]

    got = model(tokens, targets, attention_mask=mask, mode=mode)
    want = oracle.forward(tokens, targets, attention_mask=mask, mode=mode)

    assert torch.equal(got.depths, want.depths)
    if fields.get("router"):
        assert len(set(got.depths.unique().tolist()) - {0}) > 1, "the case is too tame: depths don't vary"
    # float64 on both sides: only the order of sums differs
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-10, atol=1e-12)
    assert set(want.losses) - set(got.losses) == set()
    for key, value in want.losses.items():
        torch.testing.assert_close(got.losses[key], value.double(), rtol=1e-9, atol=1e-12, msg=key)

    lean = model(tokens, targets, attention_mask=mask, mode=mode, logits=False)  # its gradients are compared
    assert lean.logits is None
    torch.testing.assert_close(lean.loss, got.loss, rtol=1e-12, atol=0)
    lean.loss.backward()
    want.loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    assert {key for key, gradient in gradients.items() if gradient is None} <= {
        key for key in weights if weights[key].grad is None or not weights[key].grad.any()
    }
    present = {key: gradient for key, gradient in gradients.items() if gradient is not None}
    for key, gradient in separate(present, model.config).items():
        expected = torch.zeros_like(gradient) if weights[key].grad is None else weights[key].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-10, msg=f"gradient of {key}")


@pytest.mark.parametrize("mode", ["topk", "threshold"])
@pytest.mark.parametrize(
    "fields",
    [EXPERT, {**EXPERT, "aux": "router", "router_arch": "mlp", "router_temperature": 2.0}, TOKEN,
     {**TOKEN, "balance": "loss_free"}, {"num_hidden_layers": 3}],
    ids=name,
)  # fmt: skip
def test_router_logits_are_what_the_reference_chose_by(fields, mode):
    model, oracle, _ = pair(fields)
    tokens = torch.randint(TINY["vocab_size"], (4, 9), generator=torch.Generator().manual_seed(1))
    mask = MASKS["ragged"]
    got = model(tokens, attention_mask=mask, mode=mode, router_logits=True)
    assert model(tokens, attention_mask=mask, mode=mode).router_logits is None
    if "router" not in fields:
        assert got.router_logits is None
        return
    want = torch.full((*tokens.shape, 3), torch.nan, dtype=torch.float64)
    for row, real, ids in zip(want, mask, tokens):
        columns = real.nonzero()[:, 0]
        if not len(columns):
            continue
        trace = oracle.run_sequence(ids[columns], mode, model.kept(9))
        if trace.choice is not None:
            row[columns] = trace.choice.logits[0].detach()
        auxiliary = fields.get("aux") == "router" and mode == "threshold"
        for r, logits in enumerate(trace.aux_logits if auxiliary else trace.router_logits):
            row[columns[trace.candidates[r]], r] = logits.detach()
    # float64 on both sides: only the order of sums differs
    torch.testing.assert_close(got.router_logits, want, rtol=1e-9, atol=1e-12, equal_nan=True)
