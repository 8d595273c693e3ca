"""Passes over a block that are exact where only attention takes the block's tokens one by one.

Some processors compute each row of a product independently of how many rows there are; bfloat16 in AMX tiles is such a
case. Then only attention, whose shapes grow with the context, would give a block other bits than plain steps. Whether
that is so here is tried on the model itself; where it is not, ``rows_alone`` has the way that holds everywhere.

Shapes: B batch, T tokens of a block, V vocabulary, Q query heads, G key-value heads, C tokens in the cache, D head
size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.grouped_attention import attention_of, set_attention

_TRIED_AFTER = 40  # tokens; a longer context changes the shapes of attention alone, which takes single tokens
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configurations call them


class AttentionAlone:
    """While it is entered, a model's attention takes the tokens of a block one by one, and all else takes the block.

    Args:
        model: of full attention alone, with an attention that ``independent_rows`` can tell.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._plain = model, attention_of(model)
        self._by_rows = f"choicespec_by_rows_{self._plain}"
        AttentionInterface.register(self._by_rows, partial(_attention_by_rows, ALL_ATTENTION_FUNCTIONS[self._plain]))
        AttentionMaskInterface.register(self._by_rows, _no_mask)

    def __enter__(self) -> None:
        set_attention(self._model, self._by_rows)

    def __exit__(self, *raised: object) -> None:
        set_attention(self._model, self._plain)


def _attention_by_rows(
    of_one: Callable[..., tuple[torch.Tensor, Any]],
    module: torch.nn.Module,
    query_BQTD: torch.Tensor,
    key_BGCD: torch.Tensor,
    value_BGCD: torch.Tensor,
    attention_mask: None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Each token's attention as a plain step's: over the cache up to itself, without a mask. Returns (B, T, Q, D)."""
    tokens = query_BQTD.shape[2]
    before = key_BGCD.shape[2] - tokens
    rows = []
    for row in range(tokens):
        seen = before + row + 1
        query_BQ1D = query_BQTD[:, :, row : row + 1].clone()
        rows.append(of_one(module, query_BQ1D, key_BGCD[:, :, :seen], value_BGCD[:, :, :seen], None, **settings)[0])
    return torch.cat(rows, dim=1), None


def _no_mask(*described: Any, **settings: Any) -> None:
    """A single token sees all of the cache, itself last."""


def independent_rows(model: Any, rows_alone: AbstractContextManager[None], most: int) -> int:
    """The longest block, of at most ``most`` tokens, up to which ``AttentionAlone`` gives plain steps' bits.

    One block is computed by rows, and each of its beginnings with attention alone by rows; all logits and cache entries
    are compared. Products and norms have shapes that depend on the number of tokens alone, so that this tries all of
    them; 1 where a router sorts the tokens to experts, whose shapes depend on the text, or attention cannot be told.

    Args:
        model: in evaluation mode, of full attention alone.
        rows_alone: in which the same model computes as plain steps do.
        most: tokens.
    """
    config = model.config.get_text_config()
    if attention_of(model) not in ALL_ATTENTION_FUNCTIONS or any(getattr(config, name, None) for name in _EXPERTS):
        return 1
    ids = torch.randint(config.vocab_size, (_TRIED_AFTER + most,), generator=torch.Generator().manual_seed(0))
    prompt_ids, block_ids = ids[:_TRIED_AFTER].tolist(), ids[_TRIED_AFTER:].tolist()
    cache = RollbackCache(model)
    _pass(model, cache, prompt_ids)
    expected, by_rows = _block_pass(model, cache, block_ids, rows_alone), AttentionAlone(model)
    for tokens in range(2, most + 1):
        found = _block_pass(model, cache, block_ids[:tokens], by_rows)
        if not all(torch.equal(one, other[:, :tokens]) for one, other in zip(found, expected, strict=True)):
            return tokens - 1
    return most


def _pass(model: Any, cache: RollbackCache, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits_BTV: torch.Tensor = model(
            torch.tensor([token_ids], device=model.device), past_key_values=cache, use_cache=True
        ).logits
    return logits_BTV


def _block_pass(
    model: Any, cache: RollbackCache, block_ids: Sequence[int], way: AbstractContextManager[None]
) -> list[torch.Tensor]:
    """A block's logits and cache entries, tokens second; the cache forgets the block."""
    with way:
        logits_BTV = _pass(model, cache, block_ids)
    written = slice(_TRIED_AFTER, _TRIED_AFTER + len(block_ids))
    entries = [part[:, :, written].transpose(1, 2).clone() for one in cache.layers for part in (one.keys, one.values)]
    cache.keep(_TRIED_AFTER)
    return [logits_BTV, *entries]
