"""The grid on a real Ray cluster of three nodes, whose GPUs exist in Ray's books only."""

import importlib
import os
import signal
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import ray._private.state
from choicespec.cluster.connect import ADDRESS_VARIABLE, ray_session
from choicespec.cluster.grid import Failure, Grid, group_trials
from choicespec.cluster.placement import options_in, request_placement
from choicespec.cluster.worker import WorkerActor, WorkerIdentity
from choicespec.measuring.measure import TrialResult
from choicespec.spec.experiment import TrialSpec, parse_experiment
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.tracking.connection import URI_VARIABLE
from integration.scripted_experiments import scripted_experiment
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, remove_placement_group

_RUNTIME = ScriptedRuntimeSpec()
_GPUS_OF_NODES = (4, 2, 2)
_SERVER = "http://127.0.0.1:1"  # nobody there; workers are only told
_NEVER_S = 3600.0  # longer than a test may take
_DEADLINE_S = 120.0  # of what must happen
_LONG = 200  # prompts that take seconds, so that a worker can be killed among them


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A connected cluster."""
    nodes = Cluster()
    try:
        for gpus in _GPUS_OF_NODES:
            nodes.add_node(num_cpus=4, num_gpus=gpus, include_dashboard=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS_VARIABLE, nodes.address)
            patch.setenv(URI_VARIABLE, _SERVER)
            with ray_session():
                yield
    finally:
        nodes.shutdown()


class Outcome(NamedTuple):
    """What a grid did."""

    results: list[TrialResult]
    failures: list[Failure]
    lines: list[str]

    @property
    def measured(self) -> list[TrialSpec]:
        return [result.trial for result in self.results]


def _run(trials: Sequence[TrialSpec], on_progress: Callable[[str], None] | None = None, **options: Any) -> Outcome:
    """Run a grid: of one worker at a time, and patient, unless ``options`` say otherwise."""
    outcome = Outcome([], [], [])

    def listen(line: str) -> None:
        outcome.lines.append(line)
        if on_progress is not None:
            on_progress(line)

    usual = {"max_workers": 1, "placement_timeout_s": _NEVER_S, "can_grow": False}
    with Grid(on_progress=listen, on_notice=outcome.lines.append, **(usual | options)) as grid:
        outcome.failures.extend(grid.run(trials, outcome.results.append))
    return outcome


class Killer:
    """Kills the first workers that measure a target, each at its first sign of life."""

    def __init__(self, target: str, methods: str, times: int) -> None:
        self._target, self._methods, self._times = target, methods, times
        self.killed: list[int] = []

    def __call__(self, line: str) -> None:
        is_its_progress = line.startswith(self._target) and line.endswith("prompts") and self._methods in line
        (process_id,) = _workers_alive() or [0]
        if is_its_progress and len(self.killed) < self._times and process_id not in self.killed:
            self.killed.append(process_id)
            os.kill(process_id, signal.SIGKILL)


def _workers_alive() -> list[int]:
    """The process ids of this cluster's workers."""
    actors = ray._private.state.actors().values()
    return [actor["Pid"] for actor in actors if actor["ActorClassName"] == "Worker" and actor["State"] == "ALIVE"]


def _pair(gpus: int) -> PairSpec:
    return PairSpec(target=TargetSpec(model="table", tensor_parallel=gpus), gpus=gpus)


def _trials(folder: Path, tasks: dict[str, int], gpus: Sequence[int] = (0,)) -> list[TrialSpec]:
    content = {"name": "grid", **scripted_experiment(folder, tasks, gpus)}
    return parse_experiment(content, "this test").trials()


@contextmanager
def _placed(pair: PairSpec) -> Iterator[PlacementGroup]:
    group = request_placement(pair, _RUNTIME)
    try:
        yield group
    finally:
        remove_placement_group(group)


def _start(group: PlacementGroup, pair: PairSpec) -> Any:
    return WorkerActor.options(**options_in(group, pair, _RUNTIME)).remote(pair, _RUNTIME)


def _devices(identity: WorkerIdentity) -> set[tuple[str, str]]:
    return {(identity.node_id, gpu) for gpu in identity.gpu_ids}


def test_pairs_get_disjoint_devices() -> None:
    """Fails if two pairs that live at the same time share a GPU, or one has fewer than it asked for."""
    pairs = [_pair(4), _pair(2), _pair(1), _pair(1)]  # the largest first: together they fill the cluster
    with ExitStack() as stack:
        workers = []
        for pair in pairs:
            group = stack.enter_context(_placed(pair))
            ray.get(group.ready(), timeout=_DEADLINE_S)
            workers.append(_start(group, pair))
        identities = ray.get([worker.identity.remote() for worker in workers], timeout=_DEADLINE_S)
    devices = [_devices(identity) for identity in identities]
    assert [len(own) for own in devices] == [4, 2, 1, 1]
    assert len(set().union(*devices)) == 8


def test_a_pair_of_four_gpus_is_never_split() -> None:
    """Fails if four GPUs that are free on two nodes are given to a pair that one node must hold."""
    whole = _pair(4)
    with _placed(whole) as first:
        ray.get(first.ready(), timeout=_DEADLINE_S)
        with _placed(whole) as second:  # 4 GPUs are free, on two nodes
            with _placed(_pair(1)) as third:
                ray.get(third.ready(), timeout=_DEADLINE_S)
                assert ray.wait([second.ready()], timeout=0)[0] == []  # though it asked before
                remove_placement_group(first)
                ray.get(second.ready(), timeout=_DEADLINE_S)
            identity = ray.get(_start(second, whole).identity.remote(), timeout=_DEADLINE_S)
    assert len(_devices(identity)) == 4


def test_more_pairs_than_gpus(tmp_path: Path) -> None:
    """Fails if workers that wait for each other's GPUs wait for ever: 14 are asked for at a time, of 8."""
    trials = _trials(tmp_path, {"short": 2}, gpus=(4, 2, 4, 2, 2))
    outcome = _run(trials, max_workers=len(trials))
    assert outcome.failures == []
    assert set(outcome.measured) == set(trials)


@pytest.mark.parametrize(("can_grow", "placement_timeout_s"), [(False, _NEVER_S), (True, 1.0)])
def test_what_no_node_can_hold(tmp_path: Path, can_grow: bool, placement_timeout_s: float) -> None:
    """Fails if such a trial is waited for where nothing can help, or does not say what was asked for and what there is.

    Where a node may be added, the wait ends with its time-out; everywhere the other trials get their results.
    """
    trials = _trials(tmp_path, {"short": 2}, gpus=(6, 0))
    outcome = _run(trials, can_grow=can_grow, placement_timeout_s=placement_timeout_s)
    assert outcome.measured == trials[2:]
    assert [failure.trial for failure in outcome.failures] == trials[:2]
    for failure in outcome.failures:
        assert "no node can give a worker 1 CPU, 6 GPU" in failure.reason
        assert "4 CPU, 4 GPU" in failure.reason


def test_a_lost_worker_costs_a_retry(tmp_path: Path) -> None:
    """Fails if a death in the midst of measuring takes a trial's result, or another trial's."""
    lost = _trials(tmp_path, {"long": _LONG})[-1]
    trials = [lost, *_trials(tmp_path, {"short": 2}, gpus=(0, 0))[2:]]
    killer = Killer("table-0", "", times=1)
    outcome = _run(trials, killer)
    assert len(killer.killed) == 1
    assert len([line for line in outcome.lines if "trying once more" in line]) == 1
    assert outcome.failures == []
    assert outcome.measured == trials
    assert [len(result.traces) for result in outcome.results] == [_LONG, 2, 2]


def test_a_trial_that_kills_its_worker_fails_alone(tmp_path: Path) -> None:
    """Fails if a trial that kills each worker is tried for ever, or takes those measured beside it with it."""
    trials = _trials(tmp_path, {"long": _LONG})
    killer = Killer("table-0", "ngram", times=9)
    outcome = _run(trials, killer)
    assert len(killer.killed) == 2
    plain, ngram = trials
    assert outcome.measured == [plain]
    ((failed, reason),) = outcome.failures
    assert failed == ngram
    assert "lost twice" in reason


def test_one_baseline_and_one_worker(tmp_path: Path) -> None:
    """Fails if methods on the same prompts are compared with different runs of the baseline, or if each task of a pair
    loads the weights anew."""
    trials = _trials(tmp_path, {"first": 3, "second": 3})
    process_ids: set[int] = set()
    outcome = _run(trials, lambda line: process_ids.update(_workers_alive()))
    assert len(process_ids) == 1
    assert outcome.measured == trials
    for plain, ngram in (outcome.results[:2], outcome.results[2:]):
        assert plain.traces == plain.baseline_traces == ngram.baseline_traces  # to the last digit of each time


def test_a_worker_stays_warm_from_run_to_run(tmp_path: Path) -> None:
    """Fails if a search loads the weights anew for each round, holds two pairs at a time, or a grid leaves a worker
    behind."""
    one, other = group_trials(_trials(tmp_path, {"short": 2}, gpus=(0, 0)))
    measured: list[TrialResult] = []
    process_ids = []
    with Grid(print, print, max_workers=1, placement_timeout_s=_NEVER_S, can_grow=False) as grid:
        for group in (one, one, other):
            assert grid.run(group.trials, measured.append) == []
            process_ids.append(_workers_alive())
    assert [result.trial for result in measured] == [*one.trials, *one.trials, *other.trials]
    assert process_ids[0] == process_ids[1] != process_ids[2]
    assert [len(alive) for alive in process_ids] == [1, 1, 1]
    assert _workers_alive() == []


def test_an_actor_has_the_drivers_server_and_the_standard_librarys_platform() -> None:
    """Fails if the worker's path, which holds the folder ``platform``, lets it hide the module, or if a worker logs
    elsewhere than its driver."""
    worker = WorkerActor.remote(_pair(1), _RUNTIME)
    seen = worker.__ray_call__.remote(
        lambda _: (importlib.import_module("platform").__file__, os.environ["PYTHONPATH"], os.environ[URI_VARIABLE])
    )
    module, path, server = ray.get(seen, timeout=_DEADLINE_S)
    ray.kill(worker)
    assert server == _SERVER
    assert Path(module) == Path(sysconfig.get_paths()["stdlib"], "platform.py")
    assert "platform" in path.split(os.pathsep)
