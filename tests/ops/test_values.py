"""Values that don't fit, and memory that is shared: what is looked at on the CPU, and everywhere in debug mode."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mor_kernels import doctor, ops
from mor_kernels.ops import _checks
from mor_kernels.ops._dispatch import BACKENDS, unavailable
from tests.ops.calls import REGISTERED, call_of
from tests.strategies import kernels

# a call, its argument, values that don't fit, what is said of them
WRONG = [
    ("gather", "indices", [0, 2, 4, 6, -1, 10], "values of at least -1 and at most 9, got 10"),
    ("gather", "indices", [0, 2, 4, 2, -1, 9], r"each index at most once, got \[0, 2, 4, 2, -1, 9\]"),
    ("route_nested", "candidates", [[0, 2, 5], [1, -1, -1]], "values of at least -1 and at most 4, got 5"),
    ("route_nested", "candidates", [[0, 4, 2], [1, -1, -1]], "ascending positions, then -1, got others"),
    ("route_nested", "candidates", [[0, -1, 2], [1, -1, -1]], "ascending positions, then -1, got others"),
    ("route_replay", "indices", [[0, 2, 5], [1, -1, -1]], "candidates of their own sequence, or -1, got others"),
    ("route_replay", "indices", [[0, 4, 2], [1, -1, -1]], "ascending positions, then -1, got others"),
    ("route_replay", "indices", [[0, 2, 2], [1, -1, -1]], "ascending positions, then -1, got others"),
    ("scatter_block", "indices", [[0, 2, 5], [1, -1, -1]], "values of at least -1 and at most 4, got 5"),
    ("scatter_block", "indices", [[0, 2, 2], [1, -1, -1]], r"each index at most once, got \[\[0, 2, 2\]"),
    ("scatter_back_", "indices", [[0, 2, -2], [1, -1, -1]], "values of at least -1 and at most 4, got -2"),
    ("scatter_back_packed_", "indices", [0, 2, 4, 6, 0, 9], "each index at most once"),
    ("attention_fresh", "q_positions", [[0, 2, 4], [2, 2, 3]], "each position at most once"),
    ("attention_varlen", "cu_seqlens_q", [0, 2, 1, 5], r"0 first, then ascending to at most 6, got \[0, 2, 1, 5\]"),
    ("attention_varlen", "cu_seqlens_k", [0, 4, 7, 9], "0 first, then ascending to at most 8, got"),
    ("attention_varlen", "cu_seqlens_k", [1, 4, 7, 7], "0 first, then ascending to at most 8, got"),
    ("attention_varlen", "max_seqlen_q", 2, "at least 3, got 2"),
    ("attention_varlen_fresh", "q_positions", [1, 1, 1, -1, 2, 0], "each position at most once"),
    ("kv_append", "slots", [7, -1, 8], "values of at least -1 and at most 7, got 8"),
    ("kv_append_turned", "slots", [7, 7, -1], r"each slot at most once, got \[7, 7, -1\]"),
    ("kv_append_", "slots", [7, -1, 7], r"each slot at most once, got \[7, -1, 7\]"),
    ("kv_append_float8_", "slots", [7, -2, 2], "values of at least -1 and at most 7, got -2"),
    ("kv_lookup", "total", 7, r"at least cu_seqlens\[-1\] = 8, got 7"),
    ("kv_lookup", "cu_seqlens", [0, 8, 5], "0 first, then ascending to at most 9, got"),
    ("kv_lookup", "cu_seqlens", [0, 9, 9], "pages for 9 tokens a row, got room for 8", "page_table"),
    ("kv_lookup", "page_table", [[2, 4], [1, 3]], r"pages in 0..3 for the tokens there are, got 4"),
    ("paged_decode", "page_table", [[2, -1], [1, 3]], r"pages in 0..3 for the tokens there are, got -1"),
    ("paged_decode", "k_lens", [5, 9], r"0 to the 8 tokens that the page table has room for, got \[5, 9\]"),
    ("paged_prefill", "rows", [2, 0, -1], "values of at least -1 and at most 1, got 2"),
    ("paged_decode", "k_lens", [5, -1], r"0 to the 8 tokens that the page table has room for, got \[5, -1\]"),
    ("paged_prefill", "cu_seqlens_q", [0, 2, 2, 7], "0 first, then ascending to at most 6, got"),
    ("attention_schedule", "cu_seqlens_q", [0, 2, 2, 7], "0 first, then ascending to at most 6, got"),
    ("attention_schedule", "k_lens", [4, -7, 0], "values of at least 0, got -7"),
    ("aux_loss", "kept", [[0, 2, 5], [1, -1, -1]], "candidates of their own sequence, or -1, got others"),
    ("aux_loss", "kept", [[0, 4, 2], [1, -1, -1]], "ascending positions, then -1, got others"),
    ("aux_loss_nested", "candidates", [[2, 0, 4], [1, -1, -1]], "ascending positions, then -1, got others"),
    ("balance_loss", "depths", [[1, 3, 2, 4, 0], [0] * 5], "values of at least 0 and at most 3, got 4"),
    ("linear_cross_entropy", "targets", [[0, 6, -100, 3, 7], [0] * 5], "-100, or values .* at most 6, got 7"),
    ("linear_cross_entropy", "targets", [[0, 6, -1, 3, 0], [0] * 5], "-100, or values .* at most 6, got -1"),
    ("decode_qkv_", "slots", [7, -1, 8], "values of at least -1 and at most 7, got 8"),
    ("decode_qkv_squares_", "slots", [7, 1, 1], r"each slot at most once, got \[7, 1, 1\]"),
    ("depth_step_", "recursions", [0, 3, -1, 1, 0], "values of at least -1 and at most 2, got 3"),
    ("take_pages_", "rows", [2, -1, 3], "values of at least -1 and at most 2, got 3"),
    ("take_pages_", "rows", [2, -1, 2], r"each row at most once, got \[2, -1, 2\]"),
    ("take_pages_", "cu_seqlens", [0, 1, 1, 4], "0 first, then ascending to at most 3, got"),
    ("take_pages_", "pages.free_count", 4, "values of at least 0 and at most 2, got 4"),
    ("take_pages_", "pages.owned", [1, 4, 0], "values of at least 0 and at most 3, got 4"),
    ("commit_pages_", "rows", [2, 0, 0], "each row at most once"),
    ("commit_pages_", "cu_seqlens", [0, 2, 1, 3], r"0 first, .* at most 3, got \[0, 2, 1, 3\]"),
    ("free_pages_", "rows", [0, 0, 2], "each row at most once"),
    ("free_pages_", "pages.page_table", [[-1, 2, 2], [2, 2, 2], [2, 2, 2]], "values of .* at most 4, got -1"),
    ("free_pages_", "pages.free_pages", [5, 0, 0, 0, 0], "values of at least 0 and at most 4, got 5"),
    ("enter_", "lanes", [2, -1, 4], "values of at least -1 and at most 3, got 4"),
    ("enter_", "lanes", [2, -1, 2], r"each lane at most once, got \[2, -1, 2\]"),
    ("advance_", "at", [2, -1, -1], "values of at least -1 and at most 1, got 2"),
    ("advance_", "at", [0, 0, -1], r"each place at most once, got \[0, 0, -1\]"),
    ("advance_", "lanes.ticks", -1, "a number of at least 0, got -1"),
    ("advance_", "lanes.table", 3, "values of at least -1 and at most 1, got 3", r"lanes.table \(recursion\)"),
    ("advance_", "block.owned", [1, 4, 0], "values of at least 0 and at most 3, got 4"),
    ("advance_", "ends.page_table", 5, "values of at least 0 and at most 4, got 5"),
]  # fmt: skip


def spoilt(name, argument, values, expected, named=None, device="cpu"):
    """The call with the values, and what the error should say."""
    call = call_of(name, device=device)
    message = f"^{call.op}: {named or argument}: expected {expected}"
    if argument not in [call.name(path) for path in call.tensors()]:
        return call.put((argument,), values), message
    path = next(path for path in call.tensors() if call.name(path) == argument)
    old = call.get(path)
    return call.put(path, torch.tensor(values, dtype=old.dtype, device=device).expand(old.shape).contiguous()), message


def raises(call, message, backend):
    """The error comes before anything is written."""
    call = call.fresh()
    before = [call.get(path).clone() for path in call.tensors()]
    with pytest.raises(ValueError, match=message):
        call.run(backend)
    for path, old in zip(call.tensors(), before):
        assert torch.equal(call.get(path).double(), old.double()), call.name(path)


every_wrong = pytest.mark.parametrize("wrong", WRONG, ids=[f"{w[0]}-{w[1]}-{i}" for i, w in enumerate(WRONG)])


@every_wrong
def test_values_are_looked_at_on_the_cpu(wrong):
    raises(*spoilt(*wrong), "eager")


@every_wrong
def test_values_are_looked_at_by_every_backend_in_debug_mode(monkeypatch, wrong):
    monkeypatch.setattr(_checks, "DEBUG", True)
    call, message = spoilt(*wrong)
    for backend in BACKENDS[1:]:
        if unavailable(backend, REGISTERED.get(call.op, call.op), "cpu") is None and not call.op.startswith("decode_"):
            raises(call, message, backend)


def test_kernels_alone_look_at_no_value(monkeypatch):
    """So that nothing waits for a device."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert _checks.looked_at("eager", cpu) and not _checks.looked_at("eager", cuda)
    assert not any(_checks.looked_at(backend, device) for backend in BACKENDS[1:] for device in (cpu, cuda))
    monkeypatch.setattr(_checks, "DEBUG", True)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert all(_checks.looked_at(backend, cuda) is not capturing for backend in BACKENDS)
        assert all(_checks.looked_at(backend, cpu) for backend in BACKENDS)


def test_debug_mode_is_of_the_environment(monkeypatch):
    spec = importlib.util.find_spec("mor_kernels.ops._checks")
    for value in ("0", "", "1"):
        monkeypatch.setenv("MOR_DEBUG", value)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.DEBUG is (value == "1")
    assert doctor.report()["environment"]["MOR_DEBUG"] == "1"


def test_values_are_looked_at_when_a_compiled_function_runs(monkeypatch):
    """Not while it is traced, where there are none."""
    monkeypatch.setattr(_checks, "DEBUG", True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i: ops.gather(x, i) * 2, fullgraph=True, backend="aot_eager")
    x = torch.ones(3, 2)
    assert compiled(x, torch.tensor([2, -1])).tolist() == [[2, 2], [0, 0]]
    with pytest.raises(ValueError, match="gather: indices: expected values of at least -1 and at most 2, got 3"):
        compiled(x, torch.tensor([3, 0]))


SHARED = [
    ("scatter_back_", "x", "update", lambda x: x[:, 1:4]),
    ("kv_append_", "k_cache", "k", lambda cache: cache[0, 1:4]),
    ("kv_append_", "v_cache", "k", lambda cache: cache[0, 1:4]),
    ("kv_append_", "k_cache", "v_cache", lambda cache: cache),
    ("kv_append_", "k_cache", "q", lambda cache: cache.view(-1)[5:17].view(3, 1, 4)),
    ("decode_qkv_", "k_cache", "x", lambda cache: cache.view(-1)[:24].view(3, 8)),
    ("depth_step_", "x", "update", lambda x: x),
    ("depth_step_", "x", "logits", lambda x: x[:, 1]),
    ("depth_step_", "logits", "weight", lambda logits: logits.as_strided((3, 4), (0, 1))),
    ("enter_", "x", "new", lambda x: x[1:]),
]


@pytest.mark.parametrize(("name", "written", "read", "view"), SHARED, ids=[f"{s[0]}-{s[1]}-{s[2]}" for s in SHARED])
def test_what_is_written_shares_no_memory(name, written, read, view):
    call = call_of(name).fresh()
    memory = call.get((written,))
    call = call.put((read,), view(memory))
    before = memory.clone()
    with pytest.raises(ValueError, match=f"^{call.op}: {read}: expected memory that {written} has no part of, got"):
        call.run("eager")
    assert torch.equal(memory, before)


def test_views_side_by_side_share_no_memory():
    """Keys and values of each page, or of each token, in one tensor; states beside their updates."""
    for memory in (torch.zeros(2, 2, 4, 2, 4).unbind(1), torch.zeros(2, 4, 2, 4, 2).unbind(-1)):
        call = call_of("kv_append_").fresh()
        want = call.run("eager")[1]
        got = call_of("kv_append_").put(("k_cache",), memory[0].copy_(call_of("kv_append_").arguments["k_cache"]))
        got = got.put(("v_cache",), memory[1].copy_(call_of("kv_append_").arguments["v_cache"])).run("eager")[1]
        assert all(torch.equal(a, b) for a, b in zip(want, got))
    x, update = torch.ones(5, 8).split(4, 1)
    assert ops.scatter_back_(x, update[:2], torch.tensor([4, 0]))[:, 0].tolist() == [2, 1, 1, 1, 2]
    assert update.eq(1).all()


@pytest.mark.parametrize(
    ("name", "argument"),
    [("scatter_back_", "x"), ("kv_append_", "k_cache"), ("kv_append_", "v_cache"), ("decode_qkv_", "k_cache"),
     ("decode_qkv_", "v_cache"), ("depth_step_", "x"), ("depth_step_", "logits"), ("enter_", "x"),
     ("enter_", "logits")],
)  # fmt: skip
def test_what_is_written_has_its_own_memory(name, argument):
    call = call_of(name)
    t = call.get((argument,))
    message = f"^{call.op}: {argument}: expected elements with a place in memory each, got "
    with pytest.raises(ValueError, match=message + "an expanded tensor"):
        call.put((argument,), t[:1].expand(t.shape)).run()
    if t.dim() > 1:  # each row begins in the middle of the one before
        rows = torch.zeros(2 * t.numel()).as_strided(t.shape, (t.stride(0) // 2, *t.stride()[1:]))
        with pytest.raises(ValueError, match=message + "strides"):
            call.put((argument,), rows).run("eager")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_a_gpu():
    """Every wrong value on the GPU, by every backend: those of which nothing was said. For a process in debug mode."""
    silent = []
    for wrong in WRONG:
        call, message = spoilt(*wrong, device="cuda")
        for backend in (None, *BACKENDS):
            if backend and unavailable(backend, REGISTERED.get(call.op, call.op), "cuda") is not None:
                continue
            try:
                call.fresh().run(backend)
            except RuntimeError as error:
                if "is not available" not in str(error):
                    raise
            except ValueError as error:
                if not re.search(message, str(error)):
                    silent.append(f"{wrong[:2]} {backend}: {error}")
            else:
                silent.append(f"{wrong[:2]} {backend}: no error")
    return silent


@gpu
def test_values_are_looked_at_on_a_gpu_in_debug_mode():
    """In a process of its own; and a CUDA graph is captured as ever."""
    code = """if True:
        import torch
        from mor_kernels import ops
        from tests.ops.test_values import on_a_gpu
        silent = on_a_gpu()
        assert not silent, silent
        x, index = torch.ones(3, 2, device="cuda"), torch.tensor([2, -1], device="cuda")
        ops.gather(x, index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = ops.gather(x, index)
        graph.replay()
        print(rows.tolist())
    """
    environment = {**os.environ, "MOR_DEBUG": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[[1.0, 1.0], [0.0, 0.0]]", done.stderr


def between_canaries(shape, fill, device):
    """A tensor within a larger one of which the rest is to stay 7."""
    memory = torch.full((3, *shape), 7.0, device=device)
    memory[1] = fill
    return memory, memory[1]


@kernels("scatter_back")
def test_kernels_write_nothing_outside(device, backend):
    """For indices just outside, and far."""
    outside = torch.tensor([[1, 5, -7, 2**40], [4, -5, 9, 2**31]], device=device)
    none = torch.where((outside >= 0) & (outside < 5), outside, -1)
    update, gates = torch.ones(2, 4, 3, device=device), torch.ones(2, 4, device=device)
    for residual in ("block", "delta", "none"):
        results = []
        for index in (outside, none):
            memory, x = between_canaries((2, 5, 3), 1.0, device)
            ops.scatter_back_(x, update, index, gates, residual=residual, backend=backend)
            leaves = [t.clone().requires_grad_() for t in (x, update, gates)]
            out = ops.scatter_back(*leaves[:2], index, leaves[2], residual=residual, backend=backend)
            results.append([memory, out, *torch.autograd.grad(out.square().sum(), leaves)])
            assert (memory[::2] == 7).all()
        assert all(torch.equal(a, b) for a, b in zip(*results))
    slots = torch.tensor([3, 8, -9, 2**40], device=device)
    memories, caches = zip(*(between_canaries((2, 4, 2, 4), 1.0, device) for _ in range(2)))
    new = torch.zeros(4, 2, 4, device=device)
    ops.kv_append_(new, new, *caches, slots, backend=backend)
    assert all((m[::2] == 7).all() and (c == 0).sum() == 8 for m, c in zip(memories, caches))
    rows = torch.arange(10.0, device=device)[:, None].requires_grad_()
    picked = ops.gather(rows, torch.tensor([9, 10, -2, 2**40], device=device), backend=backend)
    assert picked[:, 0].tolist() == [9, 0, 0, 0]
    assert torch.autograd.grad(picked.sum(), rows)[0][:, 0].tolist() == [0] * 9 + [1]
