"""A scorer at work in the loop."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from choicespec.candidates.drafts import as_candidate
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.records import Proposal
from choicespec.scorer.examples import set_arrays
from choicespec.scorer.files import Scorer
from choicespec.scorer.model import Batch, survivals


class ScorerRanker:
    """Chooses the candidate with the largest expected accepted length.

    Args:
        scorer: of the pair.
        hidden_state: reads the output of a decoder layer at the token before the anchor, (H,) each.
    """

    def __init__(self, scorer: Scorer, hidden_state: Callable[[int], torch.Tensor]) -> None:
        self._net, self._manifest = scorer
        self._hidden_state = hidden_state

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        """See ``Ranker.best``."""
        survivals_NL = self._survivals(candidates, anchor)
        best = int(survivals_NL.sum(dim=-1).argmax())
        return Ranked(candidates[best], survivals_NL[best, : len(candidates[best].token_ids)].tolist())

    def every(self, candidates: Sequence[Candidate], anchor: int) -> list[Ranked]:
        """See ``Ranker.every``."""
        survivals = self._survivals(candidates, anchor).tolist()
        return [Ranked(one, own[: len(one.token_ids)]) for one, own in zip(candidates, survivals, strict=True)]

    def _survivals(self, candidates: Sequence[Candidate], anchor: int) -> torch.Tensor:
        """(N, L) probabilities that each prefix of each candidate is accepted."""
        longest = max(len(candidate.token_ids) for candidate in candidates)
        sets = set_arrays([candidates], len(candidates), longest, list(self._manifest.drafters))
        states = [self._hidden_state(layer).float().cpu() for layer in self._manifest.layers]
        batch = Batch(
            torch.cat(states)[None],
            torch.tensor([anchor]),
            torch.from_numpy(sets.token_ids.astype(np.int64)),
            torch.from_numpy(sets.survivals),
            torch.from_numpy(sets.features),
            torch.from_numpy(sets.lengths.astype(np.int64)),
        )
        with torch.inference_mode():
            return survivals(self._net(batch), batch.lengths_PN)[0]

    def judge(self, drafter: str) -> Callable[[Proposal, Sequence[int]], Sequence[float]] | None:
        """See ``Ranker.judge``. The network looks at each candidate by itself, so that a draft that comes after the
        finite candidates is judged as in one set with them."""
        return partial(self._survival, drafter) if drafter in self._manifest.drafters else None

    def _survival(self, drafter: str, drafted: Proposal, token_ids: Sequence[int]) -> Sequence[float]:
        candidate = as_candidate(drafter, drafted)
        return self.best([candidate], token_ids[-1]).survival if candidate else ()
