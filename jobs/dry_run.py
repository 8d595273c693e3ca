"""What an experiment would take, and where it would go; nothing is loaded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from choicespec.cluster.nodes import NodeType, choose_node, read_node_types
from choicespec.cluster.placement import describe_shortage, fits_a_node
from choicespec.errors import CheckpointError
from choicespec.reports.published_rows import counterparts, cpu_refusal, scorer_counterparts
from choicespec.results import ResultsFolder
from choicespec.runtimes.gpu_memory import trial_memory, worker_bytes
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.resources import bundle
from huggingface_hub import constants
from rich.markup import escape
from rich.table import Table

from jobs.terminal import console, say

CLUSTER = Path(__file__).parents[1] / "cluster.yaml"
_GB = 1e9


class _Notes:
    """Reasons below a table, each once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, word: str, reason: str) -> str:
        """A cell that points at a reason."""
        return f"{word} ({self._numbers.setdefault(reason, len(self._numbers) + 1)})"

    def print(self) -> None:
        """Print them."""
        for reason, number in self._numbers.items():
            say(f"({number}) {reason}")


class _Taken(NamedTuple):
    """Cells: the memory that a trial and its worker take of each GPU, and the node type that holds the worker."""

    trial_gb: str
    worker_gb: str
    node: str


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Keep the hub out: a scorer's target is told by its weights, which would be fetched for that."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def dry_run(experiment: ExperimentSpec, results: ResultsFolder, refusal: Callable[[TrialSpec], str | None]) -> None:
    """Print the trials: what each needs, where ``cluster.yaml`` would put it, and whether it can run on this Ray.

    Args:
        experiment: what would be measured.
        results: what has been measured already.
        refusal: why a trial cannot run here; None where it can.
    """
    trials, types, notes = experiment.trials(), read_node_types(CLUSTER), _Notes()
    table = Table(
        title=f"{experiment.name}: {len(trials)} trials",
        caption="GB a GPU: weights + cache + drafters, computed from configurations; worker GB: what the worker holds "
        "of each GPU for all of its methods; node: the type in cluster.yaml",
    )
    for name in ("fingerprint", "pair", "runtime", "task", "method", "needs", "GB a GPU", "worker GB", "node", "here?"):
        table.add_column(name, overflow="fold")
    for trial in trials:
        asked = bundle(trial.pair, trial.runtime)
        reason = refusal(trial) or (None if fits_a_node(asked) else describe_shortage(asked))
        verdict = ("measured already" if results.find(trial) else "yes") if reason is None else notes.mark("no", reason)
        needs = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
        labels = (escape(trial.pair.label), trial.runtime.kind, escape(trial.task.label), escape(trial.method.label))
        table.add_row(trial.fingerprint(), *labels, needs, *_taken(trial, trials, types, notes), verdict)
    console.print(table)
    notes.print()
    _say_published(trials)


def say_scorers(experiment: ExperimentSpec) -> None:
    """Print which published rows of the scorer table an experiment's training makes."""
    rows = scorer_counterparts(experiment)
    if rows:
        say(f"{experiment.name}: jobs.train evaluate makes {len(rows)} published rows of the scorer table:")
    for row in rows:
        say(f"  {row.target} {row.hidden}, {row.candidates}: {row.figures}")


def _taken(trial: TrialSpec, trials: Sequence[TrialSpec], types: Sequence[NodeType], notes: _Notes) -> _Taken:
    of_trial, of_worker, gpu_bytes = "-", "-", 0.0
    if trial.pair.gpus:
        own = [one for one in trials if (one.pair, one.runtime) == (trial.pair, trial.runtime)]
        try:
            memory, gpu_bytes = trial_memory(trial), worker_bytes(own)
        except CheckpointError as error:
            return _Taken("?", "?", notes.mark("?", str(error)))
        parts = " + ".join(f"{part / _GB:.1f}" for part in memory)
        of_trial, of_worker = f"{memory.total_bytes / _GB:.1f} = {parts}", f"{gpu_bytes / _GB:.1f}"
    name, reason = choose_node(bundle(trial.pair, trial.runtime), gpu_bytes, types)
    return _Taken(of_trial, of_worker, notes.mark("none", reason) if name is None else name)


def _say_published(trials: Sequence[TrialSpec]) -> None:
    """How many published rows these are, and which of their paths only a GPU can run."""
    published = [trial for trial in trials if counterparts(trial)]
    if not published:
        return
    rows = sum(len(counterparts(trial)) for trial in published)
    reasons: dict[str, list[str]] = {}
    for trial in published:
        reason = cpu_refusal(trial)
        if reason is not None:
            reasons.setdefault(reason, []).append(f"{trial.pair.target.precision} {trial.method.label}")
    say(f"These are {rows} published rows. A small model of random weights can take their paths on a CPU, but for:")
    for reason, labels in reasons.items():
        say(f"  {len(labels)}, since {reason}: {'; '.join(labels)}")
    if not reasons:
        say("  none")
