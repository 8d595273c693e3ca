"""The tables of proposers and of neural drafters: a kind to what makes one, imported on use."""

import importlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple, cast

from choicespec.candidates.request import RequestCandidates, repository_of
from choicespec.candidates.sources import Store
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.step_cost import Costs, LiveCosts
from choicespec.drafters.choice import ByCost, ChoiceDrafter, JudgingRanker, PriorRanker, Survival
from choicespec.drafters.marginals import BlockDrafter, MarginalDrafter
from choicespec.drafters.paced import PacedDrafter
from choicespec.drafters.union import Below, ByGain, CalledDrafter, Gate, Payoff, always
from choicespec.records import Document, Step
from choicespec.spec.method import Choice, Draft, MethodSpec, is_adaptive, is_tree

PROPOSERS = {
    "autoregressive": "choicespec.drafters.autoregressive:AutoregressiveDrafter",
    "ngram": "choicespec.drafters.ngram:NgramDrafter",
    "choice": "choicespec.drafters.choice:ChoiceDrafter",
}
# By the kind of the pair's drafter. They need the target's hidden states, and torch.
DRAFTERS = {
    "dflash": "choicespec.drafters.dflash:DFlashCheckpoint",
    "dflash2": "choicespec.drafters.dflash2:DFlash2Checkpoint",
    "mtp": "choicespec.drafters.mtp:MtpCheckpoint",
}


class TargetSide(NamedTuple):
    """What proposers may ask of the target's side; each is made on its first use.

    Attributes:
        encode: the target's tokenizer.
        step_costs: what a method's verifications cost.
        live_costs: the same, to be corrected by the method's own steps.
        scorer: the pair's scorer, reading the target's hidden states.
        drafter: one of the pair's drafters, reading the target's hidden states.
        as_trained: a draft with no more tokens than its drafter was trained for.
    """

    encode: Callable[[str], list[int]]
    step_costs: Callable[[MethodSpec], Costs]
    live_costs: Callable[[MethodSpec], LiveCosts]
    scorer: Callable[[], JudgingRanker]
    drafter: Callable[[Draft], Proposer]
    as_trained: Callable[[Draft], Draft] = lambda draft: draft


def made_on_use(place: str) -> Any:
    """What a table names as "module:name"."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


class Proposers:
    """The proposers of one pair and task, one a method; what they learn from outputs stays with them.

    Args:
        target: what they may ask of the target's side.
        documents: the task's repository; read, and indexed, when the first method needs it.
    """

    def __init__(self, target: TargetSide, documents: Callable[[], Iterable[Document]]) -> None:
        self._target, self._documents = target, documents
        self._made: dict[MethodSpec, Proposer] = {}
        self._paced: dict[MethodSpec, PacedDrafter] = {}  # those of them that see their steps

    def of(self, method: MethodSpec) -> Proposer:
        """The proposer of a method of one of the kinds in ``PROPOSERS``, or of one that drafts."""
        if method not in self._made:
            self._made[method] = self._make(method)
        return self._made[method]

    def observe(self, method: MethodSpec, step: Step) -> None:
        """Let a method that adapts know what its last step took."""
        if method in self._paced:
            self._paced[method].observe(step)

    def _make(self, method: MethodSpec) -> Proposer:
        if not is_adaptive(method):
            return self._planned(method, None)
        costs = self._target.live_costs(method)
        paced = self._paced[method] = PacedDrafter(self._planned(method, costs), costs)
        return paced

    def _planned(self, method: MethodSpec, costs: Costs | None) -> Proposer:
        """The proposer itself; where the costs are given, it leaves it to others how much of a draft is verified."""
        if isinstance(method, Draft):
            drafter = self._target.drafter(method)
            if not is_tree(method):
                return drafter
            payoff = ByCost(self._target.step_costs(method))
            return MarginalDrafter(cast(BlockDrafter, drafter), payoff, method.drafter, method.width)
        if isinstance(method, Choice):
            return self._choice(method, costs)
        proposer: Proposer = made_on_use(PROPOSERS[method.kind])(method)
        return proposer

    def _choice(self, method: Choice, costs: Costs | None) -> ChoiceDrafter:
        assert method.selection != "oracle", "every runtime refuses it"
        target = self._target
        candidates = RequestCandidates(method.block_length, method.num_candidates, target.encode, self._repository)
        scorer = target.scorer() if method.selection == "scorer" else None
        whole = costs is not None and method.gate != "cost"
        payoff = Survival(0.0) if whole else payoff_of(method, lambda: costs or target.step_costs(method))
        drafters = []
        for draft, gate in zip(method.calls, gates_of(method, payoff), strict=True):
            proposer, judge = self.of(target.as_trained(draft)), scorer.judge(draft.drafter) if scorer else None
            drafters.append(CalledDrafter(draft.drafter, proposer, payoff, gate, judge=judge))
        ranker = scorer or PriorRanker()
        return ChoiceDrafter(candidates, ranker, payoff, method.block_length, drafters, method.width)

    @cached_property
    def _repository(self) -> Store:
        return repository_of(self._documents(), self._target.encode)


def payoff_of(method: Choice, step_costs: Callable[[], Costs]) -> Payoff:
    """How a method weighs its drafts; the costs are asked for only where it weighs by them."""
    return ByCost(step_costs()) if method.min_survival is None else Survival(method.min_survival)


def gates_of(method: Choice, payoff: Payoff) -> list[Gate]:
    """The gate of each drafter of a method."""
    if method.gate is None:
        return [always for _ in method.drafters]
    if method.gate == "cost":
        return [ByGain(payoff) for _ in method.drafters]
    return [Below(threshold) for threshold in method.gate]
