"""The application that ``serve run deployments.app:build`` and ``serve deploy deployments/cluster.yaml`` start."""

from choicespec.serving.app import build as build_application
from choicespec.spec.serving import ServingSpec
from ray.serve import Application


def build(spec: ServingSpec) -> Application:
    """What the arguments describe; without any, the embedded default with the champion that ships.

    Raises:
        ChoiceSpecError: a champion cannot be served.
    """
    return build_application(spec)
