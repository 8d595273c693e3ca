"""Candidate sets ranked at recorded positions: what ``choice`` drafts, for each L, each way of choosing and each N.

Shapes: P positions, N candidates of a set, L tokens of a candidate, K tokens of the longest draft, C cosines of a
candidate, H numbers of the hidden states of all layers read.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from choicespec.candidates.drafts import as_candidate
from choicespec.candidates.sets import MOST_VOTES, rank
from choicespec.errors import RecordingError
from choicespec.recordings import Recorded
from choicespec.replay.drafted import Drafted, shortened
from choicespec.replay.proposals import Proposals
from choicespec.scorer.examples import Examples, SetArrays, set_arrays
from choicespec.scorer.files import Scorer
from choicespec.scorer.fit import Dataset, batch_of
from choicespec.scorer.model import survivals
from choicespec.scorer.source_states import cosines_along, source_features

Selection = Literal["prior", "scorer", "oracle"]
_BATCH = 512


class Drafts(NamedTuple):
    """A draft a position, before it is decided how much of it is verified.

    Attributes:
        lengths: (P,) its tokens; 0 where nothing is drafted.
        accepted: (P,) those of them that the target accepts.
        survival: (P, K) the probability that each prefix is accepted, as the method sees it; 0 beyond the draft. K is
            0 for a method that does not weigh its drafts.
    """

    lengths: NDArray[np.int16]
    accepted: NDArray[np.int16]
    survival: NDArray[np.float64]


class EveryCandidate(NamedTuple):
    """The candidate sets of one L, best prior first, as a method sees them that verifies several candidates at once.

    Attributes:
        token_ids: (P, N, L) padded.
        lengths: (P, N) tokens of each candidate; 0 where there is none.
        survival: (P, N, L) the probability that each prefix is accepted; any number beyond the candidate.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int8]
    survival: NDArray[np.float64]


class _Sets(NamedTuple):
    """The candidate sets of one L.

    Attributes:
        arrays: the candidates, best prior first.
        accepted: (P, N) tokens of each candidate that the target accepts.
        prior: (P, N, L) the prior's survival.
    """

    arrays: SetArrays
    accepted: NDArray[np.int16]
    prior: NDArray[np.float64]


class Ranking:
    """Ranks the candidate sets of one recording.

    Args:
        proposals: of the recording.
        recorded: with the hidden states that the scorer reads.
        scorer: the pair's; only called to score.
    """

    def __init__(self, proposals: Proposals, recorded: Sequence[Recorded], scorer: Callable[[], Scorer]) -> None:
        self._proposals, self._recorded, self._scorer = proposals, recorded, cache(scorer)
        self._sets = lru_cache(maxsize=1)(self._make_sets)
        self._cosines = lru_cache(maxsize=1)(self._make_cosines)
        self._hidden = cache(self._side_by_side)

    def best(self, selection: Selection, block_length: int) -> list[Drafts]:
        """The chosen candidates, for N = 1, 2, ... MOST_VOTES; more candidates there are not.

        Raises:
            RecordingError: the scorer does not judge candidates of this length.
        """
        if selection == "scorer":
            return self._scored(block_length)
        arrays, accepted_PN, prior_PNL = self._sets(block_length)
        if selection == "oracle":
            return [_certain(best_P) for best_P in np.maximum.accumulate(accepted_PN, axis=1).T]
        return [Drafts(arrays.lengths[:, 0].astype(np.int16), accepted_PN[:, 0], prior_PNL[:, 0])] * MOST_VOTES

    def every(self, selection: Selection, block_length: int) -> list[EveryCandidate]:
        """All candidates by the prior or the scorer, for N = 1, 2, ... MOST_VOTES; where the others of a set do not
        matter, all are the largest sets.

        Raises:
            RecordingError: the scorer does not judge candidates of this length.
        """
        arrays, _, prior_PNL = self._sets(block_length)
        if selection != "scorer":
            return [EveryCandidate(arrays.token_ids, arrays.lengths, prior_PNL)] * MOST_VOTES
        scorer = self._scorer_of(block_length)
        grown = (scored_PNL.numpy().astype(np.float64) for scored_PNL in self._growing(scorer, block_length))
        if not scorer.manifest.source_layers:
            *_, scored_PNL = grown
            return [EveryCandidate(arrays.token_ids, arrays.lengths, scored_PNL)] * MOST_VOTES
        return [
            EveryCandidate(arrays.token_ids[:, :count], arrays.lengths[:, :count], scored_PNL)
            for count, scored_PNL in enumerate(grown, start=1)
        ]

    def _scored(self, block_length: int) -> list[Drafts]:
        """The candidate of the largest expected accepted length, as ``scorer.ranker``."""
        scorer = self._scorer_of(block_length)
        arrays, accepted_PN, _ = self._sets(block_length)
        every = np.arange(len(accepted_PN))
        found: list[Drafts] = []
        for scored_PNL in self._growing(scorer, block_length):
            best_P = scored_PNL.sum(dim=-1).numpy().argmax(axis=1)
            survival_PL = scored_PNL.numpy()[every, best_P].astype(np.float64)
            found.append(
                Drafts(arrays.lengths[every, best_P].astype(np.int16), accepted_PN[every, best_P], survival_PL)
            )
        return found

    def _growing(self, scorer: Scorer, block_length: int) -> Iterator[torch.Tensor]:
        """(P, N, L) what the scorer says of the sets of N = 1, 2, ... MOST_VOTES candidates.

        Where it compares sources, one more candidate may change what it says of the others.
        """
        lengths_PN = self._sets(block_length).arrays.lengths
        together = not scorer.manifest.source_layers
        scored_PNL = torch.zeros((*lengths_PN.shape, block_length))
        for count in range(1, MOST_VOTES + 1):
            more_P = np.flatnonzero(lengths_PN[:, count - 1])  # elsewhere, the set is as it was
            if len(more_P) and not (together and count > 1):
                most = MOST_VOTES if together else count
                arrays = self._asked(scorer, block_length, most, more_P)
                scored_PNL[more_P, :most] = self._survivals(scorer, arrays, more_P)
            yield scored_PNL[:, :count]

    def judged(self, drafter: str, drafted: Drafted, block_length: int) -> list[list[float]] | None:
        """Of each position, how likely the prefixes of a drafter's draft are to be accepted, as ``scorer.ranker``; None
        where the scorer does not judge its drafts.

        Args:
            drafter: what the pair calls it.
            drafted: what it drafts, here and perhaps at further positions.
            block_length: L; a draft is cut to that, and to what is left to decode.
        """
        scorer = self._scorer()
        if drafter not in scorer.manifest.drafters:
            return None
        limits = np.minimum(self._proposals.limits, block_length).tolist()
        drafts = map(shortened, drafted.proposals(drafter), limits)
        sets = [[as_candidate(drafter, draft)] for draft in drafts]
        arrays = set_arrays(sets, 1, block_length, tuple(scorer.manifest.drafters))
        scored = self._survivals(scorer, arrays, np.arange(len(sets)))[:, 0].tolist()
        return [row[:length] for row, length in zip(scored, arrays.lengths[:, 0].tolist(), strict=True)]

    def _scorer_of(self, block_length: int) -> Scorer:
        """The pair's, if it judges candidates of this length."""
        scorer = self._scorer()
        if block_length > scorer.manifest.block_length:
            most = scorer.manifest.block_length
            raise RecordingError(f"the pair's scorer judges {most} tokens at most, not {block_length}")
        return scorer

    def _asked(self, scorer: Scorer, block_length: int, count: int, positions: NDArray[np.int64]) -> SetArrays:
        """The first candidates at some positions, with the features of their sources where the scorer reads them."""
        every = self._sets(block_length).arrays
        arrays = SetArrays._make(array[positions, :count] for array in every)
        if not scorer.manifest.source_layers:
            return arrays
        sources = source_features(self._cosines(block_length)[positions, :count], arrays.own_ages)
        of_drafters = np.zeros((*arrays.lengths.shape, len(scorer.manifest.drafters)), np.float32)
        return arrays._replace(features=np.concatenate([arrays.features, of_drafters, sources], axis=-1))

    def _survivals(self, scorer: Scorer, arrays: SetArrays, positions: NDArray[np.int64]) -> torch.Tensor:
        """(P, N, L) what the scorer says of the candidates at some positions."""
        proposals, every = self._proposals, np.arange(len(positions))
        missing = scorer.net.shape.num_features - arrays.features.shape[-1]  # of drafters, or of a source in the text
        arrays = arrays._replace(features=np.pad(arrays.features, ((0, 0), (0, 0), (0, missing))))
        # Nobody asks here what is accepted, nor whose a position is.
        accepted, requests = np.zeros(arrays.lengths.shape, np.int8), np.zeros(len(every), np.int32)
        examples = Examples(arrays, accepted, proposals.anchors[positions], proposals.rows[positions], requests)
        dataset = Dataset(examples, self._hidden(scorer.manifest.layers))
        with torch.inference_mode():
            batches = [batch_of(dataset, every[start : start + _BATCH]) for start in range(0, len(every), _BATCH)]
            return torch.cat([survivals(scorer.net(batch), batch.lengths_PN) for batch in batches])

    def _side_by_side(self, layers: Sequence[int]) -> NDArray[np.float16]:
        """(R, H) the recorded states of all outputs."""
        states = [[one.hidden_states[layer] for one in self._recorded] for layer in layers]
        return np.concatenate([np.concatenate(of_layer) for of_layer in states], axis=1)

    def _make_cosines(self, block_length: int) -> NDArray[np.float32]:
        """(P, N, C) of the states here and at each candidate's source."""
        scorer, ages_PN = self._scorer(), self._sets(block_length).arrays.own_ages
        parts_PN = np.split(ages_PN, self._proposals.ends[:-1])
        layers, scale = scorer.manifest.source_layers, scorer.net.source_scale
        pairs = zip(self._recorded, parts_PN, strict=True)
        return np.concatenate([cosines_along(one, ages, layers, scale) for one, ages in pairs])

    def _make_sets(self, block_length: int) -> _Sets:
        proposals = self._proposals
        lengths = np.minimum(proposals.limits, block_length).tolist()
        sets = [
            rank(proposals.votes(position).cut(length), length, MOST_VOTES) for position, length in enumerate(lengths)
        ]
        arrays = set_arrays(sets, MOST_VOTES, block_length)
        prior_PNL = np.zeros((len(sets), MOST_VOTES, block_length))
        for row, candidates in enumerate(sets):
            for column, candidate in enumerate(candidates):
                prior_PNL[row, column, : len(candidate.survival)] = candidate.survival
        there_PNL = np.arange(block_length) < arrays.lengths[..., None]
        right_PNL = there_PNL & (arrays.token_ids == proposals.following[:, None, :block_length])
        return _Sets(arrays, right_PNL.cumprod(axis=-1).sum(axis=-1).astype(np.int16), prior_PNL)


def _certain(lengths_P: NDArray[np.int16]) -> Drafts:
    """Drafts of which all is accepted, and known to be."""
    survival_PK = np.arange(lengths_P.max(initial=0)) < lengths_P[:, None]
    return Drafts(lengths_P, lengths_P, survival_PK.astype(np.float64))
