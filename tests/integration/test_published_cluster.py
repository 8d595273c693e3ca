"""The whole catalogue on a Ray cluster of cluster.yaml's node types, whose GPUs exist in Ray's books only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import ray._private.state
from choicespec.cluster.connect import ADDRESS_VARIABLE, ray_session
from choicespec.cluster.grid import Failure, Grid
from choicespec.measuring.measure import TrialResult
from choicespec.reports.published_rows import counterparts
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.experiment_files import load_experiments
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.task import TaskSpec
from integration.scripted_experiments import scripted_experiment
from pydantic import TypeAdapter
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
# A CPU head, two workers with one GPU, one with four. Ray starts a process a core, so there are few.
_GPUS_AND_CORES_OF_NODES = ((0, 1), (1, 3), (1, 3), (4, 6))
_WORKERS = 8  # more than there are GPUs for
_LONG = 20  # prompts
_SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}  # until a silent node counts as lost


class Nodes(NamedTuple):
    """A cluster, and its nodes by the GPUs that they have."""

    cluster: Cluster
    with_one: list[Any]
    with_four: Any


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A connected cluster."""
    cluster = Cluster()
    try:
        made: list[Any] = []
        for gpus, cores in _GPUS_AND_CORES_OF_NODES:
            settings = {} if made else {"_system_config": _SOON}
            made.append(cluster.add_node(num_cpus=cores, num_gpus=gpus, include_dashboard=False, **settings))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS_VARIABLE, cluster.address)
            with ray_session():
                yield Nodes(cluster, made[1:3], made[3])
    finally:
        cluster.shutdown()


def _scripted(experiment: ExperimentSpec, trial: TrialSpec, tasks: dict[str, TaskSpec]) -> TrialSpec:
    """A trial as a table model can run it, with short prompts: everything of it that a cluster sees is kept.

    A table has no drafters and no scorer. Whatever drafts looks up as many tokens instead, with the method's number as
    the longest suffix, so that no two methods become one. The runtimes are told apart by their cores.
    """
    number = list(experiment.methods.values()).index(trial.method) + 1
    method = trial.method
    stands_for: MethodSpec = method
    if not isinstance(method, Autoregressive):
        assert isinstance(method, Ngram | Draft | Choice)
        length = method.block_length if isinstance(method, Choice) else method.num_draft_tokens
        stands_for = Ngram(num_draft_tokens=length, max_ngram=number)
    cores = 1 + list(experiment.runtimes.values()).index(trial.runtime)
    changes = {
        "method": stands_for,
        "runtime": ScriptedRuntimeSpec(threads=cores),
        "task": tasks[trial.task.label],
    }
    return trial.model_copy(update=changes)


def _tasks(folder: Path, experiment: ExperimentSpec) -> dict[str, TaskSpec]:
    """A chat log for each task, by the task's label; those of the first experiment take a worker seconds."""
    prompts = _LONG if experiment.name == "qwen3-4b" else 1
    logs = scripted_experiment(folder, {f"{experiment.name}-{name}": prompts for name in experiment.tasks})["tasks"]
    logs = {name: TypeAdapter(TaskSpec).validate_python(log) for name, log in logs.items()}
    return {task.label: logs[f"{experiment.name}-{name}"] for name, task in experiment.tasks.items()}


class Watch:
    """Sees where the workers are at each sign of life, and takes a node away as soon as a worker is up on it.

    Attributes:
        placed: the GPUs of a worker, with the nodes that hold them, of every worker seen.
        lost: the node that was taken away.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.placed: set[tuple[float, tuple[str, ...]]] = set()
        self.lost: Any = None
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        for group in placement_group_table().values():
            if group["state"] == "CREATED":
                gpus = sum(bundle.get("GPU", 0) for bundle in group["bundles"].values())
                self.placed.add((gpus, tuple(sorted(set(group["bundles_to_node_id"].values())))))
        actors = ray._private.state.actors().values()
        workers = [actor for actor in actors if actor["ActorClassName"] == "Worker" and actor["State"] == "ALIVE"]
        busy = {actor["Address"]["NodeID"] for actor in workers}
        victim = next((node for node in self._nodes.with_one if node.node_id in busy), None)
        if victim is not None and self.lost is None:
            self.lost = victim
            self._nodes.cluster.remove_node(victim, allow_graceful=False)


def test_every_published_trial_runs_once_though_a_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """Fails if a tensor-parallel group is split over nodes, if workers that wait for each other's GPUs wait for ever
    (11 pairs, 6 GPUs), or if what a lost node was measuring is lost with it, or measured twice."""
    trials = []
    for experiment in load_experiments("published", EXPERIMENTS):
        asked, tasks = experiment.trials(), _tasks(tmp_path, experiment)
        assert all(map(counterparts, asked))
        trials += [_scripted(experiment, trial, tasks) for trial in asked]
    assert len(set(trials)) == len(trials) == 91
    results: list[TrialResult] = []
    watch = Watch(nodes)
    grid = Grid(
        on_progress=watch,
        on_notice=watch,
        max_workers=_WORKERS,
        placement_timeout_s=3600.0,
        can_grow=False,
    )
    with grid:
        failures: list[Failure] = grid.run(trials, results.append)
    assert failures == []
    assert sorted(trial.fingerprint() for trial in trials) == sorted(r.trial.fingerprint() for r in results)
    assert watch.lost is not None
    assert any("trying once more" in line for line in watch.lines)
    assert {gpus for gpus, _ in watch.placed} == {1, 4}
    assert all(len(holding) == 1 for _, holding in watch.placed)
    assert {holding for gpus, holding in watch.placed if gpus == 4} == {(nodes.with_four.node_id,)}
    assert not [node for node in ray.nodes() if node["Alive"] and node["NodeID"] == watch.lost.node_id]
