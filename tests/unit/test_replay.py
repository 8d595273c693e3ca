"""A replay does what the live loop does, step for step; checked on a table model through the real measuring loop."""

from pathlib import Path

import numpy as np
import pytest
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sources import Store
from choicespec.decoding.step_cost import StepCosts
from choicespec.errors import RecordingError
from choicespec.measuring.cost import Costs, Curve
from choicespec.recordings import RecordingManifest
from choicespec.records import TargetIdentity
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.proposals import collect, load_proposals, save_proposals
from choicespec.replay.simulate import Replay
from choicespec.runtimes.scripted import ByteTokenizer, ScriptedRuntime
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram, Suffix
from choicespec.spec.task import ToolCall
from contracts.replay_equality import assert_all_same, costs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.recorded_table import PAIR, REQUESTS, RISING, SPEC, Recording, live, record

METHODS = st.one_of(
    st.just(Autoregressive()),
    st.builds(
        lambda k, low, more: Ngram(num_draft_tokens=k, min_ngram=low, max_ngram=min(8, low + more)),
        st.integers(1, 50),
        st.integers(1, 8),
        st.integers(0, 7),
    ),
    st.builds(
        Choice,
        block_length=st.integers(1, 16),
        num_candidates=st.integers(1, 30),
        min_survival=st.none() | st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.7, 1.0]),
    ),
)


def replay(recording: Recording, costs: Costs) -> Replay:
    return Replay(RecordedDrafts(recording.proposals, recording.ranking), costs)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Outputs of every ending."""
    found = record()
    assert {one.finish_reason for one in found.recorded} == {"length", "eos", "stop"}, "or an ending is not tested"
    return found


@settings(max_examples=6)
@given(methods=st.lists(METHODS, min_size=4, max_size=8, unique=True))
def test_every_method_takes_the_steps_of_the_live_loop(recording: Recording, methods: list[MethodSpec]) -> None:
    """Fails if a replay sees another candidate set, learns other outputs, cuts elsewhere at an output's end, or decides
    otherwise how much is verified."""
    results = live(ScriptedRuntime(SPEC, PAIR), methods)
    assert_all_same(replay(recording, costs_of(RISING)).of(methods), results)


FAULTS = {
    "another rate remembered": ("choicespec.replay.simulate.REMEMBERED", 0.5),
    "other weights of the votes": ("choicespec.candidates.sets.TEMPER", 0.01),
    "other confidence of the votes": ("choicespec.candidates.sets.HOLD", 0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_replay_is_caught(recording: Recording, fault: str) -> None:
    """The planted faults: each changes few drafts, and the comparison must see it."""
    methods = [Choice(block_length=length) for length in (4, 8, 16)]
    results = live(ScriptedRuntime(SPEC, PAIR), methods)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault])
        found = replay(recording, costs_of(RISING)).of(methods)
    with pytest.raises(AssertionError, match="is not"):
        assert_all_same(found, results)


def test_the_first_request_learns_from_the_warm_up_alone(recording: Recording) -> None:
    """Fails if a recording is walked without the warm-up that the measuring loop decodes first."""
    without = [
        one._replace(request=one.request._replace(request_id=f"{one.request.request_id}'"))
        for one in recording.recorded
    ]
    fresh = RequestCandidates(8, 16, ByteTokenizer().encode, Store(10_000))
    assert not np.array_equal(collect(without, fresh).vote_weights, recording.proposals.vote_weights)


def test_the_oracle_bounds_every_ranking(recording: Recording) -> None:
    """Fails if a method is said to accept more than any choice among its candidates could."""
    for length in (2, 8, 16):
        oracle, prior = replay(recording, costs_of(RISING)).of(
            [Choice(block_length=length, selection=selection, min_survival=0.0) for selection in ("oracle", "prior")]
        )
        assert (oracle.steps <= prior.steps).all()
        assert oracle.tokens_per_s >= prior.tokens_per_s
        assert (oracle.proposed == oracle.accepted).all(), "a bound never verifies in vain"


def test_plain_decoding_takes_its_tokens_at_the_price_of_one(recording: Recording) -> None:
    """Fails if a predicted time leaves out a step, or charges it for a proposer that is not there."""
    costs = costs_of(RISING, rest_ms=0.5)
    [plain] = replay(recording, costs).of([Autoregressive()])
    tokens = [len(one.output_ids) - 1 for one in recording.recorded]
    assert plain.steps.tolist() == plain.tokens.tolist() == tokens
    assert plain.decode_ms == pytest.approx([1.5 * count for count in tokens])
    assert plain.tokens_per_s == pytest.approx(1e3 / 1.5)


def test_a_longer_context_costs_what_was_measured_there(recording: Recording) -> None:
    """Fails if every step is charged for the same context."""
    rows = ((1.0, 1.0), (101.0, 101.0))
    curve = Curve(contexts=(0, 100), tokens=(1, 64), ms=rows, low_ms=rows, high_ms=rows)
    [plain] = replay(recording, costs_of(RISING, verification=curve)).of([Autoregressive()])
    for number, one in enumerate(recording.recorded):
        contexts = [len(one.request.prompt_ids) + step for step in range(len(one.output_ids) - 1)]
        assert plain.verify_ms[number] == pytest.approx(sum(1.0 + min(100, context) for context in contexts))


def test_proposers_are_charged_by_the_step(recording: Recording) -> None:
    """Fails if a look-up is free, or the first step's preparation is charged at every step."""
    found = replay(recording, costs_of(RISING)).of([Ngram(), Choice()])
    for one in found:
        busy = one.steps > 0
        assert one.search_ms[busy] == pytest.approx(0.5 + 0.25 * (one.steps[busy] - 1))
        assert (one.search_ms[~busy] == 0).all()
        assert (one.score_ms == 0).all()


def test_what_another_machine_pays_changes_how_much_is_verified(recording: Recording) -> None:
    """Fails if a what-if keeps the lengths that paid on the machine of the recording."""
    flat = StepCosts((1, 64), (1.0, 1.0))
    steep = StepCosts((1, 2, 64), (1.0, 3.0, 300.0))
    on_flat, on_steep = (replay(recording, costs_of(costs)).of([Choice()])[0] for costs in (flat, steep))
    assert on_flat.accepted_per_step > 1
    assert on_steep.proposed.sum() == 0


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Choice(block_length=17), "block_length=17, but a replay reaches 16"),
        (Ngram(max_ngram=9), "max_ngram=9, but a replay reaches 8"),
        (Draft(drafter="d"), "what 'd' drafts is not recorded; run jobs.record"),
        (Choice(drafters=("d",)), "what 'd' drafts is not recorded; run jobs.record"),
        (Suffix(), "a recording does not say what it drafts"),
        (Choice(pace="adaptive"), "times that a recording does not hold"),
        (Ngram(exact=True), "times that a recording does not hold"),
    ],
)
def test_what_is_not_recorded_is_said(recording: Recording, method: MethodSpec, reason: str) -> None:
    """Fails if a method is replayed as a shorter one, or as plain decoding."""
    with pytest.raises(RecordingError, match=reason):
        replay(recording, costs_of(RISING)).of([method])


def test_kept_proposals_are_those_of_their_recording(recording: Recording, tmp_path: Path) -> None:
    """Fails if what is kept is changed, or is taken for another recording's."""
    identity = TargetIdentity(weights="w", tokenizer="t", precision="float32", hidden_size=1, num_layers=1)
    ids = tuple(request.request_id for request in REQUESTS)
    manifest = RecordingManifest(target=identity, task=ToolCall(), layers=(), chunks=(ids,), request_ids=ids)
    assert load_proposals(tmp_path, manifest) is None
    save_proposals(tmp_path, manifest, recording.proposals)
    found = load_proposals(tmp_path, manifest)
    assert found is not None
    for name in found._fields:
        kept, made = getattr(found, name), getattr(recording.proposals, name)
        assert kept.dtype == made.dtype
        assert np.array_equal(kept, made)
    assert load_proposals(tmp_path, manifest.model_copy(update={"task": ToolCall(seed=1)})) is None
    assert found.bytes_per_token < 3000
