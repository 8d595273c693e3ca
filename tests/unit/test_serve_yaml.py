"""The Serve configuration for a cluster, checked offline by Ray Serve's own schema and by choicespec's."""

from pathlib import Path

import pytest
import yaml
from choicespec.spec.serving import ServedSpec, ServingSpec
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

_YAML = Path(__file__).parents[2] / "deployments" / "cluster.yaml"


def test_the_cluster_configuration_is_valid() -> None:
    """Fails if Ray Serve or the builder would refuse the file, or if it opens the port to others."""
    content = yaml.safe_load(_YAML.read_text(encoding="utf-8"))
    deployed = ServeDeploySchema.model_validate(content)
    assert content["http_options"]["host"] == "127.0.0.1"
    (application,) = deployed.applications
    assert application.import_path == "deployments.app:build"
    spec = ServingSpec.model_validate(application.args)
    assert len(spec.models) > 1
    assert all(served.champion for served in spec.models.values())


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_replicas=3 exceeds max_replicas=2"):
        ServedSpec(min_replicas=3, max_replicas=2)


def test_a_name_that_no_deployment_can_have_is_refused() -> None:
    """Fails if Ray Serve's own error, after everything was loaded, is the first that is said."""
    with pytest.raises(ValidationError, match="pattern"):
        ServingSpec.model_validate({"models": {"a/b": {}}})
