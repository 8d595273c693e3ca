"""The network of DFlash, and what its two checkpoint formats say of it.

The hidden states of the target's tapped layers, projected and normed, are the context's keys and values in each of a
few Qwen3 layers. A block of the anchor and mask tokens attends to the context and to all of itself, and comes out as
one hidden state a place, for the target's LM head.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036); names of tensors as in the
checkpoints of z-lab and of the package speculators.

Shapes: T context tokens, Q places of one or more blocks, K drafted places, F numbers tapped at a position, H hidden
size, C keys, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3Model
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from choicespec.drafters.checkpoint import (
    SPECULATORS_TYPE,
    TargetShape,
    check_fits,
    field,
    layer_config,
    read_config,
)
from choicespec.drafters.head import DraftHead, LmHead, likeliest, most_likely
from choicespec.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
# What a draft layer takes from its config; the rest (vocabulary, tokens) belongs to the target.
_LAYER_FIELDS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)


class DFlashShape(NamedTuple):
    """What a DFlash checkpoint says of its network.

    Attributes:
        decoder: the draft layers.
        layers: the target's tapped layers, counted from 1.
        block_length: B, the anchor and B - 1 masks, as trained.
        mask_token_id: whose embedding stands at the places to be drafted.
        draft_vocab_size: V of a drafter with an LM head of its own, over some of the tokens; None has the target's.
        causal: for each kind of attention, whether a place sees only those before it in its block.
        input_scale: the embeddings are multiplied by it.
        output_scale, softcap: the logits are multiplied by the one, then bent to stay within the other (0: not).
    """

    decoder: Qwen3Config
    layers: tuple[int, ...]
    block_length: int
    mask_token_id: int
    draft_vocab_size: int | None
    causal: dict[str, bool]
    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0


class DFlashNet(torch.nn.Module):
    """Projection and draft layers; embedding and LM head are the target's."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.shape = shape
        hidden_size, epsilon = shape.decoder.hidden_size, shape.decoder.rms_norm_eps
        self.fc = torch.nn.Linear(len(shape.layers) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden_size, eps=epsilon)
        self.decoder = Qwen3Model(shape.decoder)
        del self.decoder.embed_tokens  # the target's
        self.own = DraftHead(hidden_size, shape.draft_vocab_size) if shape.draft_vocab_size else None

    def write_context(self, tapped_TF: torch.Tensor, positions_T: torch.Tensor, cache: Cache) -> None:
        """Append the keys and values of context positions to the cache."""
        append_context(self.decoder, self.hidden_norm(self.fc(tapped_TF)), positions_T, cache)

    def forward(
        self, embedded_QH: torch.Tensor, positions_Q: torch.Tensor, masks: Mapping[str, torch.Tensor], cache: Cache
    ) -> torch.Tensor:
        """The (Q, H) normed states of blocks.

        Args:
            embedded_QH: the anchors' and masks' embeddings.
            positions_Q: in the text.
            masks: for each kind of attention, (1, 1, Q, C) what each place sees of the context and the blocks.
            cache: holds the context; the blocks' keys and values are appended.
        """
        output = self.decoder(
            inputs_embeds=self.shape.input_scale * embedded_QH[None],
            position_ids=positions_Q[None],
            attention_mask=dict(masks),
            past_key_values=cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def masks(self, queries_Q: torch.Tensor, keys_C: torch.Tensor) -> dict[str, torch.Tensor]:
        """What one block sees, by the positions of its places and of all keys; see ``forward``."""
        distance_QC = queries_Q[:, None] - keys_C
        masks = {}
        for kind in dict.fromkeys(self.shape.decoder.layer_types):
            visible = torch.ones_like(distance_QC, dtype=torch.bool)
            if self.shape.causal[kind]:
                visible &= distance_QC >= 0
            if kind == SLIDING:
                visible &= distance_QC.abs() < self.shape.decoder.sliding_window
            masks[kind] = visible[None, None]
        return masks

    def choose(self, hidden_KH: torch.Tensor, lm_head: LmHead, anchor: int) -> tuple[list[int], list[float]]:
        """The draft, and the probability of each token of it; here each place is on its own.

        Args:
            hidden_KH: normed states at the places to be drafted.
            lm_head: the target's.
            anchor: the token before them.
        """
        return most_likely(self.logits(hidden_KH, lm_head), self.own)

    def likely(self, hidden_KH: torch.Tensor, lm_head: LmHead, most: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest tokens of each place, and their probabilities; see ``choose``."""
        return likeliest(self.logits(hidden_KH, lm_head), self.own, most)

    def logits(self, hidden_KH: torch.Tensor, lm_head: LmHead) -> torch.Tensor:
        """(K, V) as the drafter means them, in float32; over its own tokens, where it has some of them only."""
        head = lm_head if self.own is None else self.own.lm_head
        logits_KV = head(hidden_KH).float() * self.shape.output_scale
        cap = self.shape.softcap
        return cap * torch.tanh(logits_KV / cap) if cap else logits_KV


def append_context(decoder: Any, context_TH: torch.Tensor, positions_T: torch.Tensor, cache: Cache) -> None:
    """Append to the cache what each Qwen3 layer's attention would make of some inputs, without running the layers."""
    cos, sin = decoder.rotary_emb(context_TH, positions_T[None])
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        heads = (1, len(context_TH), -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(context_TH).view(heads)).transpose(1, 2)
        values = attention.v_proj(context_TH).view(heads).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
        cache.update(keys, values, index)


def read_dflash(
    checkpoint: str, kind: str, target: TargetShape, revision: str | None
) -> tuple[DFlashShape, dict[str, Any]]:
    """What a checkpoint of kind ``dflash`` or ``dflash2`` says of its network, in either format; and all its settings.

    Raises:
        CheckpointError: it is of another kind, or made for another target.
    """
    config = read_config(checkpoint, revision)
    if SPECULATORS_TYPE in config:
        shape, settings = _of_speculators(config, checkpoint), config
        found = config[SPECULATORS_TYPE]
    elif "dflash_config" in config:
        settings = config | config["dflash_config"]  # older checkpoints say the block size outside
        shape = _of_zlab(settings, checkpoint)
        found = "dflash2" if "selector_rank" in settings else "dflash"
    else:
        raise CheckpointError(
            f"{checkpoint}: config.json has neither 'dflash_config' (z-lab) nor {SPECULATORS_TYPE!r} (speculators), so "
            f"it is no DFlash checkpoint"
        )
    if found != kind:
        raise CheckpointError(f"{checkpoint} is a drafter of kind {found!r}, not {kind!r}")
    check_fits(checkpoint, shape.decoder.hidden_size, _vocab_size(config), shape.layers, target)
    return shape, settings


def _of_speculators(config: dict[str, Any], checkpoint: str) -> DFlashShape:
    if config[SPECULATORS_TYPE] not in ("dflash", "dflash2"):
        raise CheckpointError(f"{checkpoint} is a drafter of kind {config[SPECULATORS_TYPE]!r}, not of DFlash")
    if config.get("sample_from_anchor"):
        raise CheckpointError(f"{checkpoint} drafts from the anchor's own place, which is not supported here")
    own, whole = field(config, "draft_vocab_size", checkpoint), _vocab_size(config)
    return DFlashShape(
        decoder=_decoder(field(config, "transformer_layer_config", checkpoint), checkpoint),
        layers=tuple(field(config, "aux_hidden_state_layer_ids", checkpoint)),  # counted from 1: 0 is the embedding
        block_length=field(config, "block_size", checkpoint),
        mask_token_id=field(config, "mask_token_id", checkpoint),
        draft_vocab_size=None if own == whole else own,
        causal={FULL: False, SLIDING: not config.get("sliding_window_non_causal", False)},
    )


def _of_zlab(settings: dict[str, Any], checkpoint: str) -> DFlashShape:
    causal = settings.get("is_causal", settings.get("causal"))
    return DFlashShape(
        decoder=_decoder(settings, checkpoint),
        layers=tuple(1 + layer for layer in field(settings, "target_layer_ids", checkpoint)),  # counted from 0
        block_length=field(settings, "block_size", checkpoint),
        mask_token_id=field(settings, "mask_token_id", checkpoint),
        draft_vocab_size=None,
        causal={FULL: bool(causal), SLIDING: True if causal is None else bool(causal)},
        input_scale=settings.get("input_embedding_scale", 1.0),
        output_scale=settings.get("output_multiplier", 1.0),
        softcap=settings.get("final_logit_softcapping") or 0.0,
    )


def _vocab_size(config: dict[str, Any]) -> int:
    """Of the target that a drafter was made for."""
    return int(config.get("transformer_layer_config", config).get("vocab_size", 0))


def _decoder(layer: dict[str, Any], checkpoint: str) -> Qwen3Config:
    """The draft layers, which are Qwen3's whatever the target's are; defaults are those of the config's own kind."""
    source = layer_config(layer, checkpoint)
    fields = {name: value for name in _LAYER_FIELDS if (value := getattr(source, name, None)) is not None}
    fields.setdefault("head_dim", source.hidden_size // source.num_attention_heads)
    sliding = SLIDING in fields.get("layer_types", ())
    return Qwen3Config(**fields, use_sliding_window=sliding, vocab_size=1, pad_token_id=None)
