"""Which part of a draft is kept."""

from collections.abc import Sequence
from itertools import takewhile


def count_accepted(draft_ids: Sequence[int], own_ids: Sequence[int]) -> int:
    """The length of the longest prefix of the draft that equals the target's own choices.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), for greedy decoding.
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft_ids, own_ids, strict=False)))
