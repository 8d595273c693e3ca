"""A tree over what a block drafter says of each place, whatever stands before it. ``tree`` has the sources."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Protocol

from choicespec.decoding.proposer import Proposer
from choicespec.drafters.choice import proposal_of
from choicespec.drafters.tree import Child, grow
from choicespec.drafters.union import Payoff
from choicespec.records import Proposal, Request

Place = Sequence[tuple[int, float]]  # tokens and their probabilities


class BlockDrafter(Proposer, Protocol):
    """A drafter whose tokens depend on the text before the draft alone, not on each other."""

    def marginals(self, token_ids: Sequence[int], limit: int, most: int) -> Sequence[Place]:
        """The ``most`` likeliest tokens of each place of a draft, at most ``limit`` places."""
        ...


class MarginalDrafter:
    """Proposes the likeliest tokens of all places, as far as verifying them pays.

    Args:
        drafter: says what is likely.
        payoff: decides how much of the tree is verified.
        source: what its drafts are booked on.
        width: the most branches of a tree.
    """

    def __init__(self, drafter: BlockDrafter, payoff: Payoff, source: str, width: int) -> None:
        self._drafter, self._payoff, self._source, self._width = drafter, payoff, source, width

    def begin(self, request: Request) -> None:
        """Start a request."""
        self._payoff.begin()
        self._drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """See ``Proposer.propose``; no branch is longer than the limit."""
        started = perf_counter()
        places = self._drafter.marginals(token_ids, limit, self._width)

        def after(depth: int) -> Iterator[Child[int]]:
            for token_id, probability in places[depth] if depth < len(places) else ():
                yield Child(token_id, probability, depth + 1)

        grown = grow(0, after, self._width)
        found = self._payoff.weigh(grown.token_ids, self._source, grown.survival)._replace(parents=grown.parents)
        self._payoff.take(found, (perf_counter() - started) * 1e3)
        return proposal_of(found)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn here."""
        self._drafter.finish(request, output_ids)
