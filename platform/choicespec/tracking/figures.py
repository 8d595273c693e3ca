"""A measured trial as MLflow has it: tags to filter by, metrics, parameters."""

from collections.abc import Iterator

from choicespec.records import Estimate, Measurement
from choicespec.spec.experiment import TrialSpec

FINGERPRINT, MEASURED_AT = "fingerprint", "measured_at"


def tags(trial: TrialSpec, measurement: Measurement) -> dict[str, str]:
    """What runs are found and filtered by."""
    return {
        "pair": trial.pair.label,
        "method": trial.method.label,
        "task": trial.task.label,
        "runtime": trial.runtime.kind,
        "quantization": measurement.environment.dtype,
        FINGERPRINT: trial.fingerprint(),
        MEASURED_AT: measurement.measured_at,
        "git_revision": measurement.environment.git_revision,
    }


def metrics(measurement: Measurement) -> Iterator[tuple[str, float]]:
    """Names and values; an estimate also with its interval."""
    for name in Measurement.model_fields:
        figure = getattr(measurement, name)
        if isinstance(figure, Estimate):
            yield name, figure.value
            yield f"{name}_low", figure.low
            yield f"{name}_high", figure.high
    for position, accepted in enumerate(measurement.acceptance_by_position, start=1):
        yield f"acceptance_at_{position}", accepted
    yield "requests", measurement.match.n
    yield "omitted_requests", len(measurement.omitted)
    yield "propose_share", measurement.propose_share
    if measurement.memory_bytes is not None:
        yield "memory_bytes", measurement.memory_bytes


def params(trial: TrialSpec, measurement: Measurement) -> Iterator[tuple[str, str]]:
    """Every field of the trial and of the environment under its dotted path."""
    yield from _flat("", trial.model_dump(mode="json"))
    yield from _flat("environment.", measurement.environment.model_dump(mode="json"))


def _flat(prefix: str, values: dict[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", str(value)
