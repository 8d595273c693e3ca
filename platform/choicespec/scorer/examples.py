"""Candidate sets along recorded outputs, as arrays: what a scorer learns from and is judged by.

Shapes: P positions, N candidates of a set, L tokens of a candidate, F features: the prior's, one a drafter, and perhaps
those of ``source_states``. Columns without a candidate, and tokens that a candidate does not have, are padding:
``lengths`` tells.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from choicespec.candidates.drafts import as_candidate
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Features
from choicespec.recordings import Recorded
from choicespec.records import Proposal

NO_TOKEN = -1
_FEATURES = len(Features._fields)
_FEW_TOKENS = 8  # brings counts of tokens near 1
_LEAST_PROBABILITY = 1e-12


class SetArrays(NamedTuple):
    """Candidate sets, padded.

    Attributes:
        token_ids: (P, N, L).
        survivals: (P, N, L) natural logarithm of the prior's probability of each prefix; 0 in padding.
        features: (P, N, F) what the prior knows, on scales near 1, and 1 at the drafter whose draft a candidate is.
        lengths: (P, N) tokens of each candidate; 0 is padding.
        own_ages: (P, N) see ``Candidate.own_age_tokens``; 0 in padding.
    """

    token_ids: NDArray[np.int32]
    survivals: NDArray[np.float32]
    features: NDArray[np.float32]
    lengths: NDArray[np.int8]
    own_ages: NDArray[np.int32]

    @property
    def best_prior(self) -> NDArray[np.int64]:
        """(P,) the candidate that the prior ranks first, the first among equals; 0 where there is none."""
        found: NDArray[np.int64] = self.features[..., Features._fields.index("prior")].argmax(axis=1)
        return found

    @property
    def any_candidate(self) -> NDArray[np.bool_]:
        """(P,) whether there is one."""
        found: NDArray[np.bool_] = self.lengths.max(axis=1) > 0
        return found


class Examples(NamedTuple):
    """The positions of recorded outputs at which a live loop could stand.

    Attributes:
        sets: the candidates: finite ones, best prior first; then a column for each drafter's draft.
        accepted: (P, N) tokens of each candidate that the target accepts.
        anchors: (P,) the last token before each position.
        rows: (P,) the recording's row with the hidden state that a live loop has there.
        requests: (P,) the request's number in the recording; positions of a request stand together, in order.
    """

    sets: SetArrays
    accepted: NDArray[np.int8]
    anchors: NDArray[np.int32]
    rows: NDArray[np.int64]
    requests: NDArray[np.int32]


def set_arrays(
    sets: Sequence[Sequence[Candidate | None]], num_candidates: int, block_length: int, drafters: Sequence[str] = ()
) -> SetArrays:
    """Candidate sets as arrays.

    Args:
        sets: None leaves a column empty.
        num_candidates, block_length: N and L.
        drafters: all whose drafts there may be, in the order of their features.
    """
    shape = (len(sets), num_candidates, block_length)
    token_ids = np.full(shape, NO_TOKEN, np.int32)
    survivals = np.zeros(shape, np.float32)
    features = np.zeros((*shape[:2], _FEATURES + len(drafters)), np.float32)
    lengths = np.zeros(shape[:2], np.int8)
    own_ages = np.zeros(shape[:2], np.int32)
    for row, candidates in enumerate(sets):
        for column, candidate in enumerate(candidates):
            if candidate is None:
                continue
            length = len(candidate.token_ids)
            token_ids[row, column, :length] = candidate.token_ids
            survivals[row, column, :length] = [_log(probability) for probability in candidate.survival]
            features[row, column] = [
                *_scaled(candidate.features),
                *(float(candidate.drafter == name) for name in drafters),
            ]
            lengths[row, column] = length
            own_ages[row, column] = candidate.own_age_tokens
    return SetArrays(token_ids, survivals, features, lengths, own_ages)


def build_examples(
    recorded: Iterable[Recorded],
    candidates: RequestCandidates,
    num_candidates: int,
    block_length: int,
    drafted: Mapping[str, Sequence[Proposal]] = MappingProxyType({}),
) -> Examples:
    """Walk recorded outputs in order, as a live loop that knows the outputs of earlier requests.

    Args:
        recorded: the outputs.
        candidates: makes the finite sets.
        num_candidates, block_length: N, of the finite ones, and L.
        drafted: what each drafter drafts, position after position, of L tokens at most.
    """
    sets: list[list[Candidate | None]] = []
    accepted: list[list[int]] = []
    anchors, rows, requests = [], [], []
    first_row = 0
    for number, (request, output_ids, *_) in enumerate(recorded):
        candidates.begin(request)
        token_ids = list(request.prompt_ids)
        for position in range(1, len(output_ids)):
            token_ids.append(output_ids[position - 1])
            found = candidates.candidates(token_ids, request.max_new_tokens - position - 1)
            columns = [*found, *[None] * (num_candidates - len(found))]
            columns += [as_candidate(name, drafts[len(sets)]) for name, drafts in drafted.items()]
            sets.append(columns)
            accepted.append([_common(one.token_ids, output_ids, position) if one else 0 for one in columns])
            anchors.append(output_ids[position - 1])
            rows.append(first_row + position - 1)
            requests.append(number)
        candidates.finish(request, output_ids)
        first_row += len(output_ids)
    arrays = set_arrays(sets, num_candidates + len(drafted), block_length, list(drafted))
    return Examples(
        arrays,
        np.array(accepted, np.int8).reshape(arrays.lengths.shape),
        np.array(anchors, np.int32),
        np.array(rows, np.int64),
        np.array(requests, np.int32),
    )


def with_sources(examples: Examples, sources_PNF: NDArray[np.float32]) -> Examples:
    """The sets with the features of ``source_states`` behind the others."""
    features = np.concatenate([examples.sets.features, sources_PNF], axis=-1)
    return examples._replace(sets=examples.sets._replace(features=features))


def with_drafts_of(examples: Examples, known: Sequence[str], wanted: Sequence[str], sources: bool = False) -> Examples:
    """The sets with the drafts of some drafters only, as if there were no others.

    Args:
        examples: of all drafters.
        known: all drafters, in the order of their columns and features.
        wanted: those whose drafts stay, in the order that their columns and features get.
        sources: whether the features of ``with_sources`` stay.
    """
    sets = examples.sets
    places = [known.index(name) for name in wanted]
    finite = sets.lengths.shape[1] - len(known)
    columns = [*range(finite), *(finite + place for place in places)]
    features = [*range(_FEATURES), *(_FEATURES + place for place in places)]
    if sources:
        features += range(_FEATURES + len(known), sets.features.shape[-1])
    kept = SetArrays._make(array[:, columns] for array in sets)
    kept = kept._replace(features=kept.features[..., features])
    return examples._replace(sets=kept, accepted=examples.accepted[:, columns])


def _common(candidate: Sequence[int], output_ids: Sequence[int], position: int) -> int:
    count = 0
    for own, said in zip(candidate, output_ids[position:], strict=False):
        if own != said:
            break
        count += 1
    return count


def _log(probability: float) -> float:
    return log(max(probability, _LEAST_PROBABILITY))


def _scaled(features: Features) -> list[float]:
    return [
        features.prior / _FEW_TOKENS,
        _log(features.first) / 4,
        _log(features.last) / 8,
        features.length / _FEW_TOKENS,
        features.log_times,
        features.log_age / 8,
        features.prompt_match / _FEW_TOKENS,
        features.schema_match / _FEW_TOKENS,
        features.repository_match / _FEW_TOKENS,
        features.outputs_match / _FEW_TOKENS,
    ]
