"""The loop is lossless, and the check that says so catches every planted fault."""

import random
from collections.abc import Callable, Sequence

import pytest
from choicespec.decoding import loop
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.stopping import StopRule
from choicespec.decoding.target import TreeTarget
from choicespec.decoding.verification import accepted_path, count_accepted
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.records import Proposal, Request, Trace
from choicespec.runtimes.scripted import EOS_ID, ByteTokenizer, TableTarget
from choicespec.spec.method import Autoregressive
from contracts.lossless import assert_lossless
from hypothesis import given
from hypothesis import strategies as st

ENDING = 'f(x=39, y="'  # goes on with 4"); and the end of the sequence: six tokens
ORACLE = TableTarget()  # only asked for next tokens, which change nothing in it
PROMPTS = ('f(x=12, y="5"); f(x=1', 'f(x=20, y="', "f(x=99", "no part of the script")


class GuidedDrafter:
    """Drafts k tokens, each of them right with the same probability; heeds the limit, or ignores it.

    It goes on beyond an end of sequence, as a drafter does that knows of none.
    """

    def __init__(self, k: int, probability: float, seed: int = 0, heeds_limit: bool = True) -> None:
        self._k, self._probability, self._seed, self._heeds_limit = k, probability, seed, heeds_limit

    def begin(self, request: Request) -> None:
        self._random = random.Random(self._seed)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        text = list(token_ids)
        for _ in range(min(self._k, limit) if self._heeds_limit else self._k):
            right = ORACLE.next_token(text)
            text.append(right if self._random.random() < self._probability else (right + 1) % EOS_ID)
        return Proposal(tuple(text[len(token_ids) :]), "guided")

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


class KeepsTooMuch(TableTarget):
    """Planted fault: one rejected token stays in the cache."""

    def keep(self, num_tokens: int) -> None:
        super().keep(num_tokens + 1)


class KeepsTooLittle(TableTarget):
    """Planted fault: the last kept token is missing from the cache."""

    def keep(self, num_tokens: int) -> None:
        super().keep(num_tokens - 1)


class KeepsTheLastRequest(TableTarget):
    """Planted fault: the cache is not emptied before a prompt."""

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        return super().prefill([*self._cache, *prompt_ids])


class ShiftedBack(TableTarget):
    """Planted fault: each choice stands one place too early."""

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        own_ids = super().verify(block_ids, parents)
        return [*own_ids[1:], own_ids[-1]]


class ShiftedOn(TableTarget):
    """Planted fault: each choice stands one place too late."""

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        own_ids = super().verify(block_ids, parents)
        return [own_ids[0], *own_ids[:-1]]


def run(request: Request, proposer: Proposer, target: TreeTarget | None = None) -> Trace:
    stop = StopRule({EOS_ID}, request.max_new_tokens, request.stop, ByteTokenizer().decode)
    return trace(request, decode(target or TableTarget(), proposer, request, stop))


def plain(request: Request) -> Trace:
    """Plain decoding by the definition, without the loop that is tested."""
    text, first = list(request.prompt_ids), len(request.prompt_ids)
    stop = StopRule({EOS_ID}, request.max_new_tokens, request.stop, ByteTokenizer().decode)
    finish = None
    while finish is None:
        kept, finish = stop.cut(text[first:], [ORACLE.next_token(text)])
        text += kept
    return Trace(request.request_id, first, tuple(text[first:]), 1, finish, 0.0, 0.0, ())


def request_of(prompt: str, max_new_tokens: int = 40) -> Request:
    return Request(prompt, tuple(prompt.encode()), max_new_tokens)


def assert_target_lossless(target: TableTarget, k: int = 6) -> None:
    """The check of every test here: one target, several prompts after each other, drafts that are often half right."""
    requests = [request_of(prompt) for prompt in (*PROMPTS, ENDING)]
    assert_lossless(requests, plain, lambda request: run(request, GuidedDrafter(k, 0.7), target))


def test_the_true_loop_is_lossless() -> None:
    """Fails if the check cries wolf; then what it says of the planted faults below is worth nothing."""
    assert_target_lossless(TableTarget())


@pytest.mark.parametrize("fault", [KeepsTooMuch, KeepsTooLittle, KeepsTheLastRequest, ShiftedBack, ShiftedOn])
def test_a_faulty_target_is_caught(fault: Callable[[], TableTarget]) -> None:
    """Fails if rollback, prefill or verification could be wrong without anyone noticing."""
    with pytest.raises(AssertionError, match="not lossless"):
        assert_target_lossless(fault())


def test_accepting_one_token_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a wrong draft token could slip into an output."""
    block = range(7)
    monkeypatch.setattr(loop, "accepted_path", lambda draft, own: block[: len(accepted_path(draft, own)) + 1])
    with pytest.raises(AssertionError, match="not lossless"):
        assert_target_lossless(TableTarget())


def test_accepting_one_token_too_few_shows_in_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs speed, not correctness: the accounting must show what the output cannot."""
    right = run(request_of(PROMPTS[0]), GuidedDrafter(4, 1.0))
    monkeypatch.setattr(loop, "accepted_path", lambda draft, own: accepted_path(draft, own)[:-1] or [0])
    assert_target_lossless(TableTarget())
    assert len(run(request_of(PROMPTS[0]), GuidedDrafter(4, 1.0)).steps) > len(right.steps)


@given(
    prompt=st.text(alphabet='f(x=1239, y"); é', min_size=1, max_size=20) | st.sampled_from((*PROMPTS, ENDING)),
    k=st.integers(1, 16),
    probability=st.floats(0, 1),
    seed=st.integers(0, 9),
    heeds_limit=st.booleans(),
    max_new_tokens=st.integers(1, 40),
    stop=st.sampled_from(((), ("y=",), ('");',), ("3", "no such"))),
)
def test_any_drafts_give_plain_decodings_output(
    prompt: str,
    k: int,
    probability: float,
    seed: int,
    heeds_limit: bool,
    max_new_tokens: int,
    stop: tuple[str, ...],
) -> None:
    """Fails if an output depends on what is drafted; and if the steps do not account for it, token by token."""
    request = request_of(prompt, max_new_tokens)._replace(stop=stop)
    proposer = GuidedDrafter(k, probability, seed, heeds_limit)
    assert_lossless([request], plain, lambda r: run(r, proposer))
    found = run(request, proposer)
    assert all(0 <= step.accepted <= step.proposed for step in found.steps)
    counted = found.prefill_tokens + sum(step.accepted + 1 for step in found.steps)
    assert counted - len(found.output_ids) in ((0, 1) if found.steps else (0,))


def test_right_drafts_are_all_accepted() -> None:
    """Fails if the bonus token is counted as accepted, or if the last token is drafted: 1 + 3 x (4 + 1) tokens."""
    found = run(request_of(PROMPTS[0], 16), GuidedDrafter(4, 1.0))
    assert [(s.proposed, s.accepted, s.source) for s in found.steps] == [(4, 4, "guided")] * 3
    assert (len(found.output_ids), found.finish_reason, found.decode_tokens) == (16, "length", 15)


def test_the_limit_shrinks_the_last_draft() -> None:
    """Fails if a drafter is asked for tokens that the length has no room for: 1 + 5 + 5 tokens leave 2 and a bonus."""
    found = run(request_of(PROMPTS[0], 14), GuidedDrafter(4, 1.0))
    assert [s.proposed for s in found.steps] == [4, 4, 2]
    assert len(found.output_ids) == 14


def test_the_length_cuts_inside_a_block() -> None:
    """Fails if a drafter that ignores the limit lengthens the output, or if cut tokens are counted as accepted."""
    found = run(request_of(PROMPTS[0], 4), GuidedDrafter(8, 1.0, heeds_limit=False))
    assert [(s.proposed, s.accepted) for s in found.steps] == [(8, 3)]
    assert (len(found.output_ids), found.finish_reason) == (4, "length")


def test_an_end_of_sequence_inside_a_draft_ends_the_output_there() -> None:
    """Fails if right draft tokens after the end are kept: the drafter knows them, and the target agrees."""
    found = run(request_of(ENDING), GuidedDrafter(16, 1.0))
    assert found.output_ids == (*b'4"); ', EOS_ID)
    assert found.finish_reason == "eos"
    assert [(s.proposed, s.accepted) for s in found.steps] == [(16, 5)]


def test_wrong_drafts_cost_a_step_a_token() -> None:
    """Fails if a rejected draft still moves the output by more than the bonus token."""
    found = run(request_of(PROMPTS[0], 10), GuidedDrafter(4, 0.0))
    assert [s.accepted for s in found.steps] == [0] * 9
    assert all(s.proposed > 0 for s in found.steps[:-1])


def test_empty_drafts_are_plain_decoding() -> None:
    """Fails if a step without a draft is left out of the accounting, or booked on a proposer."""
    found = run(request_of(PROMPTS[0], 10), AutoregressiveDrafter(Autoregressive()))
    assert [(s.proposed, s.accepted, s.source) for s in found.steps] == [(0, 0, "")] * 9


def test_an_output_of_one_token_needs_no_step() -> None:
    """Fails if the prefill's own token is not checked against the stop rules."""
    found = run(request_of(PROMPTS[0], 1), GuidedDrafter(4, 1.0))
    assert (found.steps, found.finish_reason, found.decode_ms) == ((), "length", 0)


def test_decode_time_is_the_steps_time() -> None:
    """Fails if the search and the first draft are left out of the decode time, or the prefill is in it."""
    found = run(request_of(PROMPTS[0]), GuidedDrafter(4, 0.5))
    assert found.decode_ms == pytest.approx(sum(s.propose_ms + s.verify_ms for s in found.steps))
    assert all(s.propose_ms > 0 and s.verify_ms > 0 for s in found.steps)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_accepted_is_the_longest_common_prefix(draft: list[int], own: list[int]) -> None:
    """Fails if a later agreement counts after a first disagreement, or if one place is skipped."""
    accepted = count_accepted(draft, own)
    assert draft[:accepted] == own[:accepted]
    assert accepted == len(draft) or draft[accepted] != own[accepted]
