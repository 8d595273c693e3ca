"""Candidate sets along recorded outputs, as arrays: what a scorer learns from and is judged by.

Shapes: P positions, N candidates of a set, L tokens of a candidate, F features. Columns without a candidate, and
tokens that a candidate does not have, are padding: ``lengths`` tells.
"""

from collections.abc import Iterable, Sequence
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Features
from choicespec.recordings import Recorded

NO_TOKEN = -1
_FEATURES = len(Features._fields)
_FEW_TOKENS = 8  # brings counts of tokens near 1
_LEAST_PROBABILITY = 1e-12


class SetArrays(NamedTuple):
    """Candidate sets, padded.

    Attributes:
        token_ids: (P, N, L).
        survivals: (P, N, L) natural logarithm of the prior's probability of each prefix; 0 in padding.
        features: (P, N, F) what the prior knows, on scales near 1.
        lengths: (P, N) tokens of each candidate; 0 is padding.
    """

    token_ids: NDArray[np.int32]
    survivals: NDArray[np.float32]
    features: NDArray[np.float32]
    lengths: NDArray[np.int8]


class Examples(NamedTuple):
    """The positions of recorded outputs at which a live loop could stand.

    Attributes:
        sets: the candidates, best prior first.
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


def set_arrays(sets: Sequence[Sequence[Candidate]], num_candidates: int, block_length: int) -> SetArrays:
    """Candidate sets as arrays."""
    shape = (len(sets), num_candidates, block_length)
    token_ids = np.full(shape, NO_TOKEN, np.int32)
    survivals = np.zeros(shape, np.float32)
    features = np.zeros((*shape[:2], _FEATURES), np.float32)
    lengths = np.zeros(shape[:2], np.int8)
    for row, candidates in enumerate(sets):
        for column, candidate in enumerate(candidates):
            length = len(candidate.token_ids)
            token_ids[row, column, :length] = candidate.token_ids
            survivals[row, column, :length] = [_log(probability) for probability in candidate.survival]
            features[row, column] = _scaled(candidate.features)
            lengths[row, column] = length
    return SetArrays(token_ids, survivals, features, lengths)


def build_examples(
    recorded: Iterable[Recorded], candidates: RequestCandidates, num_candidates: int, block_length: int
) -> Examples:
    """Walk recorded outputs in order, as a live loop that knows the outputs of earlier requests."""
    sets: list[list[Candidate]] = []
    accepted: list[list[int]] = []
    anchors, rows, requests = [], [], []
    first_row = 0
    for number, (request, output_ids, *_) in enumerate(recorded):
        candidates.begin(request)
        token_ids = list(request.prompt_ids)
        for position in range(1, len(output_ids)):
            token_ids.append(output_ids[position - 1])
            found = candidates.candidates(token_ids, request.max_new_tokens - position - 1)
            sets.append(found)
            accepted.append([_common(candidate.token_ids, output_ids, position) for candidate in found])
            anchors.append(output_ids[position - 1])
            rows.append(first_row + position - 1)
            requests.append(number)
        candidates.finish(request, output_ids)
        first_row += len(output_ids)
    arrays = set_arrays(sets, num_candidates, block_length)
    accepted_PN = np.zeros(arrays.lengths.shape, np.int8)
    for row, counts in enumerate(accepted):
        accepted_PN[row, : len(counts)] = counts
    return Examples(
        arrays,
        accepted_PN,
        np.array(anchors, np.int32),
        np.array(rows, np.int64),
        np.array(requests, np.int32),
    )


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
