"""Record an experiment for replay: ``python -m jobs.record NAME``, here or under ``ray job submit``.

For each of its pairs and tasks: the target's greedy outputs, what every proposer would say along them, and what a step
costs on the pair's own worker. ``jobs.bench NAME --replay`` and ``jobs.tune NAME`` read it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from choicespec.cluster.connect import on_cluster, ray_session
from choicespec.cluster.costs import measure_on_worker
from choicespec.cluster.recording import Wanted, draft, record
from choicespec.errors import ChoiceSpecError, RecordingError, TrackingError
from choicespec.measuring.cost import load_costs
from choicespec.replay.predicted import Predicted, keep_predicted
from choicespec.replay.recorded import RecordedPair
from choicespec.replay.simulate import Replay
from choicespec.reports.charts import cost_chart
from choicespec.reports.replay_tables import cost_table, replay_table
from choicespec.runtimes.checkpoints import check_checkpoint
from choicespec.runtimes.pair_parts import drafter_refusal
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.experiment_files import load_experiment
from choicespec.spec.method import (
    NOT_RECORDED,
    Autoregressive,
    Choice,
    Draft,
    TransformersGenerate,
    decided_live,
    drafters_of,
    is_oracle,
)
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, RuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.runs import ExperimentRun

from jobs.terminal import EXPERIMENTS, ProgressLines, console, home, say

BATCH_SIZE = 24
PLACEMENT_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; 0 when everything is recorded, 2 when what was asked is wrong."""
    args = _parse(arguments)
    try:
        experiment = load_experiment(args.experiment, EXPERIMENTS)
        with ray_session():
            for pair, tasks, drafters in recordable(experiment):
                for task in [] if args.only_costs else tasks:
                    record_task(pair, task, drafters)
                record_costs(pair, tasks[0], drafters, args.again)
                _log(experiment, pair)
        return 0
    except ChoiceSpecError as error:
        say(f"error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        say("interrupted; what was recorded is kept, and the same command goes on from there")
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jobs.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", help="a name in jobs/experiments, or the path of a .yaml file")
    parser.add_argument("--again", action="store_true", help="measure the costs anew")
    parser.add_argument("--only-costs", action="store_true", help="measure what steps cost, and record nothing else")
    return parser.parse_args(arguments)


class Recordable(NamedTuple):
    """A pair with the tasks that it is measured or searched on, and the drafters that its methods call and that run."""

    pair: RecordedPair
    tasks: list[TaskSpec]
    drafters: list[str]


def recordable(experiment: ExperimentSpec) -> Iterator[Recordable]:
    """The pairs on a runtime whose loop is ours.

    Raises:
        RecordingError: there is none.
        ChoiceSpecError: a checkpoint or a task's data is missing.
    """
    found: dict[tuple[PairSpec, RuntimeSpec], Recordable] = {}
    trials = experiment.trials()
    search = experiment.search
    if search is not None:
        trials += [experiment.setting(task, start, {}) for task in search.tasks for start in search.starts]
    for pair, runtime, task, method in ((t.pair, t.runtime, t.task, t.method) for t in trials):
        if not isinstance(runtime, HfRuntimeSpec):
            continue
        if (pair, runtime) not in found:
            check_checkpoint(pair.target.model, pair.target.revision)
            folder = home() / "results" / experiment.name / "recordings"
            found[pair, runtime] = Recordable(RecordedPair(folder, runtime, pair), [], [])
        _, tasks, drafters = found[pair, runtime]
        for name in drafters_of(method):
            if name not in drafters and drafter_refusal(pair, Draft(drafter=name)) is None:
                drafters.append(name)
        if task not in tasks:
            open_task(task).check()
            tasks.append(task)
    if not found:
        raise RecordingError(f"{experiment.name}: no runtime of kind hf, whose loop can be recorded")
    yield from found.values()


def record_task(pair: RecordedPair, task: TaskSpec, drafters: Sequence[str]) -> None:
    """Record what is missing of a task, and of what drafters draft on it; Ray is connected."""
    prompts = open_task(task).prompts(pair.opened.tokenizer, pair.opened.context_tokens)
    wanted = Wanted(pair.pair, pair.runtime, task, pair.layers, pair.recording(task), pair.prompt_states)
    record(wanted, prompts, pair.opened, BATCH_SIZE, ProgressLines(), can_grow=on_cluster())
    say(f"what proposers say on {task.label} ({task.split})")
    proposals = pair.propose(task)
    states = 2 * pair.opened.identity.hidden_size * len(pair.layers)
    say(
        f"{task.label}: {len(proposals.ends)} requests, {len(proposals.limits)} positions; a token of output takes "
        f"{(proposals.bytes_per_token + states) / 1024:.1f} KiB, {states / 1024:.1f} of it hidden states"
    )
    files = {method: pair.drafted_file(task, method) for method in map(pair.longest_draft, drafters)}
    draft(wanted, files, BATCH_SIZE, ProgressLines())


def record_costs(pair: RecordedPair, task: TaskSpec, drafters: Sequence[str], again: bool = False) -> None:
    """Measure the pair's costs where they, or a drafter's, are missing; Ray is connected."""
    if again or not pair.costs_file.exists() or not set(drafters) <= set(pair.costs().drafters):
        say(f"what a step costs: {pair.pair.label}")
        length = min(pair.scorer.block_length, Choice().block_length) if pair.scorer is not None else None
        longest = [pair.longest_draft(name) for name in drafters]
        costs = measure_on_worker(pair.pair, pair.runtime, task, length, longest, PLACEMENT_TIMEOUT_S)
        costs.save(pair.costs_file)
    console.print(cost_table(pair.costs(), pair.pair.label))


def replay(experiment: ExperimentSpec, costs_file: Path | None) -> int:
    """Print what is predicted of an experiment's trials, and of an oracle among the same candidates; always 0.

    Args:
        experiment: recorded.
        costs_file: of another machine; None takes the pair's own.

    Raises:
        RecordingError: something has not been recorded.
    """
    rows = []
    for pair, tasks, _ in recordable(experiment):
        costs = load_costs(costs_file) if costs_file is not None else pair.costs()
        console.print(cost_table(costs, pair.pair.label))
        for task in tasks:
            trials = [
                trial
                for trial in experiment.trials()
                if (trial.pair, trial.runtime, trial.task) == (pair.pair, pair.runtime, task)
            ]
            known = [trial for trial in trials if _can_be_replayed(pair, trial)]
            bounds = [
                trial.model_copy(update={"method": trial.method.model_copy(update={"selection": "oracle", "width": 1})})
                for trial in known
                if isinstance(trial.method, Choice) and not trial.method.drafters
            ]
            asked = list(dict.fromkeys([*known, *bounds]))
            plain, *found = Replay(pair.drafts(task), costs).of([Autoregressive(), *(trial.method for trial in asked)])
            rows += [(trial, one, plain) for trial, one in zip(asked, found, strict=True)]
    console.print(replay_table(rows, f"{experiment.name}, replayed"))
    if costs_file is None:  # another machine's are not to be laid beside what is measured here
        keep_predicted(home() / "results" / experiment.name, [Predicted.of(trial, one) for trial, one, _ in rows])
    return 0


def _can_be_replayed(pair: RecordedPair, trial: TrialSpec) -> bool:
    """Says why not, where it cannot."""
    if isinstance(trial.method, TransformersGenerate):
        say(f"left out: {trial.label}: a recording does not say what it drafts", "yellow")
        return False
    if decided_live(trial.method):
        say(f"left out: {trial.label}: {NOT_RECORDED}", "yellow")
        return False
    reason = pair.opened.refusal(pair.pair, trial.method)
    if reason is not None and not is_oracle(trial.method):
        say(f"left out: {trial.label}: {reason}", "yellow")
        return False
    return True


def _log(experiment: ExperimentSpec, pair: RecordedPair) -> None:
    """MLflow where it can be used: the costs, with a chart. The recording itself stays in its folder."""
    chart = pair.costs_file.with_suffix(".png")
    cost_chart(pair.costs(), pair.pair.label, chart)
    try:
        run = ExperimentRun(tracking_uri(home()), experiment)
        run.log_files([pair.costs_file, chart], "costs")
        run.finish([])
    except TrackingError as error:
        say(f"{error}\nthe costs are kept in {pair.costs_file} all the same", "yellow")


if __name__ == "__main__":
    sys.exit(main())
