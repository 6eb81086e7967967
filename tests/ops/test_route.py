"""Routing against the reference: the choice exactly, gates and gradients within rounding."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s


def compare(got, want, dtype, sizes=None):
    assert torch.equal(got.indices.cpu(), want.indices)
    assert torch.equal(got.counts.cpu(), want.counts)
    assert torch.equal(got.rows.cpu(), want.rows.to(dtype))  # a gather copies bits
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.gates.dtype == got.logits.dtype == wide
    # gates and logits are fp32 whatever the dtype of x: one rounding each, and an fp32 sum
    of_gates, of_logits = (0.0, 0.0) if sizes is None else (sizes.gates, sizes.logits)
    s.assert_close(got.gates, want.gates, wide, message="gates", terms=of_gates)
    s.assert_close(got.logits, want.logits, wide, message="logits", terms=of_logits)


def projected(routed, seed, signed=True):
    """A loss that gives rows, gates and logits random gradients."""
    outputs = (routed.rows, routed.gates, routed.logits)
    upstream = [s.normal(t.shape, seed + i).to(t.device) for i, t in enumerate(outputs)]
    return sum((t.double() * (u if signed else u.abs())).sum() for t, u in zip(outputs, upstream))


@s.targets("route")
@given(
    batch=st.integers(0, 3), length=s.sizes, width=s.sizes, seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
    nested=st.booleans(), ragged=st.booleans(), ties=st.booleans(), data=st.data(),
    activation=st.sampled_from(["sigmoid", "tanh", "none"]), rank=st.sampled_from(["logit", "score"]),
    temperature=st.sampled_from([1.0, 0.5, 4.0]),
)  # fmt: skip
def test_equals_reference(
    device,
    backend,
    batch,
    length,
    width,
    seed,
    dtype,
    strided,
    nested,
    ragged,
    ties,
    data,
    activation,
    rank,
    temperature,
):
    s.assume_served(device, backend, dtype)
    length, width = s.larger(device, seed, length), s.wider(device, seed, width)
    make = s.tied if ties or dtype != torch.float64 else s.normal  # exact sums, so that rounding can't change a rank
    x = make((batch, length, width), seed, dtype)
    x = x if not strided or not batch else torch.stack((x, -x), dim=-1)[..., 0]
    weight = make((width,), seed + 1, dtype)
    candidates = s.subset(batch, length, seed + 2) if nested and batch else None
    seqlens = s.lengths(batch, length, seed + 3) if ragged else None
    k = data.draw(st.integers(0, length if candidates is None else candidates.shape[1]))
    if seqlens is not None and x.is_contiguous():
        x = s.poison_tail(x, seqlens)
    options = {"activation": activation, "rank": rank, "temperature": temperature, "alpha": 0.5}
    if rank == "score" and activation != "none" and dtype != torch.float64:
        options["activation"] = "none"  # a sigmoid rounded to half precision may differ by a bit and so break a tie

    move = lambda t: None if t is None else t.to(device)  # noqa: E731
    a, w = (move(t).detach().requires_grad_() for t in (x, weight))
    got = ops.route(a, w, k, candidates=move(candidates), seqlens=move(seqlens), backend=backend, **options)
    x64, w64 = (t.double().requires_grad_() for t in (x, weight))
    want = reference.route(x64, w64, k, candidates=candidates, seqlens=seqlens, **options)
    # sums of what is added up, each without its sign; gates of logits, whose slopes are 1 at most
    unsigned = {"candidates": candidates, "seqlens": seqlens, "indices": want.indices, "backend": "eager"}
    w_abs = w64.detach().abs().requires_grad_()
    sizes = ops.route(x64.detach().abs(), w_abs, k, **unsigned, **options | {"activation": "none"})
    compare(got, want, dtype, None if make is s.tied else sizes)

    repeated = ops.route(a, w, k, candidates=move(candidates), seqlens=move(seqlens), indices=got.indices, backend=backend, **options)  # fmt: skip # noqa: E501
    for one, other in zip(repeated, got):
        assert torch.equal(one, other)

    dx, dw = torch.autograd.grad(projected(got, seed), (a, w))
    wanted = projected(want, seed)
    if wanted.requires_grad:
        dx64, dw64 = torch.autograd.grad(wanted, (x64, w64), materialize_grads=True)
    else:
        dx64, dw64 = torch.zeros_like(x64), torch.zeros_like(w64)
    # the gradient of the rows comes rounded to dtype, and may cancel with that of the scores
    s.assert_close(dx, dx64, dtype, 4, "d_x", cancels=0.25)
    (of_dw,) = torch.autograd.grad(projected(sizes, seed, signed=False), w_abs)
    s.assert_close(dw, dw64, dtype, 4, "d_weight", terms=of_dw)


@s.targets("route")
@given(batch=st.integers(1, 3), length=s.sizes, seed=s.seeds, data=st.data())
def test_ready_logits(device, backend, batch, length, seed, data):
    dtype, length = torch.float64 if backend == "eager" else torch.float32, s.larger(device, seed, length)
    logits, k = s.tied((batch, length), seed, dtype), data.draw(st.integers(0, length))
    x = s.normal((batch, length, 3), seed, dtype)
    a, l = (t.to(device).requires_grad_() for t in (x, logits))
    got = ops.route(a, None, k, logits=l, temperature=2.0, backend=backend)
    x64, l64 = (t.double().requires_grad_() for t in (x, logits))
    want = reference.route(x64, None, k, logits=l64, temperature=2.0)
    compare(got, want, dtype)
    gradients = torch.autograd.grad(projected(got, seed), (a, l))
    wanted = torch.autograd.grad(projected(want, seed), (x64, l64), materialize_grads=True)
    for name, one, other in zip(("d_x", "d_logits"), gradients, wanted):
        s.assert_close(one, other, dtype, 4, name, cancels=0.25)


def small_chunks(backend, monkeypatch, **sizes):
    """What one program of a kernel works on, so small that short sequences take many."""
    if backend == "triton":
        for name, value in {"WHOLE": 16, "CHUNK": 16, "REPEATED": 16, **sizes}.items():
            monkeypatch.setattr(importlib.import_module("mor_kernels.ops.route.triton"), name, value)


KINDS = ["tied", "normal", "close", "equal", "unknown"]


def logits_of(kind, batch, length):
    make = {"tied": s.tied, "equal": lambda *shape: torch.full(shape[0], -0.5)}
    values = make.get(kind, s.normal)((batch, length), 0, torch.float32)
    if kind == "close":  # neighbours among the numbers of fp32
        values = (torch.tensor([1.0, -3.0]).view(torch.int32)[torch.arange(batch)[:, None] % 2]
                  + (values * 40).to(torch.int32)).view(torch.float32)  # fmt: skip
    if kind == "unknown":  # with infinities, zeros of both signs, and what is no number
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
        values = torch.where(values > 0.3, special.repeat(batch, length)[:, :length], values)
    return values


@s.targets("route")
@pytest.mark.parametrize("logits", KINDS)
@pytest.mark.parametrize("length", [5001, 17001])
def test_sequences_of_many_keys(device, backend, logits, length):
    """More of them than threads of the CUDA kernel read at once, and more than it holds in shared memory; equal ones
    are kept from the first on, and what is no number never."""
    if (device, backend) == ("cpu", "triton"):
        pytest.skip("its own chunks are tested below, and this takes its interpreter minutes")
    values = logits_of(logits, 2, length)
    x, seqlens = s.normal((2, length, 2), 1, torch.float32), torch.tensor([length, length - 501])
    there = ~values.isnan() & (torch.arange(length) < seqlens[:, None])
    ranked = torch.where(there, values.double().clamp(-1e39, 1e39), -torch.inf)
    ranked = ranked.sort(dim=1, stable=True, descending=True).indices
    for k in (1, length // 3, length - 1):
        on_device = {"logits": values.to(device), "seqlens": seqlens.to(device)}
        got = ops.route(x.to(device), None, k, backend=backend, **on_device)
        assert got.counts.tolist() == there.sum(1).clamp(max=k).tolist()
        for b, count in enumerate(got.counts.tolist()):
            kept = ranked[b, :count].sort().values
            assert torch.equal(got.indices[b].cpu(), torch.nn.functional.pad(kept, (0, k - count), value=-1))
            assert torch.equal(got.rows[b, :count].cpu(), x[b, kept]) and not got.rows[b, count:].any()


@s.targets("route")
@pytest.mark.parametrize("logits", KINDS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_long_sequences_are_chosen_from_in_chunks(device, backend, logits, nested, ready, monkeypatch):
    """The same choice where a sequence is more than what one program of a kernel selects among, whichever of its bits
    tell the logits apart."""
    small_chunks(backend, monkeypatch)
    batch, length, width = 4, 35, 500
    values = logits_of(logits, batch, length)
    candidates = s.subset(batch, length, 1) if nested else None
    x, weight = s.normal((batch, length, width), 3, torch.float32), torch.eye(width)[0]
    x[:, :, 0] = values
    if nested:
        values = values.gather(1, candidates.clamp(min=0))
    scored = values.shape[1]
    for k, seqlens in [(1, None), (12, torch.tensor([30, 0, length, 5])), (scored - 1, None)]:
        options = {"candidates": candidates, "seqlens": seqlens, "logits": values if ready else None}
        options["weight"] = None if ready else weight
        want = ops.route(x, k=k, backend="eager", **options)
        got = ops.route(
            x.to(device), k=k, backend=backend, **{n: None if t is None else t.to(device) for n, t in options.items()}
        )
        for name in ("indices", "counts", "rows", "logits"):
            one, other = (getattr(routed, name).cpu() for routed in (got, want))
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)
        s.assert_close(got.gates, want.gates, torch.float32)


@s.targets("route")
@pytest.mark.parametrize("ready", [False, True])
def test_gradients_in_many_programs(device, backend, ready, monkeypatch):
    """Nested, ragged and long enough that each program of a kernel has several tiles; one logit is no number."""
    small_chunks(backend, monkeypatch, BLOCK=16, PARTIALS=2, IN_FLIGHT=1)
    batch, length = 3, 130
    candidates, seqlens = s.subset(batch, length, 0), torch.tensor([length, 0, 70])
    x, weight = s.tied((batch, length, 2), 1, torch.float32), torch.tensor([1.0, -0.5])
    logits = s.tied(candidates.shape, 2, torch.float32)
    logits[0, 5] = torch.nan
    kept = ops.route(x, weight, 40, candidates=candidates, seqlens=seqlens, backend="eager").indices
    kept[0] = candidates[0, :40]  # so the one without a logit is kept too
    results = []
    for where, dtype, name in [(device, torch.float32, backend), ("cpu", torch.float64, "eager")]:
        a, w = (t.to(where, dtype).requires_grad_() for t in (x, logits if ready else weight))
        options = {"candidates": candidates, "seqlens": seqlens, "indices": kept}
        options = {n: t.to(where) for n, t in options.items()} | {"logits": w if ready else None}
        got = ops.route(a, None if ready else w, 40, temperature=0.5, activation="tanh", backend=name, **options)
        outputs = (got.rows, got.gates, got.logits[got.logits == got.logits])
        loss = sum((t.double() * s.normal(t.shape, i).to(where)).sum() for i, t in enumerate(outputs))
        results.append([got.counts, got.rows, got.gates, *torch.autograd.grad(loss, (a, w))])
    for one, other, name in zip(*results, ("counts", "rows", "gates", "d_x", "d_weight or d_logits"), strict=True):
        s.assert_close(one, other, torch.float32, 4, name, cancels=0.25)


@s.kernels("route")
@pytest.mark.parametrize("nested", [False, True])
def test_kernels_take_what_is_outside_the_sequence_for_none(device, backend, nested):
    x, logits = s.normal((2, 5, 3), 0, torch.float32).to(device), torch.arange(10.0, device=device).view(2, 5)
    recorded = torch.tensor([[1, 5, 4, 2**40], [0, 3, -7, 2**31]], device=device)
    want = [[1, -1, 4, -1], [0, -1, -1, -1]]
    candidates = torch.tensor([[0, 1, 4, 2**40, -1], [0, 1, 2, 3, 4]], device=device) if nested else None
    options = {"logits": logits, "candidates": candidates, "seqlens": torch.tensor([9, 2], device=device)}
    got = ops.route(x, None, 4, indices=recorded, backend=backend, **options)
    assert got.indices.tolist() == want and got.counts.tolist() == [2, 1]
    again = ops.route(x, None, 4, indices=got.indices, backend=backend, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, again))
    assert not got.rows[got.indices < 0].any() and not got.gates[got.indices < 0].any()
    chosen = ops.route(x, None, 4, backend=backend, **options).indices
    assert chosen.tolist() == [[0, 1, 4, -1] if nested else [1, 2, 3, 4], [0, 1, -1, -1]]


def choose(logits, k, device, **options):
    logits = torch.tensor([logits], device=device)
    x = torch.arange(1.0, logits.shape[1] + 1, device=device)[None, :, None]
    routed = ops.route(x, None, k, logits=logits, **options)
    assert all(t.isfinite().all() for t in (routed.rows, routed.gates))
    return routed


@s.targets("route")
def test_known_choice(device, backend):
    routed = choose([0.1, 0.9, 0.5, 0.8], 2, device, activation="none", alpha=1.0, backend=backend)
    assert routed.indices.tolist() == [[1, 3]]
    torch.testing.assert_close(routed.gates.cpu(), torch.tensor([[0.9, 0.8]]))


@s.targets("route")
@pytest.mark.parametrize(
    ("logits", "k", "indices"),
    [
        ([0.3] * 4, 2, [0, 1]),
        ([3.0, 2, 3, 2, 1, 1], 1, [0]),
        ([3.0, 2, 3, 2, 1, 1], 3, [0, 1, 2]),
        ([-0.0, 0.0, 0.0], 1, [0]),
        ([18.0, 20, 19], 1, [1]),  # sigmoid saturates, the rank doesn't
        ([4.000, 4.001, 3.999], 1, [1]),
        ([1e4, -1e4, 0.0], 2, [0, 2]),
        ([-torch.inf, torch.inf, 0.0], 2, [1, 2]),
        ([-torch.inf, -torch.inf, torch.nan], 2, [0, 1]),
        ([torch.nan, -1.0, torch.nan], 2, [1, -1]),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_ties_and_extremes(device, backend, logits, k, indices):
    for activation, alpha in [("sigmoid", 0.1), ("none", 2.0), ("tanh", 0.1)]:
        routed = choose(logits, k, device, backend=backend, activation=activation, alpha=alpha)
        assert routed.indices.tolist() == [indices]
        assert torch.equal(routed.logits.isnan().cpu(), torch.tensor([logits]).isnan())


@s.targets("route")
@pytest.mark.parametrize(("activation", "slope"), [("sigmoid", 0.25), ("tanh", 1.0), ("none", 1.0)])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_gradients_of_extremes(device, backend, activation, slope):
    """No NaN, not where one is kept either; where a gate is saturated, and where it is that of a NaN, there is none."""
    nan, inf, k = torch.nan, torch.inf, 3
    logits = torch.tensor([[1e4, -1e4, 0.0], [-inf, inf, 0.0], [nan, 0.0, nan]], device=device, requires_grad=True)
    x = torch.ones(3, 3, 1, device=device, requires_grad=True)
    every = torch.arange(3, device=device).expand(3, 3)
    routed = ops.route(x, None, k, logits=logits, indices=every, activation=activation, alpha=1.0, backend=backend)
    d_x, d_logits = torch.autograd.grad(routed.rows.sum() + routed.gates.sum(), (x, logits))
    ends = 1.0 if activation == "none" else 0.0
    want = torch.tensor([[ends, ends, slope], [ends, ends, slope], [0.0, slope, 0.0]])
    assert d_x.eq(1).all()
    torch.testing.assert_close(d_logits.cpu(), want)


@s.targets("route")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_score_rank_has_the_ties_of_its_dtype(device, backend):
    logits = torch.tensor([[4.000, 4.001, 4.002]], device=device)
    for dtype in s.HALVES if (device, backend) != ("cpu", "triton") else [torch.float16]:
        x = torch.ones(1, 3, 1, dtype=dtype, device=device)
        assert ops.route(x, None, 1, logits=logits, rank="score", backend=backend).indices.tolist() == [[0]]
        assert ops.route(x, None, 1, logits=logits, rank="logit", backend=backend).indices.tolist() == [[2]]
        options = {"rank": "score", "alpha": 1.0, "activation": "none", "backend": backend}
        large = 3e4 * logits  # past the largest number of fp16; the gates still are fp32
        assert ops.route(x, None, 1, logits=large, **options).indices.tolist() == [[0]]
        assert torch.equal(ops.route(x, None, 3, logits=large, **options).gates, large)
        ends = torch.tensor([[torch.finfo(dtype).max, torch.inf]], device=device)  # the same, once bounded
        assert ops.route(x[:, :2], None, 1, logits=ends, **options).indices.tolist() == [[0]]


@s.targets("route")
def test_padding_is_never_kept(device, backend):
    x = torch.tensor([[[1.0], [9.0], [2.0], [torch.nan]], [[9.0], [1.0], [3.0], [2.0]]], device=device)
    weight, seqlens = torch.ones(1, device=device), torch.tensor([3, 1], device=device)
    right = ops.route(x, weight, 3, seqlens=seqlens, backend=backend)
    assert right.indices.tolist() == [[0, 1, 2], [0, -1, -1]] and right.counts.tolist() == [3, 1]
    candidates = torch.tensor([[1, 2, -1], [2, 3, -1]], device=device)
    left = ops.route(x, weight, 3, candidates=candidates, backend=backend)
    assert left.indices.tolist() == [[1, 2, -1], [2, 3, -1]] and left.counts.tolist() == [2, 2]


@s.targets("route")
def test_language_model_gradient_reaches_kept_logits_only(device, backend, monkeypatch):
    s.prefer(monkeypatch, backend)
    x, logits = s.normal((1, 4, 3), 0, torch.float32).to(device), torch.tensor([[0.5, 2.0, -1.0, 1.0]], device=device)
    routed = ops.route(x, None, 2, logits=logits.requires_grad_())
    out = ops.scatter_back(x, routed.rows, routed.indices, routed.gates)
    (gradient,) = torch.autograd.grad(out.square().sum(), logits)
    assert (gradient != 0).tolist() == [[False, True, False, True]]
    (gradient,) = torch.autograd.grad(ops.aux_loss(logits, routed.indices), logits)
    assert (gradient != 0).all()


@s.targets("scatter_back")
@pytest.mark.parametrize(("residual", "want"), [("block", 3.3), ("delta", 3.0)])
def test_width_one_identity_block(device, backend, residual, want):
    """In training, in place, and at the end of a decoding step."""
    x, gate = torch.full((1, 1, 1), 3.0, device=device), torch.full((1, 1), 0.1, device=device)
    index, options = torch.zeros(1, 1, dtype=torch.int64, device=device), {"residual": residual, "backend": backend}
    assert ops.scatter_back(x, x, index, gate, **options).item() == pytest.approx(want)
    assert ops.scatter_back_(x.clone(), x, index, gate, **options).item() == pytest.approx(want)
    state, logit, weight = x[0].clone(), torch.ones(1, device=device), torch.ones(1, 1, device=device)
    ops.depth_step_(state, x[0], logit, index[0], weight, activation="none", alpha=0.1, **options)
    assert state.item() == pytest.approx(want)


@s.targets("route")
def test_recomputation_keeps_the_same_tokens(device, backend):
    """Activation checkpointing with a recorded choice: scores that changed choose the same."""
    x = torch.ones(1, 6, 2, device=device, requires_grad=True)
    noise = iter([0.0, 1.0])
    recorded = []

    def step(x):
        logits = torch.zeros(1, 6)
        logits[0, 5] = next(noise)
        indices = recorded[0] if recorded else None
        routed = ops.route(x, None, 2, logits=logits.to(device), indices=indices, backend=backend)
        recorded.append(routed.indices)
        return routed.rows.sum() * 2

    checkpoint(step, x, use_reentrant=False).backward()
    assert next(noise, None) is None, "nothing was recomputed"
    assert x.grad[0, :, 0].tolist() == [2, 2, 0, 0, 0, 0]


def test_rows_are_independent():
    # 16 scores a row: a processor's vector instructions, and those for the elements that are left, round differently
    x, weight, lengths = s.normal((3, 24, 4), 0), s.normal((4,), 1), [24, 0, 17]
    together = ops.route(x, weight, 16, seqlens=torch.tensor(lengths))
    for b, n in enumerate(lengths):
        alone = ops.route(x[b : b + 1], weight, 16, seqlens=torch.tensor([n]))
        assert all(torch.equal(one[0], other[b]) for one, other in zip(alone, together))


@s.targets("route")
def test_rows_of_no_width(device, backend):
    x, weight = torch.ones(2, 3, 0, device=device), torch.ones(0, device=device)
    x.requires_grad_()
    routed = ops.route(x, weight, 2, backend=backend)
    assert routed.rows.shape == (2, 2, 0) and routed.indices.tolist() == [[0, 1]] * 2
    torch.autograd.grad(routed.rows.sum() + routed.gates.sum(), x)
