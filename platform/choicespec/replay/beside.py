"""Drafters beside a candidate set, and trees, replayed.

What a union or a hybrid does at a step depends on what its drafters were worth in the steps before, and a tree is more
than a row of numbers, so that they are walked a step at a time, by the objects of the live loop. Where a method decides
by time, a drafter takes what was measured of it on average; live, each call's own time decides, so that steps may
differ there.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from choicespec.decoding.verification import accepted_path, depths
from choicespec.drafters.choice import proposal_of
from choicespec.drafters.registry import gates_of, payoff_of
from choicespec.drafters.tree import DraftTree
from choicespec.drafters.union import CalledDrafter, Payoff, Weighed, better, improve
from choicespec.measuring.cost import Costs, ProposerCost
from choicespec.records import Proposal, Request
from choicespec.replay.drafted import Drafted, shortened
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.ranking import EveryCandidate
from choicespec.spec.method import Autoregressive, Choice, is_tree

_NO_TOKEN = -1


class Taken(NamedTuple):
    """A step: where, how many tokens were verified and kept, and the time that drafters took."""

    position: int
    proposed: int
    accepted: int
    drafting_ms: float


class _Clock:
    """Seconds that pass only when a drafter is called."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _RecordedDrafter:
    """Drafts what was recorded at its place in the recording, in the time that was measured.

    Attributes:
        start: of the request.
        judged: what the scorer says of its drafts, a position each; None where it says nothing.
    """

    def __init__(self, name: str, drafted: Drafted, cost: ProposerCost, clock: _Clock) -> None:
        self.name, self.drafted = name, drafted
        self._drafts, self._cost, self._clock = drafted.proposals(name), cost, clock
        self.start = 0
        self.judged: Sequence[Sequence[float]] | None = None
        self._first = True

    def begin(self, request: Request) -> None:
        self._first = True

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        self._clock.now_s += (self._cost.first_ms if self._first else self._cost.step_ms) / 1e3
        self._first = False
        return shortened(self._drafts[self.start + len(token_ids) - 1], limit)

    def judge(self, drafted: Proposal, token_ids: Sequence[int]) -> Sequence[float]:
        """See ``Judge``."""
        assert self.judged is not None, "a drafter that no scorer judges has no judge"
        return self.judged[self.start + len(token_ids) - 1]

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


class _Lists(NamedTuple):
    """Of each position: see ``Proposals`` and, of the best candidate, ``Drafts``; arrays are slow number by number. A
    tree has no best candidate, and its candidates beside."""

    limits: list[int]
    anchors: list[int]
    following: list[list[int]]
    lengths: list[int]
    accepted: list[int]
    survival: list[list[float]]

    @classmethod
    def of(cls, drafts: RecordedDrafts, method: Choice) -> Self:
        proposals = drafts.proposals
        alone = method.model_copy(update={"drafters": (), "gate": None})
        best = drafts.of(Autoregressive() if is_tree(method) else alone)
        arrays = (proposals.limits, proposals.anchors, proposals.following, best.lengths, best.accepted, best.survival)
        return cls(*(array.tolist() for array in arrays))


class Beside:
    """One method with drafters, or of trees, on one recording.

    Args:
        method: of either.
        drafts: of the recording.
        costs: of the pair.

    Raises:
        RecordingError: a drafter, or what it costs, is not recorded.
    """

    def __init__(self, method: Choice, drafts: RecordedDrafts, costs: Costs) -> None:
        self._method, self._drafts = method, drafts
        self._every: EveryCandidate | None = None  # of trees, once they are walked
        self._payoff: Payoff = payoff_of(method, lambda: costs.step_costs)
        clock = _Clock()
        self._recorded = []
        self._called = []
        for call, gate in zip(method.calls, gates_of(method, self._payoff), strict=True):
            draft = drafts.as_trained(call)
            drafted, cost = drafts.drafted(draft), costs.drafter(draft)
            is_judged = drafts.judged(method, draft.drafter, drafted) is not None
            if is_judged and costs.scorer is not None:
                cost = _with_judging(cost, costs.scorer)
            recorded = _RecordedDrafter(draft.drafter, drafted, cost, clock)
            judge = recorded.judge if is_judged else None
            self._recorded.append(recorded)
            self._called.append(CalledDrafter(draft.drafter, recorded, self._payoff, gate, clock, judge))

    def walk(self) -> list[list[Taken]]:
        """The steps of each request; before the first one comes the warm-up, from which drafters are known a little."""
        if self._drafts.warm_up is not None:
            self._walk(self._drafts.warm_up)
        return self._walk(self._drafts)

    def _walk(self, drafts: RecordedDrafts) -> list[list[Taken]]:
        ends = drafts.proposals.ends.tolist()
        lists = _Lists.of(drafts, self._method)
        self._every = drafts.every(self._method) if is_tree(self._method) else None
        for recorded in self._recorded:
            recorded.judged = drafts.judged(self._method, recorded.name, recorded.drafted)
        return [self._request(lists, start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _request(self, lists: "_Lists", start: int, end: int) -> list[Taken]:
        """Positions count from the request's start as tokens of its output do, for it has no prompt here."""
        output_ids = [*lists.anchors[start:end], *(token_ids[0] for token_ids in lists.following[start:end][-1:])]
        request = Request("", (), len(output_ids))
        self._payoff.begin()
        for recorded, called in zip(self._recorded, self._called, strict=True):
            recorded.start = start
            called.begin(request)
        steps: list[Taken] = []
        position = start
        while position < end:
            steps.append(self._step(lists, position, output_ids[: position - start + 1]))
            position += steps[-1].accepted + 1
        for called in self._called:
            called.finish(request, output_ids)
        return steps

    def _step(self, lists: "_Lists", position: int, token_ids: Sequence[int]) -> Taken:
        if self._every is not None:
            tree = self._tree(self._every, position)
            chosen, join = tree.weighed(), tree.join
        else:
            survival = lists.survival[position][: lists.lengths[position]]
            chosen, join = self._payoff.weigh((), "", survival), better
        drafting_ms, limit = 0.0, min(lists.limits[position], self._method.block_length)
        if limit > 0:
            chosen, drafting_ms = improve(chosen, self._called, token_ids, limit, join)
        self._payoff.take(chosen, drafting_ms)
        accepted = lists.accepted[position]
        if chosen.source:
            accepted = _accepted(chosen, lists.following[position])
        return Taken(position, chosen.length, min(chosen.length, accepted), drafting_ms)

    def _tree(self, every: EveryCandidate, position: int) -> DraftTree:
        """The candidates at a position as one."""
        tree = DraftTree(self._payoff, self._method.width)
        count = min(self._method.num_candidates, int(np.count_nonzero(every.lengths[position])))
        columns = (every.token_ids, every.survival, every.lengths)
        for token_ids, survival, length in zip(*(array[position, :count].tolist() for array in columns), strict=True):
            tree.add(token_ids[:length], "candidates", survival[:length])
        return tree


def _accepted(chosen: Weighed, following: Sequence[int]) -> int:
    """Tokens of what is verified that the target goes on to say; beyond what was recorded, none."""
    draft = proposal_of(chosen)
    said = [*following, *[_NO_TOKEN] * (len(draft.token_ids) + 1)]
    places = depths(draft.parents) if draft.parents else range(len(draft.token_ids) + 1)
    return len(accepted_path(draft, [said[place] for place in places])) - 1


def _with_judging(cost: ProposerCost, scorer: ProposerCost) -> ProposerCost:
    """A call whose draft the scorer judges. What it takes for one candidate is no more than for a set."""
    return ProposerCost(first_ms=cost.first_ms + scorer.step_ms, step_ms=cost.step_ms + scorer.step_ms)
