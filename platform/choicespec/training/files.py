"""A trained drafter on disk, in the format of the package speculators, version 0.9: config.json and safetensors.

Embedding and LM head are the target's and not stored; ``d2t`` and ``t2d`` say which of its tokens a drafter has.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from choicespec.drafters.checkpoint import SPECULATORS_TYPE
from choicespec.drafters.dflash_net import DFlashNet
from choicespec.drafters.head import OWN_TOKENS
from choicespec.drafters.mtp_net import SPECULATORS_NAMES, MtpNet

_FORMAT = "0.9.0"  # of speculators
DESCRIPTION = "training.json"


def save_dflash(
    folder: Path, net: DFlashNet, weights: Mapping[str, torch.Tensor], target: Any, description: Mapping[str, Any]
) -> None:
    """Write a DFlash drafter.

    Args:
        folder: is made.
        net: says the sizes.
        weights: by the network's names.
        target: the configuration of its target.
        description: what it was trained on, and its figures; for people.
    """
    shape = net.shape
    config = {
        "architectures": ["DFlashSpeculator"],
        "draft_vocab_size": shape.draft_vocab_size,
        "block_size": shape.block_length,
        "aux_hidden_state_layer_ids": list(shape.layers),
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        **_common("dflash", shape.block_length - 1, shape.decoder, target),
    }
    named = {name.removeprefix("decoder."): tensor for name, tensor in weights.items() if not name.startswith("own.")}
    _save(folder, config, named | _tokens(weights, target.vocab_size), description)


def save_mtp(
    folder: Path,
    net: MtpNet,
    num_draft_tokens: int,
    target: Any,
    description: Mapping[str, Any],
) -> None:
    """Write a head for multi-token prediction; see ``save_dflash``.

    ``d2t`` is choicespec's own there: the package reads such a head as one over the whole vocabulary.
    """
    config = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        **_common("mtp", num_draft_tokens, net.decoder.config, target),
    }
    named, weights = {}, net.state_dict()
    for name, tensor in weights.items():
        if not name.startswith("own."):
            own = next(own for own in SPECULATORS_NAMES if name.startswith(own))
            named[SPECULATORS_NAMES[own] + name.removeprefix(own)] = tensor
    _save(folder, config, named | _tokens(weights, target.vocab_size), description)


def _common(kind: str, num_draft_tokens: int, layer: Any, target: Any) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    return {
        SPECULATORS_TYPE: kind,
        "speculators_version": _FORMAT,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": target.architectures or []},
        },
        "transformer_layer_config": layer.to_diff_dict()
        | {"model_type": layer.model_type, "vocab_size": target.vocab_size},
        "dtype": "bfloat16",
        "transformers_version": version("transformers"),
    }


def _tokens(weights: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    d2t = weights[OWN_TOKENS]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return {"d2t": d2t, "t2d": t2d}


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], description: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in weights.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
