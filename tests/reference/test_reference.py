"""The reference against values worked out by hand, and against properties that every such model must have."""

import math

import pytest
import torch

from reference import decode, model, ops
from reference.model import ReferenceMoR, random_state

torch.set_num_threads(1)
INF, NAN = math.inf, math.nan

TINY = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_recursions": 3,
    "sharing": "middle_cycle",
}
EXPERT = TINY | {"router": "expert_choice"}
TOKEN = TINY | {"router": "token_choice"}
FIXED = TINY | {"router": "none"}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 10]])


def make(config, seed=0, **changes):
    config = config | changes
    return ReferenceMoR(config, random_state(config, seed))


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected, **tolerances):
    """Both in float64; a few units of rounding after a few dozen operations."""
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-10, "atol": 1e-12} | tolerances))


def route_logits(logits, k, **options):
    """Route rows of width 1 by given logits; gates are the logits themselves unless told otherwise."""
    logits = f64([logits])
    x = torch.arange(logits.shape[1], dtype=torch.float64)[None, :, None]
    return ops.route(x, None, k, logits=logits, **({"activation": "none", "alpha": 1.0} | options))


# Routing


def test_route_keeps_the_best_in_order_of_position():
    routed = route_logits([0.1, 0.9, 0.5, 0.8], 2)
    assert routed.indices.tolist() == [[1, 3]]
    assert routed.gates.tolist() == [[0.9, 0.8]]
    assert routed.rows.tolist() == [[[1.0], [3.0]]]
    assert routed.counts.tolist() == [2] and routed.counts.dtype == torch.int32


@pytest.mark.parametrize(
    "logits, k, kept",
    [
        ([2, 2, 2, 2], 2, [0, 1]),
        ([3, 2, 3, 2, 1, 1], 1, [0]),
        ([3, 2, 3, 2, 1, 1], 3, [0, 1, 2]),
        ([4.0, 4.001, 3.999], 1, [1]),
        ([NAN, 1, INF, -INF], 2, [1, 2]),
        ([1e4, -1e4, INF], 1, [2]),
        ([NAN, NAN, 1], 2, [2, -1]),
        ([1, 2], 0, []),
    ],
)
def test_route_ties_and_extreme_logits(logits, k, kept):
    routed = route_logits(logits, k, activation="sigmoid")
    assert routed.indices.tolist() == [kept]
    assert routed.gates.isfinite().all() and routed.rows.isfinite().all()


def test_rank_by_logit_does_not_saturate_and_rank_by_score_does():
    x = torch.zeros(1, 3, 1, dtype=torch.float32)
    logits = torch.tensor([[18.0, 20.0, 19.0]])
    assert ops.route(x, None, 1, logits=logits).indices.tolist() == [[1]]
    assert ops.route(x, None, 1, logits=logits, rank="score").indices.tolist() == [[0]]
    near = torch.tensor([[4.0, 4.001]])
    x = torch.zeros(1, 2, 1, dtype=torch.bfloat16)
    assert ops.route(x, None, 1, logits=near).indices.tolist() == [[1]]
    assert ops.route(x, None, 1, logits=near, rank="score").indices.tolist() == [[0]]


def test_route_linear_router_by_hand():
    x = f64([[[1, 2], [3, -1], [0, 5]]])
    routed = ops.route(x, f64([2, 1]), 2, temperature=2.0, alpha=0.1, activation="tanh")
    close(routed.logits, f64([[2, 2.5, 2.5]]))
    assert routed.indices.tolist() == [[1, 2]]
    close(routed.gates, f64([[0.1 * math.tanh(2.5)] * 2]))


def test_route_chooses_only_among_candidates_and_never_padding():
    x = torch.zeros(2, 4, 1, dtype=torch.float64)
    candidates = torch.tensor([[0, 2, 3], [1, 2, -1]])
    routed = ops.route(x, None, 2, logits=f64([[1, 2, 3], [0, 5, 9]]), candidates=candidates)
    assert routed.indices.tolist() == [[2, 3], [1, 2]]
    assert routed.logits.tolist() == [[1, 2, 3], [0, 5, 0]]
    routed = ops.route(x, None, 2, logits=f64([[1, 2, 3, 4], [1, 2, 3, 4]]), seqlens=torch.tensor([3, 1]))
    assert routed.indices.tolist() == [[1, 2], [0, -1]]
    assert routed.counts.tolist() == [2, 1]


def test_route_replays_given_indices():
    routed = route_logits([0.1, 0.9, 0.5, 0.8], 2, indices=torch.tensor([[0, 2]]))
    assert routed.indices.tolist() == [[0, 2]]
    assert routed.gates.tolist() == [[0.1, 0.5]]


def test_gradient_reaches_only_the_logits_of_kept_tokens():
    logits = f64([[0.1, 0.9, 0.5, 0.8]]).requires_grad_()
    x = torch.ones(1, 4, 1, dtype=torch.float64)
    routed = ops.route(x, None, 2, logits=logits)
    out = ops.scatter_back(x, routed.rows, routed.indices, routed.gates)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert (grad != 0).tolist() == [[False, True, False, True]]
    (grad,) = torch.autograd.grad(ops.aux_loss(logits, None, routed.indices), logits)
    assert (grad != 0).all()


def test_choose_depths():
    logits = f64([[[1, 2, 0], [3, 3, 3], [NAN, 0, -INF], [NAN, NAN, NAN], [0, 1, INF], [5, 0, 0]]])
    choice = ops.choose_depths(logits, seqlens=torch.tensor([5]), alpha=0.5)
    assert choice.depths.tolist() == [[2, 1, 2, 1, 3, 0]]
    close(choice.probs[0, 0], f64([math.e, math.e**2, 1]) / (math.e + math.e**2 + 1))
    close(choice.probs[0, 1], f64([1 / 3] * 3))
    close(choice.probs[0, 2], f64([0, 1, 0]))
    assert choice.probs[0, 5].tolist() == [0, 0, 0]
    close(choice.gates, 0.5 * choice.probs)
    sigmoid = ops.choose_depths(f64([[[NAN, -1e4, -1e4]]]), activation="sigmoid")
    assert sigmoid.depths.tolist() == [[2]], "an expert whose logit is NaN is not chosen, even among zeros"


def test_choose_depths_bias_changes_the_choice_but_not_the_gate():
    logits = f64([[[1.0, 0.5]]])
    plain = ops.choose_depths(logits)
    biased = ops.choose_depths(logits, bias=f64([0.0, 1.0]))
    assert (plain.depths.item(), biased.depths.item()) == (1, 2)
    assert torch.equal(plain.gates, biased.gates)
    tempered = ops.choose_depths(logits, temperature=0.5)
    close(tempered.probs[0, 0, 0], torch.sigmoid(f64(1.0)))


def test_pack_depths():
    packed = ops.pack_depths(torch.tensor([[1, 3, 0], [2, 1, 1]]), 3)
    assert packed.indices.tolist() == [[0, 1, 3, 4, 5, -1], [1, 3, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]
    assert packed.cu_seqlens.tolist() == [[0, 2, 5], [0, 1, 2], [0, 1, 1]]


def test_gather_and_scatter_back():
    x = f64([[1], [2], [3]])
    assert ops.gather(x, torch.tensor([2, 0, -1])).tolist() == [[3], [1], [0]]
    update, indices, gates = f64([[10], [20]]), torch.tensor([2, -1]), f64([0.5, 9.0])
    assert ops.scatter_back(x, update, indices, gates).tolist() == [[1], [2], [8]]
    assert ops.scatter_back(x, update, indices, gates, residual="delta").tolist() == [[1], [2], [6.5]]
    assert ops.scatter_back(x, update, indices, gates, residual="none").tolist() == [[1], [2], [5]]
    assert ops.scatter_back(x, update, indices).tolist() == [[1], [2], [13]]
    assert ops.scatter_back(x[None], update[None], indices[None], gates[None]).tolist() == [[[1], [2], [8]]]


def test_depth_step():
    """Going on while the score is positive and recursions are left; the last row is padding."""
    x, update = f64([[1], [1], [1], [1], [7]]), f64([[2], [-6], [2], [2], [9]])
    logits, recursions = f64([0.5, 0.5, NAN, 0.5, 0.5]), torch.tensor([0, 0, 1, 2, -1])
    weight, options = f64([[9], [3], [4]]), {"activation": "none", "alpha": 1.0, "temperature": 2.0}
    new, scores, goes_on = ops.depth_step(x, update, logits, recursions, weight, **options)
    assert new.tolist() == [[2], [-2], [1], [2], [7]]
    assert scores.tolist() == [3, -3, 2, 0.5, 0.5]
    assert goes_on.tolist() == [True, False, True, False, False]
    options |= {"last": torch.tensor([1, 2, 2, 9, 9]), "replayed": torch.tensor([True] * 5), "residual": "delta"}
    new, _, goes_on = ops.depth_step(x, update, logits, recursions, weight, **options)
    assert new.tolist() == [[1.5], [-2.5], [1], [1.5], [7]]
    assert goes_on.tolist() == [False, True, False, False, False]
    _, _, goes_on = ops.depth_step(x, update, logits, recursions, weight, aux_weight=-weight)
    assert goes_on.tolist() == [False, False, False, False, False]


def test_identity_block_of_width_one():
    x = f64([[[3.0]]])
    block, delta = (
        ops.scatter_back(x, x[:, :1], torch.tensor([[0]]), f64([[0.1]]), residual=residual).item()
        for residual in ("block", "delta")
    )
    assert block == pytest.approx(3.3) and delta == 3.0


# Attention, keys and values


def test_attention_is_by_position():
    """With keys of zero, a query averages the values it sees; lse is the logarithm of their number."""
    q, k = torch.ones(1, 2, 1, 4, dtype=torch.float64), torch.zeros(1, 5, 1, 4, dtype=torch.float64)
    v = torch.arange(5.0, dtype=torch.float64)[None, :, None, None].expand(1, 5, 1, 4)
    out, lse = ops.attention(q, k, v, q_positions=torch.tensor([[0, 3]]), return_lse=True)
    close(out[0, :, 0, 0], f64([0.0, 1.5]))
    close(lse, f64([[[0.0, math.log(4)]]]))
    close(ops.attention(q, k, v)[0, :, 0, 0], f64([0.0, 0.5]))


def test_attention_by_hand_with_groups():
    """Head h reads key/value head h // (H / G), and scores are scaled by 1 / sqrt(d)."""
    q = f64([[[[2.0]], [[2.0]]]]).expand(1, 2, 4, 1)
    k = f64([[[[0.0], [0.0]], [[1.0], [-1.0]]]])
    v = f64([[[[0.0], [10.0]], [[1.0], [20.0]]]])
    out = ops.attention(q, k, v, softmax_scale=0.5)
    p = math.e / (1 + math.e)
    close(out[0, 1, :, 0], f64([p, p, 10 * p + 20 * (1 - p), 10 * p + 20 * (1 - p)]))
    wide_heads = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    _, lse = ops.attention(wide_heads, wide_heads, wide_heads, return_lse=True)
    close(lse, f64([[[4 / math.sqrt(4)]]]))


def test_attention_ignores_padding_and_what_lies_in_it():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 1, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    lens = torch.tensor([3, 0])
    expected = ops.attention(q[:1, :3], k[:1, :3], v[:1, :3])
    k[0, 3:], v[0, 3:], k[1], v[1] = NAN, NAN, NAN, NAN
    out, lse = ops.attention(q, k, v, q_lens=torch.tensor([3, 4]), k_lens=lens, return_lse=True)
    close(out[:1, :3], expected)
    assert (out[0, 3] == 0).all() and (out[1] == 0).all()
    assert (lse[0, :, 3] == -INF).all() and (lse[1] == -INF).all()


def test_attention_varlen_equals_attention_of_each_sequence():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(11, 1, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 1, 1, 4], dtype=torch.int32), torch.tensor([0, 4, 11, 11], dtype=torch.int32)
    positions = torch.tensor([2, 0, 1, 2, 0])
    out, lse = ops.attention_varlen(q, k, v, cu_q, cu_k, 3, 7, q_positions=positions, return_lse=True)
    alone = ops.attention(q[None, :1], k[None, :4], v[None, :4], q_positions=torch.tensor([[2]]))
    close(out[:1], alone[0])
    assert (out[1:] == 0).all(), "no keys, or beyond the last sequence"
    assert lse.shape == (3, 5) and (lse[:, 1:] == -INF).all() and lse[:, 0].isfinite().all()


def test_attention_varlen_empty_sequences_forward_and_backward():
    q = torch.ones(1, 3, 2, dtype=torch.float64, requires_grad=True)
    k = torch.ones(2, 1, 2, dtype=torch.float64, requires_grad=True)
    v = torch.ones(2, 1, 2, dtype=torch.float64, requires_grad=True)
    cu_q, cu_k = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 2])
    out = ops.attention_varlen(q, k, v, cu_q, cu_k, 1, 2)
    out.sum().backward()
    assert torch.equal(v.grad, f64([[[3.0, 3.0]], [[0.0, 0.0]]]))
    assert torch.autograd.gradcheck(lambda q, k, v: ops.attention_varlen(q, k, v, cu_q, cu_k, 1, 2), (q, k, v))


def test_rope_turns_pairs_half_a_head_apart_by_position():
    x = f64([[[[1.0, 0.0, 0.0, 2.0]], [[1.0, 0.0, 0.0, 2.0]]]] * 2)
    positions = torch.tensor([[0, 5], [2, 3]])
    out = ops.rope(x, positions, theta=100.0)
    for b in range(2):
        for t in range(2):
            p = int(positions[b, t])
            # pair (0, 2) turns by p, pair (1, 3) by p / 10
            expected = [math.cos(p), -2 * math.sin(p / 10), math.sin(p), 2 * math.cos(p / 10)]
            close(out[b, t, 0], f64(expected))


def test_kv_append_writes_nowhere_for_minus_one():
    k_cache = torch.full((2, 2, 1, 1), 7.0)
    k = torch.tensor([[[1.0]], [[2.0]], [[3.0]]])
    new_k, new_v = ops.kv_append(k, 10 * k, k_cache, k_cache, torch.tensor([0, -1, 2]))
    assert new_k.flatten().tolist() == [1, 7, 3, 7]
    assert new_v.flatten().tolist() == [10, 7, 30, 7]
    assert (k_cache == 7).all()


def test_kv_lookup_follows_pages_and_stops_at_each_length():
    cache = torch.arange(8.0).reshape(4, 2, 1, 1)
    table = torch.tensor([[3, 0], [1, -1], [2, -1]], dtype=torch.int32)
    k, v = ops.kv_lookup(cache, 10 * cache, table, torch.tensor([0, 3, 3, 4], dtype=torch.int32), 5)
    assert k.flatten().tolist() == [6, 7, 0, 4, 0]
    assert v.flatten().tolist() == [60, 70, 0, 40, 0]
    k, _ = ops.kv_lookup(cache, cache, table[:0], torch.tensor([0], dtype=torch.int32), 0)
    assert k.shape == (0, 1, 1)


# Losses and metrics


def test_aux_loss():
    logits = f64([[0.0, 1.0, -2.0], [3.0, 8.0, 8.0]])
    candidates = torch.tensor([[0, 4, 5], [2, -1, -1]])
    kept = torch.tensor([[4], [-1]])
    softplus = [math.log1p(math.exp(z)) for z in (0.0, -1.0, -2.0, 3.0)]
    close(ops.aux_loss(logits, candidates, kept), f64(sum(softplus) / 4))
    close(ops.aux_loss(logits, None, torch.tensor([[1], [0]]), torch.tensor([2, 0])), f64(sum(softplus[:2]) / 2))
    assert ops.aux_loss(f64([[INF, -INF]]), None, torch.tensor([[0]])).item() == 0
    assert ops.aux_loss(logits, torch.full((2, 3), -1), kept).item() == 0


def test_z_loss():
    assert ops.z_loss(f64([[1, 2, 9]]), torch.tensor([[True, True, False]])).item() == 2.5
    close(ops.z_loss(torch.zeros(1, 2, 3, dtype=torch.float64)), f64(math.log(3) ** 2))


def test_balance_loss():
    probs = f64([[[0.5, 0.5], [0.5, 0.5]], [[0.75, 0.25], [0.9, 0.9]]])
    depths = torch.tensor([[1, 2], [1, 0]])
    close(ops.balance_loss(probs, depths), f64((1.0 + 2 * 0.75) / 2))
    # together: two of three tokens chose expert 1
    close(ops.balance_loss(probs, depths, "batch"), f64(2 * (2 / 3) * (1.75 / 3) + 2 * (1 / 3) * (1.25 / 3)))
    close(ops.balance_loss(probs, torch.tensor([[1, 2], [0, 0]])), f64(1.0))


def test_router_bias_update():
    bias = ops.router_bias_update(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([6, 0, 3]), 0.25)
    assert bias.tolist() == [-0.25, 1.25, 2.0]


def test_metrics():
    kept = torch.tensor([[True, False, False, True], [False, False, True, True]])
    assert ops.dead_token_ratio(kept) == 0.25
    assert ops.dead_token_ratio(kept, torch.tensor([[True, True, False, True], [True, False, False, True]])) == 1 / 3
    assert ops.sampling_accuracy(kept[0], kept[1]) == 0.5
    assert ops.sampling_accuracy(kept[0], kept[1], torch.tensor([True, True, False, True])) == pytest.approx(2 / 3)
    assert ops.max_vio(torch.tensor([6, 2, 4])) == 0.5
    close(ops.routing_entropy(f64([[1.0, 0.0], [0.0, 1.0]])), f64(math.log(2)))
    assert ops.routing_entropy(f64([[1.0, 0.0]])).item() == 0


# Which layers run where


def test_unrolling():
    def layers(sharing, L, Nr):
        return model.unroll({"sharing": sharing, "num_hidden_layers": L, "num_recursions": Nr})

    assert layers("cycle", 9, 3) == ([], [[0, 1, 2]] * 3, [])
    assert layers("sequence", 9, 3) == ([], [[0, 0, 0], [1, 1, 1], [2, 2, 2]], [])
    assert layers("middle_cycle", 11, 3) == ([0], [[1, 2, 3]] * 3, [4])
    assert layers("middle_sequence", 8, 2) == ([0], [[1, 1, 2], [2, 3, 3]], [4])
    assert layers("middle_cycle", 4, 1) == ([0], [[1, 2]], [3])
    with pytest.raises(ValueError, match=r"num_hidden_layers.*34.*got 32"):
        layers("middle_cycle", 32, 4)


@pytest.mark.parametrize("sharing", ["cycle", "sequence", "middle_cycle", "middle_sequence"])
def test_fixed_depth_equals_an_ordinary_transformer_with_copied_weights(sharing):
    config = FIXED | {"sharing": sharing, "num_hidden_layers": 8 if "middle" in sharing else 6}
    state = random_state(config, 0)
    first, recursions, last = model.unroll(config)
    order = first + sum(recursions, []) + last
    plain_config = config | {"num_recursions": 1, "sharing": "cycle"}
    plain = {name: value for name, value in state.items() if not name.startswith("layers.")}
    for place, i in enumerate(order):
        for name, value in state.items():
            if name.startswith(f"layers.{i}."):
                plain[name.replace(f"layers.{i}.", f"layers.{place}.")] = value
    expected = ReferenceMoR(plain_config, plain).forward(TOKENS)
    actual = ReferenceMoR(config, state).forward(TOKENS)
    close(actual.logits, expected.logits)
    assert (actual.depths == 3).all() and (expected.depths == 1).all()


def test_lora_adds_to_the_weights_of_its_recursion():
    config = FIXED | {"sharing": "cycle", "num_hidden_layers": 3, "lora_rank": 2}
    state = random_state(config, 0)
    plain = {name: value for name, value in state.items() if not name.startswith(("layers.", "lora."))}
    for r in range(3):
        for name, value in state.items():
            for letter in "qv":
                if name == f"layers.0.self_attn.{letter}_proj.weight":
                    value = value + state[f"lora.{r}.0.{letter}_b"] @ state[f"lora.{r}.0.{letter}_a"]
            if name.startswith("layers.0."):
                plain[name.replace("layers.0.", f"layers.{r}.")] = value
    expected = ReferenceMoR(config | {"lora_rank": 0, "num_recursions": 1}, plain).forward(TOKENS)
    close(ReferenceMoR(config, state).forward(TOKENS).logits, expected.logits)


def test_kept_counts():
    config = {"num_recursions": 3, "cap_warmup_steps": 10}
    assert model.kept_counts(config, 10) == [10, 6, 3]
    assert model.kept_counts(config, 2) == [2, 1, 0]
    assert model.kept_counts(config, 12, step=0) == [12, 12, 12]
    assert model.kept_counts(config, 12, step=5) == [12, 10, 8]
    assert model.kept_counts(config, 12, step=10) == [12, 8, 4]
    assert model.kept_counts({"num_recursions": 10}, 10) == list(range(10, 0, -1))


def test_mistakes_in_a_configuration_are_named():
    with pytest.raises(ValueError, match="cappacities"):
        model.complete({"cappacities": [1.0]})
    with pytest.raises(ValueError, match="kv: .*shard"):
        model.complete({"kv": "shard"})
    with pytest.raises(ValueError, match="lm_head.weight"):
        ReferenceMoR(TINY | {"tie_word_embeddings": False}, random_state(TINY))


# Models whose block does nothing, so that what the routers do can be followed by hand


def identity_model(config, router_weights, x=(1.0, 2.0), **changes):
    """Every layer returns its input. Token 0 has embedding x and token 1 has -x."""
    config = config | changes | {"hidden_size": 2, "vocab_size": 2, "tie_word_embeddings": False, "rms_norm_eps": 0.0}
    state = random_state(config, 0)
    for name in state:
        if "o_proj" in name or "down_proj" in name:
            state[name] = torch.zeros_like(state[name])
    state["embed_tokens.weight"] = f64([list(x), [-value for value in x]])
    for r, weight in enumerate(router_weights):
        state[f"routers.{r}.weight"] = f64(weight)
    return ReferenceMoR(config, state)


def final_state(reference, tokens, mode="topk"):
    """A forward whose logits are the state after the recursions, as the final norm and the head do nothing."""
    reference.rms_norm = lambda name, x: x
    reference.weights["lm_head.weight"] = torch.eye(2, dtype=torch.float64)
    return reference.forward(torch.tensor(tokens), mode=mode)


def test_expert_choice_by_hand():
    weights = [[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]]]
    result = final_state(identity_model(EXPERT, weights), [[0, 1, 0]])
    g = [0.1 / (1 + math.exp(-1.0))]  # the first recursion keeps all three
    g.append(0.1 / (1 + math.exp(-2.0 * (1 + g[0]))))  # the second the two tokens 0: their logit is positive
    x = (1 + g[0]) * (1 + g[1])
    close(result.logits[0, 2], f64([x, 2 * x]))
    x *= 1 + 0.1 * 0.5  # the third one token; the logits tie, so the first
    close(result.logits[0, 0], f64([x, 2 * x]))
    gate = 0.1 / (1 + math.exp(1.0))
    close(result.logits[0, 1], f64([-1 - gate, -2 - 2 * gate]))
    assert result.routing == [[[0, 1, 2]], [[0, 2]], [[0]]]
    assert result.depths.tolist() == [[3, 1, 2]]


def test_expert_choice_delta_leaves_the_identity_alone():
    weights = [[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]]]
    result = final_state(identity_model(EXPERT, weights, residual="delta"), [[0, 1, 0]])
    close(result.logits[0], f64([[1, 2], [-1, -2], [1, 2]]))


def test_threshold_compares_the_unscaled_logit():
    result = final_state(identity_model(EXPERT, [[[-5.0, 0.0]]] * 3), [[0]], "threshold")
    gate = 0.1 / (1 + math.exp(5.0))
    close(result.logits[0, 0], f64([1 + gate, 2 + 2 * gate]))
    assert result.depths.tolist() == [[1]], "logit -5 goes nowhere past recursion 1"
    result = final_state(identity_model(EXPERT, [[[0.1, 0.0]]] * 3), [[0]], "threshold")
    assert result.depths.tolist() == [[3]], "a gate of 0.05 is no reason to stop"


def test_auxiliary_router_decides_at_inference_and_not_in_training():
    reference = identity_model(EXPERT, [[[1.0, 0.0]]] * 3, aux="router")
    for r, weight in enumerate([-1.0, 1.0, -1.0]):
        reference.weights[f"aux_routers.{r}.weight"] = f64([[weight, 0.0]])
    result = final_state(reference, [[0, 1]], "threshold")
    assert result.depths.tolist() == [[2, 1]]
    g1 = 0.1 / (1 + math.exp(-1.0))
    g2 = 0.1 / (1 + math.exp(-1.0 - g1))
    close(result.logits[0, 0, 0], f64((1 + g1) * (1 + g2)))
    assert reference.forward(torch.tensor([[0, 1]]), ks=(2, 1, 1)).depths.tolist() == [[3, 1]]


def test_token_choice_by_hand():
    router = [[[0.0, 0.0], [1.0, 0.0], [0.0, 0.25]]]  # logits (0, 1, 0.5) of token 0, (0, -1, -0.5) of token 1
    total = 1 + math.e + math.exp(0.5)
    p = [1 / total, math.e / total]
    result = final_state(identity_model(TOKEN, router), [[0, 1]])
    assert result.depths.tolist() == [[2, 1]]
    assert result.routing == [[[0, 1]], [[0]], [[]]]
    close(result.logits[0, 0, 0], f64(1 + p[1]))
    q = 1 / (1 + math.exp(-1.0) + math.exp(-0.5))
    close(result.logits[0, 1, 0], f64(-1 - q))
    result = final_state(identity_model(TOKEN, router, gate="every_step", alpha=0.5), [[0, 1]])
    close(result.logits[0, 0, 0], f64(1 + 0.5 * p[0] * 0.5 * p[1]))
    close(result.logits[0, 1, 0], f64(-1 - 0.5 * q))
    result = final_state(identity_model(TOKEN, router, gate="none"), [[0, 1]])
    close(result.logits[0, :, 0], f64([2, -2]))  # whatever the router's probabilities


def test_router_bias_moves_depths_and_not_gates():
    router = [[[0.0, 0.0], [1.0, 0.0], [0.0, 0.25]]]
    reference = identity_model(TOKEN, router, balance="loss_free")
    reference.weights["router_bias"] = f64([0.0, -1.0, 0.0])
    result = final_state(reference, [[0]])
    assert result.depths.tolist() == [[3]]
    close(result.logits[0, 0, 0], f64(1 + math.exp(0.5) / (1 + math.e + math.exp(0.5))))


def test_routers_of_two_layers_by_hand():
    reference = make(EXPERT, router_arch="wide_mlp", router_temperature=2.0)
    assert reference.weights["routers.0.up.weight"].shape == (32, 8)
    reference.weights |= {"routers.0.up.weight": f64([[1.0], [-2.0]]), "routers.0.down.weight": f64([[1.0, 3.0]])}

    def gelu(z):
        return z * 0.5 * (1 + math.erf(z / math.sqrt(2)))

    close(reference.router("routers.0", f64([[0.5]])), f64([[(gelu(0.5) + 3 * gelu(-1.0)) / 2]]))
    reference.config["router_temperature_at"] = "state"
    close(reference.router("routers.0", f64([[0.5]])), f64([[gelu(0.25) + 3 * gelu(-0.5)]]))
    reference.weights |= {"aux_routers.0.up.weight": f64([[1.0]]), "aux_routers.0.down.weight": f64([[1.0]])}
    close(reference.router("aux_routers.0", f64([[0.5]])), f64([[gelu(0.5)]]))
    assert make(EXPERT, router_arch="mlp", router_expansion=3).weights["routers.0.up.weight"].shape == (24, 8)


def test_recursion_encoding_multiplies_each_output():
    reference = identity_model(FIXED, [], recursion_encoding=True)
    encoding = reference.weights["recursion_encoding"]
    result = final_state(reference, [[0]])
    close(result.logits[0, 0], f64([1, 2]) * encoding[0] * encoding[1] * encoding[2])


def test_nan_logits_are_never_kept():
    """The last router gives NaN for everything, so the third recursion takes nothing."""
    for mode, rank in (("topk", "logit"), ("topk", "score"), ("threshold", "logit")):
        reference = identity_model(EXPERT, [[[1.0, 0.0]], [[1.0, 0.0]], [[NAN, 0.0]]], rank=rank)
        result = final_state(reference, [[0, 0, 0]], mode)
        assert result.routing[2] == [[]] and result.logits.isfinite().all()


# Keys and values


def test_memory_offers_what_each_strategy_promises():
    def offers(*strategy):
        memory = model.Memory(*strategy)
        steps = [{0: "a1", 1: "b1", 2: "c1"}, {1: "b2", 2: "c2"}, {2: "c3"}]
        return [memory.offer(r, lambda step=step: step) for r, step in enumerate(steps)]

    everything = {0: "a1", 1: "b1", 2: "c1"}
    assert offers("recursion_wise") == [everything, {1: "b2", 2: "c2"}, {2: "c3"}]
    assert offers("shared") == [everything] * 3
    assert offers("hybrid", "first")[1:] == [{0: "a1", 1: "b2", 2: "c2"}, {0: "a1", 1: "b1", 2: "c3"}]
    assert offers("hybrid", "latest")[1:] == [{0: "a1", 1: "b2", 2: "c2"}, {0: "a1", 1: "b2", 2: "c3"}]


def test_strategies_agree_where_they_must_and_differ_elsewhere():
    results = {}
    for kv, base in [("recursion_wise", "first"), ("shared", "first"), ("hybrid", "first"), ("hybrid", "latest")]:
        for config in (EXPERT, FIXED, EXPERT | {"num_recursions": 1}):
            key = (config["router"], config["num_recursions"])
            results.setdefault(key, []).append(make(config, kv=kv, hybrid_base=base).forward(TOKENS).logits)
    own, shared, first, latest = results["none", 3]  # every token is active everywhere
    close(own, first)
    close(own, latest)
    assert (own - shared).abs().max() > 1e-3
    for other in results["expert_choice", 1][1:]:
        close(results["expert_choice", 1][0], other)
    logits = results["expert_choice", 3]
    assert all((a - b).abs().max() > 1e-6 for i, a in enumerate(logits) for b in logits[:i])


# Properties of whole models

CAUSAL = [
    EXPERT,
    EXPERT | {"kv": "shared", "residual": "delta", "router_activation": "tanh"},
    EXPERT | {"kv": "hybrid", "aux": "router", "router_arch": "mlp"},
    EXPERT | {"kv": "hybrid", "hybrid_base": "latest", "lora_rank": 2, "recursion_encoding": True},
    TOKEN | {"gate": "every_step"},
    TOKEN | {"kv": "shared", "balance": "loss_free", "router_arch": "wide_mlp"},
    TOKEN | {"kv": "hybrid", "hybrid_base": "latest", "router_activation": "sigmoid"},
    FIXED | {"kv": "shared", "sharing": "middle_sequence"},
]


@pytest.mark.parametrize("config", CAUSAL)
def test_a_later_token_never_changes_an_earlier_logit(config):
    reference = make(config)
    full = reference.forward(TOKENS[:1], mode="threshold")
    changed = TOKENS[:1].clone()
    changed[0, 5:] = (changed[0, 5:] + 3) % 11
    other = reference.forward(changed, mode="threshold")
    close(other.logits[:, :5], full.logits[:, :5])
    assert torch.equal(other.depths[:, :5], full.depths[:, :5])
    assert not torch.allclose(other.logits[:, 5:], full.logits[:, 5:])
    shorter = reference.forward(TOKENS[:1, :5], mode="threshold")
    close(shorter.logits, full.logits[:, :5])
    if config["router"] != "none":
        assert full.depths.unique().numel() > 1, "the example should have tokens of different depths"


def test_top_k_routing_looks_at_the_future():
    reference = make(EXPERT)
    depths = reference.forward(TOKENS[:1]).depths
    changed = [
        reference.forward(torch.cat([TOKENS[:1, :7], torch.tensor([[last]])], 1)).depths[:, :7] for last in range(11)
    ]
    assert any(not torch.equal(other, depths[:, :7]) for other in changed)


@pytest.mark.parametrize("config", [EXPERT, TOKEN | {"kv": "shared"}, FIXED])
@pytest.mark.parametrize("mode", ["topk", "threshold"])
def test_padding_anywhere_and_other_sequences_change_nothing(config, mode):
    reference = make(config)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1, 1], [0] * 8])
    tokens = torch.cat([TOKENS, TOKENS[:1]])
    ks = (8, 3, 2)
    batch = reference.forward(tokens, attention_mask=mask, mode=mode, ks=ks)
    assert (batch.logits[mask == 0] == 0).all() and (batch.depths[mask == 0] == 0).all()
    assert (batch.depths[mask == 1] >= 1).all()
    for b in range(2):
        real = mask[b].nonzero()[:, 0].tolist()
        alone = reference.forward(tokens[b : b + 1, real], mode=mode, ks=ks)
        close(batch.logits[b, real], alone.logits[0])
        assert torch.equal(batch.depths[b, real], alone.depths[0])
        for r in range(3):
            assert batch.routing[r][b] == [real[i] for i in alone.routing[r][0]]


def test_capacities_count_the_padded_length():
    """Of 8 columns, 6 may be kept at recursion 2; a sequence with 5 real tokens keeps them all."""
    config = EXPERT | {"capacities": [1.0, 0.75, 0.25]}
    result = make(config).forward(TOKENS, attention_mask=torch.tensor([[1] * 8, [0] * 3 + [1] * 5]))
    assert [[len(kept) for kept in rows] for rows in result.routing] == [[8, 5], [6, 5], [2, 2]]


def test_filtering_is_hierarchical():
    for mode in ("topk", "threshold"):
        routing = make(EXPERT).forward(TOKENS, mode=mode).routing
        for b in range(2):
            assert set(routing[2][b]) <= set(routing[1][b]) <= set(routing[0][b]) == set(range(8))


def test_model_routes_as_the_operation_does():
    """With the identity for a block, each recursion of the model is a call of route and one of scatter_back."""
    config = EXPERT | {"num_recursions": 2, "num_hidden_layers": 2, "sharing": "cycle", "capacities": [1.0, 0.5]}
    reference = make(config)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reference.block = lambda r, x, positions, memories: x
    out, trace = reference.expert_choice(x, "topk", (6, 3))
    one = ops.route(x[None], reference.weights["routers.0.weight"][0], 6)
    x1 = ops.scatter_back(x[None], one.rows, one.indices, one.gates)
    two = ops.route(x1, reference.weights["routers.1.weight"][0], 3, candidates=one.indices)
    close(out[None], ops.scatter_back(x1, two.rows, two.indices, two.gates))
    assert two.indices[0].tolist() == trace.kept[1]
    close(trace.router_logits[1], two.logits[0])


# Losses of whole models


def test_losses_add_up_with_their_coefficients():
    targets = TOKENS.roll(-1, dims=1)
    targets[:, -1] = -100
    result = make(EXPERT, z_coeff=0.01).forward(TOKENS, targets)
    assert set(result.losses) == {"lm", "aux", "z"}
    log_probs = result.logits[:, :-1].log_softmax(-1)
    close(result.losses["lm"], -log_probs.gather(2, targets[:, :-1, None]).mean())
    close(result.loss, result.losses["lm"] + 0.001 * result.losses["aux"] + 0.01 * result.losses["z"])
    result = make(TOKEN, z_coeff=0.01).forward(TOKENS, targets)
    assert set(result.losses) == {"lm", "balance", "z"}
    close(result.loss, result.losses["lm"] + 0.1 * result.losses["balance"] + 0.01 * result.losses["z"])
    assert set(make(EXPERT).forward(TOKENS, targets, mode="threshold").losses) == {"lm"}
    assert set(make(TOKEN, balance="loss_free").forward(TOKENS, targets).losses) == {"lm"}
    assert make(FIXED).forward(TOKENS).loss is None


def test_aux_loss_counts_every_recursion():
    """With routers of weight zero every logit is 0: log 2 for each of the three recursions."""
    state = random_state(EXPERT)
    for r in range(3):
        state[f"routers.{r}.weight"] = torch.zeros_like(state[f"routers.{r}.weight"])
    close(ReferenceMoR(EXPERT, state).forward(TOKENS).losses["aux"], f64(3 * math.log(2)))


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_balance_loss_is_over_real_tokens_in_the_chosen_scope(scope):
    result = make(TOKEN, balance_scope=scope).forward(TOKENS, attention_mask=torch.tensor([[1] * 8, [0] * 5 + [1] * 3]))
    reference = make(TOKEN)
    state = reference.layer(
        0, reference.weights["embed_tokens.weight"][TOKENS[0]], list(range(8)), model.Memory("shared")
    )
    other = reference.layer(
        0, reference.weights["embed_tokens.weight"][TOKENS[1, 5:]], [0, 1, 2], model.Memory("shared")
    )
    probs = model.pad([reference.router("routers.0", x).softmax(-1) for x in (state, other)], 0.0)
    depths = model.pad([result.depths[0], result.depths[1, 5:]], 0)
    close(result.losses["balance"], ops.balance_loss(probs, depths, scope))


@pytest.mark.parametrize("aux, reaches", [("loss", True), ("router", False)])
def test_auxiliary_router_sends_no_gradient_into_the_model(aux, reaches):
    config = EXPERT | {"aux": aux}
    state = {name: value.requires_grad_() for name, value in random_state(config).items()}
    loss = ReferenceMoR(config, state).forward(TOKENS).losses["aux"]
    grads = dict(zip(state, torch.autograd.grad(loss, state.values(), materialize_grads=True), strict=True))
    assert bool(grads["embed_tokens.weight"].any()) == reaches
    assert bool(grads["routers.0.weight"].any()) == reaches
    if aux == "router":
        assert all(grads[f"aux_routers.{r}.weight"].any() for r in range(3))


def test_a_recursion_without_tokens_has_no_influence():
    config = EXPERT | {"sharing": "sequence", "num_hidden_layers": 4, "num_recursions": 2}  # layers (0, 0), (1, 1)
    state = {name: value.requires_grad_() for name, value in random_state(config).items()}
    result = ReferenceMoR(config, state).forward(TOKENS, TOKENS, ks=(8, 0))
    result.loss.backward()
    assert state["layers.1.mlp.up_proj.weight"].grad is None
    assert state["layers.0.mlp.up_proj.weight"].grad.any()


SMALLER = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "head_dim": 2}


@pytest.mark.parametrize(
    "config",
    [
        EXPERT | {"z_coeff": 0.1, "aux_coeff": 0.1, "num_hidden_layers": 3, "sharing": "cycle"},
        EXPERT | {"kv": "hybrid", "hybrid_base": "latest", "lora_rank": 1, "router_arch": "mlp"},
        TOKEN | {"kv": "shared", "gate": "every_step", "z_coeff": 0.1, "recursion_encoding": True},
        TOKEN | {"balance_scope": "batch", "router_activation": "sigmoid", "tie_word_embeddings": False},
    ],
)
def test_gradients_by_finite_differences(config):
    config = config | SMALLER
    state = random_state(config, 1)
    sizes = [value.numel() for value in state.values()]
    tokens = torch.tensor([[1, 4, 2, 0], [3, 3, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])

    def loss(flat):
        parts = zip(state.items(), flat.split(sizes), strict=True)
        weights = {name: part.reshape(value.shape) for (name, value), part in parts}
        return ReferenceMoR(config, weights).forward(tokens, tokens, mask).loss

    flat = torch.cat([value.flatten() for value in state.values()]).requires_grad_()
    assert torch.autograd.gradcheck(loss, flat, fast_mode=True)


def test_half_precision_weights_are_computed_in_float32():
    state = {name: value.bfloat16() for name, value in random_state(EXPERT).items()}
    result = ReferenceMoR(EXPERT, state).forward(TOKENS)
    assert result.logits.dtype == torch.float32
    exact = ReferenceMoR(EXPERT, {name: value.double() for name, value in state.items()}).forward(TOKENS)
    close(result.logits.double(), exact.logits, rtol=1e-4, atol=1e-4)


# Decoding


@pytest.mark.parametrize("config", CAUSAL[:6:2])
def test_decoding_agrees_with_the_full_forward(config):
    reference = make(config)
    generated = decode.generate(reference, [3, 1, 4], 5)
    full = reference.forward(torch.tensor([generated.tokens]), mode="threshold")
    assert generated.tokens[:3] == [3, 1, 4] and len(generated.tokens) == 8
    assert generated.tokens[3:] == full.logits[0, 2:-1].argmax(-1).tolist()
    close(generated.logits, full.logits[0, 2:-1])
    assert generated.depths == full.depths[0, :-1].tolist()


def test_decoding_picks_and_stops_as_told():
    asked = []

    def pick(logits, position):
        asked.append(position)
        return position

    generated = decode.generate(make(EXPERT), [1, 2], 6, pick, stop=(4,))
    assert generated.tokens == [1, 2, 2, 3, 4] and asked == [2, 3, 4]
    assert generated.logits.shape == (3, 11) and len(generated.depths) == 4
