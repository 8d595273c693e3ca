"""The catalogue: the published rows as experiments, each once."""

from collections import Counter
from pathlib import Path

import pytest
from choicespec.errors import SpecError
from choicespec.reports.published_rows import (
    counterparts,
    cpu_refusal,
    decode_rows,
    scorer_counterparts,
    scorer_rows,
)
from choicespec.runtimes.gpu_memory import known_checkpoints
from choicespec.spec.experiment_files import load_experiment, load_experiments
from choicespec.spec.method import Choice

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
CATALOGUE = load_experiments("published", EXPERIMENTS)
TRIALS = [trial for experiment in CATALOGUE for trial in experiment.trials()]


def test_a_folder_is_all_of_its_experiments() -> None:
    """Fails if an experiment of the folder is left out, or cannot be named alone."""
    names = ["qwen3-4b", "qwen3.8-27b", "qwen3.8-flash-next"]
    assert [experiment.name for experiment in CATALOGUE] == names
    assert load_experiment("published/qwen3-4b", EXPERIMENTS) == CATALOGUE[0]
    with pytest.raises(SpecError, match=r"known names: .*published/qwen3-4b, .*scripted"):
        load_experiments("publised", EXPERIMENTS)


def test_every_published_row_is_a_trial_once_and_no_other_trial_is_there() -> None:
    """Fails if a row is missing or reproduced twice, or if the catalogue measures what was not published."""
    found = Counter(row for trial in TRIALS for row in counterparts(trial))
    assert found == dict.fromkeys(decode_rows(), 1)
    assert all(map(counterparts, TRIALS))
    assert (len(found), len(TRIALS)) == (92, 91), "plain decoding at two block lengths is one trial"


def test_every_published_scorer_is_trained_or_transferred_once() -> None:
    """Fails if a row of the scorer table has no experiment, or two."""
    found = Counter(row for experiment in CATALOGUE for row in scorer_counterparts(experiment))
    assert found == dict.fromkeys(scorer_rows(), 1)


def test_a_pairs_scorer_judges_the_drafts_of_its_unions() -> None:
    """Fails if a published union would be measured with a scorer that was trained beside other drafters."""
    for experiment in CATALOGUE:
        for trial in experiment.trials():
            if isinstance(trial.method, Choice) and trial.method.selection == "scorer":
                assert experiment.scorer is not None
                assert set(trial.method.drafters) <= set(experiment.scorer.drafters)


def test_targets_do_not_think() -> None:
    """Fails if a drafter that was trained without thinking drafts for a target that thinks."""
    assert {trial.pair.target.enable_thinking for trial in TRIALS} == {False}


def test_every_checkpoint_is_described() -> None:
    """Fails if a dry run would have to ask the hub what a row takes."""
    targets = {trial.pair.target.model for trial in TRIALS}
    drafters = {drafter.model for trial in TRIALS for drafter in trial.pair.drafters.values() if drafter.model}
    assert targets | drafters == set(known_checkpoints())


def test_what_a_cpu_cannot_try_is_said() -> None:
    """Fails if a path is passed over in silence: the tests of the others run them."""
    reasons = Counter(cpu_refusal(trial) for trial in TRIALS)
    assert reasons.pop(None) == 85
    assert sorted(reasons.values()) == [2, 4]
