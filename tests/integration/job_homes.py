"""Where the jobs of a test run: a cluster of one node, a folder for what they keep, a small repository to decode."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from choicespec.cluster.connect import ADDRESS_VARIABLE
from choicespec.tracking.connection import URI_VARIABLE
from ray.cluster_utils import Cluster

from jobs.terminal import HOME_VARIABLE, console

_WIDTH = 600  # columns: no cell is folded
_FUNCTION = """def total_{number}(first, second):
    both = first + second * {number}
    if both > first:
        both -= {number}
    return both
"""


@contextmanager
def one_node(cpus: int = 2) -> Iterator[None]:
    """A cluster of one node without GPUs, which jobs join."""
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=cpus, num_gpus=0, include_dashboard=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS_VARIABLE, nodes.address)
            yield
    finally:
        nodes.shutdown()


@contextmanager
def job_home(folder: Path, cpus: int = 2) -> Iterator[Path]:
    """The same, with a folder for results and the MLflow database, and a console that folds nothing."""
    with one_node(cpus), pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(folder))
        patch.delenv(URI_VARIABLE, raising=False)
        patch.setattr(console, "width", _WIDTH)
        yield folder


def write_repository(folder: Path, modules: int) -> Path:
    """A repository of modules of different lengths, each with a function that can be cut."""
    for number in range(modules):
        text = "# of no meaning\n" * (number % 7) + _FUNCTION.format(number=number)
        (folder / f"module_{number}.py").write_text(text, encoding="utf-8")
    return folder
