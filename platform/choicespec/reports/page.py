"""The report as one HTML page that loads nothing from elsewhere."""

from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import groupby
from string import Template

from choicespec.reports import words
from choicespec.reports.comparison import COLUMNS, PLACE, DecodeRow
from choicespec.reports.content import MEASURE_PUBLISHED, MEASURE_SCORER, Best, Report
from choicespec.reports.markup import code, scrolling, sheet, text
from choicespec.reports.plot import Facet, Plot
from choicespec.reports.trial_plots import MEASURE

_OPEN_FACETS = 4  # more of a plot are folded in
_SECTIONS = ("summary", "measured", "published", "scorer", "plots", "made")
_HEADINGS = (words.SUMMARY, words.OWN_TABLE, words.PUBLISHED_TABLE, words.SCORER_TABLE, words.PLOTS, words.MADE_WITH)


def render_page(report: Report) -> str:
    """The page."""
    parts = (_summary, _own, _published, _scorer, _plots, _made)
    sections = (
        f'<section id="{name}"><h2>{text(heading)}</h2>{part(report)}</section>'
        for name, heading, part in zip(_SECTIONS, _HEADINGS, parts, strict=True)
    )
    links = (f'<a href="#{name}">{text(head)}</a>' for name, head in zip(_SECTIONS, _HEADINGS, strict=True))
    template = Template((resources.files("choicespec.reports") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=text(words.TITLE),
        question=text(words.QUESTION),
        switch=text(words.LANGUAGE_SWITCH),
        links="".join(links),
        sections="".join(sections),
    )


def _summary(report: Report) -> str:
    cards = "".join(map(_card, report.best)) or _paragraph(text(words.NOTHING_MEASURED))
    measured = sum(row.measured is not None for row in report.published)
    count = words.PUBLISHED_COUNT.fill(measured=measured, all=len(report.published))
    return f'{_note(words.SUMMARY_NOTE)}<div class="cards">{cards}</div>{_paragraph(text(count))}'


def _card(best: Best) -> str:
    where = f'<div class="where">{text(best.group.title)}</div>'
    if best.kept is None:
        return f'<div class="card">{where}<div>{text(words.NOTHING_KEPT)}</div></div>'
    found = best.kept.measurement.speedup
    return (
        f'<div class="card">{where}<div class="big">{found.value:.2f}x</div>'
        f'<div class="which">{text(best.kept.trial.method.label)}</div>'
        f'<div class="small">[{found.low:.2f}, {found.high:.2f}], n={found.n}</div></div>'
    )


def _own(report: Report) -> str:
    tables = (
        f"<h3>{text(words.EXPERIMENT)} {text(experiment)}</h3>{_decode_table(rows, published=False)}"
        for experiment, rows in report.own
    )
    return _note(words.OWN_NOTE) + ("".join(tables) or _no_data(MEASURE))


def _published(report: Report) -> str:
    command = f"{text(words.MEASURE_THEM)}: {code(MEASURE_PUBLISHED)}"
    return _note(words.PUBLISHED_NOTE) + _decode_table(report.published, published=True) + _paragraph(command)


def _decode_table(rows: Sequence[DecodeRow], published: bool) -> str:
    """The table in the published form; groups have a row of their own that says what they share."""
    beside = "".join(f"<th>{text(word)}</th>" for word in (words.PUBLISHED, words.MEASURED)) * len(COLUMNS)
    span, deep = (2, ' rowspan="2"') if published else (1, "")
    figures = "".join(f'<th colspan="{span}">{text(column.word)}</th>' for column in COLUMNS)
    head = f"<tr><th{deep}>{text(words.METHOD)}</th>{figures}<th{deep}>{text(words.PROMPTS)}</th></tr>"
    head += f"<tr>{beside}</tr>" if published else ""
    return scrolling(head, list(_grouped(rows, published)), "decode tall" if published else "decode")


def _grouped(rows: Sequence[DecodeRow], published: bool) -> Iterator[str]:
    across = 2 + len(COLUMNS) * (2 if published else 1)
    for place, group in groupby(rows, key=lambda row: row.place):
        named = (f"<i>{text(word)}</i> <b>{text(cell)}</b>" for word, cell in zip(PLACE, place, strict=True) if cell)
        yield f'<tr class="place"><th colspan="{across}"><div>{" · ".join(named)}</div></th></tr>'
        yield from (_decode_row(row, published) for row in group)


def _decode_row(row: DecodeRow, published: bool) -> str:
    cells = []
    for cell in row.cells:
        if published:
            cells.append(f'<td class="theirs">{text(cell.published)}</td>')
        below = "".join(f"<small>{text(line)}</small>" for line in (cell.interval, cell.difference) if line)
        cells.append(f"<td>{text(cell.measured)}{below}</td>")
    remark = f"<small>{text(row.remark)}</small>" if row.remark else ""
    kind = ' class="unmeasured"' if row.measured is None else ""
    return f"<tr{kind}><th>{text(row.method)}{remark}</th>{''.join(cells)}<td>{text(row.prompts)}</td></tr>"


def _scorer(report: Report) -> str:
    command = f"{text(words.MEASURE_THEM)}: {code(MEASURE_SCORER)}"
    return _note(words.SCORER_NOTE) + sheet(report.scorers) + _paragraph(command)


def _plots(report: Report) -> str:
    return "".join(map(_plot, report.plots))


def _plot(plot: Plot) -> str:
    if not plot.facets:
        said = _paragraph(text(plot.finding)) if plot.finding else _no_data(plot.command)
        return f"<figure><h3>{text(plot.title)}</h3>{said}</figure>"
    first, others = plot.facets[:_OPEN_FACETS], plot.facets[_OPEN_FACETS:]
    folded = f"<details><summary>{text(words.MORE.fill(count=len(others)))}</summary>{_facets(others)}</details>"
    return (
        f'<figure><h3>{text(plot.title)}</h3>{_note(plot.note)}<div class="keys">{"".join(plot.keys)}</div>'
        f"{_facets(first)}{folded if others else ''}"
        f"<details><summary>{text(words.NUMBERS)}</summary>{sheet(plot.sheet)}</details></figure>"
    )


def _facets(facets: Sequence[Facet]) -> str:
    drawn = (f'<div class="facet"><h4>{text(facet.title)}</h4>{facet.drawing}</div>' for facet in facets)
    return f'<div class="facets">{"".join(drawn)}</div>'


def _made(report: Report) -> str:
    left_out = "".join(f"<li>{text(line)}</li>" for line in report.unreadable)
    said = f"<h3>{text(words.UNREADABLE)}</h3><ul>{left_out}</ul>" if left_out else ""
    return _note(words.MADE_WITH_NOTE) + sheet(report.environments) + said


def _note(word: words.Word) -> str:
    return f'<p class="note">{text(word)}</p>'


def _paragraph(html: str) -> str:
    return f"<p>{html}</p>"


def _no_data(command: str) -> str:
    return _paragraph(f"{text(words.NO_DATA)} {code(command)}")
