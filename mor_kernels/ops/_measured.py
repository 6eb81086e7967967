"""Which of Triton's and the CUDA kernels serve an operator by default, where both can, and why.

Times are milliseconds, CUDA against Triton, of ``bench/routing.py`` and ``bench/kv.py`` on one H200 in one run: bf16,
calls on inputs that are not in the cache, in a CUDA graph; outside of one a call of the CUDA kernels takes the host 30
to 40 microseconds less. An operator that isn't in the table is served by Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Choice(NamedTuple):
    """``cuda(*arguments)`` tells whether the CUDA kernels are chosen; ``reason`` is what was measured."""

    reason: str
    cuda: Callable[..., bool] = lambda *_: False


def _always(*_) -> bool:
    return True


def _at_most_half_kept(d_rows, d_gates, d_logits, x, *_) -> bool:
    return 2 * d_rows.shape[1] <= x.shape[1]


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
        "with rotation: 32 tokens 0.0033 / 0.0026, 512 tokens 0.0042 / 0.0033, 65,536 tokens 0.1211 / 0.1078"
    ),
    "depth_step_": Choice("D960: 32 tokens 0.00228 / 0.00183, 512 tokens 0.0038 / 0.0032"),
    "kv_lookup": Choice("rows of 128 in the mean: B32 0.0078 / 0.0057, B128 0.0160 / 0.0142, B512 0.0473 / 0.0457"),
}


def in_order(op: str, arguments: list) -> tuple[str, str]:
    """The two backends, the one to be preferred first."""
    choice = CHOICES.get(op)
    return ("cuda", "triton") if choice and choice.cuda(*arguments) else ("triton", "cuda")
