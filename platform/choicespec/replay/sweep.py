"""The wide stage of a search: thousands of settings, proposed by Optuna and judged by replay, by the hundred."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import optuna

from choicespec.replay.simulate import Replayed
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.search import Dimension, Range, Value

_AT_ONCE = 100  # asked before any of them is judged
_RANDOM_SHARE = 10  # of a shard, one in so many is drawn at random before the model of what is good starts
_SPACE = "space"


class Tried(NamedTuple):
    """One setting, replayed.

    Attributes:
        space: the name of its space.
        changes: JSON of the values at dotted paths.
        tokens_per_s: predicted decode rate.
        accepted_per_step: as the live loop's.
        steps, proposed, verify_ms, search_ms, score_ms, draft_ms: sums over the requests.
    """

    space: str
    changes: str
    tokens_per_s: float
    accepted_per_step: float
    steps: int
    proposed: int
    verify_ms: float
    search_ms: float
    score_ms: float
    draft_ms: float


class Batch(NamedTuple):
    """What a shard reports of some of its settings: JSON of their rows."""

    shard: int
    number: int
    rows: str


Evaluate = Callable[[Sequence[TrialSpec]], list[Replayed]]


def sweep(experiment: ExperimentSpec, task: str, evaluate: Evaluate, settings: int, seed: int) -> Iterator[list[Tried]]:
    """Try settings, a batch at a time; a combination of values that is no method is passed over.

    Args:
        experiment: with a search.
        task: the name of the task that is searched.
        evaluate: replays trials on the task's recording.
        settings: how many are proposed; among them may be equal ones, which are replayed once.
        seed: another one proposes others.

    Source of the proposals: J. Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011), TPE.
    """
    proposals = Settings(experiment, task, settings, seed)
    known: dict[TrialSpec, Replayed] = {}
    for start in range(0, settings, _AT_ONCE):
        asked = [proposals.ask() for _ in range(min(_AT_ONCE, settings - start))]
        valid = [one for one in asked if one.trial is not None]
        fresh = list(dict.fromkeys(one.trial for one in valid if one.trial is not None and one.trial not in known))
        known |= zip(fresh, evaluate(fresh), strict=True)
        for one in asked:
            proposals.tell(one, known[one.trial].tokens_per_s if one.trial is not None else None)
        yield [_tried(one, known[one.trial]) for one in valid if one.trial is not None]


def merged(reported: Iterable[Batch]) -> list[Tried]:
    """All that was tried, by shard and batch, each once: a shard that a killed driver left in flight runs again, and
    reports its batches again."""
    batches = {(batch.shard, batch.number): batch.rows for batch in reported}
    return [Tried(*row) for key in sorted(batches) for row in json.loads(batches[key])]


class Setting(NamedTuple):
    """What Optuna proposed; the trial is None where the values exclude each other."""

    number: int
    space: str
    changes: dict[str, Value]
    trial: TrialSpec | None


class Settings:
    """Proposals in an experiment's search, each better informed by what was told of the others.

    Args:
        experiment: with a search.
        task: the name of the task that is searched.
        settings: about how many will be asked for.
        seed: another one proposes others.
    """

    def __init__(self, experiment: ExperimentSpec, task: str, settings: int, seed: int) -> None:
        assert experiment.search is not None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._experiment, self._task, self._spaces = experiment, task, experiment.search.spaces
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=max(2 * len(self._spaces), settings // _RANDOM_SHARE)
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)

    def ask(self) -> Setting:
        """The next one."""
        trial = self._study.ask()
        name = str(trial.suggest_categorical(_SPACE, sorted(self._spaces)))
        space = self._spaces[name]
        changes = {path: _suggest(trial, f"{name}.{path}", d) for path, d in space.vary.items()}
        try:
            made = self._experiment.setting(self._task, space.start, changes)
        except ValueError:  # such as a shortest suffix that is longer than the longest
            made = None
        return Setting(trial.number, name, changes, made)

    def tell(self, setting: Setting, tokens_per_s: float | None) -> None:
        """How good it was; None where it cannot be."""
        state = optuna.trial.TrialState.FAIL if tokens_per_s is None else optuna.trial.TrialState.COMPLETE
        self._study.tell(setting.number, tokens_per_s, state)


def _suggest(trial: optuna.Trial, name: str, dimension: Dimension) -> Value:
    if not isinstance(dimension, Range):
        values = [json.dumps(value) for value in dimension]  # Optuna takes equal numbers of two types for one
        return _value(trial.suggest_categorical(name, values))
    if dimension.or_none and trial.suggest_categorical(f"{name} is null", [False, True]):
        return None
    if isinstance(dimension.low, int) and isinstance(dimension.high, int):
        return int(trial.suggest_int(name, dimension.low, dimension.high))
    return float(trial.suggest_float(name, dimension.low, dimension.high))


def _value(text: str) -> Value:
    value: Value = json.loads(text)
    return value


def _tried(setting: Setting, found: Replayed) -> Tried:
    sums = (int(found.steps.sum()), int(found.proposed.sum()))
    times = (float(ms.sum()) for ms in (found.verify_ms, found.search_ms, found.score_ms, found.draft_ms))
    changes = json.dumps(setting.changes, sort_keys=True)
    return Tried(setting.space, changes, found.tokens_per_s, found.accepted_per_step, *sums, *times)


def finalists(tried: Sequence[Tried], count: int) -> list[Tried]:
    """The best of each space, then the best of all; of those that take the same steps in the same time, one."""
    distinct: dict[object, Tried] = {}
    for one in sorted(tried, key=lambda one: -one.tokens_per_s):
        distinct.setdefault((one.space, one.steps, one.proposed, one.verify_ms), one)
    ranked = list(distinct.values())
    first: dict[str, Tried] = {}
    for one in ranked:
        first.setdefault(one.space, one)
    chosen = [*first.values(), *(one for one in ranked if one not in first.values())][:count]
    return sorted(chosen, key=lambda one: -one.tokens_per_s)
