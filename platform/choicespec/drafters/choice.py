"""Finite candidate sets, and drafters beside them: the best candidate or draft is verified."""

from collections.abc import Sequence
from typing import Protocol

from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.drafters.payoff import Payoff
from choicespec.drafters.union import CalledDrafter, improve
from choicespec.records import Proposal, Request

_NOTHING = Proposal((), "")


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


class ChoiceDrafter:
    """Proposes the best of a finite set, and of the drafts of drafters beside it, as far as verifying it pays.

    Args:
        candidates: the sets.
        ranker: chooses of a set.
        payoff: weighs the chosen candidate and the drafts.
        block_length: the most tokens that a drafter is asked for.
        drafters: those beside the set, each behind its gate.
    """

    def __init__(
        self,
        candidates: RequestCandidates,
        ranker: Ranker,
        payoff: Payoff,
        block_length: int,
        drafters: Sequence[CalledDrafter] = (),
    ) -> None:
        self._candidates, self._ranker, self._payoff = candidates, ranker, payoff
        self._block_length, self._drafters = block_length, drafters

    def begin(self, request: Request) -> None:
        """Draw the request's sources."""
        self._candidates.begin(request)
        for drafter in self._drafters:
            drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """The best draft's first tokens, or nothing where there is none or none pays."""
        for drafter in self._drafters:
            drafter.look(token_ids)
        found = self._candidates.candidates(token_ids, limit)
        if not found and (limit < 1 or not self._drafters):
            return _NOTHING
        best = self._payoff.weigh(*self._chosen(found, token_ids[-1]))
        best, drafting_ms = improve(best, self._drafters, token_ids, min(limit, self._block_length))
        self._payoff.take(best, drafting_ms)
        return Proposal(tuple(best.token_ids[: best.length]), best.source) if best.length else _NOTHING

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Keep the output for later requests; the same request never sees its own."""
        self._candidates.finish(request, output_ids)
        for drafter in self._drafters:
            drafter.proposer.finish(request, output_ids)

    def _chosen(self, found: Sequence[Candidate], anchor: int) -> tuple[Sequence[int], str, Sequence[float]]:
        """The tokens, source and survival of the ranker's choice; empty where there is no candidate."""
        if not found:
            return (), "", ()
        candidate, survival = self._ranker.best(found, anchor)
        return candidate.token_ids, candidate.source, survival
