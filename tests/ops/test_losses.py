"""Router losses and metrics against the reference."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s


def compare(got, want, x, x64, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.dtype == wide
    s.assert_close(got, want, wide, 4)
    (gradient,) = torch.autograd.grad(got, x)
    wanted = torch.autograd.grad(want, x64, materialize_grads=True)[0] if want.requires_grad else torch.zeros_like(x64)
    s.assert_close(gradient, wanted, dtype, 4, "gradient")


@s.targets("aux_loss")
@given(batch=s.sizes, length=s.sizes, seed=s.seeds, dtype=s.dtypes, nested=st.booleans(), ragged=st.booleans(), data=st.data())  # fmt: skip # noqa: E501
def test_aux_loss(device, backend, batch, length, seed, dtype, nested, ragged, data):
    candidates = s.subset(batch, length, seed) if nested else None
    seqlens = s.lengths(batch, length, seed + 1) if ragged else None
    scored = length if candidates is None else candidates.shape[1]
    x = s.normal((batch, length, 1), seed + 2, torch.float64)
    k = data.draw(st.integers(0, scored))
    kept = ops.route(x, torch.ones(1, dtype=torch.float64), k, candidates=candidates, seqlens=seqlens).indices
    logits = s.normal((batch, scored), seed + 3, dtype)
    if ragged and not nested:
        logits = s.poison_tail(logits, seqlens)
    a, a64 = logits.to(device).requires_grad_(), logits.double().requires_grad_()
    moved = {n: None if t is None else t.to(device) for n, t in (("candidates", candidates), ("seqlens", seqlens))}
    got = ops.aux_loss(a, kept.to(device), backend=backend, **moved)
    compare(got, reference.aux_loss(a64, candidates, kept, seqlens), a, a64, dtype)


@s.targets("z_loss")
@given(batch=s.sizes, length=s.sizes, experts=st.integers(0, 4), seed=s.seeds, dtype=s.dtypes, masked=st.booleans())
def test_z_loss(device, backend, batch, length, experts, seed, dtype, masked):
    logits = s.normal((batch, length, experts) if experts else (batch, length), seed, dtype)
    valid = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.7 if masked else None
    a, a64 = logits.to(device).requires_grad_(), logits.double().requires_grad_()
    got = ops.z_loss(a, valid=None if valid is None else valid.to(device), backend=backend)
    compare(got, reference.z_loss(a64, valid), a, a64, dtype)


@s.targets("balance_loss")
@given(batch=s.sizes, length=s.sizes, experts=st.integers(1, 4), seed=s.seeds, dtype=s.dtypes,
       scope=st.sampled_from(["sequence", "batch"]))  # fmt: skip
def test_balance_loss(device, backend, batch, length, experts, seed, dtype, scope):
    probs = s.normal((batch, length, experts), seed).softmax(-1).to(dtype)
    depths = torch.randint(0, experts + 1, (batch, length), generator=torch.Generator().manual_seed(seed))
    a, a64 = probs.to(device).requires_grad_(), probs.double().requires_grad_()
    got = ops.balance_loss(a, depths.to(device), scope=scope, backend=backend)
    compare(got, reference.balance_loss(a64, depths, scope), a, a64, dtype)


def test_infinite_logits_give_a_finite_gradient():
    logits = torch.tensor([[torch.inf, -torch.inf, 0.0]], requires_grad=True)
    loss = ops.aux_loss(logits, torch.tensor([[0]]))
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()


@given(experts=st.integers(1, 5), seed=s.seeds, rate=st.sampled_from([0.001, 0.5]))
def test_router_bias_update(experts, seed, rate):
    bias = s.normal((experts,), seed, torch.float32)
    counts = torch.randint(0, 9, (experts,), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        ops.router_bias_update(bias, counts, rate), reference.router_bias_update(bias, counts, rate)
    )


@given(batch=s.sizes, length=s.sizes, experts=st.integers(1, 4), seed=s.seeds)
def test_metrics(batch, length, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    kept, predicted, valid = (torch.rand(batch, length, generator=generator) < p for p in (0.3, 0.5, 0.8))
    assert ops.dead_token_ratio(kept).item() == torch.tensor(reference.dead_token_ratio(kept)).item()
    for mask in (None, valid):
        got, want = ops.sampling_accuracy(predicted, kept, mask), reference.sampling_accuracy(predicted, kept, mask)
        torch.testing.assert_close(got, torch.tensor(want))
    counts = torch.randint(0, 5, (experts,), generator=generator)
    torch.testing.assert_close(ops.max_vio(counts), torch.tensor(reference.max_vio(counts)))
    probs = s.normal((7, experts), seed).softmax(-1)
    torch.testing.assert_close(ops.routing_entropy(probs), reference.routing_entropy(probs))


def test_known_metrics():
    assert math.isclose(ops.max_vio(torch.tensor([6, 3, 0])).item(), 1.0)
    assert math.isclose(ops.routing_entropy(torch.full((5, 3), 1 / 3)).item(), math.log(3), rel_tol=1e-6)
    assert ops.balance_loss(torch.full((1, 3, 3), 1 / 3), torch.tensor([[1, 2, 3]])).item() == 1.0
