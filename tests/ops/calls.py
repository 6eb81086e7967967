"""A call of every op, with its arguments by name, for tests that change one argument at a time."""

from __future__ import annotations

import inspect
from typing import NamedTuple
from unittest import mock

import torch

from mor_kernels import ops
from tests.ops.test_citizenship import CASES, CU_K, CU_Q, FLAT, INDEX, LENS, TABLE, in_flight, make
from tests.strategies import normal

IDS = torch.tensor([7, -1, 2])


def _floats(*shapes):
    return [normal(shape, i, torch.float32) for i, shape in enumerate(shapes)]


def _pages():
    """Two rows of the three hold a page or two, of five."""
    pages = ops.Pages.new(3, 5, 3, "cpu")
    ops.take_pages_(pages, torch.tensor([1, 0]), torch.tensor([0, 5, 8], dtype=torch.int32), 8, 4)
    ops.commit_pages_(pages, torch.tensor([1, 0]), torch.tensor([0, 5, 8], dtype=torch.int32))
    return list(pages)


def _lanes():
    """A token in its last recursion, one in its first, and an idle slot, of a block of two recursions."""
    table = torch.full((10, 3), -1)
    table[:, 0] = torch.tensor([1, -1, -1, -1, 0, 3, -1, 2, 9, -1])
    table[:, 1] = torch.tensor([0, -1, 1, 4, 1, -1, -1, 0, 5, 3])
    table[7] += table[7] < 0
    return [table, torch.zeros(2, 3, dtype=torch.int32), torch.tensor(4)]


def _advance(chosen, goes_on, at, table, k_lens, ticks, record, *pages):
    lanes, block, ends = ops.Lanes(table, k_lens, ticks), ops.Pages(*pages[:5]), ops.Pages(*pages[5:])
    return ops.advance_(chosen, goes_on, at, lanes, record, block, ends, 2, 4, shared=True)


# as CASES, of ops that write into their arguments, and of arguments that no call there has
MORE = {
    "scatter_back_": (
        lambda x, f, g, i: ops.scatter_back_(x, f, i, g),
        [],
        [*_floats((2, 5, 4), (2, 3, 4), (2, 3)), INDEX],
    ),
    "scatter_back_packed_": (lambda x, f, i: ops.scatter_back_(x, f, i), [], [*_floats((10, 4), (6, 4)), FLAT]),
    "attention_fresh": (
        lambda q, k, v, a, b, p, n, m: ops.attention(q, k, v, q_positions=p, k_fresh=a, v_fresh=b, q_lens=n, k_lens=m),
        [(2, 3, 6, 4), (2, 5, 2, 4), (2, 5, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)],
        [torch.tensor([[0, 2, 4], [1, 2, 3]]), torch.tensor([3, 2]), torch.tensor([5, 4])],
    ),
    "attention_varlen_fresh": (
        lambda q, k, v, a, b, i, j, p: ops.attention_varlen(
            q, k, v, i, j, 3, 4, q_positions=p, k_fresh=a, v_fresh=b, return_lse=True
        ),
        [(6, 6, 4), (8, 2, 4), (8, 2, 4), (6, 2, 4), (6, 2, 4)],
        [CU_Q, CU_K, torch.tensor([0, 3, 1, -1, 2, 0])],
    ),
    "kv_append_": (
        lambda k, v, kc, vc, s, p, q: ops.kv_append_(k, v, kc, vc, s, positions=p, q=q),
        [],
        [*_floats((3, 2, 4), (3, 2, 4), (2, 4, 2, 4), (2, 4, 2, 4)), IDS, torch.tensor([5, 0, 9]), *_floats((3, 6, 4))],
    ),
    "kv_append_float8_": (
        lambda k, v, kc, vc, s, a, b: ops.kv_append_(k, v, kc, vc, s, k_scale=a, v_scale=b),
        [],
        [
            *_floats((3, 2, 4), (3, 2, 4)),
            *(t.to(torch.float8_e4m3fn) for t in _floats((2, 4, 2, 4), (2, 4, 2, 4))),
            *(IDS, torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])),
        ],
    ),
    "paged_float8": (
        lambda q, kc, vc, t, n, a, b: ops.paged_attention(q, kc, vc, t, n, k_scale=a, v_scale=b),
        [],
        [
            *_floats((2, 6, 4)),
            *(t.to(torch.float8_e4m3fn) for t in _floats((4, 4, 2, 4), (4, 4, 2, 4))),
            *(TABLE, LENS.int(), torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])),
        ],
    ),
    "attention_schedule": (
        lambda n, r, c: ops.attention_schedule(n, 6, 2, 6, rows=r, cu_seqlens_q=c),
        [],
        [torch.tensor([4, 7, 0], dtype=torch.int32), torch.tensor([1, 0, -1]), CU_Q],
    ),
    "take_pages_": (
        lambda *t: ops.take_pages_(ops.Pages(*t[:5]), *t[5:], 3, 4),
        [],
        [*_pages(), torch.tensor([2, -1, 0]), torch.tensor([0, 1, 1, 3], dtype=torch.int32)],
    ),
    "commit_pages_": (
        lambda *t: ops.commit_pages_(ops.Pages(*t[:5]), *t[5:]),
        [],
        [*_pages(), torch.tensor([2, -1, 0]), torch.tensor([0, 1, 1, 3], dtype=torch.int32)],
    ),
    "free_pages_": (
        lambda *t: ops.free_pages_(ops.Pages(*t[:5]), t[5]),
        [],
        [*_pages(), torch.tensor([0, -1, 2])],
    ),
    "decode_qkv_": (
        lambda x, w, kc, vc, s, p, g: ops.decode_qkv_(x, w, kc, vc, s, heads=3, positions=p, norm_weight=g),
        [],
        [
            *_floats((3, 8), (28, 8), (2, 4, 2, 4), (2, 4, 2, 4)),
            *(IDS, torch.tensor([5, 0, 9]), *_floats((8,))),
        ],
    ),
    "decode_qkv_squares_": (
        lambda x, w, kc, vc, s, p, q: ops.decode_qkv_(x, w, kc, vc, s, heads=3, positions=p, squares=q),
        [],
        [
            *_floats((3, 8), (28, 8), (2, 4, 2, 4), (2, 4, 2, 4)),
            *(IDS, torch.tensor([5, 0, 9]), *(t.square() for t in _floats((3, 2)))),
        ],
    ),
    "depth_step_": (
        lambda x, f, l, r, w, last, replayed, aux: ops.depth_step_(
            x, f, l, r, w, last=last, replayed=replayed, aux_weight=aux
        ),
        [],
        [*in_flight("cpu")[0], *in_flight("cpu")[1].values()],
    ),
    "leave": (
        lambda on, table, k_lens, x: ops.leave(on, ops.Lanes(table, k_lens, None), x, 2),
        [],
        [torch.tensor([False, True, False]), *_lanes()[:2], *_floats((3, 4))],
    ),
    "advance_": (
        _advance,
        [],
        [
            *(torch.tensor([5, 0]), torch.tensor([False, True, False]), torch.tensor([0, -1, -1]), *_lanes()),
            *(torch.zeros(2, 3, 3, dtype=torch.int64), *_pages(), *_pages()),
        ],
    ),
    "enter_": (
        lambda x, new, lanes, l, w: ops.enter_(x, new, lanes, l, w),
        [],
        [*_floats((4, 4), (3, 4)), torch.tensor([2, -1, 0]), *_floats((4,), (4,))],
    ),
}
CALLS = CASES | MORE
# registered ops of public ones that have other names
REGISTERED = {"rope_qkv": "rope_split", "linear_cross_entropy": "cross_entropy_", "swiglu_linear": "swiglu",
              "rms_norm": "add_rms_norm", "rms_norm_linear": "add_rms_norm"}  # fmt: skip


class Call(NamedTuple):
    """An op and what it is called with; arguments in a tuple are named state.field, or q and k."""

    op: str
    arguments: dict

    def tensors(self):
        """Paths (names of arguments, or of arguments and of places in them) of the tensors."""
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                yield (name,)
            elif isinstance(value, tuple):
                yield from ((name, i) for i, t in enumerate(value) if isinstance(t, torch.Tensor))

    def name(self, path):
        """What errors call it."""
        value = self.arguments[path[0]]
        if len(path) == 1:
            return path[0]
        return f"{path[0]}.{value._fields[path[1]]}" if hasattr(value, "_fields") else "qk"[path[1]]

    def get(self, path):
        value = self.arguments[path[0]]
        return value if len(path) == 1 else value[path[1]]

    def put(self, path, new):
        """The call with another value there."""
        if len(path) == 2:
            value = list(self.arguments[path[0]])
            value[path[1]] = new
            kind = type(self.arguments[path[0]])
            new = kind(*value) if hasattr(kind, "_fields") else tuple(value)
        return Call(self.op, self.arguments | {path[0]: new})

    def mapped(self, function):
        """The call with ``function`` of each tensor."""
        call = self
        for path in self.tensors():
            call = call.put(path, function(self.get(path)))
        return call

    def fresh(self):
        """The call with copies, which it may write into."""
        return self.mapped(lambda t: t.detach().clone().requires_grad_(t.requires_grad))

    def run(self, backend=None):
        """Outputs, and the tensors of the arguments, which it may have written into."""
        arguments = self.arguments
        if "backend" in inspect.signature(getattr(ops, self.op)).parameters:
            arguments = arguments | {"backend": backend}
        outputs = getattr(ops, self.op)(**arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [t for t in outputs if t is not None], [self.get(path) for path in self.tensors()]


def call_of(name, dtype=torch.float32, device="cpu"):
    """The call of the op in ``CALLS[name]``, recorded."""
    with mock.patch.dict(CASES, MORE):
        function, inputs, others = make(name, dtype=dtype, device=device)
    found = []

    def record(op):
        signature = inspect.signature(getattr(ops, op))
        return lambda *args, **kwargs: found.append(Call(op, dict(signature.bind(*args, **kwargs).arguments)))

    functions = [op for op in ops.__all__ if inspect.isfunction(getattr(ops, op))]
    with mock.patch.multiple(ops, **{op: record(op) for op in functions}):
        function(*inputs, *others)
    (call,) = found
    return call
