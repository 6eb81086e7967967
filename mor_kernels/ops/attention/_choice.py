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
    return _any_order_refused() or _hopper_refuses(q, k_fresh, rest[-1])


def _any_order_refused():
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "it adds up d_q in any order, and deterministic algorithms were asked for"
    return None


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
    if not (q_positions is None and q_lens is None and k_lens is None and q.shape[1] == k.shape[1]):
        return "it takes as many queries as keys, causal by their index, without positions and lengths"
    return _library_refuses(q, k, v, scale)


def cudnn_refuses_backward(d_out, d_lse, *arguments):
    if d_lse is not None:
        return "it has no gradient of the log-sum-exp"
    return _any_order_refused() or cudnn_refuses(*_forward_of((d_out, d_lse, *arguments)))


def fa4_refuses(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale):
    if k_fresh is not None:
        return "it takes no fresh keys and values"
    if q_lens is not None or k_lens is not None or (q_positions is None and q.shape[1] != k.shape[1]):
        return "it takes positions or as many queries as keys, causal by their index, and no lengths"
    return "it has no keys" if k.numel() == 0 else _library_refuses(q, k, v, scale)


def fa4_refuses_backward(*arguments):
    return _any_order_refused() or fa4_refuses(*_forward_of(arguments))


def fa4_refuses_varlen(q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, *rest):
    *_, q_positions, scale = rest
    if q_positions is not None or cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr():
        return "it takes one tensor of cu_seqlens for queries and keys, and no positions"
    return _library_refuses(q, k, v, scale)


def fa4_refuses_varlen_backward(*arguments):
    return _any_order_refused() or fa4_refuses_varlen(*_forward_of(arguments))


# What is faster than Triton on an H200 from how many keys of a sequence on (torch 2.11 with its cuDNN, Triton 3.6,
# flash-attn-4 4.0.0b15), the fastest first; by what is computed, direction, and widths up to 64 or 128. Beside it, in
# ms, what was measured in turns: Triton / hopper / FA4, and cuDNN for causal (bf16, 65,536 tokens; 15 query heads on 5
# of width 64, 16 on 8 of width 128; half of the tokens are queries of a subset, at random; FA4's lists included). One
# that comes after a faster one is for calls that the faster doesn't take.
FASTER = {
    # 512: 0.286 / 0.258 / 0.302 / 0.246; 1024: 0.422 / 0.348 / 0.429 / 0.381; 2048: 0.694 / 0.547 / 0.677 / 0.645;
    # 8192: 2.33 / 1.81 / 2.16 / 2.23. At 512 cuDNN is ahead, but not where tiles are cut: 32 sequences of 682 take
    # 0.096 by hopper, 0.125 by cuDNN
    ("causal", "forward", 64): (("hopper", 512), ("cudnn", 1024)),
    # 512: 0.676 / 0.531 / 0.489 / 0.360; 1024: 0.960 / 0.702 / 0.665 / 0.563; 2048: 1.50 / 1.05 / 1.05 / 0.966;
    # 4096: 2.61 / 1.75 / 1.81 / 1.77; 8192: 4.83 / 3.17 / 3.36 / 3.37
    ("causal", "forward", 128): (("hopper", 4096), ("cudnn", 512), ("fa4", 512), ("hopper", 512)),
    # 512: 0.689 / 0.645 / 0.891 / 1.04; 1024: 1.05 / 0.900 / 1.13 / 1.36; 2048: 1.77 / 1.37 / 1.64 / 2.03;
    # 8192: 6.28 / 4.31 / 4.76 / 6.11
    ("causal", "backward", 64): (("hopper", 512), ("fa4", 2048)),
    # 512: 1.57 / 1.37 / 1.91 / 1.69; 1024: 2.28 / 1.84 / 2.22 / 2.22; 2048: 3.69 / 2.80 / 3.17 / 3.33;
    # 8192: 13.1 / 8.67 / 9.03 / 10.4
    ("causal", "backward", 128): (("hopper", 512), ("fa4", 2048), ("cudnn", 2048)),
    # 1024: 0.226 / 0.195 / 0.330; 2048: 0.361 / 0.297 / 0.466; 4096: 0.631 / 0.499 / 0.734; 16384: 2.29 / 1.78 / 2.37
    ("subset", "forward", 64): (("hopper", 1024),),
    # 1024: 0.518 / 0.401 / 0.423; 2048: 0.786 / 0.573 / 0.600; 8192: 2.44 / 1.65 / 1.71; 16384: 4.67 / 3.08 / 3.19
    ("subset", "forward", 128): (("hopper", 1024), ("fa4", 2048)),
    # 1024: 0.587 / 0.510 / 0.991; 2048: 0.945 / 0.749 / 1.27; 4096: 1.67 / 1.25 / 1.83; 8192: 3.13 / 2.24 / 2.90
    ("subset", "backward", 64): (("hopper", 1024), ("fa4", 8192)),
    # 1024: 1.35 / 1.09 / 1.76; 2048: 2.04 / 1.57 / 2.25; 8192: 6.38 / 4.52 / 5.29; 16384: 12.8 / 8.45 / 9.65
    ("subset", "backward", 128): (("hopper", 1024), ("fa4", 8192)),
    # longest 1536: 0.444 / 0.351 / 0.451; 3072: 0.827 / 0.645 / 0.802; 6144: 1.60 / 1.25 / 1.51
    ("ragged", "forward", 64): (("hopper", 1024), ("fa4", 1792)),
    # longest 1536: 1.05 / 0.757 / 0.697; 3072: 1.80 / 1.23 / 1.20; 6144: 3.46 / 2.26 / 2.30
    ("ragged", "forward", 128): (("hopper", 6144), ("fa4", 1024), ("hopper", 1024)),
    # longest 1536: 1.11 / 0.889 / 1.19; 3072: 2.20 / 1.61 / 1.96; 6144: 4.45 / 3.08 / 3.45
    ("ragged", "backward", 64): (("hopper", 1024), ("fa4", 2048)),
    # longest 1536: 2.41 / 1.81 / 2.19; 3072: 4.41 / 3.27 / 3.65; 6144: 8.74 / 6.10 / 6.55
    ("ragged", "backward", 128): (("hopper", 1024), ("fa4", 3072)),
}


def _choose(what, direction, q, keys):
    """Specialists to try before Triton. None in deterministic mode, since their backward adds up in any order."""
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability(q.device) != (9, 0):
        return ()
    width = 64 if q.shape[-1] <= 64 else 128
    return list(dict.fromkeys(name for name, least in FASTER[what, direction, width] if keys >= least))


def choose(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale, direction="forward"):
    return _choose("causal" if q_positions is None else "subset", direction, q, k.shape[1])


def choose_backward(*arguments):
    return choose(*_forward_of(arguments), direction="backward")  # type: ignore[misc]  # of any number to mypy


def choose_varlen(
    q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *_, direction="forward"
):
    return _choose("ragged", direction, q, max_seqlen_k)


def choose_varlen_backward(*arguments):
    return choose_varlen(*_forward_of(arguments), direction="backward")
