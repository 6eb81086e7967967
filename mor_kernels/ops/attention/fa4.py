"""Attention through FlashAttention-4 (package flash-attn-4), on Hopper and newer.

Plain causal and packed attention are its own. Queries at positions are a mask, key <= position, of which whole blocks
are skipped or left unmasked as :func:`block_lists` says.

What a query doesn't see in a block that is touched is multiplied by zero: a NaN there spreads, unlike in our kernels.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

from ._triton import BLOCK, block_lists, cleared, cleared_gradients


@cute.jit
def _sees(batch, head, query, key, seqlen_info, aux_tensors):
    position = utils.scalar_to_ssa(aux_tensors[0][batch[0], query[0]], cutlass.Int32)
    return key <= position


def _masked(positions, keys, by_keys):
    """How FlashAttention-4 is told of positions."""
    if positions is None:
        return {"causal": True}
    positions = positions.clamp(-1, keys - 1).to(torch.int32)
    lists = BlockSparseTensorsTorch(*block_lists(positions, keys, by_keys), block_size=(BLOCK, BLOCK))
    return {"mask_mod": _sees, "aux_tensors": [positions], "block_sparse_tensors": lists}


def attention(q, k, v, k_fresh, v_fresh, q_positions, q_lens, k_lens, scale):
    masked = _masked(q_positions, k.shape[1], by_keys=False)
    return _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **masked)[:2]


def attention_backward(d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse, q_positions, q_lens, k_lens, scale):
    masked = _masked(q_positions, k.shape[1], by_keys=True)
    gradients = _flash_attn_bwd(q, k, v, out, d_out.contiguous(), lse, scale, dlse=d_lse, **masked)[:3]
    return *gradients, q.new_empty(0), q.new_empty(0)


def _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    return {
        "causal": True, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip


def attention_varlen(
    q, k, v, k_fresh, v_fresh, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale
):
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return cleared(cu_seqlens_q, *_flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **packed)[:2])


def attention_varlen_backward(
    d_out, d_lse, q, k, v, k_fresh, v_fresh, out, lse,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_positions, scale,
):  # fmt: skip
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    gradients = _flash_attn_bwd(q, k, v, out, d_out.contiguous(), lse, scale, dlse=d_lse, **packed)[:3]
    return *cleared_gradients(cu_seqlens_q, cu_seqlens_k, *gradients), q.new_empty(0), q.new_empty(0)
