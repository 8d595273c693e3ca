"""Is the output the autoregressive output, and if not, where does it first differ?"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from choicespec.records import Divergence, Request, Trace


def first_divergence(
    request: Request, baseline: Trace, method: Trace, top2_margin: Callable[[Sequence[int]], float]
) -> Divergence | None:
    """The first position at which two outputs of a request differ; None where they are equal.

    Args:
        top2_margin: the target's margin after a text; called at most once, on the common prefix.
    """
    for position, (expected, found) in enumerate(zip_longest(baseline.output_ids, method.output_ids)):
        if expected != found:
            common = (*request.prompt_ids, *baseline.output_ids[:position])
            return Divergence(
                request_id=request.request_id,
                position=position,
                expected_id=expected,
                found_id=found,
                top2_margin=top2_margin(common),
            )
    return None
