"""Plots as inline SVG without a fixed width: places in percent, sizes in pixels, so that a phone can show their text.

Colours are classes that the page's style gives a light and a dark value; every series has a shape or a dash besides.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import Literal, NamedTuple

from choicespec.reports.markup import text
from choicespec.reports.words import Label

SERIES = 8  # colours
_SHAPES = (
    '<circle r="4.5"/>',
    '<path d="M-4.5-4.5h9v9h-9z"/>',
    '<path d="M0-6 5.5 4.5h-11z"/>',
    '<path d="M0-6 6 0 0 6-6 0z"/>',
    '<path d="M0 6 5.5-4.5h-11z"/>',
)
_STEPS = (1, 2, 2.5, 5, 10)
_MOST_TICKS = 6


class Scale(NamedTuple):
    """From values to percent of an axis.

    Attributes:
        low, high: the values at its ends.
        log: in proportion to the logarithm.
        marked: the values that are written beside it; None chooses round ones.
    """

    low: float
    high: float
    log: bool = False
    marked: tuple[float, ...] | None = None

    def at(self, value: float) -> float:
        """Percent; what lies beyond an end is drawn at it."""
        low, high, value = (log10(max(x, 1e-12)) if self.log else x for x in (self.low, self.high, value))
        return min(100.0, max(0.0, 100 * (value - low) / (high - low)))

    @property
    def ticks(self) -> list[float]:
        """Where it is marked."""
        if self.marked is not None:
            return list(self.marked)
        if self.log:
            return [10.0**power for power in range(ceil(log10(self.low)), floor(log10(self.high)) + 1)]
        span = self.high - self.low
        unit = 10.0 ** floor(log10(span / _MOST_TICKS))
        step = next(unit * factor for factor in _STEPS if span / (unit * factor) <= _MOST_TICKS)
        return [step * number for number in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]


def from_zero(values: Iterable[float]) -> Scale:
    """From 0 to a little beyond the largest value."""
    return Scale(0.0, 1.06 * max([*values, 1e-9]))


class Panel:
    """A plot with two axes.

    Args:
        x, y: its scales.
        x_label, y_label: what they are of.
    """

    def __init__(self, x: Scale, y: Scale, x_label: Label, y_label: Label) -> None:
        self._x, self._y, self._labels = x, y, (x_label, y_label)
        self._drawn: list[str] = []

    def line(self, points: Sequence[tuple[float, float]], series: int, dashed: bool = False) -> None:
        """Through the points, in order."""
        style = f"line {colour(series)}" + (" dashed" if dashed else "")
        for (x1, y1), (x2, y2) in pairwise(points):
            self._drawn.append(f'<line class="{style}" {self._place(x1, y1, "1")} {self._place(x2, y2, "2")}/>')

    def reference(self, y: float) -> None:
        """A value that others are compared with, across the plot."""
        at = f"{100 - self._y.at(y):.2f}%"
        self._drawn.append(f'<line class="reference" x1="0" x2="100%" y1="{at}" y2="{at}"/>')

    def mark(self, x: float, y: float, series: int, title: str, hollow: bool = False) -> None:
        """One point; the title is shown where it is pointed at."""
        self._drawn.append(mark(f"{self._x.at(x):.2f}%", f"{100 - self._y.at(y):.2f}%", series, title, hollow))

    def dot(self, x: float, y: float, series: int) -> None:
        """One of very many points."""
        place = f'cx="{self._x.at(x):.1f}%" cy="{100 - self._y.at(y):.1f}%"'
        self._drawn.append(f'<circle class="dot {colour(series)}" {place} r="2"/>')

    def whisker(self, x: float, low: float, high: float, series: int) -> None:
        """An interval of y."""
        places = f"{self._place(x, low, '1')} {self._place(x, high, '2')}"
        self._drawn.append(f'<line class="whisker {colour(series)}" {places}/>')

    def bar(self, x: float, width: float, bottom: float, top: float, series: int, title: str) -> None:
        """A part of a column."""
        left, right = self._x.at(x - width / 2), self._x.at(x + width / 2)
        high, low = 100 - self._y.at(top), 100 - self._y.at(bottom)
        self._drawn.append(
            f'<rect class="area {colour(series)}" x="{left:.2f}%" y="{high:.2f}%" width="{right - left:.2f}%" '
            f'height="{low - high:.2f}%"><title>{escape(title)}</title></rect>'
        )

    def html(self) -> str:
        """The plot with its axes."""
        x_label, y_label = self._labels
        grid = [
            f'<line class="grid" x1="0" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>'
            f'<text class="tick" x="-7" y="{at:.2f}%" dy=".32em" text-anchor="end">{tick:g}</text>'
            for tick, at in ((tick, 100 - self._y.at(tick)) for tick in self._y.ticks)
        ]
        marks = [
            f'<text class="tick" x="{self._x.at(tick):.2f}%" y="100%" dy="1.5em" text-anchor="middle">{tick:g}</text>'
            for tick in self._x.ticks
        ]
        return (
            f'<div class="panel"><div class="axis-label">{text(y_label)}</div><svg class="plane" aria-hidden="true">'
            + "".join([*grid, *marks, '<line class="base" x1="0" x2="100%" y1="100%" y2="100%"/>', *self._drawn])
            + f'</svg><div class="axis-label below">{text(x_label)}</div></div>'
        )

    def _place(self, x: float, y: float, end: str) -> str:
        return f'x{end}="{self._x.at(x):.2f}%" y{end}="{100 - self._y.at(y):.2f}%"'


class Lane(NamedTuple):
    """A row of a plot with one axis.

    Attributes:
        name: what it is of.
        drawn: SVG on the scale, 100% wide.
        value: the figure in words.
    """

    name: Label
    drawn: str
    value: str


def lanes(scale: Scale, rows: Sequence[Lane], label: Label, reference: float | None = None) -> str:
    """A plot with one axis and a row a name.

    Args:
        scale: of the axis.
        rows: from the top.
        label: what the axis is of.
        reference: a value that is marked in every row.
    """
    behind = ""
    if reference is not None:
        at = f"{scale.at(reference):.2f}%"
        behind = f'<line class="reference" x1="{at}" x2="{at}" y1="0" y2="100%"/>'
    ticks = "".join(
        f'<text class="tick" x="{scale.at(tick):.2f}%" y="1.1em" text-anchor="middle">{tick:g}</text>'
        for tick in scale.ticks
    )
    body = "".join(
        f'<div class="name">{text(row.name)}</div><div class="value">{escape(row.value)}</div>'
        f'<svg class="lane" aria-hidden="true">{behind}{row.drawn}</svg>'
        for row in rows
    )
    axis = f'<div class="name axis"></div><div class="value axis"></div><svg class="lane axis">{ticks}</svg>'
    return f'<div class="lanes">{body}{axis}<div class="axis-label below across">{text(label)}</div></div>'


def spread(scale: Scale, low: float, high: float, series: int) -> str:
    """An interval in a lane."""
    ends = f'x1="{scale.at(low):.2f}%" x2="{scale.at(high):.2f}%"'
    return f'<line class="whisker {colour(series)}" {ends} y1="50%" y2="50%"/>'


def in_lane(scale: Scale, value: float, series: int, title: str, hollow: bool = False) -> str:
    """A point in a lane."""
    return mark(f"{scale.at(value):.2f}%", "50%", series, title, hollow)


def part(scale: Scale, low: float, high: float, series: int, title: str) -> str:
    """A part of a bar in a lane."""
    left, right = scale.at(low), scale.at(high)
    return (
        f'<rect class="area {colour(series)}" x="{left:.2f}%" width="{right - left:.2f}%" y="20%" height="60%">'
        f"<title>{escape(title)}</title></rect>"
    )


def mark(x: str, y: str, series: int, title: str, hollow: bool = False) -> str:
    """A series' shape at a place."""
    style = f"mark {colour(series)}" + (" hollow" if hollow else "")
    return (
        f'<svg class="at" x="{x}" y="{y}"><g class="{style}">{_shape(series)}<title>{escape(title)}</title></g></svg>'
    )


def key(series: int, label: Label, kind: Literal["mark", "area", "line"] = "mark") -> str:
    """A series in a legend; a line is dashed."""
    symbols = {
        "mark": _shape(series),
        "area": '<rect x="-6" y="-6" width="12" height="12"/>',
        "line": '<line class="dashed" x1="-8" x2="8"/>',
    }
    group = f'<g class="{kind} {colour(series)}">{symbols[kind]}</g>'
    return f'<span class="key"><svg class="symbol" viewBox="-8 -8 16 16">{group}</svg>{text(label)}</span>'


def colour(series: int) -> str:
    """The class of a series; a negative one is grey."""
    return f"s{series % SERIES}" if series >= 0 else "none"


def _shape(series: int) -> str:
    return _SHAPES[series % len(_SHAPES)]
