"""Run as a script under compute-sanitizer: every operator that a backend has kernels for, with awkward shapes.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # so that each tensor is an allocation, with bounds of its own
    python tests/sanitize.py --backend triton  # compiles what it needs, and keeps it
    compute-sanitizer --tool memcheck python tests/sanitize.py --backend triton  # or cuda, the default; or hopper
    compute-sanitizer --tool racecheck python tests/sanitize.py paged  # a part of it

memcheck and synccheck (barriers) are for all. racecheck (hazards in shared memory) doesn't follow mbarriers: it reports
what they hand over in the kernels for Hopper, and in cuBLAS's of parts linears and layers. initcheck doesn't see what
TMA writes: it reports who reads what cuBLAS computed in these parts. A part takes seconds, and a minute by racecheck.

Nothing is compared here, which the other tests do; an operator, or a Triton kernel, that isn't called fails the script.
Without a GPU, TRITON_INTERPRET=1 has Triton's kernels interpreted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mor_kernels import ops
from mor_kernels.ops import _dispatch
from mor_kernels.ops._indices import flat_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "cuda"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ROWS = [
    (2, 33, 960, 20, BF16),
    (3, 70, 10, 70, FP32),
    (1, 17, 33, 5, FP16),
    (2, 5, 1024, 0, BF16),
    (2, 40, 4100, 9, FP32),
]
LONG = [(1, 20000, 8, 7000, FP16), (2, 5000, 8, 1700, BF16)]  # Triton's has many chunks from 2,049 on
DEPTHS = [(2, 33, 3, FP32), (3, 700, 4, BF16), (1, 1, 1, FP16), (70, 40, 5, FP32)]
LANES = [5, 70, 1030]
LINEARS = [(1, 8, 1), (17, 960, 1600), (40, 200, 67), (100, 2560, 960), (130, 1288, 36)]
LAYERS = [(5, 960, BF16), (70, 33, FP32), (9, 4104, FP16), (1, 8200, BF16)]
LOGITS = [(1, FP32), (1001, BF16), (49152, BF16), (49152, FP32), (70001, FP16), (70001, FP32)]
DENSE = [(64, 15, 5, BF16), (96, 6, 2, FP16), (256, 3, 1, BF16), (32, 2, 2, FP16), (10, 5, 1, FP32)]
DENSE += [(64, 2, 2, FP32), (128, 4, 2, FP32)]
HOPPER = [(64, 15, 5, BF16), (64, 7, 1, FP16), (128, 6, 2, BF16), (128, 3, 3, FP16)]
CACHES = [
    (16, 5, 15, 64, BF16), (64, 2, 14, 96, FP16), (1, 3, 3, 33, FP32), (7, 8, 16, 128, BF16), (16, 1, 8, 256, BF16),
    (16, 5, 15, 64, FP8), (3, 2, 6, 10, FP8),
]  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def whole(low: int, high: int, *shape: int) -> torch.Tensor:
    """From low to high - 1."""
    return torch.randint(low, high, shape, device=DEVICE)


def backward(*outputs: torch.Tensor) -> None:
    outputs = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def strided(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == FP8:
        return strided(x.view(torch.uint8)).view(FP8)
    return torch.stack((x, x), dim=-1)[..., 0]


def streams() -> None:
    for batch, length, width, k, dtype in (*ROWS, *(LONG if BACKEND == "cuda" else LONG[1:])):
        weight = normal(width).requires_grad_()
        for x in (normal(batch, length, width, dtype=dtype), strided(normal(batch, length, width, dtype=dtype))):
            x = x.requires_grad_()
            lens = whole(0, length + 1, batch)
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
            backward(ops.gather(x.flatten(0, 1), flat_rows(routed.indices, length), backend=BACKEND))
    for width, dtype in ((960, BF16), (33, FP32), (4104, FP16)):
        recursions = torch.tensor([0, 2, -1, 1, 0], device=DEVICE)
        state = normal(5, width, dtype=dtype)
        for options in ({}, {"aux_weight": normal(3, width, dtype=dtype), "last": recursions + 1}):
            with torch.no_grad():
                ops.depth_step_(
                    state, normal(5, width, dtype=dtype), normal(5), recursions, normal(3, width, dtype=dtype),
                    backend=BACKEND, **options,
                )  # fmt: skip


def sampling() -> None:
    """Keys that are counted or not, in shared memory or not, in rows that begin anywhere."""
    for vocabulary, dtype in LOGITS:
        numbers = (torch.rand(5, device=DEVICE) for _ in range(3))
        temperature, top_p, min_p = (t.masked_fill(t < 0.2, 0) for t in numbers)
        whole = torch.tensor([0, 1, 50, 2, 7], device=DEVICE)
        for logits in (normal(5, vocabulary, dtype=dtype), strided(normal(5, vocabulary, dtype=dtype))):
            ops.sample(logits, temperature, whole, 1 - top_p, min_p, whole, whole - 1, backend=BACKEND)


def linears() -> None:
    """Rows of every tile, weights of parts and of single blocks, and what isn't a multiple of either."""
    for n, width, columns in LINEARS:
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
            slots = torch.arange(n, device=DEVICE) - 1
            ops.decode_qkv_(
                x, normal(7 * head, width, dtype=BF16), cache, cache.clone(), slots, heads=3, positions=slots,
                norm_weight=gain, backend=BACKEND,
            )  # fmt: skip
            ops.decode_qkv_(
                x, normal(7 * head, width, dtype=BF16), cache, cache.clone(), slots, heads=3, positions=slots,
                squares=torch.ones(n, 11, device=DEVICE), backend=BACKEND,
            )  # fmt: skip


def pages_of(lens: list[int], page_size: int) -> tuple[torch.Tensor, int]:
    """A page table of rows of these lengths, whose pages lie anywhere, and how many pages there are."""
    need = [-(-length // page_size) for length in lens]
    pages = torch.randperm(sum(need) + 3).int()
    table = torch.full((len(lens), max(need) + 1), -1, dtype=torch.int32)
    for row, (first, count) in enumerate(zip(torch.tensor([0, *need]).cumsum(0).tolist(), need)):
        table[row, :count] = pages[first : first + count]
    return table.to(DEVICE), len(pages)


def paged() -> None:
    """One query a lane; a few, at positions of their own, with lanes of padding; prompts, in more than one tile; and
    more lanes than there are blocks at once."""
    for page_size, groups, heads, width, dtype in CACHES:
        print(f"  heads {heads} on {groups}, width {width}, {dtype}", flush=True)
        lens = [0, 1, page_size, page_size + 1, 200, 5, 600, 63]
        attend(*new_caches(lens, page_size, groups, width, dtype), lens, heads, BF16 if dtype == FP8 else dtype)


def attend(k_cache, v_cache, table, scales: dict, lens: list[int], heads: int, dtype: torch.dtype) -> None:
    groups, width = k_cache.shape[2:]
    k_lens = torch.tensor(lens).int().to(DEVICE)

    def call(queries, k_lens, **options):
        own = {name: options[name] for name in ("rows", "cu_seqlens_q") if name in options}
        schedule = ops.attention_schedule(k_lens, heads, groups, queries, k_cache=k_cache, backend=BACKEND, **own)
        q = normal(queries, heads, width, dtype=dtype)
        options |= {"schedule": schedule, "backend": BACKEND, **scales}
        ops.paged_attention(q, k_cache, v_cache, table, k_lens, **options)
        ops.paged_attention(strided(q), k_cache, strided(v_cache), table, k_lens, **options)

    call(len(lens), k_lens)
    rows = torch.tensor([6, -1, 4, 0]).to(DEVICE)
    starts = torch.tensor([0, 3, 4, 9, 9]).int().to(DEVICE)
    positions = torch.tensor([-1, 599, 400, 4, 0, 1, 150, 199, 100, 5, 5]).to(DEVICE)
    call(11, k_lens[rows], rows=rows, cu_seqlens_q=starts, q_positions=positions)
    starts = torch.tensor([0, 0, 1, 1, 2, 42, 47, 117, 137]).int().to(DEVICE)
    call(150, k_lens, cu_seqlens_q=starts)
    rows = torch.tensor([1, 0, 5, 7], device=DEVICE).repeat(75)
    call(len(rows), k_lens[rows], rows=rows)


def new_caches(lens, page_size, groups, width, dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """Caches of rows of these lengths, their page table, and scales."""
    table, pages = pages_of(lens, page_size)
    k_cache, v_cache = (normal(pages, page_size, groups, width, dtype=dtype) for _ in "kv")
    scales = {}
    if dtype == FP8:
        scales = {name: torch.rand(groups, device=DEVICE) + 0.5 for name in ("k_scale", "v_scale")}
    return k_cache, v_cache, table, scales


def caches() -> None:
    for page_size, groups, heads, width, dtype in CACHES:
        lens = [0, 1, page_size, page_size + 1, 700, 5, 1300, 63]
        k_cache, v_cache, table, scales = new_caches(lens, page_size, groups, width, dtype)
        pages = k_cache.shape[0]
        active = BF16 if dtype == FP8 else dtype
        for tokens in (0, 1, 13, 300):
            slots = torch.randperm(pages * page_size)[:tokens].to(DEVICE)
            slots[::5] = -1
            k, v, q = (normal(len(slots), h, width, dtype=active) for h in (groups, groups, heads))
            ops.kv_append_(k, v, k_cache, v_cache, slots, backend=BACKEND, **scales)
            if width % 2 == 0:
                positions = torch.arange(len(slots), device=DEVICE) * 7
                ops.kv_append_(
                    k, v, k_cache, v_cache, slots, positions=positions, q=strided(q), backend=BACKEND, **scales
                )
        starts = torch.tensor([0, *lens]).cumsum(0).int().to(DEVICE)
        for total in (sum(lens), sum(lens) + 70):
            ops.kv_lookup(k_cache, v_cache, table, starts, total, backend=BACKEND)
        if dtype == FP8:
            continue
        k, v = (normal(40, groups, width, dtype=dtype).requires_grad_() for _ in "kv")
        slots = torch.arange(40, device=DEVICE) % (pages * page_size)
        slots[3] = -1
        turned = {"positions": torch.arange(40, device=DEVICE)} if width % 2 == 0 else {}
        new = ops.kv_append(k, v, k_cache.requires_grad_(), v_cache.requires_grad_(), slots, backend=BACKEND, **turned)
        backward(*ops.kv_lookup(*new, table, starts, sum(lens), backend=BACKEND))
        if turned:
            positions = whole(0, 2**20, 40)
            backward(*ops.rope((k[:, :1], v), positions, backend=BACKEND))
            backward(ops.rope(strided(k), positions.to(torch.int16), backend=BACKEND))


def layers() -> None:
    for n, width, dtype in LAYERS:
        x, add = (normal(n, width, dtype=dtype).requires_grad_() for _ in range(2))
        gain, weight = (normal(*shape, dtype=dtype).requires_grad_() for shape in ((width,), (40, width)))
        for added in (None, add):
            backward(*ops.rms_norm(strided(x), gain, add=added, backend=BACKEND))
            backward(*ops.rms_norm_linear(x, gain, weight, add=added, backend=BACKEND))
        backward(ops.swiglu_linear(normal(n, 2 * width, dtype=dtype).requires_grad_(), weight, backend=BACKEND))
        targets = whole(0, 40, n).masked_fill(whole(0, 2, n) == 0, -100)
        backward(ops.linear_cross_entropy(x, weight, targets, backend=BACKEND))
        wide = normal(8200 + n, width, dtype=dtype)
        ops.linear_cross_entropy(x.detach(), wide, targets, backend=BACKEND)
        positions, qkv = whole(0, 2**20, n), normal(n, 7, 66, dtype=dtype).requires_grad_()
        backward(*ops.rope_qkv(qkv, 3, positions, backend=BACKEND))
        backward(*ops.rope_qkv(strided(qkv), 5, positions, backend=BACKEND))


def choices() -> None:
    for batch, length, experts, dtype in DEPTHS:
        logits = normal(batch, length, experts, dtype=dtype).requires_grad_()
        valid, bias = whole(0, 2, batch, length) > 0, normal(experts)
        for activation in ("softmax", "sigmoid"):
            options = {"activation": activation, "backend": BACKEND}
            backward(ops.choose_depths(logits, bias=bias, **options).probs)
            depths, probs = ops.choose_depths(logits.detach(), valid=valid, **options)
        for taken in (depths, depths.int()):
            ops.pack_depths(taken, experts, backend=BACKEND)
        for scope in ("sequence", "batch"):
            backward(ops.balance_loss(probs.requires_grad_(), depths, scope=scope, backend=BACKEND))
        for counted in (None, valid):
            backward(ops.z_loss(logits, valid=counted, backend=BACKEND))
        kept = torch.arange(0, length, 2, device=DEVICE).expand(batch, -1)
        backward(ops.aux_loss(logits[..., 0], kept, backend=BACKEND))
        among, lens = torch.nn.functional.pad(kept, (0, 3), value=-1), whole(0, length + 1, batch)
        scores = normal(*among.shape, dtype=dtype).requires_grad_()
        some = kept[:, ::3].masked_fill(kept[:, ::3] >= lens[:, None], -1)
        backward(ops.aux_loss(scores, some, candidates=among, seqlens=lens, backend=BACKEND))


def ticks() -> None:
    """Lanes that fit a program at once and more, rows that outgrow their pages, and pages that are lacking."""
    for lanes in LANES:
        pages = ops.Pages.new(lanes + 1, 5 * lanes, 40, DEVICE)
        rows = torch.arange(lanes, device=DEVICE).masked_fill(whole(0, 4, lanes) == 0, -1)
        for most in (3, 40, 70, 700):
            lens = whole(0, most, lanes)
            starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
            taken = ops.take_pages_(pages, rows, starts, int(starts[-1]) + 3, 16, backend=BACKEND)
            ops.commit_pages_(pages, taken.rows, starts, backend=BACKEND)
        ops.free_pages_(pages, rows, backend=BACKEND)
        for shared, size in ((False, lanes), (True, lanes // 2)):
            slots, record = ops.Lanes.new(lanes, 2, DEVICE), torch.zeros(3, lanes, 3, dtype=torch.int64, device=DEVICE)
            slots.row("feed")[::2], slots.row("end")[:] = 7, 12
            block = ops.Pages.new(lanes * (1 if shared else 3), 6 * lanes, 2, DEVICE)
            ends = None if shared else ops.Pages.new(lanes, 2 * lanes, 3, DEVICE)
            x, logits, router = normal(lanes, 70, dtype=BF16), normal(lanes), normal(70, dtype=BF16)
            for _ in range(6):
                recursion = slots.row("recursion")
                on = (recursion >= 0) & (recursion < 2) & (normal(lanes) > 0)
                at = ops.leave(on, slots, x, size, backend=BACKEND).at
                entering = ops.advance_(
                    whole(-1, 50, size), on, at, slots, record, block, ends, 3, 4, shared=shared, backend=BACKEND
                )
                new, routed = normal(size, 70, dtype=BF16), () if shared else (logits, router)
                ops.enter_(x, new, entering.lanes, *routed, backend=BACKEND)


def dense() -> None:
    """Keys and values that nobody sees are NaN. For Hopper, more items than programs too; for others, fresh keys."""
    hopper = BACKEND == "hopper"
    shapes = [(1, 1, 1), (2, 33, 200), (3, 130, 65), *([(24, 300, 300)] if hopper else [])]
    for width, q_heads, groups, dtype in HOPPER if hopper else DENSE:
        print(f"  heads {q_heads} on {groups}, width {width}, {dtype}", flush=True)
        for batch, queries, keys in shapes:
            attend_densely(batch, queries, keys, q_heads, groups, width, dtype)
    if BACKEND == "triton":  # the lists that FlashAttention-4 reads
        from mor_kernels.ops.attention._triton import block_lists

        for by_keys in (False, True):
            block_lists(whole(-1, 4500, 3, 4300), 4500, by_keys)


def attend_densely(
    batch: int, queries: int, keys: int, heads: int, groups: int, width: int, dtype: torch.dtype
) -> None:
    seen = keys - keys // 3
    q, k, v = (normal(batch, n, h, width, dtype=dtype) for n, h in ((queries, heads), *[(keys, groups)] * 2))
    k[:, seen:], v[:, seen:] = torch.nan, torch.nan
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    positions = whole(0, seen, batch, queries).sort(1).values
    lens = {"q_lens": whole(0, queries + 1, batch), "k_lens": whole(seen, seen + 1, batch)}
    ends = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in lens.values()]
    packed = [t.detach().flatten(0, 1).nan_to_num().requires_grad_() for t in (q, k, v)]
    options = {"backend": BACKEND}
    backward(ops.attention(q, k, v, q_positions=positions, **options))
    backward(*ops.attention(q, k, v, **lens, return_lse=True, **options))
    backward(ops.attention_varlen(*packed, *ends, queries, keys, **options))
    if BACKEND != "hopper" and queries <= keys:
        fresh = [normal(batch, queries, groups, width, dtype=dtype).requires_grad_() for _ in "kv"]
        options["q_positions"] = torch.rand(batch, keys, device=DEVICE).argsort(1)[:, :queries]
        k, v = (t.detach().nan_to_num().requires_grad_() for t in (k, v))
        backward(ops.attention(q, k, v, **dict(zip(("k_fresh", "v_fresh"), fresh)), **options))
        fresh = [t.detach().flatten(0, 1).requires_grad_() for t in fresh]
        options |= {"k_fresh": fresh[0], "v_fresh": fresh[1], "q_positions": options["q_positions"].flatten()}
        backward(ops.attention_varlen(*packed, *ends, queries, keys, **options))


def recorded(name: str, function: Callable, called: set[str]) -> Callable:
    @functools.wraps(function)
    def run(*arguments):
        called.add(name)
        return function(*arguments)

    return run


def filled(inverse_of: Callable) -> Callable:
    """place() by design reads what no index named, and then checks it, and initcheck would report nothing else."""

    @functools.wraps(inverse_of)
    def run(*arguments):
        with mock.patch.object(torch, "empty", lambda *shape, **options: torch.full(shape, -1, **options)):
            return inverse_of(*arguments)

    return run


@contextlib.contextmanager
def launches() -> Iterator[set]:
    """Triton's kernels that are launched."""
    from triton.runtime.jit import JITFunction

    launched, launch = set(), JITFunction.run

    def run(kernel, *arguments, **options):
        launched.add(kernel)
        return launch(kernel, *arguments, **options)

    with mock.patch.object(JITFunction, "run", run):
        yield launched


PARTS = {
    "cuda": (streams, linears, caches, sampling, paged),
    "triton": (streams, linears, caches, paged, layers, choices, ticks, dense),
    "hopper": (dense,),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cuda", choices=PARTS)
    parser.add_argument("parts", nargs="*", help="default: all that the backend has")
    chosen = parser.parse_args(arguments)
    global BACKEND
    BACKEND = chosen.backend
    if reason := _dispatch.unavailable(BACKEND, device=DEVICE):
        sys.exit(reason)
    torch.manual_seed(0)
    parts = {part.__name__: part for part in PARTS[BACKEND]}
    if unknown := [name for name in chosen.parts if name not in parts]:
        parser.error(f"parts: expected some of {', '.join(parts)}, got {', '.join(unknown)}")
    tables = {
        name: table
        for name, table in _dispatch._implementations.items()
        if table.get(BACKEND) not in (None, table.get("eager"))  # or it has no kernel
    }
    called: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name, table in tables.items():
            stack.enter_context(mock.patch.dict(table, {BACKEND: recorded(name, table[BACKEND], called)}))
        if BACKEND != "hopper":
            for op in ("gather", "kv", "route", "scatter_back"):
                module = importlib.import_module(f"mor_kernels.ops.{op}.{BACKEND}")
                stack.enter_context(mock.patch.object(module, "inverse_of", filled(module.inverse_of)))
        launched = stack.enter_context(launches()) if BACKEND == "triton" else set()
        for name in chosen.parts or parts:
            print(name, flush=True)
            parts[name]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    missed = tables.keys() - called
    if launched:  # and not interpreted
        from tests.aot import forgotten, kernel_modules

        missed |= set(forgotten(kernel_modules(["triton", "_triton"]), launched))
    if missed and not chosen.parts:
        sys.exit(f"not called: {', '.join(sorted(missed))}")
    print(f"{len(called)} operators called")


if __name__ == "__main__":
    main()
