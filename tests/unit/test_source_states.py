"""The states here beside those at a candidate's source: as defined, and the same live as along a recording."""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pytest
import torch
from choicespec.decoding.tap import Tap
from choicespec.recordings import Recorded
from choicespec.records import Request
from choicespec.scorer.source_states import (
    OFFSETS,
    StateScale,
    TappedText,
    TextStates,
    cosines_along,
    num_source_features,
    scale_of,
    source_features,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

LAYERS, SIZE = (5, 2), 3
PROMPT, OUTPUT = 12, 9
TOKENS = PROMPT + OUTPUT
AGES = st.lists(st.lists(st.integers(0, TOKENS), min_size=4, max_size=4), min_size=OUTPUT - 1, max_size=OUTPUT - 1)


def states(seed: int) -> dict[int, NDArray[np.float32]]:
    """Of every token of a text but the last; no two layers or numbers of a state are alike in size."""
    dice = np.random.default_rng(seed)
    return {
        layer: (dice.normal(layer, 1, (TOKENS - 1, SIZE)) * np.arange(1, SIZE + 1))
        .astype(np.float16)
        .astype(np.float32)
        for layer in LAYERS
    }


def recorded(of_text: dict[int, NDArray[np.float32]]) -> Recorded:
    return Recorded(
        Request("r", tuple(range(PROMPT)), OUTPUT),
        tuple(range(OUTPUT)),
        "length",
        np.ones(OUTPUT, np.float32),
        {layer: found[PROMPT - 1 :].astype(np.float16) for layer, found in of_text.items()},
        {layer: found[: PROMPT - 1].astype(np.float16) for layer, found in of_text.items()},
    )


TEXT = states(0)
SCALE = scale_of([recorded(states(1)), recorded(states(2))], LAYERS)
NOT_SCALED = StateScale(np.zeros(len(LAYERS) * SIZE, np.float32), np.ones(len(LAYERS) * SIZE, np.float32))


def cosine(layer: int, here: int, there: int, scale: StateScale) -> float:
    """Of two tokens' states, number by number."""
    first = LAYERS.index(layer) * SIZE
    one, other = (
        [
            (float(TEXT[layer][token][i]) - float(scale.mean_S[first + i])) / float(scale.deviation_S[first + i])
            for i in range(SIZE)
        ]
        for token in (here, there)
    )
    lengths = sqrt(sum(x * x for x in one)) * sqrt(sum(x * x for x in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / lengths


def expected(ages: Sequence[int], known: int, scale: StateScale) -> list[list[float]]:
    """The definition, candidate by candidate."""
    cosines = [
        [
            cosine(layer, known - 2 - offset, known - age - 2 - offset, scale) if 0 < age <= known - 2 - offset else 0.0
            for layer in LAYERS
            for offset in OFFSETS
        ]
        for age in ages
    ]
    largest = [
        max(column) for column in zip(*(own for own, age in zip(cosines, ages, strict=True) if age), strict=True)
    ]
    return [
        [*own, 1.0, *(x - most for x, most in zip(own, largest, strict=True))] if age else [0.0] * (2 * len(own) + 1)
        for own, age in zip(cosines, ages, strict=True)
    ]


@pytest.mark.parametrize("scale", [SCALE, NOT_SCALED], ids=["scaled", "as they are"])
@given(AGES)
def test_features_are_what_they_are_defined_as(scale: StateScale, ages: list[list[int]]) -> None:
    """Fails if another token's or layer's state is compared, a candidate without a source counts among a set's, or a
    text's beginning passes for its end."""
    ages_PN = np.array(ages, np.int32)
    found = source_features(cosines_along(recorded(TEXT), ages_PN, LAYERS, scale), ages_PN)
    assert found.shape == (*ages_PN.shape, num_source_features(len(LAYERS)))
    for position, own in enumerate(ages):
        np.testing.assert_allclose(found[position], expected(own, PROMPT + 1 + position, scale), rtol=0, atol=1e-4)


@given(st.lists(st.integers(1, 4), max_size=OUTPUT - 2), st.integers(0, OUTPUT))
def test_live_as_along_the_recording(kept: list[int], asked_from: int) -> None:
    """Fails if rows of a block that were kept are lost or taken twice, steps at which nobody asked are not caught up
    with, or something of the request before is left."""
    ages_PN = np.array([[1, 4, 0, known] for known in range(PROMPT + 1, TOKENS)], np.int32)
    along_PNC = cosines_along(recorded(TEXT), ages_PN, LAYERS, SCALE)
    tap = Tap(LAYERS)
    text = TappedText(tap, len(LAYERS), SCALE)
    for of_text in (states(3), TEXT):
        tap.restart()
        end = 0
        for count in (PROMPT, *kept):
            block = {layer: torch.from_numpy(found[end : end + count]) for layer, found in of_text.items()}
            tap.keep(block, count)
            end = min(end + count, TOKENS - 1)
            position = end - PROMPT
            if position < asked_from or position >= len(ages_PN):
                continue
            found_NC = text.cosines(ages_PN[position])
            if of_text is TEXT:
                np.testing.assert_allclose(found_NC, along_PNC[position], rtol=0, atol=1e-5)
                np.testing.assert_array_equal(text.cosines(ages_PN[position]), found_NC)  # asked twice


def test_states_come_in_pieces_and_are_missing_or_rejected() -> None:
    """Fails if a rejected draft's state stays where a token took its place, one that never came passes for a state, or
    a text that is computed anew from its beginning is not as it was."""
    rows_TS = torch.from_numpy(np.concatenate([TEXT[layer] for layer in LAYERS], axis=1))
    ages = np.array([2, 6], np.int32)
    known = PROMPT + 4
    along_PNC = cosines_along(recorded(TEXT), np.broadcast_to(ages, (OUTPUT - 1, 2)), LAYERS, SCALE)
    text = TextStates(len(LAYERS), SCALE)
    for _ in range(2):
        text.put(0, rows_TS[:5])
        text.put(5, rows_TS[5:PROMPT])
        text.put(PROMPT, -rows_TS[:5])  # all but the first were rejected
        text.put(PROMPT, rows_TS[PROMPT : known + 1])
        np.testing.assert_allclose(text.cosines(ages, known), along_PNC[3], rtol=0, atol=1e-5)
    text.put(known + 1, rows_TS[known + 1 : known + 3])  # after a step whose states nobody took in
    found_NC = text.cosines(ages, known + 4).reshape(2, len(LAYERS), len(OFFSETS))
    here = [known + 2 - offset for offset in OFFSETS]
    for number, age in enumerate(ages):
        there = [not {token, token - age} & {known - 1, known} for token in here]
        assert (found_NC[number, 0] != 0).tolist() == there
    assert not text.cosines(ages, known + 9)[:, 0].any(), "the last tokens have not come"


def test_a_shift_by_one_token_is_caught() -> None:
    """The planted fault: states that are each the token's before, for the definition above to tell."""
    shifted = {layer: np.roll(found, 1, axis=0) for layer, found in TEXT.items()}
    ages_PN = np.full((OUTPUT - 1, 1), 3, np.int32)
    found = source_features(cosines_along(recorded(shifted), ages_PN, LAYERS, SCALE), ages_PN)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found[0], expected([3], PROMPT + 1, SCALE), rtol=0, atol=1e-4)
