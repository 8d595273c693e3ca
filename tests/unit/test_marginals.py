"""A tree over a block drafter's marginals: the likeliest products, as far as they pay."""

from collections.abc import Sequence
from itertools import product
from math import prod

import pytest
from choicespec.decoding.step_cost import StepCosts
from choicespec.drafters.choice import ByCost, Survival
from choicespec.drafters.marginals import MarginalDrafter, Place
from choicespec.drafters.union import Payoff
from choicespec.records import Proposal, Request
from hypothesis import given
from hypothesis import strategies as st

FLAT = StepCosts((1, 64), (1.0, 1.01))


class SaysOfEachPlace:
    """A block drafter of fixed marginals."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places

    def begin(self, request: Request) -> None:
        """Nothing to forget."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        raise AssertionError("a tree is made of marginals")

    def marginals(self, token_ids: Sequence[int], limit: int, most: int) -> list[Place]:
        return [place[:most] for place in self._places[:limit]]

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


def draft(places: Sequence[Place], width: int, payoff: Payoff, limit: int = 9) -> Proposal:
    drafter = MarginalDrafter(SaysOfEachPlace(places), payoff, "dflash", width)
    drafter.begin(Request("r", (0,), 64))
    return drafter.propose([0], limit)


@given(st.lists(st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_likeliest_products_come_first(weights: list[list[float]]) -> None:
    """Fails if a token's probability is not that of its whole branch, or if the heap passes a likelier one over."""
    places = [[(number, p / sum(row)) for number, p in enumerate(sorted(row, reverse=True))] for row in weights]
    found = draft(places, 99, Survival(0.0))
    texts: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(found.token_ids, found.parents, strict=True):
        texts.append((*texts[parent], token_id))
    every = [text for depth in range(1, len(places) + 1) for text in product(range(3), repeat=depth)]
    likely = {text: prod(places[depth][token_id][1] for depth, token_id in enumerate(text)) for text in every}
    expected = sorted(likely.values(), reverse=True)[: len(found.token_ids)]
    assert [likely[text] for text in texts[1:]] == pytest.approx(expected)


def test_what_does_not_pay_is_not_verified() -> None:
    """Fails if a tree is as large as its width and length allow, whatever a verification costs."""
    places = [[(1, 0.6), (2, 0.3)], [(3, 0.9), (4, 0.05)]]
    assert draft(places, 2, ByCost(FLAT)).token_ids == (1, 3, 2, 3)
    assert draft(places, 2, ByCost(StepCosts((1, 2, 64), (1.0, 1.4, 90.0)))).token_ids == (1,)
    assert draft(places, 2, ByCost(FLAT), limit=1).token_ids == (1, 2)
    assert draft(places, 2, ByCost(FLAT), limit=0) == Proposal((), "")
