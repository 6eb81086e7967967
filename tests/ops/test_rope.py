"""Rotary embedding against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mor_kernels import ops
from reference import ops as reference
from tests import strategies as s

EPS = torch.finfo(torch.float32).eps


def angle_error(backend, dtype, largest):
    """By how much an angle may be off, in radians: in fp32, the frequency and its product with a position each lose
    half a bit; a kernel loses none, but its sines and cosines are polynomials in fp32."""
    if dtype == torch.float64:
        return 1e-15 * (largest + 8)
    return EPS * (8 + (largest if backend == "eager" else 0))


def check(got, x, positions, theta, backend, inverse=False):
    """Within the angle's error of the float64 rotation, and one rounding of the result to its dtype."""
    assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
    if x.numel():
        want = reference.rope(x.cpu().double(), -positions.cpu() if inverse else positions.cpu(), theta)
        slack = angle_error(backend, x.dtype, positions.abs().max().item()) * 1.5 * x.abs().max().item()
        s.assert_close(got, want, x.dtype, 0.5, "gradient" if inverse else "out", cancels=0, slack=slack)


@s.targets("rope")
@given(
    lead=st.lists(st.integers(0, 5), max_size=3), heads=s.sizes_or_none,
    k_heads=st.one_of(st.none(), s.sizes_or_none), width=st.sampled_from([2, 4, 6, 10, 16, 40, 96, 256]),
    largest=st.sampled_from([1, 100, 2048, 2**20]), integers=st.sampled_from([torch.int64, torch.int32]),
    theta=st.sampled_from([10000.0, 500000.0, 7.3, 0.5]), seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
)  # fmt: skip
def test_equals_reference(device, backend, lead, heads, k_heads, width, largest, integers, theta, seed, dtype, strided):
    s.assume_served(device, backend, dtype)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(-largest // 4, largest + 1, lead, generator=generator).to(integers)
    if strided and lead:
        positions = positions.movedim(0, -1).contiguous().movedim(-1, 0)
    counts = (heads,) if k_heads is None else (heads, k_heads)
    inputs = [
        s.normal((*lead, count, width), seed + i, dtype, strided).to(device).requires_grad_()
        for i, count in enumerate(counts)
    ]
    outputs = ops.rope(inputs[0] if k_heads is None else tuple(inputs), positions.to(device), theta, backend=backend)
    outputs = (outputs,) if k_heads is None else outputs
    upstream = [s.normal(out.shape, seed + 5, dtype, not strided).to(device) for out in outputs]
    gradients = torch.autograd.grad(outputs, inputs, upstream)
    for x, out, d_out, d_x in zip(inputs, outputs, upstream, gradients, strict=True):
        check(out, x, positions, theta, backend)
        check(d_x, d_out, positions, theta, backend, inverse=True)


@s.targets("rope")
def test_angles_at_far_positions(device, backend):
    """Cosines and sines alone, beside float64's: of every frequency, from the first position to the 2^20th."""
    positions = torch.cat((torch.arange(200), torch.arange(2**20 - 200, 2**20 + 1), 2 ** torch.arange(20)))
    x = torch.cat((torch.ones(len(positions), 1, 32), torch.zeros(len(positions), 1, 32)), dim=-1)
    got = ops.rope(x.to(device), positions.to(device), backend=backend).cpu().double()
    error = (got - reference.rope(x.double(), positions)).abs().amax((1, 2))
    assert (error <= 2e-7).all()


@s.targets("rope")
@pytest.mark.parametrize("integers", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_positions_of_any_integer_dtype(device, backend, integers):
    x, positions = s.normal((3, 2, 4), 0, torch.float32).to(device), torch.tensor([0, 5, 127], device=device)
    got = ops.rope(x, positions.to(integers), backend=backend)
    assert torch.equal(got, ops.rope(x, positions, backend=backend))


@s.targets("rope")
def test_positions_by_row(device, backend):
    x, positions = s.normal((2, 2, 1, 4), 0, torch.float32).to(device), torch.tensor([[0, 5], [2, 3]], device=device)
    got = ops.rope(x, positions, backend=backend)
    check(got, x, positions, 10000.0, backend)
    q, k, v = ops.rope_qkv(x.expand(2, 2, 3, 4), 1, positions, backend=backend)
    assert torch.equal(q, got) and torch.equal(k, got) and torch.equal(v, x)
    for b, t, position in [(0, 0, 0), (0, 1, 5), (1, 0, 2), (1, 1, 3)]:
        alone = ops.rope(x[b, t][None], torch.tensor([position], device=device), backend=backend)
        assert torch.equal(got[b, t], alone[0])
    assert torch.equal(got[0, 0], x[0, 0])


@s.targets("rope")
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_pair_of_a_fused_projection(device, backend, order):
    """Views of one tensor; a pair equals its parts alone, bit for bit, whatever the strides."""
    fused = s.normal((2, 7, 6 + 2 + 2, 16), 0, torch.float32).to(device)
    if order == "heads first":
        fused = fused.transpose(1, 2).contiguous().transpose(1, 2)
    fused.requires_grad_()
    q, k, _ = fused.split([6, 2, 2], dim=2)
    positions = torch.arange(7, device=device).expand(2, 7)
    out_q, out_k = ops.rope((q, k), positions, backend=backend)
    alone = [ops.rope(t.detach().contiguous().requires_grad_(), positions, backend=backend) for t in (q, k)]
    assert torch.equal(out_q, alone[0]) and torch.equal(out_k, alone[1])
    (gradient,) = torch.autograd.grad((out_q.square().sum() + out_k.sum()), fused)
    check(gradient[:, :, 6:8].contiguous(), torch.ones_like(k), positions, 10000.0, backend, inverse=True)
    assert not gradient[:, :, 8:].any()


@s.targets("rope_split")
@given(
    lead=st.lists(st.integers(0, 5), max_size=3), heads=st.integers(1, 7), groups=st.integers(0, 3),
    width=st.sampled_from([2, 6, 16, 64, 96]), seed=s.seeds, dtype=s.dtypes, strided=st.booleans(),
)  # fmt: skip
def test_fused_projection_equals_its_parts(device, backend, lead, heads, groups, width, seed, dtype, strided):
    """Forward and backward; values are copied."""
    s.assume_served(device, backend, dtype)
    qkv = s.normal((*lead, heads + 2 * groups, width), seed, dtype, strided).to(device).requires_grad_()
    positions = torch.randint(2**12, lead, generator=torch.Generator().manual_seed(seed)).to(device)
    outputs = ops.rope_qkv(qkv, heads, positions, 500.0, backend=backend)
    assert all(out.is_contiguous() for out in outputs)
    parts = qkv.detach().split((heads, groups, groups), -2)
    for got, part in zip(outputs[:2], parts[:2], strict=True):
        check(got, part, positions, 500.0, backend)
    assert torch.equal(outputs[2], parts[2])
    upstream = [s.normal(out.shape, seed + i, dtype, not strided).to(device) for i, out in enumerate(outputs)]
    (gradient,) = torch.autograd.grad(outputs, qkv, upstream)
    assert gradient.is_contiguous() and gradient.shape == qkv.shape
    pieces = gradient.split((heads, groups, groups), -2)
    for got, d_part in zip(pieces[:2], upstream[:2], strict=True):
        check(got.contiguous(), d_part, positions, 500.0, backend, inverse=True)
    assert torch.equal(pieces[2], upstream[2])


@s.targets("rope")
def test_one_of_a_pair_may_need_no_gradient(device, backend):
    q, k = (s.normal((5, n, 4), n, torch.float32).to(device).requires_grad_(n == 3) for n in (3, 1))
    positions = torch.arange(5, device=device)
    out_q, _ = ops.rope((q, k), positions, backend=backend)
    (d_q,) = torch.autograd.grad(out_q.sum(), q)
    check(d_q, torch.ones_like(q), positions, 10000.0, backend, inverse=True)
    x = q.detach()
    both = ops.rope((x, x), positions, backend=backend)
    assert torch.equal(both[0], out_q) and torch.equal(both[1], out_q)


@s.targets("rope")
def test_registered_and_compiled(device, backend):
    q, k = (s.normal((2, 5, n, 4), n, torch.float32).to(device).requires_grad_() for n in (3, 1))
    positions = torch.arange(10, device=device).view(2, 5)
    for inputs in ((q.detach(), k.detach()), (q.detach().transpose(0, 1).contiguous().transpose(0, 1), None)):
        torch.library.opcheck(torch.ops.mor_kernels.rope.default, (*inputs, positions, 100.0, True, backend))

    def step(q, k, positions):
        out_q, out_k = ops.rope((q, k), positions, 100.0, backend=backend)
        return out_q, out_k, ops.rope(q, positions[0].expand(2, -1), backend=backend)

    runs = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        outputs = run(q, k, positions)
        runs.append([*outputs, *torch.autograd.grad(sum(out.square().cumsum(0).sum() for out in outputs), (q, k))])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 20 GB")
def test_more_than_two_to_the_31_elements():
    x = torch.zeros(2**21 + 1, 8, 128, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    out = ops.rope(x, torch.zeros(len(x), dtype=torch.int64, device="cuda"))
    assert torch.equal(out, x)
