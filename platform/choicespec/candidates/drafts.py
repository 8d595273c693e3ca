"""Drafts of drafters as candidates beside the finite ones."""

from itertools import accumulate
from operator import mul

from choicespec.candidates.sets import Candidate
from choicespec.candidates.sources import SOURCE_NAMES
from choicespec.records import Proposal

_UNSURE = 0.5  # of a token of which its drafter says nothing


def spoken(drafted: Proposal) -> Proposal:
    """A draft with a probability a token."""
    return drafted._replace(probabilities=drafted.probabilities or (_UNSURE,) * len(drafted.token_ids))


def as_candidate(drafter: str, drafted: Proposal) -> Candidate | None:
    """A draft with its drafter's own probabilities as the prior, taken at their word; None where nothing is drafted.

    Args:
        drafter: what the pair calls it.
        drafted: of it.
    """
    if not drafted.token_ids:
        return None
    survival = tuple(accumulate(spoken(drafted).probabilities, mul))
    nowhere = (0,) * len(SOURCE_NAMES)
    return Candidate(
        drafted.token_ids, nowhere, times=0, age_tokens=0, prior=sum(survival), survival=survival, drafter=drafter
    )
