"""What every drafter that reads the target's hidden states promises beside the contract of all proposers: a draft
depends on the text alone, not on when the drafter was called, nor on what was rejected before."""

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.stopping import StopRule
from choicespec.decoding.tap import Tap
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.records import Proposal, Request, Trace
from choicespec.spec.method import Autoregressive, Draft, MethodSpec
from contracts.proposer_contract import ProposerContract, request_of
from hypothesis import strategies as st
from integration.small_checkpoints import small_llama

_BEFORE = 7  # stands before each text, which may be a single token: a target that drafts has kept one at least
_REJECTED = (11, 12, 13)


@cache
def small_target(slot: int) -> CausalLmTarget:
    """A target for tests; those in other slots have the same weights and caches of their own."""
    return CausalLmTarget(small_llama())


def same_draft(found: Proposal, expected: Proposal) -> bool:
    """Equal, but for sums in another order."""
    return found[:2] == expected[:2] and found.probabilities == pytest.approx(expected.probabilities, rel=1e-3)


class Followed:
    """A drafter whose target follows the texts that it is asked about, and verifies three wrong tokens at each step."""

    def __init__(self, target: CausalLmTarget, drafter: Proposer) -> None:
        self._target, self._drafter = target, drafter
        self._kept = 0

    def begin(self, request: Request) -> None:
        token_ids = (_BEFORE, *request.prompt_ids)
        self._target.prefill(token_ids[:-1])
        self._kept = len(token_ids) - 1
        self._drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        token_ids = (_BEFORE, *token_ids)
        if new := token_ids[self._kept : -1]:
            self._target.verify((*new, *_REJECTED))
            self._target.keep(len(new))
            self._kept += len(new)
        return self._drafter.propose(token_ids, limit)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        self._drafter.finish(request, output_ids)


class NeuralDrafterContract(ProposerContract):
    """The properties. ``drafter`` makes one on a target."""

    methods: ClassVar[st.SearchStrategy[MethodSpec]] = st.builds(
        lambda most: Draft(drafter="small", num_draft_tokens=most), most=st.integers(1, 5)
    )

    def drafter(self, target: CausalLmTarget, num_draft_tokens: int) -> Proposer:
        """A drafter with random weights, the same every time."""
        raise NotImplementedError

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Draft)
        return method.num_draft_tokens

    def fresh(self, method: MethodSpec, slot: int = 0) -> Proposer:
        assert isinstance(method, Draft)
        target = small_target(slot)
        return Followed(target, self.drafter(target, method.num_draft_tokens))

    def draft(self, method: MethodSpec, text: list[int], limit: int) -> Proposal:
        proposer = self.fresh(method, slot=1)
        proposer.begin(request_of(text))
        return proposer.propose(text, limit)

    def same(self, found: Proposal, expected: Proposal) -> bool:
        return same_draft(found, expected)

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        target = small_target(0)
        proposer: Proposer = AutoregressiveDrafter(Autoregressive())
        if isinstance(method, Draft):
            proposer = self.drafter(target, method.num_draft_tokens)
        stop = StopRule((), request.max_new_tokens, (), str)
        return trace(request, decode(target, proposer, request, stop))

    def test_a_drafter_that_left_out_steps_catches_up(self) -> None:
        """Fails if states of the steps that it was not called at are lost, doubled or put elsewhere."""
        text = [5, 80, 3, 200, 41, 6, 77, 130, 9, 10, 11, 12]
        method = Draft(drafter="small", num_draft_tokens=4)
        found = self._stepwise(method, text, called=(3, 4, 9, 12))
        assert self.same(found, self.draft(method, text, 8))

    def test_states_of_rejected_tokens_are_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The planted fault: a tap keeps a block's last states, not its first. The test above must see it."""
        text = [5, 80, 3, 200, 41, 6, 77, 130, 9, 10, 11, 12]
        method = Draft(drafter="small", num_draft_tokens=4)
        right, keep = self.draft(method, text, 8), Tap.keep

        def keep_last(tap: Tap, hidden: dict[int, torch.Tensor], num_tokens: int) -> None:
            keep(tap, {layer: states[len(states) - num_tokens :] for layer, states in hidden.items()}, num_tokens)

        monkeypatch.setattr(Tap, "keep", keep_last)
        assert not self.same(self._stepwise(method, text, called=(3, 4, 9, 12)), right)

    def _stepwise(self, method: Draft, text: list[int], called: Sequence[int]) -> Proposal:
        """The draft after the whole text of a drafter called at some of its lengths, whose target ran at each."""
        target = small_target(0)
        drafter = self.drafter(target, method.num_draft_tokens)
        silent: Any = AutoregressiveDrafter(Autoregressive())
        found = Proposal((), "")
        follower = Followed(target, silent)
        follower.begin(request_of(text[:3]))
        drafter.begin(request_of(text[:3]))
        for length in range(3, len(text) + 1):
            follower.propose(text[:length], 8)
            if length in called:
                found = drafter.propose((_BEFORE, *text[:length]), 8)
        return found
