"""The table of proposers: a kind of method to what makes its proposer, imported on use."""

import importlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

from choicespec.candidates.request import RequestCandidates, repository_of
from choicespec.candidates.sources import Store
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.step_cost import StepCosts
from choicespec.drafters.choice import ByCost, ChoiceDrafter, PriorRanker, Ranker, Survival
from choicespec.records import Document
from choicespec.spec.method import Choice, MethodSpec

PROPOSERS = {
    "autoregressive": "choicespec.drafters.autoregressive:AutoregressiveDrafter",
    "ngram": "choicespec.drafters.ngram:NgramDrafter",
    "choice": "choicespec.drafters.choice:ChoiceDrafter",
}


class TargetSide(NamedTuple):
    """What proposers may ask of the target's side; each is made on its first use.

    Attributes:
        encode: the target's tokenizer.
        step_costs: what its verifications cost.
        scorer: the pair's scorer, reading the target's hidden states.
    """

    encode: Callable[[str], list[int]]
    step_costs: Callable[[], StepCosts]
    scorer: Callable[[], Ranker]


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
        """The proposer of a method of one of the kinds in ``PROPOSERS``."""
        if method not in self._made:
            module, name = PROPOSERS[method.kind].split(":")
            make: Any = getattr(importlib.import_module(module), name)
            self._made[method] = self._choice(method) if isinstance(method, Choice) else make(method)
        return self._made[method]

    def _choice(self, method: Choice) -> ChoiceDrafter:
        assert method.selection != "oracle", "every runtime refuses it"
        target = self._target
        candidates = RequestCandidates(method.block_length, method.num_candidates, target.encode, self._repository)
        ranker = target.scorer() if method.selection == "scorer" else PriorRanker()
        length = ByCost(target.step_costs()) if method.min_survival is None else Survival(method.min_survival)
        return ChoiceDrafter(candidates, ranker, length)

    @cached_property
    def _repository(self) -> Store:
        return repository_of(self._documents(), self._target.encode)
