"""Tokens as the scorer's network projects them, each projected once: the tokens of a text come again and again.

Shapes: T tokens, R tokens that were seen, D width of the network.
"""

from collections.abc import Callable, Sequence

import torch

Project = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # see ``ScorerNet.project``


class TokenRows:
    """Looks tokens up, and projects those that were never seen.

    Args:
        project: the network's.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._places: dict[int, int] = {}
        self._anchors_RD, self._tokens_RD = project(torch.empty(0, dtype=torch.long))

    def anchors(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(T, D) of tokens as anchors."""
        places = self._find(token_ids)  # first, for it may put another tensor there
        return self._anchors_RD[places]

    def tokens(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(T, D) of tokens as tokens of a candidate."""
        places = self._find(token_ids)
        return self._tokens_RD[places]

    def _find(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(T,) the rows of tokens."""
        if new := [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._places]:
            anchors, tokens = self._project(torch.tensor(new))
            self._places.update(zip(new, range(len(self._places), len(self._places) + len(new)), strict=True))
            self._anchors_RD = torch.cat([self._anchors_RD, anchors])
            self._tokens_RD = torch.cat([self._tokens_RD, tokens])
        return torch.tensor([self._places[token_id] for token_id in token_ids])
