"""Weights rounded to a GGUF type as they are loaded: a quantised target whose products run in the pair's dtype."""

from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from choicespec.spec.pair import Quantization

_TYPES = {"q4_0": GGMLQuantizationType.Q4_0, "q8_0": GGMLQuantizationType.Q8_0}


def round_weights(model: Any, quantization: Quantization) -> None:
    """Round every linear layer of the decoder; embedding and LM head stay, as they do in most quantised checkpoints."""
    kind = _TYPES[quantization]
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            rounded = dequantize(quantize(weight.float().cpu().numpy(), kind), kind)
            module.weight.data = torch.from_numpy(rounded).to(weight)
