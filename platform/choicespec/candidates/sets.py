"""Candidate sets: what may come next, each with a prior that never looks at the model.

The prior is the expected accepted length under a vote. Each occurrence of the context's end votes for the tokens that
followed it there, with weight

    MATCH_BASE ** match length * trust,    trust = 1 / age in the request's own text, TRUST[source] elsewhere

(age: tokens from there to the text's end). With V the sum of all weights and V(p) that of the votes that begin with p,
the first j tokens of a candidate survive with probability

    V(first j) / V * confidence * HOLD ** (j - 1),    confidence = V ** TEMPER / (V ** TEMPER + DOUBT)

and the prior is the sum of that over j = 1..L. Match length, count, recency and source all enter by the weights.

Shapes: M occurrences; W tokens around each; L tokens of a continuation.
"""

from collections.abc import Iterable, Sequence
from math import log1p
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from choicespec.candidates.index import MOST_MATCH_TOKENS, Query, continuations, make_query, match_lengths
from choicespec.candidates.sources import SOURCE_NAMES, RequestText, ShortTexts, SourceName, Store

# Fitted on pseudo-outputs, L=8: BFCL answers (train split) written as calls, bodies of standard-library functions.
MATCH_BASE = 10.0
TRUST: dict[SourceName, float] = {"schema": 0.1, "repository": 0.001, "outputs": 0.001}
TEMPER = 0.2
DOUBT = 1.0
HOLD = 0.9

_OWN = SOURCE_NAMES.index("prompt")
_MOST_OCCURRENCES = 8  # of each part of a source
MOST_VOTES = 24  # twice as many are no better
_WEIGHTS = np.append(0.0, MATCH_BASE ** np.arange(1, MOST_MATCH_TOKENS + 1))  # by match length
_TRUST = np.array([TRUST.get(name, 0.0) for name in SOURCE_NAMES])  # by source; the prompt's depends on age


class Features(NamedTuple):
    """What the prior knows of a candidate, as numbers for a scorer.

    Attributes:
        prior: the expected accepted length.
        first, last: the probabilities that the first token, and that all tokens, are accepted.
        length: tokens of the candidate.
        log_times: natural logarithm of 1 + how often it followed.
        log_age: natural logarithm of 1 + the tokens since it last followed.
        prompt_match, schema_match, repository_match, outputs_match: the longest match in that source; 0 is none.
    """

    prior: float
    first: float
    last: float
    length: float
    log_times: float
    log_age: float
    prompt_match: float
    schema_match: float
    repository_match: float
    outputs_match: float


class Candidate(NamedTuple):
    """One finite continuation.

    Attributes:
        token_ids: L of them; fewer where every source ends there.
        matches: the longest match in each source, in the order of SOURCE_NAMES; 0 is none.
        times: how often it followed, among the occurrences that vote.
        age_tokens: from where it last followed to the end of that source.
        prior: the expected accepted length.
        survival: the probability of each prefix, shortest first.
        drafter: what the pair calls the drafter whose draft it is; None for a finite one.
        own_age_tokens: from where it begins in the request's own text, by its heaviest vote there, to that text's end;
            0 where it is found elsewhere only.
    """

    token_ids: tuple[int, ...]
    matches: tuple[int, ...]
    times: int
    age_tokens: int
    prior: float
    survival: tuple[float, ...]
    drafter: str | None = None
    own_age_tokens: int = 0

    @property
    def match_length(self) -> int:
        """Tokens of the longest match."""
        return max(self.matches)

    @property
    def source(self) -> SourceName:
        """Where the longest match is; the first of SOURCE_NAMES among equals."""
        return SOURCE_NAMES[self.matches.index(self.match_length)]

    @property
    def features(self) -> Features:
        """What the prior knows, as numbers."""
        return Features(
            self.prior,
            self.survival[0],
            self.survival[-1],
            float(len(self.token_ids)),
            log1p(self.times),
            log1p(self.age_tokens),
            *map(float, self.matches),
        )


class Ranked(NamedTuple):
    """The chosen candidate, and the probability that each of its prefixes is accepted, shortest first."""

    candidate: Candidate
    survival: Sequence[float]


class Votes(NamedTuple):
    """Occurrences that vote, heaviest first: a column each.

    Attributes:
        token_ids: what followed.
        weights: of the votes.
        match_lengths: tokens before the occurrence that are the text's last ones.
        ages_tokens: from there to the end of the source.
        sources: indices into SOURCE_NAMES.
    """

    token_ids: list[list[int]]
    weights: list[float]
    match_lengths: list[int]
    ages_tokens: list[int]
    sources: list[int]

    def cut(self, length: int) -> "Votes":
        """The same votes for what follows in the first ``length`` tokens."""
        return self._replace(token_ids=[token_ids[:length] for token_ids in self.token_ids])


_NO_VOTES = Votes([], [], [], [], [])


class CandidateSets:
    """The candidate set of every step of a request. One request at a time; a new ``begin`` forgets the last."""

    def __init__(
        self,
        block_length: int = 8,
        most_candidates: int = 16,
        repository: Store | None = None,
        outputs: Store | None = None,
    ) -> None:
        """Looks into stores that others fill.

        Args:
            block_length: L, 1 or more.
            most_candidates: N, 1 or more.
            repository: texts of files.
            outputs: the target's earlier outputs.
        """
        self._block_length = block_length
        self._most_candidates = most_candidates
        self._stores = (repository, outputs)
        self.begin(())

    def begin(
        self, prompt_ids: Sequence[int], schemas: Iterable[Sequence[int]] = (), exclude: str | None = None
    ) -> None:
        """Start a request.

        Args:
            prompt_ids: the prompt.
            schemas: the texts of its schemas (see ``answer_texts``) as token ids.
            exclude: the document of the stores that is passed over: the file to complete, or the request's own answer.
        """
        self._own = RequestText(prompt_ids)
        self._schemas = ShortTexts(schemas)
        self._exclude = exclude

    def candidates(self, token_ids: Sequence[int], limit: int | None = None) -> list[Candidate]:
        """The distinct continuations of a text, at most N, best prior first.

        Args:
            token_ids: the prompt and the output so far; only grows within a request.
            limit: the most tokens of a candidate, where it is less than L: what can still be accepted.
        """
        length = self._block_length if limit is None else min(self._block_length, limit)
        return rank(self.votes(token_ids, length), length, self._most_candidates)

    def votes(self, token_ids: Sequence[int], length: int) -> Votes:
        """What ``candidates`` ranks; a shorter ``length`` gives the same votes, cut."""
        self._own.extend(token_ids[self._own.end :])
        if length < 1 or not token_ids:
            return _NO_VOTES
        return self._votes(make_query(token_ids, length, _MOST_OCCURRENCES))

    def _votes(self, query: Query) -> Votes:
        """The heaviest occurrences of all sources."""
        found = [(0, self._own.end, rows) for rows in self._own.find(query)]
        if self._schemas.end:
            found += [(1, self._schemas.end, rows) for rows in self._schemas.find(query)]
        for number, store in enumerate(self._stores, start=2):
            if store is not None:
                found += [(number, store.end, rows) for rows in store.find(query, self._exclude)]
        numbers, ends, parts = zip(*found, strict=True)
        sizes = [len(rows.places) for rows in parts]
        sources_M = np.array(numbers).repeat(sizes)
        tokens_MW = np.concatenate([rows.tokens for rows in parts])
        ages_M = np.array(ends).repeat(sizes) - np.concatenate([rows.places for rows in parts])
        lengths_M = match_lengths(tokens_MW, query)
        weights_M = _WEIGHTS[lengths_M] * np.where(sources_M == 0, 1 / ages_M, _TRUST[sources_M])
        best = (-weights_M).argsort(kind="stable")[: min(MOST_VOTES, np.count_nonzero(weights_M))]
        columns = (weights_M, lengths_M, ages_M, sources_M)
        return Votes(continuations(tokens_MW[best], query), *(column[best].tolist() for column in columns))


def rank(votes: Votes, length: int, most: int) -> list[Candidate]:
    """The ``most`` best of the distinct continuations, best prior first; the heaviest vote first among equals."""
    prefixes_of, weights = _prefixes(votes)
    scales = _scales(sum(votes.weights), length)
    alike: dict[tuple[int, ...], list[int]] = {}  # the votes for the same continuation
    for vote, prefixes in enumerate(prefixes_of):
        alike.setdefault(prefixes, []).append(vote)
    survivals = [
        tuple([weights[prefix] * scale for prefix, scale in zip(prefixes, scales, strict=False)]) for prefixes in alike
    ]
    ranked = sorted(zip(map(sum, survivals), survivals, alike.values(), strict=True), key=itemgetter(0), reverse=True)
    return [_candidate(votes, same, prior, survival) for prior, survival, same in ranked[:most]]


def _candidate(votes: Votes, same: list[int], prior: float, survival: tuple[float, ...]) -> Candidate:
    """What the votes ``same`` are for."""
    matches = [0] * len(SOURCE_NAMES)
    for vote in same:
        matches[votes.sources[vote]] = max(matches[votes.sources[vote]], votes.match_lengths[vote])
    return Candidate(
        token_ids=tuple(votes.token_ids[same[0]]),
        matches=tuple(matches),
        times=len(same),
        age_tokens=min([votes.ages_tokens[vote] for vote in same]),
        prior=prior,
        survival=survival,
        own_age_tokens=next((votes.ages_tokens[vote] for vote in same if votes.sources[vote] == _OWN), 0),
    )


def _prefixes(votes: Votes) -> tuple[list[tuple[int, ...]], list[float]]:
    """The prefixes of each vote's continuation, by number, and by number the weight of the votes that begin with it."""
    longer: dict[tuple[int, int], int] = {}  # a trie: from a prefix and the token after it to the prefix of both
    weights = [0.0]
    prefixes_of = []
    for token_ids, weight in zip(votes.token_ids, votes.weights, strict=True):
        prefix, prefixes = 0, []
        for token_id in token_ids:
            prefix = longer.setdefault((prefix, token_id), len(weights))
            if prefix == len(weights):
                weights.append(0.0)
            weights[prefix] += weight
            prefixes.append(prefix)
        prefixes_of.append(tuple(prefixes))
    return prefixes_of, weights


def _scales(total: float, length: int) -> list[float]:
    """What makes the votes for the first 1..L tokens probabilities."""
    if not total:
        return []
    confidence = total**TEMPER / (total**TEMPER + DOUBT)
    return [confidence / total * HOLD**j for j in range(length)]
