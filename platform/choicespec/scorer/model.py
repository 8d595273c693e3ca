"""The scorer's network: how likely each prefix of each candidate is to be what the target says next.

Shapes: P positions, N candidates, L tokens, F features, H numbers of the hidden states of all layers read, E embedding
size, D width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, linear, logsigmoid

from choicespec.scorer.source_states import StateScale

Embed = Callable[[torch.Tensor], torch.Tensor]  # token ids (...,) to the target's input embeddings (..., E)


class Shape(NamedTuple):
    """What a network is built for.

    Attributes:
        hidden_size: H.
        embedding_size: E.
        num_features: F.
        block_length: the most tokens of a candidate.
        width: D, of the space in which hidden state and tokens meet.
        feature_width: of the layers that read the prior's features.
        source_size: numbers of the hidden states of all layers that are compared with a candidate's source; their
            cosines are among the features.
    """

    hidden_size: int
    embedding_size: int
    num_features: int
    block_length: int
    width: int = 64
    feature_width: int = 48
    source_size: int = 0


class Reads(NamedTuple):
    """What a network may look at; an ablation turns one off."""

    hidden_states: bool = True
    prior: bool = True


class Batch(NamedTuple):
    """Candidate sets at P positions; see ``SetArrays`` for the padding."""

    hidden_PH: torch.Tensor
    anchors_P: torch.Tensor
    token_ids_PNL: torch.Tensor
    survivals_PNL: torch.Tensor
    features_PNF: torch.Tensor
    lengths_PN: torch.Tensor


class Known(NamedTuple):
    """What the prior knows of candidate sets; see ``SetArrays``."""

    survivals_PNL: torch.Tensor
    features_PNF: torch.Tensor


class ScorerNet(nn.Module):
    """Logits of each token's acceptance, given that the tokens before it were accepted.

    A query from the hidden state and the anchor meets each prefix of a candidate, the sum of its tokens' projected
    embeddings; what the prior knows of the prefix is added.

    Args:
        shape: what it is built for.
        embed: the target's input embedding, which stays as it is and is not part of the scorer.
        reads: what it looks at.
    """

    shape: Shape
    mean_H: torch.Tensor
    deviation_H: torch.Tensor
    scale: torch.Tensor  # with the shift, makes the logits probabilities
    shift: torch.Tensor
    source_mean_S: torch.Tensor
    source_deviation_S: torch.Tensor

    def __init__(self, shape: Shape, embed: Embed, reads: Reads = Reads()) -> None:  # noqa: B008  (immutable)
        super().__init__()
        self.shape = shape
        self._embed, self._reads = embed, reads
        self.register_buffer("mean_H", torch.zeros(shape.hidden_size))
        self.register_buffer("deviation_H", torch.ones(shape.hidden_size))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))
        if shape.source_size:  # others are stored without
            self.register_buffer("source_mean_S", torch.zeros(shape.source_size))
            self.register_buffer("source_deviation_S", torch.ones(shape.source_size))
        self.state_query = nn.Linear(shape.hidden_size, shape.width)
        self.anchor_query = nn.Linear(shape.embedding_size, shape.width, bias=False)
        self.token = nn.Linear(shape.embedding_size, shape.width, bias=False)
        self.prior = _PriorLogits(shape)

    @property
    def source_scale(self) -> StateScale:
        """What the features of sources that it was fitted to were made with; only where it reads any."""
        return StateScale(self.source_mean_S.numpy(), self.source_deviation_S.numpy())

    def forward(self, batch: Batch) -> torch.Tensor:
        """(P, N, L) logits; those of padding mean nothing."""
        distinct, places = torch.unique(
            torch.cat([batch.anchors_P, batch.token_ids_PNL.clamp(min=0).flatten()]), return_inverse=True
        )
        anchors, tokens = self.project(distinct)
        positions = len(batch.anchors_P)
        tokens_PNLD = tokens[places[positions:]].view(*batch.token_ids_PNL.shape, -1)
        known = Known(batch.survivals_PNL, batch.features_PNF)
        return self.judge(batch.hidden_PH, anchors[places[:positions]], tokens_PNLD, known)

    def project(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, D) of tokens as anchors, and as tokens of a candidate; the same whatever surrounds them."""
        embedded = self._embed(token_ids)
        return self.anchor_query(embedded), self.token(embedded)

    def judge(
        self, hidden_PH: torch.Tensor, anchors_PD: torch.Tensor, tokens_PNLD: torch.Tensor, known: Known
    ) -> torch.Tensor:
        """(P, N, L) logits of tokens that are projected; see ``forward``."""
        query_PD = anchors_PD
        if self._reads.hidden_states:
            query_PD = query_PD + self.state_query((hidden_PH - self.mean_H) / self.deviation_H)
        query_PD = layer_norm(query_PD, query_PD.shape[-1:])
        logits: torch.Tensor = (tokens_PNLD.cumsum(dim=2) @ query_PD[:, None, :, None]).squeeze(-1)
        logits = logits * query_PD.shape[-1] ** -0.5
        if self._reads.prior:
            logits = logits + self.prior(known)
        return self.scale * logits + self.shift


class _PriorLogits(nn.Module):
    """What the prior knows of a prefix, as a logit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first = nn.Linear(shape.num_features + 3 + shape.block_length, shape.feature_width)
        self.second = nn.Linear(shape.feature_width, shape.feature_width)
        self.out = nn.Linear(shape.feature_width, 1)
        self._places = shape.block_length

    def forward(self, known: Known) -> torch.Tensor:
        log_survivals = known.survivals_PNL
        conditional = log_survivals.diff(dim=-1, prepend=torch.zeros_like(log_survivals[..., :1]))
        of_prefix = torch.stack([log_survivals / 8, conditional / 2, conditional.exp()], dim=-1)
        # one layer over features, prefix and place side by side, each multiplied where it is smallest
        sizes = [known.features_PNF.shape[-1], of_prefix.shape[-1], self._places]
        by_feature, by_prefix, by_place = torch.split(self.first.weight, sizes, dim=1)
        of_candidate = linear(known.features_PNF, by_feature, self.first.bias)[:, :, None]
        of_place = by_place.T[: log_survivals.shape[-1]]
        inner = gelu(of_candidate + linear(of_prefix, by_prefix) + of_place)
        logits: torch.Tensor = self.out(gelu(self.second(inner))).squeeze(-1)
        return logits


def survivals(logits_PNL: torch.Tensor, lengths_PN: torch.Tensor) -> torch.Tensor:
    """(P, N, L) probabilities that each prefix is accepted; 0 in padding. Their sum is the expected accepted length."""
    there = torch.arange(logits_PNL.shape[-1], device=logits_PNL.device) < lengths_PN[..., None]
    return logsigmoid(logits_PNL).cumsum(dim=-1).exp() * there
