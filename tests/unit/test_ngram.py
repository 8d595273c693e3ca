"""Prompt lookup: which occurrence is taken, and how it goes on."""

from choicespec.drafters.ngram import NgramDrafter
from choicespec.records import Request
from choicespec.spec.method import MethodSpec, Ngram
from contracts.proposer_contract import ProposerContract, Texts
from hypothesis import given
from hypothesis import strategies as st

Methods = st.builds(
    lambda k, shortest, more: Ngram(num_draft_tokens=k, min_ngram=shortest, max_ngram=shortest + more),
    k=st.integers(1, 16),
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
)


def draft(text: str, k: int = 8, shortest: int = 1, longest: int = 3, limit: int = 64) -> str:
    """What is proposed after a text, a token a character."""
    drafter = NgramDrafter(Ngram(num_draft_tokens=k, min_ngram=shortest, max_ngram=longest))
    drafter.begin(Request("r", tuple(text.encode()), 64))
    return bytes(drafter.propose(list(text.encode()), limit).token_ids).decode()


class TestNgram(ProposerContract):
    """The contract, for any sizes."""

    methods = Methods

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Ngram)
        return method.num_draft_tokens


def test_the_longest_suffix_wins_over_a_later_occurrence_of_a_shorter_one() -> None:
    """Fails if sizes are tried from the shortest, or if only the place decides."""
    assert draft("abcX_cY_abc", k=1) == "X"


def test_the_latest_of_several_occurrences_wins() -> None:
    """Fails if the index keeps the first place that it saw."""
    assert draft("abX_abY_ab", k=1) == "Y"


def test_the_suffix_is_not_its_own_occurrence() -> None:
    """Fails if the text's end is indexed before it is looked up."""
    assert draft("abc") == ""
    assert draft("aXbYc") == ""


def test_a_draft_goes_on_periodically_where_the_text_runs_out() -> None:
    """Fails if an overlapping match gives less than k tokens, as it would in every loop of a generated text."""
    assert draft("abcabc", k=8) == "abcabcab"
    assert draft("xaa", k=4) == "aaaa"


def test_what_follows_the_occurrence_is_proposed_up_to_k() -> None:
    """Fails if k is one off, or if the draft begins with the matched tokens."""
    assert draft("abc12345_abc", k=4) == "1234"
    assert draft("abc12345_abc", k=4, limit=2) == "12"


def test_a_suffix_shorter_than_the_shortest_size_is_not_looked_up() -> None:
    """Fails if min_ngram is ignored: short suffixes recur by chance, and their drafts are wrong."""
    assert draft("bX_aab", k=1, shortest=1) == "X"
    assert draft("bX_aab", k=1, shortest=2) == ""


def test_a_suffix_longer_than_the_longest_size_is_not_looked_up() -> None:
    """Fails if max_ngram is ignored: the longer match would find the first occurrence."""
    assert draft("abcdX_bcdY_abcd", k=1, longest=3) == "Y"
    assert draft("abcdX_bcdY_abcd", k=1, longest=4) == "X"


def test_a_text_shorter_than_any_size_gives_nothing() -> None:
    """Fails if a slice wraps around at the text's beginning."""
    assert draft("a", shortest=3, longest=5) == ""
    assert draft("aa", shortest=2, longest=5) == ""


@given(Methods, Texts)
def test_the_index_finds_what_a_search_finds(method: Ngram, text: list[int]) -> None:
    """Fails if the index and the definition of prompt lookup part anywhere."""
    drafter = NgramDrafter(method)
    drafter.begin(Request("r", tuple(text), 64))
    assert list(drafter.propose(text, 64).token_ids) == _searched(method, text)


def _searched(method: Ngram, text: list[int]) -> list[int]:
    """Prompt lookup by its definition, slowly."""
    for size in range(method.max_ngram, method.min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                grown = list(text)
                for _ in range(method.num_draft_tokens):
                    grown.append(grown[start + size + len(grown) - len(text)])
                return grown[len(text) :]
    return []
