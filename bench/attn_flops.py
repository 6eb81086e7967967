"""Attention, forward and backward, in TFLOP/s: ours against FlexAttention, SDPA, FlashAttention-2 and -4.

    python bench/attn_flops.py [--quick] [--only "subset forward"] [--out DIR] [--commit HASH] [CASE ...]

A case is causal (all queries), subset (k queries at random ascending positions, all keys) or ragged (packed sequences
of 0.5 to 1.5 times N tokens), in bf16. Operations are counted on the pairs that the mask keeps: 4 * d * H a pair
forward and 2.5 times that backward. Each rival gets its own layout, made before the time starts; so is what it must
know of the positions, but for "+ mask" and "+ lists".
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench.harness import (
    COMPILE,
    ROUNDOFF,
    Case,
    Implementation,
    close,
    command_line_of_cases,
    on_gpu,
    require,
    verify,
)
from mor_kernels import ops

DEFAULT = (
    "causal:B32,H15/5,d64,N2048", "subset:B32,H15/5,d64,N2048,k1365", "subset:B32,H15/5,d64,N2048,k682",
    "causal:B32,H15/5,d64,N1365", "causal:B32,H15/5,d64,N682", "ragged:B32,H15/5,d64,N1365",
    "subset:B8,H32/32,d64,N2048,k1024",
    "causal:B4,H15/5,d64,N16384", "subset:B4,H15/5,d64,N16384,k5461", "ragged:B4,H15/5,d64,N5461",
    "causal:B4,H16/8,d128,N8192", "subset:B4,H16/8,d128,N8192,k4096",
)  # fmt: skip
WITHOUT_GPU = "subset:B2,H6/2,d16,N40,k13"
SYNTAX = (
    "causal:B32,H15/5,d64,N2048 (32 sequences of 2048 queries, 15 query heads on 5 key/value heads of width 64), "
    "subset:B32,H15/5,d64,N2048,k1365 (1365 queries at random positions, 2048 keys) or ragged:B32,H15/5,d64,N1365 "
    "(lengths of 0.5 to 1.5 times 1365, packed), with numbers of yours"
)
BACKWARD = 2.5  # times the operations of the forward: five matrix products for its two
BF16, FP32, INT64 = 2, 4, 8  # bytes
BLOCK = 128  # queries and keys of a block in the lists of rivals
SPREAD = 4  # see exact()
RIVAL = 3  # how many times our budget a rival gets: some round more often, such as each query head's share of d_k
SCORES_AT_ONCE = 2**24  # in float64, and about eight tensors of them


@dataclass(frozen=True)
class Shape:
    kind: str
    batch: int
    heads: int
    groups: int  # key/value heads
    width: int
    length: int
    kept: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
        found = re.fullmatch(r"(causal|subset|ragged):B(\d+),H(\d+)/(\d+),d(\d+),N(\d+)(?:,k(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not {SYNTAX}")
        kind, *numbers = found.groups()
        shape = cls(kind, *(None if number is None else int(number) for number in numbers))
        if 0 in (shape.batch, shape.heads, shape.groups, shape.width, shape.length, shape.kept):
            raise argparse.ArgumentTypeError(f"{text!r} has a zero")
        if shape.heads % shape.groups:
            raise argparse.ArgumentTypeError(f"{text!r}: key heads must divide query heads")
        if (shape.kind == "subset") != (shape.kept is not None) or (shape.kept or 0) > shape.length:
            raise argparse.ArgumentTypeError(f"{text!r}: a subset, and nothing else, has k, which is at most N")
        return shape

    @property
    def name(self) -> str:
        kept = "" if self.kept is None else f" k{self.kept}"
        return f"B{self.batch} H{self.heads}/{self.groups} d{self.width} N{self.length}{kept}"

    # Positions and lengths are the same in all input sets, so that each has as many operations.

    def positions(self) -> torch.Tensor | None:
        """(B, k) of the queries; None if they are their indices."""
        if self.kind != "subset":
            return None
        order = torch.rand(self.batch, self.length, generator=torch.Generator().manual_seed(0)).argsort(1)
        return order[:, : self.kept].sort(1).values

    def lengths(self) -> torch.Tensor:
        """(B,) of the sequences."""
        if self.kind != "ragged":
            return torch.full((self.batch,), self.length)
        generator = torch.Generator().manual_seed(0)
        return torch.randint((self.length + 1) // 2, self.length * 3 // 2 + 1, (self.batch,), generator=generator)

    def pairs(self) -> int:
        """(query, key) pairs that the mask keeps, all sequences together."""
        if self.kind == "subset":
            return int((self.positions() + 1).sum())
        lengths = self.lengths()
        return int((lengths * (lengths + 1) // 2).sum())

    def flops(self, direction: str) -> int:
        forward = 4 * self.width * self.heads * self.pairs()
        return forward if direction == "forward" else int(BACKWARD * forward)

    def nbytes(self, direction: str) -> int:
        keys = int(self.lengths().sum())
        queries = keys if self.kept is None else self.batch * self.kept
        per_query, per_key = BF16 * self.heads * self.width, BF16 * self.groups * self.width
        small = 0 if self.kept is None else INT64 * queries  # positions
        if direction == "forward":  # q, k, v read, out written
            return 2 * queries * per_query + 2 * keys * per_key + small
        # d_out, q, out, k, v and the log-sum-exp read; d_q, d_k, d_v written
        return 4 * queries * per_query + 4 * keys * per_key + small + FP32 * queries * self.heads

    def make(self, device: str, seed: int) -> SimpleNamespace:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        lengths, positions = self.lengths(), self.positions()
        keys = (int(lengths.sum()),) if self.kind == "ragged" else (self.batch, self.length)
        queries = keys if positions is None else tuple(positions.shape)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int() if self.kind == "ragged" else None
        return SimpleNamespace(
            q=normal(*queries, self.heads, self.width),
            k=normal(*keys, self.groups, self.width),
            v=normal(*keys, self.groups, self.width),
            d_out=normal(*queries, self.heads, self.width),
            positions=None if positions is None else positions.to(device),
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device),
            longest=int(lengths.max()),
        )


def exact(q, k, v, positions, d_out=None):
    """The attention of one sequence and key/value head in float64: rows of ``q`` (all heads of the group) with their
    positions, ``k`` and ``v``. Gives (value, what an error may be) of out, or with ``d_out`` of d_q, d_k and d_v.

    Kernels round p and d_s to bf16 before they multiply them, and each result once. Such errors have independent signs,
    so in a sum they grow as the root of the sum of squares: of p * v, d_s * k and so on. A rounding errs by 0.4
    roundoffs in the mean square; SPREAD roundoffs are ten times that, which no element among 1e8 comes to. The error of
    out also reaches d_s, through sum(d_out * out), and is then the same for all keys of a query.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5
    names = ("out",) if d_out is None else ("d_q", "d_k", "d_v")
    values = {name: torch.zeros_like(like) for name, like in zip(("out", "d_q", "d_k", "d_v"), (q, q, k, v))}
    squares = {name: torch.zeros_like(value) for name, value in values.items()}  # of the errors, in roundoffs
    for rows in torch.arange(len(q), device=q.device).split(max(1, SCORES_AT_ONCE // len(k))):
        keys = int(positions[rows].max()) + 1
        seen = torch.arange(keys, device=q.device) <= positions[rows, None]
        p = (scale * q[rows] @ k[:keys].T).masked_fill(~seen, -torch.inf).softmax(-1)
        out = p @ v[:keys]
        values["out"][rows], squares["out"][rows] = out, p.square() @ v[:keys].square()
        if d_out is None:
            continue
        d_o = d_out[rows].double()
        through_norm = (d_o * out).sum(-1, keepdim=True)
        d_s = p * (d_o @ v[:keys].T - through_norm)
        norm_error = (d_o.square() * (out.square() + squares["out"][rows])).sum(-1, keepdim=True)
        d_s_error = d_s.square() + p.square() * norm_error
        values["d_q"][rows] = scale * (d_s @ k[:keys])
        squares["d_q"][rows] = scale**2 * (d_s.square() @ k[:keys].square() + norm_error * (p @ k[:keys]).square())
        values["d_k"][:keys] += scale * (d_s.T @ q[rows])
        squares["d_k"][:keys] += scale**2 * (d_s_error.T @ q[rows].square())
        values["d_v"][:keys] += p.T @ d_o
        squares["d_v"][:keys] += p.square().T @ d_o.square()
    return {name: (values[name], ROUNDOFF * (values[name].abs() + SPREAD * squares[name].sqrt())) for name in names}


def check(shape: Shape, direction: str, s, outputs, ours: bool) -> float:
    """All outputs have their shapes and are finite; those of the first sequence and key/value head and of the last are
    right, element by element."""
    forward = direction == "forward"
    got = {"out": outputs} if forward else dict(zip(("d_q", "d_k", "d_v"), outputs))
    for (name, tensor), like in zip(got.items(), (s.q, s.k, s.v)):
        require(tensor.shape == like.shape, f"{name}: shape {tuple(tensor.shape)}, expected {tuple(like.shape)}")
        require(tensor.isfinite().all(), f"{name}: not finite everywhere")
    worst = 0.0
    for b, g in {(0, 0), (shape.batch - 1, shape.groups - 1)}:
        part = functools.partial(_part, shape, s.cu_seqlens, b=b, g=g)
        heads = shape.heads // shape.groups
        positions = torch.arange(len(part(s.q)) // heads, device=s.q.device) if s.positions is None else s.positions[b]
        d_out = None if forward else part(s.d_out)
        expected = exact(part(s.q), part(s.k), part(s.v), positions.repeat_interleave(heads), d_out)
        for name, (want, allowed) in expected.items():
            worst = max(worst, close(name, part(got[name]), want, allowed if ours else RIVAL * allowed))
    return worst


def _part(shape, cu_seqlens, tensor, b, g):
    """Rows of sequence ``b`` and key/value head ``g``, or of the query heads that use it."""
    rows = tensor[b] if cu_seqlens is None else tensor[cu_seqlens[b] : cu_seqlens[b + 1]]
    heads = rows.shape[1] // shape.groups
    return rows[:, g * heads : (g + 1) * heads].flatten(0, 1)


@dataclass(frozen=True)
class Way:
    """A way to compute attention: ``bind(inputs)`` does what isn't timed and returns ``attend(q, k, v)``, which takes
    and gives tensors in our layout, or with heads before positions, as ``layout`` turns ours."""

    name: str
    bind: Callable
    layout: Callable | None = None
    directions: tuple[str, ...] = ("forward", "backward")
    ours: bool = False

    def _to(self, *tensors):
        return [t if self.layout is None else self.layout(t) for t in tensors]

    def _back(self, tensor):
        return tensor if self.layout is None else tensor.transpose(1, 2)

    def forward(self, s):
        attend, tensors = self.bind(s), self._to(s.q, s.k, s.v)
        return lambda: self._back(attend(*tensors))

    def backward(self, s):
        tensors = [t.detach().requires_grad_() for t in self._to(s.q, s.k, s.v)]
        out, (d_out,) = self.bind(s)(*tensors), self._to(s.d_out)
        return lambda: [self._back(t) for t in torch.autograd.grad(out, tensors, d_out, retain_graph=True)]


def heads_first(t):
    """A view, which SDPA takes as it is: its kernels want the memory so."""
    return t.transpose(1, 2)


def heads_first_copy(t):
    return t.transpose(1, 2).contiguous()


def packed(attend: Callable, s, **options):
    """Most functions for packed sequences take the same arguments in the same order."""
    return lambda q, k, v: attend(q, k, v, s.cu_seqlens, s.cu_seqlens, s.longest, s.longest, **options)


def own(backend: str | None, s):
    if s.cu_seqlens is None:
        return functools.partial(ops.attention, q_positions=s.positions, backend=backend)
    return packed(ops.attention_varlen, s, backend=backend)


def block_mask(positions: torch.Tensor, keys: int, sees: Callable) -> BlockMask:
    """FlexAttention's lists of blocks, from the first and last position of each block of queries, since they ascend:
    the same as ``create_block_mask`` makes, which looks at every pair."""
    queries, device = positions.shape[1], positions.device
    first = torch.arange(0, queries, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=queries - 1)
    touched = positions[:, last] // BLOCK + 1
    whole = (positions[:, first] + 1) // BLOCK
    if queries % BLOCK:
        whole[:, -1] = 0  # a block that lacks queries counts as seen in part
    block = torch.arange(-(-keys // BLOCK), device=device)
    in_part = (whole[..., None] + block) % len(block)  # those before `touched` are meant
    lists = (touched - whole, in_part, whole, block.expand_as(in_part))
    lists = (t.int().unsqueeze(1).contiguous() for t in lists)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys))


def subset_mask(s) -> tuple[torch.Tensor, BlockMask]:
    """The positions in int32, and the mask that reads them."""
    positions = s.positions.int()

    def sees(batch, head, query, key):
        return key <= positions[batch, query]

    return positions, block_mask(positions, s.k.shape[1], sees)


def causal_mask(s) -> BlockMask:
    return block_mask(
        torch.arange(s.q.shape[1], device=s.q.device)[None], s.k.shape[1], lambda batch, head, query, key: key <= query
    )


def sdpa(backend: SDPBackend, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_with_matrix(s):
    """SDPA told of every pair: for the CPU, where nothing faster is compared."""
    seen = torch.arange(s.k.shape[1]) <= s.positions[:, :, None]
    return functools.partial(F.scaled_dot_product_attention, attn_mask=seen[:, None], enable_gqa=True)


def optional(module: str) -> object | None:
    try:
        return importlib.import_module(module)
    except Exception:  # not installed, or not for this machine
        return None


def gpu_rivals(compiled: Callable) -> tuple[dict[str, list[Way]], list[str]]:
    """Rivals by kind of case, and the names of those that can't be imported."""
    flex = functools.partial(compiled(flex_attention), enable_gqa=True)
    forward = ("forward",)
    causal = [
        Way("flex", lambda s: functools.partial(flex, block_mask=causal_mask(s)), heads_first_copy),
        Way("sdpa flash (FA2)", lambda s: functools.partial(sdpa, SDPBackend.FLASH_ATTENTION), heads_first),
        Way("sdpa cudnn", lambda s: functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION), heads_first),
    ]
    subset = [
        Way("flex", lambda s: functools.partial(flex, block_mask=subset_mask(s)[1]), heads_first_copy),
        Way("flex + mask", lambda s: lambda *qkv: flex(*qkv, block_mask=subset_mask(s)[1]), heads_first_copy, forward),
    ]
    ragged, missing = [], []
    if varlen := optional("torch.nn.attention.varlen"):
        options = torch_varlen_options(varlen.varlen_attn)
        ragged.append(Way("torch varlen (FA2)", lambda s: packed(varlen.varlen_attn, s, **options)))
    else:
        missing.append("torch varlen (from torch 2.10 on)")
    fa2 = optional("flash_attn")
    if hasattr(fa2, "flash_attn_func"):  # flash-attn-4 alone leaves `flash_attn` empty
        causal.append(Way("flash-attn (FA2)", lambda s: functools.partial(fa2.flash_attn_func, causal=True)))
        ragged.append(Way("flash-attn (FA2)", lambda s: packed(fa2.flash_attn_varlen_func, s, causal=True)))
    else:
        missing.append("flash-attn")
    if fa4 := optional("bench._fa4"):
        causal.append(Way("fa4", lambda s: fa4.causal))
        subset.append(Way("fa4", lambda s: functools.partial(fa4.subset, known=subset_mask(s))))
        subset.append(
            Way("fa4 + lists", lambda s: lambda *qkv: fa4.subset(*qkv, known=subset_mask(s)), directions=forward)
        )
        ragged.append(Way("fa4", lambda s: packed(fa4.varlen, s)))
    else:
        missing.append("flash-attn-4")
    return {"causal": causal, "subset": subset, "ragged": ragged}, missing


def torch_varlen_options(attend: Callable) -> dict:
    """Causal, with grouped heads: how it is said differs between versions of torch."""
    known = inspect.signature(attend).parameters
    options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return options | ({"enable_gqa": True} if "enable_gqa" in known else {})


def make_cases(shapes: list[Shape], device: str = "cuda", compiled: Callable = COMPILE) -> list[Case]:
    if device == "cuda":
        rivals, missing = gpu_rivals(compiled)
        ours = [Way(name or "default", functools.partial(own, name), ours=True) for name in ("triton", "hopper", None)]
        if missing:
            print(f"left out, since they can't be imported: {', '.join(missing)}", flush=True)
    else:
        rivals = {"subset": [Way("sdpa with a matrix", sdpa_with_matrix, heads_first)]}
        ours = [Way("ours, eager", functools.partial(own, "eager"), ours=True)]
    return [
        Case(
            f"{shape.kind} {direction}",
            shape.name,
            shape.nbytes(direction),
            functools.partial(shape.make, device),
            functools.partial(check, shape, direction),
            tuple(
                Implementation(way.name, getattr(way, direction), way.ours)
                for way in rivals.get(shape.kind, []) + ours
                if direction in way.directions
            ),
            shape.flops(direction),
        )
        for shape in shapes
        for direction in ("forward", "backward")
    ]


def main(argv: list[str] | None = None) -> int:
    parser = command_line_of_cases("attn_flops", __doc__)
    words = f"{SYNTAX}; default: the cases of docs/speed.md"
    parser.add_argument("cases", nargs="*", type=Shape.parse, metavar="CASE", help=words)
    options = parser.parse_args(argv)
    if torch.cuda.is_available():
        shapes = options.cases or [Shape.parse(text) for text in DEFAULT]
        return on_gpu("attn_flops", lambda: make_cases(shapes), options, partial=bool(options.cases))
    print("No CUDA device is visible: nothing is timed or written. A small case is checked on the CPU instead.")
    for case in make_cases([Shape.parse(WITHOUT_GPU)], "cpu"):
        for implementation in case.implementations:
            error = verify(case, implementation)
            print(f"{case.op} {case.name}: {implementation.name} is right; error {error:.2f} of what is allowed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
