"""Prompt lookup: what followed the latest earlier occurrence of the last n tokens."""

from collections.abc import Sequence

from choicespec.records import Proposal, Request
from choicespec.spec.method import Ngram

_NOTHING = Proposal((), "")


class NgramDrafter:
    """Looks the longest suffix of n tokens up in the prompt and the output so far.

    An index from each n-gram to where its latest occurrence ends grows with the text, so that a look-up costs one
    dictionary access for each n, whatever the context's length. Where the text runs out before k tokens (the match
    overlaps the suffix), the draft goes on from its own start: the text is taken to go on periodically.
    """

    def __init__(self, method: Ngram) -> None:
        self._num_draft_tokens = method.num_draft_tokens
        self._sizes = range(method.max_ngram, method.min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def begin(self, request: Request) -> None:
        """Forget the last request; the prompt is indexed by the first ``propose``."""
        self._ends = {}
        self._indexed = 0

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """Propose up to k tokens, or nothing where no suffix of n tokens occurred before."""
        end = len(token_ids)
        self._index_up_to(token_ids, end - 1)
        count = min(self._num_draft_tokens, limit)
        if count <= 0:
            return _NOTHING
        for size in self._sizes:
            found = self._ends.get(tuple(token_ids[end - size : end])) if size <= end else None
            if found is not None:
                period = end - found
                return Proposal(tuple(token_ids[found + i % period] for i in range(count)), "ngram")
        return _NOTHING

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn: only the request's own text is looked up."""

    def _index_up_to(self, token_ids: Sequence[int], end: int) -> None:
        for position in range(self._indexed + 1, end + 1):
            for size in self._sizes:
                if size <= position:
                    self._ends[tuple(token_ids[position - size : position])] = position
        self._indexed = max(self._indexed, end)
