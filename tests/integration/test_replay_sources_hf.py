"""A replay of a scorer that reads the states at candidates' sources, against the live loop: a small target that repeats
itself, and random weights under which those states decide."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from choicespec.measuring.measure import TrialResult, measure
from choicespec.recordings import Recorded
from choicespec.records import TargetIdentity
from choicespec.replay import ranking
from choicespec.replay.recorded import RecordedPair
from choicespec.replay.simulate import Replay
from choicespec.runtimes.hf import HfRuntime
from choicespec.scorer.files import Scorer, ScorerManifest, save_scorer
from choicespec.scorer.model import ScorerNet
from choicespec.scorer.source_states import cosines_along
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Choice, MethodSpec
from choicespec.spec.pair import PairSpec, ScorerSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import PythonRepo
from contracts.replay_equality import assert_all_same, costs_of
from integration.job_homes import write_repository
from integration.small_checkpoints import save_checkpoint, small_llama
from integration.small_recordings import record_whole
from unit.recorded_table import RISING

COSTS = costs_of(RISING)
METHODS: tuple[MethodSpec, ...] = (
    *(Choice(selection="scorer", num_candidates=N, min_survival=0.0) for N in (2, 3, 16)),
    Choice(selection="scorer", block_length=3, min_survival=0.2),
    Choice(selection="scorer", num_candidates=4, width=3),
    Choice(),
)


def random_scorer(target: TargetIdentity) -> Scorer:
    """Of layers that it reads for nothing else, and of one that it reads here too."""
    manifest = ScorerManifest(
        target=target,
        layers=(2, 3),
        source_layers=(1, 3),
        block_length=8,
        embedding_size=target.hidden_size,
        width=64,
        trained_on={},
        held_out=(),
    )
    torch.manual_seed(2)
    net = ScorerNet(manifest.shape, lambda token_ids: torch.zeros(*token_ids.shape, target.hidden_size))
    for parameter in net.prior.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    net.source_deviation_S.copy_(torch.linspace(0.5, 2, len(net.source_deviation_S)))
    return Scorer(net, manifest)


class Compared(NamedTuple):
    """A recording, and what the live loop did on the same requests."""

    pair: RecordedPair
    task: PythonRepo
    results: list[TrialResult]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Four completions."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoint = save_checkpoint(folder / "target", small_llama(vocab_size=256, initializer_range=0.15))
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=20)
    task = PythonRepo(folder=str(repo), limit=4, max_new_tokens=40)
    runtime_spec, pair_spec = HfRuntimeSpec(threads=1), PairSpec(target=TargetSpec(model=str(checkpoint)))
    save_scorer(folder / "scorer", random_scorer(HfRuntime(runtime_spec, pair_spec).identity))
    pair_spec = pair_spec.model_copy(update={"scorer": ScorerSpec(folder=str(folder / "scorer"))})
    pair = RecordedPair(folder / "recordings", runtime_spec, pair_spec)
    assert (pair.layers, pair.prompt_states) == ((2, 3, 1), True)
    prompts = record_whole(pair, task)
    pair.opened.use_step_costs(COSTS.step_costs)
    pair.opened.use_repository(prompts.repository)
    trials = [TrialSpec(pair=pair_spec, runtime=runtime_spec, task=task, method=method) for method in METHODS]
    results = [event for event in measure(pair.opened, trials, prompts) if isinstance(event, TrialResult)]
    assert all(result.measurement.match.value == 1 for result in results)
    return Compared(pair, task, results)


def test_every_method_takes_the_steps_of_the_live_loop(compared: Compared) -> None:
    """Fails if the methods that share a request, and its prompt's pass, do not each find the states of the whole text,
    or if a smaller set is compared as a part of a larger one."""
    assert_all_same(Replay(compared.pair.drafts(compared.task), COSTS).of(METHODS), compared.results)


def test_the_states_of_the_token_before_are_caught(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: fails if the equality above says nothing about the states at candidates' sources."""

    def shifted(one: Recorded, *others: Any) -> Any:
        states = {layer: np.roll(of_output, 1, axis=0) for layer, of_output in one.hidden_states.items()}
        return cosines_along(one._replace(hidden_states=states), *others)

    monkeypatch.setattr(ranking, "cosines_along", shifted)
    with pytest.raises(AssertionError, match="choice scorer"):
        assert_all_same(Replay(compared.pair.drafts(compared.task), COSTS).of(METHODS), compared.results)
