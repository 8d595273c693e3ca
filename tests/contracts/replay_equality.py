"""A replay beside the live loop: the same steps, at costs made up."""

from collections.abc import Sequence

from choicespec.decoding.step_cost import StepCosts
from choicespec.measuring.cost import Costs, Curve, ProposerCost
from choicespec.measuring.measure import TrialResult
from choicespec.replay.simulate import Replayed


def costs_of(step_costs: StepCosts, **changes: object) -> Costs:
    curve = (tuple(step_costs.ms),)
    verification = Curve(contexts=(400,), tokens=step_costs.tokens, ms=curve, low_ms=curve, high_ms=curve)
    proposer = ProposerCost(first_ms=0.5, step_ms=0.25)
    known = Costs(
        device="none",
        runtime_build="scripted",
        precision="float32",
        threads=1,
        measured_at="",
        rounds=1,
        verification=verification,
        rest_ms=0.0,
        ngram=proposer,
        candidates=proposer,
        scorer=None,
    )
    return known.model_copy(update=changes)


def assert_same_steps(found: Replayed, result: TrialResult) -> None:
    """Request by request: steps, tokens proposed, tokens accepted."""
    for number, trace in enumerate(result.traces):
        counts = (found.steps[number], found.proposed[number], found.accepted[number], found.tokens[number])
        proposed, accepted = (sum(getattr(step, name) for step in trace.steps) for name in ("proposed", "accepted"))
        expected = (len(trace.steps), proposed, accepted, trace.decode_tokens)
        assert counts == expected, f"{result.trial.method.label}, {trace.request_id}: {counts} is not {expected}"


def assert_all_same(found: Sequence[Replayed], results: Sequence[TrialResult]) -> None:
    """Method by method."""
    for one, result in zip(found, results, strict=True):
        assert_same_steps(one, result)
