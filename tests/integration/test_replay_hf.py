"""A replay of recorded outputs against the live loop on the embedded default: the same steps, request by request."""

from typing import NamedTuple

import pytest
from choicespec.decoding.step_cost import StepCosts
from choicespec.measuring.measure import TrialResult, measure
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.ranking import Ranking
from choicespec.replay.recorded import RecordedPair
from choicespec.replay.simulate import Replay
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import ToolCall
from contracts.replay_equality import assert_all_same, costs_of
from integration.small_recordings import record_whole

TASK = ToolCall(limit=2, max_new_tokens=14, categories=("simple_python",))
METHODS: tuple[MethodSpec, ...] = (
    Autoregressive(),
    Ngram(num_draft_tokens=6, min_ngram=2, max_ngram=4),
    Choice(),
    Choice(selection="scorer"),
    Choice(selection="scorer", block_length=4, num_candidates=3, min_survival=0.2),
    Choice(selection="scorer", width=4),
)
COSTS = costs_of(StepCosts((1, 5, 9, 17, 64), (20.0, 24.0, 28.0, 40.0, 160.0)))


class Compared(NamedTuple):
    """A recording, and what the live loop did on the same requests."""

    pair: RecordedPair
    results: list[TrialResult]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Two tool calls."""
    runtime_spec, pair_spec = HfRuntimeSpec(threads=2), PairSpec(target=TargetSpec(model="smollm2"))
    pair = RecordedPair(tmp_path_factory.mktemp("recordings"), runtime_spec, pair_spec)
    prompts = record_whole(pair, TASK)
    pair.opened.use_step_costs(COSTS.step_costs)
    pair.opened.use_repository(prompts.repository)
    trials = [TrialSpec(pair=pair_spec, runtime=runtime_spec, task=TASK, method=method) for method in METHODS]
    results = [event for event in measure(pair.opened, trials, prompts) if isinstance(event, TrialResult)]
    assert all(result.measurement.match.value == 1 for result in results)
    return Compared(pair, results)


def test_every_method_takes_the_steps_of_the_live_loop(compared: Compared) -> None:
    """Fails if anything that decides a step differs from the live loop's: candidates, hidden states, what was learnt,
    or how much is verified at these costs."""
    found = Replay(compared.pair.drafts(TASK), COSTS).of(METHODS)
    assert_all_same(found, compared.results)


def test_hidden_states_of_other_positions_are_caught(compared: Compared) -> None:
    """The planted fault: a scorer that reads the states of another place chooses otherwise."""
    folder = compared.pair.recording(TASK)
    proposals = compared.pair.propose(TASK)
    shifted = proposals._replace(rows=proposals.rows[::-1].copy())
    ranking = Ranking(shifted, folder.read(), compared.pair._load_scorer)
    found = Replay(RecordedDrafts(shifted, ranking), COSTS).of(METHODS)
    with pytest.raises(AssertionError, match=r"choice scorer.* is not "):
        assert_all_same(found, compared.results)
