import sys, torch
sys.path.insert(0,'tests/emulator')
import emu_C
import mor_kernels
sys.modules['mor_kernels._C']=emu_C; mor_kernels._C=emu_C
torch.cuda.current_device=lambda:0
torch._C._cuda_getCurrentRawStream=lambda d:0
from mor_kernels.ops import _dispatch
from mor_kernels.ops.route import eager
OPS={'scatter_back','scatter_back_','scatter_back_backward','route','route_backward','gather','gather_backward'}
_dispatch._implementations['route']['cuda']=eager.route
orig=_dispatch.unavailable
def unavailable(backend,op=None,device=None,dtype=None):
    if backend=='cuda' and op in OPS and torch.device(device or 'cuda').type=='cpu':
        return 'fp64' if dtype==torch.float64 else None
    return orig(backend,op,device,dtype)
_dispatch.unavailable=unavailable
