"""Figures as SVG text that follows the page's colours, each with the sentence that describes it and its numbers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity.results import Row

# Hues that stand out on a light and on a dark ground; dashes and markers tell the lines apart without colour.
COLOURS = ("#3b82f6", "#ef7d00", "#16a34a", "#d946a6", "#8b5cf6", "#0e9aa7", "#b7791f", "#64748b")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)), (0, (1, 2)))
MARKERS = "os^Dvx+*"
INK = "#010203"  # becomes the page's text colour


@dataclass(frozen=True)
class Table:
    """Numbers as text cells, the first column naming the row."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Picture:
    """A figure: SVG text, what it shows in words, and the same numbers."""

    name: str
    title: str
    alt: str
    svg: str
    table: Table


def picture(
    name: str, title: str, alt: str, table: Table, paint: Callable[[Any], None], size: tuple[float, float] = (7.5, 3.8)
) -> Picture:
    """Let `paint(axes)` draw on axes of `size` inches, and take the SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        paint(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Picture(name, title, alt, _inline(out.getvalue(), name, alt), table)


def _inline(text: str, name: str, alt: str) -> str:
    """Only the <svg> element, its ids made unique in the page, its ink the page's, its description for readers."""
    import html

    svg = text[text.index("<svg") :]
    for mark in ('id="', "url(#", 'href="#'):
        svg = svg.replace(mark, f"{mark}{name}-")
    svg = svg.replace(INK, "currentColor")
    head = f'<svg role="img" aria-labelledby="{name}-alt"'
    body = svg[svg.index(">") + 1 :]
    opening = svg[: svg.index(">")].replace("<svg", head, 1)
    return f'{opening}><title id="{name}-alt">{html.escape(alt)}</title>{body}'


def standalone(picture: Picture) -> str:
    """The figure as a file of its own: dark ink on a white ground, since no page gives it colours."""
    svg = picture.svg.replace("currentColor", "#1b1f24")
    start = svg.index("</title>") + len("</title>")
    return f'{svg[:start]}<rect width="100%" height="100%" fill="#ffffff"/>{svg[start:]}'


def lines(
    axes: Any, series: Mapping[str, Sequence[tuple[float, float]]], *, logx: bool = True, logy: bool = False
) -> None:
    """Named lines of points; where there are several, a legend beside them."""
    for i, (label, points) in enumerate(series.items()):
        look = {"color": COLOURS[i % 8], "linestyle": DASHES[i % 8], "marker": MARKERS[i % 8], "markersize": 4}
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.6, **look)
    if logx:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: thousands(value))
    if logy:
        axes.set_yscale("log")
    axes.grid(True, alpha=0.25)
    if len(series) > 1:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def thousands(value: float) -> str:
    """4096 as 4K, 1048576 as 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,g}" if value < 1e6 else f"{value:,.0f}"


def histogram(rows: Sequence[Row]) -> Picture | None:
    """How far below their bounds the checks stayed: largest error over bound, by decade; None without any ratio."""
    found: dict[str, list[float]] = {}
    for row in rows:
        ratio = finite(row.ratio)
        if ratio is not None:
            found.setdefault(row.implementation, []).append(ratio)
    if not found:
        return None
    edges = list(range(-9, 3))
    names = ["0", *(f"1e{edge}" for edge in edges)]

    def place(ratio: float) -> int:
        return 0 if ratio == 0 else 1 + min(max(math.floor(math.log10(ratio)), edges[0]), edges[-1]) - edges[0]

    counts = {name: [0] * len(names) for name in found}
    for name, ratios in found.items():
        for ratio in ratios:
            counts[name][place(ratio)] += 1
    used = [i for i in range(len(names)) if any(column[i] for column in counts.values())]
    shown = range(min(used), max(used) + 1)
    worst = max(max(ratios) for ratios in found.values())

    def paint(axes: Any) -> None:
        bottom = [0] * len(names)
        for i, (name, column) in enumerate(counts.items()):
            heights, base = ([each[j] for j in shown] for each in (column, bottom))
            axes.bar([names[j] for j in shown], heights, bottom=base, color=COLOURS[i % 8], label=name)
            bottom = [a + b for a, b in zip(bottom, column, strict=True)]
        axes.set_xlabel("worst error / bound, decade from")
        axes.set_ylabel("checks")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + len(counts) // 14)

    table = Table(("implementation", *(names[j] for j in shown)), [])
    for name, column in counts.items():
        table.rows.append((name, *(str(column[j]) for j in shown)))
    alt = (
        f"Worst ratio of error to bound, {sum(map(len, found.values()))} checks by decade; the largest is {worst:.3g}."
    )
    return picture("ratio-bars", "Error over bound", alt, table, paint)


def finite(value: Any) -> float | None:
    """A number as float; None for what is absent, no number, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def number(value: Any, digits: int = 3) -> str:
    """A number for a table cell; a dash where there is none."""
    known = finite(value)
    if known is None:
        return "-" if value is None else str(value)
    return f"{known:,.0f}" if known == int(known) and abs(known) >= 1000 else f"{known:.{digits}g}"
