"""Run as a script under compute-sanitizer: every CUDA operator, and attention for Hopper, with awkward shapes.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # so that each tensor is an allocation, with bounds of its own
    compute-sanitizer --tool memcheck python tests/sanitize.py  # then racecheck, and initcheck
    compute-sanitizer --tool racecheck python tests/sanitize.py attention  # a part of it: the slowest

Nothing is compared here, which the other tests do; an operator that isn't called fails the script.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mor_kernels import ops
from mor_kernels.ops import _dispatch

BACKEND = "cuda"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ROWS = [
    (2, 33, 960, 20, BF16),
    (3, 70, 10, 70, FP32),
    (1, 17, 33, 5, FP16),
    (2, 5, 1024, 0, BF16),
    (2, 40, 4100, 9, FP32),
]
LONG = [(1, 20000, 8, 7000, FP16), (2, 5000, 8, 1700, BF16)]
CACHES = [
    (16, 5, 15, 64, BF16), (64, 2, 14, 96, FP16), (1, 3, 3, 33, FP32), (7, 8, 16, 128, BF16), (16, 1, 8, 256, BF16),
    (16, 5, 15, 64, FP8), (3, 2, 6, 10, FP8),
]  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def backward(*outputs: torch.Tensor) -> None:
    outputs = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def strided(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == FP8:
        return strided(x.view(torch.uint8)).view(FP8)
    return torch.stack((x, x), dim=-1)[..., 0]


def streams() -> None:
    for batch, length, width, k, dtype in (*ROWS, *LONG):
        weight = normal(width).requires_grad_()
        for x in (normal(batch, length, width, dtype=dtype), strided(normal(batch, length, width, dtype=dtype))):
            x = x.requires_grad_()
            lens = torch.randint(0, length + 1, (batch,), device="cuda")
            routed = ops.route(x, weight, k, seqlens=lens, backend=BACKEND)
            backward(*routed)
            among, fewer = routed.indices, k // 2
            nested = ops.route(x, weight.to(dtype), fewer, candidates=among, rank="score", backend=BACKEND)
            backward(*nested)
            again = ops.route(x, weight, fewer, candidates=among, indices=nested.indices, backend=BACKEND)
            backward(*again)
            ready = normal(batch, length).requires_grad_()
            backward(*ops.route(x, None, k, logits=ready, activation="tanh", backend=BACKEND))
            update = normal(batch, k, width).requires_grad_()
            for residual in ("block", "delta", "none"):
                for gates in (None, routed.gates.detach().requires_grad_()):
                    backward(ops.scatter_back(x, update, routed.indices, gates, residual=residual, backend=BACKEND))
                    with torch.no_grad():
                        ops.scatter_back_(x.clone(), update, routed.indices, gates, residual=residual, backend=BACKEND)
            backward(ops.gather(x.flatten(0, 1), routed.indices.flatten(), backend=BACKEND))
    for width, dtype in ((960, BF16), (33, FP32), (4104, FP16)):
        recursions = torch.tensor([0, 2, -1, 1, 0], device="cuda")
        state = normal(5, width, dtype=dtype)
        for options in ({}, {"aux_weight": normal(3, width, dtype=dtype), "last": recursions + 1}):
            with torch.no_grad():
                ops.depth_step_(
                    state, normal(5, width, dtype=dtype), normal(5), recursions, normal(3, width, dtype=dtype),
                    backend=BACKEND, **options,
                )  # fmt: skip


def sampling() -> None:
    """Keys that are counted or not, in shared memory or not, in rows that begin anywhere."""
    for vocabulary, dtype in ((1, FP32), (1001, BF16), (49152, BF16), (49152, FP32), (70001, FP16), (70001, FP32)):
        numbers = (torch.rand(5, device="cuda") for _ in range(3))
        temperature, top_p, min_p = (t.masked_fill(t < 0.2, 0) for t in numbers)
        whole = torch.tensor([0, 1, 50, 2, 7], device="cuda")
        for logits in (normal(5, vocabulary, dtype=dtype), strided(normal(5, vocabulary, dtype=dtype))):
            ops.sample(logits, temperature, whole, 1 - top_p, min_p, whole, whole - 1, backend=BACKEND)


def linears() -> None:
    """Rows of every tile, weights of parts and of single blocks, and what isn't a multiple of either."""
    for n, width, columns in ((1, 8, 1), (17, 960, 1600), (40, 200, 67), (100, 2560, 960), (130, 1288, 36)):
        x, weight, gain = (normal(*shape, dtype=BF16) for shape in ((n, width), (2 * columns, width), (width,)))
        residual = normal(n, columns, dtype=BF16)
        for norm_weight, prefetch in ((None, True), (gain, False), (gain, True)):
            for gated in (False, True):
                options = {"norm_weight": norm_weight, "prefetch": prefetch, "gated": gated, "backend": BACKEND}
                ops.decode_linear(x, weight[: (2 if gated else 1) * columns], residual=residual, **options)
        ops.decode_linear(x.half(), weight.half(), backend=BACKEND)
        after, options = weight[:columns, :1].flatten().contiguous(), {"prefetch": True, "backend": BACKEND}
        _, scaled, squares = ops.decode_linear(x, weight[:columns], next_norm_weight=after, **options)
        if columns % 8 == 0:
            ops.decode_linear(scaled, normal(70, columns, dtype=BF16), squares=squares, **options)
        for head in (64, 128):
            cache = normal(3, 50, 2, head, dtype=BF16)
            slots = torch.arange(n, device="cuda") - 1
            ops.decode_qkv_(
                x, normal(7 * head, width, dtype=BF16), cache, cache.clone(), slots, heads=3, positions=slots,
                norm_weight=gain, backend=BACKEND,
            )  # fmt: skip
            ops.decode_qkv_(
                x, normal(7 * head, width, dtype=BF16), cache, cache.clone(), slots, heads=3, positions=slots,
                squares=torch.ones(n, 11, device="cuda"), backend=BACKEND,
            )  # fmt: skip


def pages_of(lens: list[int], page_size: int) -> tuple[torch.Tensor, int]:
    """A page table of rows of these lengths, whose pages lie anywhere, and how many pages there are."""
    need = [-(-length // page_size) for length in lens]
    pages = torch.randperm(sum(need) + 3).int()
    table = torch.full((len(lens), max(need) + 1), -1, dtype=torch.int32)
    for row, (first, count) in enumerate(zip(torch.tensor([0, *need]).cumsum(0).tolist(), need)):
        table[row, :count] = pages[first : first + count]
    return table.cuda(), len(pages)


def attention() -> None:
    """One query a lane; a few, at positions of their own, with lanes of padding; prompts, in more than one tile; and
    more lanes than there are blocks at once."""
    for page_size, groups, heads, width, dtype in CACHES:
        print(f"  heads {heads} on {groups}, width {width}, {dtype}", flush=True)
        lens = [0, 1, page_size, page_size + 1, 200, 5, 600, 63]
        attend(*new_caches(lens, page_size, groups, width, dtype), lens, heads, BF16 if dtype == FP8 else dtype)


def attend(k_cache, v_cache, table, scales: dict, lens: list[int], heads: int, dtype: torch.dtype) -> None:
    groups, width = k_cache.shape[2:]
    k_lens = torch.tensor(lens).int().cuda()

    def call(queries, k_lens, **options):
        own = {name: options[name] for name in ("rows", "cu_seqlens_q") if name in options}
        schedule = ops.attention_schedule(k_lens, heads, groups, queries, k_cache=k_cache, backend=BACKEND, **own)
        q = normal(queries, heads, width, dtype=dtype)
        options |= {"schedule": schedule, "backend": BACKEND, **scales}
        ops.paged_attention(q, k_cache, v_cache, table, k_lens, **options)
        ops.paged_attention(strided(q), k_cache, strided(v_cache), table, k_lens, **options)

    call(len(lens), k_lens)
    rows = torch.tensor([6, -1, 4, 0]).cuda()
    starts = torch.tensor([0, 3, 4, 9, 9]).int().cuda()
    positions = torch.tensor([-1, 599, 400, 4, 0, 1, 150, 199, 100, 5, 5]).cuda()
    call(11, k_lens[rows], rows=rows, cu_seqlens_q=starts, q_positions=positions)
    starts = torch.tensor([0, 0, 1, 1, 2, 42, 47, 117, 137]).int().cuda()
    call(150, k_lens, cu_seqlens_q=starts)
    rows = torch.tensor([1, 0, 5, 7], device="cuda").repeat(75)
    call(len(rows), k_lens[rows], rows=rows)


def new_caches(lens, page_size, groups, width, dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """Caches of rows of these lengths, their page table, and scales."""
    table, pages = pages_of(lens, page_size)
    k_cache, v_cache = (normal(pages, page_size, groups, width, dtype=dtype) for _ in "kv")
    scales = {}
    if dtype == FP8:
        scales = {name: torch.rand(groups, device="cuda") + 0.5 for name in ("k_scale", "v_scale")}
    return k_cache, v_cache, table, scales


def caches() -> None:
    for page_size, groups, heads, width, dtype in CACHES:
        lens = [0, 1, page_size, page_size + 1, 700, 5, 1300, 63]
        k_cache, v_cache, table, scales = new_caches(lens, page_size, groups, width, dtype)
        pages = k_cache.shape[0]
        active = BF16 if dtype == FP8 else dtype
        for tokens in (0, 1, 13, 300):
            slots = torch.randperm(pages * page_size)[:tokens].cuda()
            slots[::5] = -1
            k, v, q = (normal(len(slots), h, width, dtype=active) for h in (groups, groups, heads))
            ops.kv_append_(k, v, k_cache, v_cache, slots, backend=BACKEND, **scales)
            if width % 2 == 0:
                positions = torch.arange(len(slots), device="cuda") * 7
                ops.kv_append_(
                    k, v, k_cache, v_cache, slots, positions=positions, q=strided(q), backend=BACKEND, **scales
                )
        starts = torch.tensor([0, *lens]).cumsum(0).int().cuda()
        for total in (sum(lens), sum(lens) + 70):
            ops.kv_lookup(k_cache, v_cache, table, starts, total, backend=BACKEND)
        if dtype == FP8:
            continue
        k, v = (normal(40, groups, width, dtype=dtype).requires_grad_() for _ in "kv")
        slots = torch.arange(40, device="cuda") % (pages * page_size)
        slots[3] = -1
        turned = {"positions": torch.arange(40, device="cuda")} if width % 2 == 0 else {}
        new = ops.kv_append(k, v, k_cache.requires_grad_(), v_cache.requires_grad_(), slots, backend=BACKEND, **turned)
        backward(*ops.kv_lookup(*new, table, starts, sum(lens), backend=BACKEND))
        if turned:
            positions = torch.randint(0, 2**20, (40,), device="cuda")
            backward(*ops.rope((k[:, :1], v), positions, backend=BACKEND))
            backward(ops.rope(strided(k), positions.to(torch.int16), backend=BACKEND))


def hopper() -> None:
    """More items than programs too; keys and values that nobody sees are NaN."""
    if reason := _dispatch.unavailable("hopper", "attention", "cuda"):
        print(f"left out: {reason}")
        return
    for width, heads, groups, dtype in ((64, 15, 5, BF16), (64, 7, 1, FP16), (128, 6, 2, BF16), (128, 3, 3, FP16)):
        for batch, queries, keys in ((1, 1, 1), (2, 33, 200), (3, 130, 65), (24, 300, 300)):
            q, k, v = (normal(batch, n, h, width, dtype=dtype) for n, h in ((queries, heads), *[(keys, groups)] * 2))
            k[:, keys - keys // 3 :], v[:, keys - keys // 3 :] = torch.nan, torch.nan
            q, k, v = (t.requires_grad_() for t in (q, k, v))
            positions = torch.randint(0, keys - keys // 3, (batch, queries), device="cuda").sort(1).values
            q_lens = torch.randint(0, queries + 1, (batch,), device="cuda")
            backward(ops.attention(q, k, v, q_positions=positions, backend="hopper"))
            lens = {"q_lens": q_lens, "k_lens": torch.full_like(q_lens, keys - keys // 3)}
            backward(*ops.attention(q, k, v, **lens, return_lse=True, backend="hopper"))
            ends = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in lens.values()]
            packed = [t.detach().flatten(0, 1).nan_to_num().requires_grad_() for t in (q, k, v)]
            backward(ops.attention_varlen(*packed, *ends, queries, keys, backend="hopper"))


def recorded(name: str, function: Callable, called: set[str]) -> Callable:
    @functools.wraps(function)
    def run(*arguments):
        called.add(name)
        return function(*arguments)

    return run


def filled_inverse_of(indices: torch.Tensor, length: int) -> torch.Tensor:
    """As _cuda.inverse_of, but filled: place() by design reads what no index named, and then checks it, and initcheck
    would report nothing else."""
    batch, k = indices.shape
    inverse = torch.full((batch, length), -1, dtype=torch.int32, device=indices.device)
    importlib.import_module("mor_kernels.ops._cuda").launch(
        _dispatch.load_extension().invert, indices, inverse, batch, k, length
    )
    return inverse


def main() -> None:
    if reason := _dispatch.unavailable(BACKEND):
        sys.exit(reason)
    torch.manual_seed(0)
    for op in ("gather", "kv", "route", "scatter_back"):
        importlib.import_module(f"mor_kernels.ops.{op}.cuda").inverse_of = filled_inverse_of
    tables = {name: table for name, table in _dispatch._implementations.items() if BACKEND in table}
    called: set[str] = set()
    for name, table in tables.items():
        table[BACKEND] = recorded(name, table[BACKEND], called)
    parts = {
        "streams": streams, "linears": linears, "caches": caches, "sampling": sampling, "attention": attention,
        "hopper": hopper,
    }  # fmt: skip
    for name in sys.argv[1:] or parts:
        print(name, flush=True)
        parts[name]()
        torch.cuda.synchronize()
    if missed := not sys.argv[1:] and tables.keys() - called:
        sys.exit(f"not called: {', '.join(sorted(missed))}")
    print(f"{len(called)} operators called")


if __name__ == "__main__":
    main()
