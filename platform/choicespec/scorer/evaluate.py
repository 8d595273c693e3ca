"""How good a ranking of the candidates is: on recorded outputs, beside the prior's and the oracle's.

Shapes: P positions, N candidates of a set.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from choicespec.intervals import ratio_of_sums
from choicespec.records import Estimate
from choicespec.scorer.examples import Examples
from choicespec.scorer.fit import Dataset, batch_of
from choicespec.scorer.model import ScorerNet, survivals
from choicespec.spec.frozen import Frozen

_BATCH = 512
_BINS = 10


class Ranking(Frozen):
    """What one way of choosing a candidate yields; intervals by bootstrap over requests.

    Attributes:
        top1: the share of positions with a choice as good as the oracle's, of those where some candidate is accepted.
        accepted: tokens accepted a position, over all positions.
        accepted_on_path: tokens accepted a step, over the positions where a live loop with this choice really stands.
    """

    top1: Estimate
    accepted: Estimate
    accepted_on_path: Estimate


class Comparison(Frozen):
    """A scorer beside the prior and the oracle, on the same positions.

    Attributes:
        candidates: of a set, on average.
        calibration_error_tokens: the expected less the actual accepted length of the scorer's choice: the mean of the
            absolute differences of its tenths, ordered by expected length.
        bias_tokens: the mean of expected less actual.
    """

    prior: Ranking
    scorer: Ranking
    oracle: Ranking
    candidates: float
    positions: int
    calibration_error_tokens: float
    bias_tokens: float

    @property
    def gap_closed(self) -> float:
        """The share of the way from the prior to the oracle, in tokens accepted over all positions."""
        return _share_of_gap(self.prior.accepted, self.scorer.accepted, self.oracle.accepted)

    @property
    def gap_closed_on_path(self) -> float:
        """The same on each one's own decode path."""
        return _share_of_gap(self.prior.accepted_on_path, self.scorer.accepted_on_path, self.oracle.accepted_on_path)


def expected_lengths(net: ScorerNet, dataset: Dataset) -> NDArray[np.float32]:
    """(P, N) expected accepted tokens of each candidate; -1 in padding."""
    parts = []
    with torch.inference_mode():
        for start in range(0, len(dataset.examples.anchors), _BATCH):
            positions = np.arange(start, min(start + _BATCH, len(dataset.examples.anchors)))
            batch = batch_of(dataset, positions)
            expected = survivals(net(batch), batch.lengths_PN).sum(dim=-1)
            parts.append(expected.masked_fill(batch.lengths_PN == 0, -1.0).numpy())
    return np.concatenate(parts)


def compare(net: ScorerNet, dataset: Dataset) -> Comparison:
    """Judge a scorer on positions that it has not seen."""
    examples = dataset.examples
    expected_PN = expected_lengths(net, dataset)
    chosen_P = expected_PN.argmax(axis=1)
    every = np.arange(len(chosen_P))
    there = examples.sets.any_candidate
    expected_P = expected_PN[every, chosen_P][there]
    actual_P = examples.accepted[every, chosen_P][there].astype(np.float64)
    tenths = [part for part in np.array_split(np.argsort(expected_P), _BINS) if len(part)]
    differences = [abs(expected_P[part].mean() - actual_P[part].mean()) * len(part) for part in tenths]
    return Comparison(
        prior=_ranking(examples, examples.sets.best_prior),
        scorer=_ranking(examples, chosen_P),
        oracle=_ranking(examples, examples.accepted.argmax(axis=1)),
        candidates=float((examples.sets.lengths > 0).sum(axis=1).mean()),
        positions=len(chosen_P),
        calibration_error_tokens=float(sum(differences) / max(1, len(expected_P))),
        bias_tokens=float((expected_P - actual_P).mean()) if len(expected_P) else 0.0,
    )


def decode_path(accepted: Sequence[int]) -> list[int]:
    """The positions of one output at which a live loop stands that accepts so many tokens at each of them."""
    path, position = [], 0
    while position < len(accepted):
        path.append(position)
        position += accepted[position] + 1  # with the bonus token
    return path


def _ranking(examples: Examples, chosen_P: NDArray[np.int64]) -> Ranking:
    """Of one choice a position."""
    accepted_P = examples.accepted[np.arange(len(chosen_P)), chosen_P].astype(np.int64)
    most_P = examples.accepted.max(axis=1)
    of_requests = [np.flatnonzero(examples.requests == number) for number in np.unique(examples.requests)]
    open_to_choice = [rows[most_P[rows] > 0] for rows in of_requests]
    paths = [rows[decode_path(accepted_P[rows].tolist())] for rows in of_requests]
    return Ranking(
        top1=ratio_of_sums(
            [float((accepted_P[rows] == most_P[rows]).sum()) for rows in open_to_choice],
            [float(len(rows)) for rows in open_to_choice],
        ),
        accepted=_mean(accepted_P, of_requests),
        accepted_on_path=_mean(accepted_P, paths),
    )


def _mean(values_P: NDArray[np.int64], of_requests: Sequence[NDArray[np.int64]]) -> Estimate:
    return ratio_of_sums(
        [float(values_P[rows].sum()) for rows in of_requests], [float(len(rows)) for rows in of_requests]
    )


def _share_of_gap(prior: Estimate, scorer: Estimate, oracle: Estimate) -> float:
    gap = oracle.value - prior.value
    return (scorer.value - prior.value) / gap if gap > 0 else 0.0
