"""A race ends a method early only when it is surely slower."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from choicespec.measuring.measure import Progress, TrialResult, measure
from choicespec.measuring.race import beaten, rate_ratio
from choicespec.records import Request, Trace
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import Prompts

PAIR, SPEC = PairSpec(target=TargetSpec(model="none")), ScriptedRuntimeSpec()
REQUESTS = tuple(Request(f"r{x}", tuple(f'f(x={x}, y="'.encode()), 12) for x in range(10, 30))


def traces(times_ms: Sequence[float]) -> list[Trace]:
    """Of requests with ten decoded tokens each."""
    return [Trace(str(number), 5, tuple(range(11)), 1, "length", 1.0, ms, ()) for number, ms in enumerate(times_ms)]


def test_who_is_surely_slower_is_beaten() -> None:
    """Fails if a method that can no longer win runs on, or one that may still win is ended."""
    fast = [10.0 + number % 3 for number in range(12)]
    slow = [2 * ms for ms in fast]
    alike = [ms + (1.0 if number % 2 else -1.0) for number, ms in enumerate(fast)]
    assert beaten([traces(slow), traces(fast), traces(alike)]) == [0]


@pytest.mark.parametrize("count", [1, 4, 7, 9, 10, 11])
def test_nobody_is_judged_by_few_prompts_or_at_every_one(count: int) -> None:
    """Fails if each prompt is one more chance to be ended by noise."""
    assert beaten([traces([20.0] * count), traces([10.0] * count)]) == []


def test_a_rate_is_compared_by_sums() -> None:
    """Fails if the ratio is the mean of the requests' ratios, or upside down."""
    assert rate_ratio(traces([10.0, 30.0]), traces([20.0, 20.0])).value == 1.0
    assert rate_ratio(traces([10.0]), traces([20.0])).value == 2.0


class Timed(ScriptedRuntime):
    """Decodes as it does, but says that it took so many milliseconds a token."""

    ms: ClassVar = {"autoregressive": 4.0, "ngram": 2.0, "choice": 1.0}

    def __init__(self) -> None:
        super().__init__(SPEC, PAIR)
        self.asked: list[MethodSpec] = []

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        self.asked.append(method)
        found = super().generate(request, method)
        return found._replace(decode_ms=self.ms[method.kind] * found.decode_tokens)


def events(runtime: ScriptedRuntime, race: bool) -> list[Progress | TrialResult]:
    trials = [
        TrialSpec(pair=PAIR, runtime=SPEC, task=ToolCall(), method=m) for m in (Autoregressive(), Ngram(), Choice())
    ]
    return list(measure(runtime, trials, Prompts(REQUESTS, ()), race))


def test_a_beaten_trial_ends_with_what_it_has() -> None:
    """Fails if it costs further prompts, if its result is lost, or if the baseline that others need ends with it."""
    runtime = Timed()
    found = {e.trial.method.kind: e for e in events(runtime, race=True) if isinstance(e, TrialResult)}
    counts = {kind: len(result.traces) for kind, result in found.items()}
    assert counts == {"autoregressive": 20, "ngram": 8, "choice": 20}
    assert runtime.asked.count(Ngram()) == 8 + 1, "the warm-up beside"
    assert found["ngram"].measurement.speedup.value == pytest.approx(2.0)
    assert found["ngram"].measurement.match.n == len(found["ngram"].baseline_traces) == 8


def test_without_a_race_nobody_ends_early() -> None:
    """Fails if a measurement that is not a search loses prompts."""
    found = [event for event in events(Timed(), race=False) if isinstance(event, TrialResult)]
    assert [len(result.traces) for result in found] == [20, 20, 20]
