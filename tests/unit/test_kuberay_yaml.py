"""The KubeRay files, checked offline: field by field, against each other, and against the checkout."""

import re
import shlex
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml
from choicespec.cluster.nodes import read_node_types
from choicespec.spec.experiment_files import load_experiments
from choicespec.spec.serving import ServingSpec
from choicespec.tracking.connection import URI_VARIABLE
from ray.serve.schema import ServeDeploySchema

from jobs.bench import _parse
from jobs.terminal import EXPERIMENTS, HOME_VARIABLE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "kuberay"
GPU = "nvidia.com/gpu"
# Fields of the ray.io/v1 types of KubeRay 1.3 and of the Kubernetes types below them, as far as they are used or likely
# misspelt; None takes any key.
POD = {
    "spec": {
        "nodeSelector": None,
        "containers": {"name", "image", "resources", "env", "volumeMounts", "command", "args", "ports"},
        "volumes": {"name", "persistentVolumeClaim", "emptyDir"},
    }
}
CLUSTER = {
    "rayVersion": None,
    "enableInTreeAutoscaling": None,
    "autoscalerOptions": {"resources", "image", "imagePullPolicy", "env", "idleTimeoutSeconds", "upscalingMode"},
    "headGroupSpec": {"serviceType": None, "headService": None, "rayStartParams": None, "template": POD},
    "workerGroupSpecs": {
        "groupName": None,
        "replicas": None,
        "minReplicas": None,
        "maxReplicas": None,
        "numOfHosts": None,
        "rayStartParams": None,
        "template": POD,
    },
}
JOB = {
    "entrypoint": None,
    "runtimeEnvYAML": None,
    "submissionMode": None,
    "shutdownAfterJobFinishes": None,
    "ttlSecondsAfterFinished": None,
    "backoffLimit": None,
    "activeDeadlineSeconds": None,
    "suspend": None,
    "rayClusterSpec": CLUSTER,
}
SERVICE = {"serveConfigV2": None, "rayClusterConfig": CLUSTER, "upgradeStrategy": None}


def _read(name: str) -> list[dict[str, Any]]:
    return [dict(one) for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]


(RAYJOB,) = _read("rayjob.yaml")
(RAYSERVICE,) = _read("rayservice.yaml")
MLFLOW = _read("mlflow.yaml")
CLUSTERS = (RAYJOB["spec"]["rayClusterSpec"], RAYSERVICE["spec"]["rayClusterConfig"])


def _unknown(content: Any, known: Any, path: str) -> Iterator[str]:
    """The paths of fields that a type does not have."""
    for number, item in enumerate(content if isinstance(content, list) else [content]):
        if known is None or not isinstance(item, dict):
            continue
        for name, value in item.items():
            here = f"{path}.{name}" if not isinstance(content, list) else f"{path}[{number}].{name}"
            if name not in known:
                yield here
            elif isinstance(known, Mapping):
                yield from _unknown(value, known[name], here)


def _pods(cluster: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def _environment(pod: Mapping[str, Any]) -> dict[str, str]:
    (container,) = pod["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


def _pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_field_is_one_of_its_type() -> None:
    """Fails if a field is misspelt, which the API server drops or refuses only when somebody pays for it."""
    assert [RAYJOB["apiVersion"], RAYJOB["kind"]] == ["ray.io/v1", "RayJob"]
    assert [RAYSERVICE["apiVersion"], RAYSERVICE["kind"]] == ["ray.io/v1", "RayService"]
    assert list(_unknown(RAYJOB["spec"], JOB, "spec")) == []
    assert list(_unknown(RAYSERVICE["spec"], SERVICE, "spec")) == []


def test_a_misspelt_field_is_found() -> None:
    """The planted fault: fails if the check above passes whatever stands there."""
    broken = yaml.safe_load(yaml.safe_dump(RAYJOB["spec"]))
    broken["rayClusterSpec"]["workerGroupSpecs"][1]["minReplica"] = 0
    broken["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumes"] = []
    assert [path.rsplit(".", 1)[1] for path in _unknown(broken, JOB, "spec")] == ["volumes", "minReplica"]


def test_the_job_runs_what_the_checkout_has() -> None:
    """Fails if the entrypoint's module, its experiment or its options are not there."""
    python, dash, module, *arguments = shlex.split(RAYJOB["spec"]["entrypoint"])
    assert (python, dash) == ("python", "-m")
    assert util.find_spec(module) is not None
    assert load_experiments(_parse(arguments).experiment, EXPERIMENTS)
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert yaml.safe_load(RAYJOB["spec"]["runtimeEnvYAML"])["working_dir"] == "/home/ray/choicespec"
    assert "WORKDIR /home/ray/choicespec" in dockerfile


def test_the_service_is_valid() -> None:
    """Fails if Ray Serve or the builder would refuse it."""
    content = yaml.safe_load(RAYSERVICE["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(content).applications
    assert application.import_path == "deployments.app:build"
    assert ServingSpec.model_validate(application.args).models


def test_both_run_on_the_same_pods() -> None:
    """Fails if what is served was measured on other pods."""
    assert CLUSTERS[0] == CLUSTERS[1]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_versions_are_the_pinned_ones(cluster: dict[str, Any]) -> None:
    """Fails if the operator starts a Ray of another version than the image's, or nodes differ in their image."""
    assert cluster["rayVersion"] == _pinned("ray")
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert f"FROM rayproject/ray:{_pinned('ray')}-py311-gpu" in dockerfile
    assert len({pod["containers"][0]["image"] for pod in _pods(cluster)}) == 1
    images = [
        one["spec"]["template"]["spec"]["containers"][0]["image"] for one in MLFLOW if one["kind"] == "Deployment"
    ]
    assert any(f"mlflow:v{_pinned('mlflow')}" in image for image in images)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_gpus_are_those_of_the_launchers_nodes(cluster: dict[str, Any]) -> None:
    """Fails if a pair of one or four GPUs finds no pod, a GPU idles on the head, or requests and limits differ, which
    Kubernetes refuses for GPUs."""
    head, *workers = [pod["containers"][0]["resources"] for pod in _pods(cluster)]
    assert GPU not in head["limits"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    types = [one for one in read_node_types(ROOT / "cluster.yaml") if one.resources.get("GPU")]
    assert [worker["limits"][GPU] for worker in workers] == [one.resources["GPU"] for one in types]
    assert all(worker["limits"] == worker["requests"] for worker in workers)
    assert all(group["minReplicas"] == 0 for group in cluster["workerGroupSpecs"])


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_pod_reaches_mlflow_and_the_volume(cluster: dict[str, Any]) -> None:
    """Fails if a variable is one that nothing reads, or names a service, port or claim that does not exist."""
    environments = [_environment(pod) for pod in _pods(cluster)]
    assert all(one == environments[0] for one in environments)
    assert set(environments[0]) == {"RAY_AUTH_MODE", "HF_HOME", URI_VARIABLE, HOME_VARIABLE}
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in MLFLOW if one["kind"] == "Service"}
    assert environments[0][URI_VARIABLE] == f"http://mlflow:{ports['mlflow']}"
    claims = {one["metadata"]["name"] for one in MLFLOW if one["kind"] == "PersistentVolumeClaim"}
    for pod in _pods(cluster):
        mounted = {one["name"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        used = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert {claim["claimName"] for claim in used} <= claims


def test_mlflow_answers_to_its_own_name() -> None:
    """Fails if its check of the Host header turns the pods away."""
    (server,) = [one for one in MLFLOW if one["kind"] == "Deployment" and one["metadata"]["name"] == "mlflow"]
    arguments = server["spec"]["template"]["spec"]["containers"][0]["args"]
    assert any(one.startswith("--allowed-hosts=mlflow:5000") for one in arguments)
    assert any("@mlflow-database:5432/" in one for one in arguments)
