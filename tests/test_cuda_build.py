"""What ptxas reports of the CUDA kernels, without a GPU: csrc/report.sh keeps it beside each object."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools import toolchain

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / f"build/cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}/CMakeFiles/kernels.dir/csrc"

ANY_BLOCK = 64  # registers a thread with which a block of 1024 threads can be launched: a multiprocessor has 65536
SHARED = 48 * 1024  # bytes a block may have without asking for more
# Registers a thread, by the first expression found in a kernel's demangled name: today's, as they are handed out,
# by eight. More of them are fewer blocks at once on a multiprocessor, so measure before you raise one.
LIMITS = {
    r"^append": 88,
    r"^decode_linear": 128,  # two blocks of 256 threads: this kernel's and the next one's
    r"^depth_step|^rope|^route_backward|^scatter_back_backward": 80,
    r"^empty|^gather|^invert|^lookup_kernel|^merge|^sum_partials": 32,
    r"^lookup_backward": 48,
    r"^scatter_back": 72,
    r"^route|^sample": 64,
    # as many blocks of 128 threads as Setting::kBlocks says: five, four, two, or three
    r"^paged_attention_kernel<Setting<(__half|__nv_bfloat16), 64, 1,": 96,
    r"^paged_attention_kernel<Setting<unsigned char, 64, 1,": 128,
    r"^paged_attention_kernel<Setting<(unsigned char, 128, 2|unsigned char, 256|float, 256),": 256,
    r"^paged_attention": 168,
    r"": 128,  # what isn't named: 512 threads at once
}


@dataclasses.dataclass
class Kernel:
    """One kernel as compiled for one architecture."""

    name: str  # mangled
    architecture: str
    registers: int = 0
    stack: int = 0  # bytes, as what follows
    spills: int = 0  # stored and loaded
    shared: int = 0  # static

    def faults(self, readable: str, bounded: bool, limits=LIMITS) -> list[str]:
        """What is wrong with it; ``bounded`` tells that it has __launch_bounds__, to which ptxas holds itself."""
        limit = next(registers for pattern, registers in limits.items() if re.search(pattern, readable))
        faults = []
        if self.spills:
            faults.append(f"spills registers: {self.spills} bytes")
        if self.stack:
            faults.append(f"has a stack frame of {self.stack} bytes")
        if self.registers > limit:
            faults.append(f"takes {self.registers} registers, more than {limit}")
        if not bounded and self.registers > ANY_BLOCK:
            faults.append(f"takes {self.registers} registers and has no __launch_bounds__: 1024 threads won't launch")
        if self.shared > SHARED:
            faults.append(f"has {self.shared} bytes of static shared memory")
        return [f"{readable} on sm_{self.architecture} {fault}" for fault in faults]


def parse(text: str) -> tuple[list[Kernel], list[str]]:
    """The kernels of a report, and its lines that warn."""
    kernels, warnings = [], []
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            kernels.append(Kernel(*found.groups()))
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stored, loaded = map(int, found.groups())  # its own, or of a function that it calls
            kernels[-1].stack += stack
            kernels[-1].spills += stored + loaded
        elif found := re.search(r"Used (\d+) registers", line):
            kernels[-1].registers = int(found[1])
            kernels[-1].shared = int((re.search(r"(\d+) bytes smem", line) or [0, 0])[1])
        elif re.search("warning|Performance Loss", line, re.IGNORECASE):
            warnings.append(line)
    return kernels, warnings


def readable(names: list[str]) -> list[str]:
    """Demangled, without the parameters, where there is c++filt."""
    if not shutil.which("c++filt"):
        return names
    plain = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"^void |mor::|\(anonymous namespace\)::", "", name) for name in plain.splitlines()]


def declared() -> dict[str, bool]:
    """The name of each kernel in csrc/, and whether it has __launch_bounds__."""
    kernel = re.compile(r"__global__\s+void\s+(__launch_bounds__\s*\(.*?\)\s*)?(\w+)\s*\(", re.DOTALL)
    sources = [path.read_text() for path in ROOT.glob("csrc/*.cu*")]
    return {name: bool(bounds) for source in sources for bounds, name in kernel.findall(source)}


def mangled(name: str, symbol: str) -> bool:
    return f"{len(name)}{name}" in symbol


def faults(kernels: list[Kernel], sources: dict[str, bool], architectures: set[str]) -> list[str]:
    """What is wrong with the kernels that were compiled, or missing among them."""
    found = []
    for kernel, name in zip(kernels, readable([kernel.name for kernel in kernels])):
        bounded = any(bounds for source, bounds in sources.items() if mangled(source, kernel.name))
        found += kernel.faults(name, bounded)
    for architecture in sorted(architectures):
        names = [kernel.name for kernel in kernels if kernel.architecture == architecture]
        absent = [source for source in sources if not any(mangled(source, name) for name in names)]
        found += [f"{source} was not compiled for sm_{architecture}" for source in absent]
    return found


@pytest.fixture(scope="module")
def extension():
    if importlib.util.find_spec("mor_kernels._C") and REPORTS.exists():
        return importlib.import_module("mor_kernels._C")
    reason = "MOR_CUDA=0" if toolchain.choice() == "0" else toolchain.no_nvcc()
    if reason is None:
        pytest.fail("there is nvcc, and yet the CUDA kernels are not built: make env")
    pytest.skip(f"the CUDA kernels are not built here: {reason}")


def test_every_kernel_compiles_for_a100_and_h100_without_spills(extension):
    architectures = {name.partition("-")[0] for name in extension.architectures.split()}
    kernels, found = [], []
    for source in ROOT.glob("csrc/*.cu"):
        compiled, warnings = parse((REPORTS / f"{source.name}.o.txt").read_text())
        kernels += compiled
        found += [f"{source.name}: {line}" for line in warnings]
    found += faults(kernels, declared(), architectures)
    assert not found, "\n".join(found)


REPORT = """\
/csrc/sample.cu(3): warning #177-D: variable "unused" was declared but never referenced
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3mor12sound_kernelIfLi4EEEvPKT_' for 'sm_80'
ptxas info    : Function properties for _ZN3mor12sound_kernelIfLi4EEEvPKT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 49152 bytes smem, 404 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN3mor11full_kernelEv' for 'sm_80'
ptxas info    : Function properties for _ZN3mor11full_kernelEv
    40 bytes stack frame, 36 bytes spill stores, 28 bytes spill loads
ptxas info    : Function properties for _ZN3mor6calledEv
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 65536 bytes smem
ptxas info    : Compile time = 1.051 ms
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call
ptxas info    : Compiling entry function '_ZN3mor12sound_kernelIfLi4EEEvPKT_' for 'sm_90a'
ptxas info    : Function properties for _ZN3mor12sound_kernelIfLi4EEEvPKT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 0 barriers
"""


def test_a_fault_is_told():
    kernels, warnings = parse(REPORT)
    assert kernels[:2] == [
        Kernel("_ZN3mor12sound_kernelIfLi4EEEvPKT_", "80", 32, 0, 0, 49152),
        Kernel("_ZN3mor11full_kernelEv", "80", 255, 48, 64, 65536),
    ]
    assert [line.partition(": ")[2][:10] for line in warnings] == ["warning #1", "(C7510) Po"]
    full, sound = readable([kernels[1].name, kernels[2].name])
    assert faults(kernels, {"full_kernel": True, "sound_kernel": False, "lost_kernel": True}, {"80", "90a"}) == [
        f"{full} on sm_80 spills registers: 64 bytes",
        f"{full} on sm_80 has a stack frame of 48 bytes",
        f"{full} on sm_80 takes 255 registers, more than 128",
        f"{full} on sm_80 has 65536 bytes of static shared memory",
        f"{sound} on sm_90a takes 80 registers and has no __launch_bounds__: 1024 threads won't launch",
        "lost_kernel was not compiled for sm_80",
        "full_kernel was not compiled for sm_90a",
        "lost_kernel was not compiled for sm_90a",
    ]
    assert not faults(kernels[:1], {"sound_kernel": False}, {"80"})


def test_the_first_limit_that_names_a_kernel_holds():
    kernel = Kernel("attend", "80", 100)
    assert kernel.faults("attend<float, 64>", True, {"attend<.*64>": 96, "attend": 128, "": 32})
    assert not kernel.faults("attend<float, 128>", True, {"attend<.*64>": 96, "attend": 128, "": 32})
