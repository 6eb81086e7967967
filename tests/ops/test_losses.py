"""Router losses and metrics against the reference."""

from __future__ import annotations

import contextlib
import importlib
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s


def blocks_of(backend, small):
    """With ``small``, Triton programs that work on few elements each, so that small inputs take many of them."""
    if backend != "triton" or not small:
        return contextlib.nullcontext()
    kernels = importlib.import_module("mor_kernels.ops.losses.triton")
    return mock.patch.multiple(kernels, BLOCK=8, PARTS=2)


def compare(got, want, x, x64, dtype, terms=(0.0, 0.0)):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.dtype == wide
    # sums of few thousand elements, as trees; fp32 logarithms and exponentials
    s.assert_close(got, want, wide, 4, terms=terms[0])
    (gradient,) = torch.autograd.grad(got, x)
    wanted = torch.autograd.grad(want, x64, materialize_grads=True)[0] if want.requires_grad else torch.zeros_like(x64)
    s.assert_close(gradient, wanted, dtype, 4, "gradient", terms=terms[1])


@s.targets("aux_loss")
@given(batch=s.sizes, length=s.sizes, seed=s.seeds, dtype=s.dtypes, nested=st.booleans(), ragged=st.booleans(),
       small=st.booleans(), data=st.data())  # fmt: skip
def test_aux_loss(device, backend, batch, length, seed, dtype, nested, ragged, small, data):
    s.assume_served(device, backend, dtype)
    length = s.larger(device, seed, length)
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
    with blocks_of(backend, small):
        got = ops.aux_loss(a, kept.to(device), backend=backend, **moved)
        compare(got, reference.aux_loss(a64, candidates, kept, seqlens), a, a64, dtype)


@s.targets("z_loss")
@given(batch=s.sizes, length=s.sizes, experts=st.integers(0, 5), seed=s.seeds, dtype=s.dtypes, masked=st.booleans(),
       strided=st.booleans(), small=st.booleans())  # fmt: skip
def test_z_loss(device, backend, batch, length, experts, seed, dtype, masked, strided, small):
    s.assume_served(device, backend, dtype)
    length = s.larger(device, seed, length)
    logits = s.normal((batch, length, experts) if experts else (batch, length), seed, dtype, strided)
    valid = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.7 if masked else None
    a, a64 = logits.clone(), logits.double().requires_grad_()
    if masked:
        a[~valid] = torch.nan
    a, terms = a.to(device).requires_grad_(), (0.0, 0.0)
    if experts > 1:  # a logit and a logarithm of about 1 may cancel, and are squared then
        z, share = logits.double(), torch.ones(batch, length) if valid is None else valid.double()
        off = 2 * (z.abs().amax(-1) + 1) * share / share.sum().clamp(min=1)
        terms = (off * z.logsumexp(-1).abs()).sum(), off[..., None] * z.softmax(-1)
    with blocks_of(backend, small):
        got = ops.z_loss(a, valid=None if valid is None else valid.to(device), backend=backend)
        compare(got, reference.z_loss(a64, valid), a, a64, dtype, terms)


@s.targets("balance_loss")
@given(batch=s.sizes, length=s.sizes, experts=st.integers(1, 4), seed=s.seeds, dtype=s.dtypes,
       scope=st.sampled_from(["sequence", "batch"]), integers=st.sampled_from([torch.int64, torch.int32]),
       small=st.booleans())  # fmt: skip
def test_balance_loss(device, backend, batch, length, experts, seed, dtype, scope, integers, small):
    s.assume_served(device, backend, dtype)
    length = s.larger(device, seed, length)
    probs = s.normal((batch, length, experts), seed).softmax(-1).to(dtype)
    depths = torch.randint(0, experts + 1, (batch, length), generator=torch.Generator().manual_seed(seed))
    a, a64 = probs.clone(), probs.double().requires_grad_()
    a[depths == 0] = torch.nan
    a = a.to(device).requires_grad_()
    with blocks_of(backend, small):
        got = ops.balance_loss(a, depths.to(device, integers), scope=scope, backend=backend)
        compare(got, reference.balance_loss(a64, depths, scope), a, a64, dtype)


LOSSES = {
    "aux_loss": lambda t, depths, **options: ops.aux_loss(
        t[..., 0], torch.where(depths > 0, torch.arange(depths.shape[1], device=depths.device), -1), **options
    ),
    "z_loss": lambda t, _, **options: ops.z_loss(t, **options),
    "balance_loss": lambda t, depths, **options: ops.balance_loss(t, depths, **options),
    "balance_loss of a batch": lambda t, depths, **options: ops.balance_loss(t, depths, scope="batch", **options),
}


@s.targets("aux_loss")
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 2)])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_nothing_is_zero(device, backend, name, shape):
    t = torch.ones(shape, device=device, requires_grad=True)
    nobody = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    if name == "aux_loss":  # nothing is kept, and no position is real
        none = torch.zeros(shape[0], dtype=torch.int64, device=device)
        loss = ops.aux_loss(t[..., 0], nobody[:, :0], seqlens=none, backend=backend)
    elif name == "z_loss":
        loss = ops.z_loss(t, valid=nobody > 0, backend=backend)
    else:
        loss = LOSSES[name](t, nobody, backend=backend)
    (gradient,) = torch.autograd.grad(loss, t)
    assert loss.item() == 0 and gradient.shape == t.shape and not gradient.any()


@s.targets("aux_loss")
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_many(device, backend, name):
    """Longer sums than the reference has time for, against eager float64."""
    shape = (3, 1501, 3)
    t = s.normal(shape, 0, torch.float32)
    depths = torch.sort(torch.randint(0, 4, shape[:2], generator=torch.Generator().manual_seed(0)), descending=True)[0]
    a, a64 = t.to(device).requires_grad_(), t.double().requires_grad_()
    got = LOSSES[name](a, depths.to(device), backend=backend)
    want = LOSSES[name](a64, depths, backend="eager")
    s.assert_close(got, want, torch.float32, 4)  # sums are trees, so their error hardly grows with their length
    (got,), (want,) = torch.autograd.grad(got, a), torch.autograd.grad(want, a64)
    s.assert_close(got, want, torch.float32, 4, "gradient")


@s.targets("aux_loss")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_extreme_logits(device, backend):
    logits = torch.tensor([[torch.inf, -torch.inf, 0.0, 30.0]], device=device, requires_grad=True)
    kept = torch.tensor([[0, 3]], device=device)
    loss = ops.aux_loss(logits, kept, backend=backend)
    loss.backward()
    torch.testing.assert_close(loss.cpu(), torch.tensor(math.log(2) / 4))
    torch.testing.assert_close(logits.grad.cpu(), torch.tensor([[0.0, 0.0, 0.125, 0.0]]))
    wrong = ops.aux_loss(logits.detach()[:, :1], kept[:, :0], backend=backend)
    assert wrong.item() == torch.finfo(torch.float32).max
    assert ops.z_loss(logits.detach()[:, None], backend=backend).item() == torch.inf
    sure = torch.tensor([[-20.0]], device=device)  # 1 + exp(-20) is 1.0 in fp32, yet the loss isn't 0
    loss = ops.aux_loss(sure, kept[:, :0], backend=backend)
    torch.testing.assert_close(loss.cpu(), torch.tensor(math.log1p(math.exp(-20))), rtol=1e-5, atol=0)
    assert ops.aux_loss(sure * torch.nan, kept[:, :0], backend=backend).isnan()
    assert ops.z_loss(torch.stack((sure, sure * torch.nan), -1), backend=backend).isnan()


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
    for mask in (None, valid):
        dead = ops.dead_token_ratio(kept, mask)
        assert dead.item() == torch.tensor(reference.dead_token_ratio(kept, mask)).item()
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
