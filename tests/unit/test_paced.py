"""What pays is proposed, and nothing while nothing does: against simulated acceptance and times."""

import random
from collections.abc import Callable, Sequence

import pytest
from choicespec.decoding.step_cost import FAR_TOKENS, LiveCosts, StepCosts
from choicespec.drafters.paced import Allowance, PacedDrafter
from choicespec.records import Proposal, Request, Step
from choicespec.spec.method import Choice, MethodSpec, Ngram
from contracts.proposer_contract import Limits, ProposerContract, Texts, fresh, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

K = 8
PLAIN_MS = 10.0
Chance = Callable[[int], float]  # that a draft token at a place of the output is right


class Guided:
    """Drafts k tokens, each right with the chance that its place has. A text's right token is its place."""

    def __init__(self, chance: Chance) -> None:
        self._chance, self._random = chance, random.Random(0)
        self.asked = 0

    def begin(self, request: Request) -> None:
        """Nothing to prepare."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        self.asked += 1
        first = len(token_ids)
        right = [self._random.random() < self._chance(first + i) for i in range(min(K, limit))]
        return Proposal(tuple(first + i if hit else -1 for i, hit in enumerate(right)), "guided")

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


def linear(slope: float) -> StepCosts:
    """A plain step, and a share of it again for each further token."""
    return StepCosts((1, 17), (PLAIN_MS, PLAIN_MS * (1 + 16 * slope)))


def decode(
    chance: Chance,
    believed: StepCosts,
    true: StepCosts,
    tokens: int,
    look_ms: float = 0.01,
    interrupted: Callable[[int], float] = lambda step: 0.0,
) -> tuple[list[Step], Guided]:
    """The steps of one long output, at times of a machine that costs ``true`` and stands still for some steps."""
    guided = Guided(chance)
    paced = PacedDrafter(guided, LiveCosts(believed, believed, FAR_TOKENS))
    paced.begin(Request("r", (0,), tokens))
    text = [0]
    steps: list[Step] = []
    while len(text) < tokens:
        asked = guided.asked
        draft = paced.propose(text, tokens - len(text)).token_ids
        accepted = next((i for i, token in enumerate(draft) if token != len(text) + i), len(draft))
        text += range(len(text), len(text) + accepted + 1)
        spent_ms = look_ms * (guided.asked - asked)
        verify_ms = true.of(len(draft) + 1) + interrupted(len(steps))
        steps.append(Step(len(draft), accepted, "guided", spent_ms, verify_ms))
        paced.observe(steps[-1])
    return steps, guided


def rate(steps: Sequence[Step]) -> float:
    """Of plain decoding's."""
    return sum(step.accepted + 1 for step in steps) * PLAIN_MS / sum(step.propose_ms + step.verify_ms for step in steps)


regimes = st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), min_size=1, max_size=12)


@settings(max_examples=30)
@given(regimes, st.sampled_from([0.0, 0.05, 0.3, 1.0, 2.0]), st.sampled_from([0.01, 0.5, 5.0]))
def test_no_acceptance_and_no_cost_makes_it_two_percent_slower(
    chances: list[float], slope: float, look_ms: float
) -> None:
    """Fails if drafts are verified, or looked for, on a hope that is never called to account. The acceptance changes
    every 150 tokens."""
    costs = linear(slope)
    steps, _ = decode(lambda place: chances[place // 150 % len(chances)], costs, costs, 2000, look_ms)
    assert rate(steps) > 0.98


@pytest.mark.parametrize("slope", [0.3, 1.0])
def test_a_curve_that_has_become_wrong_costs_no_more(slope: float) -> None:
    """Fails if the measured curve is trusted against what steps take, which here is more."""
    for chance in (0.0, 0.5, 0.8):
        steps, _ = decode(lambda place, chance=chance: chance, linear(0.02), linear(slope), 3000)  # type: ignore[misc]
        assert rate(steps) > 0.98


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.25])
def test_it_comes_close_to_the_best_fixed_length(chance: float, slope: float) -> None:
    """Fails if fear of losing keeps it from winning. What a fixed length yields is known here in closed form."""
    costs = linear(slope)
    yields = [1 + sum(chance**i for i in range(1, length + 1)) for length in range(K + 1)]
    best = max(tokens * PLAIN_MS / costs.of(length + 1) for length, tokens in enumerate(yields))
    steps, _ = decode(lambda place: chance, costs, costs, 4000)
    assert rate(steps) > 0.96 * best


def test_drafts_that_are_never_right_are_hardly_verified() -> None:
    """Fails if a short answer pays for finding out what looking alone shows."""
    costs = linear(0.15)
    steps, guided = decode(lambda place: 0.0, costs, costs, 300)
    assert guided.asked == len(steps)
    assert sum(step.proposed for step in steps) <= 2


def test_it_recovers_when_acceptance_comes_back() -> None:
    """Fails if a source that was wrong for long is never believed again."""
    costs = linear(0.1)
    steps, _ = decode(lambda place: 0.0 if place < 2000 else 0.9, costs, costs, 3000)
    plain = [step for step in steps[:2000] if not step.proposed]
    assert len(plain) > 1950
    assert rate(steps[2000:]) > 2.0


def test_an_interruption_does_not_end_what_pays() -> None:
    """Fails if the seconds for which a machine stood still are taken for what drafts cost: nothing would be verified
    until plain decoding has earned them again, half a hundredth of a step a token."""
    costs = linear(0.1)
    steps, _ = decode(lambda place: 0.9, costs, costs, 2000, interrupted=lambda step: 1500.0 if step == 200 else 0.0)
    assert steps[200].proposed
    assert rate(steps[230:]) > 2.0


def test_steps_that_all_take_as_long_are_no_interruption() -> None:
    """Fails if what is lost is forgiven as often as it happens."""
    allowance = Allowance()
    for _ in range(4):
        allowance.settle(1, -100.0)
    assert allowance.left < -390


def test_looking_is_rationed_where_it_is_dear_and_finds_nothing() -> None:
    """Fails if the search or the scorer runs at every step of a text on which nothing is ever accepted."""
    costs = linear(0.1)
    dear, cheap = (decode(lambda place: 0.0, costs, costs, 2000, look_ms)[1].asked for look_ms in (2.0, 0.01))
    assert cheap > 1900
    assert 0 < dear < 150


def test_without_the_allowance_the_bound_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: nothing is called to account, and the check above would see it."""
    monkeypatch.setattr(Allowance, "settle", lambda self, tokens, gained: None)
    costs = linear(0.1)
    steps, _ = decode(lambda place: 0.0, costs, costs, 2000, look_ms=2.0)
    assert rate(steps) < 0.9


def test_what_pays_at_a_short_context_may_not_at_a_long_one() -> None:
    """Fails if the curve of another context decides: here a token more is free at first, and later costs a step."""
    paced = PacedDrafter(Guided(lambda place: 1.0), LiveCosts(linear(0.0), linear(1.0), 800))
    paced.begin(Request("r", (0,), 4000))
    for known in range(2 * K):  # what it must have seen
        paced.propose(range(401 - 2 * K + known), 64)
    assert len(paced.propose(range(401), 64).token_ids) == K
    assert paced.propose(range(3001), 64).token_ids == ()


def test_a_proposer_that_was_not_asked_is_not_told() -> None:
    """Fails if a request costs its proposer's preparation although nothing is looked for in it."""

    class Counting(Guided):
        told = 0

        def begin(self, request: Request) -> None:
            self.told += 1

        def finish(self, request: Request, output_ids: Sequence[int]) -> None:
            self.told += 1

    counting = Counting(lambda place: 1.0)
    paced = PacedDrafter(counting, LiveCosts(linear(0.1), linear(0.1), FAR_TOKENS))
    request = Request("r", (0,), 8)
    paced.begin(request)
    assert paced.propose([0], 0).token_ids == ()
    paced.finish(request, [1])
    assert counting.told == 0
    paced.begin(request)
    paced.propose([0], 7)
    paced.finish(request, [1])
    assert counting.told == 2


class TestPaced(ProposerContract):
    """The contract; how much of a draft is verified depends on the steps before."""

    methods = st.one_of(
        st.builds(lambda length: Choice(block_length=length, pace="adaptive"), length=st.integers(1, 16)),
        st.builds(lambda k: Ngram(num_draft_tokens=k, pace="adaptive"), k=st.integers(1, 16)),
    )

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Choice | Ngram)
        return method.block_length if isinstance(method, Choice) else method.num_draft_tokens

    @given(st.data(), Texts, Limits)
    def test_a_growing_text_gives_what_the_whole_text_gives(
        self, data: st.DataObject, text: list[int], limit: int
    ) -> None:
        """Fails if an index that grows with the text misses, repeats or misplaces a part of it."""
        method = data.draw(self.methods)
        proposer = fresh(method)
        proposer.begin(request_of(text[:1]))
        for length in sorted(data.draw(st.sets(st.integers(1, len(text))))):
            found, other = proposer.propose(text[:length], limit), self.draft(method, text[:length], limit)
            shared = min(len(found.token_ids), len(other.token_ids))
            assert found.token_ids[:shared] == other.token_ids[:shared]
