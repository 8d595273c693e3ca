"""Record a task on the cluster: a Ray task a chunk of requests, which a worker's warm target answers as one batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from choicespec.cluster.placement import describe_shortage, fits_a_node
from choicespec.errors import ChoiceSpecError, RecordingError
from choicespec.recordings import RecordingFolder, RecordingManifest, pack
from choicespec.records import Proposal, Request
from choicespec.replay.drafted import DraftedFile, drafted_of
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.resources import bundle
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import Prompts


class Wanted(NamedTuple):
    """What is recorded, and where it is kept."""

    pair: PairSpec
    runtime: HfRuntimeSpec
    task: TaskSpec
    layers: tuple[int, ...]
    folder: RecordingFolder
    prompt_states: bool = False


def record(
    wanted: Wanted,
    prompts: Prompts,
    opened: HfRuntime,
    batch_size: int,
    on_progress: Callable[[str], None],
    can_grow: bool = False,
) -> None:
    """Record what is missing. What has been recorded is kept whatever happens, and is not recorded again.

    Args:
        wanted: the pair and task.
        prompts: the task's prompts.
        opened: the runtime, without its weights.
        batch_size: requests decoded together.
        on_progress: called with a line for people.
        can_grow: an autoscaler may add nodes, so that resources no node has now are waited for.

    Raises:
        RecordingError: a chunk could not be recorded, or nothing here can hold the pair.
    """
    if not prompts.requests:
        raise RecordingError(f"{wanted.task.label}: no prompt fits: {'; '.join(prompts.omitted[:3])}")
    if not (can_grow or fits_a_node(bundle(wanted.pair, wanted.runtime))):
        raise RecordingError(describe_shortage(bundle(wanted.pair, wanted.runtime)))
    chunks = _chunks(prompts.requests, batch_size)
    manifest = RecordingManifest(
        target=opened.identity,
        task=wanted.task,
        layers=wanted.layers,
        prompt_states=wanted.prompt_states,
        chunks=tuple(tuple(request.request_id for request in chunk) for chunk in chunks),
        request_ids=tuple(request.request_id for request in prompts.requests),
    )
    missing = wanted.folder.begin(manifest)
    what = (wanted.layers, wanted.prompt_states)
    pending = {_submit(wanted, _record_chunk, chunks[index], *what): index for index in missing}

    def say(left: int) -> None:
        on_progress(f"recording {wanted.task.label} ({wanted.task.split}): {len(chunks) - left}/{len(chunks)} chunks")

    for index, chunk in _as_they_come(wanted.task, pending, say):
        wanted.folder.add(index, chunk)


def draft(
    wanted: Wanted, files: Mapping[Draft, DraftedFile], batch_size: int, on_progress: Callable[[str], None]
) -> None:
    """Record what is missing of what the pair's drafters draft along recorded outputs.

    Args:
        wanted: the pair and task, which is recorded.
        files: the drafters, each with its longest k, and where its drafts are kept; chunk by chunk until all are there.
        batch_size: requests that a worker answers at a time.
        on_progress: called with a line for people.

    Raises:
        RecordingError: a chunk could not be drafted.
    """
    files = {method: file for method, file in files.items() if file.load() is None}
    if not files:
        return
    outputs = [(one.request, one.output_ids) for one in wanted.folder.read(())]
    chunks = [outputs[start : start + batch_size] for start in range(0, len(outputs), batch_size)]
    missing = [index for index in range(len(chunks)) if any(file.load_chunk(index) is None for file in files.values())]
    pending = {_submit(wanted, _draft_chunk, chunks[index], list(files)): index for index in missing}
    names = ", ".join(method.drafter for method in files)

    def say(left: int) -> None:
        done = len(chunks) - left
        on_progress(f"{names} on {wanted.task.label} ({wanted.task.split}): {done}/{len(chunks)} chunks")

    for index, requests in _as_they_come(wanted.task, pending, say):
        for (method, file), drafts in zip(files.items(), zip(*requests, strict=True), strict=True):
            file.save_chunk(index, drafted_of((one for own in drafts for one in own), method.num_draft_tokens))
    for file in files.values():
        file.join_chunks(len(chunks))


def _as_they_come(task: TaskSpec, pending: dict[Any, int], say: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
    """What tasks of Ray return, each with its number; how many are left is said before each.

    Raises:
        RecordingError: one failed; the others are cancelled.
    """
    try:
        while pending:
            say(len(pending))
            [ready], _ = ray.wait(list(pending), num_returns=1)
            yield pending.pop(ready), ray.get(ready)
    except RayError as error:  # what a worker raised, or its death
        cause = error.cause if isinstance(error, RayTaskError) else error
        said = cause if isinstance(cause, ChoiceSpecError) else error
        raise RecordingError(f"{task.label}: {said}") from error
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)


def _chunks(requests: Sequence[Request], batch_size: int) -> list[list[Request]]:
    """Requests of similar length together: the shorter are padded to the longest."""
    ordered = sorted(requests, key=lambda request: len(request.prompt_ids))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def _submit(wanted: Wanted, task: Any, *what: object) -> Any:
    options = {"num_cpus": wanted.runtime.threads, "num_gpus": wanted.pair.gpus, "max_retries": 2}
    return task.options(**options).remote(wanted.pair, wanted.runtime, *what)


@lru_cache(maxsize=1)
def _warm(pair: PairSpec, runtime: HfRuntimeSpec) -> HfRuntime:
    return HfRuntime(runtime, pair)


@ray.remote
def _record_chunk(
    pair: PairSpec, runtime: HfRuntimeSpec, requests: list[Request], layers: tuple[int, ...], prompt_states: bool
) -> bytes:
    return pack(_warm(pair, runtime).record(requests, layers, prompt_states))


@ray.remote
def _draft_chunk(
    pair: PairSpec, runtime: HfRuntimeSpec, outputs: list[tuple[Request, tuple[int, ...]]], methods: list[Draft]
) -> list[list[list[Proposal]]]:
    return _warm(pair, runtime).draft_along(outputs, methods)
