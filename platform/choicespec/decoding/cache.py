"""A key-value cache that is written in place and rolled back by forgetting its tail.

Shapes: B batch (always 1), G key-value heads, T tokens, C capacity in tokens, D head size, N places of a block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from choicespec.decoding.linear_attention import GatedDeltaState, record_rules, roll_back

_SPARE_TOKENS = 256


class _RollbackLayer(CacheLayerMixin):
    """One layer's keys and values in a preallocated buffer (B, G, C, D), of which the first ``length`` tokens count.

    transformers' own dynamic layer copies the whole cache at every step; this one copies the new tokens alone.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._allocate(key_states, value_states, key_states.shape[-2] + _SPARE_TOKENS)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, G, T, D) keys and values; return views of all that count."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            keys, values = self.keys, self.values
            self._allocate(key_states, value_states, 2 * end)
            self.keys[:, :, :start], self.values[:, :, :start] = keys[:, :, :start], values[:, :, :start]
        self.keys[:, :, start:end], self.values[:, :, start:end] = key_states, value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _allocate(self, key_states: torch.Tensor, value_states: torch.Tensor, capacity: int) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], capacity, key_states.shape[-1]))
        self.values = value_states.new_empty((*value_states.shape[:2], capacity, value_states.shape[-1]))

    def gather(self, start: int, places_N: torch.Tensor) -> None:
        """Write the entries at ``start`` plus each place over those from ``start`` on."""
        for entries in (self.keys, self.values):
            entries[:, :, start : start + len(places_N)] = entries[:, :, start + places_N]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # transformers' word for: no bound

    def get_max_cache_shape(self) -> int:
        return -1


class RollbackCache(Cache):
    """A cache of full-attention and Gated DeltaNet layers; its buffers are reused from one request to the next.

    Args:
        model: whose layers it is for.

    Attributes:
        can_be_cut: to any length, not only by tokens of the last block.
    """

    def __init__(self, model: Any) -> None:
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        if "linear_attention" in kinds:
            super().__init__(
                layers=[GatedDeltaState() if kind == "linear_attention" else _RollbackLayer() for kind in kinds]
            )
            self._rule = record_rules(model)
        else:
            super().__init__(layer_class_to_replicate=_RollbackLayer)
        self.can_be_cut = "linear_attention" not in kinds

    def keep(self, length: int) -> None:
        """Forget every token after the first ``length``; of Gated DeltaNet layers, only the last block's can go."""
        states = [layer for layer in self.layers if isinstance(layer, GatedDeltaState)]
        for layer in self.layers:
            if isinstance(layer, _RollbackLayer):
                layer.length = length
        if states:
            roll_back(states, length, self._rule)

    def gather(self, start: int, places: Sequence[int]) -> None:
        """Move the entries of some tokens of a block, which began at ``start``, to its front; only where
        ``can_be_cut``."""
        assert self.can_be_cut, "a tree is refused where a layer's state cannot follow one of its paths"
        places_N = torch.tensor(places, device=self.layers[0].keys.device)
        for layer in self.layers:
            assert isinstance(layer, _RollbackLayer)
            layer.gather(start, places_N)
