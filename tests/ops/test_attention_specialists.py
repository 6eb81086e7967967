"""Kernels that serve some arguments of attention, ours for Hopper and libraries: which is chosen, what each takes, and
that it computes what the reference does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops import _dispatch
from mor_kernels.ops.attention import _choice
from reference import ops as reference
from tests import strategies as s

DEVICE = s.DEVICES[-1]
needs_triton = pytest.mark.skipif(
    _dispatch.unavailable("triton", "attention", DEVICE) is not None, reason="needs Triton"
)
THERE = [name for name in _dispatch.SPECIALISTS if _dispatch.unavailable(name, "attention", "cuda") is None]


@needs_triton
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (300, 700), (128, 256), (257, 129), (40, 1000)])
def test_block_lists(queries, keys, ascending):
    """Against every pair of query and key, blocks of 128 by 128; the last ones are ragged."""
    from mor_kernels.ops.attention._triton import block_lists

    positions = torch.randint(-1, keys, (2, queries), generator=torch.Generator().manual_seed(0))
    positions = positions.sort(1).values if ascending else positions
    sees = torch.arange(keys) <= positions[..., None]
    blocks = [[rows.split(128, 1) for rows in sequence.split(128, 0)] for sequence in sees]
    some, every = (
        torch.tensor([[[bool(of(block)) for block in row] for row in rows] for rows in blocks])
        for of in (torch.any, torch.all)
    )  # (B, blocks of queries, blocks of keys)
    # the end of a block of fewer queries or keys must be masked
    q_complete, k_complete = (torch.arange(n) < length // 128 for n, length in zip(every.shape[1:], (queries, keys)))
    whole = every & q_complete[:, None] & k_complete
    in_part = some & ~whole
    for by_keys in (False, True):
        partial_counts, partial, full_counts, full = block_lists(positions.int().to(DEVICE), keys, by_keys)
        for counts, lists, wanted in ((partial_counts, partial, in_part), (full_counts, full, whole)):
            wanted = wanted.transpose(1, 2) if by_keys else wanted
            assert counts.dtype == lists.dtype == torch.int32
            for b, block in torch.cartesian_prod(*(torch.arange(n) for n in wanted.shape[:2])).tolist():
                listed = lists[b, 0, block, : counts[b, 0, block]].tolist()
                assert listed == wanted[b, block].nonzero()[:, 0].tolist()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    torch.use_deterministic_algorithms(False)


def empty(queries, keys, width):
    return [torch.empty(1, n, 1, width, device="meta") for n in (queries, keys, keys)]


PLAIN = (None, None, None, None, None, 1.0)  # nothing fresh, no positions, no lengths, and a scale


def test_choice_by_length_width_and_direction(hopper):
    long = empty(2**20, 2**20, 64)
    assert _choice.choose(*empty(8, 8, 64), *PLAIN) == []
    assert _choice.choose(*long, *PLAIN) == ["hopper", "cudnn"]
    wide = empty(1024, 1024, 128)
    assert _choice.choose(*wide, *PLAIN) == ["cudnn", "fa4", "hopper"]
    assert _choice.choose_backward(wide[0], None, *wide, None, None, wide[0], None, *PLAIN[2:]) == ["hopper"]
    positions = torch.empty(1, 8, device="meta")
    assert _choice.choose(*empty(8, 1023, 64), None, None, positions, None, None, 1.0) == []
    assert _choice.choose(*empty(8, 4096, 128), None, None, positions, None, None, 1.0) == ["hopper", "fa4"]
    packed = [t[0] for t in empty(2**20, 2**20, 64)]
    assert _choice.choose_varlen(*packed, None, None, None, None, 1023, 1023, None, 1.0) == []
    rest = (None, None, None, None, None, None, 2048, 2048, None, 1.0)
    assert _choice.choose_varlen_backward(packed[0], None, *packed, *rest) == ["hopper", "fa4"]


def test_deterministic_mode_and_other_gpus_have_triton(hopper, monkeypatch):
    long = empty(2**20, 2**20, 64)
    assert _choice.choose(*long, *PLAIN)
    torch.use_deterministic_algorithms(True)
    assert not _choice.choose(*long, *PLAIN)
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert not _choice.choose(*long, *PLAIN)


def test_what_hopper_takes():
    q = torch.empty(2, 8, 4, 64, dtype=torch.float16)
    lens = torch.tensor([3, 4])
    torch.use_deterministic_algorithms(False)
    assert _choice.hopper_refuses(q, q, q, None, None, lens, lens, lens, 1.0) is None
    assert _choice.hopper_refuses_backward(q, lens, q, q, q, None, None, q, lens, *PLAIN[2:]) is None
    assert "fresh" in _choice.hopper_refuses(q, q, q, q, q, *PLAIN[2:])
    assert "64 and 128, not 96" in _choice.hopper_refuses(*[torch.empty(2, 8, 4, 96).to(q)] * 3, *PLAIN)
    assert "float16, not torch.float32" in _choice.hopper_refuses(*[q.float()] * 3, *PLAIN)
    assert "softmax_scale" in _choice.hopper_refuses(q, q, q, *PLAIN[:-1], 0.0)
    torch.use_deterministic_algorithms(True)
    for refuses in (_choice.hopper_refuses_backward, _choice.cudnn_refuses_backward, _choice.fa4_refuses_backward):
        assert "any order" in refuses(q, None, q, q, q, None, None, q, lens, *PLAIN[2:])
    packed = q, None, q, q, q, None, None, q, lens, lens, lens, 8, 8, None, 1.0
    assert "any order" in _choice.fa4_refuses_varlen_backward(*packed)
    torch.use_deterministic_algorithms(False)


def test_hopper_reads_rows_in_place_where_tma_can():
    hopper = pytest.importorskip("mor_kernels.ops.attention.hopper", exc_type=ImportError)
    fused = torch.randn(2, 5, 4 * 64).bfloat16()
    for t in (fused.unflatten(-1, (4, 64))[:, :, 1:3], fused[0].unflatten(-1, (4, 64))):
        rows = hopper._rows(t)
        assert rows.data_ptr() == t.data_ptr()
        torch.testing.assert_close(rows, t.reshape(-1, t.shape[-2] * 64), rtol=0, atol=0)
    for t in (
        fused.unflatten(-1, (4, 64)).transpose(1, 2).contiguous().transpose(1, 2),  # heads first
        fused.unflatten(-1, (2, 128))[..., 1:65],  # no multiple of 16 bytes
        fused.unflatten(-1, (4, 64))[:, :, :, ::2],
        fused[:1, :1].unflatten(-1, (4, 64)).expand(1, 5, 4, 64),  # one row for all
    ):
        rows = hopper._rows(t)
        assert rows.is_contiguous() and rows.data_ptr() % 16 == 0 and rows.data_ptr() != t.data_ptr()
        torch.testing.assert_close(rows, t.reshape(-1, t.shape[-2] * t.shape[-1]), rtol=0, atol=0)
    for shape in ((2, 0, 4, 64), (0, 4, 64), (2, 5, 0, 64)):
        assert hopper._rows(torch.empty(shape)).numel() == 0


@needs_triton
@given(
    lens=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), min_size=1, max_size=3),
    packed=st.booleans(),
    positioned=st.booleans(),
    seed=st.integers(0, 9),
)
def test_plan_of_the_hopper_backward(lens, packed, positioned, seed):
    """Which queries see a tile of keys, against every pair; and what else the kernel before the backward leaves."""
    hopper = pytest.importorskip("mor_kernels.ops.attention.hopper", exc_type=ImportError)
    heads, d, block_m, block_n = 3, 64, 16, 32
    (q_lens, k_lens), batch = torch.tensor(lens).T.contiguous(), len(lens)
    q_rows, k_rows = (int(n.sum() if packed else n.max()) for n in (q_lens, k_lens))
    assume(q_rows and k_rows)
    generator = torch.Generator().manual_seed(seed)
    lead = (q_rows,) if packed else (batch, q_rows)
    positions = torch.randint(-2, k_rows + 2, lead, generator=generator) if positioned else None
    d_out, out = (s.normal((*lead, heads, d), seed + i, torch.bfloat16) for i in range(2))
    q_ends, k_ends = (s.cu_seqlens(n) if packed else n for n in (q_lens, k_lens))
    tiles = -(-(int(k_lens.max()) if packed else k_rows) // block_n)
    delta = torch.full((heads, q_rows) if packed else (batch, heads, q_rows), torch.nan)
    sums, rows = torch.full((*lead, heads, d), torch.nan), out[..., 0].numel()
    taken, plan = torch.full((1,), 7, dtype=torch.int32), torch.full((batch, tiles, 4), -7, dtype=torch.int32)
    moved = [t if t is None else t.to(DEVICE) for t in (d_out, out, None, delta, sums, taken, plan, positions)]
    hopper._prepare[(-(-rows // 32) + batch * tiles,)](
        *moved, q_ends.to(DEVICE), k_ends.to(DEVICE), rows, heads, tiles, q_rows, k_rows,
        D=d, PACKED=packed, BLOCK=32, BLOCK_M=block_m, BLOCK_N=block_n, CHUNK=64,
    )  # fmt: skip
    delta, sums, taken, plan = (t.cpu() for t in moved[3:7])
    assert not sums.any() and not taken.any()
    wanted = (d_out.double() * out.double()).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(delta.double(), wanted, rtol=1e-5, atol=1e-4)  # 64 products, added up in fp32
    for b, (queries, keys) in enumerate(lens):
        last = torch.arange(queries)
        if positioned:
            last = positions[q_ends[b] : q_ends[b + 1]] if packed else positions[b, :queries]
        last = last.clamp(-1, keys - 1)
        sees = torch.arange(tiles * block_n) <= last[:, None]
        for tile, (first, steps, masked, seen) in enumerate(plan[b].tolist()):
            here = sees[:, tile * block_n : (tile + 1) * block_n]
            visible = torch.tensor([bool(rows.any()) for rows in here.split(block_m)])
            assert seen == (int(last.max()) + 1 if queries else 0)
            assert steps == (len(visible) - int(visible.int().argmax()) if visible.any() else 0)
            if steps:
                assert first == int(visible.int().argmax()) * block_m
                real = here[:, : keys - tile * block_n]
                assert real[masked:].all() and (masked == queries or here[masked:].all())
                assert masked in (0, queries) or not here[masked - 1].all()


def test_what_a_library_takes():
    torch.use_deterministic_algorithms(False)
    q, k = (torch.empty(2, n, 4, 64, dtype=torch.bfloat16) for n in (8, 9))
    lens, positions = torch.tensor([3, 4]), torch.zeros(2, 8, dtype=torch.int64)
    for refuses in (_choice.cudnn_refuses, _choice.fa4_refuses):
        assert refuses(q, q, q, *PLAIN) is None
        assert "as many queries as keys" in refuses(q, k, k, *PLAIN)
        assert "as many queries as keys" in refuses(q, q, q, None, None, None, lens, lens, 1.0)
        assert "float16, not torch.float32" in refuses(*[q.float()] * 3, *PLAIN)
        assert "multiples of 8, not 60" in refuses(*[q[..., :60]] * 3, *PLAIN)
        assert refuses(*[q[:, :0]] * 3, *PLAIN) is not None
        odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
        for other in (
            odd,
            q.transpose(-1, -2).contiguous().transpose(-1, -2),
            torch.empty(2, 8, 4, 66).to(q)[..., :64],
        ):
            assert "16 bytes" in refuses(q, other, q, *PLAIN)
    assert "positions" in _choice.cudnn_refuses(q, k, k, None, None, positions, None, None, 1.0)
    assert _choice.fa4_refuses(q, k, k, None, None, positions, None, None, 1.0) is None
    assert "log-sum-exp" in _choice.cudnn_refuses_backward(q, lens, q, q, q, None, None, q, lens, *PLAIN[2:])
    assert _choice.cudnn_refuses_backward(q, None, q, q, q, None, None, q, lens, *PLAIN[2:]) is None
    packed, cu = q[0], torch.tensor([0, 3, 8], dtype=torch.int32)
    assert _choice.fa4_refuses_varlen(*[packed] * 3, None, None, cu, cu, 5, 5, None, 1.0) is None
    assert "cu_seqlens" in _choice.fa4_refuses_varlen(*[packed] * 3, None, None, cu, cu.clone(), 5, 5, None, 1.0)
    for scale in (0.0, -1.0):  # they take maxima before they scale
        for refuses in (_choice.cudnn_refuses, _choice.fa4_refuses):
            assert "softmax_scale" in refuses(q, q, q, *PLAIN[:-1], scale)
        assert "softmax_scale" in _choice.fa4_refuses_varlen(*[packed] * 3, None, None, cu, cu, 5, 5, None, scale)


def test_a_named_library_that_cannot_is_not_replaced():
    with pytest.raises(RuntimeError, match="attention: backend='cudnn' is not available: "):
        ops.attention(*[torch.ones(1, 2, 1, 60, device=DEVICE)] * 3, backend="cudnn")


def case(what, width, seed=0):
    """A call of ours, the reference, and q, k, v in bf16 on the GPU."""
    if what == "ragged":
        cu = s.cu_seqlens(torch.tensor([200, 0, 300, 1, 129]))
        lengths = 650, 650  # some rows past the last sequence
        ours, arguments, options = ops.attention_varlen, (cu, cu, 300, 300), {}
        wanted = reference.attention_varlen
    else:
        lengths = (300 if what == "causal" else 170), 300
        positions = torch.rand(2, 300, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :170].sort(1).values
        ours, arguments, options = ops.attention, (), {} if what == "causal" else {"q_positions": positions}
        wanted = reference.attention
    options["return_lse"] = True
    moved = {id(t): t.cuda() for t in (*arguments, *options.values()) if isinstance(t, torch.Tensor)}  # cu twice is one

    on_gpu = [moved.get(id(t), t) for t in arguments], {name: moved.get(id(t), t) for name, t in options.items()}

    def call(q, k, v, backend):
        return ours(q, k, v, *on_gpu[0], **on_gpu[1], backend=backend)

    lead = () if what == "ragged" else (2,)
    shapes = [(*lead, n, heads, width) for n, heads in zip((lengths[0], lengths[1], lengths[1]), (6, 2, 2))]
    tensors = [s.normal(shape, seed + i, torch.bfloat16).cuda() for i, shape in enumerate(shapes)]
    return call, lambda q, k, v: wanted(q, k, v, *arguments, **options), tensors


SERVED = {"cudnn": ["causal"]} | dict.fromkeys(("hopper", "fa4"), ["causal", "subset", "ragged"])
every_case = pytest.mark.parametrize(
    ("specialist", "what", "width"),
    [(name, what, width) for name in THERE for what in SERVED[name] for width in (64, 128)]
    or [pytest.param(None, None, None, marks=pytest.mark.skip("none here"))],
)


@every_case
def test_equals_reference(specialist, what, width):
    """Within the error of rounding p and d_s to bf16, as our kernels."""
    torch.use_deterministic_algorithms(False)
    ours, wanted, tensors = case(what, width)
    exact = [t.cpu().double().requires_grad_() for t in tensors]
    out64, lse64 = wanted(*exact)
    upstream = s.normal(out64.shape, 9, torch.bfloat16)
    gradients64 = torch.autograd.grad(out64, exact, upstream.double())
    given = [t.requires_grad_() for t in tensors]
    out, lse = ours(*given, specialist)
    seen = lse64 > -torch.inf
    assert torch.equal(lse.cpu() > -torch.inf, seen)
    s.assert_close(lse.cpu()[seen], lse64[seen], torch.float32, 64, "lse")
    s.assert_close(out, out64, torch.bfloat16, 1, "out", cancels=1.0)
    gradients = torch.autograd.grad(out, given, upstream.cuda())
    for name, got, want in zip(("d_q", "d_k", "d_v"), gradients, gradients64):
        s.assert_close(got, want, torch.bfloat16, 4, name, cancels=1.0)


@every_case
def test_no_host_sync_and_graphs(specialist, what, width):
    torch.use_deterministic_algorithms(False)
    ours, _, tensors = case(what, width)
    given = [t.requires_grad_() for t in tensors]

    def step():
        out, _ = ours(*given, specialist)
        return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for old, new in zip(given, case(what, width, seed=20)[2]):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(results, step()):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)  # d_q is added up in any order


@every_case
def test_compiles_whole(specialist, what, width):
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()  # the cases compile one function, and only so often
    ours, _, tensors = case(what, width)
    compiled = torch.compile(lambda q, k, v: ours(q, k, v, specialist)[0] * 2, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), ours(*tensors, specialist)[0] * 2)
