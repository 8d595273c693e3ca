"""What a proposer would say along an output that is known."""

from collections.abc import Sequence

from choicespec.decoding.proposer import Proposer
from choicespec.decoding.target import Target
from choicespec.records import Proposal, Request


def drafts_along(target: Target, proposer: Proposer, request: Request, output_ids: Sequence[int]) -> list[Proposal]:
    """The drafts after the first 1, 2, ... tokens of an output but the last, which the target takes in one by one.

    A live loop takes in blocks, which is not bit-equal: a draft may differ from the live one at a numeric tie.
    """
    target.prefill(request.prompt_ids)
    proposer.begin(request)
    token_ids = list(request.prompt_ids)
    drafts = []
    for count, token_id in enumerate(output_ids[:-1], start=1):
        token_ids.append(token_id)
        drafts.append(proposer.propose(token_ids, request.max_new_tokens - count - 1))
        target.verify([token_id])
        target.keep(1)
    return drafts
