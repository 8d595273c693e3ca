"""What a method would draft at each recorded position: one entry a kind of method.

Shapes: P positions, S suffix sizes 1..S of prompt lookup.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from choicespec.candidates.sets import MOST_VOTES
from choicespec.errors import RecordingError
from choicespec.replay.drafted import Drafted
from choicespec.replay.proposals import RECORDED_BLOCK, RECORDED_SUFFIX, Proposals
from choicespec.replay.ranking import Drafts, EveryCandidate, Ranking, Selection
from choicespec.spec.method import NOT_RECORDED, Autoregressive, Choice, Draft, MethodSpec, Ngram, decided_live, is_tree


class RecordedDrafts:
    """The drafts of methods at the positions of one recording; what several methods share is made once.

    Args:
        proposals: of the recording.
        ranking: of its candidate sets; None where they were ranked elsewhere.
        drafted: what the pair's drafters draft, by name.
        warm_up: the same of what is decoded before the first request, for methods that learn from it how right their
            drafters are.
    """

    def __init__(
        self,
        proposals: Proposals,
        ranking: Ranking | None,
        drafted: Mapping[str, Drafted] | None = None,
        warm_up: "RecordedDrafts | None" = None,
    ) -> None:
        self.proposals, self._ranking, self.warm_up = proposals, ranking, warm_up
        self._drafted = drafted or {}
        self._ranked: dict[tuple[Selection, int], Sequence[Drafts]] = {}
        self._every: dict[tuple[Selection, int], EveryCandidate] = {}

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
        if isinstance(method, Draft):
            return self._draft(method)
        if isinstance(method, Choice) and not method.drafters and not is_tree(method):
            return self._choice(method)
        raise RecordingError(f"{method.label}: a recording does not say what it drafts; leave it out of the replay")

    def drafted(self, method: Draft) -> Drafted:
        """What a drafter drafts.

        Raises:
            RecordingError: it, or a draft as long as the method wants, is not recorded.
        """
        found = self._drafted.get(method.drafter)
        if found is None:
            raise RecordingError(f"{method.label}: what {method.drafter!r} drafts is not recorded; run jobs.record")
        _check(method, "num_draft_tokens", method.num_draft_tokens, found.token_ids.shape[1])
        return found

    def every(self, method: Choice) -> EveryCandidate:
        """The candidates that a method which verifies trees sees.

        Raises:
            RecordingError: candidates of that length are not recorded.
        """
        _check(method, "block_length", method.block_length, RECORDED_BLOCK)
        key = method.selection, method.block_length
        if key not in self._every:
            self._every[key] = self._ranked_by(method).every(*key)
        return self._every[key]

    def for_others(self, methods: Iterable[MethodSpec]) -> "RecordedDrafts":
        """The same to send to another process, which can replay these methods and no other ranking."""
        known = list(methods)
        for method in known:
            if isinstance(method, Choice) and is_tree(method):
                self.every(method)
            else:
                self.of(method)
        warm_up = self.warm_up.for_others(known) if self.warm_up is not None else None
        found = RecordedDrafts(self.proposals, None, self._drafted, warm_up)
        found._ranked, found._every = self._ranked, self._every
        return found

    def _draft(self, method: Draft) -> Drafts:
        drafted = self.drafted(method)
        wanted_P = np.minimum(method.num_draft_tokens, drafted.lengths).astype(np.int16)
        return Drafts(wanted_P, np.minimum(wanted_P, drafted.accepted(self.proposals.following)), _unweighed(wanted_P))

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
            self._ranked[key] = self._ranked_by(method).best(*key)
        return self._ranked[key][min(method.num_candidates, MOST_VOTES) - 1]

    def _ranked_by(self, method: Choice) -> Ranking:
        if self._ranking is None:
            raise RecordingError(
                f"candidates of {method.block_length} tokens ranked by {method.selection} were not sent along"
            )
        return self._ranking


def _unweighed(lengths_P: NDArray[np.int16]) -> NDArray[np.float64]:
    """The survival of drafts that are verified whole, whatever is thought of them."""
    return np.empty((len(lengths_P), 0))


def _check(method: MethodSpec, what: str, asked: int, most: int) -> None:
    if asked > most:
        raise RecordingError(f"{method.label}: {what}={asked}, but a replay reaches {most}; ask for less")
