"""Drafters beside a finite set: the best draft is proposed, and a drafter is called exactly where its gate says so."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from operator import mul
from typing import Any

import pytest
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sources import Store
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.step_cost import StepCosts
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.drafters.choice import ByCost, ChoiceDrafter, PriorRanker, Survival
from choicespec.drafters.union import Below, ByGain, Calibration, CalledDrafter, Gate, Payoff, always, improve
from choicespec.errors import SpecError
from choicespec.records import Proposal, Request
from choicespec.runtimes.scripted import EOS_ID, ByteTokenizer, ScriptedRuntime, TableTarget
from choicespec.spec.experiment import parse_experiment
from choicespec.spec.method import Autoregressive, Choice
from choicespec.spec.pair import PairSpec
from contracts.lossless import assert_lossless
from hypothesis import given
from hypothesis import strategies as st

WHOLE, LIKELY = Survival(0.0), Survival(0.1)
COSTS = StepCosts((1, 9), (8.0, 16.0))
NOTHING = WHOLE.weigh((), "", ())
EIGHTHS = st.integers(1, 8).map(lambda number: number / 8)
Probabilities = st.lists(EIGHTHS, min_size=1, max_size=8)


class SaysTheSame:
    """Drafts the same tokens with the same probabilities at every call, and counts the calls."""

    def __init__(self, probabilities: Sequence[float] = (), token_ids: Sequence[int] | None = None) -> None:
        ids = tuple(token_ids if token_ids is not None else range(len(probabilities)))
        self.draft = Proposal(ids, "nobody", tuple(probabilities))
        self.asked: list[tuple[int, int]] = []  # tokens of the text, and the limit
        self.requests: list[str] = []

    def begin(self, request: Request) -> None:
        self.requests.append(f"begin {request.request_id}")

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        self.asked.append((len(token_ids), limit))
        return self.draft._replace(
            token_ids=self.draft.token_ids[:limit], probabilities=self.draft.probabilities[:limit]
        )

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        self.requests.append(f"finish {request.request_id}")


def called(
    proposer: Proposer, gate: Gate = always, name: str = "d", payoff: Payoff = WHOLE, ms: float = 0.0
) -> CalledDrafter:
    """A drafter that takes ``ms`` a call."""
    ticks = count()
    return CalledDrafter(name, proposer, payoff, gate, clock=lambda: next(ticks) * ms / 1e3)


def choice(drafters: Sequence[CalledDrafter], payoff: Payoff = WHOLE) -> ChoiceDrafter:
    """A fresh finite set with drafters beside it."""
    candidates = RequestCandidates(8, 16, lambda text: list(text.encode()), Store(1000))
    return ChoiceDrafter(candidates, PriorRanker(), payoff, 8, drafters)


def survival_of(probabilities: Sequence[float]) -> list[float]:
    return list(accumulate(probabilities, mul))


def request_of(text: bytes) -> Request:
    return Request("r", tuple(text), max_new_tokens=64)


# Calibration


def test_at_first_a_drafter_is_taken_at_its_word() -> None:
    """Fails if a drafter of which nothing is known is mistrusted, or if a prefix is not the product of its tokens."""
    assert Calibration().survival([0.5, 0.75, 1.0]) == pytest.approx([0.5, 0.375, 0.375])


def test_words_that_are_not_kept_count_for_less() -> None:
    """Fails if an overconfident drafter stays overconfident, or if its sure tokens pay for its unsure ones."""
    found = Calibration()
    for index in range(400):
        said = [1] if index % 2 else [9]
        found.learn(Proposal((1,), "d", (0.93,)), said)  # right half of the time
        found.learn(Proposal((1,), "d", (0.5,)), [1])  # always right
    assert found.survival([0.93])[0] == pytest.approx(0.5, abs=0.02)
    assert found.survival([0.5])[0] == pytest.approx(1.0, abs=0.02)
    assert found.survival([0.99, 0.1]) == pytest.approx([0.99, 0.099])  # of others nothing was learnt


def test_beyond_the_first_wrong_token_and_the_known_text_nothing_is_learnt() -> None:
    """Fails if tokens that followed a mistake, or that were never decided, pass for right or wrong ones."""
    found = Calibration()
    for _ in range(100):
        found.learn(Proposal((1, 2, 3), "d", (0.1, 0.5, 0.7)), [1, 9, 3])
        found.learn(Proposal((1, 2, 3), "d", (0.1, 0.97, 0.7)), [1])
    assert found.survival([0.1])[0] > 0.9
    assert found.survival([0.5])[0] < 0.1
    assert found.survival([0.7])[0] == pytest.approx(0.7)
    assert found.survival([0.97])[0] == pytest.approx(0.97)


def test_a_drafter_is_judged_by_what_the_output_became() -> None:
    """Fails if a draft that was not verified, which is most of a union's, teaches nothing, or is compared with another
    place of the output; or if a request that was not finished changes the next one's drafts."""
    prompt, output = b"ab", b"cdefghij"
    request = request_of(prompt)
    right, wrong = called(SaysTheSame([0.5] * 2, b"ef")), called(SaysTheSame([0.9] * 2, b"cd"))
    first = [beside.draft(NOTHING, prompt + output[:2], 2).expected_accepted for beside in (right, wrong)]
    for _ in range(100):
        for beside in (right, wrong):
            beside.begin(request)
            beside.draft(NOTHING, prompt + output[:2], 2)
    assert [beside.draft(NOTHING, prompt + output[:2], 2).expected_accepted for beside in (right, wrong)] == first
    for _ in range(100):
        for beside in (right, wrong):
            beside.begin(request)
            beside.draft(NOTHING, prompt + output[:2], 2)
            beside.finish(request, output)
    assert right.draft(NOTHING, prompt, 2).expected_accepted > 1.8
    assert wrong.draft(NOTHING, prompt, 2).expected_accepted < 0.2


# The best of the parts


@given(st.lists(Probabilities, min_size=1, max_size=4), Probabilities, st.sampled_from(["all", "by cost"]))
def test_a_union_proposes_the_best_of_its_parts(
    parts: list[list[float]], candidate: list[float], payoff_name: str
) -> None:
    """Fails if a drafter's draft is preferred because it is a drafter's, or the last; or if one is not called."""
    payoff = WHOLE if payoff_name == "all" else ByCost(COSTS)
    best = payoff.weigh(range(len(candidate)), "prompt", survival_of(candidate))
    gains = [payoff.weigh(range(len(part)), "d", survival_of(part)).gain for part in parts]
    drafters = [SaysTheSame(part) for part in parts]
    found = improve(best, [called(one, payoff=payoff) for one in drafters], [0], 8).best
    assert found.gain == max(best.gain, *gains)
    assert found.source == ("prompt" if best.gain >= max(gains) else "d")  # a candidate costs nothing more
    assert all(len(one.asked) == 1 for one in drafters)


def test_a_draft_is_proposed_under_its_drafters_name_as_far_as_it_pays() -> None:
    """Fails if steps are booked on a source that did not propose them, or if an unlikely tail is verified."""
    text = request_of(b"abcabc")
    sure, unsure = [0.999] * 7 + [0.01], [0.01] * 8
    for probabilities, expected in ((sure, (b"STUVWXY", "dflash")), (unsure, (b"abcabcab", "prompt"))):
        proposer = choice([called(SaysTheSame(probabilities, b"STUVWXYZ"), name="dflash", payoff=LIKELY)], LIKELY)
        proposer.begin(text)
        found = proposer.propose(text.prompt_ids, 64)
        assert (bytes(found.token_ids), found.source) == expected


def test_a_drafter_drafts_where_there_is_no_candidate_and_never_beyond_the_limit() -> None:
    """Fails if an empty set ends a step, if a draft is longer than L or than what is left, or if the last token is
    drafted for."""
    drafter = SaysTheSame([0.9] * 20)
    proposer = choice([called(drafter)])
    text = request_of(b"abcdefgh")
    proposer.begin(text)
    assert [len(proposer.propose(text.prompt_ids, limit).token_ids) for limit in (64, 3, 0)] == [8, 3, 0]
    assert drafter.asked == [(8, 8), (8, 3)]


def test_drafters_begin_and_finish_with_every_request() -> None:
    """Fails if a drafter carries one request's state into the next, called or not."""
    idle = SaysTheSame([0.9])
    proposer = choice([called(idle, Below(0.001))])
    text = request_of(b"abcabcabc")
    proposer.begin(text)
    proposer.propose(text.prompt_ids, 64)
    proposer.finish(text, [1])
    assert idle.asked == []
    assert idle.requests == ["begin r", "finish r"]


# Gates


@given(st.lists(Probabilities, min_size=1, max_size=12), st.floats(0.1, 6.0))
def test_a_drafter_is_called_exactly_where_the_best_is_below_its_threshold(
    steps: list[list[float]], threshold: float
) -> None:
    """Fails if the gate is turned round, looks at another step, or costs a call that it should spare."""
    drafter = SaysTheSame([0.5])
    beside = called(drafter, Below(threshold))
    for number, probabilities in enumerate(steps):
        survival = survival_of(probabilities)
        improve(WHOLE.weigh(range(len(survival)), "prompt", survival), [beside], [0] * number, 8)
    expected = [n for n, probabilities in enumerate(steps) if sum(survival_of(probabilities)) < threshold]
    assert [length for length, _ in drafter.asked] == expected


def test_of_several_drafters_the_most_promising_is_called_first_and_may_spare_the_others() -> None:
    """Fails if the order of names decides, if all are called where one is enough, or none where only one promises."""
    dear, good, never = SaysTheSame([0.9] * 8), SaysTheSame([0.99] * 8), SaysTheSame([0.9] * 8)
    drafters = [called(dear, Below(2.0)), called(good, Below(4.0)), called(never, Below(0.5))]
    fair = WHOLE.weigh(range(3), "prompt", [1.0] * 3)
    assert improve(NOTHING, drafters, [0], 8).best.expected_accepted > 7
    assert [len(one.asked) for one in (dear, good, never)] == [0, 1, 0]
    improve(fair, drafters, [0], 8)  # 3 tokens: too few for the second's threshold alone
    assert [len(one.asked) for one in (dear, good, never)] == [0, 2, 0]
    good.draft = Proposal((1,), "nobody", (0.1,))
    improve(NOTHING, drafters, [0], 8)  # it disappoints: all the others are still promising
    assert [len(one.asked) for one in (dear, good, never)] == [1, 3, 0]


def _calls(ms: float, candidate: Sequence[float], probabilities: Sequence[float], steps: int) -> list[int]:
    """The steps at which a drafter behind the gate of costs is called."""
    payoff = ByCost(COSTS)
    drafter = SaysTheSame(probabilities)
    beside = called(drafter, ByGain(payoff), payoff=payoff, ms=ms)
    for number in range(steps):
        best, drafting_ms = improve(payoff.weigh(range(len(candidate)), "prompt", candidate), [beside], [0] * number, 8)
        payoff.take(best, drafting_ms)
    return [length for length, _ in drafter.asked]


def test_by_costs_a_drafter_is_called_where_what_it_adds_is_worth_its_time() -> None:
    """Fails if the time of a call, or what the candidate already promises, is left out of the comparison."""
    assert _calls(1.0, [0.1] * 8, [0.875] * 8, 60) == list(range(60))
    assert _calls(200.0, [0.1] * 8, [0.875] * 8, 60) == [0]  # its time is not known before
    assert _calls(1.0, [1.0] * 8, [0.875] * 8, 60) == []


def test_what_a_drafter_adds_is_judged_by_steps_like_this_one() -> None:
    """Fails if drafts that were good beside good candidates are expected beside bad ones."""
    payoff = ByCost(COSTS)
    drafter = SaysTheSame()
    beside = called(drafter, ByGain(payoff), payoff=payoff, ms=1.0)
    places = [
        (payoff.weigh(range(8), "prompt", survival_of([fair] * 8)), own) for fair, own in ((0.8, 0.95), (0.4, 0.1))
    ]
    for _ in range(16):
        for best, own in places:
            drafter.draft = Proposal(tuple(range(8)), "nobody", (own,) * 8)
            beside.draft(best, [0], 8)
    easy, hard = (beside.promise(best) for best, _ in places)
    assert easy > 1
    assert hard < 0


def test_a_drafter_that_did_not_pay_is_looked_at_again() -> None:
    """Fails if a drafter that was bad at one text is never called at another."""
    calls = _calls(200.0, [0.1] * 8, [0.875] * 8, 600)
    assert calls[0] == 0
    assert len(calls[1:]) == 2


def test_the_time_of_a_call_counts_for_the_rate() -> None:
    """Fails if a union's steps look as cheap as a verification alone, so that doubtful tokens seem too dear."""
    payoff = ByCost(COSTS)
    beside = called(SaysTheSame([1.0] * 8), payoff=payoff, ms=84.0)
    for _ in range(200):
        best, drafting_ms = improve(payoff.weigh((), "", ()), [beside], [0], 8)
        assert drafting_ms == pytest.approx(84.0)
        payoff.take(best, drafting_ms)
    assert payoff.price(100.0) == pytest.approx(9.0, rel=0.01)  # 9 tokens in 16 + 84 ms


# The loop


class Guided:
    """Drafts k tokens of the table's, each right with the same probability, and says so."""

    def __init__(self, k: int, probability: float) -> None:
        self._k, self._probability, self._oracle = k, probability, TableTarget()

    def begin(self, request: Request) -> None:
        self._random = random.Random(0)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        text = list(token_ids)
        for _ in range(min(self._k, limit)):
            right = self._oracle.next_token(text)
            text.append(right if self._random.random() < self._probability else (right + 1) % EOS_ID)
        drafted = tuple(text[len(token_ids) :])
        return Proposal(drafted, "guided", (self._probability,) * len(drafted))

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


class KeepsTooMuch(TableTarget):
    """Planted fault: one rejected token stays in the cache."""

    def keep(self, num_tokens: int) -> None:
        super().keep(num_tokens + 1)


GATES: dict[str, Callable[[Payoff], Gate]] = {
    "union": lambda payoff: always,
    "hybrid": lambda payoff: Below(3.0),
    "by cost": ByGain,
}


def _assert_lossless(target: TableTarget, gate: Callable[[Payoff], Gate]) -> set[str]:
    """Several requests by one proposer; returns the sources that were accepted of."""
    prompts = (b'f(x=12, y="5"); f(x=1', b"f(x=99", b"no part of the script", b'f(x=39, y="')
    requests = [Request(str(index), tuple(prompt), 60) for index, prompt in enumerate(prompts)]
    payoff = ByCost(COSTS)
    parts = {"good": Guided(6, 0.9), "bad": Guided(6, 0.2)}
    proposer = choice([called(part, gate(payoff), name, payoff, ms=1.0) for name, part in parts.items()], payoff)

    def run(request: Request, own: Proposer, at: TableTarget) -> Any:
        stop = StopRule({EOS_ID}, request.max_new_tokens, (), ByteTokenizer().decode)
        return trace(request, decode(at, own, request, stop))

    plain = {r: run(r, AutoregressiveDrafter(Autoregressive()), TableTarget()) for r in requests}
    found = {r: run(r, proposer, target) for r in requests}
    assert_lossless(requests, plain.__getitem__, found.__getitem__)
    return {step.source for t in found.values() for step in t.steps if step.accepted}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_the_output_is_plain_decodings_whoever_proposes(gate: Callable[[Payoff], Gate]) -> None:
    """Fails if what is verified is not what was weighed, or if nobody but one part is ever chosen."""
    assert _assert_lossless(TableTarget(), gate) >= {"good", "prompt"}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_a_target_that_keeps_too_much_is_caught(gate: Callable[[Payoff], Gate]) -> None:
    """The planted fault: the check above must see it."""
    with pytest.raises(AssertionError, match="not lossless"):
        _assert_lossless(KeepsTooMuch(), gate)


# The specification


def test_labels_tell_the_published_methods_apart() -> None:
    """Fails if two rows of a table have one name."""
    labels = [
        Choice(selection="scorer").label,
        Choice(selection="scorer", drafters=("dflash",)).label,
        Choice(selection="scorer", drafters=("dflash",), gate=(2.5,)).label,
        Choice(selection="scorer", drafters=("dflash",), gate="cost").label,
        Choice(selection="scorer", drafters=("mtp", "dflash")).label,
        Choice(selection="scorer", drafters=("mtp", "dflash"), gate=(3.0, 1.0)).label,
        Choice(selection="scorer", drafters=("mtp", "dflash"), gate="cost").label,
    ]
    assert [label.removeprefix("choice scorer L=8").strip() for label in labels] == [
        "",
        "union[dflash]",
        "hybrid[dflash<2.5]",
        "hybrid[dflash]",
        "union[mtp,dflash]",
        "hybrid-all[mtp<3,dflash<1]",
        "hybrid-all[mtp,dflash]",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"drafters": ["a", "a"]}, "drafters=a, a names one twice"),
        ({"gate": [1.0]}, r"gate=\(1.0,\) is for drafters, and there are none"),
        ({"drafters": ["a"], "gate": [1.0, 2.0]}, "gate has 2 numbers for 1 drafters"),
        ({"drafters": ["a"], "gate": "cost", "min_survival": 0.5}, "gate=cost compares costs"),
        ({"pace": "adaptive", "min_survival": 0.5}, "pace=adaptive finds what pays, and min_survival=0.5 sets it"),
        ({"drafters": ["a"], "gate": "price"}, "gate: Input should be 'cost'"),
        ({"drafters": ["b"]}, r"methods.m, of pairs.p.drafters: unknown name 'b'; known: a"),
    ],
)
def test_a_gate_or_a_name_that_fits_nothing_is_refused(fields: dict[str, Any], said: str) -> None:
    """Fails if a hybrid silently runs as a union, or if an unknown drafter is found out only by a worker."""
    pair = {"target": {"model": "none"}, "drafters": {"a": {"kind": "mtp"}}}
    content = {"name": "e", "pairs": {"p": pair}, "tasks": {"t": {"kind": "tool_call"}}}
    parse_experiment(content | {"methods": {"m": {"kind": "choice", "drafters": ["a"], "gate": [1.0]}}}, "here")
    with pytest.raises(SpecError, match=said):
        parse_experiment(content | {"methods": {"m": {"kind": "choice"} | fields}}, "here")


def test_a_runtime_without_drafters_says_so() -> None:
    """Fails if a union runs there as ``choice`` alone, under the union's name."""
    pair = PairSpec.model_validate({"target": {"model": "none"}, "drafters": {"a": {"kind": "mtp"}}})
    assert ScriptedRuntime.refusal(pair, Choice(drafters=("a",))) == "it has no drafters"
    assert ScriptedRuntime.refusal(pair, Choice()) is None


def test_an_empty_draft_is_never_better_than_none() -> None:
    """Fails if a drafter that has nothing to say takes a step's name."""
    found = improve(NOTHING, [called(SaysTheSame())], [0], 8).best
    assert (found.length, found.source) == (0, "")
