"""How many of a drafter's tokens the target accepts, on recorded outputs that it was not trained on."""

import torch

from choicespec.intervals import ratio_of_sums
from choicespec.records import Estimate
from choicespec.scorer.evaluate import decode_path
from choicespec.spec.frozen import Frozen
from choicespec.training.fit import after_anchors
from choicespec.training.sequences import Recordings, TokenSequence
from choicespec.training.trainees import Trainee


class Acceptance(Frozen):
    """What a drafter yields; intervals by bootstrap over requests.

    Attributes:
        task: whose held-out prompts.
        accepted: tokens accepted a position, over all positions of the outputs.
        accepted_on_path: tokens accepted a step, over the positions where a live loop really stands.
        known: the share of the outputs' tokens that the drafter has.
    """

    task: str
    accepted: Estimate
    accepted_on_path: Estimate
    known: float


def judge(trainee: Trainee, task: str, recordings: Recordings) -> Acceptance:
    """Draft at every position of every output."""
    all_positions, on_path = [], []
    known = tokens = 0
    own = trainee.head.target_ids(torch.arange(len(trainee.head.d2t)))
    for chunk in recordings:
        for sequence in chunk:
            output = sequence.token_ids_N[sequence.prompt_tokens :]
            known, tokens = known + int(torch.isin(output, own).sum()), tokens + len(output)
            if len(sequence.anchors):
                accepted = accepted_at(trainee, sequence)
                all_positions.append((float(sum(accepted)), float(len(accepted))))
                path = decode_path(accepted)
                on_path.append((float(sum(accepted[place] for place in path)), float(len(path))))
    return Acceptance(
        task=task,
        accepted=ratio_of_sums(*zip(*all_positions, strict=True)),
        accepted_on_path=ratio_of_sums(*zip(*on_path, strict=True)),
        known=known / max(1, tokens),
    )


def accepted_at(trainee: Trainee, sequence: TokenSequence) -> list[int]:
    """For each anchor of a sequence the draft tokens that are the target's own.

    A place may depend on the true tokens before it: where those are not what was drafted, it no longer counts.
    """
    with torch.inference_mode():
        draft_AK = trainee.logits(sequence, sequence.anchors).argmax(dim=-1)
    tokens_AK, there_AK = after_anchors(sequence, sequence.anchors, trainee.places)
    right_AK = (trainee.head.target_ids(draft_AK) == tokens_AK) & there_AK
    accepted: list[int] = right_AK.cumprod(dim=1).sum(dim=1).tolist()
    return accepted
