"""What users of such models have met, on every backend, against float64. Models are as small as can be, one layer that
is applied twice, since Triton's interpreter is slow."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

from mor_kernels.model import MoR, MoRConfig
from mor_kernels.ops import _dispatch
from tests.model.test_model import EXPERT, TINY, TOKEN
from tests.strategies import prefer, targets

SMALL = {**TINY, "num_recursions": 2, "num_hidden_layers": 2, "sharing": "cycle",
         "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}  # fmt: skip
ROUTERS = pytest.mark.parametrize("fields", [EXPERT, TOKEN], ids=["expert", "token"])
every_backend = targets("route")


@pytest.fixture
def small(monkeypatch, device, backend):
    """Makes models whose every operator the backend serves, in float64 where it computes that."""
    prefer(monkeypatch, backend)

    def make(**fields):
        model = MoR(MoRConfig(**{**fields, **SMALL}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_().add_(parameter.dim() == 1)
        return model.to(device, torch.float64 if backend == "eager" else torch.float32)

    return make


def exactly(model, *arguments, **options):
    """A copy of the model in float64, and what it returns."""
    model = copy.deepcopy(model).cpu().double()
    with mock.patch.object(_dispatch, "_default_backend", "eager"):
        return model, model(*(t.cpu() for t in arguments), **options)


def close(got, want):
    """Two layers of about eight roundings each, and sums in any order."""
    roundings = 64 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.cpu().double(), want, rtol=roundings, atol=roundings * want.abs().max().item())


def send_deep(model, deep):
    """Have the router send the tokens ``deep`` to the second recursion, and no other ones."""
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] = -3.0
        model.embed_tokens.weight[deep, 0] = 3.0
        for router in model.routers:
            router.weight.zero_()
        model.routers[-1].weight[-1, 0] = 1.0


@every_backend
@pytest.mark.parametrize("mode", ["threshold", "topk"])
def test_one_token_with_a_negative_logit_goes_no_further(small, device, mode):
    model, x = small(**EXPERT), torch.tensor([[3]], device=device)
    with torch.no_grad():
        model.embed_tokens.weight[3] = 1.0
        for router in model.routers:
            router.weight.fill_(-5 / SMALL["hidden_size"])
        out = model(x, mode=mode, router_logits=True)
        assert out.depths.tolist() == [[1]] and out.router_logits[0, 0, 0].item() == pytest.approx(-5)
        close(out.logits, exactly(model, x, ks=(1, 0), mode="topk")[1].logits)
        for router in model.routers:
            router.weight.zero_()
        assert model(x, mode=mode).depths.tolist() == [[1]]  # 0 isn't positive


@every_backend
def test_auxiliary_router_sends_no_gradient_into_the_model(small, device):
    model = small(**EXPERT, aux="router")
    model(torch.tensor([[1, 2]], device=device), mode="topk").losses["aux"].backward()
    for name, parameter in model.named_parameters():
        got = parameter.grad is not None and parameter.grad.any()
        assert got == name.startswith("aux_routers"), name


@every_backend
@ROUTERS
def test_a_later_token_changes_no_earlier_logit(small, device, fields):
    """One that goes as deep as the other did, and one that goes deeper."""
    model = small(**fields)
    send_deep(model, [2, 4])
    x = torch.tensor([[1, 2, 3], [1, 2, 5], [1, 2, 4]], device=device)
    with torch.no_grad():
        out = model(x, mode="threshold")
        assert out.depths.tolist() == [[1, 2, 1], [1, 2, 1], [1, 2, 2]]
        alone = exactly(model, x[:1, :2], mode="threshold")[1].logits
    close(out.logits[:, :2], alone.expand(3, 2, -1))
    assert len(out.logits[:, 2].unique(dim=0)) == 3


@every_backend
@pytest.mark.parametrize(
    ("fields", "mode"), [(EXPERT, "topk"), (EXPERT, "threshold"), (TOKEN, "topk")], ids=["topk", "threshold", "token"]
)
def test_padding_is_never_kept(small, device, fields, mode):
    """At the right and at the left, where it would go deep."""
    model = small(**fields)
    send_deep(model, [2, 5])
    x = torch.tensor([[1, 2, 5], [5, 1, 2], [1, 3, 2]], device=device)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]], device=device)
    topk = fields is EXPERT and mode == "topk"
    with torch.no_grad():
        out = model(x, attention_mask=mask, ks=(3, 1) if topk else None, mode=mode)
        alone = exactly(model, x[:1, :2], ks=(2, 1) if topk else None, mode=mode)[1].logits
    assert out.depths.tolist() == [[1, 2, 0], [0, 1, 2], [1, 1, 2]]
    assert not out.logits[0, 2:].any() and not out.logits[1, :1].any()
    close(torch.stack((out.logits[0, :2], out.logits[1, 1:])), alone.expand(2, 2, -1))


@every_backend
@ROUTERS
def test_a_row_without_deep_tokens_leaves_the_others_alone(small, device, fields):
    """Their logits, and the gradients of what they lose."""
    model = small(**{**fields, "z_coeff": 0.0, "aux" if fields is EXPERT else "balance": "none"})
    send_deep(model, [2])
    x = torch.tensor([[1, 2], [3, 1], [2, 1]], device=device)
    targets = torch.tensor([[4, 5], [-100, -100], [6, 7]], device=device)
    out = model(x, targets, mode="threshold")
    assert out.depths.tolist() == [[1, 2], [1, 1], [2, 1]]
    others, want = exactly(model, x[[0, 2]], targets[[0, 2]], mode="threshold")
    close(out.logits[[0, 2]], want.logits)
    out.loss.backward()
    want.loss.backward()
    for parameter, other in zip(model.parameters(), others.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        if other.grad is not None:
            close(parameter.grad, other.grad)


@every_backend
@ROUTERS
def test_a_recursion_without_tokens_has_gradients_of_zero(small, device, fields):
    """Zero, not None, so that data-parallel ranks agree on what to reduce."""
    model = small(**fields, lora_rank=1, recursion_encoding=True)
    send_deep(model, [])
    x = torch.tensor([[1]], device=device)
    out = model(x, x, mode="topk", ks=(1, 0) if fields["router"] == "expert_choice" else None)
    assert out.depths.tolist() == [[1]]
    out.loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert any(parameter.grad.any() for parameter in model.lora[0].parameters())
    assert not any(parameter.grad.any() for parameter in model.lora[1].parameters())
    assert model.recursion_encoding.grad.any(1).tolist() == [True, False]


@every_backend
def test_gradient_of_a_shared_layer_is_the_sum_of_both_uses(small, device):
    """As in an unrolled model with two copies of the layer."""
    model, x = small(), torch.tensor([[1, 2]], device=device)
    plain, state = MoR(MoRConfig(**{**SMALL, "num_recursions": 1})), model.state_dict()
    plain = plain.to(device, model.norm.weight.dtype)
    plain.load_state_dict({n: state[n.replace("layers.1.", "layers.0.")] for n in plain.state_dict()})
    plain, out = exactly(plain, x, x)
    out.loss.backward()
    model(x, x).loss.backward()
    for name, parameter in model.layers[0].named_parameters():
        first, second = (layer.get_parameter(name).grad for layer in plain.layers)
        assert first.any() and second.any()
        close(parameter.grad, first + second)


@every_backend
@pytest.mark.parametrize("mode", ["threshold", "topk"])
def test_router_logits_that_are_no_numbers(small, device, mode):
    """The first recursion takes each token all the same, with gate 0; the second one takes none."""
    model, x = small(**EXPERT), torch.tensor([[1, 2]], device=device)
    with torch.no_grad():
        for router in model.routers:
            router.weight.fill_(torch.nan)
        out = model(x, ks=(2, 1) if mode == "topk" else None, mode=mode)
        assert out.depths.tolist() == [[1, 1]]
        skipped = torch.nn.functional.rms_norm(model.embed_tokens(x), (4,), model.norm.weight, model.norm.eps)
    close(out.logits, model.head(skipped).detach().cpu().double())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; what is traced on a CPU is the same")
@every_backend
@ROUTERS
def test_compiles_whole_and_routes_anew(small, device, fields):
    """Another routing recompiles nothing and waits for nothing."""
    if device == "cpu":
        pytest.skip("tests/model/test_cases.py has larger ones there")
    torch._dynamo.reset()
    model = small(**fields)
    send_deep(model, [2, 4])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for again, ids in enumerate(([1, 2, 3, 4], [4, 3, 1, 2])):
        x = torch.tensor([ids], device=device)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=bool(again)):
            torch.cuda.set_sync_debug_mode("error" if again else "default")
            try:
                got = compiled(x, mode="topk")
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert got.depths.tolist() == [[2 - i % 2 for i in ids]]
        close(got.logits, exactly(model, x, mode="topk")[1].logits)
