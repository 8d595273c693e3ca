"""How MLflow is reached: where it is, and what is said where it cannot be used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from choicespec.errors import TrackingError

URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
_REACH_TIMEOUT_S = 5


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turn what MLflow and the network raise into an error that says where.

    Raises:
        TrackingError: MLflow cannot be reached or refuses.
    """
    try:
        yield
    except (MlflowException, requests.RequestException, OSError) as error:
        raise TrackingError(f"MLflow at {uri} cannot be used: {error}") from error


def create_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """A new MLflow experiment; the files of a SQLite database's runs lie beside the database."""
    beside = None
    if uri.startswith(_SQLITE):
        beside = (Path(uri.removeprefix(_SQLITE)).resolve().parent / "mlartifacts" / name).as_uri()
    return str(client.create_experiment(name, artifact_location=beside))


def reach(uri: str) -> None:
    """MLflow's own client would retry for minutes before it says that nobody is there."""
    if uri.startswith("http"):
        requests.get(f"{uri.rstrip('/')}/health", timeout=_REACH_TIMEOUT_S).raise_for_status()


def tracking_uri(folder: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or else a SQLite database in a folder."""
    return os.environ.get(URI_VARIABLE) or f"{_SQLITE}{folder.resolve() / 'mlflow.db'}"
