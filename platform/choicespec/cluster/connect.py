"""Join the Ray cluster that a job was submitted to, or start one on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

ADDRESS_VARIABLE = "RAY_ADDRESS"
_FORWARDED = ("MLFLOW_TRACKING_URI", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")


def on_cluster() -> bool:
    """Whether there is a cluster to join; otherwise Ray is started on this machine."""
    return ADDRESS_VARIABLE in os.environ


def is_submitted() -> bool:
    """Whether this process is the entrypoint of ``ray job submit``."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


@contextmanager
def ray_session() -> Iterator[None]:
    """A connected Ray for the length of the block; a local one that was started here ends with it.

    ``RAY_ADDRESS`` names a cluster (``ray job submit`` sets it). Workers import the package from ``platform`` in the
    working directory, which is the submitted snapshot on a cluster and the checkout on one machine.
    """
    env_vars = {"PYTHONPATH": "platform", **{name: os.environ[name] for name in _FORWARDED if name in os.environ}}
    ray.init(
        address=os.environ.get(ADDRESS_VARIABLE, "local"),
        runtime_env={"env_vars": env_vars},
        include_dashboard=False,
        log_to_driver=True,
        logging_level="warning",
    )
    try:
        yield
    finally:
        ray.shutdown()
