"""Cross-entropy of a linear layer's outputs against PyTorch's of all logits at once, in float64."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from tests import strategies as s

in_place = torch.ops.mor_kernels.cross_entropy_
module = importlib.import_module("mor_kernels.ops.linear_cross_entropy")
vocabularies = st.one_of(st.sampled_from([1, 2, 16, 17, 128, 600, 8192, 8193, 17000]), st.integers(1, 40))


def plain(x, weight, targets):
    logits = (x @ weight.T).flatten(0, -2)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.cross_entropy(logits.to(wide), targets.flatten(), reduction="sum")


def some_targets(shape, size, seed):
    """Of which about every third is none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(size, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, -100, drawn)


def run(function, x, weight, targets, factor=1.0):
    inputs = [t.detach().requires_grad_() for t in (x, weight)]
    total = function(*inputs, targets) * factor
    return [total.detach(), *torch.autograd.grad(total, inputs)]


def losses_and_gradient(logits, targets):
    logits = logits.detach().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@s.targets("cross_entropy_")
@given(
    rows=s.sizes_or_none, size=vocabularies, scale=st.sampled_from([0.01, 1, 30]), seed=s.seeds, dtype=s.dtypes,
    strided=st.booleans(), sure=st.booleans(),
)  # fmt: skip
def test_losses_and_gradient_of_logits(device, backend, rows, size, scale, seed, dtype, strided, sure):
    """Element by element: losses as near as PyTorch's in fp32, the gradient one rounding from exact, where a target is
    almost sure as well; rows without one give exactly 0, whatever they hold."""
    s.assume_served(device, backend, dtype)
    logits = s.normal((rows, size), seed, dtype, strided) * scale
    targets = some_targets((rows,), size, seed)
    if sure and rows:
        logits[0, max(int(targets[0]), 0)] = 12 * max(scale, 1)
    logits = torch.where(targets[:, None] < 0, torch.nan, logits).to(device)
    if strided:
        logits = logits.mT.contiguous().mT
    targets, before, there = targets.to(device), logits.clone(), targets >= 0
    losses = in_place(logits, targets, False, backend)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(in_place(logits, targets, True, backend), losses)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert losses.dtype == wide and losses.is_contiguous()

    losses, gradient = losses.cpu(), logits.cpu()
    assert not losses[~there].any() and not gradient[~there].any()
    exact = losses_and_gradient(before.cpu().double()[there], targets.cpu()[there])
    theirs = losses_and_gradient(before.cpu().to(wide)[there], targets.cpu()[there])
    eps, rounding = torch.finfo(wide).eps, 0.51 * torch.finfo(dtype).eps if dtype in s.HALVES else 0
    least = torch.finfo(dtype).tiny * (torch.finfo(dtype).eps if dtype in s.HALVES else 1)
    largest = before.cpu().double()[there].abs().amax() if there.any() else 0
    noise = 4 * eps * (1 + largest)  # absolute, of a loss: roundings of z - max and of 1 + all other exponentials
    at_target = F.one_hot(targets.cpu()[there], size)
    loss_budget = 2 * (theirs[0].double() - exact[0]).abs() + 8 * eps * exact[0].abs() + noise
    assert ((losses[there] - exact[0]).abs() <= loss_budget).all()
    # relative: a rounding of the exponent, z - max; eager's is a log-probability, whose size the vocabulary's logarithm
    # adds to, and so is that of what fp64 is compared with
    of_exponent = noise + (2 * eps * math.log(size) if backend == "eager" else 0)
    gradient_budget = (rounding + 8 * eps + of_exponent) * exact[1].abs() + least + noise * at_target
    assert ((gradient[there].double() - exact[1]).abs() <= gradient_budget).all()


@s.targets("cross_entropy_")
@given(
    lead=st.lists(st.integers(0, 5), max_size=2), width=st.integers(0, 20), size=st.integers(1, 40), seed=s.seeds,
    dtype=s.dtypes, strided=st.booleans(),
)  # fmt: skip
def test_equals_formula(device, backend, lead, width, size, seed, dtype, strided):
    s.assume_served(device, backend, dtype)
    width, size = s.larger(device, seed, width, size)
    x = s.normal((*lead, width), seed, dtype, strided).to(device)
    weight = s.normal((size, width), seed + 1, dtype, strided).to(device)
    targets = some_targets(tuple(lead), size, seed).to(device)
    exact = run(lambda x, w, t: plain(x if lead else x[None], w, t), x.double(), weight.double(), targets)
    theirs = run(lambda x, w, t: plain(x if lead else x[None], w, t), x, weight, targets)
    ours = run(lambda *t: ops.linear_cross_entropy(*t, backend=backend), x, weight, targets)
    assert ours[0].shape == () and ours[0].dtype == theirs[0].dtype
    eps = torch.finfo(dtype).eps
    for label, want, one, other in zip(("loss", "d_x", "d_weight"), exact, ours, theirs, strict=True):
        assert one.shape == want.shape and one.dtype == other.dtype and not one.isnan().any()
        if one.numel():
            rounded = (2 * (other - want).abs().max() + 4 * eps * (want.abs() + want.abs().max())).cpu()
            assert ((one - want).abs().cpu() <= rounded + 1e-6 * (dtype != torch.float64) + 1e-14).all(), label


@s.targets("cross_entropy_")
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("wanted", ["x", "weight", "both"])
def test_chunks_and_gradients_of_what_needs_one(monkeypatch, device, backend, rows, wanted):
    """In chunks of three rows; in evaluation the same loss, and no gradient is computed."""
    monkeypatch.setattr(module, "CHUNK", 3), monkeypatch.setattr(module, "TILE", 1)
    dtype = torch.float64 if backend == "eager" else torch.float32
    x, weight = s.normal((rows, 5), 0, dtype).to(device), s.normal((11, 5), 1, dtype).to(device)
    targets = some_targets((rows,), 11, 2).to(device)
    x.requires_grad_(wanted != "weight"), weight.requires_grad_(wanted != "x")
    inputs = [t for t in (x, weight) if t.requires_grad]
    got, want = ops.linear_cross_entropy(x, weight, targets, backend=backend), plain(x, weight, targets)
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **near)
    gradients = torch.autograd.grad(got * 0.3, inputs), torch.autograd.grad(want * 0.3, inputs)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **near)
    flags = []
    original = module._cross_entropy
    monkeypatch.setattr(module, "_cross_entropy", lambda *args: flags.append(args[2]) or original(*args))
    with torch.no_grad():
        assert torch.equal(ops.linear_cross_entropy(x, weight, targets, backend=backend), got)
    assert not any(flags) and len(flags) == -(-rows // 3)


@s.targets("cross_entropy_")
def test_halves_no_further_off_than_pytorch(device, backend):
    dtype = torch.float16 if (device, backend) == ("cpu", "triton") else torch.bfloat16
    x, weight = s.normal((600, 64), 0).to(device), s.normal((300, 64), 1).to(device)
    targets = torch.randint(300, (600,), generator=torch.Generator().manual_seed(2)).to(device)
    exact = run(plain, x, weight, targets, 1 / 600)
    halves = x.to(dtype), weight.to(dtype)
    ours = run(lambda *t: ops.linear_cross_entropy(*t, backend=backend), *halves, targets, 1 / 600)
    theirs = run(plain, *halves, targets, 1 / 600)
    for want, one, other in zip(exact, ours, theirs, strict=True):
        # the same roundings but one: the gradient of the rows is rounded before and after its division by 600
        assert (one.double() - want).norm() <= 1.5 * (other.double() - want).norm() + 1e-3 * want.norm()


@s.targets("cross_entropy_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinite_and_nan_as_in_pytorch(device, backend, dtype):
    special = torch.tensor([0.0, -torch.inf, torch.inf, torch.nan])
    logits = torch.cartesian_prod(special, special, special, torch.tensor([0.0, 1, 2])).to(dtype)
    targets, logits = logits[:, 3].long().to(device), logits[:, :3].to(device)
    want = losses_and_gradient(logits.float(), targets)
    got = in_place(logits, targets, True, backend)
    torch.testing.assert_close(got, want[0], equal_nan=True)
    torch.testing.assert_close(logits, want[1].to(dtype), equal_nan=True)


@s.targets("cross_entropy_")
def test_large_blocks_of_nothing(device, backend):
    """Whole blocks of -inf, before and after the rest, and a vocabulary without words."""
    logits = torch.full((3, 20000), -torch.inf, device=device)
    logits[0, 19999], logits[1, 0], logits[2, 9000:9002] = 3.0, 3.0, 3.0
    targets = torch.tensor([19999, 0, 9001], device=device)
    losses = in_place(logits, targets, True, backend)
    torch.testing.assert_close(losses, losses.new_tensor([0, 0, math.log(2)]))
    want = torch.zeros_like(logits)
    want[2, 9000], want[2, 9001] = 0.5, -0.5
    torch.testing.assert_close(logits, want)
    nothing = torch.full((4,), -100, device=device)
    assert in_place(torch.empty(4, 0, device=device), nothing, True, backend).tolist() == [0, 0, 0, 0]


@s.targets("cross_entropy_")
def test_a_nan_stays_in_its_row(device, backend):
    logits = s.normal((5, 300), 0, torch.float32).to(device)
    logits[1, 299], logits[3, 0] = torch.nan, torch.nan
    targets = torch.tensor([4, 4, -100, -100, 299], device=device)
    losses = in_place(logits, targets, True, backend)
    assert losses.isnan().tolist() == [False, True, False, False, False]
    assert logits.isnan().any(1).tolist() == [False, True, False, False, False] and not logits[2:4].any()


@s.targets("cross_entropy_")
def test_writes_all_that_it_allocates(monkeypatch, device, backend):
    monkeypatch.setattr(module, "CHUNK", 3), monkeypatch.setattr(module, "TILE", 1)
    empty = torch.Tensor.new_empty

    def poisoned(*args, **options):
        out = empty(*args, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    x, weight = s.normal((8, 5), 0, torch.float32).to(device), s.normal((11, 5), 1, torch.float32).to(device)
    for targets in (some_targets((8,), 11, 2).to(device), torch.full((8,), -100, device=device)):
        got = run(lambda *t: ops.linear_cross_entropy(*t, backend=backend), x, weight, targets)
        for one, other in zip(got, run(plain, x, weight, targets), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not any(t.any() for t in got)


@s.targets("cross_entropy_")
def test_keeps_the_gradients_alone(device, backend):
    x, weight = (s.normal(shape, 0, torch.float32).to(device).requires_grad_() for shape in ((5, 4), (7, 4)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        ops.linear_cross_entropy(x, weight, some_targets((5,), 7, 0).to(device), backend=backend)
    assert kept == [(5, 4), (7, 4), ()]  # and the sum, of which a second derivative learns that there is none


@s.targets("cross_entropy_")
def test_compiles_whole_in_chunks(monkeypatch, device, backend):
    monkeypatch.setattr(module, "CHUNK", 3), monkeypatch.setattr(module, "TILE", 1)
    torch._dynamo.reset()
    function = lambda *t: ops.linear_cross_entropy(*t, backend=backend)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, weight = s.normal((2, 4, 5), 0, torch.float32).to(device), s.normal((11, 5), 1, torch.float32).to(device)
    for seed in (0, 1):
        targets = some_targets((2, 4), 11, seed).to(device)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            for one, other in zip(*(run(f, x, weight, targets) for f in (compiled, function)), strict=True):
                torch.testing.assert_close(one, other)  # a compiled product may sum in another order
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight, targets), function(x, weight, targets))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 10 GB")
def test_more_than_two_to_the_31_logits():
    logits = torch.zeros(2**16 + 2, 2**15, dtype=torch.bfloat16, device="cuda")
    targets = torch.full((len(logits),), -100, device="cuda")
    targets[-1] = 7
    losses = in_place(logits, targets, True, "auto")
    assert not losses[:-1].any() and not logits[:-1].any()
    assert abs(losses[-1].item() - 10.3972) < 1e-3 and logits[-1, 7] == -1 and logits[-1, 8] == 2**-15
