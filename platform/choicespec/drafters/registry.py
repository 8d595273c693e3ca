"""The table of proposers: a kind of method to the class that proposes for it, imported on use."""

import importlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from choicespec.candidates.sources import Store
from choicespec.decoding.proposer import Proposer
from choicespec.records import Document
from choicespec.spec.method import Choice, MethodSpec

MOST_REPOSITORY_TOKENS = 50_000_000  # about 420 MB

PROPOSERS = {
    "autoregressive": "choicespec.drafters.autoregressive:AutoregressiveDrafter",
    "ngram": "choicespec.drafters.ngram:NgramDrafter",
    "choice": "choicespec.drafters.choice:ChoiceDrafter",
}


class Proposers:
    """The proposers of one pair and task, one a method; what they learn from outputs stays with them.

    Args:
        encode: the target's tokenizer.
        documents: the task's repository; read, and indexed, when the first method needs it.
    """

    def __init__(self, encode: Callable[[str], list[int]], documents: Callable[[], Iterable[Document]]) -> None:
        self._encode, self._documents = encode, documents
        self._made: dict[MethodSpec, Proposer] = {}

    def of(self, method: MethodSpec) -> Proposer:
        """The proposer of a method of one of the kinds in ``PROPOSERS``."""
        if method not in self._made:
            module, name = PROPOSERS[method.kind].split(":")
            make: Any = getattr(importlib.import_module(module), name)
            is_choice = isinstance(method, Choice)
            self._made[method] = make(method, self._encode, self._repository) if is_choice else make(method)
        return self._made[method]

    @cached_property
    def _repository(self) -> Store:
        store = Store(MOST_REPOSITORY_TOKENS)
        for document in self._documents():
            store.add(self._encode(document.text), name=document.name)
        return store
