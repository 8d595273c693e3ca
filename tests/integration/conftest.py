"""How a run that had a Ray ends.

``ray.shutdown`` leaves gRPC's threads running in the process that was the driver. At the interpreter's end they may
still use what static destructors have freed: a run whose tests had all passed ended with a segmentation fault so. Here
pytest ends the process itself, with its own status, once everything has been reported and torn down.
"""

import os
import sys

import pytest

_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if "ray" in sys.modules and _STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])
