"""Passes over a block whose logits and cache entries are a plain step's to the last bit, in every precision.

A block's product with a layer's weights may be another kernel than a single token's, and add up in another order. Where
the tokens go through each layer alone (``RowsAlone``), every operation of the target has the shapes and the inputs that
it has in plain steps, and gives the same as long as the same operation on the same numbers does. That saves next to
nothing over plain steps.

Where the processor allows it, ``attention_alone`` is as exact and much cheaper. docs/decisions/0015 has the costs.

Shapes: B batch, T tokens of a block, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch


class RowsAlone:
    """While it is entered, a model's decoder layers, final norm and LM head take the tokens of a block one by one.

    Args:
        model: whose layers are of full attention alone: token t finds those before it in the cache.
    """

    def __init__(self, model: Any) -> None:
        self._entered = False
        decoder = model.get_decoder()
        for module in (*decoder.layers, decoder.norm, model.get_output_embeddings()):
            module.forward = self._by_rows(module)

    def __enter__(self) -> None:
        self._entered = True

    def __exit__(self, *raised: object) -> None:
        self._entered = False

    def _by_rows(self, module: torch.nn.Module) -> Callable[..., torch.Tensor]:
        def by_rows(hidden_BTH: torch.Tensor, **settings: Any) -> torch.Tensor:
            forward = partial(type(module).forward, module)  # by its class, which ``library_kernels`` may exchange
            if not self._entered:
                return cast(torch.Tensor, forward(hidden_BTH, **settings))
            # a copy lies in memory as a plain step's tensor does, on which a kernel may depend
            rows = [
                forward(hidden_BTH[:, row : row + 1].clone(), **_of_row(settings, row))
                for row in range(hidden_BTH.shape[1])
            ]
            return torch.cat(rows, dim=1)

        return by_rows


def _of_row(settings: dict[str, Any], row: int) -> dict[str, Any]:
    """What a layer is told in a plain step: one token's position, and no mask since it sees all of the cache.

    The norm and the LM head are told nothing.
    """
    found = dict(settings)
    if "attention_mask" in settings:
        found["attention_mask"] = None
    if settings.get("position_ids") is not None:
        found["position_ids"] = settings["position_ids"][..., row : row + 1]
    if settings.get("position_embeddings") is not None:
        found["position_embeddings"] = tuple(part[:, row : row + 1].clone() for part in settings["position_embeddings"])
    return found
