"""What every source of candidates promises. A source's test class inherits this and says how it is made."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from choicespec.candidates.index import MOST_MATCH_TOKENS, Query, continuations, make_query, match_lengths
from choicespec.candidates.sources import Source
from hypothesis import given
from hypothesis import strategies as st

# few tokens, so that they repeat; 0 and a large one, because stored tokens are shifted
TOKEN_IDS = st.sampled_from([0, 1, 2, 151_935])
DOCUMENTS = st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=40), max_size=6)
CONTEXTS = st.lists(TOKEN_IDS, min_size=1, max_size=24)
LENGTHS = st.integers(1, 9)
MOST = st.integers(1, 6)


class Found(NamedTuple):
    """An occurrence: the place after the match, the tokens that match, and what followed."""

    place: int
    match_length: int
    token_ids: tuple[int, ...]


def found(rows_of: Source, query: Query) -> list[Found]:
    """What a source finds, with the rows that match nothing left out."""
    rows = rows_of.find(query)
    tokens = np.concatenate([part.tokens for part in rows])
    places = np.concatenate([part.places for part in rows]).tolist()
    following = continuations(tokens, query)
    lengths = match_lengths(tokens, query).tolist()
    return [
        Found(place, length, tuple(ids))
        for place, length, ids in zip(places, lengths, following, strict=True)
        if length
    ]


def common_suffix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many last tokens two texts share, as far as matches are told apart."""
    shared = 0
    while shared < min(len(left), len(right), MOST_MATCH_TOKENS) and left[-1 - shared] == right[-1 - shared]:
        shared += 1
    return shared


class SourceContract:
    """The properties, against a search of every place."""

    def make(self, documents: Sequence[Sequence[int]]) -> Source:
        """The source with these documents in it."""
        raise NotImplementedError

    def expected(self, documents: Sequence[Sequence[int]], context: Sequence[int], length: int) -> list[Found]:
        """Every occurrence, found by looking at each place. Each document is followed by one place of its own."""
        every = []
        start = 0
        for document in documents:
            for place in range(1, len(document)):
                shared = common_suffix(document[:place], context)
                every.append(Found(start + place, shared, tuple(document[place : place + length])))
            start += len(document) + 1
        return [occurrence for occurrence in every if occurrence.match_length]

    @given(DOCUMENTS, CONTEXTS, LENGTHS, MOST)
    def test_finds_the_longest_matches(
        self, documents: list[list[int]], context: list[int], length: int, most: int
    ) -> None:
        """Fails if a longer match is missed, a length is wrong, or a continuation is not what followed there."""
        expected = self.expected(documents, context, length)
        got = found(self.make(documents), make_query(context, length, most))
        assert set(got) <= set(expected)
        assert len(set(got)) == len(got)
        lengths, best = (sorted((f.match_length for f in some), reverse=True)[:most] for some in (got, expected))
        assert lengths == best

    @given(DOCUMENTS, CONTEXTS, LENGTHS)
    def test_finds_all_where_few_are_there(self, documents: list[list[int]], context: list[int], length: int) -> None:
        """Fails if an occurrence is lost although there is room for it."""
        every = found(self.make(documents), make_query(context, length, 1000))
        assert sorted(every) == sorted(self.expected(documents, context, length))

    @given(DOCUMENTS, CONTEXTS, MOST)
    def test_same_documents_give_the_same_answer(
        self, documents: list[list[int]], context: list[int], most: int
    ) -> None:
        """Fails if anything depends on the order of a set or on an earlier look-up."""
        source, query = self.make(documents), make_query(context, 8, most)
        first = found(source, query)
        assert found(source, query) == first
        assert found(self.make(documents), query) == first

    def test_nothing_held_finds_nothing(self) -> None:
        """Fails if an empty source raises or makes something up."""
        assert found(self.make([]), make_query([1, 2], 8, 4)) == []

    @given(DOCUMENTS, CONTEXTS)
    def test_the_end_counts_every_token(self, documents: list[list[int]], context: list[int]) -> None:
        """Fails if an age (end - place) can be less than 1."""
        source = self.make(documents)
        assert all(source.end - f.place >= 1 for f in found(source, make_query(context, 2, 9)))
