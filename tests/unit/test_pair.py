"""Pairs: how a target's precision is named, and which there are."""

import pytest
from choicespec.spec.pair import PairSpec, TargetSpec
from pydantic import ValidationError


@pytest.mark.parametrize(
    ("target", "precision"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"quantization": "q8_0"}, "q8_0 float32"),
        ({"dtype": "bfloat16", "quantization": "q4_0"}, "q4_0 bfloat16"),
    ],
)
def test_precision_is_the_dtype_and_the_quantisation(target: dict[str, str], precision: str) -> None:
    """Fails if a quantised target, in a table or as a recording's identity, looks like the one it was rounded from."""
    pair = PairSpec.model_validate({"target": {"model": "m", **target}})
    assert pair.target.precision == precision
    assert pair.label == f"m {precision}"


@pytest.mark.parametrize("quantization", ["q4_1", "Q4_0", "int8", "", 4])
def test_an_unknown_quantisation_is_refused_with_the_known_ones(quantization: object) -> None:
    """Fails if a mistyped type leaves the weights as they are, so that a whole precision is measured twice."""
    with pytest.raises(ValidationError, match="'q4_0', 'q8_0', 'nf4', 'fp8', 'awq' or 'nvfp4'"):
        TargetSpec.model_validate({"model": "m", "quantization": quantization})
