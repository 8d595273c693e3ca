"""What is served: pairs by name, each with its champion, and the limits of a request."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from choicespec.spec.frozen import Frozen

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # also names Ray Serve's deployment


class ServedSpec(Frozen):
    """One name of ``/v1/models``.

    Attributes:
        champion: a registered model, the alias ``champion`` of which is followed; None serves the configuration that
            ships for the embedded default.
        repository: a folder, the Python files of which may be proposed from.
        min_replicas, max_replicas: between these, Ray Serve follows the load.
        target_ongoing_requests: decoding and waiting requests a replica that Ray Serve scales to.
    """

    champion: str | None = Field(default=None, min_length=1)
    repository: str | None = None
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} exceeds max_replicas={self.max_replicas}")
        return self


class LimitsSpec(Frozen):
    """What one request may take.

    Attributes:
        body_bytes: of the request as it is sent.
        new_tokens: the most that are decoded; also what a request gets that names no number.
        waiting: requests that wait for a slot of a replica; a further one is told to come back.
        timeout_s: from arrival to the last token.
    """

    body_bytes: int = Field(default=1_000_000, ge=1)
    new_tokens: int = Field(default=1024, ge=1)
    waiting: int = Field(default=16, ge=0)
    timeout_s: float = Field(default=300.0, gt=0)


class ServingSpec(Frozen):
    """All that one application serves.

    Attributes:
        models: by the name that clients use.
        tracking_uri: MLflow's, for champions; None is ``MLFLOW_TRACKING_URI`` or else ``mlflow.db`` in this folder.
        follow_s: how often each replica asks whether its champion has changed.
    """

    models: dict[ModelName, ServedSpec] = Field(default={"smollm2": ServedSpec()}, min_length=1)
    limits: LimitsSpec = LimitsSpec()
    tracking_uri: str | None = None
    follow_s: float = Field(default=10.0, gt=0)
