"""The results folder: every finished trial on disk, found again by its fingerprint."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from choicespec.errors import ChoiceSpecError
from choicespec.measuring.measure import TrialResult
from choicespec.records import Measurement, Step, Trace
from choicespec.spec.experiment import TrialSpec

_TRIAL, _MEASUREMENT, _TRACES = "trial.json", "measurement.json", "traces.parquet"
_STEP = pa.struct(
    {
        "proposed": pa.int32(),
        "accepted": pa.int32(),
        "source": pa.string(),
        "propose_ms": pa.float64(),
        "verify_ms": pa.float64(),
        "score_ms": pa.float64(),
        "settle_ms": pa.float64(),
    }
)
_TRACE_SCHEMA = pa.schema(
    {
        "role": pa.string(),
        "request_id": pa.string(),
        "prompt_tokens": pa.int32(),
        "output_ids": pa.list_(pa.int32()),
        "prefill_tokens": pa.int32(),
        "finish_reason": pa.string(),
        "prefill_ms": pa.float64(),
        "decode_ms": pa.float64(),
        "steps": pa.list_(_STEP),
    }
)


class ResultsFolder:
    """Kept results, a folder a trial: the trial and its measurement as JSON, the traces as Parquet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, trial: TrialSpec) -> Path:
        """Where a trial's files lie, once it has been measured."""
        return self.folder / trial.fingerprint()

    def keep(self, result: TrialResult) -> None:
        """Write a result; a crash midway leaves the previous one, or none."""
        final = self.path(result.trial)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed driver left
        partial.mkdir(parents=True)
        (partial / _TRIAL).write_text(result.trial.model_dump_json(indent=2), encoding="utf-8")
        (partial / _MEASUREMENT).write_text(result.measurement.model_dump_json(indent=2), encoding="utf-8")
        rows = [*_rows("method", result.traces), *_rows("baseline", result.baseline_traces)]
        pq.write_table(pa.Table.from_pylist(rows, schema=_TRACE_SCHEMA), partial / _TRACES)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)

    def find(self, trial: TrialSpec) -> Measurement | None:
        """A trial's measurement, or None where it has not been measured.

        Raises:
            ChoiceSpecError: the kept file is damaged or of another version of choicespec.
        """
        path = self.path(trial) / _MEASUREMENT
        if not path.is_file():
            return None
        try:
            return Measurement.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ChoiceSpecError(f"{path} cannot be read; delete {path.parent} to measure it again: {error}") from None

    def traces(self, trial: TrialSpec) -> tuple[Trace, ...]:
        """The method's traces of a trial that has been measured."""
        return _method_traces(self.path(trial))

    def find_all(self, trials: Sequence[TrialSpec]) -> list[tuple[TrialSpec, Measurement]]:
        """Those of the trials that have been measured, in their order."""
        return [(trial, found) for trial in trials if (found := self.find(trial)) is not None]


class Kept(NamedTuple):
    """A trial's files, wherever they lie: the experiment may have changed since, and with it the fingerprint."""

    folder: Path
    trial: TrialSpec
    measurement: Measurement

    def traces(self) -> tuple[Trace, ...]:
        """The method's."""
        return _method_traces(self.folder)


def kept_below(folder: Path) -> tuple[list[Kept], list[str]]:
    """Every trial kept in a folder or deeper, by path, and why others cannot be read."""
    found, unreadable = [], []
    for path in sorted(folder.rglob(_MEASUREMENT)):
        if path.parent.name.startswith("."):  # half written
            continue
        try:
            trial = TrialSpec.model_validate_json((path.parent / _TRIAL).read_bytes())
            found.append(Kept(path.parent, trial, Measurement.model_validate_json(path.read_bytes())))
        except (ValueError, OSError) as error:
            said = str(error).splitlines()[0]
            unreadable.append(f"{path.parent} is damaged or of another version of choicespec: {said}")
    return found, unreadable


def _method_traces(folder: Path) -> tuple[Trace, ...]:
    rows = pq.read_table(folder / _TRACES, filters=[("role", "=", "method")]).to_pylist()
    return tuple(_trace(row) for row in rows)


def _trace(row: dict[str, Any]) -> Trace:
    fields = {name: row[name] for name in Trace._fields}
    steps = tuple(Step(**step) for step in row["steps"])
    return Trace(**{**fields, "output_ids": tuple(row["output_ids"]), "steps": steps})


def _rows(role: str, traces: Sequence[Trace]) -> Iterator[dict[str, object]]:
    for trace in traces:
        yield {"role": role, **trace._asdict(), "steps": [step._asdict() for step in trace.steps]}
