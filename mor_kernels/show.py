"""What depth and router scores look like: in the terminal, as a page of HTML, as charts."""

from __future__ import annotations

import html
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:  # not needed to colour a text
    from matplotlib.figure import Figure
    from torch import Tensor

    from .model import MoRConfig

# From few recursions to many. In the terminal, xterm-256 colours that can be read on light and dark. On a page, colours
# whose lightness alone tells the order, so that they stay apart without colour vision and in grey; a light page takes
# them from light to dark, and a dark one from dark to light, so that deep tokens stand out of either.
_ANSI = (39, 78, 178, 208, 197, 165)
_PAGE = ("#f7f4bf", "#bfe3a8", "#72c7b0", "#3a9dbf", "#2f62ad", "#252a70")
# a blue and an orange that stay apart without colour vision
_KEPT, _DROPPED = "#0072b2", "#e69f00"


class Token(NamedTuple):
    text: str  # "" where a token ends inside a character: its text is that of the token that completes it
    id: int
    depth: int
    scores: str = ""  # what the router said of it


def _place(depth: int, num_recursions: int) -> int:
    return round((depth - 1) * (len(_PAGE) - 1) / max(num_recursions - 1, 1))


def _recursions(count: int) -> str:
    return f"{count} recursion{'s' * (count != 1)}"


# Terminal


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
    parts = []
    for depth, _, share in shares(depths, num_recursions):
        part = f"{_recursions(depth)} {share:.0%}"
        parts.append(ansi(part, depth, num_recursions) if color else part)
    return "  ".join(parts)


def shares(depths: Iterable[int], num_recursions: int) -> list[tuple[int, int, float]]:
    """(depth, how many of ``depths`` are it, their share) for 1..num_recursions."""
    depths = list(depths)
    counts = [(depth, depths.count(depth)) for depth in range(1, num_recursions + 1)]
    return [(depth, count, count / max(len(depths), 1)) for depth, count in counts]


# HTML


def page(tokens: Iterable[Token], num_recursions: int, title: str) -> str:
    """A self-contained HTML page: the text, each token on the colour of its depth, and a legend with shares.

    The page loads nothing and runs nothing. Under the pointer a token shows its text, id, depth and scores.
    """
    tokens = list(tokens)
    depths = [token.depth for token in tokens]
    found = shares(depths, num_recursions)
    mean = sum(depths) / max(len(depths), 1)
    bar = "".join(f'<b class="d{depth}" style="flex-grow:{count}"></b>' for depth, count, _ in found if count)
    key = "".join(
        f'<li><b class="d{depth}"></b>{_recursions(depth)}: {count:,} ({share:.0%})</li>'
        for depth, count, share in found
    )
    styles = "".join(_rule(depth, _PAGE[_place(depth, num_recursions)]) for depth in range(1, num_recursions + 1))
    dark = "".join(_rule(depth, _PAGE[-1 - _place(depth, num_recursions)]) for depth in range(1, num_recursions + 1))
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #1a1a1a; --line: #767676 }}
{styles}
@media (prefers-color-scheme: dark) {{
:root {{ --page: #15171c; --ink: #e8e8e8; --line: #909090 }}
{dark}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50em; margin: 0 auto; padding: 0 1em 2em;
  color: var(--ink); background: var(--page) }}
header {{ position: sticky; top: 0; padding: .7em 0; background: var(--page); border-bottom: 1px solid var(--line) }}
h1 {{ font-size: 1.2em; margin: 0; overflow-wrap: anywhere }}
p, ul {{ margin: .3em 0; padding: 0 }}
ul {{ display: flex; flex-wrap: wrap; gap: .2em 1.5em; list-style: none }}
li b {{ display: inline-block; width: 1em; height: 1em; margin-inline-end: .4em; vertical-align: -.1em }}
div {{ display: flex; height: .7em; margin: .5em 0 }}
b {{ border: 1px solid var(--line); box-sizing: border-box }}
main {{ margin-top: 1em; line-height: 1.9; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext }}
span {{ padding: .2em 0; border-inline-end: 1px solid var(--line); border-radius: 2px }}
span:hover {{ outline: 2px solid var(--ink) }}
span:empty::before {{ content: "\\b7" }}
i::before {{ content: "\\21b5"; font-style: normal; opacity: .6 }}
</style></head><body><header><h1>{title}</h1>
<p>{len(tokens):,} tokens, mean depth {mean:.2f} of {num_recursions}</p><div>{bar}</div><ul>{key}</ul></header>
<main dir="auto">{"".join(map(_span, tokens))}</main></body></html>
"""


def _span(token: Token) -> str:
    said = [repr(token.text) if token.text else "part of a character", f"id {token.id}", _recursions(token.depth)]
    facts = html.escape(" · ".join(said + [token.scores] * bool(token.scores)))
    # a parser would make a line feed of "\r", and drops "\0", which can't be written; a line's end is marked
    text = html.escape(token.text).replace("\r", "&#13;").replace("\0", "\u2400").replace("\n", "<i></i>\n")
    return f'<span class="d{token.depth}" title="{facts}">{text}</span>'


def _rule(depth: int, color: str) -> str:
    """A colour, and the better readable of black and white on it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
    # WCAG 2: contrast is (lighter + 0.05) / (darker + 0.05)
    ink = "#000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#fff"
    return f".d{depth} {{ color: {ink}; background: {color} }}\n"


# Router scores


def words_for(config: MoRConfig) -> tuple[str, str]:
    """What became of a token at a recursion, or of a depth for a token."""
    return ("kept", "dropped") if config.router == "expert_choice" else ("chosen", "not chosen")


class Scores(NamedTuple):
    """Router scores at one recursion, or for one depth."""

    name: str
    kept: list[float]
    dropped: list[float]


def score_name(config: MoRConfig) -> str:
    return "router logit" if config.router == "expert_choice" else "probability"


def scores(router_logits: Tensor, config: MoRConfig) -> Tensor:
    """What is shown of ``MoROutput.router_logits`` (..., Nr): expert-choice the logits, which decide; token-choice the
    probabilities of the depths."""
    if config.router == "expert_choice":
        return router_logits
    return router_logits.softmax(-1) if config.router_activation == "softmax" else router_logits.sigmoid()


def describe(values: Sequence[float], config: MoRConfig) -> str:
    """A token's scores (Nr), as far as it got, in words."""
    plural = {"router logit": "router logits", "probability": "probabilities"}[score_name(config)]
    return f"{plural} " + ", ".join(f"{value:.2f}" for value in values if not math.isnan(value))


def split_scores(values: Tensor, depths: Tensor, config: MoRConfig) -> list[Scores]:
    """Scores (n, Nr) of tokens of depths (n,) by what became of the tokens.

    Expert-choice: at each recursion the tokens that it kept, and those that it dropped of what the one before kept.
    Token-choice: for each depth the tokens that have it, and all others. What is no number is left out.
    """
    found = []
    for r in range(config.num_recursions):
        if config.router == "expert_choice":
            name, kept, dropped = f"recursion {r + 1}", depths > r, depths == r
        else:
            name, kept, dropped = f"depth {r + 1}", depths == r + 1, depths != r + 1
        column = values[:, r]
        number = column.isfinite()
        found.append(Scores(name, column[kept & number].tolist(), column[dropped & number].tolist()))
    return found


# Charts


def require_plot() -> None:
    """An ImportError that says what to install, if charts can't be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--png: expected matplotlib to be installed (pip install mor-kernels[plot])") from None


def _figure(**settings: Any) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: draws with Agg, whatever the display

    return Figure(layout="constrained", **settings)


def _save(figure: Figure, path: Path) -> None:
    from .files import write_atomic

    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))


def depth_chart(depths: Sequence[int], num_recursions: int, path: Path, title: str) -> None:
    """A PNG with the share of tokens of each depth."""
    figure = _figure(figsize=(1.6 + 0.9 * max(num_recursions, 3), 3.2))
    axes = figure.subplots()
    found = shares(depths, num_recursions)
    colors = [_PAGE[_place(depth, num_recursions)] for depth, _, _ in found]
    bars = axes.bar([d for d, _, _ in found], [100 * s for _, _, s in found], color=colors, edgecolor="#333", width=0.7)
    axes.bar_label(bars, [f"{share:.1%}\n{count:,}" for _, count, share in found], fontsize=9, padding=2)
    axes.set_xticks([depth for depth, _, _ in found])
    axes.set(xlabel="recursions", ylabel="tokens, %", ylim=(0, 122 * max(share for _, _, share in found)))
    mean = sum(depths) / len(depths)
    axes.set_title(f"{title}\n{len(depths):,} tokens, mean depth {mean:.2f}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def score_chart(
    found: Sequence[Scores], config: MoRConfig, path: Path, title: str, threshold: float | None
) -> None:
    """A PNG with a panel for each of ``found``: histograms of what was kept and of what was dropped, on the same bins;
    and a line at ``threshold``, the score above which decoding goes on."""
    figure = _figure(figsize=(2.9 * len(found) + 0.4, 3.4))
    words = words_for(config)
    handles = {}
    for number, (axes, part) in enumerate(zip(figure.subplots(1, len(found), squeeze=False)[0], found)):
        bins = _bins(part, 0.0 if threshold is None else threshold)
        for values, color, word in zip((part.kept, part.dropped), (_KEPT, _DROPPED), words):
            if values:
                style = {"histtype": "stepfilled", "fc": color + "66", "ec": color, "linewidth": 1.2}
                handles[word] = axes.hist(values, bins, **style)[2][0]
        if threshold is not None and number:  # the first recursion takes every token
            handles[f"threshold {threshold:g}"] = axes.axvline(threshold, color="black", linestyle="--", linewidth=1)
        counts = ", ".join(f"{len(values):,} {word}" for values, word in zip((part.kept, part.dropped), words))
        axes.set_title(f"{part.name}\n{counts}", fontsize=9)
        axes.set_xlabel(score_name(config))
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines["bottom"].set_zorder(3)  # over the outlines of empty bins
    figure.axes[0].set_ylabel("tokens")
    figure.suptitle(title, fontsize=10)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _save(figure, path)


def _bins(part: Scores, edge: float) -> list[float]:
    """Edges of about 30 equal bins over all scores, of which ``edge`` is one, so that no bin lies on either side."""
    low, high = (bound(part.kept + part.dropped, default=edge) for bound in (min, max))
    width = (high - low) / 30 or 1 / 30
    first, last = math.floor((low - edge) / width), math.ceil((high - edge) / width)
    return [edge + width * i for i in range(first, max(last, first + 1) + 1)]
