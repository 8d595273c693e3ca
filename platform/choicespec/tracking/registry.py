"""The MLflow registry: champions that are served."""

from pathlib import Path
from time import time

from mlflow.entities import Metric, Param
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from choicespec.records import Measurement
from choicespec.spec.experiment import TrialSpec
from choicespec.tracking.connection import create_experiment, explained, reach
from choicespec.tracking.figures import metrics, params, tags

_CHAMPION = "champion"  # the alias and the folder
CHAMPIONS = "champions"  # the MLflow experiment of their runs


class ChampionRegistry:
    """The MLflow registry: a registered model a contest, a version a champion, an alias on the reigning one.

    Raises:
        TrackingError: here and in every method, where MLflow cannot be reached or refuses, or a version has no files.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        with explained(uri):
            reach(uri)
            self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def register(self, name: str, trial: TrialSpec, measurement: Measurement, files: Path) -> int:
        """Keep a champion's files with a run of its own and set the alias; returns its version.

        A version of the same trial and measurement is there already where it was promoted before.
        """
        of_trial = tags(trial, measurement)
        with explained(self._uri):
            for version in self._versions(name):
                if version.tags.items() >= of_trial.items():
                    self._client.set_registered_model_alias(name, _CHAMPION, version.version)
                    return int(version.version)
            run_id = self._run(trial, measurement, files)
            if not self._client.search_registered_models(f"name = '{name}'"):
                self._client.create_registered_model(name)
            source = f"runs:/{run_id}/{_CHAMPION}"
            made = self._client.create_model_version(name, source=source, run_id=run_id, tags=of_trial)
            self._client.set_registered_model_alias(name, _CHAMPION, made.version)
            return int(made.version)

    def reigning(self, name: str) -> int:
        """The version that has the alias."""
        with explained(self._uri):
            return int(self._client.get_model_version_by_alias(name, _CHAMPION).version)

    def versions(self, name: str) -> list[int]:
        """All versions, latest first."""
        with explained(self._uri):
            return sorted((int(found.version) for found in self._versions(name)), reverse=True)

    def fetch(self, name: str, version: int, into: Path) -> Path:
        """Copy the files of a version into a folder; returns where they lie in it."""
        with explained(self._uri):
            source = self._client.get_model_version(name, str(version)).source
            run_id, _, path = source.removeprefix("runs:/").partition("/")
            return Path(self._client.download_artifacts(run_id, path, str(into)))

    def _run(self, trial: TrialSpec, measurement: Measurement, files: Path) -> str:
        """A run with the trial's parameters and figures and the champion's files; returns its id."""
        found = self._client.get_experiment_by_name(CHAMPIONS)
        experiment_id = found.experiment_id if found else create_experiment(self._client, self._uri, CHAMPIONS)
        of_trial = tags(trial, measurement)
        run_id = str(self._client.create_run(experiment_id, tags=of_trial, run_name=trial.label).info.run_id)
        now_ms = int(time() * 1e3)
        self._client.log_batch(
            run_id,
            metrics=[Metric(name, value, now_ms, 0) for name, value in metrics(measurement)],
            params=[Param(name, value) for name, value in params(trial, measurement)],
        )
        self._client.log_artifacts(run_id, str(files), _CHAMPION)
        self._client.set_terminated(run_id)
        return run_id

    def _versions(self, name: str) -> list[ModelVersion]:
        return list(self._client.search_model_versions(f"name = '{name}'"))
