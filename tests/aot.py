"""Run as a script: compile the library's Triton kernels for A100 and H100 on a machine that needs no GPU, and fail on
what would make them slow or unlaunchable there: a spill, a stack frame, too much shared memory.

    make aot                # the installed Triton
    make aot TRITON=3.6.0   # another one: which registers spill depends on the compiler

Nothing here lists kernels or their settings: the library's own launchers run, on tensors that have a shape and a dtype
but no memory, and every launch is compiled in place of being made. A scenario (:func:`scenarios`) is a call of an op; a
kernel that no scenario reaches fails the gate.

ptxas may spill a few bytes of its own accord, to fit one block more on a multiprocessor: registers are then at the most
that so many blocks can have (72, 96, 128, 168 for 128 threads), far from the 255 that a thread can.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from mor_kernels import ops
from mor_kernels.ops import _dispatch
from mor_kernels.ops.attention._triton import block_lists

# Dynamic shared memory of a block, and of all blocks on a multiprocessor, in bytes (CUDA programming guide).
SHARED = {80: (163 * 1024, 164 * 1024), 90: (227 * 1024, 228 * 1024)}
GRID = (2**31 - 1, 65535, 65535)

# Kernels that may have a stack frame (an array indexed by a value that isn't known when compiling), and its bytes.
STACK_FRAMES: dict[str, int] = {}

# Launches (kernel and setting) that may spill, and how many bytes, stored and loaded; the first that fits counts.
SPILLS = {
    r"^attention\..*\(fp32.*BLOCK_D=128": 640,  # three products of tf32 a tile: for accuracy, not for speed
    r"^attention\.": 384,  # at the limit of registers, and measured faster than smaller tiles, which don't spill
    r"^paged_attention\.": 24,  # of ptxas's own accord
}

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.bool: "b1"}
SHORT[torch.uint8] = "u8"

# (width, dtype) of hidden states; ROUTED: of routing, which takes longest to compile, fewer.
STREAMS = [(width, BF16) for width in (64, 576, 960, 1001, 1536, 2048, 4096, 10000)]
STREAMS += [(64, FP32), (960, FP32), (4096, FP32), (10000, FP32), (576, FP16)]
ROUTED = [(width, BF16) for width in (64, 960, 1001, 1536, 4096, 10000)] + [(4096, FP32), (576, FP16)]
# head width, dtype, heads of queries and of keys
ATTENTION = [
    (64, BF16, 15, 5),
    (32, BF16, 8, 8),
    (96, FP16, 14, 2),
    (256, BF16, 8, 2),
    (64, FP32, 15, 5),
    (128, FP32, 16, 8),
]
B, N, K = 4, 2048, 1024


def floats(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scenarios() -> Iterator[Callable]:
    """Calls of the ops that together launch every kernel at every setting in use; each is differentiated as well.

    What doesn't change the code that is compiled (B, and mostly N and k) doesn't vary, and what takes long to compile
    varies in one respect at a time.
    """
    for width, dtype in STREAMS:
        x, update = floats(B, N, width, dtype=dtype), floats(B, K, width, dtype=dtype)
        yield partial(ops.gather, x.flatten(0, 1), whole(B * K))
        yield partial(ops.scatter_back, x, update, whole(B, K), floats(B, K))
    yield partial(ops.gather, floats(576, B * N, dtype=BF16).T, whole(B * K))
    x, update = floats(B, N, 960, dtype=BF16), floats(B, K, 960, dtype=BF16)
    for residual in ("block", "delta", "none"):
        yield partial(ops.scatter_back, x, update, whole(B, K), residual=residual)
        yield partial(ops.scatter_back, x, update, whole(B, K), floats(B, K), residual=residual)
        yield partial(ops.scatter_back_, x.detach(), update.detach(), whole(B, K), residual=residual)
    yield partial(ops.scatter_back_, x.detach(), update.detach(), whole(B, K), floats(B, K).detach())
    for width, dtype in ROUTED:
        state, routers = floats(N, width, dtype=dtype).detach(), floats(3, width, dtype=dtype).detach()
        flight = (state, state, floats(N).detach(), whole(N), routers)
        yield partial(ops.depth_step_, *flight, last=whole(N), replayed=whole(N, dtype=torch.bool))
    for activation, residual in (("tanh", "delta"), ("none", "none")):
        options = {"activation": activation, "residual": residual, "aux_weight": routers}
        yield partial(ops.depth_step_, *flight, **options)

    for width, dtype in ROUTED:
        yield partial(ops.route, floats(B, N, width, dtype=dtype), floats(width, dtype=dtype), K)
    weight, among = floats(960, dtype=BF16), {"candidates": whole(B, K), "seqlens": whole(B)}
    yield partial(ops.route, x, floats(960), K)
    yield partial(ops.route, x, weight, K // 2, **among)
    yield partial(ops.route, x, weight, K, indices=whole(B, K))
    yield partial(ops.route, x, weight, K // 2, indices=whole(B, K // 2), **among)
    yield partial(ops.route, x, None, K, logits=floats(B, N))
    yield partial(ops.route, x, weight, K, activation="none")
    yield partial(ops.route, x, weight, K, activation="tanh", rank="score")
    for length in (16384, 131072):
        yield partial(ops.route, floats(B, length, 960, dtype=BF16), weight, length // 2)
    among = {"candidates": whole(B, length // 2), "seqlens": whole(B)}
    yield partial(ops.route, floats(B, length, 960, dtype=BF16), weight, length // 4, **among)

    for experts, dtype in ((3, FP32), (4, BF16)):
        logits, valid = floats(B, N, experts, dtype=dtype), whole(B, N, dtype=torch.bool)
        yield partial(ops.pack_depths, whole(B, N), experts)
        yield partial(ops.choose_depths, logits, bias=floats(experts), valid=valid)
        yield partial(ops.choose_depths, logits, activation="sigmoid")
        yield partial(ops.z_loss, logits, valid=valid)
        yield partial(ops.balance_loss, floats(B, N, experts), whole(B, N))
    yield partial(ops.pack_depths, whole(B, N, dtype=torch.int32), experts)
    yield partial(ops.balance_loss, floats(B, N, experts), whole(B, N), scope="batch")
    yield partial(ops.z_loss, floats(B, N))
    yield partial(ops.aux_loss, floats(B, N), whole(B, K))
    yield partial(ops.aux_loss, floats(B, K), whole(B, K // 2), candidates=whole(B, K), seqlens=whole(B))

    for width, dtype, heads, groups in ATTENTION:
        q, (k, v) = (
            floats(B, K, heads, width, dtype=dtype),
            (floats(B, N, groups, width, dtype=dtype) for _ in range(2)),
        )
        yield partial(ops.attention, q, k, v, q_positions=whole(B, K))
    q, (k, v) = floats(B, K, 15, 64, dtype=BF16), floats(B, K, 2, 5, 64, dtype=BF16).unbind(2)
    yield partial(ops.attention, q, k, v, q_lens=whole(B), k_lens=whole(B))
    yield partial(ops.attention, q, k, v, q_positions=whole(B, K), k_fresh=k[:, :K], v_fresh=v[:, :K])
    lengths = whole(B + 1, dtype=torch.int32)
    packed = (t.flatten(0, 1) for t in (q, k, v))
    yield partial(ops.attention_varlen, *packed, lengths, lengths, K, K, return_lse=True)
    for by_keys in (False, True):
        yield partial(block_lists, whole(B, K, dtype=torch.int32), N, by_keys)

    for width, dtype, heads, groups in ATTENTION:
        q, k = (floats(B, N, n, width, dtype=dtype) for n in (heads, groups))
        yield partial(ops.rope, (q, k), whole(B, N))
        yield partial(ops.rope, q, whole(B, N, dtype=torch.int32))
    fused = floats(B, N, 25 * 64, dtype=BF16).unflatten(-1, (25, 64))
    yield partial(ops.rope, fused.split([15, 5, 5], dim=2)[:2], whole(N).expand(B, N))
    yield partial(ops.rope_qkv, fused, 15, whole(B, N))
    yield partial(ops.rope, floats(B, 15, N, 64, dtype=BF16).transpose(1, 2), whole(B, N))
    for width in (2, 10):
        yield partial(ops.rope, floats(B * N, 1, width), whole(B * N))

    for width, dtype in ((2560, BF16), (1000, BF16), (1001, BF16), (24, BF16), (1536, FP16), (2560, FP32), (77, FP32)):
        yield partial(ops.swiglu_linear, floats(B, N, 2 * width, dtype=dtype), floats(64, width, dtype=dtype))

    for width, dtype in ((960, BF16), (8192, BF16), (1001, BF16), (576, FP16), (77, FP32)):
        x, gains, weight = (floats(*shape, dtype=dtype) for shape in ((B, N, width), (width,), (64, width)))
        for add in (None, x):
            yield partial(ops.rms_norm_linear, x, gains, weight, add=add)
        yield partial(ops.rms_norm, x, gains, add=x)

    for size, dtype in ((49152, BF16), (50257, BF16), (49152, FP16), (1000, FP32), (17, FP32)):
        x, weight = floats(B * N, 64, dtype=dtype), floats(size, 64, dtype=dtype)
        yield partial(ops.linear_cross_entropy, x, weight, whole(B * N))
    yield partial(ops.linear_cross_entropy, x.detach(), weight.detach(), whole(B * N))
    x, weight = floats(B * N, 64, dtype=BF16).detach(), floats(49152, 64, dtype=BF16).detach()
    yield partial(ops.linear_cross_entropy, x, weight, whole(B * N))

    table, offsets, lens = (whole(*size, dtype=torch.int32) for size in ((B, 128), (B + 1,), (B,)))
    for width, dtype, heads, groups in (ATTENTION[0], ATTENTION[3], ATTENTION[4]):
        q, new = floats(B, heads, width, dtype=dtype).detach(), floats(B, groups, width, dtype=dtype).detach()
        cache = floats(1000, 16, groups, width, dtype=dtype).detach()
        yield partial(ops.paged_attention, q, cache, cache, table, lens)
        yield partial(ops.attention_schedule, lens, heads, groups, B, k_cache=cache)
        yield partial(ops.kv_append_, new, new, cache, cache, whole(B), positions=whole(B), q=q)
    for width, dtype, heads, groups in ATTENTION[:1]:
        q, new = floats(B, heads, width, dtype=dtype).detach(), floats(B, groups, width, dtype=dtype).detach()
        cache, scale = whole(1000, 16, groups, width, dtype=torch.float8_e4m3fn), floats(groups).detach()
        scales = {"k_scale": scale, "v_scale": scale}
        yield partial(ops.paged_attention, q, cache, cache, table, lens, **scales)
        yield partial(ops.kv_append_, new, new, cache, cache, whole(B), positions=whole(B), q=q, **scales)
        yield partial(ops.kv_lookup, cache, cache, table, offsets, 4096)
        new, old = floats(B, groups, width, dtype=dtype), floats(1000, 16, groups, width, dtype=dtype)
        yield partial(ops.kv_append, new, new, old, old, whole(B))
        yield partial(ops.kv_lookup, old, old, table, offsets, 4096)
    yield partial(ops.kv_append_, new.detach(), new.detach(), old.detach(), old.detach(), whole(B))
    shapes = (B, 960), (5120, 960), (960,), (1000, 16, 5, 64)
    few, weight, gain, cache = (floats(*shape, dtype=BF16).detach() for shape in shapes)
    yield partial(ops.decode_linear, few, weight, norm_weight=gain, gated=True)
    yield partial(ops.decode_linear, few, weight[:960], residual=few, next_norm_weight=gain)
    yield partial(ops.decode_linear, few, weight, squares=whole(B, 30, dtype=torch.float32), gated=True)
    heads = {"heads": 15, "positions": whole(B), "norm_weight": gain}
    yield partial(ops.decode_qkv_, few, weight[:1600], cache, cache, whole(B), **heads)
    q, cache = floats(512, 15, 64, dtype=BF16).detach(), floats(1000, 16, 5, 64, dtype=BF16).detach()
    ragged = {"rows": whole(32), "cu_seqlens_q": whole(33, dtype=torch.int32), "q_positions": whole(512)}
    yield partial(ops.paged_attention, q, cache, cache, table, whole(32, dtype=torch.int32), **ragged)
    pages = ops.Pages(whole(B), whole(B), table, whole(1000, dtype=torch.int32), whole())
    yield partial(ops.take_pages_, pages, whole(B), offsets, N, 16)
    yield partial(ops.commit_pages_, pages, whole(B), offsets)
    yield partial(ops.free_pages_, pages, whole(B))
    lanes, record = ops.Lanes(whole(17, B), whole(2, B, dtype=torch.int32), whole()), whole(8, B, 3)
    for shared in (False, True):
        rows = B if shared else 3 * B
        block = pages._replace(lengths=whole(rows), owned=whole(rows), page_table=whole(rows, 8, dtype=torch.int32))
        rest = block, None if shared else pages, 3, 16
        x = floats(B, 960, dtype=BF16).detach()
        router = None if shared else (floats(B).detach(), floats(960, dtype=BF16).detach())
        yield partial(ops.enter_, x, x, whole(B), *(router or ()))
        at = whole(B) if shared else None
        yield partial(ops.advance_, whole(B), whole(B) > 0, at, lanes, record, *rest, shared=shared)
        yield partial(ops.leave, whole(B) > 0, lanes, x, 32)


def for_hopper() -> Iterator[Callable]:
    """Calls of the functions behind ``backend="hopper"``, forward and backward: what Triton before 3.6 doesn't have."""
    hopper = importlib.import_module("mor_kernels.ops.attention.hopper")
    settings = (64, BF16, 15, 5, whole(B, K)), (64, FP16, 15, 5, whole(B, K)), (128, FP16, 16, 8, None)
    for width, dtype, heads, groups, positions in settings:
        q, (k, v) = floats(B, K, heads, width, dtype=dtype), (floats(B, N, groups, width, dtype=dtype) for _ in "kv")
        statistic, rest = floats(B, heads, K), (positions, None, None, width**-0.5)
        yield partial(hopper.attention, q, k, v, None, None, *rest)
        yield partial(hopper.attention_backward, q, statistic, q, k, v, None, None, q, statistic, *rest)
    yield partial(hopper.attention, q[:, :64], k, v, None, None, *rest)  # a forward with one item a program
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    statistic, rest = floats(heads, B * K), (whole(B + 1, dtype=torch.int32),) * 2 + (K, N, None, 1.0)
    yield partial(hopper.attention_varlen, q, k, v, None, None, *rest)
    yield partial(hopper.attention_varlen_backward, q, None, q, k, v, None, None, q, statistic, *rest)


class StandIn(DriverBase):
    """What compiling asks of a driver."""

    def __init__(self, arch: int):
        self.arch = arch

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, type):
        return type

    def get_benchmarker(self):
        raise NotImplementedError("no settings are chosen by measuring: there is no GPU")


@dataclasses.dataclass
class Build:
    """One kernel, compiled for one architecture at one launch setting."""

    kernel: str
    setting: str
    arch: int
    registers: int
    stack: int
    spills: tuple[int, int]  # bytes stored, bytes loaded
    shared: int
    warps: int
    wide_loads: int  # 16-byte loads from global memory in the code
    serialized: bool  # ptxas waits after each wgmma

    def occupancy(self) -> int:
        """Warps that fit a multiprocessor: of 64, as registers and shared memory allow, in whole blocks."""
        by_registers = 65536 // (32 * max(-(-self.registers // 8) * 8, 8)) // self.warps
        by_shared = SHARED[self.arch][1] // (self.shared + 1024)
        return self.warps * min(64 // self.warps, 32, by_registers, by_shared)

    def may_spill(self) -> int:
        return next((n for what, n in SPILLS.items() if re.search(what, f"{self.kernel} ({self.setting})")), 0)

    def faults(self) -> list[str]:
        limit = SHARED[self.arch][0]
        found = []
        if sum(self.spills) > self.may_spill():
            found.append(f"spills registers: {self.spills[0]} bytes stored, {self.spills[1]} loaded")
        elif not any(self.spills) and self.stack > STACK_FRAMES.get(self.kernel, 0):
            found.append(f"has a stack frame of {self.stack} bytes")
        if self.shared > limit:
            found.append(f"takes {self.shared} bytes of shared memory; a block has {limit}")
        if self.serialized:
            found.append("has its wgmma instructions serialized by ptxas")
        return [f"{self.kernel} ({self.setting}) on sm_{self.arch} {fault}" for fault in found]


def name_of(kernel: JITFunction) -> str:
    module = kernel.fn.__module__.removeprefix("mor_kernels.ops.").removesuffix(".triton")
    return f"{module}.{kernel.fn.__name__}"


def setting_of(kernel: JITFunction, args: tuple, options: dict) -> str:
    """What the compiled code depends on: types, specialised integers, constants, options."""
    names = [parameter.name for parameter in kernel.params]
    values = {**dict(zip(names, args)), **options}
    types, others = [], []
    for parameter in kernel.params:
        value = values.pop(parameter.name, None)
        if parameter.is_constexpr or isinstance(value, int) and not parameter.do_not_specialize:
            others.append(f"{parameter.name}={value:.4g}" if isinstance(value, float) else f"{parameter.name}={value}")
        elif value is None or isinstance(value, torch.Tensor):
            types.append("-" if value is None else SHORT[value.dtype])
    return " ".join([",".join(types), *others, *(f"{name}={value}" for name, value in values.items())])


def inspect(name: str, setting: str, arch: int, compiled, log: str) -> Build:
    """What ptxas said of a kernel (of all its functions), and what its PTX shows."""
    ptx = compiled.asm["ptx"]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, stores, loads = (max(map(int, column)) for column in zip(*frames))
    return Build(
        kernel=name,
        setting=setting,
        arch=arch,
        registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
        stack=stack,
        spills=(stores, loads),
        shared=compiled.metadata.shared,
        warps=int(re.search(r"\.(?:req|max)ntid (\d+)", ptx)[1]) // 32,
        wide_loads=len(
            re.findall(r"\bld\.global[\w.:]*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)|\bcp\.async\.cg\.", ptx)
        ),
        serialized="wgmma.mma_async instructions are serialized" in log,
    )


def compile_launches(
    arch: int, calls: Iterable[tuple[str, Callable]]
) -> tuple[list[Build], set[JITFunction], set[str]]:
    """Make the calls, each with a name, and compile what they launch: the builds, the kernels, what failed.

    Each process serves one architecture, since Triton keeps what it compiled by the number of the device.
    """
    builds, kernels, faults, logs, known = [], set(), set(), [], {}
    compile_or_launch, run_tool = JITFunction.run, subprocess.run

    def run_and_log(command, **options):
        finished = run_tool(command, **options)
        if "ptxas" in Path(command[0]).name and hasattr(
            options.get("stderr"), "name"
        ):  # Triton deletes the file after this call
            logs.append(Path(options["stderr"].name).read_text())
        return finished

    def compile_only(kernel, *args, grid, warmup, **options):
        name, setting = name_of(kernel), setting_of(kernel, args, options)
        kernels.add(kernel)
        if any(not 0 < n <= most for n, most in zip(grid, GRID)):
            faults.add(f"{name} ({setting}) has a grid of {grid}; at most {GRID} can be launched")
        logs.clear()
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # where Triton writes the PTX that ptxas refused
                compiled = compile_or_launch(kernel, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            cause = error.__cause__ or error  # inside a function that the kernel calls
            faults.add(
                f"{name} ({setting}) doesn't compile for sm_{arch}: {type(cause).__name__}: {str(cause)[-2000:]}"
            )
            return
        if id(compiled) not in known:
            known[id(compiled)] = compiled  # kept, so that no other has its id
            builds.append(inspect(name, setting, arch, compiled, "\n".join(logs)))

    triton.runtime.driver.set_active(StandIn(arch))
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())  # ptxas must run: what it says is in no cache
        environment = {"TRITON_CACHE_DIR": cache, "TRITON_ALWAYS_COMPILE": "1"}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(subprocess, "run", run_and_log))
        for name, call in calls:
            try:
                call()
            except Exception as error:
                *_, at = (f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename)
                where = f"{Path(at.filename).name}:{at.lineno}"
                faults.add(f"{name}: {where} fails on tensors without memory: {type(error).__name__}: {error}")
    return builds, kernels, faults


def forgotten(modules: Iterable[ModuleType], launched: set[JITFunction]) -> list[str]:
    """Triton functions of the modules that were neither launched nor are called from any that was."""
    reached = set()
    waiting = list(launched)
    while waiting:
        function = waiting.pop()
        if function not in reached:
            reached.add(function)
            used = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
            waiting += [other for other in used if isinstance(other, JITFunction)]
    defined = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
    return sorted(name_of(function) for function in defined - reached)


class TritonOnly(TorchDispatchMode):
    """Ops of the library run their Triton implementation, if they have one, whatever the device."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix(f"{_dispatch.NAMESPACE}::")
        implementation = _dispatch._implementations.get(name, {}).get("triton")
        if implementation is None:
            return function(*args, **(kwargs or {}))
        self.ran.add(name)
        return implementation(*args[:-1])


def differentiate(call: Callable) -> None:
    outputs = call()
    outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None and t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def kernel_modules(names: Iterable[str]) -> list[ModuleType]:
    found = pkgutil.walk_packages(ops.__path__, "mor_kernels.ops.")
    return [importlib.import_module(m.name) for m in found if m.name.rpartition(".")[2] in names]


def gate(arch: int) -> tuple[list[Build], set[str]]:
    """The scenarios on one architecture: the builds and what is wrong."""
    gc.disable()  # of what is kept there is little garbage, and looking for it takes a twentieth of the time
    calls = [(call.func.__name__, partial(differentiate, call)) for call in scenarios()]
    names = ["triton", "_triton"]
    if arch == 90 and tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6):
        calls += [(f"hopper.{call.func.__name__}", call) for call in for_hopper()]
        names.append("hopper")
    with TritonOnly() as mode:
        builds, kernels, faults = compile_launches(arch, calls)
    faults |= {fault for build in builds for fault in build.faults()}
    ops_there = {
        name
        for name, backends in _dispatch._implementations.items()
        if backends.get("triton") not in (None, backends.get("eager"))  # or it has no kernel
    }
    missing = [*(ops_there - mode.ran), *forgotten(kernel_modules(names), kernels)]
    faults |= {f"{name} has a Triton implementation that no scenario in {Path(__file__).name} runs" for name in missing}
    return builds, faults


def table(builds: list[Build]) -> str:
    lines = [("kernel", "sm", "registers", "spilled", "shared", "warps/SM", "16-byte loads", "setting")]
    for b in sorted(builds, key=lambda b: (b.kernel, b.setting, b.arch)):
        lines.append((b.kernel, b.arch, b.registers, sum(b.spills), b.shared, b.occupancy(), b.wide_loads, b.setting))
    first = max(len(kernel) for kernel, *_ in lines)
    return "\n".join(
        "  ".join([kernel.ljust(first), *(str(n).rjust(len(head)) for n, head in zip(numbers, lines[0][1:])), setting])
        for kernel, *numbers, setting in lines
    )


def main() -> int:
    print(f"Triton {triton.__version__}, torch {torch.__version__}", flush=True)
    os.environ.pop("TRITON_INTERPRET", None)  # under it kernels can't be compiled; the processes below start anew
    with concurrent.futures.ProcessPoolExecutor(len(SHARED), multiprocessing.get_context("spawn")) as processes:
        results = list(processes.map(gate, SHARED))
    builds = [build for found, _ in results for build in found]
    faults = sorted(set().union(*(found for _, found in results)))
    print(table(builds))
    print(f"{len(builds)} builds, {len(faults)} faults", *faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
