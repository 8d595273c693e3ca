"""Measure what a pair's steps cost, on a worker of its own."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import remove_placement_group

from choicespec.cluster.placement import describe_shortage, options_in, request_placement
from choicespec.cluster.worker import WorkerActor
from choicespec.errors import ChoiceSpecError, RecordingError
from choicespec.measuring.cost import Costs
from choicespec.spec.method import Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.resources import bundle
from choicespec.spec.runtime import RuntimeSpec
from choicespec.spec.task import TaskSpec


def measure_on_worker(
    pair: PairSpec,
    runtime: RuntimeSpec,
    task: TaskSpec,
    scored_length: int | None,
    longest_drafts: Sequence[Draft],
    placement_timeout_s: float,
) -> Costs:
    """The costs of a pair, where the cluster puts its workers.

    Args:
        pair, runtime: what the worker holds.
        task: some of its prompts are decoded.
        scored_length, longest_drafts: see ``measure_costs``.
        placement_timeout_s: how long the worker may wait for its place.

    Raises:
        RecordingError: nothing can hold the pair in that time, or the worker died.
        ChoiceSpecError: what the worker raised.
    """
    placement = request_placement(pair, runtime)
    worker: Any = None
    try:
        ready, _ = ray.wait([placement.ready()], timeout=placement_timeout_s)
        if not ready:
            raise RecordingError(describe_shortage(bundle(pair, runtime)))
        worker = WorkerActor.options(**options_in(placement, pair, runtime)).remote(pair, runtime)
        costs: Costs = ray.get(worker.costs.remote(task, scored_length, longest_drafts))
        return costs
    except RayTaskError as error:
        if isinstance(error.cause, ChoiceSpecError):
            raise error.cause from None
        raise RecordingError(f"the costs of {pair.label} could not be measured: {error}") from error
    except RayError as error:
        raise RecordingError(f"the costs of {pair.label} could not be measured: {error}") from error
    finally:
        if worker is not None:
            ray.kill(worker)
        remove_placement_group(placement)
