"""The ahead-of-time gate (aot.py): the library passes, and what it is there to find doesn't."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(script):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    env.pop("TRITON_INTERPRET", None)  # under it kernels can't be compiled
    return subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)


def test_every_kernel_compiles_for_a100_and_h100_without_spills():
    finished = run(HERE / "aot.py")
    assert finished.returncode == 0, finished.stdout + finished.stderr


FAULTY = """
import dataclasses
import json

import torch
import triton
import triton.language as tl

import aot


@triton.jit
def spilling(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = x + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    rows = tl.load(at)
    tl.store(at, rows - tl.max(rows, 0)[None, :] / tl.sum(rows, 1)[:, None])


@triton.jit
def sharing(x, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    i, j = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    product = tl.dot(tl.load(x + i[:, None] * DEPTH + j[None, :]), tl.load(x + j[:, None] * SIZE + i[None, :]))
    tl.store(x + i[:, None] * SIZE + i[None, :], product.to(tl.float16))


@triton.jit
def helper(x):
    return tl.load(x).absent


@triton.jit
def broken(x):
    tl.store(x, helper(x))


@triton.jit
def sound(x):
    tl.store(x, 0.0)


@triton.jit
def never_launched(x):
    tl.store(x, 0.0)


def reads_a_value(x):
    sound[(int(x[0, 0]),)](x)


x, half = torch.empty(512, 512, device="meta"), torch.empty(512, 512, dtype=torch.float16, device="meta")
calls = {
    "spilling": lambda: spilling[(1,)](x, ROWS=128, WIDTH=256, num_warps=4),
    "sharing": lambda: sharing[(1,)](half, SIZE=128, DEPTH=512, num_warps=16),
    "broken": lambda: broken[(1,)](x),
    "sound": lambda: sound[(1,)](x),
    "again": lambda: sound[(1, 70000)](x),
    "waiting": lambda: reads_a_value(x),
}
builds, kernels, faults = aot.compile_launches(80, calls.items())
faults |= {fault for build in builds for fault in build.faults()}
forgotten = aot.forgotten([__import__("__main__")], kernels)
print(json.dumps([[dataclasses.asdict(build) for build in builds], sorted(faults), forgotten]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    script = tmp_path_factory.mktemp("aot") / "faulty.py"
    script.write_text(FAULTY)
    finished = run(script)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    builds, faults, forgotten = json.loads(finished.stdout)
    return {build["kernel"].removeprefix("__main__."): build for build in builds}, faults, forgotten


@pytest.mark.parametrize(
    "start, end",
    [
        ("__main__.spilling (fp32 ROWS=128 WIDTH=256 num_warps=4) on sm_80 spills registers: ", " loaded"),
        ("__main__.sharing (", " bytes of shared memory; a block has 166912"),
        ("__main__.broken (fp32) doesn't compile for sm_80: CompilationError: ", "no attribute 'absent'\")"),
        ("__main__.sound (fp32) has a grid of (1, 70000); ", "can be launched"),
        ("waiting: faulty.py:", "cannot be called on meta tensors"),
    ],
)
def test_a_fault_is_told(found, start, end):
    _, faults, _ = found
    assert [fault for fault in faults if fault.startswith(start) and fault.endswith(end)], faults


def test_nothing_else_is_told(found):
    builds, faults, forgotten = found
    assert len(faults) == 5
    assert forgotten == ["__main__.never_launched"]  # the helper was compiled into what calls it
    assert set(builds) == {"spilling", "sharing", "sound"}
    assert builds["sound"]["spills"] == [0, 0] and builds["sound"]["warps"] == 4
    assert builds["spilling"]["wide_loads"] > 0 and builds["sound"]["wide_loads"] == 0
