"""Fitting a scorer to recorded outputs. Shapes: as in ``model``; R rows of recorded hidden states."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, one_hot
from torch.nn.utils import clip_grad_norm_

from choicespec.errors import ScorerError
from choicespec.scorer.examples import Examples, SetArrays
from choicespec.scorer.model import Batch, Embed, Reads, ScorerNet, Shape, survivals
from choicespec.scorer.source_states import StateScale
from choicespec.spec.training import FitSpec

_SHARPNESS = 2.0  # of the choice that the listwise loss looks at, in accepted tokens
_LARGEST_GRADIENT = 1.0
_LEAST_DEVIATION = 1e-3
_NEVER = -1e4
_LEAST_STEPS = 11  # with 10, the warm-up of a tenth has no length to divide by
_SET_TOKENS = 4.0  # reached tokens of a set, about: what makes the two losses alike in size
_CALIBRATION_EVERY = 10  # requests, of which one is set aside
_CALIBRATION_BATCH = 512
_LEAST_OUTCOMES = 10


class Dataset(NamedTuple):
    """Examples, and the (R, H) hidden states that they point into."""

    examples: Examples
    hidden_RH: NDArray[np.float16]


def joined(datasets: Sequence[Dataset]) -> Dataset:
    """Several tasks' datasets as one."""
    rows = requests = 0
    parts = []
    for examples, hidden_RH in datasets:
        parts.append(examples._replace(rows=examples.rows + rows, requests=examples.requests + requests))
        rows += len(hidden_RH)
        requests += int(examples.requests.max(initial=-1)) + 1
    sets = SetArrays._make(map(np.concatenate, zip(*(part.sets for part in parts), strict=True)))
    others = map(np.concatenate, zip(*(part[1:] for part in parts), strict=True))
    return Dataset(Examples._make([sets, *others]), np.concatenate([hidden_RH for _, hidden_RH in datasets]))


def batch_of(dataset: Dataset, positions: NDArray[np.int64]) -> Batch:
    """Some positions as tensors."""
    examples, hidden_RH = dataset
    sets = examples.sets
    return Batch(
        hidden_PH=torch.from_numpy(hidden_RH[examples.rows[positions]].astype(np.float32)),
        anchors_P=torch.from_numpy(examples.anchors[positions].astype(np.int64)),
        token_ids_PNL=torch.from_numpy(sets.token_ids[positions].astype(np.int64)),
        survivals_PNL=torch.from_numpy(sets.survivals[positions]),
        features_PNF=torch.from_numpy(sets.features[positions]),
        lengths_PN=torch.from_numpy(sets.lengths[positions].astype(np.int64)),
    )


def fit(
    dataset: Dataset,
    embed: Embed,
    reads: Reads,
    spec: FitSpec,
    on_epoch: Callable[[int, float], None],
    scale: StateScale | None = None,
) -> ScorerNet:
    """Fit a network.

    Args:
        dataset: what it learns from.
        embed: the target's input embedding.
        reads: what the network looks at.
        spec: how long, how fast, from which seed.
        on_epoch: called with the number of epochs done and the last one's mean loss.
        scale: what the dataset's features of sources were made with, which the network keeps; None where it has none.

    Raises:
        ScorerError: no position has a candidate.
    """
    torch.manual_seed(spec.seed)
    order = np.random.default_rng(spec.seed)
    net = ScorerNet(_shape(dataset, embed, scale), embed, reads)
    there = dataset.examples.sets.any_candidate
    set_aside = dataset.examples.requests % _CALIBRATION_EVERY == 0
    positions = np.flatnonzero(there & ~set_aside)
    if not len(positions):
        raise ScorerError(
            f"nothing to learn from: {len(np.unique(dataset.examples.requests))} recorded prompts, of which one in "
            f"{_CALIBRATION_EVERY} is set aside, give no position with a candidate; record more"
        )
    read_RH = dataset.hidden_RH[dataset.examples.rows].astype(np.float32)
    net.mean_H.copy_(torch.from_numpy(read_RH.mean(axis=0)))
    net.deviation_H.copy_(torch.from_numpy(read_RH.std(axis=0) + _LEAST_DEVIATION))
    if scale is not None:
        net.source_mean_S.copy_(torch.from_numpy(scale.mean_S))
        net.source_deviation_S.copy_(torch.from_numpy(scale.deviation_S))
    count = max(1, len(positions) // spec.batch_size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, spec.learning_rate, total_steps=max(spec.epochs * count + 1, _LEAST_STEPS), pct_start=0.1
    )
    for epoch in range(spec.epochs):
        total = 0.0
        for chosen in np.array_split(order.permutation(positions), count):
            loss = _loss(net, dataset, np.sort(chosen), spec.listwise_weight)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(net.parameters(), _LARGEST_GRADIENT)
            optimizer.step()
            schedule.step()
            total += loss.item()
        on_epoch(epoch + 1, total / count)
    net.eval()
    _calibrate(net, dataset, np.flatnonzero(there & set_aside))
    return net


def _shape(dataset: Dataset, embed: Embed, scale: StateScale | None) -> Shape:
    sets = dataset.examples.sets
    return Shape(
        hidden_size=dataset.hidden_RH.shape[1],
        embedding_size=embed(torch.zeros(1, dtype=torch.long)).shape[-1],
        num_features=sets.features.shape[-1],
        block_length=sets.token_ids.shape[-1],
        source_size=len(scale.mean_S) if scale is not None else 0,
    )


def _calibrate(net: ScorerNet, dataset: Dataset, positions: NDArray[np.int64]) -> None:
    """Scale and shift the logits so that those of the chosen candidates are probabilities, on requests set aside.

    A candidate that was chosen for its logits is better than others with the same logits, so that a net which is right
    on average expects too little of its choice.

    Source: J. Platt, "Probabilistic Outputs for Support Vector Machines" (1999), section 2.
    """
    if not len(positions):
        return
    parts = []
    with torch.no_grad():
        for chosen in np.array_split(positions, len(positions) // _CALIBRATION_BATCH + 1):
            batch = batch_of(dataset, chosen)
            reached, right = _judged(dataset.examples, chosen)
            logits_PNL = net(batch)
            best = survivals(logits_PNL, batch.lengths_PN).sum(dim=-1).argmax(dim=-1)
            judged = reached & one_hot(best, reached.shape[1])[..., None].bool()
            parts.append((logits_PNL[judged], right[judged]))
    logits, right = (torch.cat(column) for column in zip(*parts, strict=True))
    if min(right.sum(), len(right) - right.sum()) < _LEAST_OUTCOMES:
        return  # too few of one outcome to scale by
    fitted = torch.zeros(2, requires_grad=True)  # for the scale, and the shift
    optimizer = torch.optim.LBFGS([fitted], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(_scale(fitted[0]) * logits + fitted[1], right)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    net.scale.copy_(_scale(fitted.detach()[0]))
    net.shift.copy_(fitted.detach()[1])


def _scale(free: torch.Tensor) -> torch.Tensor:
    """Between a half and twice: what is fitted to few outcomes must neither turn the ranking nor level it."""
    return 2 ** free.tanh()


def _judged(examples: Examples, positions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, N, L) which tokens are reached, the tokens before them accepted; and 1 where a token is accepted."""
    accepted_PN1 = torch.from_numpy(examples.accepted[positions].astype(np.int64))[..., None]
    lengths_PN1 = torch.from_numpy(examples.sets.lengths[positions].astype(np.int64))[..., None]
    place_L = torch.arange(examples.sets.token_ids.shape[-1])
    return (place_L <= accepted_PN1) & (place_L < lengths_PN1), (place_L < accepted_PN1).float()


def _loss(net: ScorerNet, dataset: Dataset, positions: NDArray[np.int64], listwise_weight: float) -> torch.Tensor:
    """Each token judged where it is reached, and the candidates of a set against each other."""
    batch = batch_of(dataset, positions)
    logits_PNL, lengths_PN = net(batch), batch.lengths_PN
    reached, right = _judged(dataset.examples, positions)
    judged = binary_cross_entropy_with_logits(logits_PNL, right, reduction="none") * reached
    accepted_PN = right.mul(reached).sum(dim=-1)
    missing = lengths_PN == 0
    scores_PN = survivals(logits_PNL, lengths_PN).sum(dim=-1)
    chosen_PN = log_softmax((_SHARPNESS * scores_PN).masked_fill(missing, _NEVER), dim=-1)
    best = (accepted_PN == accepted_PN.amax(dim=-1, keepdim=True)) & ~missing
    differ = accepted_PN.amax(dim=-1) > accepted_PN.masked_fill(missing, logits_PNL.shape[-1]).amin(dim=-1)
    listwise_P = -chosen_PN.masked_fill(~best, _NEVER).logsumexp(dim=-1) * differ
    return judged.sum(dim=(1, 2)).mean() / _SET_TOKENS + listwise_weight * listwise_P.sum() / differ.sum().clamp(min=1)
