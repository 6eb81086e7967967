"""Between two ticks of decoding: tokens that came out are checked, lanes move on, and the next pass gets its places."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _checks
from .._dispatch import deferred, define, resolve
from .._numeric import wide
from ..pages import Pages, check_pages
from . import eager
from ._fields import FIELDS


def _schema() -> str:
    names = Pages._fields
    block = ", ".join(f"Tensor({chr(ord('d') + i)}!) {name}" for i, name in enumerate(names))
    ends = ", ".join(f"Tensor({chr(ord('i') + i)}!)? ends_{name}" for i, name in enumerate(names))
    return (
        "advance_(Tensor chosen, Tensor goes_on, Tensor(a!) table, Tensor(b!) k_lens, Tensor(c!) record, "
        f"{block}, {ends}, int recursions, bool shared, int page_size, str backend)"
        " -> (Tensor ids, Tensor enters, Tensor rows, Tensor slots)"
    )


def _fake(chosen, *_):
    return (chosen.new_empty(chosen.shape), chosen.new_empty(chosen.shape, dtype=torch.bool),
            chosen.new_empty(chosen.shape), chosen.new_empty(chosen.shape))  # fmt: skip


_advance = define(_schema(), fake=_fake, eager=eager.advance, triton=deferred(f"{__name__}.triton", "advance"))


_enter = define(
    "enter_(Tensor(a!) x, Tensor new, Tensor enters, Tensor(b!)? logits, Tensor? weight, float temperature, "
    "str backend) -> ()",
    fake=lambda *_: None,
    eager=eager.enter,
    triton=deferred(f"{__name__}.triton", "enter"),
)


class Lanes(NamedTuple):
    """State of the slots of a decoding engine, one token at work in each."""

    # (8 + stops, S) int64, for each slot: recursion that its token takes next, -1 for none; token that is to enter, -1
    # for none; row of the block's pages that the pass appends to, -1 for none, and the flat slot there; row of the
    # pages of the own ends, -1 while none is at work, and the flat slot of the token there; the token's position;
    # tokens of the sequence at which the request ends; tokens that end it, -1 for fewer
    table: torch.Tensor
    k_lens: torch.Tensor  # (2, S) int32 keys that the pass sees, and those of the own ends

    @classmethod
    def new(cls, slots: int, stops: int, device: torch.device | str) -> Lanes:
        """All slots idle."""
        table = torch.full((len(FIELDS) + stops, slots), -1, dtype=torch.int64, device=device)
        table[FIELDS.index("position")] = 0
        return cls(table, torch.zeros(2, slots, dtype=torch.int32, device=device))

    def row(self, name: str) -> torch.Tensor:
        """(S,) int64, a view: "recursion", "feed", "row", "slot", "line", "place", "position" or "end"."""
        return self.table[FIELDS.index(name)]


class Entering(NamedTuple):
    """What :func:`advance_` returns, of each lane."""

    ids: torch.Tensor  # (n,) int64 tokens that enter; 0 or more for the other lanes, too
    enters: torch.Tensor  # (n,) bool
    rows: torch.Tensor  # (n,) int64 rows of the own ends' pages that they read, -1 for the other lanes
    slots: torch.Tensor  # (n,) int64 flat slots there, -1 for the other lanes


def advance_(
    chosen: torch.Tensor,
    goes_on: torch.Tensor,
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
    """End a tick of the first n slots, in one launch: after the pass, and after a token was chosen for each.

    A lane whose token doesn't go on leaves: its token's keys count, ``chosen`` came out, and the request has ended if
    that is negative, one of its stops, or its last: then the lane is idle, and its pages are free. Otherwise ``chosen``
    enters, at the next position, as ``feed`` does in a lane that was idle. Tokens that go on or enter get a place for
    their next pass, and those that enter one in the own ends as well: pages are taken in the order of the lanes, and
    where none is free, or a row would outgrow its page table, the place is -1, and the token's keys aren't kept.

    Args:
        chosen: (n,) int64; of the lanes that don't leave, any number.
        goes_on: (n,) bool, False for idle lanes.
        lanes: the state, changed in place. A slot is freed before its request has ended by -1 in the first six rows of
            the table, and its pages by :func:`..free_pages_`.
        record: (n, 3) int64, written: the token that came out, -2 for none; recursions that the lane's token has taken,
            0 for none; 1 if the request has ended.
        block: pages of the block, a row for each (slot, recursion), or, ``shared``, for each slot: then only the first
            recursion appends, and all see its keys.
        ends: pages of the own first and last layers, a row for each slot; None if there are none.
        recursions: Nr.
        page_size: tokens a page, of both.
    """
    op = "advance_"
    _checks.tensor(op, "chosen", chosen, ("n",), (torch.int64,))
    n = chosen.shape[0]
    _checks.tensor(op, "goes_on", goes_on, (n,), (torch.bool,), chosen)
    _checks.tensor(op, "table", lanes.table, ("fields", "S"), (torch.int64,), chosen)
    slots = lanes.table.shape[1]
    _checks.tensor(op, "k_lens", lanes.k_lens, (2, slots), (torch.int32,), chosen)
    _checks.tensor(op, "record", record, (n, 3), (torch.int64,), chosen)
    _checks.whole(op, "recursions", recursions, 1)
    _checks.whole(op, "page_size", page_size, 1)
    if lanes.table.shape[0] < len(FIELDS):
        _checks.fail(op, "table", f"at least {len(FIELDS)} rows", lanes.table.shape[0])
    if n > slots:
        _checks.fail(op, "chosen", f"at most the {slots} slots of the table", n)
    for name, t in (("table", lanes.table), ("k_lens", lanes.k_lens), ("record", record)):
        if not t.is_contiguous():
            _checks.fail(op, name, "a contiguous tensor", f"strides {t.stride()}")
    check_pages(op, block, chosen)
    rows = slots * (1 if shared else recursions)
    _checks.tensor(op, "lengths", block.lengths, (rows,), (torch.int64,), chosen)
    if ends is not None:
        check_pages(op, ends, chosen)
        _checks.tensor(op, "lengths", ends.lengths, (slots,), (torch.int64,), chosen)
    pools = (*block, *(ends or (None,) * len(block)))
    named = resolve(op, backend, chosen)
    return Entering(*_advance(chosen, goes_on, *lanes, record, *pools, recursions, shared, page_size, named))


def enter_(
    x: torch.Tensor,
    new: torch.Tensor,
    enters: torch.Tensor,
    logits: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    temperature: float = 1.0,
    *,
    backend: str | None = None,
) -> None:
    """Put states at the door of the block, in one launch, with their scores by the first recursion's router, as
    :func:`..depth_step_` wants them.

    Args:
        x: (n, D), written where ``enters``; rows of elements side by side.
        new: (n, D), of x's dtype.
        enters: (n,) bool.
        logits: (n,) fp32 (fp64 for fp64 x), written likewise: new . weight / temperature. None for no router.
        weight: (D,) linear router.
    """
    op = "enter_"
    _checks.tensor(op, "x", x, ("n", "D"))
    _checks.tensor(op, "new", new, tuple(x.shape), (x.dtype,), x)
    _checks.tensor(op, "enters", enters, (x.shape[0],), (torch.bool,), x)
    if x.shape[1] > 1 and x.stride(1) != 1:
        _checks.fail(op, "x", "rows of elements side by side", f"strides {x.stride()}")
    if (logits is None) != (weight is None):
        _checks.fail(op, "weight", "a router where logits are given, and none where they aren't", weight)
    if logits is not None:
        _checks.tensor(op, "logits", logits, (x.shape[0],), (wide(x.dtype),), x)
        _checks.tensor(op, "weight", weight, (x.shape[1],), like=x)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, new, weight)):
        raise RuntimeError(f"{op}: expected no argument that needs a gradient (serving has none), got one")
    _enter(x, new, enters, logits, weight, float(temperature), resolve(op, backend, x))
