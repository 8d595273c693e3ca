"""Measure methods against plain decoding: interleaved, on the same requests, in the same process."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import NamedTuple

from choicespec.errors import TaskDataError
from choicespec.intervals import ratio_of_ratios, ratio_of_sums, share
from choicespec.measuring.environment import capture
from choicespec.measuring.lossless import first_divergence
from choicespec.measuring.race import beaten
from choicespec.records import Divergence, Measurement, Request, Trace
from choicespec.runtimes.runtime import Runtime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, is_tree
from choicespec.tasks.prompts import Prompts

_WARM_UP_TOKENS = 8
_BLOCKS = 2  # of requests, where methods cannot alternate: ABAB


class Progress(NamedTuple):
    """Requests measured so far, of those that a group of trials shares."""

    done: int
    total: int


class TrialResult(NamedTuple):
    """A finished trial: its measurement, and the traces of method and baseline, request by request."""

    trial: TrialSpec
    measurement: Measurement
    traces: tuple[Trace, ...]
    baseline_traces: tuple[Trace, ...]


def measure(
    runtime: Runtime, trials: Sequence[TrialSpec], prompts: Prompts, race: bool = False
) -> Iterator[Progress | TrialResult]:
    """Measure trials that share pair, runtime and task; yields progress a request, and a result a trial.

    The order in which baseline and methods run rotates from request to request, so that none always runs first. Where
    the runtime cannot keep all of them warm, they take turns in two blocks of requests each.

    Args:
        runtime: of the pair.
        trials: each with its own method.
        prompts: of the task.
        race: end a trial once it is surely slower than another; its result then has fewer requests.

    Raises:
        TaskDataError: no prompt is left to measure on.
    """
    if not prompts.requests:
        raise TaskDataError(f"{trials[0].task.kind}: no prompt is left; left out: " + "; ".join(prompts.omitted[:5]))
    # The baseline is one of the methods: the trial that asks for it is compared with itself, and has a speed-up of 1.
    methods = list(dict.fromkeys([Autoregressive(), *(trial.method for trial in trials)]))
    first = warm_up(prompts.requests[0])
    alternating = runtime.warm_methods is None or len(methods) <= runtime.warm_methods
    if alternating:
        for method in methods:
            runtime.generate(first, method)

    total = len(prompts.requests)
    size = 1 if alternating else ceil(total / _BLOCKS)
    traces: list[list[Trace]] = [[] for _ in methods]
    divergences: list[list[Divergence]] = [[] for _ in methods]
    running = list(range(len(methods)))

    def result(trial: TrialSpec) -> TrialResult:
        index = methods.index(trial.method)
        baseline = traces[0][: len(traces[index])]
        found = summarise(runtime, trial, traces[index], baseline, divergences[index], prompts.omitted)
        return TrialResult(trial, found, tuple(traces[index]), tuple(baseline))

    for number, start in enumerate(range(0, total, size), start=1):
        block = prompts.requests[start : start + size]
        done = start + len(block)
        for turn in range(len(running)):
            index = running[(number + turn) % len(running)]
            if not alternating:
                runtime.generate(first, methods[index])
            traces[index] += [runtime.generate(request, methods[index]) for request in block]
        for index in running[1:]:
            for request, plain, found in zip(block, traces[0][start:], traces[index][start:], strict=True):
                parted = first_divergence(request, plain, found, runtime.top2_margin)
                divergences[index] += [parted] if parted is not None else []
        yield Progress(done, total)
        if race and done < total:
            lost = {running[place] for place in beaten([traces[index] for index in running])} - {0}
            running = [index for index in running if index not in lost]
            yield from (result(trial) for trial in trials if methods.index(trial.method) in lost)
    yield from (result(trial) for trial in trials if methods.index(trial.method) in running)


def warm_up(first: Request) -> Request:
    """What is decoded before the first request, and thrown away.

    It goes under the request's own name: what a method learns from it is passed over when the request is measured.
    """
    return first._replace(max_new_tokens=min(_WARM_UP_TOKENS, first.max_new_tokens))


def summarise(
    runtime: Runtime,
    trial: TrialSpec,
    traces: Sequence[Trace],
    baseline_traces: Sequence[Trace],
    divergences: Sequence[Divergence],
    omitted: Sequence[str],
) -> Measurement:
    """Turn the traces of a method and of plain decoding on the same requests into a measurement."""
    tokens = [float(t.decode_tokens) for t in traces]
    elapsed_ms = [t.decode_ms for t in traces]
    baseline_tokens = [float(t.decode_tokens) for t in baseline_traces]
    baseline_ms = [t.decode_ms for t in baseline_traces]
    accepted = [float(sum(step.accepted for step in t.steps)) for t in traces]
    steps = [float(len(t.steps)) for t in traces]
    proposed = sum(step.proposed for t in traces for step in t.steps)
    propose_ms = sum(step.propose_ms for t in traces for step in t.steps)
    return Measurement(
        decode_tokens_per_s=ratio_of_sums(tokens, elapsed_ms, scale=1e3),
        baseline_tokens_per_s=ratio_of_sums(baseline_tokens, baseline_ms, scale=1e3),
        speedup=ratio_of_ratios(tokens, elapsed_ms, baseline_tokens, baseline_ms),
        accepted_per_step=ratio_of_sums(accepted, steps),
        acceptance_by_position=() if is_tree(trial.method) or not runtime.knows_steps else _by_position(traces),
        match=share(len(traces) - len(divergences), len(traces)),
        prefill_ms=ratio_of_sums([t.prefill_ms for t in traces], [1.0] * len(traces)),
        propose_share=propose_ms / sum(elapsed_ms) if sum(elapsed_ms) else 0.0,
        memory_bytes=runtime.memory_bytes(trial.method),
        never_proposed=trial.method.drafts and proposed == 0,
        divergences=tuple(divergences),
        omitted=tuple(omitted),
        measured_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=capture(runtime, trial),
    )


def _by_position(traces: Sequence[Trace]) -> tuple[float, ...]:
    steps = [step for trace in traces for step in trace.steps]
    longest = max((step.proposed for step in steps), default=0)
    kept = [sum(step.accepted >= position for step in steps) for position in range(1, longest + 1)]
    proposed = [sum(step.proposed >= position for step in steps) for position in range(1, longest + 1)]
    return tuple(part / whole for part, whole in zip(kept, proposed, strict=True))
