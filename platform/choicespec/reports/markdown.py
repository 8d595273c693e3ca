"""The report as Markdown, in one language; plots are their numbers."""

from collections.abc import Iterator, Sequence

from choicespec.reports import words
from choicespec.reports.comparison import COLUMNS, PLACE, Cell, DecodeRow
from choicespec.reports.content import MEASURE_PUBLISHED, MEASURE_SCORER, Best, Report
from choicespec.reports.markup import Sheet
from choicespec.reports.plot import Plot
from choicespec.reports.words import Label, Language, said

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#"} | {"\n": " "})
_MOST_ROWS = 40  # of a plot's numbers; the page has all


def render_markdown(report: Report, language: Language) -> str:
    """The document."""
    return "\n\n".join(_blocks(report, language)) + "\n"


def _blocks(report: Report, language: Language) -> Iterator[str]:
    def word(label: Label) -> str:
        return _text(label, language)

    measured = sum(row.measured is not None for row in report.published)
    yield f"# {word(words.TITLE)}"
    yield word(words.QUESTION)
    yield f"## {word(words.SUMMARY)}"
    yield "\n".join(f"- {_best(best, language)}" for best in report.best) or word(words.NOTHING_MEASURED)
    yield f"## {word(words.OWN_TABLE)}"
    yield word(words.OWN_NOTE)
    for experiment, rows in report.own:
        yield f"### {word(words.EXPERIMENT)} {word(experiment)}"
        yield _decode_table(rows, language, published=False)
    yield f"## {word(words.PUBLISHED_TABLE)}"
    yield word(words.PUBLISHED_NOTE)
    yield word(words.PUBLISHED_COUNT.fill(measured=measured, all=len(report.published)))
    yield f"{word(words.MEASURE_THEM)}: `{MEASURE_PUBLISHED}`"
    yield _decode_table(report.published, language, published=True)
    yield f"## {word(words.SCORER_TABLE)}"
    yield word(words.SCORER_NOTE)
    yield f"{word(words.MEASURE_THEM)}: `{MEASURE_SCORER}`"
    yield _table(report.scorers, language)
    yield f"## {word(words.PLOTS)}"
    for plot in report.plots:
        yield from _plot(plot, language)
    yield f"## {word(words.MADE_WITH)}"
    yield word(words.MADE_WITH_NOTE)
    yield _table(report.environments, language)
    if report.unreadable:
        yield f"### {word(words.UNREADABLE)}"
        yield "\n".join(f"- {word(line)}" for line in report.unreadable)


def _best(best: Best, language: Language) -> str:
    where = _text(best.group.title, language)
    if best.kept is None:
        return f"{where}: {_text(words.NOTHING_KEPT, language)}"
    found = best.kept.measurement.speedup
    interval = f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}], n={found.n}"
    return f"{where}: {_text(best.kept.trial.method.label, language)} {_text(interval, language)}"


def _plot(plot: Plot, language: Language) -> Iterator[str]:
    yield f"### {_text(plot.title, language)}"
    if plot.facets:
        yield _text(plot.note, language)
        yield _table(plot.sheet._replace(rows=plot.sheet.rows[:_MOST_ROWS]), language)
        if len(plot.sheet.rows) > _MOST_ROWS:
            yield _text(words.MORE.fill(count=len(plot.sheet.rows) - _MOST_ROWS), language)
    elif plot.finding:
        yield _text(plot.finding, language)
    else:
        yield f"{_text(words.NO_DATA, language)} `{plot.command}`"


def _decode_table(rows: Sequence[DecodeRow], language: Language, published: bool) -> str:
    head: list[Label] = [*PLACE, words.METHOD]
    for column in COLUMNS:
        head += [_joined(column.word, words.PUBLISHED)] if published else []
        head.append(_joined(column.word, words.MEASURED) if published else column.word)
        head += [words.DIFFERENCE] if published else []
    body = [
        (*row.place, row.method, *(text for cell in row.cells for text in _cells(cell, published)), row.prompts)
        for row in rows
    ]
    return _table(Sheet((*head, words.PROMPTS), tuple(body)), language)


def _cells(cell: Cell, published: bool) -> tuple[str, ...]:
    measured = f"{cell.measured} {cell.interval}".strip()
    return (cell.published, measured, cell.difference) if published else (measured,)


def _joined(one: words.Word, other: words.Word) -> words.Word:
    return words.Word(*(f"{first}, {second}" for first, second in zip(one, other, strict=True)))


def _table(sheet: Sheet, language: Language) -> str:
    head, *body = ([_text(cell, language) for cell in line] for line in (sheet.head, *sheet.rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _text(label: Label, language: Language) -> str:
    return said(label, language).translate(_SPECIAL)
