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
# in ms, what was measured in turns: Triton / the others in their order (bf16, 65,536 tokens; 15 query heads on 5 of
# width 64, 16 on 8 of width 128; half of the tokens are queries of a subset, at random; FA4's lists included).
FASTER = {
    # 512: 0.296 / 0.311 / 0.240 / 0.289; 2048: 0.710 / 0.704 / 0.669 / 0.670; 8192: 2.51 / 2.15 / 2.38 / 2.33. In the
    # benchmark, where launches don't count, cuDNN is behind at 682.
    ("causal", "forward", 64): {"fa4": 8192, "cudnn": 1024, "hopper": 512},
    # 512: 0.696 / 0.358 / 0.550 / 0.651; 8192: 5.25 / 3.60 / 3.64 / 3.60
    ("causal", "forward", 128): {"cudnn": 512, "fa4": 512, "hopper": 512},
    # 1024: 1.10 / 1.28 / 1.15 / 1.50; 2048: 1.89 / 1.81 / 1.79 / 2.19; 8192: 6.79 / 5.30 / 5.50 / 6.54
    ("causal", "backward", 64): {"fa4": 4096, "hopper": 1280, "cudnn": 8192},
    # 1024: 2.35 / 2.83 / 2.63 / 2.35; 2048: 3.84 / 3.65 / 3.86 / 3.69; 8192: 13.0 / 9.89 / 11.4 / 11.4
    ("causal", "backward", 128): {"fa4": 2048, "cudnn": 4096, "hopper": 2048},
    ("subset", "forward", 64): {"hopper": 2048},  # 1024: 0.278 / 0.400; 2048: 0.365 / 0.354; 16384: 2.55 / 2.31
    # 1024: 0.527 / 0.463 / 0.567; 2048: 0.814 / 0.639 / 0.628; 8192: 2.63 / 1.88 / 1.79; in the
    # benchmark, where lists don't count, FA4 is behind at 8192
    ("subset", "forward", 128): {"hopper": 1024, "fa4": 2048},
    # 2048: 1.02 / 0.984 / 1.38; 4096: 1.73 / 1.65 / 1.92; 8192: 3.46 / 2.93 / 3.05; benchmark: Triton at 2048
    ("subset", "backward", 64): {"hopper": 4096, "fa4": 8192},
    # 2048: 2.09 / 2.57 / 2.02; 4096: 3.77 / 3.91 / 3.55; 8192: 7.08 / 6.03 / 6.26; 16384: 13.1 / 11.0 / 11.7
    ("subset", "backward", 128): {"fa4": 8192, "hopper": 4096},
    # longest 1536: 0.486 / 0.431 / 0.513; 3072: 0.782 / 0.712 / 0.773; 6144: 1.30 / 1.12 / 1.20
    ("ragged", "forward", 64): {"hopper": 1024, "fa4": 1792},
    # longest 1536: 1.14 / 0.766 / 0.983; 6144: 2.63 / 1.81 / 2.02
    ("ragged", "forward", 128): {"fa4": 1024, "hopper": 1024},
    # longest 1536: 1.25 / 1.25 / 1.46; 3072: 2.20 / 1.89 / 1.97; 6144: 3.54 / 2.90 / 2.79
    ("ragged", "backward", 64): {"hopper": 1536, "fa4": 2048},
    # longest 1536: 2.73 / 2.98 / 2.55; 3072: 4.26 / 3.96 / 4.01; 6144: 6.86 / 5.64 / 5.91
    ("ragged", "backward", 128): {"fa4": 2048, "hopper": 1536},
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
