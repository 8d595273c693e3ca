"""What a method would draft at each recorded position: one entry a kind of method.

Shapes: P positions, S suffix sizes 1..S of prompt lookup.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from choicespec.candidates.sets import MOST_VOTES
from choicespec.errors import RecordingError
from choicespec.replay.proposals import RECORDED_BLOCK, RECORDED_SUFFIX, Proposals
from choicespec.replay.ranking import Drafts, Selection
from choicespec.spec.method import NOT_RECORDED, Autoregressive, Choice, MethodSpec, Ngram, decided_live

Best = Callable[[Selection, int], Sequence[Drafts]]  # ``Ranking.best``


class RecordedDrafts:
    """The drafts of methods at the positions of one recording; what several methods share is made once.

    Args:
        proposals: of the recording.
        best: ranks its candidate sets.
    """

    def __init__(self, proposals: Proposals, best: Best) -> None:
        self.proposals, self._best = proposals, best
        self._ranked: dict[tuple[Selection, int], Sequence[Drafts]] = {}

    def of(self, method: MethodSpec) -> Drafts:
        """What a method drafts.

        Raises:
            RecordingError: its kind, or a draft as long as it wants, is not recorded.
        """
        if decided_live(method):
            raise RecordingError(f"{method.label}: {NOT_RECORDED}; leave it out of the replay")
        if isinstance(method, Autoregressive):
            nothing_P = np.zeros(len(self.proposals.limits), np.int16)
            return Drafts(nothing_P, nothing_P, _unweighed(nothing_P))
        if isinstance(method, Ngram):
            return self._ngram(method)
        if isinstance(method, Choice) and not method.drafters:
            return self._choice(method)
        raise RecordingError(f"{method.label}: a recording does not say what it drafts; leave it out of the replay")

    def for_others(self, methods: Iterable[MethodSpec]) -> "RecordedDrafts":
        """The same to send to another process, which can replay these methods and no other ranking."""
        for method in methods:
            self.of(method)
        found = RecordedDrafts(self.proposals, _not_sent)
        found._ranked = self._ranked
        return found

    def _ngram(self, method: Ngram) -> Drafts:
        """What followed the longest suffix that is wanted and occurred; where it occurred, its shorter ones did too."""
        _check(method, "max_ngram", method.max_ngram, RECORDED_SUFFIX)
        longest_P = self.proposals.suffix_found[:, : method.max_ngram].sum(axis=1)
        wanted_P = np.minimum(method.num_draft_tokens, self.proposals.limits)
        lengths_P = np.where(longest_P >= method.min_ngram, wanted_P, 0).astype(np.int16)
        accepted_P = self.proposals.suffix_accepted[np.arange(len(longest_P)), longest_P - 1]
        return Drafts(lengths_P, np.minimum(lengths_P, accepted_P), _unweighed(lengths_P))

    def _choice(self, method: Choice) -> Drafts:
        _check(method, "block_length", method.block_length, RECORDED_BLOCK)
        key = method.selection, method.block_length
        if key not in self._ranked:
            self._ranked[key] = self._best(*key)
        return self._ranked[key][min(method.num_candidates, MOST_VOTES) - 1]


def _unweighed(lengths_P: NDArray[np.int16]) -> NDArray[np.float64]:
    """The survival of drafts that are verified whole, whatever is thought of them."""
    return np.empty((len(lengths_P), 0))


def _not_sent(selection: Selection, block_length: int) -> Sequence[Drafts]:
    raise RecordingError(f"candidates of {block_length} tokens ranked by {selection} were not sent along")


def _check(method: MethodSpec, what: str, asked: int, most: int) -> None:
    if asked > most:
        raise RecordingError(f"{method.label}: {what}={asked}, but a replay reaches {most}; ask for less")
