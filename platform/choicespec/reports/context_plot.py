"""Speed-up against context length: what was published, and what was measured."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from choicespec.records import Estimate
from choicespec.reports import words
from choicespec.reports.comparison import COLUMNS, interval
from choicespec.reports.drawing import Panel, Scale, from_zero, key
from choicespec.reports.markup import Sheet
from choicespec.reports.plot import Facet, Plot
from choicespec.reports.published_rows import PublishedRow, counterparts, decode_rows
from choicespec.results import Kept

_COMMAND = "python -m jobs.bench published"


class _Point(NamedTuple):
    """A speed-up at a context length.

    Attributes:
        where: model, runtime and task.
        measured: None where it is a published figure.
    """

    where: str
    method: str
    context_tokens: int
    speedup: float
    measured: Estimate | None

    @property
    def line(self) -> tuple[str, str, bool]:
        """What it is joined by a line with."""
        return self.where, self.method, self.measured is None


def context_plot(kept: Sequence[Kept]) -> Plot:
    """A drawing for each model, runtime and task of which a method is known at two lengths or more."""
    points = _joined([*map(_published, decode_rows()), *(point for one in kept for point in _measured(one))])
    methods = sorted({point.method for point in points})
    series = {method: number for number, method in enumerate(methods)}
    facets = []
    for where in sorted({point.where for point in points}):
        own = [point for point in points if point.where == where]
        facets.append(Facet(where, _drawing(own, series)))
    rows = tuple(
        (
            point.where,
            point.method,
            str(point.context_tokens),
            words.PUBLISHED if point.measured is None else words.MEASURED,
            f"{point.speedup:.2f}",
            "" if point.measured is None else interval(point.measured, COLUMNS[0]),
        )
        for point in points
    )
    head = (words.COMPARED, words.METHOD, words.CONTEXT_TOKENS, "", words.SPEEDUP, words.INTERVAL)
    keys = tuple(key(number, method) for method, number in series.items())
    return Plot(words.CONTEXT_PLOT, words.CONTEXT_PLOT_NOTE, tuple(facets), keys, Sheet(head, rows), _COMMAND)


def _published(row: PublishedRow) -> _Point:
    return _Point(_where(row), _method(row), row.context_tokens, row.speedup, None)


def _measured(one: Kept) -> Iterator[_Point]:
    trial, found = one.trial, one.measurement.speedup
    context = trial.task.context_tokens
    if not isinstance(context, int):
        return
    published = counterparts(trial)
    for row in published:
        yield _Point(_where(row), _method(row), context, found.value, found)
    if not published:
        where = f"{trial.pair.label} · {trial.runtime.kind} · {trial.task.kind}"
        yield _Point(where, trial.method.label, context, found.value, found)


def _where(row: PublishedRow) -> str:
    return f"{row.target} {row.quantization} · {row.runtime} · {row.task}"


def _method(row: PublishedRow) -> str:
    return f"{row.method} L={row.block_length}" if row.block_length else row.method


def _joined(points: Sequence[_Point]) -> list[_Point]:
    """Those of lines with two context lengths or more, in order; plain decoding is 1 at each."""
    lengths: dict[tuple[str, str, bool], set[int]] = {}
    for point in points:
        lengths.setdefault(point.line, set()).add(point.context_tokens)
    kept = [one for one in points if len(lengths[one.line]) > 1 and not one.method.startswith("autoregressive")]
    return sorted(kept, key=lambda one: (*one.line, one.context_tokens))


def _drawing(points: Sequence[_Point], series: dict[str, int]) -> str:
    contexts = sorted({float(point.context_tokens) for point in points})
    x = Scale(contexts[0] / 1.5, contexts[-1] * 1.5, log=True, marked=tuple(contexts))
    panel = Panel(x, from_zero(_highest(point) for point in points), words.CONTEXT_TOKENS, words.TIMES)
    panel.reference(1.0)
    for line in dict.fromkeys(point.line for point in points):
        own = [point for point in points if point.line == line]
        number = series[own[0].method]
        panel.line([(one.context_tokens, one.speedup) for one in own], number, dashed=own[0].measured is None)
        for one in own:
            if one.measured is not None:
                panel.whisker(one.context_tokens, one.measured.low, one.measured.high, number)
            title = f"{one.method}, {one.context_tokens}: {one.speedup:.2f}"
            panel.mark(one.context_tokens, one.speedup, number, title, hollow=one.measured is None)
    return panel.html()


def _highest(point: _Point) -> float:
    return point.speedup if point.measured is None else max(point.speedup, point.measured.high)
