"""The scorer table of the report: every published row beside what was measured of it, then our own rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from choicespec.records import Estimate
from choicespec.reports import words
from choicespec.reports.collected import ScorerRows
from choicespec.reports.markup import Sheet
from choicespec.reports.published_rows import PublishedScorerRow, scorer_rows
from choicespec.reports.scorer_table import counterpart
from choicespec.reports.words import Label
from choicespec.scorer.table import Row

_HEAD: tuple[Label, ...] = (
    words.PUBLISHED_ROW,
    words.MEASURED_ROW,
    words.PROMPTS,
    words.PUBLISHED_TOP1,
    words.TOP1,
    words.DIFFERENCE,
    words.PUBLISHED_ACCEPTED,
    words.ACCEPTED_ALL,
    words.DIFFERENCE,
    words.GAP,
    words.ACCEPTED_PATH,
)


class _Pair(NamedTuple):
    """A published row, and one measured that corresponds to it; one of them may be missing."""

    published: PublishedScorerRow | None
    measured: Row | None
    experiment: str


def scorer_sheet(found: Sequence[ScorerRows]) -> Sheet:
    """All rows; a difference is the measured scorer's figure less the published scorer's."""
    return Sheet(_HEAD, tuple(_cells(pair) for pair in _paired(found)))


def _paired(found: Sequence[ScorerRows]) -> Iterator[_Pair]:
    known = [
        _Pair(counterpart(row, table.num_layers), row, table.experiment)
        for table in found
        for row in sorted(table.rows, key=lambda row: (row.task, row.precision, row.variant.name))
    ]
    for published in scorer_rows():
        yield from [pair for pair in known if pair.published == published] or [_Pair(published, None, "")]
    yield from (pair for pair in known if pair.published is None)


def _cells(pair: _Pair) -> tuple[Label, ...]:
    published, row, experiment = pair
    name = published_top1 = published_accepted = difference_top1 = difference_accepted = ""
    if published is not None:
        name = f"{published.target}\n{published.hidden}, {published.candidates}"
        published_top1 = f"{published.prior_top1_percent:.1f} → {published.scorer_top1_percent:.1f}"
        published_accepted = f"{published.accepted_prior:.2f} → {published.accepted_scorer:.2f}"
        published_accepted += f" ({published.accepted_oracle:.2f})"
    if row is None:
        return name, words.NOT_MEASURED, "", published_top1, "", "", published_accepted, "", "", "", ""
    prior, scorer, oracle = row.found.prior, row.found.scorer, row.found.oracle
    if published is not None:
        difference_top1 = f"{100 * scorer.top1.value - published.scorer_top1_percent:+.1f}"
        difference_accepted = f"{scorer.accepted.value - published.accepted_scorer:+.2f}"
    return (
        name,
        f"{row.task}, {row.variant.label}\n{row.precision} ({experiment})",
        str(scorer.accepted.n),
        published_top1,
        f"{100 * prior.top1.value:.1f} → {100 * scorer.top1.value:.1f}\n{_interval(scorer.top1, 1, 100)}",
        difference_top1,
        published_accepted,
        _ranked(prior.accepted, scorer.accepted, oracle.accepted),
        difference_accepted,
        f"{100 * row.found.gap_closed:.0f}",
        _ranked(prior.accepted_on_path, scorer.accepted_on_path, oracle.accepted_on_path),
    )


def _ranked(prior: Estimate, scorer: Estimate, oracle: Estimate) -> str:
    return f"{prior.value:.2f} → {scorer.value:.2f} ({oracle.value:.2f})\n{_interval(scorer, 2, 1)}"


def _interval(estimate: Estimate, digits: int, scale: float) -> str:
    return f"[{scale * estimate.low:.{digits}f}, {scale * estimate.high:.{digits}f}]"
