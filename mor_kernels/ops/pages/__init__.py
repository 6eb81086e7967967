"""Who owns which page: rows of ragged keys/values take pages, grow and give them back, without a word to the host.

What a pass does with the rows of its lanes: :func:`take_pages_` finds the slots of the new tokens, the layers append to
them and attend over the rows, and :func:`commit_pages_` counts the tokens once, after the last layer (an increment at
the first one would shift the others). All state is in tensors on the device, and every op works on it in place and in
an order that the lanes alone determine, so that a CUDA graph replays right at any number of active lanes: the others
are -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _checks
from .._dispatch import deferred, define, resolve
from . import eager

_STATE = "Tensor(a!) lengths, Tensor(b!) owned, Tensor(c!) page_table, Tensor(d!) free_pages, Tensor(e!) free_count"


def _fake_take(
    lengths: torch.Tensor,
    owned: torch.Tensor,
    page_table: torch.Tensor,
    free_pages: torch.Tensor,
    free_count: torch.Tensor,
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total: int,
    page_size: int,
) -> tuple[torch.Tensor, ...]:
    lens = rows.new_empty(rows.shape, dtype=torch.int32)
    return rows.new_empty(total), rows.new_empty(rows.shape), lens, rows.new_empty(())


_take = define(
    f"take_pages_({_STATE}, Tensor rows, Tensor cu_seqlens, SymInt total, int page_size, str backend)"
    " -> (Tensor slots, Tensor rows, Tensor k_lens, Tensor refused)",
    fake=_fake_take,
    check=eager.check_take,
    eager=eager.take,
    triton=deferred(f"{__name__}.triton", "take"),
)
_commit = define(
    "commit_pages_(Tensor(a!) lengths, Tensor rows, Tensor cu_seqlens, str backend) -> ()",
    fake=lambda *_: None,
    check=eager.check_commit,
    eager=eager.commit,
    triton=deferred(f"{__name__}.triton", "commit"),
)
_free = define(
    f"free_pages_({_STATE}, Tensor rows, str backend) -> ()",
    fake=lambda *_: None,
    check=eager.check_free,
    eager=eager.free,
    triton=deferred(f"{__name__}.triton", "free"),
)


class Pages(NamedTuple):
    """State of rows that share pages. A page serves every layer of a block, since all write the same slot of it."""

    lengths: torch.Tensor  #: (rows,) int64 committed tokens
    owned: torch.Tensor  #: (rows,) int64 pages held
    page_table: torch.Tensor  #: (rows, max_pages) int32, -1 where a row has no page
    free_pages: torch.Tensor  #: (num_pages,) int32, a stack: the first free_count are free
    free_count: torch.Tensor  #: () int64

    @classmethod
    def new(cls, rows: int, num_pages: int, max_pages: int, device: torch.device | str) -> Pages:
        """All of ``num_pages`` pages free, for ``rows`` empty rows of at most ``max_pages``."""
        return cls(
            lengths=torch.zeros(rows, dtype=torch.int64, device=device),
            owned=torch.zeros(rows, dtype=torch.int64, device=device),
            page_table=torch.full((rows, max_pages), -1, dtype=torch.int32, device=device),
            free_pages=torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device),
            free_count=torch.tensor(num_pages, device=device),
        )


class Taken(NamedTuple):
    """What :func:`take_pages_` returns."""

    slots: torch.Tensor  #: (total,) int64 flat slots of the new tokens, -1 for those of padding
    rows: torch.Tensor  #: (R,) int64 the rows given; all -1 if they were refused
    k_lens: torch.Tensor  #: (R,) int32 tokens in each row, the new ones included; 0 for padding
    refused: torch.Tensor  #: () int64: 0; or the pages that were lacking; or -1 if a row would outgrow its page table


def check_pages(
    op: str, argument: str, pages: Pages, rows: int | str = "rows", like: torch.Tensor | None = None
) -> None:
    """``pages`` are a state, of so many rows if that is a number, on the device of ``like``."""
    _checks.state(op, argument, pages, Pages)
    _checks.tensor(op, f"{argument}.lengths", pages.lengths, (rows,), (torch.int64,), like)
    like = pages.lengths
    _checks.tensor(op, f"{argument}.owned", pages.owned, tuple(like.shape), (torch.int64,), like)
    shape = (like.shape[0], "max_pages")
    _checks.tensor(op, f"{argument}.page_table", pages.page_table, shape, (torch.int32,), like)
    _checks.tensor(op, f"{argument}.free_pages", pages.free_pages, ("num_pages",), (torch.int32,), like)
    _checks.tensor(op, f"{argument}.free_count", pages.free_count, (), (torch.int64,), like)
    for name, t in zip(Pages._fields, pages):
        if not t.is_contiguous():
            _checks.fail(op, f"{argument}.{name}", "a contiguous tensor", f"strides {t.stride()}")


def _check(op: str, pages: Pages, rows: torch.Tensor) -> None:
    check_pages(op, "pages", pages)
    _checks.tensor(op, "rows", rows, ("R",), (torch.int64,), pages.lengths)


def take_pages_(
    pages: Pages,
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total: int,
    page_size: int,
    *,
    backend: str | None = None,
) -> Taken:
    """Give rows the pages that their new tokens need, all or none of them, and say where the tokens go.

    Rows take pages in the order given. Pages of an earlier call that was not committed are kept, so that calling twice
    is harmless. Where the free pages don't suffice, or a row would outgrow its line of the page table, nothing is
    changed and nothing will be written: all slots are -1.

    Args:
        pages: the state, changed in place.
        rows: (R,) int64, each at most once, -1 for padding.
        cu_seqlens: (R+1,) int32, from 0, ascending: where each row's new tokens begin among all.
        total: tokens, at least cu_seqlens[-1]; those past it are padding.
        page_size: tokens a page.
        backend: see :func:`route`.

    Returns:
        :class:`Taken`; what its ``refused`` says costs no wait until it is read.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "take_pages_"
    _check(op, pages, rows)
    _checks.tensor(op, "cu_seqlens", cu_seqlens, (rows.shape[0] + 1,), (torch.int32,), rows)
    _checks.whole(op, "total", total)
    _checks.whole(op, "page_size", page_size, 1)
    return Taken(*_take(*pages, rows, cu_seqlens, total, page_size, resolve(op, backend, rows)))


def commit_pages_(pages: Pages, rows: torch.Tensor, cu_seqlens: torch.Tensor, *, backend: str | None = None) -> None:
    """Count the tokens written since :func:`take_pages_` as part of their rows.

    Args:
        pages: the state, whose lengths grow.
        rows: (R,) int64, as ``Taken`` has them; -1 is passed over.
        cu_seqlens: (R+1,) int32, as they were given.
        backend: see :func:`route`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "commit_pages_"
    _check(op, pages, rows)
    _checks.tensor(op, "cu_seqlens", cu_seqlens, (rows.shape[0] + 1,), (torch.int32,), rows)
    _commit(pages.lengths, rows, cu_seqlens, resolve(op, backend, rows))


def free_pages_(pages: Pages, rows: torch.Tensor, *, backend: str | None = None) -> None:
    """Give back all pages of rows, whose lengths become 0.

    Args:
        pages: the state, changed in place.
        rows: (R,) int64, each at most once, -1 for padding.
        backend: see :func:`route`.

    Raises:
        ValueError: an argument doesn't fit; the message names it.
        RuntimeError: the named backend isn't available.
    """
    op = "free_pages_"
    _check(op, pages, rows)
    _free(*pages, rows, resolve(op, backend, rows))
