"""The end of a decoding step: new states, the next router's scores, and who goes on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s

RESIDUALS = ["block", "delta", "none"]


def in_memory(tensor, device, strided):
    """(memory, a copy of the tensor in it), with 7.0 before, behind and, with ``strided``, between its elements."""
    *lead, width = tensor.shape
    memory = torch.full((*(n + 2 for n in lead), 2 * width + 2), 7.0, dtype=tensor.dtype, device=device)
    inner = memory[1:-1] if lead else memory
    view = inner[..., 1:-1:2] if strided else inner[..., 1 : 1 + width]
    view.copy_(tensor)
    return memory, view


def check(device, backend, x, update, logits, recursions, weight, options, exact=False, strided=False):
    """Against the reference in fp64, and the scores against those of the states as they were rounded."""
    move = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t  # noqa: E731
    memories, (states, scores) = zip(*(in_memory(t, device, strided) for t in (x, logits)))
    on = ops.depth_step_(
        states, *map(move, (update, scores, recursions, weight)), backend=backend,
        **{name: move(value) for name, value in options.items()},
    )  # fmt: skip

    exactly = {name: t.double() if name == "aux_weight" else t for name, t in options.items()}
    new, _, _ = reference.depth_step(*(t.double() for t in (x, update, logits)), recursions, weight.double(), **exactly)
    number = ~new.isnan()
    assert torch.equal(states.cpu().isnan(), ~number)
    s.assert_close(states.cpu()[number], new[number], x.dtype, 0.0 if exact else 0.5, "x")
    padding = recursions < 0
    assert torch.equal(states.cpu()[padding].nan_to_num(), x[padding].nan_to_num())

    # a gate of 0 leaves the state as it is, and so the reference scores what was rounded
    still = {**exactly, "residual": "block", "alpha": 0.0}
    rounded, zero, before = states.cpu().double(), torch.zeros_like(new), logits.double()
    _, want, goes_on = reference.depth_step(rounded, zero, before, recursions, weight.double(), **still)
    number = ~want.isnan() & want.isfinite()
    got = scores.cpu()
    torch.testing.assert_close(got[~number].double(), want[~number], rtol=0, atol=0, equal_nan=True)
    unscored = padding | (recursions == len(weight) - 1)
    assert torch.equal(got[unscored].nan_to_num(), logits[unscored].nan_to_num())
    following = weight.double()[(recursions + 1).clamp(max=len(weight) - 1)]
    terms = (rounded * following).abs().sum(1).masked_fill(unscored | exact, 0) / options.get("temperature", 1)
    roundings = 0.5 if exact else 2
    s.assert_close(got[number], want[number], logits.dtype, roundings, "logits", cancels=1, terms=terms[number])
    deciding = want
    if options.get("aux_weight") is not None:
        swapped = {**still, "aux_weight": None}
        _, deciding, _ = reference.depth_step(rounded, zero, before, recursions, exactly["aux_weight"], **swapped)
    sure = torch.ones_like(on.cpu()) if exact else ~(deciding.abs() < 1e-5)
    assert on.dtype == torch.bool and torch.equal(on.cpu()[sure], goes_on[sure])

    for memory, view in zip(memories, (states, scores)):
        view.fill_(7.0)
        assert (memory == 7).all()  # nothing beside was written


@s.targets("depth_step_")
@given(
    n=s.sizes_or_none, routers=st.integers(1, 4), width=st.sampled_from([0, 1, 3, 8, 16, 40]), seed=s.seeds,
    dtype=s.dtypes, exact=st.booleans(), strided=st.booleans(), mixed=st.booleans(), bounded=st.booleans(),
    replays=st.booleans(), aux=st.booleans(), special=st.booleans(), residual=st.sampled_from(RESIDUALS),
    activation=st.sampled_from(["sigmoid", "tanh", "none"]), temperature=st.sampled_from([1.0, 0.5, 3.0]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # Triton's interpreter
def test_equals_reference(
    device, backend, n, routers, width, seed, dtype, exact, strided, mixed, bounded, replays, aux, special, residual,
    activation, temperature,
):  # fmt: skip
    """With multiples of 1/2 all is exact, and scores of exactly 0 are among them."""
    s.assume_served(device, backend, dtype)
    n = s.larger(device, seed, n)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    other = {torch.float32: torch.float16, torch.float64: torch.float64}.get(dtype, torch.float32) if mixed else dtype
    make, generator = s.tied if exact else s.normal, torch.Generator().manual_seed(seed)
    x, update = make((n, width), seed, dtype), make((n, width), seed + 1, other)
    logits, weight = make((n,), seed + 2, wide), make((routers, width), seed + 3, other)
    recursions = torch.randint(-1, routers, (n,), generator=generator)
    options = {"residual": residual, "activation": activation, "alpha": 0.5, "temperature": temperature}
    if exact:
        options |= {"activation": "none", "temperature": 0.5}
    if bounded:
        options["last"] = torch.randint(0, routers + 2, (n,), generator=generator)
    if replays:
        options["replayed"] = torch.randint(0, 2, (n,), generator=generator).bool()
    if aux:
        options["aux_weight"] = make((routers, width), seed + 4, other)
    if special:
        assume(options["activation"] != "none")  # the largest number isn't the same in fp64
        unknown = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5, 0.5]).to(wide)
        logits = torch.where(logits > 0, unknown.repeat(n)[:n], logits)
        update[recursions == 0, :1] = torch.nan
        x[recursions < 0] = torch.nan
    check(device, backend, x, update, logits, recursions, weight, options, exact, strided)


@s.targets("depth_step_")
@pytest.mark.parametrize("width", [960, 1001, 4096 + 8, 8192 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("aux", [False, True])
def test_wide_rows(device, backend, width, dtype, aux):
    """Those of one piece and of several, and what is left of the last one; of aligned rows and of others."""
    x, update, weight, aux_weight = (s.normal((3, width), i, dtype) / width**0.5 for i in range(4))
    recursions, logits = torch.tensor([0, -1, 1]), s.normal((3,), 5, torch.float32)
    options = {"aux_weight": aux_weight if aux else None, "residual": "delta", "alpha": 1.0}
    options = {name: value for name, value in options.items() if value is not None}
    check(device, backend, x, update, logits, recursions, weight, options)
    check(device, backend, x[:, 1:], update[:, 1:], logits, recursions, weight[:, 1:], {"activation": "tanh"})


@s.targets("depth_step_")
def test_carries_the_score_from_recursion_to_recursion(device, backend):
    """Steps that are fed what they left give what scores computed anew would give."""
    n, width, routers = 6, 8, 4
    dtype = torch.float64 if backend == "eager" else torch.float32
    x, weight = s.normal((n, width), 0, dtype).to(device), s.normal((routers, width), 1, dtype).to(device)
    logits = x @ weight[0]
    recursions = torch.tensor([0, 0, 0, -1, 0, 0], device=device)
    state, want, depths = x.clone(), x.clone(), torch.zeros(n, dtype=torch.int64)
    for r in range(routers):
        update = s.normal((n, width), 2 + r, dtype).to(device)
        on = ops.depth_step_(state, update, logits, recursions, weight, alpha=1.0, backend=backend)
        real = recursions >= 0
        new = want + torch.sigmoid(want @ weight[r])[:, None] * update
        want = torch.where(real[:, None], new, want)
        torch.testing.assert_close(state, want)
        following = want @ weight[min(r + 1, routers - 1)] > 0
        assert torch.equal(on, real & following if r + 1 < routers else torch.zeros_like(on))
        depths += real.cpu()
        recursions = torch.where(on, recursions + 1, -1)
    assert len(depths.unique()) > 2 and depths[3] == 0


@s.targets("depth_step_")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton's interpreter
def test_logits_that_are_no_finite_numbers(device, backend):
    """NaN adds nothing; infinities gate as the largest numbers do."""
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device=device)
    zero = torch.zeros(4, dtype=torch.int64, device=device)
    largest = torch.finfo(torch.float32).max
    wanted = {
        "sigmoid": [1.0, 1.5, 1.0, 1.25],
        "tanh": [1.0, 1.5, 0.5, 1.0],
        "none": [1.0, 1 + largest / 2, 1 - largest / 2, 1.0],
    }
    for activation, want in wanted.items():
        x, scores = torch.ones(4, 1, device=device), logits.clone()
        options = {"activation": activation, "alpha": 0.5, "backend": backend}
        on = ops.depth_step_(x, torch.ones_like(x), scores, zero, torch.ones(2, 1, device=device), **options)
        torch.testing.assert_close(x[:, 0].cpu(), torch.tensor(want))
        assert torch.equal(scores, x[:, 0]) and torch.equal(on, x[:, 0] > 0)


@s.targets("depth_step_")
def test_who_goes_on(device, backend):
    nan = torch.nan
    weight, aux = torch.tensor([[9.0, 9.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([[9.0, 9.0], [0.0, 1.0], [0.0, 1.0]])
    cases = [  # state, recursion, last, replayed, goes on, goes on with the auxiliary router
        ([1.0, -1.0], 0, 3, False, True, False),
        ([1.0, 1.0], 1, 3, False, True, True),
        ([1.0, 1.0], 2, 3, True, False, False),  # it has taken all recursions
        ([1.0, 1.0], 2, 9, True, False, False),
        ([1.0, 1.0], 0, 1, False, False, False),
        ([1.0, 1.0], 1, 2, True, False, False),
        ([-1.0, 1.0], 0, 3, False, False, True),
        ([0.0, 0.0], 0, 3, False, False, False),
        ([-1.0, -1.0], 0, 3, True, True, True),
        ([nan, 1.0], 0, 3, False, False, False),
        ([1.0, nan], 0, 3, False, False, False),  # 0 * NaN
        ([nan, 1.0], 0, 3, True, True, True),
        ([1.0, 1.0], -1, 3, True, False, False),
    ]
    x, recursions, last, replayed, alone, both = (torch.tensor(column, device=device) for column in zip(*cases))
    options = {"last": last, "replayed": replayed, "backend": backend}
    for aux_weight, want in ((None, alone), (aux.to(device), both)):
        tensors = x.clone(), x, torch.full((len(x),), nan, device=device), recursions, weight.to(device)
        assert torch.equal(ops.depth_step_(*tensors, aux_weight=aux_weight, **options), want)
        assert torch.equal(tensors[0].nan_to_num(), x.nan_to_num())


@s.targets("depth_step_")
def test_a_score_that_is_no_number_goes_no_further_whatever_the_auxiliary_router_says(device, backend):
    x, nan = torch.ones(3, 2, device=device), torch.full((2, 2), torch.nan, device=device)
    recursions, replayed = torch.tensor([0, 0, 1], device=device), torch.tensor([False, True, True], device=device)
    options = {"replayed": replayed, "aux_weight": torch.ones_like(nan), "backend": backend}
    logits = torch.zeros(3, device=device)
    assert ops.depth_step_(x, x.clone(), logits, recursions, nan, **options).tolist() == [False, True, False]
    assert logits.isnan().tolist() == [True, True, False]


@s.kernels("depth_step_")
def test_kernels_take_a_recursion_without_a_router_for_padding(device, backend):
    x, weight = s.normal((5, 4), 0, torch.float32).to(device), s.normal((2, 4), 1, torch.float32).to(device)
    recursions = torch.tensor([2, -7, 2**40, -(2**33), 2**31], device=device)
    state, logits = x.clone(), torch.ones(5, device=device)
    everyone = torch.ones(5, dtype=torch.bool, device=device)
    on = ops.depth_step_(state, x, logits, recursions, weight, replayed=everyone, backend=backend)
    assert torch.equal(state, x) and (logits == 1).all() and not on.any()


@s.targets("depth_step_")
@pytest.mark.parametrize("argument", ["x", "logits"])
def test_autograd_sees_what_is_written_in_place(device, backend, argument):
    tensors = {"x": torch.ones(3, 2, device=device), "logits": torch.ones(3, device=device)}
    weight = torch.ones(2 if argument == "x" else 3, device=device, requires_grad=True)
    y = (tensors[argument] * weight).sum()  # saves it
    recursions = torch.zeros(3, dtype=torch.int64, device=device)
    update, routers = torch.ones(3, 2, device=device), torch.ones(2, 2, device=device)
    ops.depth_step_(tensors["x"], update, tensors["logits"], recursions, routers, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
