"""Measure an experiment: ``python -m jobs.bench NAME``, here or under ``ray job submit``."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from choicespec.cluster.connect import on_cluster, ray_session
from choicespec.cluster.grid import Failure, Grid
from choicespec.errors import ChoiceSpecError, TrackingError, Unsupported
from choicespec.measuring.measure import TrialResult
from choicespec.records import Measurement
from choicespec.reports.agreement import agreement_table, agreements
from choicespec.reports.peers import over_peers, peer_table
from choicespec.reports.tables import divergence_table, result_table
from choicespec.results import ResultsFolder
from choicespec.runtimes.checkpoints import check_checkpoint
from choicespec.runtimes.runtime import check_supported
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.experiment_files import load_experiments
from choicespec.spec.method import uses_scorer
from choicespec.spec.pair import PairSpec
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.registry import ChampionRegistry
from choicespec.tracking.runs import ExperimentRun

from jobs.dry_run import dry_run, nothing_fetched, say_scorers
from jobs.terminal import EXPERIMENTS, ProgressLines, console, home, say

_MOST_LISTED = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; 0 when every trial has a result, 1 when some failed, 2 when what was asked is wrong."""
    args = _parse(arguments)
    try:
        whole = load_experiments(args.experiment, EXPERIMENTS)
        experiments = [
            experiment.narrowed(limit=args.limit, tasks=args.tasks, methods=args.methods) for experiment in whole
        ]
        if args.dry_run:
            _dry_run(experiments)
            for experiment in whole:
                say_scorers(experiment)
            return 0
        return max(_run(experiment, args) for experiment in experiments)
    except ChoiceSpecError as error:
        say(f"error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; finished trials are kept, and the same command goes on with the others")
        return 130


def _dry_run(experiments: Sequence[ExperimentSpec]) -> None:
    for experiment in experiments:
        _check_tasks(experiment)
    with ray_session(), nothing_fetched():
        for experiment in experiments:
            dry_run(experiment, _results(experiment), _refusal)


def _run(experiment: ExperimentSpec, args: argparse.Namespace) -> int:
    results = _results(experiment)
    if args.replay:
        from jobs.record import replay  # with torch; whoever does not replay need not wait for it

        return replay(experiment, args.costs)
    status = _log_only(experiment, results) if args.log_only else _bench(experiment, results, args)
    if args.promote:
        _promote(experiment, results)
    return status


def _results(experiment: ExperimentSpec) -> ResultsFolder:
    return ResultsFolder(home() / "results" / experiment.name)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jobs.bench", description=__doc__)
    parser.add_argument("experiment", help="a name or a folder in jobs/experiments, or the path of a .yaml file")
    parser.add_argument("--limit", type=int, help="prompts a task")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these of the experiment's tasks")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="only these of the experiment's methods")
    parser.add_argument("--dry-run", action="store_true", help="print the trials, what each needs, whether it can run")
    parser.add_argument("--log-only", action="store_true", help="log kept results to MLflow; measure nothing")
    parser.add_argument("--replay", action="store_true", help="predict from what jobs.record recorded; measure nothing")
    parser.add_argument("--costs", type=Path, help="with --replay: another machine's costs, as jobs.record keeps them")
    parser.add_argument("--promote", action="store_true", help="register the best trial of each pair and task to serve")
    parser.add_argument("--again", action="store_true", help="measure anew what has been measured")
    parser.add_argument(
        "--workers", type=int, default=1, help="workers at a time (default 1: CPU workers disturb each other)"
    )
    parser.add_argument("--placement-timeout-s", type=float, default=120.0, help="how long a worker may wait for GPUs")
    args = parser.parse_args(arguments)
    if args.costs is not None and not args.replay:
        parser.error("--costs is for --replay: a measurement has its own")
    return args


def _check_tasks(experiment: ExperimentSpec) -> None:
    for task in experiment.tasks.values():
        open_task(task).check()


def _refusal(trial: TrialSpec) -> str | None:
    """Why a trial cannot run here, found without loading anything."""
    try:
        check_supported(trial.runtime, trial.pair, trial.method)
        if trial.runtime.kind in ("hf", "vllm"):
            check_checkpoint(trial.pair.target.model, trial.pair.target.revision)
    except Unsupported as error:
        return error.why
    except ChoiceSpecError as error:
        return str(error)
    return None


def _log_only(experiment: ExperimentSpec, results: ResultsFolder) -> int:
    kept = results.find_all(experiment.trials())
    if not kept:
        raise ChoiceSpecError(f"no kept results of {experiment.name} in {results.folder}; run without --log-only first")
    run = ExperimentRun(tracking_uri(home()), experiment)
    for trial, measurement in kept:
        run.log(trial, measurement, results.path(trial))
    run.finish([])
    console.print(f"logged {len(kept)} trials to {tracking_uri(home())}")
    return 0


def _bench(experiment: ExperimentSpec, results: ResultsFolder, args: argparse.Namespace) -> int:
    _check_tasks(experiment)
    trials = experiment.trials()
    wanted = [trial for trial in trials if args.again or results.find(trial) is None]
    reasons = {trial: _refusal(trial) for trial in wanted}
    failures = [Failure(trial, reason) for trial, reason in reasons.items() if reason is not None]
    runnable = [trial for trial, reason in reasons.items() if reason is None]
    console.print(f"{experiment.name}: {len(trials)} trials, {len(trials) - len(wanted)} of them measured already")
    log = _Log(experiment, results)
    for trial, measurement in results.find_all(trials):
        log.write(trial, measurement)

    def keep(result: TrialResult) -> None:
        results.keep(result)  # first of all: what has been measured must not depend on a server
        log.write(result.trial, result.measurement)

    if runnable:
        failures += _measure(runnable, keep, args)
    log.finish([f"{failure.trial.label}: {failure.reason}" for failure in failures])
    _report(experiment, results, failures)
    return 1 if failures else 0


def _measure(
    trials: Sequence[TrialSpec], keep: Callable[[TrialResult], None], args: argparse.Namespace
) -> list[Failure]:
    with ray_session():
        grid = Grid(
            on_progress=ProgressLines(),
            on_notice=lambda line: say(line, "yellow"),
            max_workers=args.workers,
            placement_timeout_s=args.placement_timeout_s,
            can_grow=on_cluster(),
        )
        with grid:
            return grid.run(trials, keep)


def _promote(experiment: ExperimentSpec, results: ResultsFolder) -> None:
    from choicespec.serving.champion import promote_best  # with torch, too

    for line in promote_best(ChampionRegistry(tracking_uri(home())), results.find_all(experiment.trials())):
        say(line)


def _report(experiment: ExperimentSpec, results: ResultsFolder, failures: Sequence[Failure]) -> None:
    rows = results.find_all(experiment.trials())
    if rows:
        console.print(result_table(rows, experiment.name))
        divergences = divergence_table(rows)
        if divergences is not None:
            console.print(divergences)
    traces = {trial: results.traces(trial) for trial, _ in rows}
    for table in (agreement_table(agreements(traces)), peer_table(over_peers(traces))):
        if table is not None:
            console.print(table)
    for pair in dict.fromkeys(trial.pair for trial, _ in rows if uses_scorer(trial.method)):
        _report_scorer(pair)
    omitted = list(dict.fromkeys(prompt for _, found in rows for prompt in found.omitted))
    if omitted:
        some = "\n  ".join(omitted[:_MOST_LISTED])
        console.print(
            f"prompts left out: {len(omitted)} (all in measurement.json)\n  {some}", markup=False, highlight=False
        )
    for failure in failures:
        say(f"no result: {failure.trial.label}: {failure.reason}", "red")
    console.print(f"kept in {results.folder}; see the runs with: make ui", markup=False)


def _report_scorer(pair: PairSpec) -> None:
    from choicespec.reports.scorer_table import scorer_table  # with torch, too
    from choicespec.runtimes.pair_parts import scorer_of

    try:
        manifest = scorer_of(pair)
    except ChoiceSpecError as error:  # it was there when these rows were measured
        say(str(error), "yellow")
        return
    console.print(scorer_table(manifest.held_out, manifest.target.num_layers, "the scorer, as it was saved"))


class _Log:
    """MLflow as long as it can be used; without it the job goes on, since the results folder has everything."""

    def __init__(self, experiment: ExperimentSpec, results: ResultsFolder) -> None:
        self._results = results
        self._run: ExperimentRun | None = None
        with self._or_go_on():
            self._run = ExperimentRun(tracking_uri(home()), experiment)

    def write(self, trial: TrialSpec, measurement: Measurement) -> None:
        """Log a kept trial."""
        with self._or_go_on():
            if self._run is not None:
                self._run.log(trial, measurement, self._results.path(trial))

    def finish(self, failures: Sequence[str]) -> None:
        """Close the parent run."""
        with self._or_go_on():
            if self._run is not None:
                self._run.finish(failures)

    @contextmanager
    def _or_go_on(self) -> Iterator[None]:
        try:
            yield
        except TrackingError as error:
            self._run = None
            later = f"results are kept in {self._results.folder}; log them later with --log-only"
            say(f"{error}\n{later}", "yellow")


if __name__ == "__main__":
    sys.exit(main())
