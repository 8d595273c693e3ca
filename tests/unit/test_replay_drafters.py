"""Drafters in a replay, alone and beside candidate sets: the live loop's steps, on a table model with drafters that are
right in part and say how sure they are."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from choicespec.decoding.along import drafts_along
from choicespec.drafters import registry
from choicespec.drafters.choice import PriorRanker
from choicespec.drafters.registry import Proposers, TargetSide
from choicespec.drafters.union import CalledDrafter, Judge
from choicespec.errors import RecordingError
from choicespec.measuring.cost import Costs, DrafterCost, ProposerCost, measure_costs
from choicespec.measuring.measure import TrialResult, warm_up
from choicespec.recordings import RecordingManifest
from choicespec.records import Document, Proposal, Request, TargetIdentity
from choicespec.replay.drafted import Drafted, DraftedFile, drafted_of, shortened
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.ranking import Drafts, EveryCandidate, Selection
from choicespec.replay.simulate import Replay
from choicespec.runtimes.scripted import ScriptedRuntime, TableTarget
from choicespec.spec.method import Choice, Draft, MethodSpec
from choicespec.spec.pair import DrafterSpec
from choicespec.spec.task import ToolCall
from contracts.replay_equality import assert_all_same, costs_of
from unit.recorded_table import PAIR, REQUESTS, RISING, SPEC, Recording, live, record

LONGEST = 12
NAMES = ("sure", "rash")
COST = {name: ProposerCost(first_ms=0.25, step_ms=0.125 * (1 + number)) for number, name in enumerate(NAMES)}
COSTS = costs_of(RISING, drafters={name: DrafterCost(tokens=(LONGEST,), ms=(cost,)) for name, cost in COST.items()})
METHODS: tuple[MethodSpec, ...] = (
    *(Draft(drafter="sure", num_draft_tokens=k) for k in (1, 5, LONGEST)),
    Draft(drafter="rash", num_draft_tokens=7),
    *(Choice(block_length=L, drafters=("sure",), min_survival=0.1) for L in (3, 8)),
    Choice(drafters=NAMES, min_survival=0.0),
    Choice(drafters=NAMES, gate=(1.0, 0.5), min_survival=0.3),
    Choice(drafters=NAMES),
    Choice(block_length=4, drafters=NAMES, gate=(2.5, 1.5)),
    Choice(block_length=6, drafters=NAMES, gate="cost"),
    Choice(num_candidates=2, drafters=("rash",), gate="cost"),
    Choice(drafters=NAMES, width=3),
    Choice(drafters=NAMES, width=4, gate=(1.0, 0.5), min_survival=0.2),
    Choice(selection="scorer", drafters=NAMES),
    Choice(selection="scorer", block_length=6, drafters=NAMES, gate="cost"),
    Choice(selection="scorer", drafters=("rash", "sure"), gate=(3.0, 1.0), min_survival=0.2),
    Choice(selection="scorer", drafters=NAMES, width=3),
)


class Clock:
    """Seconds that pass only while a drafter drafts."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class InPartRight:
    """Drafts what the table says next, but for tokens that a checksum of the text picks; its probabilities know half of
    that."""

    def __init__(self, method: Draft, clock: Clock) -> None:
        self._method, self._clock, self._table = method, clock, TableTarget()
        self._first = True

    def begin(self, request: Request) -> None:
        self._first = True

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        cost = COST[self._method.drafter]
        self._clock.now_s += (cost.first_ms if self._first else cost.step_ms) / 1e3
        self._first = False
        text, probabilities = list(token_ids), []
        for _ in range(min(limit, self._method.num_draft_tokens)):
            luck = zlib.crc32(bytes(i % 256 for i in text[-20:]), len(self._method.drafter + self._method.drafter[0]))
            wrong = luck % 5 == 0
            text.append(7 if wrong else self._table.next_token(text))
            probabilities.append(0.3 if wrong and luck % 2 else 0.55 + luck % 4 / 10)
        return Proposal(tuple(text[len(token_ids) :]), self._method.drafter, tuple(probabilities))

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


def judge(drafted: Proposal, token_ids: Sequence[int]) -> list[float]:
    """What a scorer might say, which depends on the draft's tokens and length as well."""
    return list(accumulate((p ** (1 + 1 / len(drafted.token_ids)) for p in drafted.probabilities), mul))


class Judging(PriorRanker):
    """A scorer that ranks as the prior, and judges the drafts of one drafter; the other goes by its own word."""

    def judge(self, drafter: str) -> Judge | None:
        return judge if drafter == "rash" else None


class JudgingRanking:
    """The same on a recording."""

    def __init__(self, recording: Recording) -> None:
        self._ranking, self._limits = recording.ranking, recording.proposals.limits.tolist()

    def best(self, selection: Selection, block_length: int) -> list[Drafts]:
        return self._ranking.best("prior", block_length)

    def every(self, selection: Selection, block_length: int) -> Sequence[EveryCandidate]:
        return self._ranking.every("prior", block_length)

    def judged(self, drafter: str, drafted: Drafted, block_length: int) -> list[list[float]] | None:
        if drafter != "rash":
            return None
        limits = [min(limit, block_length) for limit in self._limits]
        return [judge(shortened(one, limit), ()) for one, limit in zip(drafted.proposals("d"), limits, strict=False)]


class DraftingRuntime(ScriptedRuntime):
    """The table model with drafters, whose time is their clock's."""

    clock = Clock()

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        super().use_repository(documents)
        unused: Any = None
        side = TargetSide(self.tokenizer.encode, lambda method: self._costs, unused, Judging, self._drafter)
        self._proposers = Proposers(side, documents)

    def _drafter(self, method: Draft) -> InPartRight:
        return InPartRight(method, self.clock)


class Followed(TableTarget):
    """Can be led along a text, of which these drafters see nothing."""

    def follow(self, token_ids: Sequence[int]) -> Iterator[None]:
        yield from (None for _ in token_ids)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record()


@pytest.fixture(scope="module")
def drafted(recording: Recording) -> dict[str, Drafted]:
    """The longest drafts along the outputs."""
    found = {}
    for name in NAMES:
        drafter = InPartRight(Draft(drafter=name, num_draft_tokens=LONGEST), Clock())
        along = [drafts_along(Followed(), [drafter], one.request, one.output_ids) for one in recording.recorded]
        found[name] = drafted_of((draft for [drafts] in along for draft in drafts), LONGEST)
    return found


@pytest.fixture(scope="module")
def results() -> list[TrialResult]:
    """What the measuring loop finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "CalledDrafter", partial(CalledDrafter, clock=DraftingRuntime.clock))
        return live(DraftingRuntime(SPEC, PAIR), METHODS)


def replay(recording: Recording, drafted: dict[str, Drafted], costs: Costs = COSTS, warm: bool = True) -> Replay:
    first = record([warm_up(REQUESTS[0])])
    before = RecordedDrafts(first.proposals, JudgingRanking(first)) if warm else None
    return Replay(RecordedDrafts(recording.proposals, JudgingRanking(recording), drafted, before), costs)


def test_every_method_takes_the_steps_of_the_live_loop(
    recording: Recording, drafted: dict[str, Drafted], results: list[TrialResult]
) -> None:
    """Fails if a draft, its probabilities, what was learnt of a drafter, or when it is called differ from the live
    loop's, where the drafters' times are those that were measured."""
    found = replay(recording, drafted).of(METHODS)
    assert_all_same(found, results)
    assert all(one.accepted.sum() and (one.proposed > one.accepted).any() for one in found), "or nothing is compared"


FAULTS: dict[str, Callable[[Drafted], Drafted]] = {
    "probabilities of other tokens": lambda one: one._replace(probabilities=one.probabilities[:, ::-1].copy()),
    "drafts of the position before": lambda one: Drafted(
        np.roll(one.token_ids, 1, 0), np.roll(one.probabilities, 1, 0)
    ),
    "a shorter draft": lambda one: Drafted(one.token_ids[:, :-5], one.probabilities[:, :-5]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_what_was_recorded_is_caught(
    recording: Recording, drafted: dict[str, Drafted], results: list[TrialResult], fault: str
) -> None:
    """The planted faults."""
    broken = {name: FAULTS[fault](one) for name, one in drafted.items()}
    with pytest.raises((AssertionError, RecordingError), match=r"is not|but a replay reaches 7"):
        assert_all_same(replay(recording, broken).of(METHODS), results)


def test_a_hybrids_time_is_that_of_its_calls(
    recording: Recording, drafted: dict[str, Drafted], results: list[TrialResult]
) -> None:
    """Fails if a drafter that a gate spares is charged for, or one that is called is free."""
    union, hybrid, alone = (
        replay(recording, drafted).of([method])[0] for method in (METHODS[6], METHODS[7], Draft(drafter="sure"))
    )
    calls = sum(cost.step_ms for cost in COST.values())
    assert union.draft_ms.sum() == pytest.approx(
        sum(calls * (n - 1) + 0.5 for n in union.steps if n), abs=2 * calls * len(REQUESTS)
    )
    assert 0 < hybrid.draft_ms.sum() / hybrid.steps.sum() < union.draft_ms.sum() / union.steps.sum()
    assert alone.draft_ms.sum() == pytest.approx(sum(0.125 * (n - 1) + 0.25 for n in alone.steps if n))


def test_what_a_drafter_costs_must_be_known(recording: Recording, drafted: dict[str, Drafted]) -> None:
    """Fails if drafting is predicted to take no time."""
    for method in (Draft(drafter="sure"), Choice(drafters=("sure",))):
        with pytest.raises(RecordingError, match=r"do not say what drafter 'sure' takes; .* jobs\.record --again"):
            replay(recording, drafted, costs_of(RISING)).of([method])


def test_a_cost_lies_between_those_timed() -> None:
    """Fails if a chain of one token is charged for eight."""
    low, high = ProposerCost(first_ms=2.0, step_ms=1.0), ProposerCost(first_ms=9.0, step_ms=8.0)
    cost = DrafterCost(tokens=(1, 8), ms=(low, high))
    assert [cost.of(tokens).step_ms for tokens in (1, 4, 8)] == pytest.approx([1.0, 4.0, 8.0])


def test_drafters_are_timed_on_their_worker() -> None:
    """Fails if a drafter's cost is another proposer's, or is known at one k only."""
    costs = measure_costs(
        DraftingRuntime(SPEC, PAIR), REQUESTS, 1, None, [Draft(drafter="sure", num_draft_tokens=LONGEST)]
    )
    assert set(costs.drafters) == {"sure"}
    assert costs.drafters["sure"].tokens == (1, LONGEST)
    assert all(cost.step_ms > 0 for cost in costs.drafters["sure"].ms)
    assert costs.scorer is None


def test_kept_drafts_are_those_of_their_drafter(drafted: dict[str, Drafted], tmp_path: Path) -> None:
    """Fails if drafts of a drafter that was trained anew since, or of another recording, are taken."""
    identity = TargetIdentity(weights="w", tokenizer="t", precision="float32", hidden_size=1, num_layers=1)
    manifest = RecordingManifest(target=identity, task=ToolCall(), layers=(), chunks=(), request_ids=())
    spec = DrafterSpec(kind="dflash", model="m", sha256="1")
    file = DraftedFile(tmp_path, manifest, spec, LONGEST)
    assert file.load() is None
    file.save(drafted["sure"])
    found = DraftedFile(tmp_path, manifest, spec, LONGEST).load()
    assert found is not None
    assert np.array_equal(found.token_ids, drafted["sure"].token_ids)
    assert np.array_equal(found.probabilities, drafted["sure"].probabilities, equal_nan=True)
    trained = spec.model_copy(update={"sha256": "2"})
    assert DraftedFile(tmp_path, manifest, trained, LONGEST).load() is None
    other = manifest.model_copy(update={"task": ToolCall(seed=1)})
    assert DraftedFile(tmp_path, other, spec, LONGEST).load() is None


def test_drafts_are_whole_once_every_chunk_is_there(drafted: dict[str, Drafted], tmp_path: Path) -> None:
    """Fails if a killed recording begins again, passes for a whole one, or puts its parts together in another order."""
    identity = TargetIdentity(weights="w", tokenizer="t", precision="float32", hidden_size=1, num_layers=1)
    manifest = RecordingManifest(target=identity, task=ToolCall(), layers=(), chunks=(), request_ids=())
    file = DraftedFile(tmp_path, manifest, DrafterSpec(kind="dflash", model="m"), LONGEST)
    whole = drafted["rash"]
    slices = [slice(start, start + 7) for start in range(0, len(whole.token_ids), 7)]
    parts = [Drafted(whole.token_ids[part], whole.probabilities[part]) for part in slices]
    for index in reversed(range(1, len(parts))):
        file.save_chunk(index, parts[index])
    assert file.load_chunk(0) is None
    assert file.load_chunk(1) is not None
    with pytest.raises(RecordingError, match=f"1 of {len(parts)} chunks are gone"):
        file.join_chunks(len(parts))
    assert file.load() is None
    file.save_chunk(0, parts[0])
    file.join_chunks(len(parts))
    found = file.load()
    assert found is not None
    assert np.array_equal(found.token_ids, whole.token_ids)
    assert np.array_equal(found.probabilities, whole.probabilities, equal_nan=True)
    assert list(tmp_path.iterdir()) == [file.path], "what is whole leaves no parts behind"
