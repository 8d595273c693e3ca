"""The whole catalogue on a Ray cluster of cluster.yaml's node types, whose GPUs exist in Ray's books only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from choicespec.cluster.connect import ADDRESS_VARIABLE, ray_session
from choicespec.cluster.grid import Failure, Grid
from choicespec.measuring.measure import TrialResult
from choicespec.reports.published_rows import counterparts
from choicespec.spec.experiment import ExperimentSpec, TrialSpec, load_experiments
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram
from choicespec.spec.runtime import ScriptedRuntimeSpec
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
_GPUS_OF_NODES = (0, 1, 1, 4)  # a CPU head, two workers with one GPU, one with four
_CORES = 16
_WORKERS = 8  # more than there are GPUs for
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
        made = []
        for index, gpus in enumerate(_GPUS_OF_NODES):
            settings = {} if index else {"_system_config": _SOON}
            made.append(cluster.add_node(num_cpus=_CORES, num_gpus=gpus, include_dashboard=False, **settings))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS_VARIABLE, cluster.address)
            with ray_session():
                yield Nodes(cluster, made[1:3], made[3])
    finally:
        cluster.shutdown()


def _scripted(experiment: ExperimentSpec, trial: TrialSpec) -> TrialSpec:
    """A trial as a table model can run it, with one short prompt: everything of it that a cluster sees is kept.

    A table has no drafters and no scorer. Whatever drafts looks up as many tokens instead, with the method's number as
    the longest suffix, so that no two methods become one. The runtimes stay apart by a core.
    """
    number = list(experiment.methods.values()).index(trial.method) + 1
    method = trial.method
    stands_for: MethodSpec = method
    if not isinstance(method, Autoregressive):
        assert isinstance(method, Ngram | Draft | Choice)
        length = method.block_length if isinstance(method, Choice) else method.num_draft_tokens
        stands_for = Ngram(num_draft_tokens=length, max_ngram=number)
    cores = trial.runtime.threads + list(experiment.runtimes.values()).index(trial.runtime)
    task = trial.task.model_copy(update={"limit": 1, "max_new_tokens": 8})
    changes = {"method": stands_for, "runtime": ScriptedRuntimeSpec(threads=cores), "task": task}
    return trial.model_copy(update=changes)


class Watch:
    """Sees where the workers are at each sign of life, and takes one node away as soon as it holds a worker.

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
        busy = {node for _, holding in self.placed for node in holding}
        victim = next((node for node in self._nodes.with_one if node.node_id in busy), None)
        if victim is not None and self.lost is None:
            self.lost = victim
            self._nodes.cluster.remove_node(victim, allow_graceful=False)


def test_every_published_trial_runs_once_though_a_node_is_lost(nodes: Nodes) -> None:
    """Fails if a tensor-parallel group is split over nodes, if workers that wait for each other's GPUs wait for ever
    (11 pairs, 6 GPUs), or if what a lost node was measuring is lost with it, or measured twice."""
    trials = []
    for experiment in load_experiments("published", EXPERIMENTS):
        asked = experiment.trials()
        assert all(map(counterparts, asked))
        trials += [_scripted(experiment, trial) for trial in asked]
    assert len(set(trials)) == len(trials) == 91
    results: list[TrialResult] = []
    watch = Watch(nodes)
    grid = Grid(
        results.append,
        on_progress=watch,
        on_notice=watch,
        max_workers=_WORKERS,
        placement_timeout_s=3600.0,
        can_grow=False,
    )
    failures: list[Failure] = grid.run(trials)
    assert failures == []
    assert sorted(trial.fingerprint() for trial in trials) == sorted(r.trial.fingerprint() for r in results)
    assert watch.lost is not None
    assert any("trying once more" in line for line in watch.lines)
    assert {gpus for gpus, _ in watch.placed} == {1, 4}
    assert all(len(holding) == 1 for _, holding in watch.placed)
    assert {holding for gpus, holding in watch.placed if gpus == 4} == {(nodes.with_four.node_id,)}
    assert not [node for node in ray.nodes() if node["Alive"] and node["NodeID"] == watch.lost.node_id]
