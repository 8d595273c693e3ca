"""Filling: never above the bound, and close below it."""

from collections.abc import Sequence
from typing import NamedTuple

from choicespec.spec.task import ToolCall
from choicespec.tasks.context import CHOICES, TRIES, Material, Window, fill
from hypothesis import given
from hypothesis import strategies as st


class Piece(NamedTuple):
    """A piece of so many tokens, by estimate."""

    number: int
    size: int


def pieces(sizes: Sequence[int]) -> list[Piece]:
    return [Piece(number, size) for number, size in enumerate(sizes)]


def tokens(chosen: Sequence[Piece]) -> list[int]:
    return [0] * (7 + sum(piece.size for piece in chosen))


@given(
    sizes=st.lists(st.integers(1, 400), max_size=200),
    shortest=st.integers(1, 100),
    most=st.integers(100, 20_000),
    factor=st.floats(0.3, 3.0),
    overhead=st.integers(0, 30),
)
def test_bound_is_never_exceeded(sizes: list[int], shortest: int, most: int, factor: float, overhead: int) -> None:
    """Fails if an estimate is believed: templates indent, so the truth may be a third or three times of it."""
    material = Material[Piece](tokens)
    rendered = 0

    def render(chosen: Sequence[Piece]) -> list[int]:
        nonlocal rendered
        rendered += 1
        return [0] * (shortest + sum(int(piece.size * factor) + overhead for piece in chosen))

    offered = pieces(sizes)
    found = fill(render(()), most, lambda budget: material.selection(offered, budget), render)
    assert shortest <= len(found) <= most
    assert rendered <= 1 + TRIES
    everything = len(render(offered))
    largest = int(400 * factor) + overhead
    assert len(found) >= min(everything, most - 2 * largest) or everything <= most


@given(st.lists(st.integers(50, 300), min_size=120, max_size=200), st.integers(1500, 5000))
def test_last_places_are_filled_well(sizes: list[int], most: int) -> None:
    """Fails if filling stops at the first piece that is too large: up to a whole piece would be missing."""
    chosen = Material[Piece](tokens).selection(pieces(sizes), most)
    assert len(chosen) == len(set(chosen))
    spare = most - sum(piece.size for piece in chosen)
    assert spare >= 0
    following = pieces(sizes)[len(chosen) : CHOICES - 10]
    assert not [piece for piece in following if piece not in chosen and piece.size <= spare]


def test_a_piece_is_measured_once_and_only_when_considered() -> None:
    """Fails if each prompt tokenises the material again, or one prompt all of a large log: minutes, not seconds."""
    measured: list[Piece] = []

    def render(chosen: Sequence[Piece]) -> list[int]:
        measured.extend(chosen)
        return tokens(chosen)

    material = Material[Piece](render)
    for budget in (200, 300, 400):
        material.selection(pieces([30] * 10_000), budget)
    assert len(measured) <= 3 * (CHOICES + 15)


def test_room_is_what_the_target_leaves() -> None:
    """Fails if a number of tokens ignores the target's context, or "max" the new tokens."""
    assert Window(ToolCall(context_tokens=300, max_new_tokens=64), 8192).most_tokens == 300
    assert Window(ToolCall(context_tokens=8192, max_new_tokens=64), 8192).most_tokens == 8128
    assert Window(ToolCall(context_tokens="max", max_new_tokens=64), 8192).most_tokens == 8128
    assert Window(ToolCall(max_new_tokens=64), 8192).most_tokens == 8128


def test_both_numbers_of_a_prompt_that_cannot_fit() -> None:
    """Fails if the sentence blames the target's context where task.context_tokens is what is too small."""
    long = Window(ToolCall(context_tokens=30), 8192).request("chat:1", lambda _: [], lambda _: [0] * 31, None)
    assert "31 prompt tokens" in str(long)
    assert "task.context_tokens of 30" in str(long)
    longer = Window(ToolCall(max_new_tokens=10), 40).request("chat:1", lambda _: [], lambda _: [0] * 31, None)
    assert "31 prompt tokens + 10 new tokens exceed the target's context of 40" in str(longer)
