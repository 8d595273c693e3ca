"""Replay: what methods do on recorded outputs, exactly as the live loop, and how long that takes at measured costs.

Many methods are walked at once, a lane a method and request. A step of a lane looks up what is drafted at its position,
decides how much of that is verified as the live method does, and jumps to the position after what is kept.

Shapes: S methods, R requests, X lanes (a method on a request), P positions, N places (of every method, end to end), K
tokens of the longest draft.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from choicespec.decoding.step_cost import StepCosts
from choicespec.drafters.choice import REMEMBERED
from choicespec.drafters.tree import MOST_TREE_TOKENS
from choicespec.measuring.cost import Costs, ProposerCost
from choicespec.replay.beside import Beside
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.ranking import Drafts
from choicespec.spec.method import Choice, Draft, MethodSpec, Ngram, is_tree, uses_scorer

_AT_ONCE = 64  # methods: a few tens of megabytes of drafts


class Replayed(NamedTuple):
    """What a method does on each recorded request.

    Attributes:
        steps, proposed, accepted: (R,) counts, as a trace's steps give them.
        tokens: (R,) decoded after the prefill's.
        verify_ms: (R,) predicted: verification, and the rest of a step.
        search_ms: (R,) predicted: look-ups and candidate sets.
        score_ms: (R,) predicted: the scorer.
        draft_ms: (R,) predicted: drafters.
    """

    steps: NDArray[np.int64]
    proposed: NDArray[np.int64]
    accepted: NDArray[np.int64]
    tokens: NDArray[np.int64]
    verify_ms: NDArray[np.float64]
    search_ms: NDArray[np.float64]
    score_ms: NDArray[np.float64]
    draft_ms: NDArray[np.float64]

    def first(self, count: int) -> "Replayed":
        """The same of the first requests only."""
        return Replayed._make(column[:count] for column in self)

    @property
    def decode_ms(self) -> NDArray[np.float64]:
        """(R,) predicted."""
        return self.verify_ms + self.search_ms + self.score_ms + self.draft_ms

    @property
    def tokens_per_s(self) -> float:
        """The predicted decode rate: a ratio of sums."""
        total_ms = float(self.decode_ms.sum())
        return 1e3 * float(self.tokens.sum()) / total_ms if total_ms else 0.0

    @property
    def accepted_per_step(self) -> float:
        """A ratio of sums, without the bonus tokens."""
        return float(self.accepted.sum()) / max(1, int(self.steps.sum()))


class Replay:
    """One recording at one machine's costs.

    Args:
        drafts: of the recording.
        costs: of the pair, on the machine that is asked about.
    """

    def __init__(self, drafts: RecordedDrafts, costs: Costs) -> None:
        self.drafts, self.costs = drafts, costs
        ends_R = drafts.proposals.ends
        self._ends_R = ends_R
        self._starts_R = np.concatenate([np.zeros(1, np.int64), ends_R[:-1]])
        self._ms_PK = _verification_ms(
            drafts.proposals.contexts,
            costs,
            max(int(drafts.proposals.limits.max(initial=0)) + 1, MOST_TREE_TOKENS),
        )

    def of(self, methods: Sequence[MethodSpec]) -> list[Replayed]:
        """Replay methods.

        Raises:
            RecordingError: a method drafts what is not recorded, or what that costs was not measured.
        """
        distinct = list(dict.fromkeys(methods))
        found: dict[MethodSpec, Replayed] = {
            method: self._beside(method)
            for method in distinct
            if isinstance(method, Choice) and (method.drafters or is_tree(method))
        }
        for by_cost in (False, True):
            alike = [method for method in distinct if method not in found and _decides_by_cost(method) == by_cost]
            for start in range(0, len(alike), _AT_ONCE):
                some = alike[start : start + _AT_ONCE]
                found |= zip(some, self._walk(some, by_cost), strict=True)
        return [found[method] for method in methods]

    def _walk(self, methods: Sequence[MethodSpec], by_cost: bool) -> list[Replayed]:
        drafts = [self.drafts.of(method) for method in methods]
        accepted_N = np.concatenate([one.accepted for one in drafts])
        rule: _ByCost | _Fixed
        if by_cost:
            rule = _ByCost(drafts, self.costs.step_costs, len(self._ends_R))
        else:
            rule = _Fixed([_fixed_lengths(method, one) for method, one in zip(methods, drafts, strict=True)])
        shape = len(methods), len(self._ends_R)
        before_X = np.arange(shape[0]).repeat(shape[1]) * len(self._ms_PK)  # positions of the methods before
        place_X, end_X = (before_X + np.tile(some_R, shape[0]) for some_R in (self._starts_R, self._ends_R))
        steps_X, proposed_X, taken_X = (np.zeros(len(before_X), np.int64) for _ in range(3))
        verify_X = np.zeros(len(before_X))
        active = np.flatnonzero(place_X < end_X)
        while len(active):
            at = place_X[active]
            length = rule.lengths(active, at)
            kept = np.minimum(length, accepted_N[at])
            steps_X[active] += 1
            proposed_X[active] += length
            taken_X[active] += kept
            verify_X[active] += self._ms_PK[at - before_X[active], length]
            place_X[active] = at + kept + 1
            active = active[place_X[active] < end_X[active]]
        columns = [counts.reshape(shape) for counts in (steps_X, proposed_X, taken_X, verify_X)]
        return [self._summed(method, *row) for method, row in zip(methods, zip(*columns, strict=True), strict=True)]

    def _beside(self, method: Choice) -> Replayed:
        requests = Beside(method, self.drafts, self.costs).walk()
        sums = [
            (
                len(steps),
                sum(step.proposed for step in steps),
                sum(step.accepted for step in steps),
                sum(float(self._ms_PK[step.position, step.proposed]) for step in steps),
                sum(step.drafting_ms for step in steps),
            )
            for steps in requests
        ]
        steps_R, proposed_R, accepted_R, verify_ms_R, draft_ms_R = map(np.array, zip(*sums, strict=True))
        return self._summed(method, steps_R, proposed_R, accepted_R, verify_ms_R)._replace(draft_ms=draft_ms_R)

    def _summed(
        self,
        method: MethodSpec,
        steps_R: NDArray[np.int64],
        proposed_R: NDArray[np.int64],
        accepted_R: NDArray[np.int64],
        verify_ms_R: NDArray[np.float64],
    ) -> Replayed:
        search, score, draft = None, None, None
        if isinstance(method, Ngram):
            search = self.costs.ngram
        elif isinstance(method, Choice):
            search = self.costs.candidates
            score = self.costs.scorer if uses_scorer(method) else None
        elif isinstance(method, Draft):
            draft = self.costs.drafter(method)
        tokens_R = self._ends_R - self._starts_R
        times = (verify_ms_R, *(_proposer_ms(cost, steps_R) for cost in (search, score, draft)))
        return Replayed(steps_R, proposed_R, accepted_R, tokens_R, *times)


class _Fixed:
    """Verifies what does not depend on the steps before."""

    def __init__(self, lengths: Iterable[NDArray[np.int16]]) -> None:
        self._lengths_N = np.concatenate(list(lengths))

    def lengths(self, lanes: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int16]:
        """Draft tokens to verify, of each lane at its place."""
        found: NDArray[np.int16] = self._lengths_N[at]
        return found


class _ByCost:
    """``drafters.choice.ByCost`` for every lane: the same sums in the same order, so that no tie falls otherwise."""

    def __init__(self, drafts: Sequence[Drafts], costs: StepCosts, requests: int) -> None:
        longest = max(one.survival.shape[1] for one in drafts)
        survival_SPK = np.zeros((len(drafts), len(drafts[0].lengths), longest + 1))  # a column of no draft in front
        for number, one in enumerate(drafts):
            survival_SPK[number, :, 1 : one.survival.shape[1] + 1] = one.survival
        self._survival_NK = survival_SPK.reshape(-1, longest + 1)
        self._costs_K = np.array([costs.of(tokens) for tokens in range(1, longest + 2)])
        self._tokens_X = np.ones(len(drafts) * requests)
        self._ms_X = np.full(len(drafts) * requests, self._costs_K[0])

    def lengths(self, lanes: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draft tokens to verify, of each lane at its place. Summed here, since few places are ever stood at."""
        tokens_X, ms_X = self._tokens_X[lanes], self._ms_X[lanes]
        survival_XK = self._survival_NK.take(at, axis=0)
        expected_XK = survival_XK.cumsum(axis=1)
        survival_XK[:, 0] = 1.0  # the bonus token comes first in one of the sums, and last in the other
        yields_XK = survival_XK.cumsum(axis=1)
        found: NDArray[np.int64] = (yields_XK - (tokens_X / ms_X)[:, None] * self._costs_K).argmax(axis=1)
        self._tokens_X[lanes] = REMEMBERED * tokens_X + 1 + expected_XK[np.arange(len(at)), found]
        self._ms_X[lanes] = REMEMBERED * ms_X + self._costs_K[found]
        return found


def _decides_by_cost(method: MethodSpec) -> bool:
    return isinstance(method, Choice) and method.min_survival is None


def _fixed_lengths(method: MethodSpec, drafts: Drafts) -> NDArray[np.int16]:
    """As ``drafters.choice.Survival``; what has no threshold is verified as it is."""
    least = method.min_survival if isinstance(method, Choice) else None
    if least is None:
        return drafts.lengths
    likely_P = (drafts.survival >= least).cumprod(axis=1).sum(axis=1)
    found: NDArray[np.int16] = np.minimum(likely_P, drafts.lengths).astype(np.int16)
    return found


def _verification_ms(contexts_P: NDArray[np.int32], costs: Costs, longest: int) -> NDArray[np.float64]:
    """(P, K) milliseconds of a step at each position with 0, 1, ... draft tokens."""
    curve = costs.verification
    known_CK = np.array(
        [[curve.at(context).of(tokens + 1) for tokens in range(longest + 1)] for context in curve.contexts]
    )
    by_draft = [np.interp(contexts_P, curve.contexts, known_C) for known_C in known_CK.T]
    return np.stack(by_draft, axis=1) + costs.rest_ms


def _proposer_ms(cost: ProposerCost | None, steps_R: NDArray[np.int64]) -> NDArray[np.float64]:
    if cost is None:
        return np.zeros(len(steps_R))
    return np.where(steps_R > 0, cost.first_ms + cost.step_ms * (steps_R - 1), 0.0)
