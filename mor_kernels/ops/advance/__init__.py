"""The end of a tick of decoding: which lanes leave the block; tokens that came out are checked, lanes move on, and the
next pass gets its places."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _checks
from .._dispatch import deferred, define, resolve
from .._numeric import wide
from ..pages import Pages, check_pages
from . import eager
from ._fields import FIELDS

_leave = define(
    "leave(Tensor goes_on, Tensor table, Tensor k_lens, Tensor x, SymInt size, str backend)"
    " -> (Tensor columns, Tensor k_lens_out, Tensor rows, Tensor at)",
    fake=lambda goes_on, table, k_lens, x, size: (
        table.new_empty(table.shape[0], size), k_lens.new_empty(size), x.new_empty(size, x.shape[1]),
        table.new_empty(goes_on.shape)),
    eager=eager.leave,
    triton=deferred(f"{__name__}.triton", "leave"),
)  # fmt: skip


def _schema() -> str:
    names = Pages._fields
    block = ", ".join(f"Tensor({chr(ord('e') + i)}!) {name}" for i, name in enumerate(names))
    ends = ", ".join(f"Tensor({chr(ord('j') + i)}!)? ends_{name}" for i, name in enumerate(names))
    return (
        "advance_(Tensor chosen, Tensor goes_on, Tensor? at, Tensor(a!) table, Tensor(b!) k_lens, Tensor(c!) ticks, "
        f"Tensor(d!) record, {block}, {ends}, int recursions, bool shared, int page_size, str backend)"
        " -> (Tensor ids, Tensor positions, Tensor lanes, Tensor slots, Tensor k_lens_out)"
    )


def _fake(chosen: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return (*(torch.empty_like(chosen) for _ in range(4)), torch.empty_like(chosen, dtype=torch.int32))


_advance = define(
    _schema(),
    fake=_fake,
    check=eager.check,
    eager=eager.advance,
    triton=deferred(f"{__name__}.triton", "advance"),
)


_enter = define(
    "enter_(Tensor(a!) x, Tensor new, Tensor lanes, Tensor(b!)? logits, Tensor? weight, float temperature, "
    "str backend) -> ()",
    fake=lambda *_: None,
    check=eager.check_enter,
    eager=eager.enter,
    triton=deferred(f"{__name__}.triton", "enter"),
)


class Lanes(NamedTuple):
    """State of the slots of a decoding engine, one token at work in each."""

    #: (9 + stops, S) int64, for each slot: recursion that its token takes next, -1 for none; token that is to enter, -1
    #: for none; row of the block's pages that the pass appends to, -1 for none, and the flat slot there; row of the
    #: pages of the own ends, -1 while none is at work, and the flat slot of the token there; recursions that the token
    #: has taken if it waits for the last layer, otherwise -1; the token's position; tokens of the sequence at which the
    #: request ends; tokens that end it, -1 for fewer
    table: torch.Tensor
    k_lens: torch.Tensor  #: (2, S) int32 keys that the pass sees, and those of the own ends
    ticks: torch.Tensor  #: () int64 that have ended

    @classmethod
    def new(cls, slots: int, stops: int, device: torch.device | str) -> Lanes:
        """All slots idle."""
        table = torch.full((len(FIELDS) + stops, slots), -1, dtype=torch.int64, device=device)
        table[FIELDS.index("position")] = 0
        k_lens = torch.zeros(2, slots, dtype=torch.int32, device=device)
        return cls(table, k_lens, torch.zeros((), dtype=torch.int64, device=device))

    def row(self, name: str) -> torch.Tensor:
        """(S,) int64, a view: "recursion", "feed", "row", "slot", "line", "place", "waits", "position" or "end"."""
        return self.table[FIELDS.index(name)]


class Leaving(NamedTuple):
    """The m places of last layer, head and first layer in a tick, as :func:`leave` gives them away."""

    columns: torch.Tensor  #: (fields, m) int64 the lanes' columns of the table; of padding -1, and 0 from the stops on
    k_lens: torch.Tensor  #: (m,) int32 keys of the own ends
    x: torch.Tensor  #: (m, D) states; of padding 0
    at: torch.Tensor | None  #: (n,) int64 the place of each lane, -1 for none; None where each lane has its own


class Entering(NamedTuple):
    """What :func:`advance_` returns, of each place."""

    ids: torch.Tensor  #: (m,) int64 tokens that enter; 0 or more for the other places, too
    positions: torch.Tensor  #: (m,) int64, 0 for the other places
    lanes: torch.Tensor  #: (m,) int64 that they enter, also rows of the own ends' pages; -1 for the others
    slots: torch.Tensor  #: (m,) int64 flat slots there, -1 for the others
    k_lens: torch.Tensor  #: (m,) int32 keys there, 0 for the others


def leave(goes_on: torch.Tensor, lanes: Lanes, x: torch.Tensor, size: int, *, backend: str | None = None) -> Leaving:
    """Find the lanes that are to pass the last layer and the first one in this tick, which are few of all, and gather
    what these need, in one launch: those whose tokens don't go on, and those that have a token to ``feed``. (Of
    continuous depth-wise batching; paper, section "Inference Throughput Evaluation".)

    Those that have waited come first, then all in the order of the lanes. Where there are more than ``size``, the
    others wait; :func:`advance_` notes that.

    Args:
        goes_on: (n,) bool, False for idle lanes.
        lanes: the state; its table may have rows more, which are gathered as well.
        x: (n, D) states; bf16, fp16, fp32 or fp64.
        size: m, the places.
        backend: see :func:`route`.

    Returns:
        :class:`Leaving`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "leave"
    _checks.tensor(op, "goes_on", goes_on, ("n",), (torch.bool,))
    _check_lanes(op, lanes, goes_on)
    _checks.tensor(op, "x", x, (goes_on.shape[0], "D"), like=goes_on)
    _checks.whole(op, "size", size)
    _checks.no_gradient(op, x)
    return Leaving(*_leave(goes_on, lanes.table, lanes.k_lens, x, size, resolve(op, backend, x)))


def _check_lanes(op: str, lanes: Lanes, goes_on: torch.Tensor) -> None:
    _checks.state(op, "lanes", lanes, Lanes)
    _checks.tensor(op, "lanes.table", lanes.table, ("fields", "S"), (torch.int64,), goes_on)
    slots, n = lanes.table.shape[1], goes_on.shape[0]
    _checks.tensor(op, "lanes.k_lens", lanes.k_lens, (2, slots), (torch.int32,), goes_on)
    if lanes.table.shape[0] < len(FIELDS):
        _checks.fail(op, "lanes.table", f"at least {len(FIELDS)} rows", lanes.table.shape[0])
    if n > slots:
        _checks.fail(op, "goes_on", f"at most the {slots} slots of the table", n)
    for name, t in (("table", lanes.table), ("k_lens", lanes.k_lens)):
        if not t.is_contiguous():
            _checks.fail(op, f"lanes.{name}", "a contiguous tensor", f"strides {t.stride()}")


def advance_(
    chosen: torch.Tensor,
    goes_on: torch.Tensor,
    at: torch.Tensor | None,
    lanes: Lanes,
    record: torch.Tensor,
    block: Pages,
    ends: Pages | None,
    recursions: int,
    page_size: int,
    *,
    shared: bool = False,
    backend: str | None = None,
) -> Entering:
    """End a tick of the first n slots, in one launch: after the pass, and after a token was chosen at each place.

    A lane whose token doesn't go on leaves, if it has a place, and waits otherwise. If it leaves, its token's keys
    count, ``chosen`` came out, and the request has ended if that is negative, one of its stops, or its last: then the
    lane is idle, and its pages are free. Otherwise ``chosen`` enters, at the next position, as ``feed`` does in a lane
    that was idle. Tokens that go on or enter get a place for the keys of their next pass, and those that enter one in
    the own ends as well: pages are taken in the order of the lanes, and where none is free, or a row would outgrow its
    page table, the slot is -1, and the token's keys aren't kept.

    Args:
        chosen: (m,) int64; at places of lanes that don't leave, any number.
        goes_on: (n,) bool, False for idle lanes.
        at: (n,) int64, see :class:`Leaving`; None where m is n and each lane has its own place.
        lanes: the state, changed in place. A slot is freed before its request has ended by -1 in the first seven rows
            of the table, and its pages by :func:`free_pages_`.
        record: (R, S, 3) int64, of which number ``lanes.ticks % R`` is written, for each of the n slots: the token that
            came out, -2 for none; recursions that its token has taken, 0 if the lane took no part; and the recursion
            that it takes next, -1 for none. On CUDA it may be pinned memory of the host.
        block: pages of the block, a row for each (slot, recursion), or, ``shared``, for each slot: then only the first
            recursion appends, and all see its keys.
        ends: pages of the own first and last layers, a row for each slot; None if there are none.
        recursions: Nr.
        page_size: tokens a page, of both.
        shared: see ``block``.
        backend: see :func:`route`.

    Returns:
        :class:`Entering`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "advance_"
    _checks.tensor(op, "goes_on", goes_on, ("n",), (torch.bool,))
    n = goes_on.shape[0]
    _checks.tensor(op, "chosen", chosen, (n if at is None else "m",), (torch.int64,), goes_on)
    if at is not None:
        _checks.tensor(op, "at", at, (n,), (torch.int64,), goes_on)
    _check_lanes(op, lanes, goes_on)
    slots = lanes.table.shape[1]
    _checks.tensor(op, "lanes.ticks", lanes.ticks, (), (torch.int64,), goes_on)
    _checks.tensor(op, "record", record, ("R", slots, 3), (torch.int64,), goes_on)
    _checks.whole(op, "recursions", recursions, 1)
    _checks.whole(op, "page_size", page_size, 1)
    if not record.shape[0]:
        _checks.fail(op, "record", "at least one record", 0)
    if not record.is_contiguous():
        _checks.fail(op, "record", "a contiguous tensor", f"strides {record.stride()}")
    check_pages(op, "block", block, slots * (1 if shared else recursions), chosen)
    if ends is not None:
        check_pages(op, "ends", ends, slots, chosen)
    pools = (*block, *(ends or (None,) * len(block)))
    named = resolve(op, backend, chosen)
    return Entering(*_advance(chosen, goes_on, at, *lanes, record, *pools, recursions, shared, page_size, named))


def enter_(
    x: torch.Tensor,
    new: torch.Tensor,
    lanes: torch.Tensor,
    logits: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    temperature: float = 1.0,
    *,
    backend: str | None = None,
) -> None:
    """Put states at the door of the block, in one launch, with their scores by the first recursion's router, as
    :func:`depth_step_` wants them.

    Args:
        x: (n, D), of which the lanes' rows are written; bf16, fp16, fp32 or fp64; rows of elements side by side.
        new: (m, D), of x's dtype.
        lanes: (m,) int64 below n, each at most once; -1 for rows of new that go nowhere.
        logits: (n,) fp32 (fp64 for fp64 x), written likewise: new . weight / temperature. None for no router.
        weight: (D,) linear router.
        temperature: of the router.
        backend: see :func:`route`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available, or gradients are on and an argument needs one.
    """
    op = "enter_"
    _checks.tensor(op, "x", x, ("n", "D"))
    _checks.tensor(op, "new", new, ("m", x.shape[1]), (x.dtype,), x)
    _checks.tensor(op, "lanes", lanes, (new.shape[0],), (torch.int64,), x)
    _checks.written(op, x=x)
    if x.shape[1] > 1 and x.stride(1) != 1:
        _checks.fail(op, "x", "rows of elements side by side", f"strides {x.stride()}")
    if (logits is None) != (weight is None):
        expected = "a router where logits are given, and none where they aren't"
        _checks.fail(op, "weight", expected, "a tensor" if logits is None else "None")
    if logits is not None:
        _checks.tensor(op, "logits", logits, (x.shape[0],), (wide(x.dtype),), x)
        _checks.written(op, logits=logits)
        _checks.tensor(op, "weight", weight, (x.shape[1],), like=x)
    _checks.no_gradient(op, x, new, logits, weight)
    temperature = _checks.number(op, "temperature", temperature, positive=True)
    _enter(x, new, lanes, logits, weight, temperature, resolve(op, backend, x))
