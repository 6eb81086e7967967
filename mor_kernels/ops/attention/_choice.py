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


# From how many keys of a sequence on a library is faster than our kernel on an H100 (torch 2.11 with its cuDNN,
# flash-attn-4 4.0.0b15), the fastest first; by what is computed, direction, and widths up to 64 or 128. Beside it, in
# ms, what was measured there: ours / the libraries in their order (bf16, 65,536 tokens; 15 query heads on 5 of width
# 64, 16 on 8 of width 128; half of the tokens are queries of a subset, at random; lists of blocks included).
FASTER = {
    ("causal", "forward", 64): {"cudnn": 1024, "fa4": 2048},  # 1024: 0.415 / 0.369; 4096: 1.31 / 1.14 / 1.22
    ("causal", "forward", 128): {"cudnn": 512, "fa4": 512},  # 512: 0.704 / 0.357 / 0.548; 8192: 4.87 / 3.65 / 3.67
    ("causal", "backward", 64): {"fa4": 2048, "cudnn": 4096},  # 1024: 1.13 / 1.27 / 1.48; 4096: 3.65 / 2.94 / 3.51
    ("causal", "backward", 128): {"fa4": 2048, "cudnn": 2048},  # 1024: 2.31 / 2.82 / 2.58; 2048: 3.86 / 3.57 / 3.77
    ("subset", "forward", 64): {"fa4": 16384},  # 4096: 0.633 / 0.775; 8192: 1.21 / 1.24; 16384, a third: 1.73 / 1.69
    ("subset", "forward", 128): {"fa4": 2048},  # 1024: 0.519 / 0.496; 2048: 0.796 / 0.630; 4096: 1.32 / 0.981
    ("subset", "backward", 64): {"fa4": 8192},  # 2048: 1.03 / 1.35; 4096: 1.86 / 1.90; 8192: 3.51 / 2.96
    ("subset", "backward", 128): {"fa4": 4096},  # 2048: 2.08 / 2.55; 4096: 3.75 / 3.70; 8192: 6.89 / 6.20
    ("ragged", "forward", 64): {"fa4": 1792},  # longest 1536: 0.493 / 0.511; 3072: 0.766 / 0.762; 6144: 1.27 / 1.13
    ("ragged", "forward", 128): {"fa4": 1024},  # longest 1536: 1.20 / 0.780; 3072: 1.70 / 1.19
    ("ragged", "backward", 64): {"fa4": 2048},  # longest 1536: 1.29 / 1.45; 3072: 2.21 / 1.95
    ("ragged", "backward", 128): {"fa4": 2048},  # longest 1536: 2.67 / 2.96; 3072: 4.23 / 3.87
}


def _choose(what, direction, q, keys):
    """Libraries to try before our kernel. None in deterministic mode, since their backward adds up in any order."""
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
