"""What the report says, before it is HTML or Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from choicespec.reports import words
from choicespec.reports.collected import Collected, Group
from choicespec.reports.comparison import DecodeRow, own_table, published_table
from choicespec.reports.context_plot import context_plot
from choicespec.reports.markup import Sheet
from choicespec.reports.plot import Plot
from choicespec.reports.replay_plots import cost_plot, live_plot, sweep_plot
from choicespec.reports.scorer_rows import scorer_sheet
from choicespec.reports.trial_plots import TrialPlots
from choicespec.results import Kept

MEASURE_PUBLISHED, MEASURE_SCORER = "python -m jobs.bench published", "python -m jobs.train evaluate scorer"


class Best(NamedTuple):
    """The fastest method of a group that kept every output; None where none did."""

    group: Group
    kept: Kept | None


class Report(NamedTuple):
    """The whole.

    Attributes:
        own: the rows of each experiment.
        environments: what was measured with.
        unreadable: what was left out, each with the reason.
    """

    best: list[Best]
    own: list[tuple[str, list[DecodeRow]]]
    published: list[DecodeRow]
    scorers: Sheet
    plots: list[Plot]
    environments: Sheet
    unreadable: tuple[str, ...]


def report_of(found: Collected) -> Report:
    """Put together what was collected."""
    trials = TrialPlots(found.groups)
    plots = [
        trials.speedups(),
        trials.positions(),
        trials.sources(),
        trials.times(),
        context_plot(found.kept),
        cost_plot(found.costs),
        trials.margins(),
        sweep_plot(found.sweeps),
        live_plot(found.foretold),
    ]
    return Report(
        best=[best for group in found.groups if (best := _best(group)) is not None],
        own=own_table(found.groups),
        published=published_table(found.kept),
        scorers=scorer_sheet(found.scorers),
        plots=plots,
        environments=_environments(found.groups),
        unreadable=found.unreadable,
    )


def _best(group: Group) -> Best | None:
    """None where the group has plain decoding alone."""
    drafting = [one for one in group.kept if one.trial.method.drafts and not one.measurement.never_proposed]
    kept = [one for one in drafting if one.measurement.match.value == 1]
    return Best(group, kept[0] if kept else None) if drafting else None


def _environments(groups: Sequence[Group]) -> Sheet:
    """One row for each that is different."""
    rows: dict[tuple[str, ...], str] = {}
    for group in groups:
        for one in group.kept:
            e = one.measurement.environment
            machine = e.cpu if e.device == "cpu" else f"{e.device}, {e.cpu}"
            row = (group.experiment, machine, str(e.threads), e.dtype, e.runtime_build, e.choicespec, e.git_revision)
            rows[row] = max(rows.get(row, ""), one.measurement.measured_at[:10])
    head = (words.EXPERIMENT, words.MACHINE, words.THREADS, words.DTYPE, words.BUILD, "choicespec", words.REVISION)
    return Sheet((*head, words.MEASURED_AT), tuple((*row, day) for row, day in rows.items()))
