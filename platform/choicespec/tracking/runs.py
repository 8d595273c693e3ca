"""MLflow: a parent run an experiment, a child run a trial. One writer, the driver."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from mlflow.entities import Metric, Param, Run
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from choicespec.records import Measurement
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.tracking.connection import create_experiment, explained, reach
from choicespec.tracking.figures import FINGERPRINT, MEASURED_AT, metrics, params, tags
from choicespec.tracking.registry import CHAMPIONS

if TYPE_CHECKING:  # torch behind them takes seconds, and most jobs train nothing
    from choicespec.scorer.table import Row
    from choicespec.training.evaluate import Acceptance

_MOST_METRICS = 1000  # of one request, as MLflow has it
_EXPERIMENT, _STAGE = "experiment", "stage"
MEASURED = "measured"  # the stage of what is no part of a search


class ExperimentRun:
    """The MLflow parent run of an experiment; the same specification, run again, goes on in the same run.

    Args:
        uri: the tracking URI; an ``http`` one is asked for its health first.

    Raises:
        TrackingError: here and in every method, where MLflow cannot be reached or refuses.
    """

    def __init__(self, uri: str, experiment: ExperimentSpec) -> None:
        self._uri = uri
        with self._explained():
            reach(uri)
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(experiment.name)
            self._experiment_id = (
                found.experiment_id if found else create_experiment(self._client, uri, experiment.name)
            )
            self._run_id = self._open(experiment)

    def log(self, trial: TrialSpec, measurement: Measurement, files: Path, stage: str = MEASURED) -> None:
        """Write a trial's parameters, metrics, tags and files as a child run, unless it is there already.

        Args:
            trial, measurement: what was measured.
            files: a folder.
            stage: ``live`` and ``held_out`` for a search's two; those of a race ended early are not to be compared.
        """
        with self._explained():
            if self._has(trial, measurement):
                return
            of_trial = tags(trial, measurement) | {_STAGE: stage, MLFLOW_PARENT_RUN_ID: self._run_id}
            run_id = self._client.create_run(self._experiment_id, tags=of_trial, run_name=trial.label).info.run_id
            now_ms = int(time() * 1e3)
            self._client.log_batch(
                run_id,
                metrics=[Metric(name, value, now_ms, 0) for name, value in metrics(measurement)],
                params=[Param(name, value) for name, value in params(trial, measurement)],
            )
            self._client.log_artifacts(run_id, str(files))
            self._client.set_terminated(run_id)

    def log_scorer(
        self, name: str, params: Mapping[str, str], losses: Sequence[float], rows: Sequence["Row"], files: Path
    ) -> None:
        """Write a fitted scorer as a child run: the loss of each epoch, its figures on held-out prompts, its files."""
        figures = dict(metric for row in rows for metric in _scorer_metrics(row))
        self._log_fitted("scorer", name, params, losses, figures, files)

    def log_drafter(
        self, name: str, params: Mapping[str, str], losses: Sequence[float], found: Sequence["Acceptance"], files: Path
    ) -> None:
        """Write a fitted drafter as a child run: the loss of each chunk, its figures on held-out prompts, its files."""
        figures = {
            f"{one.task}.{figure}": getattr(one, figure).value
            for one in found
            for figure in ("accepted", "accepted_on_path")
        }
        self._log_fitted("drafter", name, params, losses, figures, files)

    def _log_fitted(
        self,
        kind: str,
        name: str,
        params: Mapping[str, str],
        losses: Sequence[float],
        figures: Mapping[str, float],
        files: Path,
    ) -> None:
        with self._explained():
            tags = {MLFLOW_PARENT_RUN_ID: self._run_id, "kind": kind}
            run_id = self._client.create_run(self._experiment_id, tags=tags, run_name=name).info.run_id
            now_ms = int(time() * 1e3)
            metrics = [Metric("loss", loss, now_ms, step) for step, loss in enumerate(losses, start=1)]
            metrics += [Metric(key, value, now_ms, 0) for key, value in figures.items()]
            for start in range(0, len(metrics), _MOST_METRICS):
                self._client.log_batch(run_id, metrics[start : start + _MOST_METRICS])
            self._client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
            self._client.log_artifacts(run_id, str(files))
            self._client.set_terminated(run_id)

    def log_files(self, files: Sequence[Path], folder: str) -> None:
        """Write files into a folder of the parent run; one of the same name is replaced."""
        with self._explained():
            for file in files:
                self._client.log_artifact(self._run_id, str(file), folder)

    def log_figures(self, figures: Mapping[str, float]) -> None:
        """Write figures of the whole, as metrics of the parent run."""
        with self._explained():
            now_ms = int(time() * 1e3)
            self._client.log_batch(self._run_id, [Metric(name, value, now_ms, 0) for name, value in figures.items()])

    def finish(self, failures: Sequence[str]) -> None:
        """Close the parent run; it is FAILED where trials failed, with their reasons as a text."""
        with self._explained():
            if failures:
                self._client.log_text(self._run_id, "\n".join(failures), "failures.txt")
            self._client.set_terminated(self._run_id, "FAILED" if failures else "FINISHED")

    def _open(self, experiment: ExperimentSpec) -> str:
        fingerprint = experiment.fingerprint()
        query = f"tags.{_EXPERIMENT} = '{fingerprint}'"
        found = self._client.search_runs([self._experiment_id], query, max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        tags = {_EXPERIMENT: fingerprint}
        run = self._client.create_run(self._experiment_id, tags=tags, run_name=experiment.name)
        self._client.log_dict(run.info.run_id, experiment.model_dump(mode="json"), "experiment.json")
        return str(run.info.run_id)

    def _has(self, trial: TrialSpec, measurement: Measurement) -> bool:
        """Whether the trial's run is there and whole; one that a killed driver left half written is deleted."""
        query = f"tags.{FINGERPRINT} = '{trial.fingerprint()}' and tags.{MEASURED_AT} = '{measurement.measured_at}'"
        runs = self._client.search_runs([self._experiment_id], query)
        for run in runs:
            if run.info.status != "FINISHED":
                self._client.delete_run(run.info.run_id)
        return any(run.info.status == "FINISHED" for run in runs)

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self._uri)


def download_results(uri: str, experiments: Sequence[str], into: Path) -> None:
    """Copy what MLflow keeps of experiments into a results folder: a folder a trial, the latest of each.

    Args:
        uri: the tracking URI.
        experiments: their names; none are all.
        into: where each gets a folder.

    Raises:
        TrackingError: MLflow cannot be reached.
    """
    with explained(uri):
        reach(uri)
        client = MlflowClient(tracking_uri=uri)
        for experiment in client.search_experiments():
            if experiment.name == CHAMPIONS or (experiments and experiment.name not in experiments):
                continue
            for run in _runs(client, experiment.experiment_id):
                folder, files = _kept_files(run)
                (into / experiment.name / folder).mkdir(parents=True, exist_ok=True)
                if run.info.status in ("FINISHED", "FAILED") and files is not None:
                    client.download_artifacts(run.info.run_id, files, str(into / experiment.name / folder))


def _runs(client: MlflowClient, experiment_id: str) -> Iterator[Run]:
    """All of an experiment, the latest last."""
    token: str | None = None
    while True:
        page = client.search_runs([experiment_id], order_by=["attributes.start_time ASC"], page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _kept_files(run: Run) -> tuple[str, str | None]:
    """The folder that a run's files belong in, and which of them; None for those of no report."""
    tags = run.data.tags
    if FINGERPRINT in tags:
        return f"{tags.get(_STAGE, MEASURED)}/{tags[FINGERPRINT]}", ""
    if tags.get("kind") == "scorer":
        return "scorer", "scorer.json"
    return "whole", "" if _EXPERIMENT in tags else None


def _scorer_metrics(row: "Row") -> Iterator[tuple[str, float]]:
    for who in ("prior", "scorer", "oracle"):
        ranking = getattr(row.found, who)
        for figure in type(ranking).model_fields:
            yield f"{row.task}.{who}.{figure}", getattr(ranking, figure).value
    yield f"{row.task}.gap_closed", row.found.gap_closed
    yield f"{row.task}.gap_closed_on_path", row.found.gap_closed_on_path
    yield f"{row.task}.calibration_error_tokens", row.found.calibration_error_tokens
    yield f"{row.task}.held_out_prompts", row.found.scorer.accepted.n
