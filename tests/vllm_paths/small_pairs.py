"""Small random pairs of the published architectures, in sizes that vLLM has kernels for on the CPU."""

from pathlib import Path
from typing import Any

import torch
from choicespec.drafters.dflash_net import FULL, SLIDING, DFlashNet, DFlashShape
from choicespec.spec.pair import PairSpec
from integration.small_checkpoints import HIDDEN, LAYERS, SPREAD, save_checkpoint, small_hybrid
from integration.small_drafters import (
    LAYER,
    MASK,
    TAPPED,
    VOCABULARY,
    checkpoint_weights,
    save_drafter,
    scattered,
    zlab_config,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

_HEAD = {"head_dim": 32}
_BLOCK = 16  # of the published drafters
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # said, as vLLM's own default is another
_LINEAR_HEADS = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_FULL_LAYER = 1  # of the hybrids, which a head's layer is like


def qwen3(folder: Path) -> PairSpec:
    """Qwen3 with a DFlash drafter, in float32; of one layer, as vLLM's CPU build takes no more."""
    torch.manual_seed(0)
    settings = LAYER | _HEAD | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "initializer_range": SPREAD}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings), dtype=torch.float32).eval()
    target = save_checkpoint(folder / "qwen3", model)
    one = LAYER | _HEAD | {"num_hidden_layers": 1}
    decoder = Qwen3Config(**one, vocab_size=1, layer_types=[FULL])
    shape = DFlashShape(decoder, TAPPED, _BLOCK, MASK, None, {FULL: False, SLIDING: True})
    weights = checkpoint_weights(scattered(DFlashNet(shape)))
    dflash = save_drafter(folder / "dflash", zlab_config(**one, block_size=_BLOCK, rope_parameters=_ROPE), weights)
    return _pair(target, "float32", {"dflash": {"kind": "dflash", "model": str(dflash)}})


def qwen3_5(folder: Path, model_type: str) -> PairSpec:
    """A Qwen3.5 with a head for multi-token prediction of its own, in bfloat16; its DFlash2 is never read on a CPU."""
    model = small_hybrid(model_type, **_LINEAR_HEADS, mtp_num_hidden_layers=1)
    target = save_checkpoint(folder / model_type, model)
    weights = load_file(target / "model.safetensors")
    layer = f"model.layers.{_FULL_LAYER}."
    head = {
        name.replace(layer, "mtp.layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(layer)
    }
    norms = {
        f"mtp.{name}.weight": torch.zeros(HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    head |= norms | {"mtp.fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) * SPREAD}
    save_file(weights | head, target / "model.safetensors", metadata={"format": "pt"})
    drafters = {"mtp": {"kind": "mtp"}, "dflash2": {"kind": "dflash2", "model": str(folder / "dflash2")}}
    return _pair(target, "bfloat16", drafters)


def _pair(target: Path, dtype: str, drafters: dict[str, Any]) -> PairSpec:
    return PairSpec.model_validate({"target": {"model": str(target), "dtype": dtype}, "drafters": drafters})
