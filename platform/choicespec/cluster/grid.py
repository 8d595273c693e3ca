"""Spread the trials of an experiment over workers; a worker's death costs a retry, never another trial's result."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from choicespec.cluster.placement import describe_shortage, fits_a_node, options_in, request_placement
from choicespec.cluster.worker import Refused, WorkerActor
from choicespec.decoding.step_cost import StepCosts
from choicespec.measuring.measure import Progress, TrialResult
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.pair import PairSpec
from choicespec.spec.resources import bundle
from choicespec.spec.runtime import RuntimeSpec

_POLL_S = 1.0


class Group(NamedTuple):
    """Trials that share pair, runtime and task, so that one baseline serves all of them."""

    pair: PairSpec
    runtime: RuntimeSpec
    trials: tuple[TrialSpec, ...]
    retried: bool

    @property
    def label(self) -> str:
        """For progress lines."""
        methods = ", ".join(trial.method.label for trial in self.trials)
        return f"{self.pair.label} | {self.trials[0].task.label} | {methods}"


class Failure(NamedTuple):
    """A trial without a result, and why."""

    trial: TrialSpec
    reason: str


@dataclass
class _Slot:
    """A placement group, the worker on it once it is placed, and the group of trials that it runs."""

    group: Group
    placement: PlacementGroup
    placed: Any
    unfinished: list[TrialSpec] = field(default_factory=list)
    worker: Any = None
    events: Any = None
    waiting_since_s: float = field(default_factory=monotonic)

    @property
    def awaited(self) -> Any:
        return self.placed if self.worker is None else self.events

    @property
    def asked(self) -> dict[str, float]:
        return bundle(self.group.pair, self.group.runtime)

    def start_worker(self, step_costs: StepCosts | None) -> None:
        pair, runtime = self.group.pair, self.group.runtime
        self.worker = WorkerActor.options(**options_in(self.placement, pair, runtime)).remote(pair, runtime, step_costs)

    def run(self, group: Group, race: bool) -> None:
        self.group, self.unfinished = group, list(group.trials)
        self.events = self.worker.measure.options(num_returns="streaming").remote(group.trials, race)

    def close(self) -> None:
        if self.worker is not None:
            ray.kill(self.worker)
        remove_placement_group(self.placement)


def group_trials(trials: Sequence[TrialSpec]) -> list[Group]:
    """Trials by pair, runtime and task, in the order in which each first appears."""
    groups: dict[Hashable, list[TrialSpec]] = {}
    for trial in trials:
        groups.setdefault((trial.pair, trial.runtime, trial.task), []).append(trial)
    return [Group(m[0].pair, m[0].runtime, tuple(m), retried=False) for m in groups.values()]


def _same_worker(one: Group, other: Group) -> bool:
    return (one.pair, one.runtime) == (other.pair, other.runtime)


class Grid:
    """Runs trials on the connected Ray cluster. As a context, it keeps the last worker warm from one run to the next.

    Args:
        on_progress: called with a line for people at each request; most may be dropped.
        on_notice: called with a line that people must see, such as a lost worker.
        max_workers: workers at a time. Workers on the CPU share memory bandwidth and so disturb each other's timing:
            more than one is for clusters, or for trials whose time does not matter.
        placement_timeout_s: how long a worker may wait for its GPUs while no other worker runs.
        can_grow: an autoscaler may add nodes, so that a bundle which no node could hold now is waited for as well.
        step_costs: what methods decide by; None lets each worker measure its own.
    """

    def __init__(
        self,
        on_progress: Callable[[str], None],
        on_notice: Callable[[str], None],
        max_workers: int,
        placement_timeout_s: float,
        can_grow: bool,
        step_costs: StepCosts | None = None,
    ) -> None:
        self._on_progress, self._on_notice = on_progress, on_notice
        self._max_workers, self._placement_timeout_s, self._can_grow = max_workers, placement_timeout_s, can_grow
        self._step_costs = step_costs
        self._queue: list[Group] = []
        self._slots: list[_Slot] = []
        self._warm: _Slot | None = None  # the last worker of the run before
        self._failures: list[Failure] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._cool()

    def run(
        self, trials: Sequence[TrialSpec], on_result: Callable[[TrialResult], None], race: bool = False
    ) -> list[Failure]:
        """Measure trials; returns those without a result. Raises only what ``on_result`` raises.

        Args:
            trials: in the order in which they are wanted.
            on_result: called in this process with each result, as soon as it is there.
            race: end those trials early that cannot win.
        """
        self._queue, self._failures = group_trials(trials), []
        self._on_result, self._race = on_result, race
        try:
            while self._queue or self._slots:
                self._fill()
                awaited = {slot.awaited: slot for slot in self._slots}
                ready, _ = ray.wait(list(awaited), num_returns=1, timeout=_POLL_S)
                for item in ready:
                    self._advance(awaited[item])
                self._give_up_waiting()
        finally:
            for slot in self._slots:
                slot.close()
        return self._failures

    def _fill(self) -> None:
        while self._queue and len(self._slots) < self._max_workers:
            group = self._queue.pop(0)
            if self._warm is not None and _same_worker(self._warm.group, group):
                slot, self._warm = self._warm, None
                slot.run(group, self._race)
            else:
                self._cool()
                placement = request_placement(group.pair, group.runtime)
                slot = _Slot(group, placement, placement.ready(), list(group.trials))
            self._slots.append(slot)

    def _cool(self) -> None:
        """Let the warm worker go."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def _advance(self, slot: _Slot) -> None:
        if slot.worker is None:
            slot.start_worker(self._step_costs)
            slot.run(slot.group, self._race)
            return
        try:
            self._handle(slot, ray.get(next(slot.events)))
        except StopIteration:
            self._next_group(slot)
        except RayError as error:
            self._lost(slot, str(error))

    def _handle(self, slot: _Slot, event: Progress | TrialResult | Refused) -> None:
        if isinstance(event, Progress):
            self._on_progress(f"{slot.group.label}: {event.done}/{event.total} prompts")
        elif isinstance(event, TrialResult):
            slot.unfinished.remove(event.trial)
            self._on_result(event)
        else:
            self._fail(slot.unfinished, event.reason)
            slot.unfinished = []

    def _next_group(self, slot: _Slot) -> None:
        """Keep the worker warm for the next group of its pair, or for the next run; or make room for another pair."""
        following = next((group for group in self._queue if _same_worker(group, slot.group)), None)
        if following is not None:
            self._queue.remove(following)
            slot.run(following, self._race)
        elif self._queue or len(self._slots) > 1:
            self._release(slot)
        else:
            self._slots.remove(slot)
            self._warm = slot

    def _lost(self, slot: _Slot, reason: str) -> None:
        """The worker died, or raised what it should not.

        Its trials run once more, each alone, so that one bad trial cannot take the others with it.
        """
        self._release(slot)
        if slot.group.retried:
            self._fail(slot.unfinished, f"its worker was lost twice; the second time: {reason}")
            return
        self._on_notice(f"{slot.group.label}: the worker was lost, trying once more: {reason.strip().splitlines()[-1]}")
        alone = [slot.group._replace(trials=(trial,), retried=True) for trial in slot.unfinished]
        self._queue = [*alone, *self._queue]

    def _give_up_waiting(self) -> None:
        """End waits for a placement that nothing is going to end."""
        if any(slot.worker is not None for slot in self._slots):
            for slot in self._slots:
                slot.waiting_since_s = monotonic()  # a running worker may yet make room
            return
        for slot in list(self._slots):
            waited_s = monotonic() - slot.waiting_since_s
            if waited_s > self._placement_timeout_s or not (self._can_grow or fits_a_node(slot.asked)):
                self._release(slot)
                self._fail(slot.unfinished, describe_shortage(slot.asked))

    def _release(self, slot: _Slot) -> None:
        self._slots.remove(slot)
        slot.close()

    def _fail(self, trials: Sequence[TrialSpec], reason: str) -> None:
        self._failures += [Failure(trial, reason) for trial in trials]
