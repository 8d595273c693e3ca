"""Finite candidate sets: the best candidate is verified as a draft."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.decoding.step_cost import StepCosts, best_length
from choicespec.records import Proposal, Request

_NOTHING = Proposal((), "")
REMEMBERED = 0.95  # of the running rate, a step


class Ranker(Protocol):
    """Chooses one of a set; ``scorer.ranker`` reads the target's hidden state for it."""

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        """The choice among one or more candidates, best prior first, that follow the anchor."""
        ...


class PriorRanker:
    """Chooses what the prior ranks first."""

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        """See ``Ranker.best``."""
        return Ranked(candidates[0], candidates[0].survival)


class LengthRule(Protocol):
    """Says how many tokens of the chosen candidate are verified."""

    def begin(self) -> None:
        """Start a request; nothing of an earlier one is remembered, so that the order of requests changes no draft."""
        ...

    def length(self, survival: Sequence[float]) -> int:
        """Draft tokens to verify, at each step in turn; ``survival`` is empty where there is no candidate."""
        ...


class Survival:
    """Verifies each token that survives with at least a fixed probability."""

    def __init__(self, least: float) -> None:
        self._least = least

    def begin(self) -> None:
        """See ``LengthRule.begin``."""

    def length(self, survival: Sequence[float]) -> int:
        """See ``LengthRule.length``."""
        return sum(1 for _ in takewhile(lambda probability: probability >= self._least, survival))


class ByCost:
    """Verifies as many tokens as pay, by what a verification costs and the rate expected of the last steps."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.begin()

    def begin(self) -> None:
        """See ``LengthRule.begin``; the rate starts at plain decoding's."""
        self._tokens, self._ms = 1.0, self._costs.of(1)

    def length(self, survival: Sequence[float]) -> int:
        """See ``LengthRule.length``."""
        length = best_length(survival, self._costs, self._tokens / self._ms)
        self._tokens = REMEMBERED * self._tokens + 1 + sum(survival[:length])
        self._ms = REMEMBERED * self._ms + self._costs.of(length + 1)
        return length


class ChoiceDrafter:
    """Proposes the candidate that the ranker chooses, as far as verifying it pays.

    Args:
        candidates: the sets.
        ranker: chooses.
        length: how many of the chosen tokens are verified.
    """

    def __init__(self, candidates: RequestCandidates, ranker: Ranker, length: LengthRule) -> None:
        self._candidates, self._ranker, self._length = candidates, ranker, length

    def begin(self, request: Request) -> None:
        """Draw the request's sources."""
        self._candidates.begin(request)
        self._length.begin()

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """The best candidate's first tokens, or nothing where there is no candidate or none pays."""
        found = self._candidates.candidates(token_ids, limit)
        if not found:
            self._length.length(())
            return _NOTHING
        candidate, survival = self._ranker.best(found, token_ids[-1])
        length = self._length.length(survival)
        return Proposal(candidate.token_ids[:length], candidate.source) if length else _NOTHING

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Keep the output for later requests; the same request never sees its own."""
        self._candidates.finish(request, output_ids)
