"""FlashAttention-4 (package flash-attn-4) as a rival; importing this needs it installed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func


@cute.jit
def _key_is_seen(batch, head, query, key, seqlen_info, aux_tensors):
    return key <= utils.scalar_to_ssa(aux_tensors[0][batch[0], query[0]], cutlass.Int32)


def causal(q, k, v):
    return _out(flash_attn_func(q, k, v, causal=True))


def subset(q, k, v, known):
    """``known`` are the queries' positions in int32 and FlexAttention's BlockMask, whose lists it takes as they are."""
    positions, mask = known
    by_queries = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    by_keys = mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices
    forward, backward = (
        BlockSparseTensorsTorch(*lists, block_size=tuple(mask.BLOCK_SIZE)) for lists in (by_queries, by_keys)
    )
    result = flash_attn_func(
        q, k, v, mask_mod=_key_is_seen, aux_tensors=[positions],
        block_sparse_tensors=forward, block_sparse_tensors_bwd=backward,
    )  # fmt: skip
    return _out(result)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k):
    result = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest_q, max_seqlen_k=longest_k, causal=True,
    )  # fmt: skip
    return _out(result)


def _out(result):
    """The log-sum-exp comes along in some versions."""
    return result[0] if isinstance(result, tuple) else result
