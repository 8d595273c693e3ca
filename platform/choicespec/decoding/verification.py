"""Which part of a draft is kept."""

from collections.abc import Sequence
from itertools import count, takewhile

from choicespec.records import Proposal


def count_accepted(draft_ids: Sequence[int], own_ids: Sequence[int]) -> int:
    """The length of the longest prefix of the draft that equals the target's own choices.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), for greedy decoding.
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft_ids, own_ids, strict=False)))


def accepted_path(draft: Proposal, own_ids: Sequence[int]) -> list[int]:
    """The places in the verified block, anchor first, of what is kept: the longest path of the target's own choices.

    One pass finds it, for parents come before their children, and of the children of one parent only one can be right.

    Source: Miao et al., "SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and
    Verification" (2023), section 4.3, for greedy decoding.

    Args:
        draft: a chain or a tree.
        own_ids: the target's own choice after each token of the block.
    """
    path = [0]
    for place, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents or count(), strict=False), start=1):
        if parent == path[-1] and token_id == own_ids[parent]:
            path.append(place)
    return path


def depths(parents: Sequence[int]) -> list[int]:
    """How many tokens lie between the anchor and each token of a block, the anchor first; see ``Proposal.parents``."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found
