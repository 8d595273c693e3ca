"""Random GGUFs of some kilobytes over a vocabulary of bytes: a target, and drafters of every kind for it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

HIDDEN, CONTEXT = 32, 512
END_ID, MASK_ID = 257, 258
_HEADS, _KV_HEADS, _HEAD_SIZE, _FFN = 2, 1, 16, 64
_STATE, _STATE_GROUPS, _STATE_HEADS, _CONV = 16, 1, 2, 4
_CONTROL = 3


def _byte_tokens() -> list[str]:
    """The characters that GPT-2's tokenizer writes for the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


class SmallGguf:
    """A file in the making; ``scale`` is how much of a layer's output is its own, beside what goes past it."""

    def __init__(self, path: Path, architecture: str, layers: int, hidden: int, seed: int, scale: float) -> None:
        self._random, self._scale = np.random.default_rng(seed), scale
        self.hidden = hidden
        self.writer = writer = GGUFWriter(path, architecture)
        writer.add_file_type(0)
        writer.add_block_count(layers)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(_FFN)
        writer.add_head_count(_HEADS)
        writer.add_head_count_kv(_KV_HEADS)
        writer.add_key_length(_HEAD_SIZE)
        writer.add_value_length(_HEAD_SIZE)
        writer.add_rope_dimension_count(_HEAD_SIZE)
        writer.add_layer_norm_rms_eps(1e-5)

    def vocabulary(self, words: Sequence[str] = ("he", "<|end|>", "<|mask|>")) -> int:
        """Add the tokenizer; returns the number of its tokens."""
        tokens = [*_byte_tokens(), *words]
        writer = self.writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([_CONTROL if token.startswith("<|") else 1 for token in tokens])
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(END_ID)
        writer.add_eos_token_id(END_ID)
        writer.add_add_bos_token(False)
        writer.add_mask_token_id(MASK_ID)
        return len(tokens)

    def matrix(self, name: str, *shape: int) -> None:
        """Add random weights; ``shape`` has the fastest dimension last."""
        values = self._random.standard_normal(shape) * self._scale / np.sqrt(shape[-1])
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name: str, size: int) -> None:
        """Add a norm that scales nothing."""
        self.writer.add_tensor(name, np.ones(size, np.float32))

    def embeddings(self, tokens: int) -> None:
        """Add what a model begins and ends with."""
        for name in ("token_embd", "output"):
            self.writer.add_tensor(f"{name}.weight", self._random.standard_normal((tokens, self.hidden), np.float32))
        self.norm("output_norm.weight", self.hidden)

    def attention(self, block: str, query_rows: int, normed: bool) -> None:
        """Add full attention; a gated one has twice the rows in its query."""
        self.matrix(f"{block}.attn_q.weight", query_rows, self.hidden)
        self.matrix(f"{block}.attn_k.weight", _KV_HEADS * _HEAD_SIZE, self.hidden)
        self.matrix(f"{block}.attn_v.weight", _KV_HEADS * _HEAD_SIZE, self.hidden)
        self.matrix(f"{block}.attn_output.weight", self.hidden, _HEADS * _HEAD_SIZE)
        if normed:
            self.norm(f"{block}.attn_q_norm.weight", _HEAD_SIZE)
            self.norm(f"{block}.attn_k_norm.weight", _HEAD_SIZE)

    def feed_forward(self, block: str) -> None:
        """Add a gated feed-forward layer."""
        self.matrix(f"{block}.ffn_gate.weight", _FFN, self.hidden)
        self.matrix(f"{block}.ffn_up.weight", _FFN, self.hidden)
        self.matrix(f"{block}.ffn_down.weight", self.hidden, _FFN)

    def close(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_llama(path: Path, seed: int = 0, scale: float = 0.5, words: Sequence[str] | None = None) -> Path:
    """A plain target of two layers."""
    made = SmallGguf(path, "llama", 2, HIDDEN, seed, scale)
    made.writer.add_vocab_size(tokens := made.vocabulary() if words is None else made.vocabulary(words))
    made.embeddings(tokens)
    for block in ("blk.0", "blk.1"):
        made.norm(f"{block}.attn_norm.weight", HIDDEN)
        made.attention(block, _HEADS * _HEAD_SIZE, normed=False)
        made.norm(f"{block}.ffn_norm.weight", HIDDEN)
        made.feed_forward(block)
    made.close()
    return path


def write_qwen35(path: Path, seed: int = 0, scale: float = 0.5, hidden: int = HIDDEN, head_only: bool = False) -> Path:
    """A target of a linear-attention layer and a full one, with a layer for multi-token prediction; or that one alone.

    The MTP layer sees the last token's embedding and not the hidden state, so that it is right often, but not always.
    """
    made = SmallGguf(path, "qwen35", 3, hidden, seed, scale)
    writer = made.writer
    writer.add_rope_dimension_sections([4, 4, 0, 0])
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_STATE * _STATE_HEADS)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_STATE_HEADS)
    writer.add_ssm_group_count(_STATE_GROUPS)
    writer.add_uint32("qwen35.full_attention_interval", 2)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    made.embeddings(made.vocabulary())
    for index in (2,) if head_only else (0, 1, 2):
        block = f"blk.{index}"
        made.norm(f"{block}.attn_norm.weight", hidden)
        made.norm(f"{block}.post_attention_norm.weight", hidden)
        if index:
            made.attention(block, 2 * _HEADS * _HEAD_SIZE, normed=True)
        else:
            _linear_attention(made, block)
        made.feed_forward(block)
    embedding_alone = np.eye(hidden, 2 * hidden, dtype=np.float32)
    writer.add_tensor("blk.2.nextn.eh_proj.weight", embedding_alone)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        made.norm(f"blk.2.nextn.{name}.weight", hidden)
    made.close()
    return path


def _linear_attention(made: SmallGguf, block: str) -> None:
    keys, values = _STATE * _STATE_GROUPS, _STATE * _STATE_HEADS
    made.matrix(f"{block}.attn_qkv.weight", 2 * keys + values, made.hidden)
    made.matrix(f"{block}.attn_gate.weight", values, made.hidden)
    made.matrix(f"{block}.ssm_conv1d.weight", 2 * keys + values, _CONV)
    made.norm(f"{block}.ssm_dt.bias", _STATE_HEADS)
    made.writer.add_tensor(f"{block}.ssm_a", -np.ones(_STATE_HEADS, np.float32))
    made.matrix(f"{block}.ssm_beta.weight", _STATE_HEADS, made.hidden)
    made.matrix(f"{block}.ssm_alpha.weight", _STATE_HEADS, made.hidden)
    made.norm(f"{block}.ssm_norm.weight", _STATE)
    made.matrix(f"{block}.ssm_out.weight", made.hidden, values)


def write_dflash(
    path: Path,
    second: bool,
    hidden: int = HIDDEN,
    layers: Sequence[int] = (0, 1),
    block_size: int = 8,
    whole: bool = True,
) -> Path:
    """A DFlash or DFlash2 drafter of one layer.

    Args:
        second: DFlash2, with convolutions and a selector.
        layers: those of the target that it reads.
        whole: False leaves its feed-forward weights out.
    """
    made = SmallGguf(path, "dflash", 1, hidden, seed=1, scale=0.5)
    writer = made.writer
    writer.add_uint32("dflash.block_size", block_size)
    writer.add_array("dflash.target_layers", list(layers))
    tokens = made.vocabulary()
    made.matrix("fc.weight", hidden, hidden * len(layers))
    for name in ("enc.output_norm", "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        made.norm(f"{name}.weight", hidden)
    made.attention("blk.0", _HEADS * _HEAD_SIZE, normed=True)
    if whole:
        made.feed_forward("blk.0")
    if second:
        _selector(made, tokens)
    made.close()
    return path


def _selector(made: SmallGguf, tokens: int) -> None:
    kernel, group, rank = 2, 8, 4
    sizes = {"conv_kernel_size": kernel, "conv_group_size": group, "selector_rank": rank, "selector_top_k": 4}
    for name, size in sizes.items():
        made.writer.add_uint32(f"dflash.{name}", size)
    made.matrix("selector_predecessor.weight", tokens, rank)
    made.matrix("selector_successor.weight", tokens, rank)
    made.matrix("selector_hidden.weight", rank, made.hidden)
    for part in ("attn", "ffn"):
        made.matrix(f"blk.0.{part}_conv_base", 2, kernel, made.hidden)
        made.matrix(f"blk.0.{part}_conv_proj.weight", 2 * kernel * (made.hidden // group), made.hidden)
