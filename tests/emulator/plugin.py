import sys, importlib.util, glob
sys.path.insert(0, ".")
spec = importlib.util.spec_from_file_location("_C", glob.glob("tests/emulator/_C*.so")[0])
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
import mor_kernels
sys.modules["mor_kernels._C"] = module
mor_kernels._C = module
from mor_kernels.ops import _dispatch, _cuda
OPS = ("attention_schedule", "paged_attention")
old = _dispatch.unavailable
def unavailable(backend, op=None, device=None, dtype=None):
    if backend == "cuda":
        import torch
        if dtype == torch.float64: return "float64"
        return None if op in OPS and str(device) == "cpu" else "no"
    return old(backend, op, device, dtype)
_dispatch.unavailable = unavailable
_dispatch._cached = unavailable
def launch(function, *arguments):
    function(*map(_cuda._plain, arguments), 0)
_cuda.launch = launch
import tests.strategies as s
s.unavailable = unavailable
