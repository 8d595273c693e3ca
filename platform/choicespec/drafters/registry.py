"""The tables of proposers and of neural drafters: a kind to what makes one, imported on use."""

import importlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

from choicespec.candidates.request import RequestCandidates, repository_of
from choicespec.candidates.sources import Store
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.step_cost import Costs
from choicespec.drafters.choice import ByCost, ChoiceDrafter, PriorRanker, Ranker, Survival
from choicespec.drafters.union import Below, ByGain, CalledDrafter, Gate, Payoff, always
from choicespec.records import Document
from choicespec.spec.method import Choice, Draft, MethodSpec

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
        step_costs: what its verifications cost.
        scorer: the pair's scorer, reading the target's hidden states.
        drafter: one of the pair's drafters, reading the target's hidden states.
    """

    encode: Callable[[str], list[int]]
    step_costs: Callable[[], Costs]
    scorer: Callable[[], Ranker]
    drafter: Callable[[Draft], Proposer]


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

    def of(self, method: MethodSpec) -> Proposer:
        """The proposer of a method of one of the kinds in ``PROPOSERS``, or of one that drafts."""
        if method not in self._made:
            self._made[method] = self._make(method)
        return self._made[method]

    def _make(self, method: MethodSpec) -> Proposer:
        if isinstance(method, Draft):
            return self._target.drafter(method)
        if isinstance(method, Choice):
            return self._choice(method)
        proposer: Proposer = made_on_use(PROPOSERS[method.kind])(method)
        return proposer

    def _choice(self, method: Choice) -> ChoiceDrafter:
        assert method.selection != "oracle", "every runtime refuses it"
        target = self._target
        candidates = RequestCandidates(method.block_length, method.num_candidates, target.encode, self._repository)
        ranker = target.scorer() if method.selection == "scorer" else PriorRanker()
        payoff = payoff_of(method, target.step_costs)
        drafters = [
            CalledDrafter(draft.drafter, self.of(draft), payoff, gate)
            for draft, gate in zip(method.calls, gates_of(method, payoff), strict=True)
        ]
        return ChoiceDrafter(candidates, ranker, payoff, method.block_length, drafters)

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
