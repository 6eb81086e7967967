"""Bad input: every message names the op, the argument, what was expected and what came. And the choice of a backend.

Of values, and of what is written, see test_values.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mor_kernels import ops
from mor_kernels.ops import _dispatch
from tests.strategies import DEVICES

X, W = torch.ones(2, 5, 4), torch.ones(4)
I2 = torch.tensor([[0, 1, 4], [2, -1, -1]])
I5 = torch.ones(2, 5, dtype=torch.int64)
Q, K = torch.ones(2, 3, 6, 4), torch.ones(2, 5, 2, 4)
CACHE = torch.ones(3, 4, 2, 4)
NEW = torch.ones(2, 2, 4)
TABLE = torch.zeros(1, 1, dtype=torch.int32)
CU = torch.tensor([0, 2], dtype=torch.int32)
PAGES = ops.Pages.new(2, 4, 3, "cpu")
FLIGHT = {"x": X[0], "update": X[1], "logits": X[0, :, 0], "recursions": torch.zeros(5).long(), "weight": X[0, :3]}


def attend(**changed):
    """A call of paged attention that is right but for what changed."""
    arguments = {"q": Q[0, :1], "k_cache": CACHE, "v_cache": CACHE, "page_table": TABLE, "k_lens": CU[1:] * 2}
    return ops.paged_attention(**(arguments | changed))


def step(**changed):
    """A call of a decoding step's end that is right but for what changed."""
    arguments = {name: t.clone() for name, t in FLIGHT.items()}
    return ops.depth_step_(**(arguments | changed))


def sample(**changed):
    """A choice of tokens that is right but for what changed."""
    numbers = dict.fromkeys(("temperature", "top_p", "min_p"), X[0, :, 0])
    return ops.sample(**({"logits": X[0]} | numbers | dict.fromkeys(("top_k", "seed", "position"), I5[0]) | changed))


def linear(**changed):
    """A call of a linear layer of few rows that is right but for what changed."""
    return ops.decode_linear(**({"x": X[0], "weight": X[1, :2]} | changed))


def to_heads(**changed):
    """A call of a projection into heads that is right but for what changed."""
    arguments = {"x": X[0, :2], "weight": torch.ones(28, 4), "k_cache": CACHE, "v_cache": CACHE, "slots": I2[0, :2],
                 "heads": 3, "positions": I2[0, :2], "norm_weight": W}  # fmt: skip
    return ops.decode_qkv_(**(arguments | changed))


def cross_entropy(**changed):
    """A call of a linear layer's cross-entropy that is right but for what changed."""
    return ops.linear_cross_entropy(**({"x": X, "weight": X[0], "targets": I5} | changed))


BAD = [
    (lambda: ops.route(X[0], W, 1), r"route: x: expected shape \(B, N, D\), got \(5, 4\)"),
    (lambda: ops.route([1.0], W, 1), "route: x: expected a tensor, got list"),
    (lambda: ops.route(X.long(), W, 1), "route: x: expected dtype float32 or .* or float64, got torch.int64"),
    (lambda: ops.route(X, W[:3], 1), r"route: weight: expected shape \(4\), got \(3\)"),
    (lambda: ops.route(X, None, 1), "route: weight, logits: expected exactly one of them, got neither"),
    (lambda: ops.route(X, W, 6), "route: k: expected at most the 5 candidates, got 6"),
    (lambda: ops.route(X, W, -1), "route: k: expected a whole number of at least 0, got -1"),
    (lambda: ops.route(X, W, "1"), "route: k: expected a whole number of at least 0, got '1'"),
    (lambda: ops.route(X, W, 1, activation="relu"), "route: activation: expected 'sigmoid' or .*, got 'relu'"),
    (lambda: ops.route(X, W, 1, rank="best"), "route: rank: expected 'logit' or 'score', got 'best'"),
    (lambda: ops.z_loss(torch.ones(2, 3, 0)), "z_loss: logits: expected at least one expert, got 0"),
    (
        lambda: ops.balance_loss(torch.ones(2, 3, 0), torch.ones(2, 3, dtype=torch.int64)),
        "balance_loss: probs: expected at least one expert, got 0",
    ),
    (lambda: ops.route(X, W, 1, alpha="0.1"), "route: alpha: expected a number, got '0.1'"),
    (lambda: ops.attention(Q, K, K, softmax_scale="1"), "attention: softmax_scale: expected a number, got '1'"),
    (lambda: ops.rms_norm(X, W, None), "rms_norm: eps: expected a number, got None"),
    (lambda: ops.route(X, W, 1, temperature=0.0), "route: temperature: expected a finite number > 0 in fp32, got 0.0"),
    (lambda: ops.route(X, W, 1, candidates=I2.int()), "route: candidates: expected dtype int64, got torch.int32"),
    (lambda: ops.route(X, W, 2, indices=I2), r"route: indices: expected shape \(2, 2\), got \(2, 3\)"),
    (lambda: ops.route(X, W, 1, seqlens=torch.ones(3).long()), r"route: seqlens: expected shape \(2\), got \(3\)"),
    (lambda: ops.route(X, None, 1, logits=X[..., 0].half()), "route: logits: expected dtype float32, got"),
    (lambda: ops.route(X, W.to("meta"), 1), "route: weight: expected device cpu, got meta"),
    (lambda: ops.route(X, W, 1.0), "route: k: expected a whole number of at least 0, got 1.0"),
    (lambda: ops.route(X, W, 1, candidates=I2, indices=I2[:, :1] + 3), "route: indices: expected candidates of"),
    (
        lambda: ops.route(X, W, 1, seqlens=torch.tensor([5, 1]), indices=I2[:, :1]),
        "route: indices: expected candidates of",
    ),
    (lambda: ops.gather([1], I2), "gather: x: expected a tensor, got list"),
    (lambda: ops.gather(X, I2), r"gather: indices: expected shape \(n\), got \(2, 3\)"),
    (lambda: ops.pack_depths(X[..., 0], 2), "pack_depths: depths: expected dtype int64 or int32, got torch.float32"),
    (lambda: ops.pack_depths(I2, 0), "pack_depths: num_recursions: expected a whole number of at least 1, got 0"),
    (lambda: ops.scatter_back(W, W, I2), r"scatter_back: x: expected a tensor of shape \(B, N, D\) or \(M, D\)"),
    (lambda: ops.scatter_back(X, X, I2), r"scatter_back: update: expected shape \(2, 3, 4\), got \(2, 5, 4\)"),
    (lambda: ops.scatter_back(X, X[:, :3], I2, residual="add"), "scatter_back: residual: expected 'block' or"),
    (lambda: ops.scatter_back_(X, X, I2), r"scatter_back_: update: expected shape \(2, 3, 4\), got \(2, 5, 4\)"),
    (lambda: step(x=X), r"depth_step_: x: expected shape \(n, D\), got \(2, 5, 4\)"),
    (lambda: step(update=X[1, :4]), r"depth_step_: update: expected shape \(5, 4\), got \(4, 4\)"),
    (lambda: step(logits=X[0, :, 0].half()), "depth_step_: logits: expected dtype float32, got torch.float16"),
    (lambda: step(recursions=I2[0]), r"depth_step_: recursions: expected shape \(5\), got \(3\)"),
    (lambda: step(weight=X[0, :0]), "depth_step_: weight: expected at least one router, got 0"),
    (lambda: step(weight=W), r"depth_step_: weight: expected shape \(Nr, 4\), got \(4\)"),
    (lambda: step(aux_weight=X[0]), r"depth_step_: aux_weight: expected shape \(3, 4\), got \(5, 4\)"),
    (lambda: step(last=X[0, :, 0]), "depth_step_: last: expected dtype int64, got torch.float32"),
    (lambda: step(replayed=FLIGHT["recursions"]), "depth_step_: replayed: expected dtype bool, got torch.int64"),
    (lambda: step(activation="softmax"), "depth_step_: activation: expected 'sigmoid' or .*, got 'softmax'"),
    (lambda: step(residual="add"), "depth_step_: residual: expected 'block' or .*, got 'add'"),
    (lambda: step(temperature=0.0), "depth_step_: temperature: expected a finite number > 0 in fp32, got 0.0"),
    (lambda: sample(logits=X), r"sample: logits: expected shape \(n, V\), got \(2, 5, 4\)"),
    (lambda: sample(logits=X[0, :, :0]), "sample: logits: expected at least one token, got 0"),
    (lambda: sample(logits=I5), "sample: logits: expected dtype float32 or .*, got torch.int64"),
    (lambda: sample(temperature=X[0, :, 0].half()), "sample: temperature: expected dtype float32 or float64, got"),
    (lambda: sample(top_p=W), r"sample: top_p: expected shape \(5\), got \(4\)"),
    (lambda: sample(min_p=1.0), "sample: min_p: expected a tensor, got float"),
    (lambda: sample(top_k=I5[0].int()), "sample: top_k: expected dtype int64, got torch.int32"),
    (lambda: sample(seed=I5[0].to("meta")), "sample: seed: expected device cpu, got meta"),
    (lambda: sample(position=X[0, :, 0]), "sample: position: expected dtype int64, got torch.float32"),
    (lambda: ops.attention(Q, K[..., :3], K), r"attention: k: expected shape \(2, Tk, G, 4\), got \(2, 5, 2, 3\)"),
    (lambda: ops.attention(Q[:, :, :5], K, K), "attention: k: expected a number .* divides the 5 query heads, got 2"),
    (lambda: ops.attention(Q, K.half(), K), "attention: k: expected the dtype of q, torch.float32, got torch.float16"),
    (lambda: ops.attention(Q, K, K, q_positions=I2[:1]), r"attention: q_positions: expected shape \(2, 3\)"),
    (
        lambda: ops.attention_varlen(Q[0], K[0], K[0], CU.long(), CU, 2, 2),
        "attention_varlen: cu_seqlens_q: expected dtype int32, got torch.int64",
    ),
    (lambda: ops.attention_varlen(Q[0], K[0], K[0], CU, CU, 2, -2), "max_seqlen_k: expected a whole number"),
    (lambda: ops.kv_append(NEW, NEW, CACHE, CACHE, I2[0]), r"kv_append: slots: expected shape \(2\), got \(3\)"),
    (lambda: ops.kv_append(NEW, NEW, CACHE, CACHE[:2], I2[0, :2]), r"kv_append: v_cache: expected shape"),
    (
        lambda: ops.kv_append_(*[NEW[..., :3]] * 2, *[CACHE[..., :3]] * 2, I2[0, :2], positions=I2[0, :2]),
        "kv_append_: k: expected an even last dimension, to turn by positions, got 3",
    ),
    (
        lambda: ops.kv_append_(NEW, NEW, CACHE, CACHE, I2[0, :2], q=Q[0, :2]),
        "kv_append_: positions: expected positions, where q goes, got None",
    ),
    (
        lambda: ops.kv_append_(NEW, NEW, CACHE, CACHE, I2[0, :2], k_scale=torch.ones(2)),
        "kv_append_: k_scale: expected None, for caches of torch.float32, got a tensor",
    ),
    (
        lambda: ops.kv_append_(NEW, NEW, *[CACHE.to(torch.float8_e4m3fn)] * 2, I2[0, :2], v_scale=torch.ones(3)),
        r"kv_append_: v_scale: expected shape \(2\), got \(3\)",
    ),
    (
        lambda: ops.kv_append(NEW, NEW, *[CACHE.to(torch.float8_e4m3fn)] * 2, I2[0, :2]),
        "kv_append: k_cache: expected a dtype that has gradients .* got torch.float8_e4m3fn",
    ),
    (lambda: attend(q=Q[0, :1, :5]), "paged_attention: k_cache: expected a number .* divides the 5 query heads, got 2"),
    (lambda: attend(k_cache=CACHE.double(), v_cache=CACHE.double()), "k_cache: expected the dtype of q, torch.float32"),
    (lambda: attend(k_lens=torch.tensor([4])), "paged_attention: k_lens: expected dtype int32, got torch.int64"),
    (
        lambda: attend(q=Q[0]),
        "paged_attention: cu_seqlens_q: expected where the queries of each lane begin, for 3 of 1 lanes",
    ),
    (lambda: attend(schedule=TABLE[0]), r"paged_attention: schedule: expected \d+ numbers, .* returns .*, got 1"),
    (
        lambda: ops.attention_schedule(CU, 5, 2, 2),
        "attention_schedule: groups: expected a number .* 5 query heads, got 2",
    ),
    (
        lambda: ops.attention_schedule(CU, 6, 3, 2, k_cache=CACHE),
        r"attention_schedule: k_cache: expected shape \(num_pages, page_size, 3, d\), got \(3, 4, 2, 4\)",
    ),
    (
        lambda: ops.take_pages_(PAGES, torch.tensor([0]), CU, 2, 0),
        "take_pages_: page_size: expected a whole number of at",
    ),
    (
        lambda: ops.free_pages_(PAGES._replace(page_table=PAGES.page_table.T.contiguous().T), torch.tensor([0])),
        "free_pages_: pages.page_table: expected a contiguous tensor, got strides",
    ),
    (
        lambda: ops.enter_(X[0], X[0], I5[0], X[0, :, 0].contiguous()),
        "enter_: weight: expected a router where logits are given",
    ),
    (
        lambda: ops.leave(I2[0] > 0, ops.Lanes.new(2, 0, "cpu"), X[0], 1),
        "leave: goes_on: expected at most the 2 slots of the table, got 3",
    ),
    (
        lambda: ops.advance_(I2[0], I2[0] > 0, None, ops.Lanes.new(I2.shape[1], 0, "cpu"), I2[0], PAGES, None, 1, 4),
        "advance_: record: expected shape",
    ),
    (
        lambda: ops.commit_pages_(PAGES, torch.tensor([0]), CU.long()),
        "commit_pages_: cu_seqlens: expected dtype int32, got torch.int64",
    ),
    (lambda: ops.rope(torch.ones(3), torch.arange(2)), r"rope: x: expected shape \(..., H, d\), got \(3\)"),
    (lambda: ops.rope(torch.ones(2, 1, 3), torch.arange(2)), "rope: x: expected an even last dimension, got 3"),
    (lambda: ops.rope((NEW, NEW, NEW), I2[0]), "rope: x: expected a tensor or a pair of them, got 3 of them"),
    (lambda: ops.rope((NEW, NEW[..., :2]), I2[0, :2]), r"rope: k: expected shape \(2, G, 4\), got \(2, 2, 2\)"),
    (lambda: ops.rope((NEW, NEW.half()), I2[0, :2]), "rope: k: expected the dtype of q, torch.float32, got"),
    (lambda: ops.rope_qkv(NEW, 0, I2[0, :2]), "rope_qkv: heads: expected a whole number of at least 1, got 0"),
    (lambda: ops.rope_qkv(torch.ones(2, 4, 4), 3, I2[0, :2]), "rope_qkv: qkv: expected 3 heads of queries, and"),
    (lambda: ops.rope_qkv(torch.ones(2, 3, 5), 1, I2[0, :2]), "rope_qkv: qkv: expected an even last dimension, got 5"),
    (lambda: ops.rope_qkv(torch.ones(2, 3, 4), 1, I2[0]), r"rope_qkv: positions: expected shape \(2\), got \(3\)"),
    (lambda: ops.rope(NEW, I2[0]), r"rope: positions: expected shape \(2\), got \(3\)"),
    (lambda: ops.rope(NEW, I2[0, :2].double()), "rope: positions: expected dtype int64 or .* or uint8, got"),
    (lambda: ops.rope(NEW, I2[0, :2], 0.0), "rope: theta: expected a finite number > 0 in fp32, got 0.0"),
    (lambda: ops.rms_norm(X[0].tolist(), X[0, 0]), "rms_norm: x: expected a tensor, got list"),
    (lambda: ops.rms_norm(X, X[0, :, 0]), r"rms_norm: norm_weight: expected shape \(4\), got .5\)"),
    (lambda: ops.rms_norm(X, X[0, 0], add=X[0]), r"rms_norm: add: expected shape \(2, 5, 4\), got"),
    (lambda: ops.rms_norm(X, X[0, 0].half()), "rms_norm: norm_weight: expected the dtype of x, .*"),
    (lambda: ops.rms_norm_linear(X[0].tolist(), X[0, 0], X[0]), "rms_norm_linear: x: expected a tensor, got list"),
    (lambda: ops.rms_norm_linear(X, X[0, :, 0], X[0]), r"rms_norm_linear: norm_weight: expected shape \(4\), got .5\)"),
    (lambda: ops.rms_norm_linear(X, X[0, 0], X[0, :, :3]), r"rms_norm_linear: weight: expected shape \(O, 4\), got"),
    (lambda: ops.rms_norm_linear(X, X[0, 0], X[0], add=X[0]), r"rms_norm_linear: add: expected shape \(2, 5, 4\), got"),
    (lambda: ops.rms_norm_linear(X, X[0, 0], X[0], add=X.half()), "rms_norm_linear: add: expected the dtype of x, .*"),
    (lambda: ops.rms_norm_linear(X, X[0, 0].half(), X[0]), "rms_norm_linear: norm_weight: expected the dtype of x, .*"),
    (lambda: ops.rms_norm_linear(X, X[0, 0], X[0].to("meta")), "rms_norm_linear: weight: expected device cpu, got"),
    (lambda: ops.swiglu_linear([1.0], X[0]), "swiglu_linear: gate_up: expected a tensor, got list"),
    (lambda: ops.swiglu_linear(X[..., :3], X[0]), "swiglu_linear: gate_up: expected an even last dimension, got 3"),
    (lambda: ops.swiglu_linear(X.long(), X[0]), "swiglu_linear: gate_up: expected dtype .*, got torch.int64"),
    (lambda: ops.swiglu_linear(X, X[0]), r"swiglu_linear: weight: expected shape \(D, 2\), got \(5, 4\)"),
    (lambda: ops.swiglu_linear(X, X[0, :, :2].half()), "swiglu_linear: weight: expected the dtype of gate_up, .*, got"),
    (lambda: ops.swiglu_linear(X, X[0, :, :2].to("meta")), "swiglu_linear: weight: expected device cpu, got meta"),
    (lambda: linear(x=X), r"decode_linear: x: expected shape \(n, K\), got \(2, 5, 4\)"),
    (lambda: linear(x=X[0, :, :0], weight=X[0, :, :0]), "decode_linear: x: expected at least one column, got 0"),
    (lambda: linear(weight=X[0, :, :3]), r"decode_linear: weight: expected shape \(O, 4\), got \(5, 3\)"),
    (lambda: linear(weight=X[0].half()), "decode_linear: weight: expected the dtype of x, torch.float32, got"),
    (lambda: linear(weight=X[0].to("meta")), "decode_linear: weight: expected device cpu, got meta"),
    (lambda: linear(weight=X[0], gated=True), "decode_linear: weight: expected an even number of rows, .*, got 5"),
    (lambda: linear(norm_weight=W[:3]), r"decode_linear: norm_weight: expected shape \(4\), got \(3\)"),
    (
        lambda: linear(norm_weight=W, squares=X[0]),
        "decode_linear: squares: expected None beside norm_weight, got a tensor",
    ),
    (lambda: linear(squares=X[0, :3]), r"decode_linear: squares: expected shape \(5, P\), got \(3, 4\)"),
    (lambda: linear(squares=X[0, :, :0]), "decode_linear: squares: expected at least one column, got 0"),
    (lambda: linear(squares=X[0].half()), "decode_linear: squares: expected dtype float32, got torch.float16"),
    (lambda: linear(next_norm_weight=W), r"decode_linear: next_norm_weight: expected shape \(2\), got \(4\)"),
    (lambda: linear(next_norm_weight=W[:2].half()), "decode_linear: next_norm_weight: expected the dtype of x, .*"),
    (
        lambda: linear(next_norm_weight=W[:1], gated=True),
        "decode_linear: next_norm_weight: expected None beside gated, got a tensor",
    ),
    (lambda: linear(residual=X[0]), r"decode_linear: residual: expected shape \(5, 2\), got \(5, 4\)"),
    (lambda: linear(residual=X[0], gated=True), r"decode_linear: residual: expected shape \(5, 1\), got"),
    (lambda: to_heads(heads=0), "decode_qkv_: heads: expected a whole number of at least 1, got 0"),
    (lambda: to_heads(heads=4), r"decode_qkv_: weight: expected shape \(32, 4\), got \(28, 4\)"),
    (lambda: to_heads(norm_weight=None), "decode_qkv_: norm_weight: expected a tensor, got NoneType"),
    (lambda: to_heads(squares=X[0]), "decode_qkv_: squares: expected None beside norm_weight, got a tensor"),
    (
        lambda: to_heads(norm_weight=None, squares=X[0]),
        r"decode_qkv_: squares: expected shape \(2, P\), got \(5, 4\)",
    ),
    (lambda: to_heads(norm_weight=W.half()), "decode_qkv_: norm_weight: expected the dtype of x, .*, got"),
    (lambda: to_heads(v_cache=CACHE[:2]), r"decode_qkv_: v_cache: expected shape \(3, 4, 2, 4\), got"),
    (lambda: to_heads(slots=I2[0]), r"decode_qkv_: slots: expected shape \(2\), got \(3\)"),
    (lambda: to_heads(positions=W[:2]), "decode_qkv_: positions: expected dtype int64 or int32, got torch.float32"),
    (lambda: to_heads(theta=0.0), "decode_qkv_: theta: expected a finite number > 0 in fp32, got 0.0"),
    (
        lambda: to_heads(**dict.fromkeys(("k_cache", "v_cache"), CACHE[..., :3]), weight=torch.ones(21, 4)),
        "decode_qkv_: k_cache: expected heads of an even width, to turn by positions, got 3",
    ),
    (lambda: cross_entropy(x=[1.0]), "linear_cross_entropy: x: expected a tensor, got list"),
    (lambda: cross_entropy(x=X.long()), "linear_cross_entropy: x: expected dtype .*, got torch.int64"),
    (lambda: cross_entropy(weight=W), r"linear_cross_entropy: weight: expected shape \(V, 4\), got \(4\)"),
    (lambda: cross_entropy(weight=X[0].half()), "linear_cross_entropy: weight: expected the dtype of x, .*, got"),
    (lambda: cross_entropy(weight=X[0].to("meta")), "linear_cross_entropy: weight: expected device cpu, got meta"),
    (lambda: cross_entropy(targets=I2), r"linear_cross_entropy: targets: expected shape \(2, 5\), got \(2, 3\)"),
    (lambda: cross_entropy(targets=X[..., 0].int()), "linear_cross_entropy: targets: expected dtype int64, got"),
    (lambda: ops.aux_loss(X[..., 0], I2[:1]), r"aux_loss: kept: expected shape \(2, k\), got \(1, 3\)"),
    (lambda: ops.z_loss(W), r"z_loss: logits: expected shape \(B, C\) or \(B, N, Nr\)"),
    (lambda: ops.balance_loss(X, I2), r"balance_loss: depths: expected shape \(2, 5\), got \(2, 3\)"),
    (lambda: ops.balance_loss(X, X[..., 0].long(), scope="token"), "balance_loss: scope: expected 'sequence' or"),
    (lambda: ops.choose_depths(X, activation="tanh"), "choose_depths: activation: expected 'softmax' or"),
    (lambda: ops.choose_depths(X, bias=W[:3]), r"choose_depths: bias: expected shape \(4\), got \(3\)"),
    (lambda: ops.choose_depths(X, valid=X[0] > 0), r"choose_depths: valid: expected shape \(2, 5\), got \(5, 4\)"),
    (lambda: ops.sampling_accuracy(X > 0, X > 0, W > 0), r"sampling_accuracy: valid: expected shape \(2, 5, 4\), got"),
    (lambda: ops.router_bias_update(W, W[:2]), r"router_bias_update: counts: expected shape \(4\), got \(2\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_message(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("argument", range(3))
def test_float64_is_left_to_eager(argument):
    pytest.importorskip("triton")
    x, update, gates = (
        torch.ones(shape, dtype=torch.float64 if i == argument else torch.float32, device=DEVICES[-1])
        for i, shape in enumerate([(2, 5, 4), (2, 3, 4), (2, 3)])
    )
    index = I2.to(x.device)
    with pytest.raises(RuntimeError, match="backend='triton' is not available: float64 is computed by the eager"):
        ops.scatter_back(x, update, index, gates, backend="triton")
    assert ops.scatter_back(x, update, index, gates).dtype == x.dtype


@pytest.mark.parametrize("backend", ["triton", "cuda", "fast"])
def test_named_backend_is_never_replaced(backend):
    if _dispatch.unavailable(backend, "route", "cpu") is None:
        assert _dispatch.resolve("route", backend, X) == backend
        return
    with pytest.raises(RuntimeError, match=f"route: backend='{backend}' is not available: "):
        ops.route(X, W, 1, backend=backend)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rms_norm", lambda **which: ops.rms_norm(X, W, **which)),
        ("rms_norm_linear", lambda **which: ops.rms_norm_linear(X, W, X[0], **which)),
        ("swiglu_linear", lambda **which: ops.swiglu_linear(X, X[0, :, :2], **which)),
        ("linear_cross_entropy", lambda **which: ops.linear_cross_entropy(X, X[0], I5, **which)),
        ("rope_qkv", lambda **which: ops.rope_qkv(torch.ones(2, 3, 4), 1, I2[0, :2], **which)),
    ],
)
def test_a_backend_that_is_not_there_is_not_there_for_the_op_that_was_called(name, call):
    with pytest.raises(RuntimeError, match=f"^{name}: backend='fast' is not available: "):
        call(backend="fast")


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "", **environment})


def test_backend_of_the_environment():
    code = "import torch; from mor_kernels import ops; print(ops.gather(torch.ones(2, 1), torch.tensor([1])).item())"
    assert run(code, MOR_BACKEND="eager").stdout == "1.0\n"
    failed = run(code, MOR_BACKEND="fast")
    assert failed.returncode and "gather: MOR_BACKEND='fast' is not available: expected one of eager" in failed.stderr
