"""The results folder: nothing that was measured is lost, and nothing that was not is found."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from choicespec.errors import ChoiceSpecError
from choicespec.measuring.measure import TrialResult, measure
from choicespec.records import Request
from choicespec.results import ResultsFolder, kept_below
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import Prompts

PAIR, SPEC = PairSpec(target=TargetSpec(model="none")), ScriptedRuntimeSpec()
PROMPTS = Prompts(tuple(Request(f"r{x}", tuple(f'f(x={x}, y="'.encode()), 16) for x in (12, 38, 39)), ("r9: too long",))


def trial(method: MethodSpec) -> TrialSpec:
    return TrialSpec(pair=PAIR, runtime=SPEC, task=ToolCall(), method=method)


@pytest.fixture(scope="module")
def result() -> TrialResult:
    """A measured trial of prompt lookup."""
    events = list(measure(ScriptedRuntime(SPEC, PAIR), [trial(Ngram())], PROMPTS))
    assert isinstance(events[-1], TrialResult)
    return events[-1]


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    """A folder that does not exist yet."""
    return ResultsFolder(tmp_path / "results" / "mine")


def too_large_to_write(result: TrialResult) -> TrialResult:
    """A result whose traces cannot be written, so that keeping it fails when half of the files are there."""
    trace = result.traces[0]._replace(output_ids=(2**40,))
    return result._replace(traces=(trace,))


def test_what_is_kept_is_found(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if a figure, an interval or the environment is changed by writing and reading."""
    assert folder.find(result.trial) is None
    folder.keep(result)
    assert folder.find(result.trial) == result.measurement
    assert TrialSpec.model_validate_json((folder.path(result.trial) / "trial.json").read_text()) == result.trial


def test_another_trial_is_not_found(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if a trial is taken for another; those found come in the order that was asked for."""
    folder.keep(result)
    other = trial(Ngram(num_draft_tokens=4))
    assert folder.find(other) is None
    folder.keep(result._replace(trial=other))
    found = folder.find_all([trial(Autoregressive()), other, result.trial])
    assert [found_trial for found_trial, _ in found] == [other, result.trial]


def test_the_traces_are_kept_with_every_step_of_both_sides(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if a figure could not be computed again, or in another way, from what is on disk."""
    folder.keep(result)
    rows = pq.read_table(folder.path(result.trial) / "traces.parquet").to_pylist()
    assert [row["role"] for row in rows] == ["method"] * 3 + ["baseline"] * 3
    for row, trace in zip(rows, (*result.traces, *result.baseline_traces), strict=True):
        assert tuple(row["output_ids"]) == trace.output_ids
        assert row["steps"] == [step._asdict() for step in trace.steps]
        kept = {name: value for name, value in trace._asdict().items() if name not in ("output_ids", "steps")}
        assert {name: row[name] for name in kept} == kept
    assert any(step["proposed"] for row in rows for step in row["steps"])


def test_keeping_again_replaces(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if a trial that is measured anew keeps its old figures, or leaves old files behind."""
    folder.keep(result)
    (folder.path(result.trial) / "stray").write_text("of an older version")
    newer = result.measurement.model_copy(update={"measured_at": "2030-01-01T00:00:00.000+00:00"})
    folder.keep(result._replace(measurement=newer))
    assert folder.find(result.trial) == newer
    files = sorted(path.name for path in folder.path(result.trial).iterdir())
    assert files == ["measurement.json", "traces.parquet", "trial.json"]


def test_a_crash_midway_leaves_nothing_found(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if half a result passes for a whole one: the measurement is written before the traces fail."""
    with pytest.raises(pa.ArrowException):
        folder.keep(too_large_to_write(result))
    assert folder.find(result.trial) is None
    folder.keep(result)
    assert folder.find(result.trial) == result.measurement


def test_a_crash_midway_leaves_the_previous_result(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if the old result is removed before the new one is whole."""
    folder.keep(result)
    with pytest.raises(pa.ArrowException):
        folder.keep(too_large_to_write(result))
    assert folder.find(result.trial) == result.measurement
    assert (folder.path(result.trial) / "traces.parquet").is_file()


@pytest.mark.parametrize("content", [b"", b'{"decode_tok', b"{}", b'{"speed": 2}', b"\xff\xfe"])
def test_a_damaged_file_is_named(folder: ResultsFolder, result: TrialResult, content: bytes) -> None:
    """Fails if a damaged result is measured again silently, or ends a job without saying which file it is."""
    folder.keep(result)
    path = folder.path(result.trial) / "measurement.json"
    path.write_bytes(content)
    with pytest.raises(ChoiceSpecError) as caught:
        folder.find(result.trial)
    assert str(path) in str(caught.value)
    assert "delete" in str(caught.value)


def test_whatever_is_kept_is_found_wherever_it_lies(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if a trial is lost because its experiment has changed, or a broken one hides the others."""
    folder.keep(result)
    moved = folder.folder / "search" / "another name"
    moved.parent.mkdir()
    folder.path(result.trial).rename(moved)
    (folder.folder / ".half.partial").mkdir()
    (folder.folder / ".half.partial" / "measurement.json").write_text("{")
    (folder.folder / "broken").mkdir()
    (folder.folder / "broken" / "measurement.json").write_text("{}")
    (found,), (unreadable,) = kept_below(folder.folder)
    assert (found.folder, found.trial, found.measurement) == (moved, result.trial, result.measurement)
    assert found.traces() == result.traces
    assert "broken" in unreadable


def test_traces_of_before_are_read(folder: ResultsFolder, result: TrialResult) -> None:
    """Fails if what was kept before steps told scoring and settling apart can no longer be read."""
    folder.keep(result)
    path = folder.path(result.trial) / "traces.parquet"
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        for step in row["steps"]:
            del step["score_ms"], step["settle_ms"]
    pq.write_table(pa.Table.from_pylist(rows), path)
    (before,) = kept_below(folder.folder)[0]
    plain = [
        trace._replace(steps=tuple(s._replace(score_ms=0, settle_ms=0) for s in trace.steps)) for trace in result.traces
    ]
    assert list(before.traces()) == plain
