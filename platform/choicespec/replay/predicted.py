"""What a replay predicted of trials, kept so that it can be laid beside what was measured live."""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from choicespec.errors import RecordingError
from choicespec.replay.simulate import Replayed
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.frozen import Frozen

FILE = "predicted.json"


class Predicted(Frozen):
    """A replay's figures for a trial.

    Attributes:
        requests: that they are of; a live measurement of others is not comparable.
    """

    trial: TrialSpec
    tokens_per_s: float
    accepted_per_step: float
    requests: int

    @classmethod
    def of(cls, trial: TrialSpec, found: Replayed) -> "Predicted":
        """What was replayed of a trial."""
        return cls(
            trial=trial,
            tokens_per_s=found.tokens_per_s,
            accepted_per_step=found.accepted_per_step,
            requests=len(found.steps),
        )


_LIST = TypeAdapter(tuple[Predicted, ...])


def keep_predicted(folder: Path, found: Sequence[Predicted]) -> None:
    """Write them into a folder, in place of what it had; a file of the same is left alone."""
    path, content = folder / FILE, _LIST.dump_json(tuple(found), indent=1)
    if path.exists() and path.read_bytes() == content:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def load_predicted(path: Path) -> tuple[Predicted, ...]:
    """Read what was kept.

    Raises:
        RecordingError: the file is damaged or of another version.
    """
    try:
        return _LIST.validate_json(path.read_bytes())
    except ValidationError as error:
        raise RecordingError(
            f"{path} does not hold predictions of this version: {error.error_count()} faults"
        ) from None
