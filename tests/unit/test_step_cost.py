"""What a verification costs, and how much of a draft pays."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from choicespec.decoding.step_cost import (
    CONTEXT_TOKENS,
    FAR_TOKENS,
    BatchCosts,
    LiveCosts,
    StepCosts,
    best_length,
    measure_step_costs,
)
from choicespec.drafters.choice import ByCost, Survival
from choicespec.drafters.union import Payoff
from choicespec.records import Request
from choicespec.runtimes.scripted import ScriptedRuntime, TableTarget
from choicespec.spec.method import Autoregressive
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from hypothesis import given
from hypothesis import strategies as st

FREE = StepCosts((1, 32), (1.0, 1.0))
# Binary fractions throughout: their sums and products are exact, so that ties are ties.
SIXTEENTHS = st.integers(0, 16).map(lambda number: number / 16)


@st.composite
def survivals(draw: st.DrawFn, least: int = 0) -> list[float]:
    """Probabilities that never rise."""
    return sorted(draw(st.lists(SIXTEENTHS, min_size=least, max_size=12)), reverse=True)


@st.composite
def costs_of_any_form(draw: st.DrawFn) -> StepCosts:
    """Every size from 1 to 16 measured, some as dear as the one before, some much dearer."""
    rises = draw(st.lists(st.integers(0, 24).map(lambda number: number / 8), min_size=15, max_size=15))
    return StepCosts(tuple(range(1, 17)), tuple(accumulate(rises, initial=1.0)))


def linear(slope: float) -> StepCosts:
    """1 ms for the anchor, and as much again for each further token."""
    return StepCosts((1, 17), (1.0, 1.0 + 16 * slope))


def gain(survival: Sequence[float], costs: StepCosts, rate: float, length: int) -> float:
    """What a step yields with so many draft tokens, less what its time is worth."""
    return 1 + sum(survival[:length]) - rate * costs.of(length + 1)


def test_a_size_that_was_measured_costs_what_was_measured() -> None:
    """Fails if a measurement is smoothed away, or is taken for that of its neighbour."""
    costs = StepCosts((1, 2, 5, 9), (3.0, 3.5, 3.5, 8.0))
    assert [costs.of(tokens) for tokens in costs.tokens] == list(costs.ms)


def test_a_size_between_two_lies_between_their_costs() -> None:
    """Fails if a size that was not measured is as cheap as the next smaller one, or as dear as the next larger."""
    costs = StepCosts((1, 2, 5, 9), (3.0, 3.5, 6.5, 8.5))
    assert [costs.of(tokens) for tokens in (3, 4, 6, 7, 8)] == [4.5, 5.5, 7.0, 7.5, 8.0]


def test_a_size_beyond_the_largest_costs_in_proportion() -> None:
    """Fails if a draft longer than any that was measured looks free, so that everything is drafted."""
    costs = StepCosts((1, 4), (3.0, 6.0))
    assert [costs.of(tokens) for tokens in (5, 8, 40)] == [7.5, 12.0, 60.0]


@given(costs_of_any_form(), st.integers(1, 60))
def test_more_tokens_never_cost_less(costs: StepCosts, tokens: int) -> None:
    """Fails where two of the three rules meet: a longer draft would look cheaper than a shorter one."""
    assert costs.of(tokens) <= costs.of(tokens + 1)


@given(survivals(), costs_of_any_form(), st.integers(0, 64).map(lambda number: number / 16))
def test_no_other_length_gains_more(survival: list[float], costs: StepCosts, rate: float) -> None:
    """Fails if a step is spent that settles less than its time would elsewhere, or if a token that pays is left out.
    Among equals the shortest wins: it is settled sooner."""
    gains = [gain(survival, costs, rate, length) for length in range(len(survival) + 1)]
    assert best_length(survival, costs, rate) == gains.index(max(gains))


def test_nothing_is_verified_where_nothing_pays() -> None:
    """Fails if a draft is verified for its own sake: here each token of it costs more than it yields."""
    assert best_length([0.5, 0.25], linear(1.0), 1.0) == 0
    assert best_length([0.0] * 8, FREE, 1.0) == 0
    assert best_length([], FREE, 1.0) == 0


@given(survivals(), st.integers(0, 64).map(lambda number: number / 16))
def test_where_verification_is_free_all_that_may_survive_is_verified(survival: list[float], rate: float) -> None:
    """Fails if an unlikely token is left out although a mistake costs nothing."""
    assert best_length(survival, FREE, rate) == sum(probability > 0 for probability in survival)


@given(survivals(), st.integers(0, 16).map(lambda number: number / 16), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_token_is_verified_while_it_is_likelier_than_its_cost_is_worth(
    survival: list[float], slope: float, rate: float
) -> None:
    """Fails if a draft runs on beyond the token that costs more than it yields, or stops before it."""
    worth = slope * rate
    assert best_length(survival, linear(slope), rate) == sum(probability > worth for probability in survival)


def test_a_size_that_does_not_pay_is_passed_over_for_one_that_does() -> None:
    """Fails if the search stops at the first token that does not pay: from 2 tokens on another kernel runs, which costs
    more at once and nothing for the tokens after."""
    costs = StepCosts((1, 2, 32), (1.0, 1.5, 1.5))
    survival = [0.3, 0.28, 0.27, 0.26]
    assert gain(survival, costs, 1.0, 1) < gain(survival, costs, 1.0, 0)
    assert best_length(survival, costs, 1.0) == 4
    assert best_length(survival[:1], costs, 1.0) == 0


@given(survivals(), costs_of_any_form(), st.integers(0, 32).map(lambda number: number / 16))
def test_dearer_time_never_gives_a_longer_draft(survival: list[float], costs: StepCosts, rate: float) -> None:
    """Fails if drafts grow where the target is fast without them."""
    assert best_length(survival, costs, rate + 0.5) <= best_length(survival, costs, rate)


def length_of(payoff: Payoff, survival: Sequence[float]) -> int:
    """How much of a step's only draft is verified."""
    weighed = payoff.weigh(range(len(survival)), "the", survival)
    payoff.take(weighed, drafting_ms=0.0)
    return weighed.length


@given(survivals(), SIXTEENTHS)
def test_a_threshold_cuts_at_the_first_token_below_it(survival: list[float], least: float) -> None:
    """Fails if the bound itself counts as below, or if 0 leaves anything out."""
    length = length_of(Survival(least), survival)
    assert all(probability >= least for probability in survival[:length])
    assert all(probability < least for probability in survival[length:][:1])
    assert length_of(Survival(0.0), survival) == len(survival)


def test_a_threshold_never_jumps() -> None:
    """Fails if tokens behind an unlikely one are counted: a draft has no holes."""
    assert length_of(Survival(0.5), [0.9, 0.4, 0.6]) == 1


def test_the_first_step_is_weighed_against_plain_decoding() -> None:
    """Fails if a proposer begins as if time were worth nothing, or everything: plain decoding settles a token in the
    time of one."""
    costs = StepCosts((1, 2, 3), (2.0, 3.0, 4.0))
    assert length_of(ByCost(costs), [0.51, 0.49]) == 1
    assert length_of(ByCost(costs), [0.51, 0.51]) == 2
    assert length_of(ByCost(costs), [0.49, 0.49]) == 0


@given(st.lists(survivals(), min_size=1, max_size=6))
def test_by_cost_takes_the_best_length_at_some_rate(steps: list[list[float]]) -> None:
    """Fails if the length is another's than ``best_length``'s at a rate that these costs and survivals allow."""
    costs = linear(0.25)
    by_cost = ByCost(costs)
    for survival in steps:
        length = length_of(by_cost, survival)
        slowest, fastest = 1 / costs.of(13), 13 / costs.of(1)
        longest, shortest = (best_length(survival, costs, rate) for rate in (slowest, fastest))
        assert shortest <= length <= longest


def test_fast_steps_make_time_dear_and_slow_ones_make_it_cheap_again() -> None:
    """Fails if the rate is that of the first step for ever, or of the last step alone."""
    costs = linear(0.25)
    sure, doubtful, none = [1.0] * 8, [0.4] * 8, [0.0] * 8
    by_cost = ByCost(costs)
    assert length_of(by_cost, doubtful) == 8  # at plain decoding's rate 0.25 is enough
    for _ in range(200):
        assert length_of(by_cost, sure) == 8
    assert length_of(by_cost, doubtful) == 0  # 9 tokens in 3 ms: 0.75 is not too much to ask
    assert length_of(by_cost, sure) == 8
    for _ in range(200):
        assert length_of(by_cost, none) == 0
    assert length_of(by_cost, doubtful) == 8


def test_a_step_without_a_candidate_makes_time_cheaper() -> None:
    """Fails if only the steps that drafted are remembered: a request with few candidates would verify as if it were
    fast all the time."""
    costs = linear(0.25)
    busy, idle = ByCost(costs), ByCost(costs)
    for _ in range(20):
        assert length_of(busy, [1.0] * 8) == length_of(idle, [1.0] * 8) == 8
        assert length_of(idle, ()) == 0
    doubtful = [0.7] * 8
    assert length_of(busy, doubtful) < length_of(idle, doubtful)


def test_a_request_begins_at_plain_decodings_rate() -> None:
    """Fails if the length of a draft depends on which requests came before."""
    costs = linear(0.25)
    by_cost = ByCost(costs)
    for _ in range(20):
        length_of(by_cost, [1.0] * 8)
    assert length_of(by_cost, [0.4] * 8) == 0
    by_cost.begin()
    assert length_of(by_cost, [0.4] * 8) == 8


def test_the_sizes_measured_reach_from_one_token_to_the_longest() -> None:
    """Fails if a size that will be asked for is only extrapolated, or if noise makes more tokens cheaper."""
    for longest in (1, 2, 4, 17, 70):
        costs = measure_step_costs(TableTarget(), longest, context_tokens=8)
        assert costs.tokens[0] == 1
        assert costs.tokens[-1] == longest
        assert all(smaller < larger for smaller, larger in pairwise(costs.tokens))
        assert len(costs.ms) == len(costs.tokens)
        assert all(0 < cheaper <= dearer for cheaper, dearer in pairwise((costs.ms[0], *costs.ms)))


def test_measuring_leaves_nothing_in_the_target() -> None:
    """Fails if the tokens that were timed stay in the cache, so that the next request is decoded behind them."""
    request = Request("r", tuple(b"no part of the script"), 24)
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec(target=TargetSpec(model="none")))
    expected = runtime.generate(request, Autoregressive()).output_ids
    measure_step_costs(runtime._target, 17, context_tokens=8)
    assert runtime.generate(request, Autoregressive()).output_ids == expected


@pytest.mark.parametrize("longest", [3, 9])
def test_every_size_is_timed_behind_the_same_context(longest: int) -> None:
    """Fails if a size is timed behind more tokens than another, which makes the later ones dear."""
    seen: list[int] = []

    class Counting(TableTarget):
        def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
            seen.append(len(self._cache))
            return super().verify(block_ids, parents)

    measure_step_costs(Counting(), longest, context_tokens=8)
    assert set(seen) == {8}


def test_a_request_pays_its_part_of_a_shared_pass() -> None:
    """Fails if requests side by side draft as if each had the target to itself, or as if all ran one after another."""
    one, full = StepCosts((1, 9), (10.0, 18.0)), StepCosts((1, 9), (16.0, 80.0))
    costs = BatchCosts(one, full, most=4)
    assert (costs.of(1), costs.of(9)) == (10.0, 18.0)
    costs.requests = 4
    assert (costs.of(1), costs.of(9), costs.of(5)) == (4.0, 20.0, 12.0)
    costs.requests = 2
    assert costs.of(1) == pytest.approx((10 + (16 - 10) / 3) / 2)
    assert BatchCosts(one, one, most=1).of(9) == 18.0


def test_live_costs_are_linear_in_the_context() -> None:
    """Fails if a long context is given a short one's costs, or one beyond those measured the longest one's."""
    costs = LiveCosts(StepCosts((1, 9), (10.0, 18.0)), StepCosts((1, 9), (20.0, 58.0)), CONTEXT_TOKENS + 1000)
    for context, expected in ((0, 18.0), (400, 18.0), (900, 38.0), (1400, 58.0), (2400, 98.0)):
        costs.context_tokens = context
        assert costs.of(9) == pytest.approx(expected)


def test_live_costs_follow_what_steps_take() -> None:
    """Fails if a machine that has become slower is not noticed, or if one slow step is taken for a slower machine."""
    curve = StepCosts((1, 9), (10.0, 20.0))
    costs = LiveCosts(curve, curve, FAR_TOKENS)
    costs.learn(9, 2000.0)
    assert costs.of(9) < 23.0
    for _ in range(100):
        costs.learn(9, 40.0)
    assert costs.of(9) == pytest.approx(40.0, rel=0.01)
    assert costs.of(1) == pytest.approx(20.0, rel=0.15), "what is not seen is taken to have changed alike"
    for _ in range(30):
        costs.learn(1, 10.0)
    assert costs.of(1) == pytest.approx(10.0, rel=0.1)
    assert costs.of(9) > 25.0, "what is seen counts for more than what is not"
