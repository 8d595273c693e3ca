"""What the proposers would say at every position of recorded outputs: drawn once, and kept beside the recording.

Under greedy decoding the output is fixed, and with it what earlier outputs a live loop has learnt at each of its steps.
A drafter's drafts would be one more array here, and an entry in ``replay.drafts``.

Shapes: P positions, R requests, K tokens of the longest block, M votes, S suffix sizes 1..S of prompt lookup.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import choicespec
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import MOST_VOTES, Votes
from choicespec.decoding.verification import count_accepted
from choicespec.drafters.ngram import NgramDrafter
from choicespec.measuring.measure import warm_up
from choicespec.recordings import Recorded, RecordingManifest
from choicespec.spec.method import Ngram

RECORDED_BLOCK = 16
RECORDED_SUFFIX = 8
_NO_TOKEN = -1
_FILE = "proposals.safetensors"

Scalar = TypeVar("Scalar", bound=np.generic)


class Proposals(NamedTuple):
    """Of every position of every recorded output at which a live loop could stand.

    Attributes:
        ends: (R,) the position after each request's last one; the first request begins at 0.
        limits: (P,) the most tokens that may be drafted.
        contexts: (P,) tokens in the cache.
        anchors: (P,) the last token of the output so far.
        rows: (P,) the recording's row with the hidden state that a live loop has there.
        following: (P, K) what the target says next; padded where the output ends.
        vote_tokens: (P, M, K) what followed each occurrence that votes; padded.
        vote_weights: (P, M); 0 in padding.
        vote_matches, vote_ages, vote_sources: (P, M) see ``Votes``.
        suffix_found: (P, S) whether the last 1..S tokens occurred before.
        suffix_accepted: (P, S) tokens accepted of what followed there.
    """

    ends: NDArray[np.int64]
    limits: NDArray[np.int32]
    contexts: NDArray[np.int32]
    anchors: NDArray[np.int32]
    rows: NDArray[np.int64]
    following: NDArray[np.int32]
    vote_tokens: NDArray[np.int32]
    vote_weights: NDArray[np.float64]
    vote_matches: NDArray[np.int8]
    vote_ages: NDArray[np.int32]
    vote_sources: NDArray[np.int8]
    suffix_found: NDArray[np.bool_]
    suffix_accepted: NDArray[np.int16]

    @property
    def bytes_per_token(self) -> float:
        """What a position takes on disk."""
        return sum(array.nbytes for array in self) / max(1, len(self.limits))

    def votes(self, position: int) -> Votes:
        """The votes at a position, as ``CandidateSets.votes`` gave them."""
        count = int(np.count_nonzero(self.vote_weights[position]))
        tokens = self.vote_tokens[position, :count].tolist()
        return Votes(
            [ids[: ids.index(_NO_TOKEN)] if _NO_TOKEN in ids else ids for ids in tokens],
            self.vote_weights[position, :count].tolist(),
            self.vote_matches[position, :count].tolist(),
            self.vote_ages[position, :count].tolist(),
            self.vote_sources[position, :count].tolist(),
        )


def collect(recorded: Sequence[Recorded], candidates: RequestCandidates) -> Proposals:
    """Walk recorded outputs in the task's order, as ``measuring.measure`` does with a live loop.

    Args:
        recorded: every request of the task.
        candidates: fresh; their own L and N do not matter.
    """
    limits, contexts, anchors, following = [], [], [], []
    votes: list[Votes] = []
    found: list[list[int]] = []
    first, first_ids = warm_up(recorded[0].request), recorded[0].output_ids
    candidates.finish(first, first_ids[: first.max_new_tokens])
    for request, output_ids, *_ in recorded:
        candidates.begin(request)
        lookups = [NgramDrafter(_lookup(size, request.max_new_tokens)) for size in range(1, RECORDED_SUFFIX + 1)]
        token_ids = list(request.prompt_ids)
        for position in range(1, len(output_ids)):
            token_ids.append(output_ids[position - 1])
            limit = request.max_new_tokens - position - 1
            limits.append(limit)
            contexts.append(len(token_ids) - 1)
            anchors.append(token_ids[-1])
            following.append(output_ids[position : position + RECORDED_BLOCK])
            votes.append(candidates.votes(token_ids, min(RECORDED_BLOCK, limit)))
            drafts = [lookup.propose(token_ids, limit).token_ids for lookup in lookups]
            found.append([count_accepted(draft, output_ids[position:]) if draft else -1 for draft in drafts])
        candidates.finish(request, output_ids)
    lengths = [len(one.output_ids) for one in recorded]
    starts = [0, *accumulate(lengths)]
    rows = [np.arange(start, start + length - 1) for start, length in zip(starts, lengths, strict=False)]
    found_PS = np.array(found, np.int16).reshape(-1, RECORDED_SUFFIX)
    return Proposals(
        np.cumsum([length - 1 for length in lengths]),
        np.array(limits, np.int32),
        np.array(contexts, np.int32),
        np.array(anchors, np.int32),
        np.concatenate(rows).astype(np.int64),
        _padded(following, np.int32(_NO_TOKEN), RECORDED_BLOCK),
        *_vote_arrays(votes),
        found_PS >= 0,
        found_PS.clip(min=0),
    )


def _lookup(size: int, longest: int) -> Ngram:
    return Ngram(num_draft_tokens=longest, min_ngram=size, max_ngram=size)


class _VoteArrays(NamedTuple):
    tokens: NDArray[np.int32]
    weights: NDArray[np.float64]
    matches: NDArray[np.int8]
    ages: NDArray[np.int32]
    sources: NDArray[np.int8]


def _vote_arrays(votes: Sequence[Votes]) -> _VoteArrays:
    tokens = np.full((len(votes), MOST_VOTES, RECORDED_BLOCK), _NO_TOKEN, np.int32)
    for row, one in enumerate(votes):
        for column, token_ids in enumerate(one.token_ids):
            tokens[row, column, : len(token_ids)] = token_ids
    return _VoteArrays(
        tokens,
        _padded([one.weights for one in votes], np.float64(0), MOST_VOTES),
        _padded([one.match_lengths for one in votes], np.int8(0), MOST_VOTES),
        _padded([one.ages_tokens for one in votes], np.int32(0), MOST_VOTES),
        _padded([one.sources for one in votes], np.int8(0), MOST_VOTES),
    )


def _padded(rows: Sequence[Sequence[float]], filler: Scalar, width: int) -> NDArray[Scalar]:
    array = np.full((len(rows), width), filler)
    for row, values in enumerate(rows):
        array[row, : len(values)] = values
    return array


def save_proposals(folder: Path, manifest: RecordingManifest, proposals: Proposals) -> None:
    """Keep them beside their recording; what was kept of an earlier version is replaced."""
    partial = folder / f"{_FILE}.partial"
    save_file(proposals._asdict(), partial, metadata={"of": _identity(manifest)})
    partial.replace(folder / _FILE)


def load_proposals(folder: Path, manifest: RecordingManifest) -> Proposals | None:
    """What was kept of this recording by this version of choicespec; None where nothing was."""
    try:
        with safe_open(folder / _FILE, framework="numpy") as file:
            if file.metadata().get("of") != _identity(manifest):
                return None
            return Proposals(**{name: file.get_tensor(name) for name in Proposals._fields})
    except (OSError, SafetensorError):
        return None


def _identity(manifest: RecordingManifest) -> str:
    what = {
        "choicespec": choicespec.__version__,
        "recording": hashlib.sha256(manifest.model_dump_json().encode()).hexdigest(),
        "longest": [RECORDED_BLOCK, RECORDED_SUFFIX, MOST_VOTES],
    }
    return json.dumps(what, sort_keys=True)
