"""Candidate sets and their prior."""

import math
from itertools import pairwise

import pytest
from choicespec.candidates.sets import Candidate, CandidateSets, Features
from choicespec.candidates.sources import SOURCE_NAMES, Store
from contracts.source_contract import CONTEXTS, DOCUMENTS, LENGTHS, TOKEN_IDS, common_suffix
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.lists(TOKEN_IDS, max_size=60)


def store(documents: list[list[int]]) -> Store:
    filled = Store(10_000)
    for document in documents:
        filled.add(document)
    return filled


@given(TEXTS, DOCUMENTS, DOCUMENTS, DOCUMENTS, LENGTHS, st.integers(1, 5))
def test_a_set_is_distinct_ranked_and_bounded(
    text: list[int],
    schemas: list[list[int]],
    files: list[list[int]],
    outputs: list[list[int]],
    length: int,
    most: int,
) -> None:
    """Fails if a candidate comes twice, is too long or empty, if N is passed, or if the order is not the prior's."""
    sets = CandidateSets(length, most, store(files), store(outputs))
    sets.begin(text, schemas)
    found = sets.candidates(text)
    assert len(found) <= most
    assert len({c.token_ids for c in found}) == len(found)
    for candidate in found:
        assert 1 <= len(candidate.token_ids) == len(candidate.survival) <= length
        assert all(1 >= earlier >= later > 0 for earlier, later in pairwise((1.0, *candidate.survival)))
        assert candidate.prior == pytest.approx(sum(candidate.survival))
    assert all(better.prior >= worse.prior for better, worse in pairwise(found))


@given(TEXTS, DOCUMENTS, LENGTHS)
def test_the_best_match_of_each_continuation_is_known(text: list[int], outputs: list[list[int]], length: int) -> None:
    """Fails if a candidate did not follow where it says, or if its source or match length is another's."""
    sets = CandidateSets(length, 100, outputs=store(outputs))
    sets.begin(text)
    for candidate in sets.candidates(text):
        assert candidate.matches[1:3] == (0, 0)
        own = [
            common_suffix(text[:place], text)
            for place in range(1, len(text))
            if _goes_on(text[place:], length) == candidate.token_ids
        ]
        others = [
            common_suffix(document[:place], text)
            for document in outputs
            for place in range(1, len(document))
            if tuple(document[place : place + length]) == candidate.token_ids
        ]
        assert candidate.matches[0] in (max(own, default=0), 0)
        assert candidate.matches[3] in (max(others, default=0), 0)
        assert candidate.match_length == max(candidate.matches) > 0
        assert candidate.source == SOURCE_NAMES[candidate.matches.index(candidate.match_length)]
        assert candidate.times <= sum(length > 0 for length in own + others)


@given(TEXTS, DOCUMENTS, LENGTHS)
def test_a_candidate_of_the_own_text_is_where_it_says(text: list[int], outputs: list[list[int]], length: int) -> None:
    """Fails if the text at a candidate's place goes on otherwise, periodically where it ends, if nothing there is like
    what comes before, or if a place is said of one that is found elsewhere only."""
    sets = CandidateSets(length, 100, outputs=store(outputs))
    sets.begin(text)
    for candidate in sets.candidates(text):
        assert (candidate.own_age_tokens > 0) == (candidate.matches[0] > 0)
        if candidate.own_age_tokens:
            place = len(text) - candidate.own_age_tokens
            assert _goes_on(text[place:], length) == candidate.token_ids
            assert 0 < common_suffix(text[:place], text) <= candidate.matches[0]


def test_of_several_places_the_heaviest_vote_is_named() -> None:
    """Fails if the latest place is taken for the one that says most, which more of the text leads to."""
    sets = CandidateSets(1)
    sets.begin([1, 2, 7, 3, 2, 7, 1, 2])
    [first] = [candidate for candidate in sets.candidates([1, 2, 7, 3, 2, 7, 1, 2]) if candidate.token_ids == (7,)]
    assert (first.age_tokens, first.own_age_tokens) == (3, 6)


@given(TEXTS, st.integers(0, 60), DOCUMENTS, LENGTHS)
def test_step_by_step_equals_from_scratch(
    text: list[int], prompt_tokens: int, outputs: list[list[int]], length: int
) -> None:
    """Fails if the index that grows with the output differs from one that is built at once."""
    filled = store(outputs)
    growing, fresh = CandidateSets(length, outputs=filled), CandidateSets(length, outputs=filled)
    growing.begin(text[:prompt_tokens])
    for end in range(min(prompt_tokens, len(text)), len(text) + 1):
        fresh.begin(text[:end])
        assert growing.candidates(text[:end]) == fresh.candidates(text[:end])


@given(CONTEXTS, TEXTS)
def test_begin_forgets_the_last_request(text: list[int], other: list[int]) -> None:
    """Fails if one request sees another's text."""
    used, new = CandidateSets(), CandidateSets()
    used.begin(other, [other])
    used.candidates(other)
    used.begin(text)
    new.begin(text)
    assert used.candidates(text) == new.candidates(text)


@given(TEXTS, DOCUMENTS, st.integers(-1, 9))
def test_the_limit_is_a_shorter_length(text: list[int], outputs: list[list[int]], limit: int) -> None:
    """Fails if more is proposed than can be accepted, or if cut candidates come twice."""
    filled = store(outputs)
    long, short = CandidateSets(8, outputs=filled), CandidateSets(max(min(limit, 8), 1), outputs=filled)
    long.begin(text)
    short.begin(text)
    assert long.candidates(text, limit) == (short.candidates(text) if limit > 0 else [])


def test_nothing_known_gives_no_candidates() -> None:
    """Fails if an empty prompt, an empty store or an unseen token raises."""
    sets = CandidateSets(repository=Store(100), outputs=Store(0))
    assert sets.candidates([]) == []
    sets.begin([1, 2, 3])
    assert sets.candidates([1, 2, 3]) == []


def test_a_text_goes_on_periodically() -> None:
    """Fails if a repetition is proposed only as far as it has come."""
    sets = CandidateSets(block_length=5)
    sets.begin([1, 2, 3, 1])
    [candidate] = sets.candidates([1, 2, 3, 1])
    assert candidate.token_ids == (2, 3, 1, 2, 3)
    assert (candidate.source, candidate.match_length, candidate.times, candidate.age_tokens) == ("prompt", 1, 1, 3)


def test_longer_more_frequent_and_later_is_better() -> None:
    """Fails if match length, count or recency does not enter the prior."""

    def first(prompt: list[int], outputs: list[list[int]]) -> tuple[int, ...]:
        sets = CandidateSets(1, outputs=store(outputs))
        sets.begin(prompt)
        return sets.candidates(prompt)[0].token_ids

    assert first([1, 2], [[1, 2, 7], [2, 8], [2, 8]]) == (7,)
    assert first([1, 2], [[2, 7], [2, 8], [2, 7]]) == (7,)
    assert first([2, 7, 2, 8, 2], []) == (8,)


def test_the_request_sees_all_sources_but_not_its_own_answer() -> None:
    """Fails if a source is not looked into, or if the excluded document is."""
    repository, outputs = Store(100), Store(100)
    repository.add([1, 2, 5], "file")
    outputs.add([1, 2, 6], "other request")
    outputs.add([1, 2, 7], "this request")
    sets = CandidateSets(1, repository=repository, outputs=outputs)
    sets.begin([2, 3, 1, 2], [[1, 2, 4]], exclude="this request")
    found = {c.token_ids[0]: c.matches for c in sets.candidates([2, 3, 1, 2])}
    assert found == {3: (1, 0, 0, 0), 4: (0, 2, 0, 0), 5: (0, 0, 2, 0), 6: (0, 0, 0, 2)}


def test_features_are_named_numbers_in_a_fixed_order() -> None:
    """Fails if a trained scorer's inputs are moved."""
    candidate = Candidate((5, 6), (3, 0, 0, 4), times=2, age_tokens=9, prior=1.25, survival=(0.75, 0.5))
    assert candidate.features == pytest.approx((1.25, 0.75, 0.5, 2.0, math.log1p(2), math.log1p(9), 3.0, 0.0, 0.0, 4.0))
    assert all(type(value) is float for value in candidate.features)
    assert Features._fields == (
        "prior",
        "first",
        "last",
        "length",
        "log_times",
        "log_age",
        "prompt_match",
        "schema_match",
        "repository_match",
        "outputs_match",
    )


def _goes_on(rest: list[int], length: int) -> tuple[int, ...]:
    return tuple(rest[i % len(rest)] for i in range(length))
