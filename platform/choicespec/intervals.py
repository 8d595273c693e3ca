"""Figures with their 95% intervals: ratios of sums by bootstrap over requests, shares by Wilson."""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, bootstrap

from choicespec.records import Estimate

_RESAMPLES = 2000
_SEED = 0


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], scale: float = 1.0) -> Estimate:
    """scale * sum(numerators) / sum(denominators), resampling requests; 0 where the denominators sum to 0."""
    ones = [1.0] * len(numerators)
    return ratio_of_ratios(numerators, denominators, ones, [scale] * len(numerators))


def ratio_of_ratios(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
) -> Estimate:
    """(sum a / sum b) / (sum c / sum d), resampling requests jointly, so that the comparison is paired.

    Source of the interval: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), percentile method.
    """

    def statistic(*samples: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        a, b, c, d = (sample.sum(axis=axis) for sample in samples)
        divisor = b * c
        return np.where(divisor > 0, a * d / np.where(divisor > 0, divisor, 1.0), 0.0)

    data = tuple(
        np.asarray(s, dtype=np.float64) for s in (numerators, denominators, base_numerators, base_denominators)
    )
    value = float(statistic(*data))
    n = len(numerators)
    if n < 2:
        return Estimate(value=value, low=value, high=value, n=n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant sample has a point for an interval, which is right
        interval = bootstrap(
            data, statistic, n_resamples=_RESAMPLES, paired=True, vectorized=True, method="percentile", rng=_SEED
        ).confidence_interval
    return Estimate(value=value, low=float(interval.low), high=float(interval.high), n=n)


def share(successes: int, n: int) -> Estimate:
    """successes / n with Wilson's interval; an empty sample says nothing, so its interval is [0, 1]."""
    if n == 0:
        return Estimate(value=0.0, low=0.0, high=1.0, n=0)
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return Estimate(value=successes / n, low=float(interval.low), high=float(interval.high), n=n)
