"""A DFlash drafter's network as transformers' own ``generate`` takes it: a peer on the same weights.

Shapes: K places, H hidden size, V the target's vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from choicespec.drafters.dflash_net import FULL, DFlashNet
from choicespec.drafters.head import DraftHead

# The projection is called otherwise there; layers and norm are called as here.
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "layer_types",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)
_OWN, _DECODER = "own.", "decoder."


class DFlashPeer:
    """transformers' DFlash model with a drafter's weights.

    Args:
        net: the drafter's network.
        vocab_size: V.

    Raises:
        ValueError: its attention is not transformers', which has one kind of block: each place sees all of it.
    """

    def __init__(self, net: DFlashNet, vocab_size: int) -> None:
        shape, decoder = net.shape, net.shape.decoder
        if {*decoder.layer_types} != {FULL} or shape.causal[FULL] or shape.input_scale != 1.0:
            raise ValueError("transformers' own DFlash takes drafters of full attention to all of a block only")
        config = MuseGlimmerAssistantConfig(
            **{name: getattr(decoder, name) for name in _FIELDS},
            block_size=shape.block_length,
            mask_token_id=shape.mask_token_id,
            target_layer_ids=[layer - 1 for layer in shape.layers],
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.model = MuseGlimmerAssistantModel(config).eval()
        weights = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith(_OWN)}
        self.model.load_state_dict({_NAMES.get(n, n.removeprefix(_DECODER)): tensor for n, tensor in weights.items()})
        self.model.to(device=net.fc.weight.device, dtype=net.fc.weight.dtype)
        self._head = _OwnHead(net.own, vocab_size) if net.own is not None else None

    @contextmanager
    def drafting_for(self, target: Any) -> Iterator[None]:
        """Has ``generate`` choose drafts by the drafter's own LM head, which it asks the target for."""
        if self._head is not None:
            target.get_output_embeddings = lambda: self._head
        try:
            yield
        finally:
            target.__dict__.pop("get_output_embeddings", None)


class _OwnHead(torch.nn.Module):
    """An LM head over some tokens as one over all, of which the others are never chosen."""

    def __init__(self, own: DraftHead, vocab_size: int) -> None:
        super().__init__()
        self._lm_head, self._vocab_size = own.lm_head, vocab_size
        self._target_ids = own.target_ids(torch.arange(len(own.d2t), device=own.d2t.device))

    @property
    def weight(self) -> torch.Tensor:
        """By whose device ``generate`` goes."""
        return self._lm_head.weight

    def forward(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        """(..., K, V) logits."""
        logits = hidden_KH.new_full((*hidden_KH.shape[:-1], self._vocab_size), -torch.inf)
        logits[..., self._target_ids] = self._lm_head(hidden_KH)
        return logits
