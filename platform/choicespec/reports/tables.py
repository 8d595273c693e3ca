"""The table that the jobs print."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from choicespec.records import Estimate, Measurement
from choicespec.spec.experiment import TrialSpec


def result_table(rows: Sequence[tuple[TrialSpec, Measurement]], title: str) -> Table:
    """Methods x tasks with decode rate, speed-up, accepted/step and match, each with its 95% interval, and n."""
    table = Table(title=title, caption="95% intervals in brackets; n is the number of prompts of each figure")
    for name in ("pair", "runtime", "task", "method"):
        table.add_column(name, overflow="fold")
    for name in ("decode tok/s", "speed-up", "accepted/step", "match %", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial, found in rows:
        table.add_row(
            escape(trial.pair.label),
            trial.runtime.kind,
            escape(trial.task.label),
            escape(trial.method.label) + (" (never proposed!)" if found.never_proposed else ""),
            figure(found.decode_tokens_per_s, digits=1),
            figure(found.speedup, digits=2),
            figure(found.accepted_per_step, digits=2),
            figure(found.match, digits=1, scale=100),
            str(found.match.n),
        )
    return table


def divergence_table(rows: Sequence[tuple[TrialSpec, Measurement]]) -> Table | None:
    """The first divergence of each output that is not the baseline's; None where every output matches."""
    table = Table(title="First divergences", caption="a tiny top-2 margin is a numeric tie, a large one a bug")
    for name in ("pair", "method", "request", "position", "expected", "found", "top-2 margin"):
        table.add_column(name)
    for trial, found in rows:
        for d in found.divergences:
            ids = (str(d.position), str(d.expected_id), str(d.found_id), f"{d.top2_margin:.2g}")
            table.add_row(escape(trial.pair.label), escape(trial.method.label), escape(d.request_id), *ids)
    return table if table.row_count else None


def figure(estimate: Estimate, digits: int, scale: float = 1.0) -> str:
    """``value [low, high]``."""
    value, low, high = (f"{scale * x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"
