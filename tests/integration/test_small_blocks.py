"""The linear layers for short blocks compute what the library's own compute."""

import pytest
import torch
from choicespec.decoding.small_blocks import SmallBlockLinear, library_kernels, use_small_blocks


@pytest.mark.parametrize("rows", [1, 2, 9, 64, 65])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_librarys(rows: int, bias: bool) -> None:
    """A transposed or padded product that mixed up rows would still have the right shape."""
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
