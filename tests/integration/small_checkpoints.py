"""Targets of a few thousand random weights, which decide in milliseconds and never the same thing for long."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

LAYERS = 3
HIDDEN = 64
# Large enough for sharp attention and clear choices: with the library's own 0.02 every position looks alike.
SPREAD = 0.3


def small_llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama with grouped queries in float32, in evaluation mode, the same for the same seed."""
    settings = {
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": SPREAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(settings | changes)), dtype=torch.float32).eval()


_HYBRID = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": SPREAD,
}
_MLP = {"intermediate_size": 128}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRIDS = {"qwen3_5_text": _MLP, "qwen3_5_moe_text": _EXPERTS, "qwen3_next": _EXPERTS}


def hybrid_settings(model_type: str) -> dict[str, Any]:
    """The configuration of a target with Gated DeltaNet layers beside full attention."""
    return _HYBRID | HYBRIDS[model_type]


def small_hybrid(model_type: str = "qwen3_5_text", seed: int = 0, **changes: Any) -> Any:
    """A target with Gated DeltaNet layers in float32, in evaluation mode, the same for the same seed."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(hybrid_settings(model_type) | changes))
    return with_memory(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def with_memory(model: Any) -> Any:
    """A model whose recurrent states last for tens of tokens: as the library makes them, they forget within one."""
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            weights.data.uniform_(-4.0, -2.0)
    return model


def save_checkpoint(folder: Path, model: Any, max_shard_size: str = "1GB", words: tuple[str, ...] = ()) -> Path:
    """A folder with a model and a tokenizer of bytes, as ``from_pretrained`` reads it.

    Args:
        folder: is made.
        model: as ``small_llama`` makes it.
        max_shard_size: larger weights lie in several files.
        words: tokens of the vocabulary beside the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
