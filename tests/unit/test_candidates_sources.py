"""The sources: their contract, and what each promises beyond it."""

import random
from collections.abc import Sequence

import pytest
from choicespec.candidates.index import Query, Rows, make_query
from choicespec.candidates.sources import RequestText, ShortTexts, Source, Store
from contracts.source_contract import CONTEXTS, DOCUMENTS, Found, SourceContract, common_suffix, found
from hypothesis import given
from hypothesis import strategies as st


class TestRequestText(SourceContract):
    def make(self, documents: Sequence[Sequence[int]]) -> Source:
        text = RequestText([])
        for document in documents:
            text.extend(document)
        return text

    def expected(self, documents: Sequence[Sequence[int]], context: Sequence[int], length: int) -> list[Found]:
        """One text, which is taken to go on periodically."""
        text = [token_id for document in documents for token_id in document]
        every = []
        for place in range(1, len(text)):
            rest = text[place:]
            token_ids = tuple(rest[i % len(rest)] for i in range(length))
            every.append(Found(place, common_suffix(text[:place], context), token_ids))
        return [occurrence for occurrence in every if occurrence.match_length]

    def test_the_latest_of_equals_are_kept(self) -> None:
        """Fails if the first occurrences of a frequent token are taken and the latest are lost."""
        text = RequestText([7, 1, 7, 2, 7, 3, 7, 4, 7])
        assert {f.token_ids[0] for f in found(text, make_query([9, 7], 1, 2))} >= {3, 4}

    def test_grows_beyond_its_first_size(self) -> None:
        """Fails if a text is cut, or shifted, when its memory grows."""
        text = RequestText(range(5000))
        text.extend(range(5000, 9000))
        assert found(text, make_query([8998], 3, 1)) == [Found(8999, 1, (8999, 8999, 8999))]


class TestShortTexts(SourceContract):
    def make(self, documents: Sequence[Sequence[int]]) -> Source:
        return ShortTexts(documents)


class TestStore(SourceContract):
    """A store so large that everything is scanned."""

    def make(self, documents: Sequence[Sequence[int]]) -> Source:
        store = Store(1_000_000)
        for document in documents:
            store.add(document)
        return store


class TestStoreInSegments(SourceContract):
    """A store so small that nearly everything lies in segments."""

    def make(self, documents: Sequence[Sequence[int]]) -> Source:
        store = Store(sum(map(len, documents)) + len(documents) + 8)
        for document in documents:
            store.add(document)
        return store


@given(DOCUMENTS, CONTEXTS, st.integers(1, 120))
def test_eviction_keeps_the_bound_and_the_newest(
    documents: list[list[int]], context: list[int], most_tokens: int
) -> None:
    """Fails if the bound is passed, an evicted text is found, or a newer document goes before an older one."""
    store = Store(most_tokens)
    for document in documents:
        store.add(document)
        assert len(store) <= most_tokens
    kept = [document[-(most_tokens - 1) :] for document in documents if most_tokens > 1]
    while sum(len(document) + 1 for document in kept) > len(store):
        kept.pop(0)
    assert sum(len(document) + 1 for document in kept) == len(store)
    start = store.end - len(store)
    expected = {f._replace(place=f.place + start) for f in SourceContract().expected(kept, context, 5)}
    assert set(found(store, make_query(context, 5, 1000))) == expected


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_a_full_store_holds_more_than_half_of_its_bound(sizes: list[int]) -> None:
    """Fails if eviction forgets much more than it must."""
    store = Store(200)
    for size in sizes:
        store.add([1] * size)
    assert len(store) >= min(sum(sizes) + len(sizes), 100)


def test_a_long_segment_is_searched_like_a_short_one() -> None:
    """Fails if the guide into a suffix array leads past the longest matches."""
    dice = random.Random(0)
    documents = [[dice.randrange(9) for _ in range(1000)] for _ in range(6)]
    contract = TestStoreInSegments()
    source = contract.make(documents)
    for _ in range(40):
        document, end = dice.choice(documents), dice.randrange(1, 1000)
        context = [dice.randrange(9) for _ in range(3)] + document[max(end - 20, 0) : end][dice.randrange(20) :]
        every = contract.expected(documents, context, 4)
        got = found(source, make_query(context, 4, 5))
        assert set(got) <= set(every)
        lengths, best = (sorted((f.match_length for f in some), reverse=True)[:5] for some in (got, every))
        assert lengths == best


class Excluding:
    """A store as a request sees it that must not see one document."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def end(self) -> int:
        return self._store.end

    def find(self, query: Query) -> list[Rows]:
        return self._store.find(query, self._name)


@given(DOCUMENTS, st.integers(0, 5), CONTEXTS, st.sampled_from([8, 100_000]))
def test_an_excluded_document_is_passed_over(
    documents: list[list[int]], number: int, context: list[int], spare_tokens: int
) -> None:
    """Fails if a request sees its own recorded answer, or if another document goes with it."""
    store = Store(sum(map(len, documents)) + len(documents) + spare_tokens)
    ends = []
    for name, document in enumerate(documents):
        store.add(document, str(name))
        ends.append(store.end)
    query = make_query(context, 3, 1000)
    own = range(ends[number] - len(documents[number]) - 1, ends[number]) if number < len(documents) else range(0)
    expected = [f for f in found(store, query) if f.place not in own]
    assert sorted(found(Excluding(store, str(number)), query)) == sorted(expected)


def test_a_name_is_added_once_and_forgotten_with_its_document() -> None:
    """Fails if a request that is run again counts twice, or if names outlive their documents."""
    store = Store(40)
    store.add([1, 2, 3], "a")
    store.add([1, 2, 3], "a")
    assert len(store) == 4
    for _ in range(10):
        store.add([5] * 9)
    store.add([1, 2, 3], "a")
    assert found(store, make_query([1, 2], 1, 9))


def test_of_a_document_longer_than_the_bound_the_end_is_kept() -> None:
    """Fails if it is dropped, or breaks the bound."""
    store = Store(10)
    store.add(list(range(100)))
    assert len(store) == 10
    assert found(store, make_query([97], 2, 1)) == [Found(7, 1, (98, 99))]


@pytest.mark.parametrize("most_tokens", [0, 1])
def test_a_store_without_room_stays_empty(most_tokens: int) -> None:
    """Fails if a bound of nothing loops for ever or keeps a token."""
    store = Store(most_tokens)
    store.add([1, 2, 3])
    assert len(store) == 0
