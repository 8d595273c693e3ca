"""The network of a multi-token-prediction head, and what its two checkpoint formats say of it.

The embedding of a token and the target's normed state at the position before it, each normed again and side by side,
are projected to one state, which a single full-attention layer of the target's kind and a norm turn into a prediction
of the token after. That is a one-layer model of the target's kind, with a projection in place of the embedding.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2), as in the ``mtp.*`` tensors of Qwen3-Next, Qwen3.5 and Qwen3.8:
there the target's state is read after its final norm. Trained heads come in the format of the package speculators.

Shapes: T tokens, H hidden size.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModel
from transformers.cache_utils import Cache

from choicespec.drafters.checkpoint import SPECULATORS_TYPE, TargetShape, check_fits, field, read_config
from choicespec.drafters.head import DraftHead, LmHead
from choicespec.errors import CheckpointError

# How names begin in the network, to how they begin in a checkpoint.
NATIVE_NAMES = {
    "fc.": "mtp.fc.",
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "decoder.norm.": "mtp.norm.",
    "decoder.layers.": "mtp.layers.",
}
# The layer's own tensors begin like all others: they come last.
SPECULATORS_NAMES = {
    "fc.": "mtp_layers.0.input_proj.",
    "embedding_norm.": "mtp_layers.0.token_layernorm.",
    "hidden_norm.": "mtp_layers.0.hidden_layernorm.",
    "decoder.norm.": "mtp_layers.0.final_layernorm.",
    "decoder.layers.0.": "mtp_layers.0.",
    "own.d2t": "d2t",
}


class MtpNet(torch.nn.Module):
    """Projection, layer and norm; embedding, LM head and the norm of its inputs' states are the target's.

    Args:
        decoder: of the layer, as for a model of one layer.
        draft_vocab_size: tokens that it drafts; None for all of the target's.
    """

    def __init__(self, decoder: Any, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        self.decoder = AutoModel.from_config(decoder)
        del self.decoder.embed_tokens  # the target's
        norm, size, epsilon = type(self.decoder.norm), decoder.hidden_size, decoder.rms_norm_eps
        self.embedding_norm = norm(size, eps=epsilon)
        self.hidden_norm = norm(size, eps=epsilon)
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.own = DraftHead(size, draft_vocab_size) if draft_vocab_size else None

    def forward(
        self,
        embedded_TH: torch.Tensor,
        hidden_TH: torch.Tensor,
        positions_T: torch.Tensor,
        cache: Cache,
        masks: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The (T, H) normed states after tokens: for the LM head, and for the next prediction.

        Args:
            embedded_TH: of the tokens.
            hidden_TH: the target's normed states at the positions before them, or this function's own results there.
            positions_T: the positions of ``hidden_TH``.
            cache: of the positions before; these are appended.
            masks: as in ``DFlashNet``, for tokens that do not follow each other; None for those that do.
        """
        output = self.decoder(
            inputs_embeds=self.joined(embedded_TH, hidden_TH)[None],
            position_ids=positions_T[None],
            attention_mask=masks,
            past_key_values=cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def joined(self, embedded_TH: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The (T, H) input of the layer."""
        joined: torch.Tensor = self.fc(torch.cat([self.embedding_norm(embedded_TH), self.hidden_norm(hidden_TH)], -1))
        return joined

    def logits(self, hidden_TH: torch.Tensor, lm_head: LmHead) -> torch.Tensor:
        """Of the head's tokens, or of all the target's."""
        return (lm_head if self.own is None else self.own.lm_head)(hidden_TH)


def read_mtp(checkpoint: str, target: TargetShape, revision: str | None) -> Any:
    """The configuration of the layer, as for a model of one layer.

    Raises:
        CheckpointError: it is of another kind, has several layers, or was made for another target.
    """
    config = read_config(checkpoint, revision)
    kind = config.get(SPECULATORS_TYPE)
    if kind is None:
        decoder = copy.deepcopy(AutoConfig.from_pretrained(checkpoint, revision=revision).get_text_config())
        num_layers = getattr(decoder, "mtp_num_hidden_layers", 1)
    elif kind == "mtp":
        layer = dict(field(config, "transformer_layer_config", checkpoint))
        decoder = AutoConfig.for_model(layer.pop("model_type", "qwen2"), **layer)
        num_layers = config.get("num_nextn_predict_layers", 1)
    else:
        raise CheckpointError(f"{checkpoint} is a drafter of kind {kind!r}, not 'mtp'")
    if num_layers != 1:
        raise CheckpointError(f"{checkpoint} has {num_layers} layers for multi-token prediction; one is supported")
    check_fits(checkpoint, decoder.hidden_size, decoder.vocab_size, (), target)
    decoder.num_hidden_layers, decoder.layer_types = 1, ["full_attention"]
    decoder.vocab_size, decoder.pad_token_id = 1, None
    return decoder


def is_head(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to its head."""
    return name.startswith((*NATIVE_NAMES.values(), *SPECULATORS_NAMES.values()))


def network_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The head's tensors by the network's names; experts that lie singly become one tensor for all."""
    renamed = {_network_name(name): tensor for name, tensor in weights.items()}
    single = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(renamed):
        if found := single.match(name):
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = renamed.pop(name)
    for prefix, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        pairs = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in numbers]
        renamed[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        renamed[f"{prefix}.down_proj"] = torch.stack([parts[number, "down"] for number in numbers])
    return renamed


def _network_name(name: str) -> str:
    pairs = [*NATIVE_NAMES.items(), *SPECULATORS_NAMES.items()]  # the layer's, which the others begin like, is last
    own, theirs = next(pair for pair in pairs if name.startswith(pair[1]))
    return own + name.removeprefix(theirs)
