"""Figures and their intervals."""

import numpy as np
import pytest
from choicespec.intervals import ratio_of_ratios, ratio_of_sums, share
from choicespec.records import Estimate


def width(estimate: Estimate) -> float:
    return estimate.high - estimate.low


def test_a_rate_is_a_ratio_of_sums() -> None:
    """Fails if rates are averaged: 1 token in 1 ms and 1 token in 9 ms are 2 in 10, not the mean of 1 and 1/9."""
    assert ratio_of_sums([1, 1], [1, 9], scale=1e3).value == pytest.approx(200)


def test_a_speedup_is_the_ratio_of_both_sides_ratios_of_sums() -> None:
    """Fails if a side is turned around, or if speed-ups are averaged: (4 / 4) / (4 / 12)."""
    assert ratio_of_ratios([2, 2], [1, 3], [2, 2], [2, 10]).value == pytest.approx(3)


def test_a_side_against_itself_is_exactly_1() -> None:
    """Fails if the sides are resampled apart, or if rounding leaves 0.9999999999999999."""
    random = np.random.default_rng(0)
    tokens, elapsed_ms = list(random.uniform(1, 90, 30)), list(random.uniform(1, 2000, 30))
    found = ratio_of_ratios(tokens, elapsed_ms, tokens, elapsed_ms)
    assert (found.value, found.low, found.high, found.n) == (1, 1, 1, 30)


def test_pairing_narrows_the_interval_of_correlated_sides() -> None:
    """Fails if the sides are resampled apart: a slow prompt is slow for both, and that must cancel out."""
    random = np.random.default_rng(0)
    base_ms = random.lognormal(5, 1, 40)
    method_ms = base_ms / 2 * random.uniform(0.9, 1.1, 40)
    ones = [1.0] * 40
    paired = ratio_of_ratios(ones, list(method_ms), ones, list(base_ms))
    shuffled = ratio_of_ratios(ones, list(method_ms), ones, list(random.permutation(base_ms)))
    assert width(paired) < width(shuffled) / 3
    assert paired.low < 2 < paired.high


def test_no_request_says_nothing_and_one_has_no_interval() -> None:
    """Fails if a figure without data raises, or if one request passes for a certain figure with more behind it."""
    assert ratio_of_sums([], []) == Estimate(value=0, low=0, high=0, n=0)
    assert ratio_of_sums([3], [2]) == Estimate(value=1.5, low=1.5, high=1.5, n=1)


def test_nothing_in_no_time_is_0() -> None:
    """Fails if requests that end at their first token divide by zero."""
    assert ratio_of_sums([0, 0, 0], [0, 0, 0]) == Estimate(value=0, low=0, high=0, n=3)


@pytest.mark.filterwarnings("error")
def test_constant_data_has_a_point_for_an_interval() -> None:
    """Fails if a degenerate sample gives nan, or a warning between the results."""
    assert ratio_of_sums([2] * 8, [4] * 8) == Estimate(value=0.5, low=0.5, high=0.5, n=8)


def test_the_same_data_gives_the_same_interval() -> None:
    """Fails if two reports of one measurement differ."""
    data = list(np.random.default_rng(0).lognormal(0, 1, 20))
    assert ratio_of_sums([1.0] * 20, data) == ratio_of_sums([1.0] * 20, data)


def test_the_interval_is_ordered_around_the_value() -> None:
    """Fails if the bounds are exchanged or belong to another statistic."""
    found = ratio_of_sums([1.0] * 20, list(np.random.default_rng(0).lognormal(0, 1, 20)))
    assert found.low < found.value < found.high


def test_95_percent_intervals_cover_the_truth_about_that_often() -> None:
    """Fails if the interval is one-sided, of another level, or that of a single request. 24 requests are few: 90%."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        tokens, elapsed_ms = random.uniform(20, 60, 24), random.uniform(200, 600, 24)
        found = ratio_of_sums(list(tokens), list(elapsed_ms))
        covered += found.low <= 0.1 <= found.high
    assert 86 <= covered <= 99


def test_wilsons_interval_has_its_known_bounds() -> None:
    """Fails if another interval is used. 8 of 10: (8 + z²/2 ± z sqrt(8 · 2 / 10 + z²/4)) / (10 + z²), z = 1.96."""
    found = share(8, 10)
    assert (found.value, found.n) == (0.8, 10)
    assert found.low == pytest.approx(0.4902, abs=1e-4)
    assert found.high == pytest.approx(0.9433, abs=1e-4)


@pytest.mark.parametrize("n", [1, 12, 500])
def test_all_of_n_is_not_certainty(n: int) -> None:
    """Fails if 12 matches of 12 are said to prove that every output matches: the lower bound is n / (n + z²)."""
    found = share(n, n)
    assert found.value == found.high == 1
    assert found.low == pytest.approx(n / (n + 1.959964**2), abs=1e-6)


def test_a_share_of_nothing_may_be_anything() -> None:
    """Fails if an empty sample shows a match of 0 or of 100 for certain."""
    assert share(0, 0) == Estimate(value=0, low=0, high=1, n=0)
