"""Faults that users of such models have met: sharing, padding, causality, empty recursions, saving, compilation."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mor_kernels.model import MoR, MoRConfig
from reference.model import ReferenceMoR, random_state
from tests.model.test_model import EXPERT, KV, TINY, TOKEN, pair

ROUTERS = pytest.mark.parametrize("fields", [EXPERT, TOKEN], ids=["expert", "token"])
STRATEGIES = pytest.mark.parametrize("kv", KV, ids=lambda kv: "-".join(kv.values()))


def tokens(batch=3, length=9, seed=1):
    return torch.randint(TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def test_shared_layers_are_one_tensor(tmp_path):
    """Two recursions, one set of weights: the gradient is the sum of both uses, after any way of moving the model."""
    config = MoRConfig(**TINY, num_recursions=2, num_hidden_layers=2, sharing="cycle")
    model = MoR(config)
    model.save_pretrained(tmp_path)
    copies = [copy.deepcopy(model).double(), MoR.from_pretrained(tmp_path).double(), model.bfloat16().float().double()]
    for other in copies:
        names = [n for n, _ in other.named_parameters(remove_duplicate=False) if "qkv_proj" in n]
        assert names == ["layers.0.self_attn.qkv_proj.weight"]
        weights = [other.layers[layers[0]].self_attn.qkv_proj.weight for layers in config.recursion_layers]
        assert weights[0].data_ptr() == weights[1].data_ptr()

        # an unrolled model with two copies of the layer: its two gradients add up to the shared one's
        plain = MoR(MoRConfig(**TINY, num_hidden_layers=2, sharing="cycle")).double()
        state = other.state_dict()
        plain.load_state_dict({n: state[n.replace("layers.1.", "layers.0.")] for n in plain.state_dict()})
        x = tokens()
        other(x, x).loss.backward()
        plain(x, x).loss.backward()
        for name, parameter in other.layers[0].named_parameters():
            both = [plain.layers[i].get_parameter(name).grad for i in (0, 1)]
            torch.testing.assert_close(parameter.grad, both[0] + both[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("sharing", "layers", "unrolled"),
    [
        ("cycle", 9, ((0, 1, 2), (0, 1, 2), (0, 1, 2))),
        ("sequence", 9, ((0, 0, 0), (1, 1, 1), (2, 2, 2))),
        ("middle_cycle", 8, ((1, 2), (1, 2), (1, 2))),
        ("middle_sequence", 8, ((1, 1), (1, 2), (2, 2))),
    ],
)
def test_sharing(sharing, layers, unrolled):
    config = MoRConfig(**TINY, num_recursions=3, num_hidden_layers=layers, sharing=sharing)
    assert config.recursion_layers == unrolled


BAD_CONFIGS = [
    ({"num_recursions": 4, "num_hidden_layers": 32}, "num_hidden_layers: expected a depth .* nearest 30 or 34, got 32"),
    ({"num_recursions": 3, "num_hidden_layers": 2}, "num_hidden_layers: expected a depth .* nearest 5, got 2"),
    ({**EXPERT, "capacities": (1.0, 0.5)}, r"capacities: expected 3 numbers, one a recursion, got \(1.0, 0.5\)"),
    ({**EXPERT, "capacities": (1.0, 0.5, 0.6)}, r"capacities\[2\]: expected at most capacities\[1\] = 0.5"),
    ({**EXPERT, "capacities": (1.0, 1.5, 0.6)}, r"capacities\[1\]: expected a number in \(0, 1\], got 1.5"),
    ({**EXPERT, "capacities": (0.9, 0.5, 0.3)}, r"capacities\[0\]: expected 1.0, since every token"),
    ({"sharing": "all"}, "sharing: expected one of cycle, middle_cycle, sequence, middle_sequence, got 'all'"),
    ({**TOKEN, "router_activation": "tanh"}, r"router_activation: expected one of \('softmax', 'sigmoid'\)"),
    ({"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of num_attention_heads 6, got 4"),
    ({"head_dim": 5}, "head_dim: expected an even number, got 5"),
    ({"num_recursions": 0}, "num_recursions: expected an integer of at least 1, got 0"),
    ({"router_temperature": 0.0}, "router_temperature: expected a number > 0, got 0.0"),
    ({"num_recursions": 3, "num_hidden_layers": 1}, "num_hidden_layers: expected a depth .* nearest 5, got 1"),
    ({"alpha": "x"}, "alpha: expected a number, got 'x'"),
    ({"lora_rank": 1.5}, "lora_rank: expected an integer of at least 0, got 1.5"),
    ({"z_coeff": float("nan")}, "z_coeff: expected a number, got nan"),
    ({"vocab_size": True}, "vocab_size: expected an integer of at least 1, got True"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected True or False, got 'no'"),
    ({**EXPERT, "capacities": 0.5}, "capacities: expected a number for each recursion, got 0.5"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS, ids=[m[:40] for _, m in BAD_CONFIGS])
def test_impossible_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        MoRConfig(**{**TINY, "num_hidden_layers": 5, **fields})


def test_sizes_by_name():
    with pytest.raises(ValueError, match="num_hidden_layers: expected a depth .* nearest 30 or 34, got 32"):
        MoRConfig.from_size("360M", num_recursions=4)
    assert MoRConfig.from_size("360M", num_recursions=4, num_hidden_layers=34).num_unique_layers == 10
    with pytest.raises(ValueError, match="size: expected one of 135M, 360M, 730M, 1.7B, got '7B'"):
        MoRConfig.from_size("7B")
    with pytest.raises(ValueError, match="config: expected known fields only, got also depth"):
        MoRConfig.from_dict({"depth": 3})


def test_capacity_warmup():
    config = MoRConfig(**TINY, **EXPERT, cap_warmup_steps=10)
    assert config.kept(9) == (9, 6, 3) and config.kept(9, 0) == (9, 9, 9) and config.kept(9, 10) == (9, 6, 3)
    assert config.kept(300, 5) == (300, 250, 200)  # half way down
    assert config.kept(1000, 2) == (1000, 968, 936)  # a cosine: (1 + cos 36 degrees) / 2 = 0.905 of the way up
    assert config.kept(2048) == (2048, 1365, 682) and config.kept(1) == (1, 0, 0)
    assert MoRConfig(**TINY, **EXPERT | {"capacities": (1, 0.29, 0.29)}).kept(100) == (100, 29, 29)


BAD_INPUTS = [
    (lambda m, x: m(x.float()), "input_ids: expected int64 or int32 of shape"),
    (lambda m, x: m(x[0]), "input_ids: expected int64 or int32 of shape"),
    (lambda m, x: m(tokens(1, 33)), "input_ids: expected at most 32 positions, got 33"),
    (lambda m, x: m(x, x[:2]), r"targets: expected the shape of input_ids, \(3, 9\), got \(2, 9\)"),
    (lambda m, x: m(x, attention_mask=x[:, :2]), "attention_mask: expected the shape of input_ids"),
    (lambda m, x: m(x, x.tolist()), r"targets: expected the shape of input_ids, \(3, 9\), got list"),
    (lambda m, x: m(x > 1), "input_ids: expected int64 or int32 of shape"),
    (lambda m, x: m([1, 2]), "input_ids: expected int64 or int32 of shape"),
    (lambda m, x: m(x + 9), "input_ids: expected ids from 0 to 16, below vocab_size, got (1|2)"),
    (lambda m, x: m(x - 100), "input_ids: expected ids from 0 to 16, below vocab_size, got -"),
    (lambda m, x: m(x, x - 101), "targets: expected -100 or ids from 0 to 16, below vocab_size, got -"),
    (lambda m, x: m(x, -torch.ones_like(x)), "targets: expected -100 or ids from 0 to 16, below vocab_size, got -1"),
    (lambda m, x: m(x, x.int()), "targets: expected int64, got torch.int32"),
    (lambda m, x: m(x, ks=(9, 3.5, 3)), "ks: expected 3 non-increasing numbers, the first 9"),
    (lambda m, x: m(x, ks=9), "ks: expected 3 non-increasing numbers, the first 9, got 9"),
    (lambda m, x: m(x, ks=(9, 6, 3), mode="threshold"), "ks: expected none but for expert_choice in mode 'topk'"),
    (lambda m, x: m(x, mode="greedy"), "mode: expected 'topk' or 'threshold', got 'greedy'"),
    (lambda m, x: m(x, ks=(9, 3, 4)), "ks: expected 3 non-increasing numbers, the first 9"),
]


@pytest.mark.parametrize(("call", "message"), BAD_INPUTS, ids=[m[:40] for _, m in BAD_INPUTS])
def test_bad_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call(MoR(MoRConfig(**TINY, **EXPERT)), tokens())


@ROUTERS
@STRATEGIES
def test_a_later_token_changes_no_earlier_logit(fields, kv):
    model, _, _ = pair({**fields, **kv})
    x = tokens()
    y = x.clone()
    y[:, 6:] = (y[:, 6:] + 1) % TINY["vocab_size"]
    with torch.no_grad():
        a, b = model.eval()(x), model(y)
    assert torch.equal(a.depths[:, :6], b.depths[:, :6])
    # the packed batch has other sizes, so sums may be ordered otherwise
    torch.testing.assert_close(a.logits[:, :6], b.logits[:, :6], rtol=1e-12, atol=1e-12)
    assert not torch.equal(a.depths, b.depths)


@ROUTERS
@STRATEGIES
@pytest.mark.parametrize("mode", ["topk", "threshold"])
def test_padding_and_batch_mates_change_nothing(fields, kv, mode):
    """Each row alone equals it in a batch, right-padded and left-padded."""
    model, _, _ = pair({**fields, **kv})
    x = tokens(3, 9)
    lens = [9, 4, 1]
    right = torch.arange(9) < torch.tensor(lens)[:, None]
    left = right.flip(1)
    shifted = torch.stack([row.roll(9 - n) for row, n in zip(x, lens)])
    topk = mode == "topk" and fields["router"] == "expert_choice"
    ks = (9, 6, 3) if topk else None
    with torch.no_grad():
        a = model(x, attention_mask=right, ks=ks, mode=mode)
        b = model(shifted, attention_mask=left, ks=ks, mode=mode)
        for row, n in enumerate(lens):
            alone = model(x[row : row + 1, :n], ks=(n, min(6, n), min(3, n)) if topk else None, mode=mode)
            assert torch.equal(a.depths[row, :n], alone.depths[0]) and torch.equal(
                b.depths[row, 9 - n :], alone.depths[0]
            )
            assert not a.depths[row, n:].any() and not b.depths[row, : 9 - n].any()
            for logits in (a.logits[row, :n], b.logits[row, 9 - n :]):
                torch.testing.assert_close(logits, alone.logits[0], rtol=1e-12, atol=1e-12)
            assert not a.logits[row, n:].any()


def test_loss_of_the_language_model_alone_reaches_kept_logits():
    model, _, _ = pair({**EXPERT, "aux": "none", "z_coeff": 0.0})
    x = tokens()
    model(x, x).loss.backward()
    assert all(router.weight.grad.any() for router in model.routers)


@pytest.mark.parametrize(
    "extra",
    [{}, {"lora_rank": 2, "recursion_encoding": True}, {"router_arch": "mlp"}, {"aux": "router"}],
    ids=["plain", "relaxed", "mlp", "aux_router"],
)
def test_recursions_without_tokens_still_have_gradients(extra):
    """Zero, not None, so that data-parallel ranks agree on what to reduce."""
    for fields, length in ((EXPERT, 1), (TOKEN, 5)):
        model, _, _ = pair({**fields, **extra})
        with torch.no_grad():
            if fields is TOKEN and "router_arch" in extra:
                model.routers[0].down.weight.zero_()
            elif fields is TOKEN:  # every token takes one recursion only
                model.routers[0].weight[1:] = model.routers[0].weight[0]
        x = tokens(2, length)
        out = model(x, x, mode="topk")
        assert out.depths.eq(1).all()
        out.loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []


@ROUTERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close_to_float64(fields, dtype):
    """Logits within 64 roundings of dtype: eight layers of about eight each, from the same rounded weights."""
    config = MoRConfig(**TINY, **fields)
    state = {n: t.to(dtype).double() if n != "router_bias" else t for n, t in random_state(config.to_dict(), 3).items()}
    model = MoR(config)
    model.load_checked(state, "state")
    model.to(dtype)
    x = tokens(2, 8)
    exact = ReferenceMoR(config.to_dict(), state).forward(x, mode="threshold")
    got = model.eval()(x)
    same = (got.depths == exact.depths).all(1)  # a logit near the threshold may fall on the other side
    assert same.any()
    error = (got.logits.double() - exact.logits)[same].abs().max() / exact.logits.abs().max()
    assert error < 64 * torch.finfo(dtype).eps


@ROUTERS
@STRATEGIES
def test_autocast_trains(fields, kv):
    model = MoR(MoRConfig(**TINY, **{**fields, **kv}))
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, x)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@ROUTERS
@STRATEGIES
def test_compiles_whole_and_routes_anew_without_recompiling(fields, kv):
    torch._dynamo.reset()
    model, _, _ = pair({**fields, **kv, "num_recursions": 2, "num_hidden_layers": 4})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        x = tokens(seed=seed)
        with torch._dynamo.config.patch(error_on_recompile=seed == 2):
            got = compiled(x, x, mode="topk")
        want = model(x, x, mode="topk")
        assert torch.equal(got.depths, want.depths)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(out.loss, model.parameters()) for out in (got, want)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_loss_free_balancing_raises_what_is_chosen_too_little():
    model = MoR(MoRConfig(**TINY, **TOKEN, balance="loss_free", bias_update_rate=0.5))
    model.update_router_bias(torch.tensor([[1, 2, 2, 3, 3, 3, 0]]))
    assert model.router_bias.tolist() == [0.5, 0.0, -0.5]  # counts 1, 2, 3 around their mean
    model.router_bias[0] = 0.1234567
    assert torch.equal(model.router_bias, copy.deepcopy(model).to(torch.bfloat16).router_bias)  # stays in fp32


def test_saving_and_loading(tmp_path):
    model, _, _ = pair({**TOKEN, "balance": "loss_free", "lora_rank": 2, "recursion_encoding": True})
    model.float().save_pretrained(tmp_path)
    again = MoR.from_pretrained(tmp_path)
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "modeling_mor.py"]
    other, _, _ = pair({**TOKEN, "balance": "none"})
    other.save_pretrained(tmp_path / "other")
    model.save_pretrained(tmp_path / "other")  # over another model's files
    assert MoR.from_pretrained(tmp_path / "other").config == model.config
    model.to(torch.bfloat16).save_pretrained(tmp_path / "other")
    assert MoR.from_pretrained(tmp_path / "other").norm.weight.dtype == torch.bfloat16

    with pytest.raises(FileNotFoundError, match=r"config.json: expected a saved model's file, found none"):
        MoR.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"model.safetensors: embed_tokens.weight: expected shape \(18, 12\), got \(17, 12\)"
    ):
        MoR.from_pretrained(tmp_path, vocab_size=18)
    with pytest.raises(ValueError, match=r"without \[\], besides \['layers.3.input_layernorm.weight'"):
        MoR.from_pretrained(tmp_path, sharing="cycle", num_hidden_layers=9, lora_rank=0)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="model.safetensors: expected a safetensors file, got a corrupt one"):
        MoR.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: expected a model's JSON configuration"):
        MoR.from_pretrained(tmp_path)


def test_metrics():
    model, _, _ = pair(EXPERT)
    with torch.no_grad():
        for router in model.routers[1:]:
            router.weight.zero_()  # ties: the first k are kept, and no logit is positive
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    metrics = model(tokens(2), attention_mask=mask, mode="topk").metrics
    # recursion 2 keeps 6 of 9 and 4 of 4 candidates, recursion 3 keeps 3 of 6 and 3 of 4; all are predicted to stop
    assert metrics["sampling_accuracy"].item() == pytest.approx((3 / 13 + 4 / 10) / 2)
    assert metrics["dead_token_ratio"].item() == pytest.approx(6 / 9)
    shorter = torch.arange(9) < torch.tensor([[8], [4]])  # at the last position there is no token
    metrics = model(tokens(2), attention_mask=shorter, mode="topk").metrics
    assert metrics["dead_token_ratio"].item() == pytest.approx(5 / 8)

    model, _, _ = pair({**TOKEN, "router_activation": "sigmoid"})
    out = model(tokens(2), attention_mask=mask)
    counts = torch.bincount(out.depths.flatten(), minlength=4)[1:].double()
    assert out.metrics["max_vio"].item() == pytest.approx((counts.max() / counts.mean() - 1).item())
    with torch.no_grad():
        model.routers[0].weight.zero_()
    assert model(tokens(2), attention_mask=mask).metrics["entropy"].item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("mode", ["topk", "threshold"])
@STRATEGIES
@pytest.mark.parametrize("recursion", [0, 1])
@pytest.mark.parametrize("aux", ["none", "router"])
def test_router_logits_that_are_no_numbers(kv, recursion, mode, aux):
    """The first recursion takes every token all the same, with gate 0; later ones take none."""
    model, oracle, weights = pair({**EXPERT, **kv, "aux": aux, "z_coeff": 0.0})
    with torch.no_grad():
        model.routers[recursion].weight.fill_(torch.nan)
        oracle.weights[f"routers.{recursion}.weight"] = torch.full_like(model.routers[recursion].weight, torch.nan)
        got, want = model(tokens(), mode=mode), oracle.forward(tokens(), mode=mode)
    assert got.logits.isfinite().all() and torch.equal(got.depths, want.depths)
    assert got.depths.eq(1).all() == (recursion == 1)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-9, atol=1e-10)


def test_any_positive_logit_goes_on():
    model = MoR(MoRConfig(**TINY, **EXPERT))
    with torch.no_grad():
        model.routers[1].weight.fill_(1.0)
        states = torch.tensor([[1e-30], [0.0], [-1e-30]]).expand(-1, TINY["hidden_size"])
        assert model.goes_on(1, states).tolist() == [True, False, False]


def test_a_term_with_coefficient_zero_is_left_out():
    model, _, _ = pair({**EXPERT, "z_coeff": 0.0})
    with torch.no_grad():
        model.routers[1].weight.mul_(1e300)
    assert model(tokens(), tokens()).loss.isfinite()


@ROUTERS
@pytest.mark.parametrize("mode", ["topk", "threshold"])
def test_no_sequences(fields, mode):
    out = pair(fields)[0](tokens(3)[:0], mode=mode)
    assert out.logits.shape == (0, 9, TINY["vocab_size"]) and out.depths.shape == (0, 9)


def test_initialisation():
    torch.manual_seed(0)
    model = MoR(MoRConfig(**{**TINY, "hidden_size": 64}, **TOKEN, lora_rank=2, recursion_encoding=True,
                          initializer_range=0.05))  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") or name == "recursion_encoding":
            assert parameter.eq(1).all(), name
        elif name.endswith(("q_b", "v_b")):
            assert parameter.eq(0).all(), name
        elif parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name


def test_loss_is_computed_in_fp32():
    model = MoR(MoRConfig(**TINY, num_hidden_layers=3)).to(torch.bfloat16)
    x = tokens()
    out = model(x, x)
    want = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), x.flatten())
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, want, rtol=1e-6, atol=0)
