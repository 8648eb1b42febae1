"""Plot of the candidates of a search as SVG: score over cost, with the Pareto front."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fxq.common.files import as_path, write_file
from fxq.display.colours import FAINT, FONT, INK, LOOKS, QUIET, clean
from fxq.errors import RenderError

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 60
"""Pixels of the plot, and of its margins."""
MAX_TICKS = 5
"""Number of ticks on an axis."""


@dataclass(frozen=True)
class ParetoPoint:
    """Point of the plot: one candidate.

    Attributes:
        x: its cost.
        y: its score, larger is better. Points that are not finite are not drawn.
        label: tooltip.
        front: whether it is on the Pareto front, which is drawn as a line.
        chosen: whether it is the result of the search.
    """

    x: float
    y: float
    label: str
    front: bool = False
    chosen: bool = False


def write_pareto(
    points: Sequence[ParetoPoint], target: float, x_label: str, y_label: str, path: str | os.PathLike[str]
) -> Path:
    """Plot candidates to an `.svg` file.

    Args:
        points: the candidates.
        target: required score, drawn as a dashed line.
        x_label: label of the cost axis.
        y_label: label of the score axis.
        path: the file. Missing folders are created.

    Raises:
        InputError: `path` is not a path.
        RenderError: the suffix is not .svg, or the file cannot be written.
    """
    path = as_path(path)
    if path.suffix.lower() != ".svg":
        raise RenderError(f"cannot draw to {path.name!r}: this plot can only be written as .svg.")
    return write_file(path, pareto_svg(points, target, x_label, y_label).encode())


def pareto_svg(points: Sequence[ParetoPoint], target: float, x_label: str, y_label: str) -> str:
    """Return the plot as SVG text; for the arguments see `write_pareto`."""
    shown = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    xs, ys = _Axis.of([p.x for p in shown]), _Axis.of([*(p.y for p in shown), target])

    def at(x: float, y: float) -> tuple[float, float]:
        right, down = WIDTH - RIGHT - LEFT, HEIGHT - TOP - BOTTOM
        return round(LEFT + right * xs.share(x), 1), round(HEIGHT - BOTTOM - down * ys.share(y), 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for value in xs.ticks:
        x, y = at(value, ys.low)
        parts.append(_line(x, y, x, TOP, FAINT, 0.5) + _text(x, y + 18, f"{value:.4g}"))
    for value in ys.ticks:
        x, y = at(xs.low, value)
        parts.append(_line(x, y, WIDTH - RIGHT, y, FAINT, 0.5) + _text(x - 8, y + 4, f"{value:.4g}", "end"))
    x, y = at(xs.low, target)
    parts.append(_line(x, y, WIDTH - RIGHT, y, LOOKS["float"].colour, 1.0, 'stroke-dasharray="6 4"'))
    parts.append(_text(WIDTH - RIGHT, y - 5, f"target: {target:.4g}", "end", LOOKS["float"].colour))
    front = sorted((p for p in shown if p.front), key=lambda p: p.x)
    steps = " ".join(f"{x},{y}" for x, y in (at(p.x, p.y) for p in front))
    parts.append(f'<polyline points="{steps}" fill="none" stroke="{LOOKS["int8"].colour}" stroke-width="1.5"/>')
    for point in shown:
        x, y = at(point.x, point.y)
        fill = LOOKS["int8"].colour if point.front else "#ffffff"
        ring = f' stroke="{INK}" stroke-width="2.5"' if point.chosen else f' stroke="{LOOKS["int8"].colour}"'
        radius = 7 if point.chosen else 4
        title = f"<title>{escape(clean(point.label))}</title>"
        parts.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{fill}"{ring}>{title}</circle>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label, colour=QUIET))
    parts.append(_text(LEFT, TOP - 12, y_label, "start", QUIET))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = f'font-family="{FONT}" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


@dataclass(frozen=True)
class _Axis:
    """Range of numbers along an axis."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Axis:
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        margin = 0.05 * (max(finite) - min(finite)) or 0.5
        return cls(min(finite) - margin, max(finite) + margin)

    @property
    def ticks(self) -> list[float]:
        """Round numbers within the range."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / MAX_TICKS))
        step *= next(times for times in (1, 2, 5, 10) if (self.high - self.low) / (times * step) <= MAX_TICKS)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * i for i in range(first, last + 1)]

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, more: str = "") -> str:
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}" {more}/>'


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(clean(words))}</text>'
