"""Odd arguments of every op: what is no dense tensor of the right kind, views of any sort, nothing at all, and NaN.

Views with negative strides are left out: PyTorch has none.
"""

from __future__ import annotations

import re

import pytest
import torch

from mor_kernels.ops._dispatch import BACKENDS, unavailable
from tests.ops.calls import CALLS, REGISTERED, Call, call_of
from tests.strategies import DEVICES, normal

every_call = pytest.mark.parametrize("name", CALLS)


OPS = {name: call_of(name).op for name in CALLS}


def serves(name, device, backend):
    """Whether the backend takes the call. CUDA's linear layers take other ones, see test_decode_linear.py; and Triton's
    interpreter, which takes its time, is spared what another call has in it, too."""
    op = OPS[name]
    if (backend == "cuda" and op.startswith("decode_")) or (device, backend) == ("cpu", "triton") and name in WITHIN:
        return False
    return unavailable(backend, REGISTERED.get(op, op), device) is None


WITHIN = ("attention", "attention_varlen", "kv_append", "kv_append_float8_", "rope", "route_replay", "rms_norm",
          "rms_norm_linear", "route", "decode_qkv_squares_", "scatter_none", "balance_loss_batch",
          "paged_decode")  # fmt: skip
every_target = pytest.mark.parametrize(
    ("name", "device", "backend"), [(n, d, b) for n in CALLS for d in DEVICES for b in BACKENDS if serves(n, d, b)]
)


# What is none of the tensors that an op takes, and what every op says of it.
NOT_TENSORS = {
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "array": lambda t: t.detach().numpy(),
    "number": lambda t: 1.5,
}
NOT_DENSE = {
    "sparse": lambda t: t.detach().to_sparse(),
    "rows of sparse": lambda t: t.detach().to_sparse_csr(),
    "mkldnn": lambda t: t.detach().float().to_mkldnn(),
    "jagged": lambda t: torch.nested.nested_tensor(list(t.detach()), layout=torch.jagged),
    "nested": lambda t: torch.nested.nested_tensor(list(t.detach())),
}
DTYPES = (torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.float8_e5m2)
OTHER_DTYPES = {str(dtype): lambda t, dtype=dtype: t.detach().float().to(dtype) for dtype in DTYPES} | {
    "quantized": lambda t: torch.quantize_per_tensor(t.detach().float(), 0.1, 0, torch.quint8),
}
OTHER_RANKS = {
    "deeper": lambda t: t.detach()[None],
    "deeper at the end": lambda t: t.detach()[..., None],
    "flatter": lambda t: t.detach()[0],
}
OPTIONAL = {
    "route": {"seqlens", "candidates", "indices"},
    "scatter_back": {"gates"},
    "scatter_back_": {"gates"},
    "attention": {"q_positions", "q_lens", "k_lens"},
    "kv_append": {"positions"},
    "kv_append_": {"q", "k_scale", "v_scale"},
    "paged_attention": {"q_positions", "k_scale", "v_scale"},
    "attention_schedule": {"rows"},
    "decode_linear": {"norm_weight", "squares", "residual", "next_norm_weight"},
    "aux_loss": {"candidates", "seqlens"},
    "z_loss": {"valid"},
    "choose_depths": {"valid", "bias"},
    "rms_norm": {"add"},
    "rms_norm_linear": {"add"},
    "depth_step_": {"last", "replayed", "aux_weight"},
}
POSITIONS = {("rope", "positions"), ("rope_qkv", "positions")}  # of any integers
BOOLEANS = {("z_loss", "valid"), ("choose_depths", "valid"), ("depth_step_", "replayed"), ("leave", "goes_on"),
            ("advance_", "goes_on")}  # fmt: skip
ANY_RANK = {("gather", "x"), ("swiglu_linear", "gate_up"), ("rms_norm", "x"), ("rms_norm_linear", "x")}


def message_of(call, path, spoil):
    """What the op says of the argument, spoilt; None if nothing, or if there is nothing to be spoilt so."""
    try:
        bad = spoil(call.get(path))
    except (RuntimeError, IndexError, TypeError):
        return None
    with pytest.raises(ValueError, match="expected") as caught:
        call.put(path, bad).run()
    return str(caught.value)


def told_by(call, message):
    """The argument that an error names, if it says what it should."""
    told = re.match(rf"{call.op}: ([\w., ()]+): expected .+, got .+", message)
    return told and told[1]


def is_allowed(call, path, kind):
    op, argument = call.op, call.name(path)
    return (
        (kind == "none" and argument in OPTIONAL.get(op, ()))
        or (kind in ("torch.uint8", "torch.int8", "torch.int16") and (op, argument) in POSITIONS)
        or (kind == "torch.bool" and (op, argument) in BOOLEANS)
        or (kind in OTHER_RANKS and (op, argument) in ANY_RANK)
    )


@every_call
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:Casting complex:UserWarning")
def test_what_is_no_fitting_tensor_is_named(name):
    """The op and the argument, what was expected and what came. Of another rank or device, another argument may be the
    one that doesn't fit."""
    call = call_of(name)
    for path in call.tensors():
        for kind, spoil in (NOT_TENSORS | NOT_DENSE | OTHER_DTYPES | OTHER_RANKS).items():
            if is_allowed(call, path, kind) or (message := message_of(call, path, spoil)) is None:
                continue
            argument = told_by(call, message)
            assert argument, f"{kind}: {message}"
            if kind in NOT_DENSE or kind in OTHER_DTYPES:
                assert argument == call.name(path), f"{kind}: {message}"
        if len(list(call.tensors())) > 1:
            message = message_of(call, path, lambda t: t.to("meta"))
            assert told_by(call, message) and ": expected device " in message, message


@pytest.mark.parametrize("name", ["leave", "advance_", "take_pages_", "commit_pages_", "free_pages_"])
def test_what_is_no_state_is_named(name):
    call = call_of(name)
    for argument, state in call.arguments.items():
        if isinstance(state, tuple):
            for wrong in (0, tuple(state), *[None] * (argument != "ends")):
                message = f"^{name}: {argument}: expected {type(state).__name__}, got {type(wrong).__name__}$"
                with pytest.raises(ValueError, match=message):
                    call.put((argument,), wrong).run()


class Subclass(torch.Tensor):
    pass


@every_call
def test_parameters_and_subclasses_are_tensors(name):
    call = call_of(name)
    want = call.fresh().run()
    for kind in (lambda t: torch.nn.Parameter(t, t.requires_grad), lambda t: t.as_subclass(Subclass)):
        got = call.mapped(lambda t, kind=kind: kind(t.detach().clone()).requires_grad_(t.requires_grad)).run()
        assert all(torch.equal(a.double(), b.double()) for part in zip(want, got) for a, b in zip(*part, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "scatter_back_",
        "kv_append_",
        "kv_append_float8_",
        "paged_decode",
        "paged_float8",
        "decode_residual",
        "decode_next",
        "decode_qkv_",
        "decode_qkv_squares_",
        "depth_step_",
        "leave",
        "enter_",
    ],
)
def test_serving_refuses_gradients(name):
    """Where they are on; without, any tensor will do."""
    call = call_of(name)
    for path in call.tensors():
        t = call.get(path)
        if t.is_floating_point() and t.dtype != torch.float8_e4m3fn:
            needing = call.fresh().put(path, t.clone().requires_grad_())
            with pytest.raises(RuntimeError, match=f"^{call.op}: expected no argument that needs a gradient"):
                needing.run()
            with torch.no_grad():
                needing.run()


def shifted(t):
    """From the second element of its memory on, so that no 16 bytes of it can be read at once."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)


def every_other(t):
    """Of each dimension, in the order of the others."""
    memory = t.new_zeros([2 * n for n in reversed(t.shape)])
    view = memory[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.permute(list(reversed(range(t.dim())))).copy_(t)


def viewed(t, view):
    return view(t.detach().clone()).requires_grad_(t.requires_grad)


def everything(call, backend):
    """Outputs, tensors that may have been written into, and gradients."""
    outputs, inputs = call.run(backend)
    leaves, results = [t for t in inputs if t.requires_grad], [t for t in outputs if t.requires_grad]
    gradients = ()
    if leaves and results:
        loss = sum((t * normal(t.shape, i, t.dtype).to(t.device)).sum() for i, t in enumerate(results))
        gradients = torch.autograd.grad(loss, leaves)
    return [*outputs, *inputs, *gradients]


# Sums that PyTorch makes in an order that the strides decide (products, on a CPU; all, on a GPU), and the CUDA kernels
# in one that addresses do, since they read as many elements at once as lie on 16 bytes: off by roundings of fp32. For
# other addresses and strides Triton compiles anew, on a GPU with other orders of sums and other fused products.
PRODUCTS = ("linear", "decode_")
VECTORS = ("route", "route_nested", "scatter_block", "scatter_delta", "depth_step_")
COMPILED_ANEW = ("route", "route_nested", "kv_append_", "kv_append_turned")


def assert_same(name, backend, want, got):
    loose = any(part in name for part in PRODUCTS) or (backend != "triton" and name in VECTORS)
    if want[0].is_cuda:
        loose |= backend == "eager" or (backend == "triton" and name in COMPILED_ANEW)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if loose and a.is_floating_point():
            torch.testing.assert_close(b.double(), a.double(), rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(a.double(), b.double())


def of_strided(call, backend):
    """Everything of the call with every other element of its arguments, but those of which an error says that they are
    to be contiguous."""
    kept = set()
    while True:
        views = call
        for path in call.tensors():
            views = views.put(path, viewed(call.get(path), shifted if call.name(path) in kept else every_other))
        try:
            return everything(views, backend)
        except ValueError as error:
            expected = "a contiguous tensor.*|rows of elements side by side"
            told = re.match(rf"{call.op}: ([\w.]+): expected ({expected}), got strides", str(error))
            assert told and told[1] not in kept, error
            kept.add(told[1])


@every_target
def test_views_do_not_matter(name, device, backend):
    """To the bit."""
    call = call_of(name, device=device)
    want = everything(call.fresh(), backend)
    assert_same(name, backend, want, everything(call.mapped(lambda t: viewed(t, shifted)), backend))
    assert_same(name, backend, want, of_strided(call, backend))


@every_target
def test_expanded_inputs(name, device, backend):
    """As their copies; what is written has elements of its own, see test_values.py."""
    call = call_of(name, device=device)
    names = {"x", "logits", "k_cache", "v_cache"} if call.op.endswith("_") else ()
    expanded, copied = call.fresh(), call.fresh()
    for path in call.tensors():
        t = call.get(path)
        if t.is_floating_point() and t.dim() and call.name(path) not in names:
            expanded = expanded.put(path, viewed(t, lambda t: t[:1].expand(t.shape)))
            copied = copied.put(path, viewed(t, lambda t: t[:1].expand(t.shape).contiguous()))
    with torch.no_grad():
        results = [[*outputs, *inputs] for outputs, inputs in (copied.run(backend), expanded.run(backend))]
    assert_same(name, backend, *results)


SIZES = ("k", "total", "size", "queries", "max_seqlen_q", "max_seqlen_k")
SHAPE = re.compile(r"\w+: ([\w.]+): expected shape \((.*)\), got")
VALUE = re.compile(r"\w+: ([\w.]+): expected (0 first|0 to|values|candidates|pages|each)")


def resized(t, shape):
    """As much of it as there is room for; else zeros."""
    if t.dim() == len(shape) and all(n <= m for n, m in zip(shape, t.shape)):
        t = t[tuple(slice(n) for n in shape)]
    return viewed(t if t.shape == torch.Size(shape) else t.new_zeros(shape), lambda t: t)


def emptied(call, path, dim):
    """The call with a dimension of an argument 0, and others that then don't fit as the errors want them; or the error
    that says that there is no such call."""
    call = call.put(path, resized(call.get(path), [n * (i != dim) for i, n in enumerate(call.get(path).shape)]))
    message = ""
    for _ in range(12):
        try:
            call.fresh().run("eager")
        except ValueError as error:
            message = str(error)
        else:  # a dimension that other arguments have settled has its size again
            return call, message if call.get(path).shape[dim] else None
        shape, value = SHAPE.match(message), VALUE.match(message)
        found = [p for p in call.tensors() if call.name(p) == (shape or value or [0, 0])[1]]
        if not found:
            break
        before = call
        for other in found:
            t = call.get(other)
            if shape:
                wanted = [int(n) if n.isdecimal() else None for n in shape[2].replace("...", "").split(", ") if n]
                wanted = [None] * (t.dim() - len(wanted)) + wanted
                call = call.put(other, resized(t, [m if n is None else n for n, m in zip(wanted, t.shape)]))
            elif not t.is_floating_point():
                call = call.put(other, torch.full_like(t, 0 if value[2].startswith("0") else -1))
        if all(torch.equal(before.get(p), call.get(p)) for p in found):
            break
    return call, message


@every_call
def test_nothing_at_all(name):
    """Each dimension in turn without elements: what is left is right and the same by all backends, with gradients of
    zeros; or an error names an argument."""
    calls = {}
    given = call_of(name)
    sizes = [n for n in SIZES if n in given.arguments]
    for base in [given, Call(given.op, given.arguments | dict.fromkeys(sizes, 0))][: 1 + bool(sizes)]:
        for path in base.tensors():
            for dim in range(base.get(path).dim()):
                call, message = emptied(base, path, dim)
                assert message is None or told_by(call, message), message
                if message is None:
                    calls[tuple(call.get(p).shape for p in call.tensors())] = call
    for shapes, call in calls.items():
        want = everything(call.fresh(), "eager")
        assert not any(t.double().isnan().any() for t in want), shapes
        for backend in BACKENDS[1:]:
            if serves(name, "cpu", backend):
                got = everything(call.fresh(), backend)
                if call.op != "attention_schedule":  # of a backend's own
                    for a, b in zip(want, got, strict=True):
                        torch.testing.assert_close(a, b, msg=lambda text, s=shapes: f"{text}\n{s}")


def pattern(t):
    """What each element is: NaN, infinite (or beyond fp32's middle: some sums bound logits there) with its sign, or a
    number."""
    t = t.detach().cpu().double()
    return torch.where(t.isnan(), 9, torch.where(t.abs() > 1e37, t.sign(), 0))


@every_target
def test_nan_and_infinity_stay_where_they_belong(name, device, backend):
    """As in float64 eager, element by element: other rows are as they were. Attention over infinite scores is left
    out: PyTorch's own kernels don't agree what it is."""
    exact, call = call_of(name, torch.float64), call_of(name, device=device)
    for path in call.tensors():
        t = call.get(path)
        if not t.is_floating_point() or t.dtype == torch.float8_e4m3fn or call.name(path) in ("k_scale", "v_scale"):
            continue
        few = "attention" in call.op or (device, backend) == ("cpu", "triton")  # whose interpreter takes its time
        for value in (torch.nan, torch.inf, -torch.inf)[: 1 if few else 3]:
            found = []
            for other, chosen in ((exact, "eager"), (call, backend)):
                other = other.fresh()
                with torch.no_grad():
                    other.get(path).view(-1)[t.numel() // 2] = value
                found.append([pattern(t) for t in everything(other, chosen) if t.is_floating_point()])
            for i, (a, b) in enumerate(zip(*found, strict=True)):
                assert torch.equal(a, b), f"{call.name(path)} {value}: {i}"
