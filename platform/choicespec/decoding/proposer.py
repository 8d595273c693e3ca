"""What the decoding loop asks of whatever proposes tokens."""

from collections.abc import Sequence
from typing import Protocol

from choicespec.records import Proposal, Request


class Proposer(Protocol):
    """Proposes a draft a step. One request at a time; a new ``begin`` forgets the last request."""

    def begin(self, request: Request) -> None:
        """Start a request. Its time counts as the first step's propose time."""
        ...

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """Propose at most ``limit`` tokens (0 or more) that follow ``token_ids``.

        Args:
            token_ids: the prompt and the output so far; only grows within a request; its last token is the anchor.
            limit: what can still be accepted before the output's length is reached.
        """
        ...

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Learn a request's output, for later requests; outside every step's time."""
        ...
