"""vLLM's own drafter beside a candidate set: what it has drafted, and how sure of it it was, as a proposer says it.

Shapes: R requests of a batch, K tokens of a draft, N rows of a pass of the drafter (R, or R * K where one pass drafts
all), H the drafter's hidden size, V its vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from choicespec.records import Proposal, Request

NOTHING = Proposal((), "")


class VllmDrafter:
    """Proposes what vLLM's drafter has drafted at the end of this step. It follows no request.

    Attributes:
        handed: the draft of the request that is proposed for.
    """

    def __init__(self) -> None:
        self.handed = NOTHING
        self._seen_N: list[torch.Tensor] = []  # of this step's passes

    def watch(self, model: Any) -> None:
        """Note how probable the drafter's model finds what it drafts, which is the likeliest token, at every pass.

        vLLM keeps no probability of a greedy draft, and without one all drafts look alike to a union.
        """
        compute_logits = model.compute_logits

        def watched(hidden_NH: torch.Tensor) -> torch.Tensor:
            logits_NV: torch.Tensor = compute_logits(hidden_NH)
            self._seen_N.append(_of_the_likeliest(logits_NV))
            return logits_NV

        model.compute_logits = watched

    def take(self, drafts: Sequence[Sequence[int]]) -> list[Proposal]:
        """A step's drafts, one a request, with the probabilities that were noted meanwhile.

        There are none where the passes are not those of the drafts: near the end of the drafter's context vLLM drafts
        zeros without a pass, and its warm-up makes passes without a draft.
        """
        seen_N, self._seen_N = self._seen_N, []
        if not drafts or sum(map(len, seen_N)) != sum(map(len, drafts)):
            return [Proposal(tuple(draft), "vllm") for draft in drafts]
        seen_RK = torch.stack(seen_N, dim=1).reshape(len(drafts), -1).tolist()
        return [Proposal(tuple(draft), "vllm", tuple(seen_K)) for draft, seen_K in zip(drafts, seen_RK, strict=True)]

    def begin(self, request: Request) -> None:
        """Nothing: vLLM keeps the drafter's cache."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """See ``Proposer.propose``."""
        token_ids, probabilities = self.handed.token_ids[:limit], self.handed.probabilities[:limit]
        return self.handed._replace(token_ids=token_ids, probabilities=probabilities)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing is learnt from outputs."""


def _of_the_likeliest(logits_NV: torch.Tensor) -> torch.Tensor:
    logits_NV = logits_NV.float()
    return (logits_NV.amax(dim=-1) - logits_NV.logsumexp(dim=-1)).exp()
