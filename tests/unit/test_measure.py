"""Measuring, on the scripted runtime: what is compared, in which order, and what is flagged."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from choicespec.errors import TaskDataError
from choicespec.measuring.measure import Progress, TrialResult, measure
from choicespec.records import Divergence, Measurement, Request, Trace
from choicespec.runtimes.runtime import Runtime
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import Prompts

PAIR, SPEC = PairSpec(target=TargetSpec(model="none")), ScriptedRuntimeSpec(threads=3)
REQUESTS = tuple(Request(f"r{x}", tuple(f'f(x={x}, y="'.encode()), 24) for x in range(12, 18))
PROMPTS = Prompts(REQUESTS, ("r99: too long",))
NEVER_FINDS = Ngram(min_ngram=500, max_ngram=500)


class Recording(ScriptedRuntime):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(SPEC, PAIR)
        self.asked: list[tuple[str, MethodSpec, int]] = []

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        self.asked.append((request.request_id, method, request.max_new_tokens))
        return super().generate(request, method)


class WrongInPlaces(ScriptedRuntime):
    """Planted fault: drafting methods give a wrong token at position 3 of r13, and end r15 early."""

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        trace = super().generate(request, method)
        if method.drafts and request.request_id == "r13":
            return trace._replace(output_ids=(*trace.output_ids[:3], 7, *trace.output_ids[4:]))
        if method.drafts and request.request_id == "r15":
            return trace._replace(output_ids=trace.output_ids[:5])
        return trace

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        return float(len(token_ids))


def trial(method: MethodSpec) -> TrialSpec:
    return TrialSpec(pair=PAIR, runtime=SPEC, task=ToolCall(), method=method)


def results(runtime: Runtime, *methods: MethodSpec, prompts: Prompts = PROMPTS) -> list[TrialResult]:
    events = measure(runtime, [trial(method) for method in methods], prompts)
    return [event for event in events if isinstance(event, TrialResult)]


def measured(runtime: Runtime, *methods: MethodSpec) -> list[Measurement]:
    return [result.measurement for result in results(runtime, *methods)]


def test_plain_decoding_against_itself_is_exactly_1() -> None:
    """Fails if the trial that asks for the baseline measures it a second time."""
    (found,) = measured(Recording(), Autoregressive())
    assert (found.speedup.value, found.speedup.low, found.speedup.high, found.speedup.n) == (1, 1, 1, 6)
    assert found.decode_tokens_per_s == found.baseline_tokens_per_s
    assert found.accepted_per_step.value == 0


def test_a_lossless_method_matches_on_every_prompt() -> None:
    """Fails if the wrong traces are compared with each other; the drafts were really used."""
    (found,) = measured(Recording(), Ngram())
    assert (found.match.value, found.match.n, found.divergences) == (1, 6, ())
    assert found.accepted_per_step.value > 0.5
    assert 0 < found.propose_share < 1


def test_accepted_per_step_is_a_ratio_of_sums() -> None:
    """Fails if it is averaged over requests, or if the bonus token is counted."""
    (result,) = results(Recording(), Ngram())
    steps = [step for trace in result.traces for step in trace.steps]
    expected = sum(step.accepted for step in steps) / len(steps)
    assert result.measurement.accepted_per_step.value == pytest.approx(expected)


def test_acceptance_by_position_counts_the_steps_that_proposed_it() -> None:
    """Fails if steps with shorter drafts count as rejections, or the whole draft as one."""
    (result,) = results(Recording(), Ngram())
    steps = [step for trace in result.traces for step in trace.steps]
    found = result.measurement.acceptance_by_position
    assert len(found) == max(step.proposed for step in steps)
    for position, accepted in enumerate(found, start=1):
        proposed = [step for step in steps if step.proposed >= position]
        assert accepted == sum(step.accepted >= position for step in proposed) / len(proposed)
    for method in (Autoregressive(), Choice(width=2)):  # a tree's tokens are not in a row
        (other,) = measured(Recording(), method)
        assert other.acceptance_by_position == ()


def test_the_prefill_is_outside_the_decode_rate() -> None:
    """Fails if the first token or the time to it is counted on either side."""
    (result,) = results(Recording(), Ngram())
    tokens = sum(len(trace.output_ids) - 1 for trace in result.traces)
    decode_s = sum(trace.decode_ms for trace in result.traces) / 1e3
    assert result.measurement.decode_tokens_per_s.value == pytest.approx(tokens / decode_s)


def test_a_method_that_never_proposes_is_flagged() -> None:
    """Fails if a drafter that is silently switched off passes for a lossless method; plain decoding is no drafter."""
    plain, silent, drafting = measured(Recording(), Autoregressive(), NEVER_FINDS, Ngram())
    assert (plain.never_proposed, silent.never_proposed, drafting.never_proposed) == (False, True, False)


def test_a_wrong_token_is_found_with_its_place_and_margin() -> None:
    """Fails if the check of losslessness sees no fault, or cannot tell where it is."""
    plain, found = measured(WrongInPlaces(SPEC, PAIR), Autoregressive(), Ngram())
    right = {r.request_id: ScriptedRuntime(SPEC, PAIR).generate(r, Autoregressive()).output_ids for r in REQUESTS}
    prompt_tokens = len(REQUESTS[0].prompt_ids)
    assert plain.match.value == 1
    assert found.match.value == pytest.approx(4 / 6)
    assert found.divergences == (
        Divergence(
            request_id="r13", position=3, expected_id=right["r13"][3], found_id=7, top2_margin=prompt_tokens + 3
        ),
        Divergence(
            request_id="r15", position=5, expected_id=right["r15"][5], found_id=None, top2_margin=prompt_tokens + 5
        ),
    )


class TwoAtATime(Recording):
    """Keeps two methods warm."""

    warm_methods: int | None = 2


def test_methods_that_do_not_fit_side_by_side_take_turns_in_blocks() -> None:
    """Fails if an engine is started for every request, the first of a block is cold, or results depend on the order."""
    runtime = TwoAtATime()
    methods: list[MethodSpec] = [Autoregressive(), Ngram(), Ngram(num_draft_tokens=4)]
    found = measured(runtime, *methods)
    assert [one.match.value for one in found] == [1, 1, 1]
    assert [one.match.n for one in found] == [6, 6, 6]
    turns = [method for _, method, _ in runtime.asked]
    changes = sum(a != b for a, b in pairwise(turns))
    assert changes <= 2 * len(methods) - 1
    for start in (0, *(i + 1 for i, (a, b) in enumerate(pairwise(turns)) if a != b)):
        assert runtime.asked[start][2] == 8, "a block begins with a warm-up"


def test_methods_that_fit_side_by_side_alternate() -> None:
    """Fails if a runtime that could alternate is measured in blocks, which drift of the machine then tells apart."""
    runtime = TwoAtATime()
    measured(runtime, Ngram())
    turns = [method for _, method, _ in runtime.asked[2:]]
    assert [a != b for a, b in pairwise(turns)] == [i % 2 == 0 for i in range(len(turns) - 1)]


def test_every_method_runs_first_equally_often() -> None:
    """Fails if one method always has the warm cache, or the cold one, of the method before it."""
    runtime = Recording()
    methods = (Autoregressive(), Ngram(), NEVER_FINDS)
    measured(runtime, *methods)
    asked = runtime.asked[len(methods) :]  # after the warm-up
    rounds = [asked[start : start + 3] for start in range(0, len(asked), 3)]
    assert [{request_id for request_id, _, _ in r} for r in rounds] == [{r.request_id} for r in REQUESTS]
    for turn in range(3):
        assert sorted(r[turn][1].kind for r in rounds) == ["autoregressive"] * 2 + ["ngram"] * 4
        assert [r[turn][1] for r in rounds].count(NEVER_FINDS) == 2


def test_the_baseline_runs_although_no_trial_asks_for_it_and_only_once() -> None:
    """Fails if a method is compared with an earlier run's baseline, or if the baseline's trial doubles the work."""
    alone, both = Recording(), Recording()
    measured(alone, Ngram())
    measured(both, Autoregressive(), Ngram())
    assert sum(method == Autoregressive() for _, method, _ in alone.asked) == 1 + len(REQUESTS)
    assert sorted(map(str, alone.asked)) == sorted(map(str, both.asked))


def test_every_method_warms_up_briefly() -> None:
    """Fails if the first request pays for one method's start, or if the warm-up decodes a whole output."""
    runtime = Recording()
    measured(runtime, Ngram(), NEVER_FINDS)
    warm_up = runtime.asked[:3]
    assert {method for _, method, _ in warm_up} == {Autoregressive(), Ngram(), NEVER_FINDS}
    assert all(max_new_tokens < 24 for _, _, max_new_tokens in warm_up)


def test_progress_comes_a_request_then_a_result_a_trial() -> None:
    """Fails if a person sees nothing until the end, or if results wait for another group."""
    events = list(measure(Recording(), [trial(Ngram()), trial(Autoregressive())], PROMPTS))
    assert events[:6] == [Progress(done, 6) for done in range(1, 7)]
    found = [event.trial.method for event in events[6:] if isinstance(event, TrialResult)]
    assert found == [Ngram(), Autoregressive()]


def test_the_traces_are_the_trials_own() -> None:
    """Fails if the traces that are kept are another method's, or of other requests."""
    plain, drafted = results(Recording(), Autoregressive(), Ngram())
    for result in (plain, drafted):
        assert [t.request_id for t in result.traces] == [r.request_id for r in REQUESTS]
        assert result.baseline_traces == plain.traces
    assert any(step.proposed for trace in drafted.traces for step in trace.steps)


def test_no_prompt_is_an_error_that_says_why() -> None:
    """Fails if a trial on no data gives a measurement."""
    with pytest.raises(TaskDataError, match=r"tool_call.*r99: too long"):
        results(Recording(), Ngram(), prompts=PROMPTS._replace(requests=()))


def test_what_was_left_out_and_what_it_ran_on_are_carried() -> None:
    """Fails if a figure hides the prompts it lacks, or what it was measured with."""
    (found,) = measured(Recording(), Ngram())
    assert found.omitted == ("r99: too long",)
    assert (found.environment.runtime_build, found.environment.device) == (
        ScriptedRuntime.build,
        ScriptedRuntime.device,
    )
    assert (found.environment.threads, found.environment.dtype) == (3, "float32")


def test_no_request_is_shown_its_own_output_by_the_warm_up() -> None:
    """Fails if the warm-up, which decodes the first request, is learnt as another request's output."""
    alone = PROMPTS._replace(requests=PROMPTS.requests[:1])
    (found,) = results(ScriptedRuntime(SPEC, PAIR), Choice(min_survival=0.0), prompts=alone)
    assert {step.source for t in found.traces for step in t.steps}.isdisjoint({"outputs"})
