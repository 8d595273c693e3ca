"""MLflow, for real: a server on SQLite over HTTP, written by the driver's one writer."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from choicespec.errors import TrackingError
from choicespec.measuring.measure import TrialResult, measure
from choicespec.results import ResultsFolder
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.experiment import ExperimentSpec, parse_experiment
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import URI_VARIABLE, tracking_uri
from choicespec.tracking.runs import ExperimentRun
from integration.processes import await_from, free_port
from mlflow.entities import Run
from mlflow.tracking import MlflowClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real MLflow server."""
    folder = tmp_path_factory.mktemp("mlflow")
    address = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", address.rsplit(":", 1)[1]]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    process = subprocess.Popen([*command, "--workers", "1"], cwd=folder, start_new_session=True)
    try:
        await_from(process, lambda: _is_healthy(address))
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def experiment() -> ExperimentSpec:
    content = {
        "name": "tracked",
        "pairs": {"table": {"target": {"model": "table"}}},
        "runtimes": {"scripted": {"kind": "scripted"}},
        "tasks": {"tool_call": {"kind": "tool_call", "limit": 3, "max_new_tokens": 40}},
        "methods": {"autoregressive": {"kind": "autoregressive"}, "ngram": {"kind": "ngram"}},
    }
    return parse_experiment(content, "this test")


@pytest.fixture(scope="module")
def results(experiment: ExperimentSpec, tmp_path_factory: pytest.TempPathFactory) -> ResultsFolder:
    """The experiment, measured and kept."""
    trials = experiment.trials()
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), trials[0].pair)
    prompts = open_task(trials[0].task).prompts(runtime.tokenizer, runtime.context_tokens)
    folder = ResultsFolder(tmp_path_factory.mktemp("results"))
    for event in measure(runtime, trials, prompts):
        if isinstance(event, TrialResult):
            folder.keep(event)
    return folder


def _log_all(uri: str, experiment: ExperimentSpec, results: ResultsFolder, failures: tuple[str, ...] = ()) -> None:
    run = ExperimentRun(uri, experiment)
    for trial, measurement in results.find_all(experiment.trials()):
        run.log(trial, measurement, results.path(trial))
    run.finish(failures)


def _runs(uri: str) -> tuple[list[Run], list[Run]]:
    """The parent runs and the child runs of the experiment."""
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name("tracked")
    runs = client.search_runs([found.experiment_id])
    return (
        [run for run in runs if "mlflow.parentRunId" not in run.data.tags],
        [run for run in runs if "mlflow.parentRunId" in run.data.tags],
    )


def test_a_trial_is_a_child_run_with_intervals_tags_and_files(
    server: str, experiment: ExperimentSpec, results: ResultsFolder
) -> None:
    """What a person filters and compares by in the UI must be there, with the interval beside each figure."""
    _log_all(server, experiment, results)
    (parent,), children = _runs(server)
    by_method = {run.data.tags["method"]: run for run in children}
    assert set(by_method) == {"autoregressive", "ngram k=8"}
    ngram = by_method["ngram k=8"]
    assert ngram.data.tags["mlflow.parentRunId"] == parent.info.run_id
    for tag in ("pair", "task", "runtime", "quantization", "fingerprint", "git_revision"):
        assert ngram.data.tags[tag]
    metrics = ngram.data.metrics
    assert metrics["match"] == 1.0
    assert metrics["match_low"] < metrics["match"]
    assert metrics["accepted_per_step_low"] <= metrics["accepted_per_step"] <= metrics["accepted_per_step_high"]
    assert metrics["requests"] == 3
    assert ngram.data.params["method.num_draft_tokens"] == "8"
    files = {file.path for file in MlflowClient(tracking_uri=server).list_artifacts(ngram.info.run_id)}
    assert files == {"trial.json", "measurement.json", "traces.parquet"}
    assert parent.info.status == "FINISHED"


def test_names_are_those_that_charts_and_filters_are_saved_by(
    server: str, experiment: ExperimentSpec, results: ResultsFolder
) -> None:
    """Fails if a figure or a tag gets another name: every chart and filter that a person has saved would lose it."""
    _log_all(server, experiment, results)
    for run in _runs(server)[1]:
        estimates = (
            "decode_tokens_per_s",
            "baseline_tokens_per_s",
            "speedup",
            "accepted_per_step",
            "match",
            "prefill_ms",
        )
        names = {f"{name}{end}" for name in estimates for end in ("", "_low", "_high")}
        names |= {"propose_share", "requests", "omitted_requests", "memory_bytes"}
        by_position = {name for name in run.data.metrics if name.startswith("acceptance_at_")}
        assert set(run.data.metrics) - by_position == names
        assert by_position == {f"acceptance_at_{number}" for number in range(1, len(by_position) + 1)}
        assert bool(by_position) == run.data.tags["method"].startswith("ngram")
        tags = {name for name in run.data.tags if not name.startswith("mlflow.")}
        filters = {"pair", "method", "task", "runtime", "quantization", "stage"}
        assert tags == filters | {"fingerprint", "measured_at", "git_revision"}
        assert run.data.tags["stage"] == "measured"


def test_logging_again_adds_nothing(server: str, experiment: ExperimentSpec, results: ResultsFolder) -> None:
    """A resumed driver logs every kept result once more; twice the same run would falsify every comparison."""
    _log_all(server, experiment, results)
    before = _runs(server)
    _log_all(server, experiment, results)
    after = _runs(server)
    assert [len(runs) for runs in after] == [len(runs) for runs in before] == [1, 2]


def test_failures_are_kept_with_the_parent(server: str, experiment: ExperimentSpec, results: ResultsFolder) -> None:
    """An experiment with missing trials must not look finished."""
    other = experiment.narrowed(methods=["ngram"])
    _log_all(server, other, results, failures=("ngram: no node can give a worker 8 GPU",))
    client = MlflowClient(tracking_uri=server)
    query = "attributes.status = 'FAILED'"
    (run,) = client.search_runs([client.get_experiment_by_name("tracked").experiment_id], query)
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["experiment.json", "failures.txt"]


def test_an_unreachable_server_is_said_at_once(experiment: ExperimentSpec) -> None:
    """MLflow's own client would retry for minutes."""
    with pytest.raises(TrackingError, match=r"MLflow at http://127\.0\.0\.1:\d+ cannot be used"):
        ExperimentRun(f"http://127.0.0.1:{free_port()}", experiment)


def test_a_run_that_a_killed_driver_left_half_written_is_replaced(
    server: str, experiment: ExperimentSpec, results: ResultsFolder
) -> None:
    """Otherwise a trial would appear twice, once without its figures."""
    _log_all(server, experiment, results)
    client = MlflowClient(tracking_uri=server)
    _, children = _runs(server)
    client.update_run(children[0].info.run_id, status="RUNNING")
    _log_all(server, experiment, results)
    after = _runs(server)[1]
    assert len(after) == len(children)
    assert {run.info.status for run in after} == {"FINISHED"}
    assert children[0].info.run_id not in {run.info.run_id for run in after}


def test_files_of_a_local_database_lie_beside_it(
    experiment: ExperimentSpec, results: ResultsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submitted job's working directory goes with the job; its artifacts must not."""
    monkeypatch.delenv(URI_VARIABLE, raising=False)
    uri = tracking_uri(tmp_path)
    _log_all(uri, experiment, results)
    assert sorted(file.name for file in tmp_path.rglob("traces.parquet")) == ["traces.parquet"] * 2
    assert (tmp_path / "mlflow.db").is_file()


def _is_healthy(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=1).ok
    except requests.ConnectionError:
        return False
