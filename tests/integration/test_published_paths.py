"""Every published trial's path, on a small model of the same architecture: as far as a CPU has kernels for it."""

import pytest
from choicespec.decoding.step_cost import StepCosts
from choicespec.records import Request
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.llamacpp import LlamaCppRuntime
from choicespec.runtimes.runtime import check_supported
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, LlamaCppRuntimeSpec
from contracts.runtime_contract import PLAIN
from integration.small_drafters import VOCABULARY
from integration.small_published import SmallPublished, published_trials

REQUEST = Request("r", (5, 80, 3, 200, 41, 6, 80, 3, 200, 41), 6)
EVERY_TOKEN = Request("r", tuple(range(VOCABULARY)), 6)  # so that whatever is decoded has occurred before


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallPublished:
    return SmallPublished(tmp_path_factory.mktemp("small"))


def _distinct(small: SmallPublished, kind: str) -> dict[PairSpec, list[TrialSpec]]:
    """What is left of the trials on a runtime once precisions, tasks and lengths of context fall away, by pair."""
    found: dict[PairSpec, list[TrialSpec]] = {}
    for trial in published_trials():
        if trial.runtime.kind == kind:
            changed = small.of(trial).model_copy(update={"task": published_trials()[0].task})
            own = found.setdefault(changed.pair, [])
            if changed not in own:
                own.append(changed)
    return found


@pytest.mark.filterwarnings("ignore:dflash. num_draft_tokens")
def test_transformers(small: SmallPublished) -> None:
    """Fails if a method of the catalogue cannot run on its architecture, changes its output, or never drafts."""
    pairs = _distinct(small, "hf")
    assert sorted(len(trials) for trials in pairs.values()) == [6, 8, 10]
    for pair, trials in pairs.items():
        runtime = HfRuntime(HfRuntimeSpec(threads=1), pair)
        runtime.use_step_costs(StepCosts((1, 1024), (1.0, 1.0)))  # so that every draft pays
        plain = runtime.generate(EVERY_TOKEN, PLAIN)
        for trial in trials:
            check_supported(trial.runtime, pair, trial.method)
            found = runtime.generate(EVERY_TOKEN, trial.method)
            assert (found.output_ids, found.finish_reason) == (plain.output_ids, plain.finish_reason)
            assert any(step.proposed for step in found.steps) == trial.method.drafts, trial.method.label


def test_llama_cpp(small: SmallPublished) -> None:
    """As above; its prompt lookup wants twelve tokens to repeat, which a request this short does not."""
    ((pair, trials),) = _distinct(small, "llamacpp").items()
    assert isinstance(trials[0].runtime, LlamaCppRuntimeSpec)
    runtime = LlamaCppRuntime(trials[0].runtime, pair)
    try:
        plain = runtime.generate(REQUEST, PLAIN)
        for trial in trials:
            found = runtime.generate(REQUEST, trial.method)
            assert found.output_ids == plain.output_ids
            assert any(step.proposed for step in found.steps) == (trial.method.kind == "draft")
    finally:
        runtime.close()
