"""Finite candidate sets, and drafters beside them: the best candidate or draft is verified."""

from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from time import perf_counter
from typing import NamedTuple, Protocol

from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.decoding.step_cost import Costs, best_length
from choicespec.drafters.tree import DraftTree
from choicespec.drafters.union import CalledDrafter, Join, Judge, Payoff, Weighed, better, improve
from choicespec.records import Proposal, Request

REMEMBERED = 0.95  # of the running rate, a step


class Ranker(Protocol):
    """Chooses one of a set; ``scorer.ranker`` reads the target's hidden state for it."""

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        """The choice among one or more candidates, best prior first, that follow the anchor."""
        ...

    def every(self, candidates: Sequence[Candidate], anchor: int) -> list[Ranked]:
        """All of them, in their order."""
        ...


class JudgingRanker(Ranker, Protocol):
    """One that may know drafts, too."""

    def judge(self, drafter: str) -> Judge | None:
        """Says how good the drafts of one of the pair's drafters are; None where it cannot."""
        ...


class PriorRanker:
    """Chooses what the prior ranks first."""

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        """See ``Ranker.best``."""
        return Ranked(candidates[0], candidates[0].survival)

    def every(self, candidates: Sequence[Candidate], anchor: int) -> list[Ranked]:
        """See ``Ranker.every``."""
        return [Ranked(candidate, candidate.survival) for candidate in candidates]


class Survival:
    """Verifies each token that survives with at least a fixed probability; time is worth nothing."""

    def __init__(self, least: float) -> None:
        self._least = least

    def begin(self) -> None:
        """See ``Payoff.begin``."""

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

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.begin()

    def begin(self) -> None:
        """See ``Payoff.begin``; the rate starts at plain decoding's."""
        self._tokens, self._ms = 1.0, self._costs.of(1)

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
        self._tokens = REMEMBERED * self._tokens + 1 + sum(chosen.survival[: chosen.length])
        self._ms = REMEMBERED * self._ms + self._costs.of(chosen.length + 1) + drafting_ms


class _Start(NamedTuple):
    """A step before drafters are called: what is best so far, how it is joined with a draft, and what ranking took."""

    best: Weighed
    join: Join
    score_ms: float


class ChoiceDrafter:
    """Proposes the best of a finite set and of the drafts of drafters beside it, or a tree of all, as far as it pays.

    Args:
        candidates: the sets.
        ranker: chooses of a set.
        payoff: weighs the chosen candidate and the drafts.
        block_length: the most tokens that a drafter is asked for.
        drafters: those beside the set, each behind its gate.
        width: the most branches of a tree; 1 proposes chains.
    """

    def __init__(
        self,
        candidates: RequestCandidates,
        ranker: Ranker,
        payoff: Payoff,
        block_length: int,
        drafters: Sequence[CalledDrafter] = (),
        width: int = 1,
    ) -> None:
        self._candidates, self._ranker, self._payoff = candidates, ranker, payoff
        self._block_length, self._drafters, self._width = block_length, drafters, width

    def beside(self) -> "ChoiceDrafter":
        """One for a request that runs beside others: what is learnt is shared. See ``CalledDrafter.beside``."""
        assert self._width == 1, "a runtime that runs requests side by side refuses trees"
        payoff = copy(self._payoff)
        drafters = [drafter.beside(payoff) for drafter in self._drafters]
        return ChoiceDrafter(self._candidates.beside(), self._ranker, payoff, self._block_length, drafters)

    def begin(self, request: Request) -> None:
        """Draw the request's sources."""
        self._candidates.begin(request)
        self._payoff.begin()
        for drafter in self._drafters:
            drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """The best draft's first tokens, or nothing where there is none or none pays."""
        best, join, score_ms = self._start(token_ids, limit)
        drafting_ms = 0.0
        if limit > 0:
            best, drafting_ms = improve(best, self._drafters, token_ids, min(limit, self._block_length), join)
        self._payoff.take(best, drafting_ms)
        return proposal_of(best, score_ms)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Keep the output for later requests; the same request never sees its own."""
        self._candidates.finish(request, output_ids)
        for drafter in self._drafters:
            drafter.finish(request, output_ids)

    def _start(self, token_ids: Sequence[int], limit: int) -> _Start:
        """The ranker's choice, or a tree of all that it ranks; an empty draft where there is no candidate."""
        found = self._candidates.candidates(token_ids, limit)
        if self._width > 1:
            return self._tree(found, token_ids)
        if not found:
            return _Start(self._payoff.weigh((), "", ()), better, 0.0)
        started = perf_counter()
        candidate, survival = self._ranker.best(found, token_ids[-1])
        score_ms = (perf_counter() - started) * 1e3
        return _Start(self._payoff.weigh(candidate.token_ids, candidate.source, survival), better, score_ms)

    def _tree(self, found: Sequence[Candidate], token_ids: Sequence[int]) -> _Start:
        """All candidates as one draft, to which drafters' drafts are joined."""
        tree = DraftTree(self._payoff, self._width)
        if not found:
            return _Start(tree.weighed(), tree.join, 0.0)
        started = perf_counter()
        for candidate, survival in self._ranker.every(found, token_ids[-1]):
            tree.add(candidate.token_ids, candidate.source, survival)
        return _Start(tree.weighed(), tree.join, (perf_counter() - started) * 1e3)


def proposal_of(best: Weighed, score_ms: float = 0.0) -> Proposal:
    """What is verified of a draft; a tree of one branch is a chain."""
    if not best.length:
        return Proposal((), "", score_ms=score_ms)
    chain = tuple(range(best.length))
    parents = tuple(best.parents[: best.length]) or chain
    survival = best.survival[: best.length]
    reached = [1.0, *survival]  # by place in the block
    pairs = zip(survival, parents, strict=True)
    given = tuple(after / reached[parent] if reached[parent] else 0.0 for after, parent in pairs)
    branching = () if parents == chain else parents
    return Proposal(tuple(best.token_ids[: best.length]), best.source, given, score_ms, branching)
