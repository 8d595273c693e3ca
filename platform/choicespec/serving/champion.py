"""Champions: the best trials of pairs and tasks, kept in the MLflow registry, and checked before they are served.

A champion is a folder: ``champion.json``, with the trial and its measurement, and the scorer's two files where its
method scores. No pickles.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from pydantic import ValidationError

from choicespec.errors import ChampionError, ChoiceSpecError
from choicespec.records import Measurement
from choicespec.runtimes.checkpoints import identify, locate
from choicespec.runtimes.runtime import check_streams
from choicespec.scorer.files import find_scorer
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.frozen import Frozen
from choicespec.spec.method import uses_scorer
from choicespec.tracking.registry import ChampionRegistry

SHIPPED = Path(__file__).parent / "shipped" / "smollm2"  # for the embedded default
_FILE, _SCORER = "champion.json", "scorer"


class Champion(Frozen):
    """A trial that won, and what it was measured to do."""

    format: Literal[1] = 1
    trial: TrialSpec
    measurement: Measurement


class Promoted(NamedTuple):
    """A registered champion."""

    name: str
    version: int


def registered_name(trial: TrialSpec) -> str:
    """The registered model that a trial competes for: one a pair, runtime and task."""
    label = f"{trial.pair.label} {trial.runtime.kind} {trial.task.label}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


def obstacle(trial: TrialSpec, measurement: Measurement) -> str | None:
    """Why a trial cannot be a champion, or None."""
    match = measurement.match
    if match.value < 1:
        return f"its output was plain decoding's on {match.value:.1%} of {match.n} prompts, not on all"
    if measurement.never_proposed:
        return "it never proposed anything, so it is plain decoding under another name"
    try:
        check_streams(trial.runtime, trial.pair, trial.method)
    except ChoiceSpecError as error:
        return str(error)
    return None


def promote(registry: ChampionRegistry, trial: TrialSpec, measurement: Measurement) -> Promoted:
    """Register a trial as the champion of its pair, runtime and task, with the scorer that its pair names.

    The same trial with the same measurement is registered once; then it only gets the alias again.

    Raises:
        ChampionError: it cannot be one; says why.
        ScorerError: its scorer is missing.
        TrackingError: MLflow cannot be used.
    """
    reason = obstacle(trial, measurement)
    if reason is not None:
        raise ChampionError(f"{trial.label} is not promoted: {reason}")
    name = registered_name(trial)
    with TemporaryDirectory() as folder:
        write_champion(Path(folder), Champion(trial=trial, measurement=measurement))
        return Promoted(name, registry.register(name, trial, measurement, Path(folder)))


def promote_best(registry: ChampionRegistry, results: Sequence[tuple[TrialSpec, Measurement]]) -> Iterator[str]:
    """Promote, for each pair, runtime and task, the trial with the highest speed-up; says a line for each trial that is
    promoted, or that was faster but cannot be."""
    contests: dict[str, list[tuple[TrialSpec, Measurement]]] = {}
    for trial, measurement in results:
        contests.setdefault(registered_name(trial), []).append((trial, measurement))
    for name, entries in contests.items():
        for trial, measurement in sorted(entries, key=lambda entry: entry[1].speedup.value, reverse=True):
            try:
                version = promote(registry, trial, measurement).version
            except ChampionError as error:
                yield str(error)
                continue
            found = f"{measurement.speedup.value:.2f}x, match on all of {measurement.match.n} prompts"
            yield f"champion of {name}: version {version}, {trial.method.label}, {found}"
            break
        else:
            yield f"no champion of {name}: no trial can be one"


def write_champion(folder: Path, champion: Champion) -> None:
    """Write a champion, with a copy of its scorer."""
    (folder / _FILE).write_text(champion.model_dump_json(indent=1) + "\n", encoding="utf-8")
    pair = champion.trial.pair
    if uses_scorer(champion.trial.method):
        identity = identify(locate(pair.target.model, pair.target.revision), pair.target)
        shutil.copytree(find_scorer(pair.scorer, identity), folder / _SCORER)


def read_champion(folder: Path) -> Champion:
    """Read a champion; its scorer is the one in the folder, or where there is none the one that its pair names.

    Raises:
        ChampionError: a file is missing, or is not of this version of choicespec.
    """
    path = folder / _FILE
    try:
        champion = Champion.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ChampionError(f"cannot read {path}: {error.strerror}; promote the trial again") from None
    except ValidationError as error:
        raise ChampionError(f"{path} is not a champion of this version of choicespec: {error}") from None
    scorer = folder / _SCORER
    if not scorer.is_dir():
        return champion
    pair, trial = champion.trial.pair, champion.trial
    pair = pair.model_copy(update={"scorer": pair.scorer.model_copy(update={"folder": str(scorer)})})
    return champion.model_copy(update={"trial": trial.model_copy(update={"pair": pair})})


def check_champion(champion: Champion, served: TrialSpec | None) -> None:
    """Ask, before anything is loaded, whether a champion can be served.

    Args:
        champion: whose scorer is checked too.
        served: the trial of the champion that it would take over from: the replica keeps its target and its runtime.

    Raises:
        ChampionError: with the reason.
    """
    trial = champion.trial
    reason = obstacle(trial, champion.measurement)
    if reason is not None:
        raise ChampionError(f"{trial.label} cannot be served: {reason}")
    if served is None:
        return
    for what, own, other in (
        ("target", trial.pair.target, served.pair.target),
        ("runtime", trial.runtime, served.runtime),
        ("number of gpus", trial.pair.gpus, served.pair.gpus),
    ):
        if own != other:
            raise ChampionError(f"{trial.label} cannot take over: its {what} is {own}, but {other} is served")
