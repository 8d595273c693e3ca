"""An experiment: named pairs, tasks, methods and runtimes, and the matrix of those that are measured."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from choicespec.errors import SpecError
from choicespec.spec.explained import explained
from choicespec.spec.frozen import Frozen
from choicespec.spec.method import ONLY_REPLAYED, MethodSpec, TransformersGenerate, drafters_of, is_oracle
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, RuntimeSpec, ScriptedRuntimeSpec
from choicespec.spec.search import SearchSpec, Value, changed
from choicespec.spec.task import TaskSpec
from choicespec.spec.training import DrafterTraining, ScorerTraining

AXES = ("pairs", "runtimes", "tasks", "methods")
_Names = Annotated[tuple[str, ...], Field(min_length=1)]


class TrialSpec(Frozen):
    """One cell of an experiment: a pair decodes a task's prompts with a method on a runtime."""

    pair: PairSpec
    runtime: RuntimeSpec
    task: TaskSpec
    method: MethodSpec

    @property
    def label(self) -> str:
        """For people; ``fingerprint`` is the identity."""
        return f"{self.method.label} | {self.task.label} | {self.pair.label}"

    @property
    def tells_memory(self) -> bool:
        """Whether its ``memory_bytes`` can be told: not of transformers' loop, nor of another process on GPUs."""
        ours = isinstance(self.runtime, HfRuntimeSpec | ScriptedRuntimeSpec)
        return not isinstance(self.method, TransformersGenerate) and (ours or self.pair.gpus == 0)

    def fingerprint(self) -> str:
        """The trial's identity in MLflow, in file names and on resume."""
        return _fingerprint(self)


def _fingerprint(spec: Frozen) -> str:
    """16 hex digits of the sha256 of a specification's canonical JSON."""
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _fields(spec: Frozen) -> dict[str, Any]:
    """Every field, with those that the JSON leaves out."""
    return {name: _fields(value) if isinstance(value, Frozen) else value for name, value in spec}


class Matrix(Frozen):
    """A block of trials: every combination of the named entries; an axis left out takes all of its entries."""

    pairs: _Names | None = None
    runtimes: _Names | None = None
    tasks: _Names | None = None
    methods: _Names | None = None


class ExperimentSpec(Frozen):
    """What ``jobs.bench`` measures, and what ``jobs.train`` trains and ``jobs.tune`` searches for it.

    Every axis is a dictionary from a name to its specification.
    """

    name: str = Field(min_length=1)
    pairs: dict[str, PairSpec] = Field(min_length=1)
    runtimes: dict[str, RuntimeSpec] = Field(default={"hf": HfRuntimeSpec()}, min_length=1)
    tasks: dict[str, TaskSpec] = Field(min_length=1)
    methods: dict[str, MethodSpec] = Field(min_length=1)
    matrix: tuple[Matrix, ...] = Field(default=(Matrix(),), min_length=1)
    scorer: ScorerTraining | None = None
    drafter: DrafterTraining | None = None
    search: SearchSpec | None = None

    @model_validator(mode="after")
    def _matrix_names_exist(self) -> Self:
        for index, block in enumerate(self.matrix):
            for axis in AXES:
                _known(getattr(block, axis) or (), getattr(self, axis), f"matrix.{index}.{axis}")
        return self

    @model_validator(mode="after")
    def _drafters_exist(self) -> Self:
        for pair, _, _, method in self._cells():
            _known(
                drafters_of(self.methods[method]),
                self.pairs[pair].drafters,
                f"methods.{method}, of pairs.{pair}.drafters",
            )
        return self

    @model_validator(mode="after")
    def _trained_names_exist(self) -> Self:
        if self.scorer is not None:
            _known(self.scorer.transfer, self.pairs, "scorer.transfer")
            _known(self.scorer.train_tasks, self.scorer.train_limits, "scorer.train_tasks")
            _known(self.scorer.train_tasks.values(), self.tasks, "scorer.train_tasks")
            for name, other in self.scorer.train_tasks.items():
                taken = self.tasks[other].model_copy(update={"limit": self.scorer.train_limits[name]})
                _check_apart(f"scorer.train_tasks.{name}", taken, self.tasks[name])
        for field, training in (("scorer", self.scorer), ("drafter", self.drafter)):
            if training is not None:
                _known([training.pair], self.pairs, f"{field}.pair")
                _known([training.runtime], self.runtimes, f"{field}.runtime")
                _known(training.train_limits, self.tasks, f"{field}.train_limits")
        if self.scorer is not None:
            drafters = self.pairs[self.scorer.pair].drafters
            _known(self.scorer.recorded_drafters, drafters, f"scorer.drafters, of pairs.{self.scorer.pair}.drafters")
        return self

    @model_validator(mode="after")
    def _search_names_exist(self) -> Self:
        search = self.search
        if search is None:
            return self
        _known([search.pair], self.pairs, "search.pair")
        _known([search.runtime], self.runtimes, "search.runtime")
        _known([*search.tasks, *search.tasks.values()], self.tasks, "search.tasks")
        _known(search.starts, self.methods, "search.default and search.spaces")
        for name, held_out in search.tasks.items():
            _check_held_out(f"search.tasks.{name}", self.tasks[name], self.tasks[held_out])
        self.setting(next(iter(search.tasks)), search.default, {})
        for space in search.spaces.values():
            for changes in space.borders():
                self.setting(next(iter(search.tasks)), space.start, changes)
        return self

    def setting(self, task: str, method: str, changes: Mapping[str, Value]) -> TrialSpec:
        """A trial of the search: a method of the experiment with values changed at dotted paths.

        Raises:
            ValueError: a path that a trial does not have, or a value that cannot stand there.
        """
        assert self.search is not None, "an experiment without a search has no settings"
        trial = TrialSpec(
            pair=self.pairs[self.search.pair],
            runtime=self.runtimes[self.search.runtime],
            task=self.tasks[task],
            method=self.methods[method],
        )
        try:
            made = TrialSpec.model_validate(changed(_fields(trial), changes))
        except KeyError as error:
            raise ValueError(f"search: {', '.join(changes)}: a {method!r} trial has no field {error}") from None
        except ValidationError as error:
            said = "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
            raise ValueError(f"search: {method!r} with {dict(changes)}: {said}") from None
        if is_oracle(made.method):
            raise ValueError(f"search: {method!r} with {dict(changes)}: {ONLY_REPLAYED}")
        if "memory_bytes" in self.search.objectives and not made.tells_memory:
            raise ValueError(
                f"search.objectives: what {made.method.label!r} takes in memory on {made.runtime.kind!r} with "
                f"gpus={made.pair.gpus} cannot be told; leave memory_bytes out"
            )
        return made

    def fingerprint(self) -> str:
        """The identity of the whole, narrowed as it is."""
        return _fingerprint(self)

    def trials(self) -> list[TrialSpec]:
        """The matrix, expanded in order; a combination that two blocks name is measured once."""
        trials: dict[str, TrialSpec] = {}
        for pair, runtime, task, method in self._cells():
            trial = TrialSpec(
                pair=self.pairs[pair],
                runtime=self.runtimes[runtime],
                task=self.tasks[task],
                method=self.methods[method],
            )
            trials.setdefault(trial.fingerprint(), trial)
        return list(trials.values())

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """The names of pair, runtime, task and method, block by block."""
        for block in self.matrix:
            yield from itertools.product(*(getattr(block, axis) or getattr(self, axis) for axis in AXES))

    def narrowed(
        self, *, limit: int | None = None, tasks: Sequence[str] | None = None, methods: Sequence[str] | None = None
    ) -> "ExperimentSpec":
        """The same experiment with fewer prompts, tasks or methods.

        Raises:
            SpecError: a name that the experiment does not have.
        """
        chosen = {"tasks": tasks, "methods": methods}
        try:
            for axis, names in chosen.items():
                _known(names or (), getattr(self, axis), f"--{axis}")
        except ValueError as error:
            raise SpecError(str(error)) from None
        content = self.model_dump()
        for axis, names in chosen.items():
            if names is None:
                continue
            content[axis] = {name: content[axis][name] for name in names}
            for block in content["matrix"]:
                if block[axis] is not None:
                    block[axis] = tuple(name for name in block[axis] if name in names)
        content["matrix"] = tuple(b for b in content["matrix"] if all(b[axis] != () for axis in AXES))
        content["scorer"] = content["drafter"] = content["search"] = None  # found for the whole, not measured of it
        if limit is not None:
            for task in content["tasks"].values():
                task["limit"] = limit
        return parse_experiment(content, "the command line")


def _check_held_out(where: str, searched: TaskSpec, held_out: TaskSpec) -> None:
    """Nothing is confirmed on prompts that it was chosen by, nor on prompts of another kind."""
    if not _same_source(searched, held_out):
        raise ValueError(f"{where}: it and the task it is confirmed on must differ in split, skip and limit only")
    _check_apart(where, searched, held_out)


def _check_apart(where: str, used: TaskSpec, held_out: TaskSpec) -> None:
    """Two tasks share no prompt: they take the two splits of one seed, or different places of one split."""
    if used.kind == held_out.kind and used.seed == held_out.seed and used.split != held_out.split:
        return
    apart = held_out.skip >= used.skip + used.limit or used.skip >= held_out.skip + held_out.limit
    if not _same_source(used, held_out) or used.split != held_out.split or not apart:
        raise ValueError(
            f"{where}: it and the task it is judged on may take the same prompts of split {used.split!r}; give the "
            f"latter the other split of the same seed, or, where nothing else differs, skip: {used.skip + used.limit}"
        )


def _same_source(one: TaskSpec, other: TaskSpec) -> bool:
    """Whether two tasks take their prompts from one list, or from the two splits of it."""
    places = {"limit", "skip", "split"}
    return one.model_dump(exclude=places) == other.model_dump(exclude=places)


def _known(names: Iterable[str], known: Iterable[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r}; known: {', '.join(known) or 'none'}")


def parse_experiment(content: dict[str, Any], origin: str) -> ExperimentSpec:
    """Validate an experiment.

    Raises:
        SpecError: lists each wrong field with its path and the known names there.
    """
    try:
        return ExperimentSpec.model_validate(content)
    except ValidationError as error:
        lines = explained(error, ExperimentSpec.model_json_schema())
        raise SpecError(f"{origin}:\n  " + "\n  ".join(lines)) from None
