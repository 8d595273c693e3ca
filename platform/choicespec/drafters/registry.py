"""The table of proposers: a kind of method to the class that proposes for it, imported on use."""

import importlib

from choicespec.decoding.proposer import Proposer
from choicespec.spec.method import MethodSpec

PROPOSERS = {
    "autoregressive": "choicespec.drafters.autoregressive:AutoregressiveDrafter",
    "ngram": "choicespec.drafters.ngram:NgramDrafter",
}


def make_proposer(method: MethodSpec) -> Proposer:
    """The proposer of a method of one of the kinds in ``PROPOSERS``."""
    module, name = PROPOSERS[method.kind].split(":")
    proposer: Proposer = getattr(importlib.import_module(module), name)(method)
    return proposer
