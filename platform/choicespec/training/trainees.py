"""The networks that are trained, each from all chosen anchors of a sequence at once.

An anchor's block sees the true context before it and itself, and no other block: what a live loop would show it there.

Shapes: A anchors, B places of a block, K drafted places, N tokens of a sequence, T context tokens, D tokens of the
drafter, F numbers tapped at a position, H hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, Qwen3Config

from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.drafters.dflash_net import FULL, DFlashNet, DFlashShape, append_context
from choicespec.drafters.head import DraftHead
from choicespec.drafters.mtp_net import MtpNet
from choicespec.spec.training import DFlashTraining, MtpTraining
from choicespec.training.files import save_dflash, save_mtp
from choicespec.training.sequences import TokenSequence


class Trainee(Protocol):
    """A network in training.

    Attributes:
        places: K, the tokens drafted after an anchor.
    """

    net: torch.nn.Module
    head: DraftHead
    places: int

    def logits(self, sequence: TokenSequence, anchors_A: torch.Tensor) -> torch.Tensor:
        """(A, K, D) for what comes after each anchor; where a place depends on tokens before it, on the true ones."""
        ...

    def save(self, folder: Path, description: Mapping[str, Any]) -> None:
        """Write it as a checkpoint, with a description for people."""
        ...


class DFlashTrainee:
    """A DFlash drafter.

    Tapped states differ by orders of magnitude between channels; the projection is trained on scaled ones, and takes
    the scale into its weights in the end.

    Args:
        spec: its sizes.
        target: whose embedding and LM head it shares.
        token_ids_D: those that it drafts.
        deviation_F: of the tapped states.
    """

    def __init__(
        self, spec: DFlashTraining, target: CausalLmTarget, token_ids_D: torch.Tensor, deviation_F: torch.Tensor
    ) -> None:
        shape = DFlashShape(
            layer_config(target, spec.num_layers, spec.intermediate_size),
            spec.layers,
            spec.block_length,
            spec.mask_token_id,
            len(token_ids_D),
            {FULL: False},
        )
        torch.manual_seed(spec.fit.seed)
        self.net, self.places = DFlashNet(shape), spec.block_length - 1
        self.head = _with_targets_rows(self.net.own, target, token_ids_D)
        self._target, self._deviation_F = target, deviation_F

    def logits(self, sequence: TokenSequence, anchors_A: torch.Tensor) -> torch.Tensor:
        """See ``Trainee``."""
        shape, places_B = self.net.shape, torch.arange(self.places + 1)
        context = int(anchors_A.max())
        tapped_TF = torch.cat([sequence.states[layer][:context] for layer in shape.layers], dim=-1)
        cache = DynamicCache()
        self.net.write_context(tapped_TF / self._deviation_F, torch.arange(context), cache)
        blocks_AB = torch.full((len(anchors_A), len(places_B)), shape.mask_token_id)
        blocks_AB[:, 0] = sequence.token_ids_N[anchors_A]
        own = torch.eye(len(anchors_A), dtype=torch.bool).repeat_interleave(len(places_B), dim=1)
        mask = _mask(anchors_A, context, own).repeat_interleave(len(places_B), dim=2)
        hidden = self.net(
            self._target.embed(blocks_AB.flatten().tolist()),
            (anchors_A[:, None] + places_B).flatten(),
            {FULL: mask},
            cache,
        )
        logits: torch.Tensor = self.head.lm_head(hidden.unflatten(0, blocks_AB.shape)[:, 1:])
        return logits

    def save(self, folder: Path, description: Mapping[str, Any]) -> None:
        """See ``Trainee``."""
        weights = dict(self.net.state_dict())
        weights["fc.weight"] = weights["fc.weight"] / self._deviation_F
        save_dflash(folder, self.net, weights, self._target.config, description)


class MtpTrainee:
    """A head for multi-token prediction, iterated on its own states as it will be when it drafts.

    Args:
        spec: its sizes.
        target: whose embedding, final norm and LM head it shares.
        last_layer: of the target.
        token_ids_D: those that it drafts.
    """

    def __init__(self, spec: MtpTraining, target: CausalLmTarget, last_layer: int, token_ids_D: torch.Tensor) -> None:
        torch.manual_seed(spec.fit.seed)
        self.net = MtpNet(layer_config(target, 1, spec.intermediate_size), len(token_ids_D))
        self.places = spec.num_draft_tokens
        self.head = _with_targets_rows(self.net.own, target, token_ids_D)
        self._target, self._last_layer = target, last_layer

    def logits(self, sequence: TokenSequence, anchors_A: torch.Tensor) -> torch.Tensor:
        """See ``Trainee``."""
        ids_N, before_A = (
            sequence.token_ids_N,
            anchors_A - 1,
        )  # the positions whose states an anchor's draft starts from
        with torch.no_grad():
            states = self._target.final_norm(sequence.states[self._last_layer])
        context = int(before_A.max())
        cache = DynamicCache()
        entries_TH = self.net.joined(self._embed(ids_N[1 : context + 1]), states[:context])
        layer = self.net.decoder.layers[0]
        append_context(self.net.decoder, layer.input_layernorm(entries_TH), torch.arange(context), cache)
        hidden_AH, logits = states[before_A], []
        own = torch.eye(len(anchors_A), dtype=torch.bool)
        for place in range(self.places):
            tokens_A = ids_N[(anchors_A + place).clamp(max=len(ids_N) - 1)]
            mask = _mask(before_A, context, own.repeat(1, place + 1))
            hidden_AH = self.net(self._embed(tokens_A), hidden_AH, before_A + place, cache, {FULL: mask})
            logits.append(self.head.lm_head(hidden_AH))
        return torch.stack(logits, dim=1)

    def save(self, folder: Path, description: Mapping[str, Any]) -> None:
        """See ``Trainee``."""
        save_mtp(folder, self.net, self.places, self._target.config, description)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._target.embed(ids.tolist())


def layer_config(target: CausalLmTarget, num_layers: int, intermediate_size: int) -> Qwen3Config:
    """Qwen3 layers with the target's heads and rotation."""
    config = target.config
    return Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=1,
    )


def _mask(limits_A: torch.Tensor, context: int, own: torch.Tensor) -> torch.Tensor:
    """(1, 1, A, C): the context before each limit, and of the blocks what ``own`` says."""
    before = torch.arange(context) < limits_A[:, None]
    return torch.cat([before, own], dim=1)[None, None]


def _with_targets_rows(head: DraftHead | None, target: CausalLmTarget, token_ids_D: torch.Tensor) -> DraftHead:
    """The head with the target's rows for some tokens; they stay as they are."""
    assert head is not None, "a trained drafter has tokens of its own"
    head.d2t.copy_(token_ids_D - torch.arange(len(token_ids_D)))
    head.lm_head.weight.data.copy_(target.lm_head_rows(token_ids_D))
    head.lm_head.weight.requires_grad_(False)
    return head
