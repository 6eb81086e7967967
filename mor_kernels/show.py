"""Tokens coloured by recursion depth, for the terminal and as a page of HTML."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Iterable
from typing import TextIO

# from few recursions to many; xterm-256 colour and the like for a page, both readable on light and dark
_ANSI = (39, 78, 178, 208, 197, 165)
_PAGE = ("#cfe8fc", "#c9efd6", "#fbedb4", "#fdd3ae", "#f9bfcb", "#e4c4f4")


def _place(depth: int, num_recursions: int) -> int:
    return round((depth - 1) * (len(_ANSI) - 1) / max(num_recursions - 1, 1))


def use_color(choice: str = "auto", stream: TextIO | None = None) -> bool:
    """ "always", "never", or "auto": on a terminal unless NO_COLOR is set."""
    if choice == "auto":
        return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"


def ansi(text: str, depth: int, num_recursions: int) -> str:
    """``text`` in the colour of ``depth`` (1..num_recursions) for a terminal; uncoloured for depth 0."""
    return f"\033[38;5;{_ANSI[_place(depth, num_recursions)]}m{text}\033[0m" if depth and text else text


def legend(depths: Iterable[int], num_recursions: int, color: bool) -> str:
    """One line: each depth in its colour and its share of ``depths``."""
    depths = list(depths)
    parts = []
    for depth in range(1, num_recursions + 1):
        part = f"{depth} recursion{'s' * (depth > 1)} {depths.count(depth) / max(len(depths), 1):.0%}"
        parts.append(ansi(part, depth, num_recursions) if color else part)
    return "  ".join(parts)


def page(pieces: Iterable[tuple[str, int]], num_recursions: int, title: str) -> str:
    """A self-contained HTML page of (text, depth) pieces, with a legend; the depth of each shows under the pointer."""
    pieces = list(pieces)
    depths = [depth for _, depth in pieces]
    tokens = "".join(
        f'<span class="d{depth}" title="{depth} recursion{"s" * (depth != 1)}">{html.escape(text)}</span>'
        for text, depth in pieces
    )
    numbers = range(1, num_recursions + 1)
    styles = "\n".join(f".d{d} {{ background: {_PAGE[_place(d, num_recursions)]} }}" for d in numbers)
    share = {d: depths.count(d) / max(len(depths), 1) for d in numbers}
    key = " ".join(f'<span class="d{d}">{d} recursion{"s" * (d > 1)}: {share[d]:.0%}</span>' for d in numbers)
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.7 system-ui, sans-serif; max-width: 46em; margin: 2em auto; color: #111; background: #fff }}
pre {{ white-space: pre-wrap; font: inherit }}
span {{ border-radius: 3px }}
p span {{ padding: 2px 6px }}
{styles}
</style></head><body><h1>{title}</h1><p>{key}</p><pre>{tokens}</pre></body></html>
"""
