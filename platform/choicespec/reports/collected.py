"""Everything in a results folder that a report can show."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from choicespec.errors import ChoiceSpecError
from choicespec.measuring.cost import Costs, load_costs
from choicespec.records import Measurement
from choicespec.replay.predicted import FILE, Predicted, load_predicted
from choicespec.replay.sweep import Tried
from choicespec.results import Kept, kept_below
from choicespec.scorer.files import ScorerManifest
from choicespec.scorer.table import Row

_RACED = "live"
_T = TypeVar("_T")


class Group(NamedTuple):
    """Trials that can be compared: of one experiment, with the same pair, runtime and task. The fastest is first."""

    experiment: str
    kept: tuple[Kept, ...]

    @property
    def title(self) -> str:
        """For people."""
        trial = self.kept[0].trial
        return f"{trial.pair.label} · {trial.runtime.kind} · {trial.task.label} ({self.experiment})"


class ScorerRows(NamedTuple):
    """A scorer table of an experiment, and the layers of its target."""

    experiment: str
    num_layers: int
    rows: tuple[Row, ...]


class Sweep(NamedTuple):
    """The settings that a search replayed."""

    name: str
    tried: tuple[Tried, ...]


class Foretold(NamedTuple):
    """A prediction, and what was measured live on the same requests."""

    experiment: str
    predicted: Predicted
    measured: Measurement


class Collected(NamedTuple):
    """What was found.

    Attributes:
        costs: with the name of their experiment.
        unreadable: what was left out, each with the reason.
    """

    groups: tuple[Group, ...]
    scorers: tuple[ScorerRows, ...]
    costs: tuple[tuple[str, Costs], ...]
    sweeps: tuple[Sweep, ...]
    foretold: tuple[Foretold, ...]
    unreadable: tuple[str, ...]

    @property
    def kept(self) -> list[Kept]:
        """Every trial."""
        return [one for group in self.groups for one in group.kept]


def collect(folder: Path, experiments: Sequence[str]) -> Collected:
    """Read what was kept of experiments.

    Args:
        folder: the results folder, with a folder an experiment.
        experiments: their names; none are all.

    Raises:
        ChoiceSpecError: one of them is not there.
    """
    known = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for name in experiments:
        if name not in known:
            raise ChoiceSpecError(
                f"nothing is kept of {name!r} in {folder}; kept: {', '.join(known) or 'nothing'}; measure it with "
                f"python -m jobs.bench {name}"
            )
    reader = _Reader()
    found = [reader.read(folder / name) for name in experiments or known]
    return Collected(
        groups=tuple(group for one in found for group in one.groups),
        scorers=tuple(scorer for one in found for scorer in one.scorers),
        costs=tuple(costs for one in found for costs in one.costs),
        sweeps=tuple(sweep for one in found for sweep in one.sweeps),
        foretold=tuple(foretold for one in found for foretold in one.foretold),
        unreadable=tuple(reader.unreadable),
    )


class _Reader:
    """Reads experiments' folders, and notes what cannot be read."""

    def __init__(self) -> None:
        self.unreadable: list[str] = []

    def read(self, folder: Path) -> Collected:
        kept, unreadable = kept_below(folder)
        self.unreadable += unreadable
        finished = [one for one in kept if one.folder.parent.name != _RACED]  # in a race the slower ones ended early
        return Collected(
            groups=tuple(_groups(folder.name, finished)),
            scorers=tuple(self._scorers(folder)),
            costs=tuple((folder.name, costs) for costs in self._each(folder, "costs-*.json", load_costs)),
            sweeps=tuple(self._each(folder, "sweep.parquet", _sweep)),
            foretold=tuple(self._foretold(folder, kept)),
            unreadable=(),
        )

    def _foretold(self, folder: Path, kept: Sequence[Kept]) -> Iterator[Foretold]:
        measured = {one.trial: one.measurement for one in kept}
        for one in (predicted for kept_file in self._each(folder, FILE, load_predicted) for predicted in kept_file):
            found = measured.get(one.trial)
            if found is not None and found.match.n == one.requests:
                yield Foretold(folder.name, one, found)

    def _scorers(self, folder: Path) -> Iterator[ScorerRows]:
        """The table where it was made; else what the scorer was saved with."""
        for manifest in self._each(folder, "scorer.json", _manifest):
            rows = [row for table in self._each(folder / "table", "*.json", _rows) for row in table]
            yield ScorerRows(folder.name, manifest.target.num_layers, tuple(rows or manifest.held_out))

    def _each(self, folder: Path, name: str, read: Callable[[Path], _T]) -> list[_T]:
        """Files of that name in a folder and deeper."""
        found = (self._readable(path, read) for path in sorted(folder.rglob(name)))
        return [one for one in found if one is not None]

    def _readable(self, path: Path, read: Callable[[Path], _T]) -> _T | None:
        try:
            return read(path)
        except (ChoiceSpecError, ValueError, TypeError, OSError, pa.ArrowException) as error:
            self.unreadable.append(f"{path}: {str(error).splitlines()[0]}")
            return None


def _groups(experiment: str, kept: Sequence[Kept]) -> Iterator[Group]:
    """By what can be compared, in the order of labels."""
    together: dict[object, list[Kept]] = {}
    for one in kept:
        trial = one.trial
        together.setdefault((trial.pair, trial.runtime, trial.task), []).append(one)
    groups = [
        Group(experiment, tuple(sorted(found, key=lambda one: -one.measurement.speedup.value)))
        for found in together.values()
    ]
    yield from sorted(groups, key=lambda group: group.title)


def _manifest(path: Path) -> ScorerManifest:
    return ScorerManifest.model_validate_json(path.read_bytes())


def _rows(path: Path) -> list[Row]:
    return [Row.model_validate(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def _sweep(path: Path) -> Sweep:
    task = path.parent.name.rsplit("-", 1)[0]
    return Sweep(task, tuple(Tried(**row) for row in pq.read_table(path).to_pylist()))
