"""Whether runtimes and precisions say the same: one target's plain outputs for the same prompts, compared."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from choicespec.intervals import share
from choicespec.records import Estimate, Trace
from choicespec.reports.tables import figure
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive


class Agreement(NamedTuple):
    """Two ways to run a target on a task.

    Attributes:
        one, other: plain decoding in each.
        match: the share of prompts with equal output ids.
        parted_at: where outputs that differ first do, ascending.
    """

    one: TrialSpec
    other: TrialSpec
    match: Estimate
    parted_at: tuple[int, ...]


def agreements(traces: Mapping[TrialSpec, Sequence[Trace]]) -> list[Agreement]:
    """The plain trials of each target and task, each compared with the first of them."""
    groups: dict[tuple[object, ...], list[TrialSpec]] = defaultdict(list)
    for trial in traces:
        if isinstance(trial.method, Autoregressive):
            groups[trial.pair.target.model, trial.pair.target.revision, trial.task].append(trial)
    return [_compare(one, other, traces) for one, *others in groups.values() for other in others]


def agreement_table(found: Sequence[Agreement]) -> Table | None:
    """A line for each; None where there is nothing to compare."""
    table = Table(title="Plain decoding, one runtime or precision beside another", caption="equal token ids; n prompts")
    for name in ("task", "one", "other", "match %", "n", "first differences at"):
        table.add_column(name, overflow="fold")
    for one in found:
        labels = (escape(_label(trial)) for trial in (one.one, one.other))
        places = ", ".join(map(str, one.parted_at)) or "none"
        table.add_row(one.one.task.label, *labels, figure(one.match, 1, 100), str(one.match.n), places)
    return table if table.row_count else None


def _compare(one: TrialSpec, other: TrialSpec, traces: Mapping[TrialSpec, Sequence[Trace]]) -> Agreement:
    expected = {trace.request_id: trace.output_ids for trace in traces[one]}
    outputs = [(expected[t.request_id], t.output_ids) for t in traces[other] if t.request_id in expected]
    parted_at = sorted(_first_difference(*pair) for pair in outputs if pair[0] != pair[1])
    return Agreement(one, other, share(len(outputs) - len(parted_at), len(outputs)), tuple(parted_at))


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip_longest(expected, found)) if a != b)


def _label(trial: TrialSpec) -> str:
    return f"{trial.runtime.kind}, {trial.pair.target.precision}"
