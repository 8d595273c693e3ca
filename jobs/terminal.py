"""What the jobs share: where they keep things, and how they talk to a person."""

import os
import sys
from pathlib import Path
from time import monotonic

from choicespec.cluster.connect import is_submitted
from rich.console import Console

EXPERIMENTS = Path(__file__).parent / "experiments"
HOME_VARIABLE = "CHOICESPEC_HOME"
_PROGRESS_EVERY_S = 5.0

console = Console(width=None if sys.stdout.isatty() else 160)


def home() -> Path:
    """Where results and the default MLflow database lie: beside the working directory, unless that is a job's snapshot,
    which goes with the job."""
    default = Path.home() / ".choicespec" if is_submitted() else Path()
    return Path(os.environ.get(HOME_VARIABLE, default))


def say(line: str, style: str | None = None) -> None:
    """Print a line as it is."""
    console.print(line, style=style, markup=False, highlight=False)


class ProgressLines:
    """Prints progress, but no more than a line every few seconds."""

    def __init__(self) -> None:
        self._printed_s = -_PROGRESS_EVERY_S

    def __call__(self, line: str) -> None:
        if monotonic() - self._printed_s >= _PROGRESS_EVERY_S:
            say(line)
            self._printed_s = monotonic()
