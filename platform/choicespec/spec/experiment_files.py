"""Experiments as YAML files, by their names or paths."""

import hashlib
from pathlib import Path
from typing import Any

import yaml

from choicespec.errors import SpecError
from choicespec.spec.experiment import ExperimentSpec, parse_experiment
from choicespec.spec.pair import DRAFTER_WEIGHTS, SCORER_WEIGHTS, PairSpec
from choicespec.spec.task import ChatLog


def load_experiments(name: str, folder: Path) -> list[ExperimentSpec]:
    """Read one experiment as ``load_experiment``, or every one of ``folder/NAME/``, in the order of their names.

    Raises:
        SpecError: as ``load_experiment``.
    """
    if (folder / name).is_dir():
        return [load_experiment(str(path), folder) for path in sorted((folder / name).glob("*.yaml"))]
    return [load_experiment(name, folder)]


def load_experiment(name: str, folder: Path) -> ExperimentSpec:
    """Read ``folder/NAME.yaml``, or the YAML file at a path.

    Raises:
        SpecError: no such experiment, or one with an unknown field, method or task; names the field's path.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml")))
        raise SpecError(f"no experiment at {path}; known names: {known}; or give the path of a .yaml file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an impossible date
        raise SpecError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{path} must hold a mapping with the fields {', '.join(ExperimentSpec.model_fields)}")
    return _with_digests(parse_experiment({"name": path.stem, **content}, str(path)))


def _with_digests(experiment: ExperimentSpec) -> ExperimentSpec:
    """Fill in the digest of each chat log, scorer and drafter, so that resume sees a changed file as a new trial."""
    tasks: dict[str, Any] = {}
    for name, task in experiment.tasks.items():
        if isinstance(task, ChatLog):
            path = Path(task.path)
            if not path.is_file():
                raise SpecError(f"tasks.{name}.path: no file {task.path!r}")
            task = task.model_copy(update={"sha256": _sha256(path)})
        tasks[name] = task
    pairs: dict[str, PairSpec] = {}
    for name, pair in experiment.pairs.items():
        scorer = pair.scorer.model_copy(update={"sha256": _sha256_in(pair.scorer.folder, SCORER_WEIGHTS)})
        drafters = {
            called: drafter.model_copy(update={"sha256": _sha256_in(drafter.model, DRAFTER_WEIGHTS)})
            for called, drafter in pair.drafters.items()
        }
        pairs[name] = pair.model_copy(update={"scorer": scorer, "drafters": drafters})
    return experiment.model_copy(update={"tasks": tasks, "pairs": pairs})


def _sha256_in(folder: str | None, name: str) -> str | None:
    """Of a file in a folder; what is missing is named where it is needed."""
    return _sha256(Path(folder) / name) if folder is not None and (Path(folder) / name).is_file() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
