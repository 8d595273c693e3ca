"""The check of losslessness that the tests share."""

from collections.abc import Callable, Iterable, Sequence

from choicespec.measuring.lossless import first_divergence
from choicespec.records import Request, Trace

Decode = Callable[[Request], Trace]


def no_margin(token_ids: Sequence[int]) -> float:
    """For targets without logits."""
    return 0.0


def assert_lossless(requests: Iterable[Request], baseline: Decode, method: Decode) -> None:
    """Every output of the method is the baseline's, token by token, and ends for the same reason."""
    for request in requests:
        expected, found = baseline(request), method(request)
        divergence = first_divergence(request, expected, found, no_margin)
        assert divergence is None, f"not lossless: {divergence}"
        assert found.finish_reason == expected.finish_reason, f"not lossless: {request.request_id} ends otherwise"
