"""The attention benchmark without a GPU: cases, counts, the check and what it catches, masks, rivals' calls."""

import argparse
import functools
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from bench import attn_flops
from bench.attn_flops import Shape, Way
from bench.harness import Mismatch, verify
from mor_kernels import ops

SMALL = ("causal:B2,H4/2,d16,N37", "subset:B3,H6/2,d16,N40,k13", "ragged:B3,H3/1,d8,N21", "subset:B1,H2/2,d8,N9,k9")
SHAPES = [Shape.parse(text) for text in SMALL]
EAGER = Way("ours, eager", functools.partial(attn_flops.own, "eager"), ours=True)
DIRECTIONS = ("forward", "backward")


def visible(shape):
    """The mask of each sequence, as a matrix."""
    positions = shape.positions()
    if positions is not None:
        return [torch.arange(shape.length) <= row[:, None] for row in positions]
    return [torch.ones(length, length).tril().bool() for length in shape.lengths().tolist()]


def test_cases_are_read():
    assert Shape.parse("causal:B32,H15/5,d64,N2048") == Shape("causal", 32, 15, 5, 64, 2048)
    shape = Shape.parse("subset:B4,H16/8,d128,N8192,k4096")
    assert shape == Shape("subset", 4, 16, 8, 128, 8192, 4096) and shape.name == "B4 H16/8 d128 N8192 k4096"
    assert Shape.parse("ragged:B1,H1/1,d8,N5").name == "B1 H1/1 d8 N5"


@pytest.mark.parametrize(
    "text",
    [
        "dense:B2,H4/2,d16,N37",
        "causal:B2,H4/2,d16",
        "causal:B2,H4/2,d16,N37,k3",
        "ragged:B2,H4/2,d16,N37,k3",
        "subset:B2,H4/2,d16,N37",
        "subset:B2,H4/2,d16,N37,k38",
        "subset:B2,H4/2,d16,N37,k0",
        "causal:B0,H4/2,d16,N37",
        "causal:B2,H4/3,d16,N37",
        "causal:B2,H4/0,d16,N37",
        "causal:B2,H4/2,d16,N37 ",
    ],
)
def test_a_case_that_makes_no_sense_is_refused(text, capsys):
    with pytest.raises(argparse.ArgumentTypeError, match="causal:B32|zero|divide|at most N"):
        Shape.parse(text)
    with pytest.raises(SystemExit):
        attn_flops.main([text])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("shape", SHAPES, ids=SMALL)
def test_operations_are_counted_on_the_pairs_of_the_mask(shape):
    pairs = sum(int(mask.sum()) for mask in visible(shape))
    assert shape.pairs() == pairs
    assert shape.flops("forward") == 4 * shape.width * shape.heads * pairs
    assert shape.flops("backward") == 10 * shape.width * shape.heads * pairs


@pytest.mark.parametrize("shape", SHAPES, ids=SMALL)
def test_bytes_are_those_of_the_tensors(shape):
    s = shape.make("cpu", 0)
    positions = [] if s.positions is None else [s.positions]
    size = lambda *tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    assert shape.nbytes("forward") == size(s.q, s.k, s.v, s.q, *positions)
    gradients, log_sum_exp = (s.q, s.k, s.v), s.q[..., 0].float()
    assert shape.nbytes("backward") == size(s.d_out, s.q, s.q, s.k, s.v, log_sum_exp, *gradients, *positions)


def test_lengths_and_positions_are_as_described():
    lengths = Shape.parse("ragged:B4000,H1/1,d8,N9").lengths()
    assert set(lengths.tolist()) == set(range(5, 14))
    for shape in SHAPES:
        s, again, other = (shape.make("cpu", seed) for seed in (0, 0, 1))
        assert torch.equal(s.q, again.q) and not torch.equal(s.q, other.q)
        if shape.kind == "subset":
            assert torch.equal(s.positions, other.positions) and s.positions.dtype == torch.int64
            assert (s.positions.diff(dim=1) > 0).all() and 0 <= s.positions.min() <= s.positions.max() < shape.length
        if shape.kind == "ragged":
            assert s.cu_seqlens.tolist() == [0, *shape.lengths().cumsum(0).tolist()]
            assert len(s.q) == len(s.k) == s.cu_seqlens[-1] and s.longest == shape.lengths().max()


@pytest.mark.parametrize("at_once", [1, 300, attn_flops.SCORES_AT_ONCE])
@pytest.mark.parametrize("shape", SHAPES[1:2], ids=SMALL[1:2])
def test_the_float64_computation_is_that_of_autograd(shape, at_once, monkeypatch):
    monkeypatch.setattr(attn_flops, "SCORES_AT_ONCE", at_once)
    s, heads = shape.make("cpu", 0), shape.heads // shape.groups
    q, k, v, d_out = (attn_flops._part(shape, None, t, 1, 1).double() for t in (s.q, s.k, s.v, s.d_out))
    positions = s.positions[1].repeat_interleave(heads)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    scores = (q @ k.T * shape.width**-0.5).masked_fill(~visible(shape)[1].repeat_interleave(heads, 0), -torch.inf)
    out = scores.softmax(-1) @ v
    want = dict(zip(("d_q", "d_k", "d_v"), torch.autograd.grad(out, tensors, d_out)), out=out.detach())
    with torch.no_grad():
        got = attn_flops.exact(q, k, v, positions) | attn_flops.exact(q, k, v, positions, d_out)
    for name, value in want.items():
        torch.testing.assert_close(got[name][0], value, rtol=1e-10, atol=1e-12)
        allowed = got[name][1]
        assert 0.004 < allowed.square().mean().sqrt() / value.square().mean().sqrt() < 0.04  # tight enough to be of use


def outputs_of(shape, direction, way=EAGER):
    outputs = getattr(way, direction)(shape.make("cpu", 0))()
    return outputs.detach() if direction == "forward" else [t.clone() for t in outputs]


def check(shape, direction, outputs, ours=True):
    return attn_flops.check(shape, direction, shape.make("cpu", 0), outputs, ours)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=SMALL)
def test_a_right_result_passes(shape, direction):
    assert 0.05 < check(shape, direction, outputs_of(shape, direction)) < 1


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", ["out", "d_q", "d_k", "d_v"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=SMALL[:3])
def test_one_wrong_element_is_caught(shape, name, ours):
    direction = "forward" if name == "out" else "backward"
    outputs = outputs_of(shape, direction)
    tensor = outputs if name == "out" else outputs[["d_q", "d_k", "d_v"].index(name)]
    place = (..., 2, 0, 1) if shape.kind == "ragged" else (0, 2, 0, 1)
    tensor[place] += 0.3 * tensor.float().square().mean().sqrt()
    with pytest.raises(Mismatch, match=f"{name}: the error is"):
        check(shape, direction, outputs, ours)


def test_a_rival_gets_three_times_our_budget():
    shape = SHAPES[1]
    s, heads = shape.make("cpu", 0), shape.heads // shape.groups
    part = functools.partial(attn_flops._part, shape, None, b=0, g=0)
    want, allowed = attn_flops.exact(part(s.q), part(s.k), part(s.v), s.positions[0].repeat_interleave(heads))["out"]
    for times, passes in ((0.5, {True, False}), (2, {False}), (4, set())):
        out = outputs_of(shape, "forward").double()
        out[0, 0, 0, 0] = want[0, 0] + times * allowed[0, 0]
        for ours in (True, False):
            if ours in passes:
                check(shape, "forward", out, ours)
            else:
                with pytest.raises(Mismatch):
                    check(shape, "forward", out, ours)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_is_caught(shift):
    shape = SHAPES[1]
    s = shape.make("cpu", 0)
    s.positions = (s.positions + shift).clamp(0, shape.length - 1)
    with pytest.raises(Mismatch, match="out: the error is"):
        check(shape, "forward", EAGER.forward(s)())


def test_all_sequences_and_heads_must_have_their_shape_and_be_finite():
    shape = SHAPES[1]  # sequence 1 of three is in no sample
    out = outputs_of(shape, "forward")
    out[1, 0, 0, 0] = torch.nan
    with pytest.raises(Mismatch, match="finite"):
        check(shape, "forward", out)
    d_q, d_k, d_v = outputs_of(shape, "backward")
    with pytest.raises(Mismatch, match="d_k: shape"):
        check(shape, "backward", (d_q, torch.cat((d_k, d_k)), d_v))


@pytest.mark.parametrize(("queries", "keys"), [(300, 700), (256, 512), (256, 500), (385, 512), (1, 129), (400, 400)])
def test_the_block_mask_is_that_of_all_pairs(queries, keys):
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randperm(keys, generator=generator)[:queries].sort().values
    positions = torch.stack([anywhere, torch.arange(keys - queries, keys)])

    def sees(b, h, q, k):
        return k <= positions[b, q]

    mine = attn_flops.block_mask(positions, keys, sees)
    theirs = create_block_mask(sees, 2, None, queries, keys, device="cpu", BLOCK_SIZE=attn_flops.BLOCK)
    touched = torch.zeros(2, 1, -(-queries // 128), -(-keys // 128))
    for b, q in ((b, q) for b in range(2) for q in range(queries)):
        touched[b, 0, q // 128, : positions[b, q] // 128 + 1] = 1
    assert torch.equal(mine.to_dense().float(), touched)
    assert mine.seq_lengths == theirs.seq_lengths == (queries, keys)
    for lists in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"),
                  ("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):  # fmt: skip
        counts, which = (getattr(mine, name) for name in lists)
        their_counts, their_which = (getattr(theirs, name) for name in lists)
        assert torch.equal(counts, their_counts) and counts.dtype == which.dtype == torch.int32
        meant = torch.arange(which.shape[-1]) < counts[..., None]
        assert torch.equal(which[meant], their_which[meant])


class Stub(ModuleType):
    """A module of a package that isn't installed."""

    def __init__(self, name, **members):
        super().__init__(name)
        self.__dict__.update(members)


def test_fa4_is_told_what_each_query_and_each_key_block_needs(monkeypatch):
    """Its lists and its mask, put together again as it does, are the visibility of each pair."""

    def lists(*tensors, block_size):
        return SimpleNamespace(tensors=tensors, block_size=block_size)

    def attend(q, k, v, mask_mod, aux_tensors, block_sparse_tensors, block_sparse_tensors_bwd):
        queries, keys = q.shape[1], k.shape[1]
        index = torch.arange(queries), torch.arange(keys)
        assert block_sparse_tensors.block_size == block_sparse_tensors_bwd.block_size == (128, 128)
        assert aux_tensors[0].dtype == torch.int32
        for sparse, by_keys in ((block_sparse_tensors, False), (block_sparse_tensors_bwd, True)):
            counts, which, full_counts, full_which = sparse.tensors
            for b in range(len(q)):
                seen = torch.zeros(keys if by_keys else queries, queries if by_keys else keys, dtype=torch.bool)
                pairs = mask_mod([b], None, [index[0][:, None]], index[1], None, aux_tensors)
                pairs = pairs.T if by_keys else pairs
                for block in range(counts.shape[-1]):
                    rows = slice(128 * block, 128 * block + 128)
                    for other in which[b, 0, block, : counts[b, 0, block]].tolist():
                        columns = slice(128 * other, 128 * other + 128)
                        seen[rows, columns] = pairs[rows, columns]
                    for other in full_which[b, 0, block, : full_counts[b, 0, block]].tolist():
                        seen[rows, 128 * other : 128 * other + 128] = True
                assert torch.equal(seen.T if by_keys else seen, visible(shape)[b])
        return "out", "log-sum-exp"

    cute = Stub("cute", jit=lambda function: function)
    utils = Stub("utils", scalar_to_ssa=lambda value, dtype: value)
    for name, module in {
        "cutlass": Stub("cutlass", Int32=None, cute=cute),
        "cutlass.cute": cute,
        "flash_attn": Stub("flash_attn"),
        "flash_attn.cute": Stub("flash_attn.cute", utils=utils),
        "flash_attn.cute.block_sparsity": Stub("block_sparsity", BlockSparseTensorsTorch=lists),
        "flash_attn.cute.interface": Stub("interface", flash_attn_func=attend, flash_attn_varlen_func=None),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "bench._fa4", raising=False)
    fa4 = importlib.import_module("bench._fa4")
    monkeypatch.delitem(sys.modules, "bench._fa4")
    shape = Shape.parse("subset:B2,H2/1,d8,N700,k300")
    s = shape.make("cpu", 0)
    assert fa4.subset(s.q, s.k, s.v, attn_flops.subset_mask(s)) == "out"


def ours(function, **options):
    return functools.partial(function, backend="eager", **options)


PACKAGES = {
    "bench._fa4": SimpleNamespace(
        causal=ours(ops.attention),
        subset=lambda q, k, v, known: ops.attention(q, k, v, q_positions=known[0], backend="eager"),
        varlen=ours(ops.attention_varlen),
    ),
    "flash_attn": SimpleNamespace(
        flash_attn_func=lambda q, k, v, causal: ops.attention(q, k, v, backend="eager"),
        flash_attn_varlen_func=lambda *arguments, causal: ops.attention_varlen(*arguments, backend="eager"),
    ),
    "torch.nn.attention.varlen": SimpleNamespace(
        varlen_attn=lambda *arguments, window_size: ops.attention_varlen(*arguments, backend="eager")
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rivals_are_called_in_their_layouts(monkeypatch):
    """With the installed ones replaced: each gives what the check expects, forward and (FlexAttention aside, which has
    no backward on a CPU) backward."""
    monkeypatch.setattr(attn_flops, "optional", PACKAGES.get)
    monkeypatch.setattr(
        attn_flops,
        "sdpa",
        lambda backend, q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
    )
    rivals, missing = attn_flops.gpu_rivals(lambda function: function)
    assert missing == []
    assert {kind: [way.name for way in ways] for kind, ways in rivals.items()} == {
        "causal": ["flex", "sdpa flash (FA2)", "sdpa cudnn", "flash-attn (FA2)", "fa4"],
        "subset": ["flex", "flex + mask", "fa4", "fa4 + lists"],
        "ragged": ["torch varlen (FA2)", "flash-attn (FA2)", "fa4"],
    }
    for shape in SHAPES:
        for way in rivals[shape.kind]:
            for direction in way.directions:
                if "flex" in way.name and direction == "backward":
                    continue
                outputs = getattr(way, direction)(shape.make("cpu", 0))()
                assert check(shape, direction, outputs, ours=False) < 1, (way.name, direction)
            assert way.directions == (("forward",) if "+" in way.name else DIRECTIONS)


def test_what_is_not_installed_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(attn_flops, "optional", lambda module: None)
    cases = attn_flops.make_cases([SHAPES[0], SHAPES[2]], "cuda", lambda function: function)
    assert "left out" in capsys.readouterr().out
    names = [[implementation.name for implementation in case.implementations] for case in cases]
    assert names[0] == names[1] == ["flex", "sdpa flash (FA2)", "sdpa cudnn", "triton", "hopper", "default"]
    assert names[2] == names[3] == ["triton", "hopper", "default"]
    assert attn_flops.gpu_rivals(lambda function: function)[1] == [
        "torch varlen (from torch 2.10 on)", "flash-attn", "flash-attn-4",
    ]  # fmt: skip


def test_a_package_that_breaks_on_import_is_not_installed(monkeypatch, tmp_path):
    (tmp_path / "broken_rival.py").write_text("raise OSError('wrong ABI')")
    monkeypatch.syspath_prepend(tmp_path)
    assert attn_flops.optional("broken_rival") is None and attn_flops.optional("no_such_rival") is None
    assert attn_flops.optional("math") is not None


def test_the_ways_to_say_causal_to_torch():
    options = attn_flops.torch_varlen_options
    assert options(lambda q, *, is_causal=False: None) == {"is_causal": True}
    assert options(lambda q, *, window_size=(-1, -1): None) == {"window_size": (-1, 0)}
    with_heads = {"window_size": (-1, 0), "enable_gqa": True}
    assert options(lambda q, *, window_size=(-1, -1), enable_gqa=False: None) == with_heads


def test_the_default_cases():
    shapes = [Shape.parse(text) for text in attn_flops.DEFAULT]
    cases = attn_flops.make_cases(shapes, "cpu")
    assert len({(case.op, case.name) for case in cases}) == len(cases) == 24
    flops = {(case.op, case.name): case.flops for case in cases}
    causal = 4 * 64 * 15 * 32 * 2048 * 2049 // 2
    assert flops["causal forward", "B32 H15/5 d64 N2048"] == causal
    assert flops["subset backward", "B32 H15/5 d64 N2048 k1365"] == pytest.approx(2.5 * causal * 2 / 3, rel=0.01)
    assert flops["ragged forward", "B32 H15/5 d64 N1365"] == pytest.approx(causal * (2 / 3) ** 2 * 13 / 12, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_a_small_case_is_checked_and_nothing_written(tmp_path, capsys, monkeypatch):
    assert attn_flops.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "No CUDA device" in printed and not list(tmp_path.iterdir())
    for direction in DIRECTIONS:
        for name in ("sdpa with a matrix", "ours, eager"):
            assert f"subset {direction} B2 H6/2 d16 N40 k13: {name} is right" in printed
    monkeypatch.setattr(attn_flops, "own", lambda backend, s: lambda q, k, v: ops.attention(q, k, v, backend=backend))
    with pytest.raises(Mismatch):  # it does look: here ours ignores positions
        attn_flops.main([])


def test_the_check_is_that_of_the_case():
    for case in attn_flops.make_cases(SHAPES, "cpu"):
        assert [i.ours for i in case.implementations] == [False] * (len(case.implementations) - 1) + [True]
        for implementation in case.implementations:
            assert verify(case, implementation) < 1
