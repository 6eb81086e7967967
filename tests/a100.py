"""A pytest plugin: on a newer GPU, the code that an A100 gets.

    python -m pytest -p tests.a100 tests/ops tests/decode -k cuda

Triton compiles for an A100, whose shared memory is the most that a block gets, and ptxas makes code for this GPU of the
PTX; specialists for Hopper aren't there. The CUDA kernels of an A100 are those of a build with MOR_CUDA_ARCHS set to
80-virtual, which the driver compiles when they are first called; other builds have this GPU's own.
"""

from __future__ import annotations

import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler

SHARED = 163 * 1024  # bytes that a block may ask for
properties_of = torch.cuda.get_device_properties  # get_device_capability, and so Triton's driver, asks it
make_cubin, hash_of = CUDABackend.make_cubin, CUDABackend.hash
major, minor = torch.cuda.get_device_capability()


class A100:
    """Properties of the GPU that is there, with these in their place."""

    major, minor, multi_processor_count = 8, 0, 108

    def __init__(self, properties):
        self.properties = properties

    def __getattr__(self, name):
        return getattr(self.properties, name)


torch.cuda.get_device_properties = lambda *device: A100(properties_of(*device))
compiler.max_shared_mem = lambda device: SHARED
CUDABackend.make_cubin = lambda self, ptx, metadata, options, capability: make_cubin(
    self, ptx, metadata, options, 10 * major + minor
)
CUDABackend.hash = lambda self: f"{hash_of(self)}, for {major}.{minor}"  # of what is kept on disk
