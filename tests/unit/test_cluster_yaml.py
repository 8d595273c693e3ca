"""The cluster launcher's file, checked offline by Ray's own code and by what that leaves out."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from choicespec.cluster.nodes import choose_node, read_node_types
from choicespec.errors import SpecError
from choicespec.tracking.connection import URI_VARIABLE
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "deployments" / "kuberay"


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
    assert "pip install -c constraints-gpu.txt -e '.[vllm,nf4]'" in commands
    assert "pip install --no-deps -r requirements-data.txt" in commands
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for image in ("head_image", "worker_image"):
        assert config["docker"][image].startswith(f"rayproject/ray:{pinned[1]}-py311")


def test_llama_cpp_is_the_version_that_is_measured_on_the_cpu() -> None:
    """Fails if rows of one runtime come from two versions of it."""
    pinned = re.search(r"xllamacpp==[\d.]+\.(\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned is not None
    for built in (" ".join(_config()["worker_setup_commands"]), (KUBERAY / "Dockerfile").read_text(encoding="utf-8")):
        assert f"--branch b{pinned[1]} " in built


def test_every_node_finds_mlflow() -> None:
    """Fails if a driver or a replica logs into, or reads champions from, a database of its own."""
    config = _validated(_config())
    head, worker = (config[f"{role}_start_ray_commands"][-1] for role in ("head", "worker"))
    assert any("mlflow server --host 0.0.0.0 --port 5000" in one for one in config["head_start_ray_commands"])
    assert f"{URI_VARIABLE}=http://$(hostname -I | cut -d' ' -f1):5000;" in head
    assert f"{URI_VARIABLE}=http://$RAY_HEAD_IP:5000 " in worker


def test_a_node_type_says_how_much_memory_its_gpus_have(tmp_path: Path) -> None:
    """Fails if a dry run takes a GPU of unknown size for one that holds everything."""
    types = read_node_types(ROOT / "cluster.yaml")
    assert [(one.name, one.resources.get("GPU", 0), one.gpu_gib) for one in types] == [
        ("head", 0, 0),
        ("one_gpu", 1, 95),
        ("four_gpus", 4, 95),
    ]
    config = _config()
    del config["available_node_types"]["one_gpu"]["labels"]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(SpecError, match="'one_gpu' has GPUs, but no label gpu-memory-gib"):
        read_node_types(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("asked", "gib", "expected"),
    [
        ({"CPU": 2}, 0, "head"),
        ({"CPU": 4}, 0, "one_gpu"),
        ({"CPU": 4, "GPU": 1}, 80, "one_gpu"),
        ({"CPU": 16, "GPU": 1}, 80, "four_gpus"),
        ({"CPU": 8, "GPU": 4}, 60, "four_gpus"),
        ({"CPU": 4, "GPU": 1}, 90, "takes 90.0 GiB of a GPU, but none has more than 0.9 x 95"),
        ({"CPU": 8, "GPU": 8}, 1, "no node type has 8 CPU, 8 GPU"),
    ],
)
def test_a_worker_goes_to_the_smallest_node_that_holds_it(asked: dict[str, float], gib: float, expected: str) -> None:
    """Fails if a dry run promises a node on which the worker would wait for ever, or run out of memory."""
    chosen = choose_node(asked, gib * 2**30, read_node_types(ROOT / "cluster.yaml"))
    assert expected in (chosen.name, chosen.reason)


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
