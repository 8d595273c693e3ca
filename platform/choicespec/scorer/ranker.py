"""A scorer at work in the loop."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from choicespec.candidates.drafts import as_candidate
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.records import Proposal
from choicespec.scorer.examples import SetArrays, set_arrays
from choicespec.scorer.files import Scorer
from choicespec.scorer.model import Known, survivals
from choicespec.scorer.source_states import OFFSETS, Cosines, source_features
from choicespec.scorer.token_rows import TokenRows


class ScorerRanker:
    """Chooses the candidate with the largest expected accepted length.

    Args:
        scorer: of the pair.
        hidden_state: reads the output of a decoder layer at the token before the anchor, (H,) each.
        cosines: of the text that is decoded, by the candidates' ages, see ``cosines_at``. None where the scorer has no
            source layers, or where nobody keeps the states of a text: candidates are then ranked as ones that have no
            source there.
    """

    def __init__(
        self, scorer: Scorer, hidden_state: Callable[[int], torch.Tensor], cosines: Cosines | None = None
    ) -> None:
        self._net, self._manifest = scorer
        with torch.inference_mode():
            self._rows = TokenRows(self._net.project)
        self._hidden_state = hidden_state
        self._cosines = cosines

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
        known = Known(torch.from_numpy(sets.survivals), torch.from_numpy(self._features(sets)))
        with torch.inference_mode():
            states = [self._hidden_state(layer).float().cpu() for layer in self._manifest.layers]
            tokens = self._rows.tokens(sets.token_ids.clip(min=0).ravel().tolist())
            tokens_PNLD = tokens.view(*sets.token_ids.shape, -1)
            logits = self._net.judge(torch.cat(states)[None], self._rows.anchors([anchor]), tokens_PNLD, known)
            return survivals(logits, torch.from_numpy(sets.lengths))[0]

    def _features(self, sets: SetArrays) -> NDArray[np.float32]:
        """(1, N, F) with those of the candidates' sources, where the scorer reads them."""
        layers = len(self._manifest.source_layers)
        if not layers:
            return sets.features
        ages_N = sets.own_ages[0] if self._cosines is not None else np.zeros_like(sets.own_ages[0])
        cosines_NC = np.zeros((len(ages_N), layers * len(OFFSETS)), np.float32)
        if self._cosines is not None and ages_N.any():
            cosines_NC = self._cosines(ages_N)
        return np.concatenate([sets.features, source_features(cosines_NC[None], ages_N[None])], axis=-1)

    def judge(self, drafter: str) -> Callable[[Proposal, Sequence[int]], Sequence[float]] | None:
        """See ``Ranker.judge``. The network looks at each draft by itself, which has no source in the text to be
        compared; so one that comes after the finite candidates is judged as in one set with them."""
        return partial(self._survival, drafter) if drafter in self._manifest.drafters else None

    def _survival(self, drafter: str, drafted: Proposal, token_ids: Sequence[int]) -> Sequence[float]:
        candidate = as_candidate(drafter, drafted)
        return self.best([candidate], token_ids[-1]).survival if candidate else ()
