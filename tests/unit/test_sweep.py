"""The wide stage: what is proposed, what is judged, and which settings go on."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from choicespec.replay.simulate import Replayed
from choicespec.replay.sweep import Batch, Settings, Tried, finalists, merged, sweep
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.method import Choice, Ngram
from unit.searches import parsed

SPACES = {
    "ngram": {
        "start": "ngram",
        "vary": {"method.min_ngram": {"low": 1, "high": 6}, "method.max_ngram": {"low": 1, "high": 6}},
    },
    "choice": {
        "start": "prior",
        "vary": {
            "method.block_length": {"low": 2, "high": 16},
            "method.min_survival": {"low": 0.0, "high": 1.0, "or_none": True},
            "method.selection": ["prior", "scorer"],
        },
    },
}


def experiment() -> ExperimentSpec:
    return parsed(spaces=SPACES)


class Judge:
    """Says that choice with L=11 is best, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[TrialSpec] = []

    def __call__(self, trials: Sequence[TrialSpec]) -> list[Replayed]:
        self.asked += trials
        return [self._replayed(trial) for trial in trials]

    def _replayed(self, trial: TrialSpec) -> Replayed:
        method = trial.method
        ms = 30.0 if isinstance(method, Ngram) else 10.0 + abs(getattr(method, "block_length", 0) - 11)
        one = np.ones(1, np.int64)
        return Replayed(one, one, one, one, np.array([ms]), *(np.zeros(1),) * 3)


def swept(seed: int, settings: int) -> list[Tried]:
    return [one for batch in sweep(experiment(), "searched", Judge(), settings, seed) for one in batch]


@pytest.fixture(scope="module")
def long_sweep() -> list[dict[str, Any]]:
    """The changes of a sweep that has time to learn, in the order of asking."""
    return [json.loads(one.changes) for one in swept(0, 500)]


def test_no_setting_is_judged_twice_and_none_is_invalid() -> None:
    """Fails if time goes into what is known, or a shortest suffix longer than the longest ends the sweep."""
    judge = Judge()
    tried = [one for batch in sweep(experiment(), "searched", judge, 250, 0) for one in batch]
    assert len(judge.asked) == len(set(judge.asked))
    assert len(judge.asked) <= len(tried) < 250, "some are equal, some are no methods"
    for trial in judge.asked:
        assert isinstance(trial.method, Ngram | Choice)


def test_every_value_of_every_space_can_be_proposed(long_sweep: list[dict[str, Any]]) -> None:
    """Fails if a border, null or a choice is never tried."""
    changes = long_sweep
    lengths = {one["method.block_length"] for one in changes if "method.block_length" in one}
    assert {2, 11, 16} <= lengths <= set(range(2, 17))
    assert {one["method.selection"] for one in changes if "method.selection" in one} == {"prior", "scorer"}
    survivals = {one["method.min_survival"] for one in changes if "method.min_survival" in one}
    assert None in survivals
    assert len(survivals) > 20
    assert {one["method.max_ngram"] for one in changes if "method.max_ngram" in one} == set(range(1, 7))


def test_the_same_seed_tries_the_same_and_another_seed_others() -> None:
    """Fails if a shard that runs again after a crash reports something else, or all shards try the same."""
    assert swept(3, 80) == swept(3, 80) != swept(4, 80)


def test_what_is_told_informs_what_is_asked(long_sweep: list[dict[str, Any]]) -> None:
    """Fails if good settings are not followed up: at random, one in thirty has the best L."""
    late = [one.get("method.block_length") for one in long_sweep[-100:]]
    assert late.count(11) > 10


def test_values_that_exclude_each_other_are_said_to_be_no_method() -> None:
    """Fails if such a proposal ends the search, or is taken for another method."""
    settings = Settings(experiment(), "searched", 100, 0)
    asked = [settings.ask() for _ in range(100)]
    invalid = [one for one in asked if one.trial is None]
    assert invalid
    for one in invalid:
        assert int(str(one.changes["method.min_ngram"])) > int(str(one.changes["method.max_ngram"]))
        settings.tell(one, None)


def tried(space: str, rate: float, steps: int, name: str = "") -> Tried:
    return Tried(space, name, rate, 1.0, steps, 10, 100.0 / rate, 0.0, 0.0, 0.0)


def test_a_batch_that_is_reported_again_counts_once() -> None:
    """Fails if a shard that was in flight when the driver was killed doubles its settings, or shards come in the order
    in which they ended."""
    rows = {key: json.dumps([tried("a", 1.0 + sum(key), 1)]) for key in ((0, 0), (0, 1), (1, 0))}
    reported = [Batch(*key, rows[key]) for key in ((1, 0), (0, 0), (0, 0), (0, 1))]
    assert [one.tokens_per_s for one in merged(reported)] == [1.0, 2.0, 2.0]
    assert all(isinstance(one, Tried) for one in merged(reported))


def test_finalists_are_the_best_of_each_space_then_the_best_of_all() -> None:
    """Fails if one space takes every place, or the same decoding is measured under two names."""
    found = [
        tried("a", 9.0, 1, "best"),
        tried("a", 9.0, 1, "the same steps in the same time"),
        tried("a", 8.0, 2),
        tried("a", 7.0, 3),
        tried("b", 5.0, 4),
        tried("b", 4.0, 5),
    ]
    chosen = finalists(found, 3)
    assert [(one.space, one.tokens_per_s) for one in chosen] == [("a", 9.0), ("a", 8.0), ("b", 5.0)]
    assert chosen[0].changes == "best"
    assert len(finalists(found, 99)) == 5
