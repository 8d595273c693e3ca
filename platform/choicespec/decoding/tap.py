"""Hidden states for drafters and scorers that read more than the last position's.

Shapes: T tokens, H hidden size, F the hidden states of a tap's layers side by side.
"""

from collections.abc import Mapping, Sequence

import torch


class Tap:
    """What some decoder layers put out at every position that the target kept, from the last read on.

    Between reads it holds views of what the target's passes returned; only ``read`` copies. So a drafter may leave out
    steps and catch up later.

    Args:
        layers: counted from 1, in the order that the drafter wants.

    Attributes:
        texts: how many prompts the target has begun, by which a reader that keeps what it has read knows a new one.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._unread: list[list[torch.Tensor]] = []
        self.texts = 0

    @property
    def waiting(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._unread)

    def restart(self) -> None:
        """Forget what was not read of the last request."""
        self._unread = []
        self.texts += 1

    def keep(self, hidden_TH: Mapping[int, torch.Tensor], num_tokens: int) -> None:
        """Hold the first ``num_tokens`` positions of the target's last pass, the states of each layer given."""
        self._unread.append([hidden_TH[layer][:num_tokens] for layer in self._layers])

    def read(self) -> torch.Tensor:
        """The (T, F) states of the positions kept since the last read, in order; T is 1 or more after each step."""
        states = [torch.cat(layers, dim=-1) for layers in self._unread]
        self._unread = []
        return torch.cat(states)
