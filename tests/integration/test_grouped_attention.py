"""Attention over few new tokens, without copies of the cache, is the library's own attention."""

from typing import Literal, NamedTuple

import pytest
import torch
from choicespec.decoding.grouped_attention import grouped_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

_SIZE = 16
_CACHED = 40  # tokens before the new ones
_SCALING = 0.3  # not the default, which is 1 / sqrt(16)

Mask = Literal["boolean", "additive", "none"]


class Layer(torch.nn.Module):
    """What the library's functions ask of the layer that calls them."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = heads // groups
        self.is_causal = True


class Inputs(NamedTuple):
    """One call, as transformers makes it."""

    layer: Layer
    query_BQTD: torch.Tensor
    key_BGCD: torch.Tensor
    value_BGCD: torch.Tensor
    mask: torch.Tensor | None


def _inputs(tokens: int, batch: int, heads: int, groups: int, mask: Mask) -> Inputs:
    """Random ones. Each row of a batch has padding of its own before its text, and each new token sees those before it.

    Without a mask, one token sees all; several are a prompt's own pass, so that nothing is cached.
    """
    torch.manual_seed(0)
    length = tokens if mask == "none" and tokens > 1 else _CACHED + tokens
    query = torch.randn(batch, tokens, heads, _SIZE).transpose(1, 2)  # the layout that a layer makes
    keys, values = torch.randn(2, batch, groups, length + 7, _SIZE)[:, :, :, :length]  # a buffer larger than its text
    sees = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens).repeat(batch, 1, 1, 1)
    for row in range(batch):
        sees[row, :, :, : 5 * row] = False
    additive = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    masks = {"boolean": sees, "additive": additive, "none": None}
    return Inputs(Layer(heads, groups), query, keys, values, masks[mask])


@pytest.mark.parametrize("tokens", [1, 2, 9, 32, 33])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (6, 3), (3, 3)])
@pytest.mark.parametrize("mask", ["boolean", "additive", "none"])
def test_the_output_is_the_librarys(tokens: int, batch: int, heads: int, groups: int, mask: Mask) -> None:
    """Fails if query heads meet another group's keys, if rows of a group are mixed up, or if a mask is left out."""
    inputs = _inputs(tokens, batch, heads, groups, mask)
    for scaling in (None, _SCALING):
        expected, _ = sdpa_attention_forward(*inputs, scaling=scaling)
        found, weights = grouped_attention(*inputs, scaling=scaling)
        assert weights is None
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_output_is_that_of_attention_written_out(tokens: int) -> None:
    """Fails if both fast ways are wrong alike."""
    inputs = _inputs(tokens, batch=3, heads=6, groups=3, mask="additive")
    expected, _ = eager_attention_forward(*inputs, scaling=_SCALING)
    torch.testing.assert_close(grouped_attention(*inputs, scaling=_SCALING)[0], expected)


def test_wrong_grouping_is_caught() -> None:
    """The planted fault: heads 0, 3; 1, 4; 2, 5 are taken for groups, not 0, 1; 2, 3; 4, 5. Every head that meets
    another group's keys must differ, and no other."""
    inputs = _inputs(tokens=9, batch=3, heads=6, groups=3, mask="boolean")
    order = [0, 3, 1, 4, 2, 5]
    faulty = torch.empty(3, 9, 6, _SIZE)
    faulty[:, :, order], _ = grouped_attention(*inputs._replace(query_BQTD=inputs.query_BQTD[:, order]))
    expected, _ = sdpa_attention_forward(*inputs)
    same = [head for head in range(6) if torch.allclose(faulty[:, :, head], expected[:, :, head], atol=1e-2)]
    assert same == [0, 5]


@pytest.mark.parametrize("mask", ["boolean", "additive"])
def test_a_token_that_sees_nothing_spoils_nothing(mask: Mask) -> None:
    """Fails if padding, of which each token of a batch's prompts sees nothing, becomes NaN: in the next layer that is a
    key and a value, and 0 * NaN is NaN for every token after it."""
    inputs = _inputs(tokens=9, batch=3, heads=6, groups=3, mask=mask)
    assert inputs.mask is not None
    hidden = False if mask == "boolean" else torch.finfo(torch.float32).min
    inputs.mask[1, :, :4] = hidden
    expected, _ = sdpa_attention_forward(*inputs)
    found, _ = grouped_attention(*inputs)
    assert torch.isfinite(found).all()
    sees = torch.ones(3, 9, dtype=torch.bool)
    sees[1, :4] = False
    torch.testing.assert_close(found[sees], expected[sees])
