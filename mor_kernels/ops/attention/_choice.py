"""What each backend of attention takes, and which is the fastest."""

from __future__ import annotations

import torch

HALVES = (torch.bfloat16, torch.float16)


def _forward_of(arguments):
    """The arguments of the forward, from those of the backward."""
    return arguments[2:7] + arguments[9:]


def triton_refuses(first, *_):
    """Tiles of keys, values and sums of whole heads must fit a multiprocessor's registers."""
    widest = 128 if first.dtype == torch.float32 else 256
    return (
        None
        if first.shape[-1] <= widest
        else f"it takes {first.dtype} heads of width up to {widest}, not {first.shape[-1]}"
    )


def _hopper_refuses(q, k_fresh, scale):
    if k_fresh is not None:
        return "it takes no fresh keys and values"
    if q.shape[-1] not in (64, 128):
        return f"it takes heads of width 64 and 128, not {q.shape[-1]}"
    return _computation_refused(q, scale)


def hopper_refuses(q, k, v, k_fresh, *rest):
    return _hopper_refuses(q, k_fresh, rest[-1])


def hopper_refuses_backward(d_out, d_lse, q, k, v, k_fresh, *rest):
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "it adds up d_q in any order, and deterministic algorithms were asked for"
    return _hopper_refuses(q, k_fresh, rest[-1])


def _computation_refused(q, scale):
    if q.dtype not in HALVES:
        return f"it computes in bfloat16 and float16, not {q.dtype}"
    if scale <= 0:
        return f"it takes a softmax_scale > 0, not {scale}"
    return None


def _library_refuses(q, k, v, scale):
    if reason := _computation_refused(q, scale):
        return reason
    if q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"it takes heads of width up to 128 that are multiples of 8, not {q.shape[-1]}"
    if q.numel() == 0:
        return "there is nothing to compute"
    for t in (q, k, v):
        if t.stride(-1) != 1 or t.data_ptr() % 16 or any(n * t.element_size() % 16 for n in t.stride()[:-1]):
            return "it reads 16 bytes at once, which must lie together and begin at a multiple of 16"
    return None


def cudnn_refuses(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale):
    if not _plain(q, k, q_positions, q_lens, k_lens):
        return "it takes as many queries as keys, causal by their index, without positions and lengths"
    return _library_refuses(q, k, v, scale)


def cudnn_refuses_backward(d_out, d_lse, *arguments):
    if d_lse is not None:
        return "it has no gradient of the log-sum-exp"
    return cudnn_refuses(*_forward_of((d_out, d_lse, *arguments)))


def fa4_refuses(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale):
    if k_fresh is not None:
        return "it takes no fresh keys and values"
    if (
        q_positions is None
        and not _plain(q, k, q_positions, q_lens, k_lens)
        or q_lens is not None
        or k_lens is not None
    ):
        return "it takes positions or as many queries as keys, causal by their index, and no lengths"
    return "it has no keys" if k.numel() == 0 else _library_refuses(q, k, v, scale)


def fa4_refuses_backward(*arguments):
    return fa4_refuses(*_forward_of(arguments))


def fa4_refuses_varlen(q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, *rest):
    *_, q_positions, scale = rest
    if q_positions is not None or cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr():
        return "it takes one tensor of cu_seqlens for queries and keys, and no positions"
    return _library_refuses(q, k, v, scale)


def fa4_refuses_varlen_backward(*arguments):
    return fa4_refuses_varlen(*_forward_of(arguments))


def _plain(q, k, q_positions, q_lens, k_lens):
    return q_positions is None and q_lens is None and k_lens is None and q.shape[1] == k.shape[1]


# From how many keys of a sequence on a specialist is faster than Triton on an H100 (torch 2.11 with its cuDNN, Triton
# 3.6, flash-attn-4 4.0.0b15), the fastest first; by what is computed, direction, and widths up to 64 or 128. Beside it,
# in ms, what was measured there: Triton / the others in their order (bf16, 65,536 tokens; 15 query heads on 5 of width
# 64, 16 on 8 of width 128; half of the tokens are queries of a subset, at random; FlashAttention-4's lists included).
FASTER = {
    ("causal", "forward", 64): {"cudnn": 1024, "fa4": 2048},  # 1024: 0.421 / 0.371 / 0.434; 4096: 1.35 / 1.16 / 1.19
    # 512: 0.693 / 0.360 / 0.550 / 0.632; 8192: 4.80 / 3.40 / 3.67 / 3.59
    ("causal", "forward", 128): {"cudnn": 512, "fa4": 512, "hopper": 512},
    # 1024: 1.11 / 1.13 / 1.85 / 1.50; 2048: 1.94 / 1.71 / 1.80 / 2.17; 8192: 6.73 / 5.39 / 5.20 / 6.53
    ("causal", "backward", 64): {"hopper": 1280, "fa4": 2048, "cudnn": 8192},
    # 2048: 3.69 / 3.63 / 3.79 / 3.66; 4096: 6.62 / 5.80 / 6.27 / 6.31; 8192: 13.1 / 9.98 / 11.1 / 12.8
    ("causal", "backward", 128): {"fa4": 2048, "cudnn": 4096, "hopper": 2048},
    ("subset", "forward", 64): {"hopper": 8192},  # 4096: 0.656 / 0.734; 8192: 1.28 / 1.24; 16384: 2.58 / 2.37
    # 1024: 0.531 / 0.462 / 0.424; 2048: 0.861 / 0.648 / 0.935; 8192: 2.40 / 1.97 / 2.05
    ("subset", "forward", 128): {"hopper": 1024, "fa4": 2048},
    # 2048: 1.01 / 1.45 / 1.36; 4096: 1.83 / 1.57 / 1.91; 8192: 3.46 / 2.94 / 3.09
    ("subset", "backward", 64): {"hopper": 4096, "fa4": 8192},
    # 4096: 3.67 / 3.67 / 3.55; 8192: 6.89 / 6.40 / 6.67; 16384: 13.3 / 10.3 / 11.1
    ("subset", "backward", 128): {"fa4": 8192, "hopper": 4096},
    ("ragged", "forward", 64): {"fa4": 1792},  # longest 1536: 0.486 / 0.505; 3072: 0.775 / 0.747; 6144: 1.27 / 1.22
    # longest 1536: 1.13 / 0.794 / 0.945; 6144: 2.53 / 1.87 / 1.95
    ("ragged", "forward", 128): {"fa4": 1024, "hopper": 1024},
    # longest 1536: 1.33 / 1.32 / 1.46; 3072: 2.22 / 1.94 / 1.98; 6144: 3.61 / 2.94 / 2.94
    ("ragged", "backward", 64): {"hopper": 1536, "fa4": 2048},
    # longest 1536: 2.68 / 2.98 / 2.62; 3072: 4.31 / 4.03 / 4.11; 6144: 6.92 / 5.75 / 6.21
    ("ragged", "backward", 128): {"fa4": 2048, "hopper": 2048},
}


def _choose(what, direction, q, keys):
    """Specialists to try before Triton. None in deterministic mode, since their backward adds up in any order."""
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability(q.device) != (9, 0):
        return ()
    width = 64 if q.shape[-1] <= 64 else 128
    return [name for name, least in FASTER[what, direction, width].items() if keys >= least]


def choose(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale, direction="forward"):
    return _choose("causal" if q_positions is None else "subset", direction, q, k.shape[1])


def choose_backward(*arguments):
    return choose(*_forward_of(arguments), direction="backward")


def choose_varlen(
    q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *_, direction="forward"
):
    return _choose("ragged", direction, q, max_seqlen_k)


def choose_varlen_backward(*arguments):
    return choose_varlen(*_forward_of(arguments), direction="backward")
