"""What a method would draft at each recorded position: one entry a kind of method.

Shapes: P positions, S suffix sizes 1..S of prompt lookup.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from choicespec.candidates.sets import MOST_VOTES
from choicespec.errors import RecordingError
from choicespec.replay.drafted import Drafted
from choicespec.replay.proposals import RECORDED_BLOCK, RECORDED_SUFFIX, Proposals
from choicespec.replay.ranking import Drafts, EveryCandidate, Selection
from choicespec.spec.method import NOT_RECORDED, Autoregressive, Choice, Draft, MethodSpec, Ngram, decided_live, is_tree


class Ranks(Protocol):
    """See ``Ranking``."""

    def best(self, selection: Selection, block_length: int) -> Sequence[Drafts]:
        """See ``Ranking.best``."""
        ...

    def every(self, selection: Selection, block_length: int) -> Sequence[EveryCandidate]:
        """See ``Ranking.every``."""
        ...

    def judged(self, drafter: str, drafted: Drafted, block_length: int) -> Sequence[Sequence[float]] | None:
        """See ``Ranking.judged``."""
        ...


class RecordedDrafts:
    """The drafts of methods at the positions of one recording; what several methods share is made once.

    Args:
        proposals: of the recording.
        ranking: ranks its candidate sets, and judges drafts.
        drafted: what the pair's drafters draft, by name.
        warm_up: the same of what is decoded before the first request, for methods that learn from it how right their
            drafters are.
    """

    def __init__(
        self,
        proposals: Proposals,
        ranking: Ranks,
        drafted: Mapping[str, Drafted] | None = None,
        warm_up: "RecordedDrafts | None" = None,
    ) -> None:
        self.proposals, self._ranking, self.warm_up = proposals, ranking, warm_up
        self._drafted = drafted or {}
        self._ranked: dict[tuple[Selection, int], Sequence[Drafts]] = {}
        self._every: dict[tuple[Selection, int], Sequence[EveryCandidate]] = {}
        self._judged: dict[tuple[str, int], Sequence[Sequence[float]] | None] = {}

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
        found = self._recorded(method)
        _check(method, "num_draft_tokens", method.num_draft_tokens, found.longest)
        return found

    def as_trained(self, method: Draft) -> Draft:
        """What a drafter drafts beside a candidate set: no more tokens than it was trained for, which were recorded.

        Raises:
            RecordingError: it is not recorded.
        """
        k = min(method.num_draft_tokens, self._recorded(method).longest)
        return method.model_copy(update={"num_draft_tokens": k})

    def every(self, method: Choice) -> EveryCandidate:
        """The candidates that a method which verifies trees sees.

        Raises:
            RecordingError: candidates of that length are not recorded.
        """
        _check(method, "block_length", method.block_length, RECORDED_BLOCK)
        key = method.selection, method.block_length
        if key not in self._every:
            self._every[key] = self._ranking.every(*key)
        return self._every[key][min(method.num_candidates, MOST_VOTES) - 1]

    def judged(self, method: MethodSpec, drafter: str, drafted: Drafted) -> Sequence[Sequence[float]] | None:
        """What a method's scorer says of a drafter's drafts, of which this recording may hold the first; None where it
        judges none."""
        if not isinstance(method, Choice) or method.selection != "scorer":
            return None
        key = drafter, method.block_length
        if key not in self._judged:
            self._judged[key] = self._ranking.judged(drafter, drafted, method.block_length)
        return self._judged[key]

    def for_others(self, methods: Iterable[MethodSpec]) -> "RecordedDrafts":
        """The same to send to another process, which can replay these methods and no other ranking."""
        known = list(methods)
        for method in known:
            if isinstance(method, Choice) and is_tree(method):
                self.every(method)
            else:
                self.of(method)
            for name, drafted in self._drafted.items():
                self.judged(method, name, drafted)
                if self.warm_up is not None:
                    self.warm_up.judged(method, name, drafted)
        warm_up = self.warm_up.for_others(known) if self.warm_up is not None else None
        found = RecordedDrafts(self.proposals, _NotSent(), self._drafted, warm_up)
        found._ranked, found._every, found._judged = self._ranked, self._every, self._judged
        return found

    def _recorded(self, method: Draft) -> Drafted:
        found = self._drafted.get(method.drafter)
        if found is None:
            raise RecordingError(f"{method.label}: what {method.drafter!r} drafts is not recorded; run jobs.record")
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
            self._ranked[key] = self._ranking.best(*key)
        return self._ranked[key][min(method.num_candidates, MOST_VOTES) - 1]


def _unweighed(lengths_P: NDArray[np.int16]) -> NDArray[np.float64]:
    """The survival of drafts that are verified whole, whatever is thought of them."""
    return np.empty((len(lengths_P), 0))


class _NotSent:
    """A ranking that stayed where it was."""

    def best(self, selection: Selection, block_length: int) -> NoReturn:
        raise RecordingError(f"candidates of {block_length} tokens ranked by {selection} were not sent along")

    def every(self, selection: Selection, block_length: int) -> NoReturn:
        raise RecordingError(f"candidates of {block_length} tokens ranked by {selection} were not sent along")

    def judged(self, drafter: str, drafted: Drafted, block_length: int) -> NoReturn:
        raise RecordingError(f"drafts of {drafter!r}, of {block_length} tokens, were not sent along judged")


def _check(method: MethodSpec, what: str, asked: int, most: int) -> None:
    if asked > most:
        raise RecordingError(f"{method.label}: {what}={asked}, but a replay reaches {most}; ask for less")
