"""Drafters of a few thousand random weights for the targets in ``small_checkpoints``, and checkpoints of them."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from choicespec.drafters.dflash2 import DFlash2Net
from choicespec.drafters.dflash_net import FULL, SLIDING, DFlashNet, DFlashShape
from choicespec.drafters.mtp_net import MtpNet
from choicespec.spec.pair import DrafterSpec, PairSpec, TargetSpec
from integration.small_checkpoints import HIDDEN, SPREAD, save_checkpoint, small_llama
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

# The parts of a head's network, to their names in a target's own checkpoint.
NATIVE = {
    "fc.": "mtp.fc.",
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "decoder.norm.": "mtp.norm.",
    "decoder.layers.": "mtp.layers.",
}
VOCABULARY, MASK, BLOCK = 512, 500, 5
TAPPED = (1, 3)
WINDOW = {"layer_types": [FULL, SLIDING], "sliding_window": 6, "use_sliding_window": True}
SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def dflash_shape(**changes: Any) -> DFlashShape:
    """Two layers, the second of which attends to a window."""
    decoder = Qwen3Config(**LAYER, **WINDOW, vocab_size=1)
    shape = DFlashShape(decoder, TAPPED, BLOCK, MASK, None, {FULL: False, SLIDING: True})
    return shape._replace(**changes)


def dflash_net(**changes: Any) -> DFlashNet:
    return scattered(DFlashNet(dflash_shape(**changes)))


def dflash2_net(**changes: Any) -> DFlash2Net:
    return scattered(DFlash2Net(dflash_shape(**changes), VOCABULARY, SIZES))


def mtp_net() -> MtpNet:
    config = {**LAYER, "num_hidden_layers": 1, "vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
    return scattered(MtpNet(LlamaConfig(**config)))


Net = TypeVar("Net", bound=torch.nn.Module)


def scattered(net: Net) -> Net:
    """The net with random weights, large enough for each draft to depend on all of them; the same every time."""
    torch.manual_seed(1)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=SPREAD)
    return net.eval()


def save_drafter(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A folder with a config.json and one file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def zlab_config(**changes: Any) -> dict[str, Any]:
    """As z-lab's checkpoints have it: taps counted from 0."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **LAYER,
        "vocab_size": VOCABULARY,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in TAPPED]},
        **changes,
    }


def speculators_config(**changes: Any) -> dict[str, Any]:
    """As the package speculators has it: taps counted from 1."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {"model_type": "qwen3", **LAYER, "vocab_size": VOCABULARY},
        "draft_vocab_size": VOCABULARY,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPPED),
        "mask_token_id": MASK,
        **changes,
    }


def checkpoint_weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A DFlash network's tensors by the names of its checkpoints."""
    return {name.removeprefix("decoder.").removeprefix("own."): tensor for name, tensor in net.state_dict().items()}


def renamed(net: torch.nn.Module, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """A network's tensors by other names, given the beginnings of both."""
    weights = {}
    for name, tensor in net.state_dict().items():
        own = next(own for own in names if name.startswith(own))
        weights[names[own] + name.removeprefix(own)] = tensor
    return weights


def save_pair(folder: Path) -> PairSpec:
    """A small target that carries a head, and both block drafters beside it."""
    model = small_llama(intermediate_size=LAYER["intermediate_size"])  # a head's layer is as the target's
    target = save_checkpoint(folder / "target", model)
    weights = load_file(target / "model.safetensors") | renamed(mtp_net(), NATIVE)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    dflash = save_drafter(folder / "dflash", zlab_config(**WINDOW), checkpoint_weights(dflash_net()))
    config = speculators_config(speculators_model_type="dflash2", sliding_window_non_causal=False, **SIZES)
    config["transformer_layer_config"] |= WINDOW
    dflash2 = save_drafter(folder / "dflash2", config, checkpoint_weights(dflash2_net()))
    drafters = {
        "dflash": DrafterSpec(kind="dflash", model=str(dflash)),
        "dflash2": DrafterSpec(kind="dflash2", model=str(dflash2)),
        "mtp": DrafterSpec(kind="mtp"),
    }
    return PairSpec(target=TargetSpec(model=str(target)), drafters=drafters)
