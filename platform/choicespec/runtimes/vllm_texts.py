"""The hidden states of whole texts inside vLLM, whose steps are of some tokens of some requests.

Shapes: T tokens of a step, H hidden size, S numbers of a token's states in all source layers, N candidates, C cosines.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from choicespec.scorer.source_states import StateScale, TextStates


class VllmTexts:
    """The states of the texts of all requests that have not finished.

    Of a step that nobody was told of, states are missing; a request that was preempted begins anew.

    Args:
        states_TH: of each source layer, where a step's are found.
        scale: of the scorer.

    Attributes:
        asked: the request that is proposed for, and the tokens of its text.
    """

    def __init__(self, states_TH: Sequence[torch.Tensor], scale: StateScale) -> None:
        self._states_TH, self._scale = states_TH, scale
        self._texts: dict[str, TextStates] = {}
        self.asked = ("", 0)

    def take_in(self, runner: Any) -> None:
        """After each step, chunks of prompts included: the rows of its requests."""
        for gone in self._texts.keys() - runner.requests.keys():
            del self._texts[gone]
        batch, starts = runner.input_batch, runner.query_start_loc.np
        for row, request_id in enumerate(batch.req_ids):
            rows = slice(int(starts[row]), int(starts[row + 1]))
            if request_id not in self._texts:
                self._texts[request_id] = TextStates(len(self._states_TH), self._scale)
            states_TS = torch.cat([states_TH[rows] for states_TH in self._states_TH], dim=-1)
            self._texts[request_id].put(int(batch.num_computed_tokens_cpu[row]), states_TS)

    def cosines(self, ages_N: NDArray[np.int32]) -> NDArray[np.float32]:
        """(N, C) see ``cosines_at``."""
        request_id, known = self.asked
        return self._texts[request_id].cosines(ages_N, known)
