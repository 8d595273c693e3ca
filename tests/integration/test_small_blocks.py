"""The linear layers and the attention for short blocks compute what the library's own compute."""

from collections.abc import Iterator

import pytest
import torch
from choicespec.decoding.grouped_attention import NAME
from choicespec.decoding.small_blocks import SmallBlockLinear, library_kernels, use_small_blocks
from integration.small_checkpoints import small_llama


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many as torch is told to use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 32, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_librarys(rows: int, bias: bool) -> None:
    """A transposed product that mixed up rows, or the parts of the weights, would still have the right shape. Of the 80
    features, three threads have no equal parts."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80, bias=bias)
    x = torch.randn(1, rows, 48)
    with torch.inference_mode():
        expected = layer(x)
        use_small_blocks(layer)
        assert isinstance(layer, SmallBlockLinear)
        torch.testing.assert_close(layer(x), expected)


def test_the_peer_runs_on_the_librarys_own_layers() -> None:
    """Otherwise a comparison with transformers' own generate would compare choicespec with itself."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    use_small_blocks(model)
    kinds = [type(layer) for layer in model]
    assert kinds == [SmallBlockLinear, torch.nn.Linear]
    with library_kernels(model):
        assert {type(layer) for layer in model} == {torch.nn.Linear}
    assert [type(layer) for layer in model] == kinds


def test_the_peer_runs_with_the_librarys_own_attention() -> None:
    """Otherwise the peer is measured with choicespec's attention; or the loop, after the peer, without it."""
    model = small_llama()
    block = torch.arange(9)[None]
    with torch.inference_mode():
        expected = model(block).logits
        use_small_blocks(model)
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(model(block).logits, expected, rtol=1e-4, atol=1e-4)
        with library_kernels(model):
            assert model.config._attn_implementation == "sdpa"
            torch.testing.assert_close(model(block).logits, expected, rtol=0, atol=0)
        assert model.config._attn_implementation == NAME
        with pytest.raises(ZeroDivisionError), library_kernels(model):
            raise ZeroDivisionError
        assert model.config._attn_implementation == NAME


def test_an_attention_that_was_chosen_stays() -> None:
    """Fails if a model that needs another attention than the library's default is given choicespec's."""
    model = small_llama(attn_implementation="eager")
    use_small_blocks(model)
    assert model.config._attn_implementation == "eager"
    with library_kernels(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"
