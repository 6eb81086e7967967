"""The operators: plain functions over registered ops, usable in any model.

Each compiles with ``torch.compile(fullgraph=True)`` and never waits for the device. Gradients are first derivatives of
reverse mode; to differentiate them again, forward mode and the transforms of ``torch.func`` are refused. A
``ValueError`` names the argument that doesn't fit, what was expected and what came; on the CPU the values of indices
are looked at too, and with ``MOR_DEBUG=1`` in the environment on a GPU, which is then waited for. ``backend=``
("eager", "triton", "cuda", and of attention "hopper", "cudnn" and "fa4"), or the environment variable ``MOR_BACKEND``,
names a backend, which is then used, or refused with a ``RuntimeError``. ``router_bias_update`` and the metrics are made
of PyTorch's own operators and have no backends. By default a GPU gets Triton's or the CUDA kernels, whichever were
measured to be faster, or a library that was; float64, and tensors on the CPU, get plain PyTorch.
"""

from .advance import Entering, Lanes, Leaving, advance_, enter_, leave
from .attention import attention, attention_varlen
from .decode_linear import decode_linear, decode_qkv_
from .depth_step import depth_step_
from .gather import gather
from .kv import kv_append, kv_append_, kv_lookup
from .linear_cross_entropy import linear_cross_entropy
from .losses import (
    aux_loss,
    balance_loss,
    dead_token_ratio,
    max_vio,
    router_bias_update,
    routing_entropy,
    sampling_accuracy,
    z_loss,
)
from .pack import Depths, Packed, choose_depths, pack_depths
from .paged_attention import attention_schedule, paged_attention
from .pages import Pages, Taken, commit_pages_, free_pages_, take_pages_
from .rms_norm import rms_norm, rms_norm_linear
from .rope import rope, rope_qkv
from .route import Routed, route
from .sample import sample
from .scatter_back import scatter_back, scatter_back_
from .swiglu import swiglu_linear

__all__ = [
    "Depths",
    "Entering",
    "Lanes",
    "Leaving",
    "Packed",
    "Pages",
    "Routed",
    "Taken",
    "advance_",
    "attention",
    "attention_schedule",
    "attention_varlen",
    "aux_loss",
    "balance_loss",
    "choose_depths",
    "commit_pages_",
    "dead_token_ratio",
    "decode_linear",
    "decode_qkv_",
    "depth_step_",
    "enter_",
    "free_pages_",
    "gather",
    "kv_append",
    "kv_append_",
    "kv_lookup",
    "leave",
    "linear_cross_entropy",
    "max_vio",
    "pack_depths",
    "paged_attention",
    "rms_norm",
    "rms_norm_linear",
    "rope",
    "rope_qkv",
    "route",
    "router_bias_update",
    "routing_entropy",
    "sample",
    "sampling_accuracy",
    "scatter_back",
    "scatter_back_",
    "swiglu_linear",
    "take_pages_",
    "z_loss",
]
