"""Which of Triton's and the CUDA kernels serve an operator by default, where both can, and why.

Times are milliseconds, CUDA against Triton, of ``bench/routing.py`` and ``bench/kv.py`` on one H200 in one run: bf16,
calls on inputs that are not in the cache, in a CUDA graph; outside of one a call of the CUDA kernels takes the host 30
to 40 microseconds less. An operator that isn't in the table is served by Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Choice(NamedTuple):
    """``cuda(*arguments)`` tells whether the CUDA kernels are chosen; ``reason`` is what was measured."""

    reason: str
    cuda: Callable[..., bool] = lambda *_: False


def _always(*_: object) -> bool:
    return True


def _scored_in_parts_by_triton_or_of_few_bytes(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    logits: torch.Tensor | None,
    candidates: torch.Tensor | None,
    *_: object,
) -> bool:
    scored = x.shape[1] if candidates is None else candidates.shape[1]
    return weight is not None and scored <= 4096 and (scored > 2048 or x.nbytes <= 32 * 2**20)


def _at_most_half_kept(
    d_rows: torch.Tensor, d_gates: torch.Tensor, d_logits: torch.Tensor, x: torch.Tensor, *_: object
) -> bool:
    return 2 * d_rows.shape[1] <= x.shape[1]


def _one_query_a_lane(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    k_lens: torch.Tensor,
    schedule: torch.Tensor | None,
    rows: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    *_: object,
) -> bool:
    return cu_seqlens_q is None and q.dtype != torch.float32 and q.shape[2] <= 128


def _one_query_each(
    k_lens: torch.Tensor,
    heads: int,
    groups: int,
    queries: int,
    width: int,
    item_size: int,
    rows: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    split: bool,
) -> bool:
    return cu_seqlens_q is None and item_size <= 2 and width <= 128


def _passes_over_the_stream(
    d_out: torch.Tensor,
    x: torch.Tensor | None,
    update: torch.Tensor | None,
    indices: torch.Tensor,
    gates: torch.Tensor | None,
    dtype: torch.dtype,
    residual: str,
) -> bool:
    return residual != "block"


def few_rows(x: torch.Tensor, *_: object) -> bool:
    return x.shape[0] <= 64


CHOICES = {
    "route": Choice(
        "B16 N4096 D960 k2048 0.0682 / 0.0803: of more than 2,048 keys Triton's kernel chooses in parts. Of fewer, B32 "
        "N2048 D960: k1365 0.0744 / 0.0735, k682 0.0596 / 0.0570; B16 N2048 D2048 k1024 0.0692 / 0.0704; B4 N2048 D960 "
        "k1024 0.0153 / 0.0150, where the host's time counts for more. Of 16,384 keys 0.0894 / 0.0682, of 131,072 "
        "0.3889 / 0.2369: one block of the CUDA kernel has too much to choose among, as it has among ready logits, B32 "
        "N2048 k1365 0.0268 / 0.0121",
        _scored_in_parts_by_triton_or_of_few_bytes,
    ),
    "route_backward": Choice(
        "B32 N2048 D960: k1365 0.1001 / 0.0991, k682 0.0917 / 0.0923; B16 N2048 D2048 k1024 0.0974 / 0.1001; B16 N4096 "
        "D960 k2048 0.0964 / 0.0958; B1 N131072 D2048 k43690 0.3320 / 0.3534",
        _at_most_half_kept,
    ),
    "scatter_back": Choice(
        "B32 N2048 D960: k1365 0.0803 / 0.0833, k682 0.0719 / 0.0761; B16 N2048 D2048 k1024 0.0823 / 0.0828", _always
    ),
    "scatter_back_": Choice(
        "B32 N2048 D960: k1365 0.0624 / 0.0619, k682 0.0337 / 0.0334; B16 N2048 D2048 k1024 0.0511 / 0.0500"
    ),
    "scatter_back_backward": Choice(
        "delta, B32 N2048 D960: k1365 0.1220 / 0.1360, k682 0.0941 / 0.1050; B16 N2048 D2048 k1024 0.1159 / 0.1227. "
        "block: 0.0612 / 0.0602, 0.0325 / 0.0317; 0.0501 / 0.0489",
        _passes_over_the_stream,
    ),
    "kv_append_": Choice(
        "with rotation: 32 tokens 0.0022 / 0.0026, 128 tokens 0.0028 / 0.0029, 512 tokens 0.0036 / 0.0033, where the "
        "host's time counts for more; 65,536 tokens 0.1142 / 0.1079, little beside the rest of such a prompt, whose "
        "keys should be those that decoding would have written",
        _always,
    ),
    "depth_step_": Choice(
        "D960: 32 tokens 0.0020 / 0.0020, 512 tokens 0.0032 / 0.0027, where the host's time counts for more", _always
    ),
    "sample": Choice(
        "128 lanes of 49,152 logits, all by chance: 0.047 / 2.139; Triton's is PyTorch's own operators, which sort the "
        "logits in float64",
        _always,
    ),
    "decode_linear": Choice(
        "a layer of D960, with rotation and append, beside Triton's kernels and cuBLAS, in microseconds: 8 "
        "tokens 18.2 / 27.2, 32: 22.1 / 31.0, 51: 27.3 / 31.7, 64: 27.7 / 31.9, 128: 39.0 / 33.3",
        few_rows,
    ),
    "decode_qkv_": Choice("as decode_linear, with which it was measured", few_rows),
    "kv_lookup": Choice(
        "rows of 128 in the mean: B32 0.0054 / 0.0057, B128 0.0138 / 0.0142, B512 0.0451 / 0.0456; of 2,048: 0.0444 / "
        "0.0448, 0.1668 / 0.1671, 0.6571 / 0.6571",
        _always,
    ),
    "paged_attention": Choice(
        "H15/5, D64, one query a lane: rows of 128 in the mean B32 0.0060 / 0.0077, B128 0.0097 / 0.0133, B512 0.0312 "
        "/ 0.0336; of 2,048 0.0285 / 0.0306, 0.0886 / 0.0958, 0.3336 / 0.3418; of 16,384 0.1688 / 0.1790, 0.6513 / "
        "0.6672, 2.5720 / 2.6497; float8 0.71 to 0.90 of Triton's time. Of several queries a lane the CUDA kernel "
        "reads keys once for every 16 rows, Triton's for every 64",
        _one_query_a_lane,
    ),
    "attention_schedule": Choice(
        "B32 0.0060 / 0.0046, B128 0.0059 / 0.0050, B512 0.0071 / 0.0095; as paged_attention, which it is for",
        _one_query_each,
    ),
}


def in_order(op: str, arguments: list) -> tuple[str, str]:
    """The two backends, the one to be preferred first."""
    choice = CHOICES.get(op)
    return ("cuda", "triton") if choice and choice.cuda(*arguments) else ("triton", "cuda")
