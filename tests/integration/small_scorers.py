"""Scorers of a few hundred weights, and examples made by hand for them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from choicespec.candidates.sets import Features
from choicespec.records import Estimate, TargetIdentity
from choicespec.scorer.evaluate import Comparison, Ranking
from choicespec.scorer.examples import NO_TOKEN, Examples, SetArrays
from choicespec.scorer.files import Scorer, ScorerManifest
from choicespec.scorer.model import Batch, Reads, ScorerNet, Shape
from choicespec.scorer.source_states import num_source_features
from choicespec.scorer.table import Row, Variant
from choicespec.spec.pair import DrafterSpec
from choicespec.spec.training import FitSpec
from numpy.typing import NDArray

EMBEDDING = 12
VOCABULARY = 41
LENGTH = 6
HIDDEN = 10
TARGET = TargetIdentity(weights="w", tokenizer="t", precision="float32", hidden_size=HIDDEN, num_layers=4)


def embed(token_ids: torch.Tensor) -> torch.Tensor:
    """A fixed random embedding, which leaves the global random state alone."""
    dice = torch.Generator().manual_seed(7)
    return torch.randn(VOCABULARY, EMBEDDING, generator=dice)[token_ids]


def small_net(
    seed: int = 0,
    reads: Reads = Reads(),  # noqa: B008  (immutable)
    layers: int = 1,
    drafters: int = 0,
    source_layers: int = 0,
) -> ScorerNet:
    """Random weights, the same for the same seed."""
    torch.manual_seed(seed)
    features = len(Features._fields) + drafters + num_source_features(source_layers)
    shape = Shape(HIDDEN * layers, EMBEDDING, features, LENGTH, source_size=HIDDEN * source_layers)
    return ScorerNet(shape, embed, reads).eval()


def random_batch(
    seed: int, positions: int, candidates: int, length: int, layers: int = 1, features: int = len(Features._fields)
) -> Batch:
    """Sets with padding: of candidates, and of tokens."""
    dice = torch.Generator().manual_seed(seed)
    lengths_PN = torch.randint(0, length + 1, (positions, candidates), generator=dice).sort(descending=True).values
    there = torch.arange(length) < lengths_PN[..., None]
    tokens_PNL = torch.randint(0, VOCABULARY, there.shape, generator=dice)
    steps_PNL = torch.rand(there.shape, generator=dice) * -2
    features_PNF = torch.randn(positions, candidates, features, generator=dice)
    return Batch(
        hidden_PH=torch.randn(positions, HIDDEN * layers, generator=dice),
        anchors_P=torch.randint(0, VOCABULARY, (positions,), generator=dice),
        token_ids_PNL=tokens_PNL.masked_fill(~there, NO_TOKEN),
        survivals_PNL=steps_PNL.cumsum(dim=-1) * there,
        features_PNF=features_PNF * (lengths_PN > 0)[..., None],
        lengths_PN=lengths_PN,
    )


def hand_made(
    accepted: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], requests: Sequence[int] | None = None
) -> Examples:
    """Examples of which only the counts matter.

    Args:
        accepted: tokens of each candidate, a row a position.
        lengths: in the same form; 0 is padding.
        requests: of each position; all of one where it is left out.
    """
    lengths_PN = np.array(lengths, np.int8)
    there = np.arange(lengths_PN.max(initial=1)) < lengths_PN[..., None]
    sets = SetArrays(
        token_ids=np.where(there, 1, NO_TOKEN).astype(np.int32),
        survivals=np.zeros(there.shape, np.float32),
        features=np.zeros((*lengths_PN.shape, len(Features._fields)), np.float32),
        lengths=lengths_PN,
        own_ages=np.zeros(lengths_PN.shape, np.int32),
    )
    count = len(lengths_PN)
    numbers: NDArray[np.int32] = np.array(requests if requests is not None else [0] * count, np.int32)
    return Examples(sets, np.array(accepted, np.int8), np.zeros(count, np.int32), np.arange(count), numbers)


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.1, high=value + 0.1, n=64)


def ranking(top1: float, accepted: float, on_path: float) -> Ranking:
    return Ranking(top1=estimate(top1), accepted=estimate(accepted), accepted_on_path=estimate(on_path))


COMPARISON = Comparison(
    prior=ranking(0.60, 2.0, 3.0),
    scorer=ranking(0.75, 2.5, 3.75),
    oracle=ranking(1.0, 3.0, 4.0),
    candidates=8.5,
    positions=640,
    calibration_error_tokens=0.125,
    bias_tokens=-0.0625,
)
VARIANT = Variant(name="scorer", layers=(2,), fit=FitSpec())


def row(task: str = "tool_call", precision: str = "float32", variant: Variant = VARIANT) -> Row:
    """A row of the table with figures made up."""
    return Row(variant=variant, task=task, precision=precision, train_prompts=96, found=COMPARISON)


def small_scorer(
    seed: int = 0,
    layers: tuple[int, ...] = (2,),
    drafters: Mapping[str, DrafterSpec] | None = None,
    source_layers: tuple[int, ...] = (),
    **target: object,
) -> Scorer:
    """A scorer of random weights, for ``TARGET`` with some values changed, that judges the drafts of drafters."""
    net = small_net(seed, layers=len(layers), drafters=len(drafters or {}), source_layers=len(source_layers))
    manifest = ScorerManifest(
        target=TARGET.model_copy(update=target),
        layers=layers,
        source_layers=source_layers,
        block_length=LENGTH,
        embedding_size=EMBEDDING,
        width=net.shape.width,
        drafters=dict(drafters or {}),
        trained_on={"tool_call": 64, "python_repo": 32},
        held_out=(row(), row("python_repo")),
    )
    return Scorer(net, manifest)
