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


def _always(*_) -> bool:
    return True


def _at_most_half_kept(d_rows, d_gates, d_logits, x, *_) -> bool:
    return 2 * d_rows.shape[1] <= x.shape[1]


def _one_query_a_lane(q, k_cache, v_cache, page_table, k_lens, schedule, rows, cu_seqlens_q, *_) -> bool:
    return cu_seqlens_q is None and q.dtype != torch.float32 and q.shape[2] <= 128


def _one_query_each(k_lens, heads, groups, queries, width, item_size, rows, cu_seqlens_q) -> bool:
    return cu_seqlens_q is None and item_size <= 2 and width <= 128


def _passes_over_the_stream(d_out, x, update, indices, gates, dtype, residual) -> bool:
    return residual != "block"


CHOICES = {
    "route": Choice(
        "B32 N2048 D960: k1365 0.0769 / 0.0723, k682 0.0624 / 0.0567; B16 N2048 D2048 k1024 0.0714 / 0.0709; sequences "
        "of 16,384 and more, which one block chooses among, take up to 12 times as long"
    ),
    "route_backward": Choice(
        "B32 N2048 D960: k1365 0.1021 / 0.1011, k682 0.0931 / 0.0944; B16 N2048 D2048 k1024 0.0986 / 0.1027",
        _at_most_half_kept,
    ),
    "scatter_back": Choice(
        "B32 N2048 D960: k1365 0.0811 / 0.0840, k682 0.0725 / 0.0768; B16 N2048 D2048 k1024 0.0829 / 0.0835", _always
    ),
    "scatter_back_": Choice(
        "B32 N2048 D960: k1365 0.0629 / 0.0623, k682 0.0340 / 0.0336; B16 N2048 D2048 k1024 0.0516 / 0.0506"
    ),
    "scatter_back_backward": Choice(
        "delta, B32 N2048 D960: k1365 0.1227 / 0.1367, k682 0.0948 / 0.1056; B16 N2048 D2048 k1024 0.1163 / 0.1233. "
        "block: 0.0616 / 0.0606, 0.0329 / 0.0320; 0.0505 / 0.0491",
        _passes_over_the_stream,
    ),
    "kv_append_": Choice(
        "with rotation: 32 tokens 0.0023 / 0.0023, 512 tokens 0.0036 / 0.0029, 65,536 tokens 0.1142 / 0.1076"
    ),
    "depth_step_": Choice(
        "D960: 32 tokens 0.0020 / 0.0020, 512 tokens 0.0032 / 0.0027; the host's 0.108 / 0.146 a call count for more",
        _always,
    ),
    "kv_lookup": Choice(
        "rows of 128 in the mean: B32 0.0054 / 0.0057, B128 0.0138 / 0.0142, B512 0.0451 / 0.0457; of 2,048: B128 "
        "0.1669 / 0.1672",
        _always,
    ),
    "paged_attention": Choice(
        "H15/5, D64, one query a lane: rows of 128 in the mean B32 0.0060 / 0.0073, B128 0.0097 / 0.0130, B512 0.0313 "
        "/ 0.0332; of 2,048 0.0286 / 0.0304, 0.0886 / 0.0954, 0.3333 / 0.3410; float8 0.72 to 0.92 of Triton's time. "
        "Of several queries a lane the CUDA kernel reads keys once for every 16 rows, Triton's for every 64",
        _one_query_a_lane,
    ),
    "attention_schedule": Choice("B32 0.0060 / 0.0046, B512 0.0072 / 0.0095; as paged_attention", _one_query_each),
}


def in_order(op: str, arguments: list) -> tuple[str, str]:
    """The two backends, the one to be preferred first."""
    choice = CHOICES.get(op)
    return ("cuda", "triton") if choice and choice.cuda(*arguments) else ("triton", "cuda")
