"""Which methods can no longer win: a race over the same prompts, in which a method ends once it is surely slower."""

from collections.abc import Sequence

from choicespec.intervals import ratio_of_ratios
from choicespec.records import Estimate, Trace

_FIRST_LOOK, _LOOK_EVERY = 8, 4  # prompts


def beaten(traces: Sequence[Sequence[Trace]]) -> list[int]:
    """The places of those whose decode rate is below the fastest one's by more than its paired 95% interval.

    Looked at every few prompts only, since each look is a chance to be wrong.

    Source: O. Maron and A. Moore, "Hoeffding Races" (1993); the bound here is a bootstrap interval.

    Args:
        traces: of each method, on the same requests.
    """
    count = len(traces[0])
    if count < _FIRST_LOOK or count % _LOOK_EVERY:
        return []
    rates = [
        sum(one.decode_tokens for one in found) / max(sum(one.decode_ms for one in found), 1e-9) for found in traces
    ]
    fastest = rates.index(max(rates))
    return [
        place for place, found in enumerate(traces) if place != fastest and rate_ratio(found, traces[fastest]).high < 1
    ]


def rate_ratio(method: Sequence[Trace], other: Sequence[Trace]) -> Estimate:
    """How many times as fast as the other a method decodes, paired by request."""
    return ratio_of_ratios(
        [float(one.decode_tokens) for one in method],
        [one.decode_ms for one in method],
        [float(one.decode_tokens) for one in other],
        [one.decode_ms for one in other],
    )
