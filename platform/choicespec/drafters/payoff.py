"""What verifying a draft yields: how many of its tokens are verified, and which of several drafts is."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from choicespec.decoding.step_cost import StepCosts, best_length

_REMEMBERED = 0.95  # of the running rate, a step


class Weighed(NamedTuple):
    """A draft that could be verified.

    Attributes:
        token_ids: all of its tokens.
        source: who proposes it.
        survival: the probability that each prefix is accepted, shortest first.
        length: how many of its tokens are worth verifying.
        gain: tokens that a step with so many of them is expected to yield, less what its time is worth in tokens; to
            be compared with other drafts of the same step.
    """

    token_ids: Sequence[int]
    source: str
    survival: Sequence[float]
    length: int
    gain: float

    @property
    def expected_accepted(self) -> float:
        """The expected accepted length, were all of it verified."""
        return sum(self.survival)


class Payoff(Protocol):
    """Weighs the drafts of a step."""

    def weigh(self, token_ids: Sequence[int], source: str, survival: Sequence[float]) -> Weighed:
        """A draft with what it yields."""
        ...

    def price(self, ms: float) -> float:
        """What time is worth, in tokens."""
        ...

    def take(self, chosen: Weighed, drafting_ms: float) -> None:
        """Note a step: what is verified, and the time that drafters took for it."""
        ...


class Survival:
    """Verifies each token that survives with at least a fixed probability; time is worth nothing."""

    def __init__(self, least: float) -> None:
        self._least = least

    def weigh(self, token_ids: Sequence[int], source: str, survival: Sequence[float]) -> Weighed:
        """See ``Payoff.weigh``."""
        likely = list(takewhile(lambda probability: probability >= self._least, survival))
        return Weighed(token_ids, source, survival, len(likely), 1 + sum(likely))

    def price(self, ms: float) -> float:
        """Nothing."""
        return 0.0

    def take(self, chosen: Weighed, drafting_ms: float) -> None:
        """Nothing to note."""


class ByCost:
    """Verifies as many tokens as pay, by what a verification costs and the rate expected of the last steps."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._tokens, self._ms = 1.0, costs.of(1)

    def weigh(self, token_ids: Sequence[int], source: str, survival: Sequence[float]) -> Weighed:
        """See ``Payoff.weigh``."""
        length = best_length(survival, self._costs, self._tokens / self._ms)
        gain = 1 + sum(survival[:length]) - self.price(self._costs.of(length + 1))
        return Weighed(token_ids, source, survival, length, gain)

    def price(self, ms: float) -> float:
        """What is expected of that time elsewhere."""
        return ms * self._tokens / self._ms

    def take(self, chosen: Weighed, drafting_ms: float) -> None:
        """See ``Payoff.take``."""
        self._tokens = _REMEMBERED * self._tokens + 1 + sum(chosen.survival[: chosen.length])
        self._ms = _REMEMBERED * self._ms + self._costs.of(chosen.length + 1) + drafting_ms
