"""Quantised targets: weights rounded to a GGUF type as they are loaded, and checkpoints that are stored quantised."""

import json
from importlib.util import find_spec
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

from choicespec.spec.pair import PairSpec, Rounding, TargetSpec

_ROUNDINGS: dict[Rounding, GGMLQuantizationType] = {
    "q4_0": GGMLQuantizationType.Q4_0,
    "q8_0": GGMLQuantizationType.Q8_0,
}
_ON_A_GPU = ("nf4", "fp8")
_ELSEWHERE = ("awq", "nvfp4")


def round_weights(model: Any, rounding: Rounding) -> None:
    """Round every linear layer of the decoder; embedding and LM head stay, as they do in most quantised checkpoints."""
    kind = _ROUNDINGS[rounding]
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            rounded = dequantize(quantize(weight.float().cpu().numpy(), kind), kind)
            module.weight.data = torch.from_numpy(rounded).to(weight)


def stored_as(config: Any) -> str | None:
    """What a checkpoint's weights are stored as, by the names of ``target.quantization``; None is not quantised.

    Args:
        config: the whole configuration, as ``AutoConfig`` reads it.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    fields: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(fields.get("quant_method", "bitsandbytes" if fields.get("load_in_4bit") else "unknown"))
    if method == "bitsandbytes":
        return str(fields.get("bnb_4bit_quant_type", "fp4")) if fields.get("load_in_4bit") else "int8"
    if "nvfp4" in json.dumps(fields, default=str).lower():
        return "nvfp4"  # of compressed-tensors or modelopt, which store other formats too
    return method


def quantization_refusal(pair: PairSpec, config: Any) -> str | None:
    """Why a target's quantisation cannot run, or None."""
    given, stored = pair.target.quantization, stored_as(config)
    if stored is not None and given != stored:
        known = (*_ON_A_GPU, *_ELSEWHERE)
        remedy = (
            f"set it to {stored}" if stored in known else f"give a checkpoint stored plainly, or as {', '.join(known)}"
        )
        return f"the checkpoint's weights are stored as {stored}, but target.quantization={given}; {remedy}"
    if given in _ELSEWHERE:
        return f"it does not compute with {given} weights; vLLM does"
    if given in _ON_A_GPU and pair.gpus == 0:
        return f"{given} weights are computed with on a GPU, but gpus=0; set gpus: 1"
    if given == "nf4" and find_spec("bitsandbytes") is None:
        return (
            "nf4 weights are computed with by the package bitsandbytes, which is missing; run: pip install bitsandbytes"
        )
    return None


def loading_settings(target: TargetSpec, config: Any) -> dict[str, Any]:
    """What ``from_pretrained`` is told of a target that is computed with as it is stored; others need no word."""
    if target.quantization not in _ON_A_GPU:
        return {}
    settings: dict[str, Any] = {"device_map": "cuda"}
    if stored_as(config) is None:
        settings["quantization_config"] = (
            FineGrainedFP8Config()
            if target.quantization == "fp8"
            else BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, target.dtype)
            )
        )
    return settings
