"""What proposers would say along an output that is known."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from choicespec.decoding.proposer import Proposer
from choicespec.records import Proposal, Request


class Follower(Protocol):
    """A target that can be led along a text."""

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """See ``Target.prefill``."""
        ...

    def follow(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Take in tokens in fewer passes than tokens; at each turn, drafters find what they would if one more token had
        been verified and kept."""
        ...


def drafts_along(
    target: Follower, proposers: Sequence[Proposer], request: Request, output_ids: Sequence[int]
) -> list[list[Proposal]]:
    """Each one's drafts after the first 1, 2, ... tokens of an output but the last.

    A live loop takes in other blocks, which is not bit-equal: a draft may differ from the live one at a numeric tie.
    """
    target.prefill(request.prompt_ids)
    for proposer in proposers:
        proposer.begin(request)
    token_ids = list(request.prompt_ids)
    drafts: list[list[Proposal]] = [[] for _ in proposers]
    followed = target.follow(output_ids[:-1])
    for count, token_id in enumerate(output_ids[:-1], start=1):
        token_ids.append(token_id)
        for own, proposer in zip(drafts, proposers, strict=True):
            own.append(proposer.propose(token_ids, request.max_new_tokens - count - 1))
        next(followed)
    return drafts
