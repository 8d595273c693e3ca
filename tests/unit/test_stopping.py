"""Where an output ends: the same, however its tokens are grouped."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from choicespec.decoding.stopping import Cut, StopRule
from choicespec.records import FinishReason
from hypothesis import given
from hypothesis import strategies as st

EOS = 0
Characters = st.text(alphabet="ab\né字🙂", max_size=24)
Stops = st.lists(st.text(alphabet="ab\né字🙂", min_size=1, max_size=4), max_size=3)


class Pieces:
    """Tokens of any bytes, as a byte-level tokenizer has them: a character may spread over several of them."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = {EOS: b"", **dict(enumerate(pieces, start=1))}
        self.token_ids = tuple(range(1, len(pieces) + 1))

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._pieces[i] for i in token_ids).decode(errors="replace")


def split(items: bytes | Sequence[int], places: Iterable[int]) -> list[list[int]]:
    """The items, divided at some places; no part is empty."""
    edges = sorted({0, len(items), *(place for place in places if place < len(items))})
    return [list(items[start:end]) for start, end in pairwise(edges)]


def ended(rule: StopRule, blocks: Iterable[Sequence[int]]) -> Cut:
    """The output of a decode in which these blocks come one after the other."""
    output_ids: tuple[int, ...] = ()
    for block in blocks:
        kept, reason = rule.cut(output_ids, block)
        output_ids += kept
        if reason is not None:
            return Cut(output_ids, reason)
    return Cut(output_ids, None)


def defined(tokens: Pieces, token_ids: Sequence[int], max_new_tokens: int, stop: Sequence[str]) -> Cut:
    """Where an output ends by the definition: the whole text is read anew after each token."""
    for count in range(1, len(token_ids) + 1):
        text = tokens.decode(token_ids[:count])
        reason: FinishReason | None = None
        if token_ids[count - 1] == EOS:
            reason = "eos"
        elif any(s in text for s in stop):
            reason = "stop"
        elif count == max_new_tokens:
            reason = "length"
        if reason is not None:
            return Cut(tuple(token_ids[:count]), reason)
    return Cut(tuple(token_ids), None)


@given(
    text=Characters,
    token_edges=st.sets(st.integers(1, 96)),
    eos_place=st.none() | st.integers(0, 40),
    max_new_tokens=st.integers(1, 60),
    stop=Stops,
    block_edges=st.sets(st.integers(1, 96)),
)
def test_every_grouping_ends_where_the_definition_says(
    text: str,
    token_edges: set[int],
    eos_place: int | None,
    max_new_tokens: int,
    stop: list[str],
    block_edges: set[int],
) -> None:
    """Fails if a block is kept too far, if a stop string is missed across blocks, or if the window is too short."""
    tokens = Pieces([bytes(piece) for piece in split(text.encode(), token_edges)] if text else [])
    token_ids = list(tokens.token_ids)
    if eos_place is not None:
        token_ids.insert(eos_place, EOS)
    rule = StopRule({EOS}, max_new_tokens, stop, tokens.decode)
    expected = defined(tokens, token_ids, max_new_tokens, stop)
    assert ended(rule, [[i] for i in token_ids]) == expected
    assert ended(rule, split(token_ids, block_edges)) == expected
    assert rule.cut((), token_ids) == expected


def test_a_stop_string_over_several_tokens_and_blocks() -> None:
    """Fails if only the block at hand is read: no token and no block holds the whole stop string."""
    tokens = Pieces([b"x", b"en", b"d_o", b"f!", b"y"])
    rule = StopRule({EOS}, 99, ["end_of!"], tokens.decode)
    assert ended(rule, [[1, 2], [3], [4, 5]]) == Cut((1, 2, 3, 4), "stop")


def test_a_character_of_several_tokens_completes_a_stop_string() -> None:
    """Fails if a window that begins inside a character, or ends in one, spoils the text: one byte a token."""
    text = "🙂" * 5 + "é🙂" + "b"
    tokens = Pieces([bytes([byte]) for byte in text.encode()])
    rule = StopRule({EOS}, 99, ["é🙂"], tokens.decode)
    assert ended(rule, [[i] for i in tokens.token_ids]) == Cut(tokens.token_ids[:-1], "stop")


def test_the_first_of_several_stop_strings_ends_the_output() -> None:
    """Fails if the order in which stop strings are given decides."""
    tokens = Pieces([b"a", b"b", b"c"])
    assert StopRule({EOS}, 99, ["c", "b"], tokens.decode).cut((), [1, 2, 3]) == Cut((1, 2), "stop")


@pytest.mark.parametrize(
    ("eos_ids", "stop", "max_new_tokens", "reason"),
    [({2}, ["b"], 2, "eos"), ({2}, [], 2, "eos"), ({9}, ["b"], 2, "stop"), ({9}, [], 2, "length")],
)
def test_one_token_with_several_reasons_has_the_strongest(
    eos_ids: set[int], stop: list[str], max_new_tokens: int, reason: FinishReason
) -> None:
    """Fails if an output that has just finished at its last token passes for one that was cut."""
    rule = StopRule(eos_ids, max_new_tokens, stop, Pieces([b"a", b"b", b"c"]).decode)
    assert rule.cut((), [1, 2, 3]) == Cut((1, 2), reason)


def test_every_end_of_sequence_token_ends() -> None:
    """Fails if only the first of a model's several end-of-sequence tokens counts."""
    rule = StopRule({7, 8}, 99, [], Pieces([]).decode)
    assert rule.cut((1,), [2, 8, 7]) == Cut((2, 8), "eos")
    assert rule.cut((1,), [2, 7, 8]) == Cut((2, 7), "eos")


def test_the_output_so_far_counts_for_the_length() -> None:
    """Fails if each block has the whole length to itself."""
    rule = StopRule({EOS}, 5, [], Pieces([]).decode)
    assert rule.cut((1, 1, 1), [2, 3, 4]) == Cut((2, 3), "length")
    assert rule.cut((1, 1, 1), [2]) == Cut((2,), None)
