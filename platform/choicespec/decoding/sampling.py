"""How the target chooses its own tokens: the likeliest, or one drawn from its distribution.

The loop keeps a draft's token where the target's own choice is that token. With a choice y drawn from the target's
distribution p, a deterministic draft x is kept with probability p(x), and where it is not, y is distributed as p
without x, renormalised: the rejection rule of speculative sampling (Leviathan et al. 2023, section 2.3) for a draft of
probability one. What is drawn at a position depends on nothing but the seed, the position and the target's logits
there, so every method also gives the very tokens that plain decoding gives with the same seed.

Shapes: T tokens of a block, V vocabulary.
"""

import hashlib
from collections.abc import Sequence

import torch

from choicespec.records import Sampling


def greedy(logits_TV: torch.Tensor, positions: Sequence[int]) -> list[int]:
    """The likeliest token of each row."""
    own_ids: list[int] = logits_TV.argmax(dim=-1).tolist()
    return own_ids


class Sampler:
    """Draws a token a row, by the exponential race: the least of E / p, with E exponential, is distributed as p."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def __call__(self, logits_TV: torch.Tensor, positions: Sequence[int]) -> list[int]:
        """One token a row, each for a place of the text; on a tree, several may be for the same."""
        scaled_TV = logits_TV.double() / self._sampling.temperature
        log_p_TV = _nucleus(scaled_TV, self._sampling.top_p)
        log_race_TV = torch.stack([self._log_exponentials(position, log_p_TV.shape[-1]) for position in positions])
        return greedy(log_p_TV - log_race_TV.to(log_p_TV.device), positions)

    def _log_exponentials(self, position: int, size: int) -> torch.Tensor:
        """(V,) logarithms of exponential variables that belong to one place of the text."""
        digest = hashlib.sha256(f"{self._sampling.seed}:{position}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return torch.empty(size, dtype=torch.float64).exponential_(generator=generator).log()


def _nucleus(scaled_TV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits with all but the fewest likeliest tokens, which together have probability ``top_p``, at minus infinity."""
    if top_p >= 1:
        return scaled_TV
    sorted_TV, order_TV = scaled_TV.sort(dim=-1, descending=True)
    p_TV = sorted_TV.softmax(dim=-1)
    outside_TV = p_TV.cumsum(dim=-1) - p_TV >= top_p  # the token that reaches top_p is inside
    return scaled_TV.masked_fill(outside_TV.scatter(-1, order_TV, outside_TV), float("-inf"))
