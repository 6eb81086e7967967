"""Ragged, paged keys/values: append, lookup, decode attention and the accounts, against plain PyTorch and FlashInfer.

    python bench/kv.py [--quick] [--only "decode B32"] [--out DIR]

15 query heads on 5 key/value heads of width 64 in bf16, as in a model of 360M; rows of 0.5 to 1.5 times a mean length,
whose pages lie anywhere in the pool. FlashInfer, where installed, plans on the host, before the time starts; our
schedule is made on the device, once for all layers, and is a row of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from bench.harness import COMPILE, ROUNDOFF, Case, Implementation, close, main, our_backends, require
from mor_kernels import ops

HEADS, GROUPS, WIDTH = 15, 5, 64
BATCHES, MEANS, PAGE_SIZES = (32, 128, 512), (128, 2048, 16384), (16, 64)
PROMPTS = (8192, 65536)  # tokens appended at once
PLAIN = 2**18  # tokens that plain PyTorch, which pads rows and repeats heads, is asked to attend to at the most
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
THETA = 10000.0
SHARED = 2**28  # bytes of a pool from which on all input sets share one: a call finds nothing of it in the cache
WORKSPACE = 64 * 2**20  # bytes that FlashInfer is lent


def turn(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def angles(positions, dtype=torch.float32):
    half = WIDTH // 2
    frequency = THETA ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angle = (positions[:, None].to(dtype) * frequency)[:, None, :]
    return angle.cos(), angle.sin()


def append_plain(q, k, v, k_cache, v_cache, page, offset, positions):
    cos, sin = angles(positions)
    k_cache.index_put_((page, offset), turn(k, cos, sin))
    v_cache.index_put_((page, offset), v)
    return turn(q, cos, sin)


def lookup_plain(k_cache, v_cache, page, offset):
    return k_cache[page, offset], v_cache[page, offset]


def attend_plain(q, k_cache, v_cache, table, lens):
    """Rows padded to the longest."""
    k, v = (cache[table.clamp(min=0)].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    seen = torch.arange(k.shape[2], device=q.device) < lens[:, None]
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    return out[:, :, 0]


def check_append(inputs, outputs, ours):
    cos, sin = angles(inputs.positions, torch.float64)

    def turned(x):
        first, second = x.double().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    out_q, k_cache, v_cache = outputs
    where = inputs.slots // inputs.page_size, inputs.slots % inputs.page_size
    require(torch.equal(v_cache[where], inputs.v), "v: not bit-equal")
    before = torch.ones(k_cache.shape[:2], dtype=torch.bool, device=k_cache.device)
    before[where] = False
    for name, cache, old in (("k", k_cache, inputs.k_cache), ("v", v_cache, inputs.v_cache)):
        require(torch.equal(cache[before], old[before]), f"{name}_cache: another slot changed")
    # plain PyTorch computes angles in fp32: off by 2 ** -23 of a position below 2048; some rivals round more often
    worst = close("k", k_cache[where], want := turned(inputs.k), allowance(want, inputs.k, ours))
    return max(worst, close("q", out_q, want := turned(inputs.q), allowance(want, inputs.q, ours)))


def allowance(want, x, ours):
    pair = x.double().abs().amax(-1, keepdim=True)
    return ROUNDOFF * want.abs() + (3e-4 if ours else 3e-4 + 2 * ROUNDOFF) * pair


def check_lookup(inputs, outputs, ours):
    for name, got, cache in zip("kv", outputs, (inputs.k_cache, inputs.v_cache)):
        require(torch.equal(got.view(torch.uint8), cache[inputs.where].view(torch.uint8)), f"{name}: not bit-equal")
    return 0.0


def check_attention(inputs, out, ours):
    """Eight lanes and the longest, in float64."""
    require(not out.isnan().any(), "NaN")
    batch, worst = len(inputs.lens), 0.0
    for lane in {*range(0, batch, -(-batch // 8)), int(inputs.lens.argmax())}:
        length = int(inputs.lens[lane])
        pages = inputs.table[lane, : -(-length // inputs.page_size)].long()
        # as bytes, since torch 2.6 can't index 8-bit floats on a CPU
        k, v = (
            cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)[:length].double() * inputs.scale
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        q = inputs.q[lane].double().view(GROUPS, HEADS // GROUPS, WIDTH)
        p = (torch.einsum("ghd,kgd->ghk", q, k) * WIDTH**-0.5).softmax(-1)
        want, spread = (torch.einsum("ghk,kgd->ghd", p, t) for t in (v, v.abs()))
        # p is rounded; some rivals also round a score, or the sum of a part
        allowed = ROUNDOFF * (want.abs() + (1 if ours else 4) * spread) + 1e-6
        worst = max(worst, close(f"lane {lane}", out[lane].view_as(want), want, allowed))
    return worst


def check_taken(inputs, outputs, ours):
    slots, lens = outputs
    require(torch.equal(lens, inputs.lens + 1), "k_lens")
    length = inputs.lens.long()
    page = inputs.state.page_table.gather(1, (length // inputs.page_size)[:, None])[:, 0]
    require(torch.equal(slots, page * inputs.page_size + length % inputs.page_size), "slots")
    return 0.0


class FlashInfer:
    """Its calls on our inputs; see its documentation for the layout of page tables."""

    def __init__(self):
        self.module = importlib.import_module("flashinfer")

    @staticmethod
    def pages(s):
        """Indptr, indices, and tokens of the last page."""
        need = (s.lens + s.page_size - 1) // s.page_size
        indices = s.table[torch.arange(s.table.shape[1], device=s.table.device) < need[:, None]]
        return F.pad(need.cumsum(0), (1, 0)).int(), indices, ((s.lens - 1) % s.page_size + 1).int()

    def attend(self, s):
        indptr, indices, last = self.pages(s)
        device = s.q.device
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True, backend="fa2",
            use_cuda_graph=True, paged_kv_indptr_buffer=torch.empty_like(indptr),
            paged_kv_indices_buffer=torch.empty_like(indices), paged_kv_last_page_len_buffer=torch.empty_like(last),
        )  # fmt: skip
        wrapper.plan(
            indptr, indices, last, HEADS, GROUPS, WIDTH, s.page_size, q_data_type=BF16, kv_data_type=s.k_cache.dtype
        )
        return lambda: wrapper.run(s.q, (s.k_cache, s.v_cache))

    def append(self, s):
        """Two launches: rotation in place, then the write."""
        count = len(s.slots)
        page, offset = s.slots // s.page_size, s.slots % s.page_size
        indptr = torch.arange(count + 1, device=s.slots.device, dtype=torch.int32)  # each token as a row of one page
        batch, last = indptr[:-1], (offset + 1).int()
        positions, page, offset = s.positions.int(), page.int(), offset.int()

        def call():
            self.module.apply_rope_pos_ids_inplace(s.q, s.k, positions, interleave=False, rope_theta=THETA)
            self.module.append_paged_kv_cache(
                s.k, s.v, batch, offset, (s.k_cache, s.v_cache), page, indptr, last, kv_layout="NHD"
            )
            return s.q, s.k_cache, s.v_cache

        return call


class Cases:
    """The cases on ``device``; ``compiled`` makes the compiled rivals."""

    def __init__(self, device: str, compiled: Callable):
        self.device, self.compiled = device, compiled
        self.flashinfer = FlashInfer() if device == "cuda" and importlib.util.find_spec("flashinfer") else None
        self.shared = {}  # the last large pool

    def _normal(self, seed, *shape, dtype=BF16):
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.empty(shape, dtype=BF16, device=self.device)
        for part in x.flatten().split(2**28):
            part.normal_(generator=generator)
        return x.to(dtype)

    def _pool(self, pages, page_size, dtype, seed):
        key, size = (pages, page_size, dtype), pages * page_size * GROUPS * WIDTH * 2 * dtype.itemsize
        if key in self.shared:
            return self.shared[key]
        self.shared.clear()
        pool = tuple(self._normal(seed + i, pages, page_size, GROUPS, WIDTH, dtype=dtype) for i in (0, 1))
        if size > SHARED:
            self.shared[key] = pool
        return pool

    def _rows(self, batch, mean, page_size, dtype, seed, pool=True):
        """Rows of any lengths whose mean is ``mean`` whatever the seed, so that each set moves as many bytes."""
        generator = torch.Generator().manual_seed(seed)
        spread = torch.linspace(0.5, 1.5, batch)[torch.randperm(batch, generator=generator)]
        lens = (spread * mean).round().long().clamp(min=1)
        need = (lens + page_size) // page_size  # one token more fits
        table = torch.full((batch, int(need.max())), -1, dtype=torch.int32)
        table[torch.arange(table.shape[1]) < need[:, None]] = torch.randperm(int(need.sum()), generator=generator).int()
        k_cache, v_cache = self._pool(int(need.sum()), page_size, dtype, seed) if pool else (None, None)
        return SimpleNamespace(
            lens=lens.int().to(self.device), table=table.to(self.device), page_size=page_size, pages=int(need.sum()),
            k_cache=k_cache, v_cache=v_cache, scale=1.0,
        )  # fmt: skip

    def _tokens(self, batch, mean):
        return int(self._rows(batch, mean, 1, BF16, 0, pool=False).lens.sum())

    def _implementations(self, op, prepare, rivals):
        """``prepare(backend, inputs)`` for each of our backends that has kernels here, or eager; rivals first."""
        return (
            *(Implementation(name, rival) for name, rival in rivals.items()),
            *(
                Implementation(label, functools.partial(prepare, backend), ours=True)
                for label, backend in our_backends(op, self.device).items()
            ),
        )

    def append(self, tokens, page_size, compiled):
        """One token of each of so many rows, or a prompt; q is turned as well."""

        def make(seed):
            pages = 2 * tokens // page_size + 1
            slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(seed))[:tokens]
            caches = (self._normal(seed + i, pages, page_size, GROUPS, WIDTH) for i in (3, 4))
            positions = torch.randint(2048, (tokens,), generator=torch.Generator().manual_seed(seed))
            return SimpleNamespace(
                **{n: self._normal(seed + i, tokens, h, WIDTH) for i, (n, h) in enumerate(zip("qkv", (15, 5, 5)))},
                **dict(zip(("k_cache", "v_cache"), caches)), slots=slots.to(self.device),
                positions=positions.to(self.device), page_size=page_size,
            )  # fmt: skip

        def own(backend, s):
            def call():
                q = ops.kv_append_(
                    s.k, s.v, s.k_cache, s.v_cache, s.slots, positions=s.positions, q=s.q, backend=backend
                )
                return q, s.k_cache, s.v_cache

            return call

        def plain(function, s):
            page, offset = s.slots // page_size, s.slots % page_size

            def call():
                return function(s.q, s.k, s.v, s.k_cache, s.v_cache, page, offset, s.positions), s.k_cache, s.v_cache

            return call

        rivals = {"eager": functools.partial(plain, append_plain)}
        if compiled:
            rivals["compile"] = functools.partial(plain, self.compiled(append_plain))
        if self.flashinfer:
            rivals["FlashInfer"] = self.flashinfer.append
        # read and written: q, k, v; read: slots and positions
        moved = tokens * (2 * 2 * (HEADS + 2 * GROUPS) * WIDTH + 2 * 8)
        return Case("rope + append", f"{tokens} tokens, page {page_size}", moved, make, check_append,
                    self._implementations("kv_append_", own, rivals))  # fmt: skip

    def lookup(self, batch, mean, page_size, compiled):
        total = self._tokens(batch, mean)

        def make(seed):
            s = self._rows(batch, mean, page_size, BF16, seed)
            place = torch.arange(int(s.lens.max()), device=self.device)
            inside = place < s.lens[:, None]
            page = s.table.long()[:, place // page_size]
            s.where = page[inside], (place % page_size).expand_as(page)[inside]
            s.offsets = F.pad(s.lens.cumsum(0), (1, 0)).int()
            return s

        def own(backend, s):
            return lambda: ops.kv_lookup(s.k_cache, s.v_cache, s.table, s.offsets, total, backend=backend)

        def plain(function, s):
            return lambda: function(s.k_cache, s.v_cache, *s.where)

        rivals = {"eager": functools.partial(plain, lookup_plain)}
        if compiled:
            rivals["compile"] = functools.partial(plain, self.compiled(lookup_plain))
        moved = total * 2 * 2 * 2 * GROUPS * WIDTH  # keys and values read and written
        return Case("lookup", f"B{batch} mean {mean}, page {page_size}", moved, make, check_lookup,
                    self._implementations("kv_lookup", own, rivals))  # fmt: skip

    def decode(self, batch, mean, page_size, dtype=BF16):
        total = self._tokens(batch, mean)
        scale = 0.5 if dtype == FP8 else 1.0

        def make(seed):
            s = self._rows(batch, mean, page_size, dtype, seed)
            s.q, s.scale = self._normal(seed + 5, batch, HEADS, WIDTH), scale
            s.scales = {}
            if dtype == FP8:
                s.scales = {n: torch.full((GROUPS,), scale, device=self.device) for n in ("k_scale", "v_scale")}
            return s

        def own(backend, s):
            options = {"backend": backend}
            schedule = ops.attention_schedule(s.lens, HEADS, GROUPS, batch, k_cache=s.k_cache, **options)
            options |= {"schedule": schedule, **s.scales}
            return lambda: ops.paged_attention(s.q, s.k_cache, s.v_cache, s.table, s.lens, **options)

        def plain(s):
            return lambda: attend_plain(s.q, s.k_cache, s.v_cache, s.table, s.lens)

        rivals = {"eager": plain} if total <= PLAIN and dtype == BF16 else {}
        if self.flashinfer and dtype == BF16:
            rivals["FlashInfer"] = self.flashinfer.attend
        moved = total * 2 * GROUPS * WIDTH * dtype.itemsize + batch * HEADS * WIDTH * 2 * 2
        return Case("decode" if dtype == BF16 else "decode fp8", f"B{batch} mean {mean}, page {page_size}", moved, make,
                    check_attention, self._implementations("paged_attention", own, rivals))  # fmt: skip

    def schedule(self, batch, mean):
        def make(seed):
            return self._rows(batch, mean, 16, BF16, seed, pool=False)

        def own(backend, s):
            return lambda: ops.attention_schedule(s.lens, HEADS, GROUPS, batch, backend=backend)

        def check(inputs, outputs, ours):
            return 0.0  # what it is worth, decode attention shows

        return Case(
            "schedule",
            f"B{batch} mean {mean}",
            4 * batch,
            make,
            check,
            self._implementations("attention_schedule", own, {}),
        )

    def take(self, batch):
        """Slots and pages for a token of each row, and their count; a pass, all layers together, does each once."""
        page_size, mean = 16, 128

        def make(seed):
            s = self._rows(batch, mean, page_size, BF16, seed, pool=False)
            s.state = ops.Pages.new(batch, s.pages, s.table.shape[1], self.device)
            owned = (s.lens.long() + page_size - 1) // page_size
            s.state.lengths.copy_(s.lens)
            s.state.owned.copy_(owned)
            s.state.page_table.copy_(
                torch.where(torch.arange(s.table.shape[1], device=self.device) < owned[:, None], s.table, -1)
            )
            left = s.table[torch.arange(s.table.shape[1], device=self.device) >= owned[:, None]]
            left = left[left >= 0]
            s.state.free_pages[: len(left)] = left.flip(0)
            s.state.free_count.fill_(len(left))
            s.rows = torch.arange(batch, device=self.device)
            s.offsets = torch.arange(batch + 1, device=self.device, dtype=torch.int32)
            return s

        def prepare(backend, s):
            def call():
                taken = ops.take_pages_(s.state, s.rows, s.offsets, batch, page_size, backend=backend)
                return taken.slots, taken.k_lens

            return call

        def check(inputs, outputs, ours):
            # the pages that are left were put back in the order in which the table names them
            inputs.state = SimpleNamespace(page_table=inputs.table)
            return check_taken(inputs, outputs, ours)

        return Case(
            "take_pages_",
            f"B{batch}",
            batch * (8 + 4 + 3 * 8 + 4),
            make,
            check,
            self._implementations("take_pages_", prepare, {"eager": functools.partial(prepare, "eager")}),
        )


def make_cases(
    device: str = "cuda",
    compiled: Callable = COMPILE,
    *,
    batches=BATCHES,
    means=MEANS,
    page_sizes=PAGE_SIZES,
    prompts=PROMPTS,
) -> list[Case]:
    cases = Cases(device, compiled)
    shapes = [(batch, mean, page) for page in page_sizes for mean in means for batch in batches]
    short = [shape for shape in shapes if shape[1] < max(means)]  # copies of more show nothing new
    compiled = {min(batches), max(prompts)}, min(page_sizes)  # compiling takes longer than all the rest: for a few only
    appends = [(tokens, page) for page in page_sizes for tokens in (*batches, *prompts)]
    return [
        *[cases.append(tokens, page, tokens in compiled[0] and page == compiled[1]) for tokens, page in appends],
        *[cases.lookup(*shape, shape[0] in compiled[0] and shape[2] == compiled[1]) for shape in short],
        *[cases.decode(*shape) for shape in shapes],
        *[cases.decode(*shape, dtype=FP8) for shape in short if shape[2] == min(page_sizes)],
        *[cases.schedule(batch, means[0]) for batch in batches],
        *[cases.take(batch) for batch in batches],
    ]


if __name__ == "__main__":
    sys.exit(main("kv", __doc__, make_cases))
