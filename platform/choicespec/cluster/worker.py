"""The actor that pins one pair to its GPUs and keeps it warm."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray

from choicespec.decoding.step_cost import StepCosts
from choicespec.errors import ChoiceSpecError, RecordingError
from choicespec.measuring.cost import Costs, TimedRuntime, measure_costs
from choicespec.measuring.measure import Progress, TrialResult, measure
from choicespec.runtimes.runtime import Runtime, open_runtime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import RuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task


class Refused(NamedTuple):
    """Trials that cannot run, for a reason that a retry would not change."""

    reason: str


class WorkerIdentity(NamedTuple):
    """Where a worker runs: its process, and the indices of the GPUs that only it may use."""

    process_id: int
    node_id: str
    gpu_ids: tuple[str, ...]


class Worker:
    """Holds a pair on a runtime; the weights are loaded by the first trial and stay."""

    def __init__(self, pair: PairSpec, runtime: RuntimeSpec, step_costs: StepCosts | None = None) -> None:
        self._pair, self._runtime_spec, self._step_costs = pair, runtime, step_costs
        self._runtime: Runtime | None = None

    def identity(self) -> WorkerIdentity:
        """Where this worker runs."""
        context = ray.get_runtime_context()
        gpu_ids = tuple(context.get_accelerator_ids().get("GPU", ()))
        return WorkerIdentity(os.getpid(), context.get_node_id(), gpu_ids)

    def costs(self, task: TaskSpec, scored_length: int | None, longest_drafts: Sequence[Draft]) -> Costs:
        """Measure what steps cost; see ``measuring.cost``."""
        runtime = open_runtime(self._runtime_spec, self._pair)
        if not isinstance(runtime, TimedRuntime):
            raise RecordingError(
                f"the loop of runtime {self._runtime_spec.kind!r} is its own: its steps cannot be timed"
            )
        prompts = open_task(task).prompts(runtime.tokenizer, runtime.context_tokens)
        runtime.load()
        runtime.use_repository(prompts.repository)
        threads = self._runtime_spec.threads
        return measure_costs(runtime, prompts.requests, threads, scored_length, longest_drafts)

    def measure(self, trials: Sequence[TrialSpec], race: bool = False) -> Iterator[Progress | TrialResult | Refused]:
        """Measure trials that share a task, streaming progress and results as they come.

        The prompts are made before the weights are loaded, so that a bad prompt is said first.

        Args:
            trials: of this worker's pair and runtime.
            race: end those early that cannot win.
        """
        try:
            if self._runtime is None:
                self._runtime = open_runtime(self._runtime_spec, self._pair)
                if self._step_costs is not None and isinstance(self._runtime, TimedRuntime):
                    self._runtime.use_step_costs(self._step_costs)
            prompts = open_task(trials[0].task).prompts(self._runtime.tokenizer, self._runtime.context_tokens)
            yield Progress(0, len(prompts.requests))
            self._runtime.load()
            self._runtime.use_repository(prompts.repository)
            yield from measure(self._runtime, trials, prompts, race)
        except ChoiceSpecError as error:
            yield Refused(str(error))


WorkerActor: Any = ray.remote(max_restarts=0, max_task_retries=0)(Worker)
