"""Attention for a handful of new tokens on the CPU, without copies of the cache.

With grouped queries and a mask, the library's path writes every key and value out again for each query head of its
group, at every step. One request goes through the fused kernel, which can do without; several at once, for which that
kernel is slow, have the queries of a group as the rows of one product with the keys as they lie (docs/lab-notes.md).

Shapes: B batch, T new tokens, C tokens in the cache, Q query heads, G key-value heads, D head size.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "choicespec_grouped"
_MOST_TOKENS = 32  # a prompt's own pass is better off with the library's kernel


def grouped_attention(
    module: torch.nn.Module,
    query_BQTD: torch.Tensor,
    key_BGCD: torch.Tensor,
    value_BGCD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer; returns (B, T, Q, D).

    A mask is boolean or additive, of shape (B, 1, T, C); without one, T is 1 or the pass is a prompt's own.
    """
    batch, heads, tokens, size = query_BQTD.shape
    if batch == 1 and others.get("position_bias") is None:
        causal = attention_mask is None and tokens > 1
        output = torch.nn.functional.scaled_dot_product_attention(
            query_BQTD, key_BGCD, value_BGCD, attention_mask, scale=scaling, is_causal=causal, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None
    prompt = tokens > _MOST_TOKENS or (attention_mask is None and tokens > 1)
    if prompt or others.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(
            module, query_BQTD, key_BGCD, value_BGCD, attention_mask, scaling=scaling, **others
        )
        return output, None
    groups = key_BGCD.shape[1]
    grouped = query_BQTD.reshape(batch, groups, heads // groups * tokens, size)
    scores = (grouped @ key_BGCD.transpose(-1, -2)).view(batch, groups, heads // groups, tokens, -1)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        mask = attention_mask[:, :, None]
        # a finite number: a padding token attends to nothing, and a row of -inf would become NaN
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1).view(batch, groups, heads // groups * tokens, -1)
    output = (weights @ value_BGCD).view(batch, heads, tokens, size)
    return output.transpose(1, 2).contiguous(), None


def attention_of(model: Any) -> str:
    """The name of a model's attention; transformers has no public way to read it."""
    return str(model.config._attn_implementation)


def set_attention(model: Any, name: str) -> None:
    """Have a model's layers attend by the function of that name from now on."""
    model.set_attn_implementation(name)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
