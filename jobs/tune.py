"""Search an experiment's settings: ``python -m jobs.tune NAME``, here or under ``ray job submit``.

Thousands of settings are replayed on recorded outputs; the best few race live, beside the methods as they are; the
winner is confirmed on held-out prompts. On a runtime whose loop cannot be recorded, the live stage works alone.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from choicespec.cluster.connect import on_cluster, ray_session
from choicespec.cluster.grid import Grid
from choicespec.cluster.search import Wide, run_sweep
from choicespec.decoding.step_cost import StepCosts
from choicespec.errors import ChoiceSpecError, SpecError, TrackingError
from choicespec.measuring.objectives import front, worth
from choicespec.measuring.race import rate_ratio
from choicespec.records import Measurement
from choicespec.replay.predicted import FILE as PREDICTED
from choicespec.replay.predicted import Predicted, keep_predicted
from choicespec.replay.recorded import RecordedPair
from choicespec.replay.simulate import Replay
from choicespec.replay.sweep import Settings, Tried, finalists
from choicespec.reports.charts import sweep_chart
from choicespec.reports.replay_tables import Finalist, Margin, finalist_table, margin_table
from choicespec.results import ResultsFolder
from choicespec.runtimes.checkpoints import check_checkpoint
from choicespec.runtimes.runtime import check_supported
from choicespec.serving.champion import promote_best
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.experiment_files import load_experiment
from choicespec.spec.method import Choice, MethodSpec, decided_live, drafters_of
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.search import SearchSpec, Value
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.registry import ChampionRegistry
from choicespec.tracking.runs import ExperimentRun

from jobs.record import record_costs, record_task
from jobs.terminal import EXPERIMENTS, ProgressLines, console, home, say

_PER_ROUND = 3  # settings measured live together where nothing can be replayed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; 0 when every task has a winner, 1 when one has none, 2 when what was asked is wrong."""
    args = _parse(arguments)
    try:
        experiment = load_experiment(args.experiment, EXPERIMENTS)
        if experiment.search is None:
            raise SpecError(f"{experiment.name}: no field 'search', which says what is tried")
        registry = ChampionRegistry(tracking_uri(home())) if args.promote else None
        searches = [Search(experiment, experiment.search, task, args, registry) for task in experiment.search.tasks]
        with ray_session():
            return max([search.run() for search in searches])
    except ChoiceSpecError as error:
        say(f"error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        say("interrupted; what was recorded, replayed and measured is kept, and the same command goes on from there")
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jobs.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", help="a name in jobs/experiments, or the path of a .yaml file")
    parser.add_argument(
        "--workers", type=int, default=1, help="live workers at a time (default 1: CPU workers disturb each other)"
    )
    parser.add_argument("--promote", action="store_true", help="register each task's winner to serve")
    parser.add_argument("--placement-timeout-s", type=float, default=120.0, help="how long a worker may wait for GPUs")
    return parser.parse_args(arguments)


class Confirmed(NamedTuple):
    """What was measured on held-out prompts, the winner first, and how much faster the winner was than the others."""

    trials: list[TrialSpec]
    winner: Measurement
    margins: list[Margin]


class Search:
    """One task's search; what is finished is found again in its folder.

    Raises:
        ChoiceSpecError: a checkpoint or data is missing, or a method cannot run.
    """

    def __init__(
        self,
        experiment: ExperimentSpec,
        spec: SearchSpec,
        task: str,
        args: argparse.Namespace,
        registry: ChampionRegistry | None,
    ) -> None:
        self._experiment, self._spec, self._task, self._args = experiment, spec, task, args
        self._registry = registry
        self._starts = {f"{name}, as it is": experiment.setting(task, name, {}) for name in spec.starts}
        trial = self._starts[f"{spec.default}, as it is"]
        if isinstance(trial.runtime, HfRuntimeSpec):
            check_checkpoint(trial.pair.target.model, trial.pair.target.revision)
        for start in self._starts.values():
            check_supported(start.runtime, start.pair, start.method)
        self._held_out = experiment.tasks[spec.tasks[task]]
        for one in (trial.task, self._held_out):
            open_task(one).check()
        folder = home() / "results" / experiment.name
        self._recorded: RecordedPair | None = None
        reached = [self._starts.values(), *self._borders()]
        replayed = spec.replayed and not any(decided_live(one.method) for trials in reached for one in trials)
        if replayed and isinstance(trial.runtime, HfRuntimeSpec):
            self._recorded = RecordedPair(folder / "recordings", trial.runtime, trial.pair)
        self._folder = folder / "search" / f"{task}-{self._identity()}"
        self._live = ResultsFolder(self._folder / "live")
        self._confirmed = ResultsFolder(self._folder / "held_out")

    def run(self) -> int:
        """Search, race, confirm, report; 1 where no setting may win."""
        started_s = monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        replay = self._replay()
        swept = self._settings(self._sweep(replay)) if replay is not None else {}
        with self._grid() as grid:
            trials = {**self._starts, **swept}
            self._measure(grid, trials, self._live, race=replay is not None)
            if replay is None:
                self._search_live(grid, trials)
            found = self._finalists(trials, replay)
            keep_predicted(self._folder, [Predicted.of(one.trial, one.predicted) for one in found if one.predicted])
            eligible = [one for one in found if one.measured.match.value >= self._spec.least_match]
            if not eligible:
                least = f"{self._spec.least_match:.0%}"
                say(f"{self._task}: no setting matches plain decoding in {least} of the outputs", "red")
                return 1
            confirmed = self._confirm(grid, eligible)
        self._log(
            [(one.trial, self._live) for one in found] + [(trial, self._confirmed) for trial in confirmed.trials],
            confirmed.margins,
        )
        if self._registry is not None:
            for line in promote_best(self._registry, [(confirmed.trials[0], confirmed.winner)]):
                say(line)
        say(f"{self._task}: {monotonic() - started_s:.0f} s; kept in {self._folder}")
        return 0

    def _borders(self) -> Iterator[list[TrialSpec]]:
        """The settings at the borders of each space."""
        for space in self._spec.spaces.values():
            yield [self._experiment.setting(self._task, space.start, changes) for changes in space.borders()]

    def _identity(self) -> str:
        """Of everything that what is kept depends on."""
        trials = [trial.model_dump_json() for trial in self._starts.values()]
        parts = (self._spec.model_dump_json(), self._held_out.model_dump_json(), *trials)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def _replay(self) -> Replay | None:
        """The searched task's recording at the pair's costs, made where it is missing; None where it cannot be."""
        if self._recorded is None:
            return None
        task = self._experiment.tasks[self._task]
        drafters = list(dict.fromkeys(n for start in self._starts.values() for n in drafters_of(start.method)))
        record_task(self._recorded, task, drafters)
        record_costs(self._recorded, task, drafters)
        return Replay(self._recorded.drafts(task), self._recorded.costs())

    def _sweep(self, replay: Replay) -> list[Tried]:
        """The wide stage, as a table and a chart."""
        table = self._folder / "sweep.parquet"
        if not table.exists():
            started_s = monotonic()
            say(f"{self._task}: ranking the candidates of every length that is tried")
            drafts = replay.drafts.for_others(self._methods())
            say(f"{self._task}: replaying {self._spec.settings} settings")
            wide = Wide(self._experiment, self._task, drafts, replay.costs)
            tried = run_sweep(self._spec, wide, self._folder)
            partial = table.with_suffix(".partial")
            pq.write_table(pa.Table.from_pylist([one._asdict() for one in tried]), partial)
            partial.replace(table)
            say(f"{self._task}: {len(tried)} settings replayed in {monotonic() - started_s:.0f} s")
        return [Tried(**row) for row in pq.read_table(table).to_pylist()]

    def _methods(self) -> Iterator[MethodSpec]:
        """One of every ranking that the spaces reach."""
        for space in self._spec.spaces.values():
            start = self._experiment.methods[space.start]
            if isinstance(start, Choice):
                for length in space.values("method.block_length") or (start.block_length,):
                    for selection in space.values("method.selection") or (start.selection,):
                        for width in space.values("method.width") or (start.width,):
                            known = {"block_length": length, "selection": selection, "width": width}
                            yield Choice.model_validate(known)

    def _settings(self, tried: Sequence[Tried]) -> dict[str, TrialSpec]:
        known = set(self._starts.values())
        fresh = [one for one in tried if self._named(one.space, json.loads(one.changes))[1] not in known]
        chosen = finalists(fresh, self._spec.live - len(self._starts))
        sweep_chart(tried, chosen, f"{self._experiment.name}, {self._task}", self._folder / "sweep.png")
        return dict(self._named(one.space, json.loads(one.changes)) for one in chosen)

    def _named(self, space: str, changes: Mapping[str, Value]) -> tuple[str, TrialSpec]:
        said = ", ".join(f"{path.split('.', 1)[1]}={_short(value)}" for path, value in changes.items())
        trial = self._experiment.setting(self._task, self._spec.spaces[space].start, changes)
        return f"{space}: {said}", trial

    def _search_live(self, grid: Grid, trials: dict[str, TrialSpec]) -> None:
        """The live stage alone: Optuna proposes a few settings at a time, informed by the rates of those before.

        Args:
            grid: has measured the methods as they are.
            trials: those; settings are added to them.
        """
        settings = Settings(self._experiment, self._task, self._spec.live, self._spec.seed)
        for _ in range(self._spec.live):  # some settings may be known already, or none at all
            asked = [settings.ask() for _ in range(min(_PER_ROUND, self._spec.live - len(trials)))]
            fresh = [one for one in asked if one.trial is not None and one.trial not in trials.values()]
            trials |= dict(self._named(one.space, one.changes) for one in fresh)
            self._measure(grid, trials, self._live)
            for one in asked:
                measured = self._live.find(one.trial) if one.trial is not None else None
                settings.tell(one, self._worth(measured) if measured is not None else None)
            if len(trials) == self._spec.live:
                break

    def _grid(self) -> Grid:
        """One for the whole search, so that its worker stays warm."""
        return Grid(
            on_progress=ProgressLines(),
            on_notice=lambda line: say(line, "yellow"),
            max_workers=self._args.workers,
            placement_timeout_s=self._args.placement_timeout_s,
            can_grow=on_cluster(),
            step_costs=self._step_costs(),
        )

    def _measure(self, grid: Grid, trials: Mapping[str, TrialSpec], results: ResultsFolder, race: bool = False) -> None:
        """Measure what is missing."""
        missing = [trial for trial in dict.fromkeys(trials.values()) if results.find(trial) is None]
        if missing:
            for failure in grid.run(missing, results.keep, race):
                say(f"no result: {failure.trial.label}: {failure.reason}", "red")

    def _step_costs(self) -> StepCosts | None:
        return self._recorded.costs().step_costs if self._recorded is not None else None

    def _finalists(self, trials: Mapping[str, TrialSpec], replay: Replay | None) -> list[Finalist]:
        """What was measured live, printed, the best first; who ended early comes last, being surely slower."""
        found = []
        for name, trial in trials.items():
            measured = self._live.find(trial)
            if measured is not None:
                predicted = replay.of([trial.method])[0].first(measured.match.n) if replay is not None else None
                found.append(Finalist(name, trial, measured, predicted))
        found.sort(key=lambda one: (-one.measured.match.n, -self._worth(one.measured)))
        title = f"{self._experiment.name}, {self._task}: live"
        console.print(finalist_table(found, self._front(found), title))
        return found

    def _worth(self, measured: Measurement) -> float:
        """By the first objective; larger is better."""
        return worth(measured, self._spec.objectives)[0]

    def _front(self, found: Sequence[Finalist]) -> list[TrialSpec]:
        """Of several objectives, the settings that no other is at least as good as in all, and better in one."""
        if len(self._spec.objectives) == 1:
            return []
        return [found[place].trial for place in front([worth(one.measured, self._spec.objectives) for one in found])]

    def _confirm(self, grid: Grid, eligible: Sequence[Finalist]) -> Confirmed:
        """The winner, the runner-up and the default on prompts that none was chosen by."""
        default = f"{self._spec.default}, as it is"
        names = {one.name: one.trial for one in eligible[:2]} | {default: self._starts[default]}
        trials = {name: trial.model_copy(update={"task": self._held_out}) for name, trial in names.items()}
        self._measure(grid, trials, self._confirmed)
        winner, *others = dict.fromkeys(trials)
        measured = self._confirmed.find(trials[winner])
        if measured is None:
            raise ChoiceSpecError(f"{self._task}: the winner could not be measured on the held-out prompts")
        traces = self._confirmed.traces(trials[winner])
        margins = [
            Margin(name, rate_ratio(traces, self._confirmed.traces(trials[name])))
            for name in others
            if trials[name] != trials[winner] and self._confirmed.find(trials[name]) is not None
        ]
        title = f"{self._experiment.name}, {self._task}: the winner on the held-out prompts"
        console.print(margin_table(winner, measured.speedup, margins, title))
        return Confirmed(list(trials.values()), measured, margins)

    def _log(self, live: Sequence[tuple[TrialSpec, ResultsFolder]], margins: Sequence[Margin]) -> None:
        """MLflow where it can be used; the folder has everything."""
        names = ("sweep.parquet", "sweep.png", PREDICTED)
        files = [path for path in (self._folder / name for name in names) if path.exists()]
        figures = {
            f"{self._task}.winner_over.{_metric_name(margin.over)}{suffix}": value
            for margin in margins
            for suffix, value in (("", margin.ratio.value), ("_low", margin.ratio.low), ("_high", margin.ratio.high))
        }
        try:
            run = ExperimentRun(tracking_uri(home()), self._experiment)
            for trial, results in live:
                measured = results.find(trial)
                if measured is not None:
                    run.log(trial, measured, results.path(trial), stage=results.folder.name)
            run.log_files(files, f"search/{self._task}")
            run.log_figures(figures)
            run.finish([])
        except TrackingError as error:
            say(f"{error}\nwhat was found is kept in {self._folder} all the same", "yellow")


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _metric_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "-" for letter in name)


if __name__ == "__main__":
    sys.exit(main())
