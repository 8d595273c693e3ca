"""An output as text, block by block."""

import pytest
from choicespec.runtimes.scripted import ByteTokenizer
from choicespec.serving.text import Piece, TextStream
from hypothesis import given
from hypothesis import strategies as st

_TOKENIZER = ByteTokenizer()


def _streamed(blocks: list[bytes], stop: tuple[str, ...] = ()) -> list[str]:
    """What is taken after each block, and at the end."""
    stream = TextStream(_TOKENIZER.decode, stop)
    taken = []
    for block in blocks:
        stream.add(list(block), "prompt")
        taken.append("".join(piece.text for piece in stream.take()))
    return [*taken, "".join(piece.text for piece in stream.end())]


@given(st.text("ab é漢🙂\ufffd", max_size=80), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_the_text_is_the_same_however_it_is_cut_into_blocks(text: str, sizes: list[int]) -> None:
    """Fails if a character that blocks share is lost, doubled or shown in parts."""
    encoded, blocks, place = text.encode(), list[bytes](), 0
    while place < len(encoded):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(encoded[place : place + size])
        place += size
    taken = _streamed(blocks)
    assert "".join(taken) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(taken)


@given(st.text("ab.", max_size=40), st.sampled_from(["a", "ab", "aab", "a.b", "..."]), st.integers(1, 6))
def test_the_text_ends_before_the_first_stop_string(text: str, stop: str, size: int) -> None:
    """Fails if a part of a stop string is shown before the rest of it comes, or text after it."""
    blocks = [text[place : place + size].encode() for place in range(0, len(text), size)]
    taken = _streamed(blocks, (stop,))
    assert "".join(taken) == text.partition(stop)[0]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    """Fails if the last token of an output that its length cuts is silently dropped."""
    assert _streamed(["é".encode()[:1]]) == ["", "\ufffd"]


def test_pieces_keep_who_proposed_them() -> None:
    """Fails if the page would colour a text by another proposer."""
    stream = TextStream(_TOKENIZER.decode, ("END",))
    stream.add(list(b"abc"), "schema")
    stream.add(list(b"E"), "target")
    assert stream.take() == (Piece("abc", "schema"),)
    stream.add(list(b"x"), "prompt")
    assert stream.take() == (Piece("E", "target"), Piece("x", "prompt"))
    stream.add(list(b"yEND"), "outputs")
    assert stream.end() == (Piece("y", "outputs"),)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_long_outputs_go_on_where_they_were(size: int) -> None:
    """Fails if the window that is decoded again loses its place."""
    text = "".join(f"line {number} äöü\n" for number in range(60))
    encoded = text.encode()
    assert "".join(_streamed([encoded[i : i + size] for i in range(0, len(encoded), size)])) == text
