"""Attention over paged keys/values against the reference, on a pool that is NaN wherever nothing was written."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mor_kernels import ops
from mor_kernels.ops._dispatch import unavailable
from mor_kernels.ops.paged_attention._parts import ENTRY, FIELDS, most_parts, queries_of_a_tile
from reference import ops as reference
from tests import strategies as s

FP8 = torch.float8_e4m3fn


@pytest.fixture
def much_split(device, backend, monkeypatch):
    """Rows are split among programs from 33 keys on."""
    if backend in ("triton", "cuda"):
        module = importlib.import_module(f"mor_kernels.ops.paged_attention.{backend}")
        monkeypatch.setattr(module, "LEAST_KEYS", 32)
        monkeypatch.setattr(module, "UNIT", 32)
    return device


def pool(lens, page_size, heads, width, seed, dtype, max_pages=None):
    """Caches with tokens for rows of these lengths, NaN elsewhere; and their page table, whose other entries are none.
    Float8 caches come with their scales."""
    rows, need = len(lens), [-(-n // page_size) for n in lens.tolist()]
    max_pages = max([1, *need]) + 1 if max_pages is None else max_pages
    pages = torch.randperm(sum(need) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((rows, max_pages), 2**31 - 1, dtype=torch.int32)
    caches = [torch.full((len(pages), page_size, heads, width), torch.nan, dtype=torch.float64) for _ in "kv"]
    for row, count in enumerate(need):
        for i in range(count):
            page = table[row, i] = pages.pop()
            used = min(page_size, int(lens[row]) - i * page_size)
            for j, cache in enumerate(caches):
                cache[page, :used] = s.normal((used, heads, width), seed + 7 * row + 100 * i + j)
    if dtype != FP8:
        return *(c.to(dtype) for c in caches), table, {}
    scales = {name: (torch.rand(heads, generator=torch.Generator().manual_seed(seed)) + 0.5) / 64 for name in SCALES}
    caches = [(c / f[:, None].double()).float().clamp(-448, 448).to(FP8) for c, f in zip(caches, scales.values())]
    return *caches, table, scales


SCALES = ("k_scale", "v_scale")


def values(caches, scales):
    """What caches hold, in float64."""
    caches = [c.double() for c in caches]
    return [c * scales[name][:, None].double() if name in scales else c for c, name in zip(caches, SCALES)]


def check(device, backend, q, caches, table, lens, scales, **options):
    """Compare with float64; the pool stays as it was."""
    exact = reference.paged_attention(q.double(), *values(caches, scales), table, lens, **options)
    moved = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in (options | scales).items()}
    on_device = [c.to(device) for c in caches]
    out = ops.paged_attention(q.to(device), *on_device, table.to(device), lens.to(device), backend=backend, **moved)
    assert all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(on_device, caches))
    # p is rounded to the dtype for the tensor cores: up to half an eps of the largest value
    rounded = backend != "eager" and q.dtype in s.HALVES
    k, v = (t.nan_to_num() for t in values(caches, scales))
    off = torch.finfo(q.dtype).eps / 2 * rounded + s.rounding_of_scores(q, k, options.get("softmax_scale"), q.dtype)
    slack = off * v.abs().amax().item() if v.numel() else 0.0
    s.assert_close(out, exact, q.dtype, 0.5, slack=slack)
    return out


@s.targets("paged_attention")
@given(
    lanes=st.integers(0, 4), longest=st.integers(0, 12), page_size=st.sampled_from([1, 3, 4, 16]), dtype=s.dtypes,
    heads=s.counts_of_heads, width=s.widths, seed=s.seeds, stored=st.sampled_from(["same", "float8", "bfloat16"]),
    most=st.integers(0, 3), slack=st.integers(0, 2), by_row=st.booleans(), positioned=st.booleans(),
    strided=st.booleans(), scale=st.sampled_from([None, 0.3, 0.0, -0.3]),
)  # fmt: skip
def test_equals_reference(
    device, backend, lanes, longest, page_size, dtype, heads, width, seed, stored, most, slack, by_row, positioned,
    strided, scale,
):  # fmt: skip
    s.assume_served(device, backend, dtype)
    kept = {"same": dtype, "float8": FP8, "bfloat16": torch.bfloat16}[stored]
    assume(stored != "bfloat16" or dtype == torch.float32 and (device, backend) != ("cpu", "triton"))
    (longest, most), width = s.larger(device, seed, longest, most), s.wider(device, seed, width, (4, 40, 64, 128))
    row_lens = s.lengths(lanes + 1, longest, seed)
    *caches, table, scales = pool(row_lens, page_size, heads[1], width, seed, kept)
    options, n = {"softmax_scale": scale}, lanes
    lens = row_lens[:lanes]
    if by_row:
        rows = torch.randperm(lanes + 1, generator=torch.Generator().manual_seed(seed))[:lanes]
        lens = row_lens[rows]
        options["rows"] = torch.where(torch.arange(lanes) == seed % 5, -1, rows)
    else:
        table = table[:lanes]
    if most:
        counts = torch.minimum(s.lengths(lanes, most, seed + 1), lens)
        options["cu_seqlens_q"], n = s.cu_seqlens(counts), int(counts.sum()) + slack
    if positioned:
        options["q_positions"] = torch.randint(-1, longest + 2, (n,), generator=torch.Generator().manual_seed(seed))
    q = s.normal((n, heads[0], width), seed + 3, dtype, strided)
    check(device, backend, q, caches, table, lens.to(torch.int32), scales, **options)


@s.targets("paged_attention")
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, FP8], ids=str)
def test_split_rows_equal_reference(much_split, device, backend, stored):
    """Lengths 0 to 300 beside one another, one query a lane and several; parts that no query of a tile sees."""
    lens = torch.tensor([0, 1, 31, 32, 33, 97, 300], dtype=torch.int32)
    *caches, table, scales = pool(lens, 16, 2, 8, 0, stored)
    q = s.normal((7, 6, 8), 1, torch.float16 if stored == FP8 else stored)
    check(device, backend, q, caches, table, lens, scales)
    counts = torch.tensor([0, 1, 4, 0, 1, 2, 5])
    q = s.normal((int(counts.sum()) + 2, 6, 8), 1, q.dtype)
    options = {"cu_seqlens_q": s.cu_seqlens(counts), "rows": torch.tensor([0, 1, 2, 3, -1, 5, 6])}
    check(device, backend, q, caches, table, lens, scales, **options)
    options["q_positions"] = torch.tensor([0, 5, 30, 31, 2, 7, 40, 60, 0, 90, 150, 250, 299, 0, 0])
    check(device, backend, q, caches, table, lens, scales, **options)


@s.targets("paged_attention")
@pytest.mark.parametrize("counts", [[0, 70, 1, 0], [2, 2, 3, 40], [1, 1, 1, 1]], ids=str)
def test_many_queries_in_one_lane(device, backend, counts):
    """Tiles that are full beside some that hardly are, and padding for more than one tile."""
    lens = torch.tensor([9, 75, 1, 50], dtype=torch.int32)
    *caches, table, scales = pool(lens, 16, 2, 8, 0, torch.float32)
    q = s.normal((sum(counts) + 40, 6, 8), 1, torch.float32)
    check(device, backend, q, caches, table, lens, scales, cu_seqlens_q=s.cu_seqlens(torch.tensor(counts)))


@s.targets("paged_attention")
def test_a_long_row(device, backend):
    """4,096 keys: parts are merged in fp32."""
    lens = torch.tensor([4096, 3], dtype=torch.int32)
    *caches, table, scales = pool(lens, 64, 1, 16, 0, torch.float32)
    check(device, backend, s.normal((2, 3, 16), 1, torch.float32), caches, table, lens, scales)


@s.targets("paged_attention")
@pytest.mark.parametrize("dtype", s.HALVES, ids=str)
def test_parts_of_a_long_row_stay_in_fp32(much_split, device, backend, dtype):
    """Values whose parts cancel, weighed alike: every sum is exact, so one rounding is left, that of the result."""
    if (device, backend, dtype) == ("cpu", "triton", torch.bfloat16):
        pytest.skip("its interpreter rounds bf16 wrongly")
    lens = torch.tensor([4096], dtype=torch.int32)
    _, v, table, _ = pool(lens, 64, 1, 16, 0, dtype)
    noise = torch.randint(0, 8, (2048, 1, 16), generator=torch.Generator().manual_seed(0))
    large = (256 + 8 * noise).to(dtype)  # exact in 8 bits of mantissa, but no mean of them is
    values = torch.cat((large, -large.roll(1, -1)))
    v[table[0, :64].long()] = values.view(64, 64, 1, 16)
    q, want = torch.zeros(1, 1, 16, dtype=dtype), values.double().mean(0)[None]
    assert want.abs().max() < 2
    out = ops.paged_attention(*(t.to(device) for t in (q, torch.zeros_like(v), v, table, lens)), backend=backend)
    s.assert_close(out, want, dtype, 0.5, cancels=0)


@s.targets("paged_attention")
def test_queries_see_keys_by_position(device, backend):
    """Positions 0 and 3 among 5 keys; bottom-right alignment would show the first query keys 0..3."""
    lens, keys = torch.tensor([5], dtype=torch.int32), torch.zeros(2, 4, 1, 4)
    values = torch.arange(8.0).view(2, 4, 1, 1).expand(2, 4, 1, 4)
    cu, positions = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 3])
    moved = [
        t.to(device) for t in (torch.ones(2, 3, 4), keys, values, torch.tensor([[0, 1]]).int(), lens, cu, positions)
    ]
    out = ops.paged_attention(*moved[:5], cu_seqlens_q=moved[5], q_positions=moved[6], backend=backend)
    torch.testing.assert_close(out.cpu(), torch.tensor([0.0, 1.5])[:, None, None].expand(2, 3, 4))


@s.targets("paged_attention")
@pytest.mark.parametrize(
    ("counts", "lens"), [([0, 0, 1], [0, 0, 1]), ([1, 0, 3], [4, 7, 0]), ([1, 1], [0, 1])], ids=str
)
def test_lanes_without_queries_or_keys(device, backend, counts, lens):
    """Three query heads on one; zeros where there is no key."""
    lens, counts = torch.tensor(lens, dtype=torch.int32), torch.tensor(counts)
    *caches, table, _ = pool(lens, 4, 1, 4, 0, torch.float32)
    q = s.normal((int(counts.sum()), 3, 4), 1, torch.float32)
    out = check(device, backend, q, caches, table, lens, {}, cu_seqlens_q=s.cu_seqlens(counts)).cpu()
    seen = (lens > 0).repeat_interleave(counts)
    assert out[seen].any(-1).all() and not out[~seen].any()


@s.targets("paged_attention")
@pytest.mark.parametrize("width", [80, 96, 128])
@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (10, 2), (14, 2)])
def test_groups_of_any_size_and_heads_of_any_width(device, backend, width, heads, groups):
    """Queries that are a slice of a fused projection; a distinct value for each head."""
    lens = torch.tensor([6, 19], dtype=torch.int32)
    *caches, table, _ = pool(lens, 16, groups, width, 0, torch.float32)
    fused = s.normal((2, heads + 2 * groups, width), 1, torch.float32)
    check(device, backend, fused[:, :heads], caches, table, lens, {})


@s.targets("paged_attention")
def test_rows_that_end_where_a_page_does(device, backend):
    """Lengths 15, 16 and 17 with pages of 16; whatever isn't theirs, the next page too, is 1e4."""
    lens = torch.tensor([15, 16, 17], dtype=torch.int32)
    *caches, table, _ = pool(lens, 16, 1, 4, 0, torch.float32)
    caches = [c.nan_to_num(nan=1e4) for c in caches]
    (foreign, *_), last = {*range(len(caches[0]))} - {*table.flatten().tolist()}, (lens - 1) // 16
    table = torch.where(torch.arange(table.shape[1]) > last[:, None], foreign, table)
    assert (caches[0][foreign] == 1e4).all() and (table >= 0).all()
    check(device, backend, s.normal((3, 2, 4), 1, torch.float32), caches, table.int(), lens, {})


@s.targets("paged_attention")
def test_many_lanes(device, backend):
    """More lanes than are looked at together, most of them empty."""
    if (device, backend) == ("cpu", "triton"):
        pytest.skip("a thousand programs take a minute in Triton's interpreter")
    lens = torch.where(torch.arange(2500) % 7 == 0, torch.arange(2500) % 19, 0).to(torch.int32)
    *caches, table, scales = pool(lens, 4, 1, 4, 0, torch.float32)
    check(device, backend, s.normal((2500, 2, 4), 1, torch.float32), caches, table, lens, scales)
    cu = s.cu_seqlens((torch.arange(2500) % 14 == 0).long())
    check(device, backend, s.normal((200, 2, 4), 1, torch.float32), caches, table, lens, scales, cu_seqlens_q=cu)


@s.targets("paged_attention")
def test_no_lanes_and_nothing_to_see(device, backend):
    none = torch.zeros(0, dtype=torch.int32)
    *caches, table, _ = pool(torch.tensor([5]), 4, 1, 4, 0, torch.float32)
    check(device, backend, torch.ones(0, 2, 4), caches, table[:0], none, {})
    check(device, backend, torch.ones(2, 2, 4), caches, table[:0], none, {}, cu_seqlens_q=torch.zeros(1).int())
    check(device, backend, torch.ones(1, 2, 4), caches, table[:, :0], torch.zeros(1).int(), {})


@s.targets("paged_attention")
def test_nan_reaches_only_its_own_row(device, backend):
    lens = torch.tensor([5, 6], dtype=torch.int32)
    k, v, table, _ = pool(lens, 4, 1, 4, 0, torch.float32)
    k[table[0, 0], 2] = torch.nan
    q = s.normal((2, 2, 4), 1, torch.float32)
    out = ops.paged_attention(*(t.to(device) for t in (q, k, v, table, lens)), backend=backend).cpu()
    assert out[0].isnan().all() and not out[1].isnan().any()


def parts_of(schedule, lines, groups):
    """Each part's numbers by its line, and the lines of each range."""
    numbers = schedule.tolist()
    table = [numbers[i * FIELDS : (i + 1) * FIELDS] for i in range(lines)]
    entries = numbers[lines * (FIELDS + groups) :]
    ranges = [entries[i : i + ENTRY] for i in range(0, len(entries), ENTRY)]
    for *line, first, count in ranges:
        assert not count or line == table[first]
    return {i: line for i, line in enumerate(table) if line[2] > 0}, [range(r[-2], r[-2] + r[-1]) for r in ranges]


@s.targets("attention_schedule")
@pytest.mark.parametrize("longest", [0, 40, 400, 5000])
@pytest.mark.parametrize("several", [False, True])
def test_a_schedule_has_each_key_of_each_tile_once(device, backend, longest, several):
    """In as many parts as the line says, side by side in order; and each part is in one range."""
    if backend == "eager":
        pytest.skip("its schedule is empty")
    lens = s.lengths(70, longest, 3).int()
    counts = s.lengths(70, 9, 4) if several else torch.ones(70, dtype=torch.int64)
    cu, queries = s.cu_seqlens(counts), int(counts.sum()) + 3 * several
    options = {"cu_seqlens_q": cu.to(device)} if several else {}
    schedule = ops.attention_schedule(lens.to(device), 6, 2, queries, backend=backend, **options)
    lines = most_parts(70, 6, 2, queries, options.get("cu_seqlens_q"))
    parts, ranges = parts_of(schedule.cpu(), lines, 2)
    assert sorted(i for lines_of in ranges for i in lines_of if i in parts) == list(parts)
    wanted, seen, i = queries_of_a_tile(70, 3, queries, options.get("cu_seqlens_q")), [], 0
    in_order = iter(parts.items())
    for i, (row, query, left, keys, begin, end, first, splits) in in_order:
        assert (begin, first) == (0, i)
        for _ in range(splits - 1):
            i, line = next(in_order)
            assert line[:5] == [row, query, left, keys, end] and line[6:] == [first, splits]
            end = line[5]
        assert end == keys == (int(lens[row]) if 0 <= row < 70 else 0)
        seen += range(query, query + min(left, wanted))
    assert seen == list(range(queries))


@pytest.mark.parametrize("device", s.DEVICES)
@pytest.mark.parametrize("backends", [("triton", "cuda"), ("cuda", "triton")], ids=" ".join)
def test_kernels_read_each_others_schedules(device, backends):
    for backend in backends:
        if reason := unavailable(backend, "paged_attention", device):
            pytest.skip(reason)
    lens = torch.tensor([0, 3, 700, 2000, 64, 1300], dtype=torch.int32)
    *caches, table, _ = pool(lens, 16, 2, 64, 0, torch.float16)
    q = s.normal((6, 6, 64), 1, torch.float16)
    schedule = ops.attention_schedule(lens.to(device), 6, 2, 6, backend=backends[0])
    on_device = (t.to(device) for t in (q, *caches, table, lens))
    got = ops.paged_attention(*on_device, schedule=schedule, backend=backends[1])
    s.assert_close(got, reference.paged_attention(*(t.double() for t in (q, *caches)), table, lens), q.dtype, 0.5,
                   slack=torch.finfo(q.dtype).eps * 2)  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_lengths_from_nothing_to_131072(dtype):
    lens = torch.tensor([0, 131072, 1, 5000, 131071, 16, 17], dtype=torch.int32)
    need = (lens + 15) // 16
    first = torch.nn.functional.pad(need.cumsum(0), (1, 0))
    table = torch.full((7, 8192), 2**31 - 1, dtype=torch.int32)
    for row, count in enumerate(need.tolist()):
        table[row, :count] = torch.arange(int(first[row]), int(first[row]) + count).flip(0)
    generator = torch.Generator("cuda").manual_seed(0)
    caches = [torch.randn(int(first[-1]), 16, 5, 64, device="cuda", generator=generator).to(dtype) for _ in "kv"]
    for queries in (1, 16):
        q = torch.randn(7 * queries, 15, 64, device="cuda", generator=generator).bfloat16()
        cu = torch.arange(8, dtype=torch.int32, device="cuda") * queries
        options = {} if queries == 1 else {"cu_seqlens_q": cu}
        got = ops.paged_attention(q, *caches, table.cuda(), lens.cuda(), **options)
        q = q.double().view(7, queries, 5, 3, 64)
        for row, length in enumerate(lens.tolist()):
            slots = table[row, : int(need[row])].long().cuda()
            k, v = (c[slots].flatten(0, 1)[:length].double() for c in caches)
            scores = torch.einsum("nghd,kgd->nghk", q[row], k) / 8
            position = torch.arange(length - queries, length, device="cuda")
            hidden = torch.arange(length, device="cuda") > position[:, None]
            want = torch.einsum("nghk,kgd->nghd", scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1), v)
            want = torch.where((position < 0)[:, None, None, None], 0, want).flatten(1, 2)
            slack = torch.finfo(torch.bfloat16).eps / 2 * (v.abs().max().item() if length else 0)
            s.assert_close(
                got[row * queries : (row + 1) * queries], want, torch.bfloat16, 0.5, f"{length}", slack=slack
            )
