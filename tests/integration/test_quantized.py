"""Weights that are rounded as they are loaded: the decoder's, by as much as the type says, and no others."""

import pytest
import torch
from choicespec.runtimes.quantized import round_weights
from choicespec.spec.pair import Quantization
from integration.small_checkpoints import LAYERS, small_llama

# Half a step, of 16 and of 256 between -1 and 1, is what a weight of a normal distribution may be off at most.
_MOST_ERROR: dict[Quantization, float] = {"q4_0": 0.15, "q8_0": 0.01}
_LINEARS = LAYERS * 7  # of a Llama layer: four of attention, three of the MLP


def _rounded(quantization: Quantization, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = small_llama().to(dtype)
    round_weights(model, quantization)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def _errors(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each changed weight is off, relative to its size."""
    changed = {name for name in weights if not torch.equal(found[name], weights[name])}
    return {
        name: float((found[name] - weights[name]).float().norm() / weights[name].float().norm()) for name in changed
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoders_linear_layers_are_rounded_and_nothing_else(dtype: torch.dtype) -> None:
    """Fails if a layer is passed over, if embedding, norms or LM head are rounded too, if eight bits lose as much as
    four, or if the weights come back in another dtype."""
    weights = small_llama().to(dtype).state_dict()
    errors = {}
    for quantization, most in _MOST_ERROR.items():
        found = _rounded(quantization, dtype)
        assert {weight.dtype for weight in found.values()} == {dtype}
        errors[quantization] = _errors(found, weights)
        assert all(".layers." in name and "_proj." in name for name in errors[quantization])
        assert len(errors[quantization]) == _LINEARS
        assert max(errors[quantization].values()) < most
    assert all(errors["q8_0"][name] < errors["q4_0"][name] / 4 for name in errors["q4_0"])


def test_a_rounded_weight_has_sixteen_values_a_block() -> None:
    """Fails if the rounding is not the type's: 32 weights of q4_0 are a scale times -8 to 7."""
    for name, weight in _rounded("q4_0", torch.float32).items():
        if "_proj." in name:
            blocks = weight.reshape(-1, 32)
            steps = blocks / (blocks.abs().amax(dim=1, keepdim=True) / 8)
            torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)


def test_an_embedding_that_is_the_lm_head_too_stays() -> None:
    """Fails if tied weights are rounded by way of the LM head."""
    model = small_llama(tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.clone()
    round_weights(model, "q4_0")
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert model.lm_head.weight is model.get_input_embeddings().weight
