"""Trees of drafts with a controlled share of right tokens, for tests of whoever verifies them."""

import random
from collections.abc import Callable, Sequence

from choicespec.decoding.verification import depths
from choicespec.records import Proposal, Request


class GuidedTrees:
    """Drafts random trees; the right token often comes after wrong ones for the same place, and sometimes not at all.
    What follows a wrong token may be right in itself, so that whoever takes a branch for another is found out.

    Args:
        says: the target's own next token after a text.
        tokens: of a tree.
        vocabulary: a wrong token is any other number below it.
        right: the probability that a token is what the target says, where no other for the same place is.
    """

    def __init__(
        self, says: Callable[[Sequence[int]], int], tokens: int, vocabulary: int, right: float = 0.5, seed: int = 0
    ) -> None:
        self._says, self._tokens, self._vocabulary, self._right = says, tokens, vocabulary, right
        self._seed = seed

    def begin(self, request: Request) -> None:
        self._random = random.Random(self._seed)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """A tree of no more tokens than asked for, none deeper than the limit."""
        parents: list[int] = []
        texts = [list(token_ids)]
        for _ in range(self._tokens if limit > 0 else 0):
            deep = depths(parents)
            parent = self._random.choice([place for place, depth in enumerate(deep) if depth < limit])
            beside = {texts[place][-1] for place, other in enumerate(parents, start=1) if other == parent}
            token_id = self._says(texts[parent])
            if token_id in beside or self._random.random() >= self._right:
                token_id = self._random.choice(sorted({*range(self._vocabulary)} - beside - {token_id}))
            parents.append(parent)
            texts.append([*texts[parent], token_id])
        token_ids = tuple(text[-1] for text in texts[1:])
        return Proposal(token_ids, "guided" if token_ids else "", parents=tuple(parents))

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""
