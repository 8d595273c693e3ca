"""The node types that a cluster may start, and which of them can hold a worker: read from the launcher's file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from choicespec.errors import SpecError

GPU_MEMORY_LABEL = "gpu-memory-gib"
_USABLE = 0.9  # of a GPU's memory; the rest is for activations and CUDA itself
_GIB = 2**30


class NodeType(NamedTuple):
    """One of ``available_node_types``.

    Attributes:
        name: its key there.
        resources: what Ray counts on such a node.
        gpu_gib: memory of each of its GPUs, as its label says; 0 without GPUs.
    """

    name: str
    resources: Mapping[str, float]
    gpu_gib: float


class Chosen(NamedTuple):
    """The node type that a worker would go to; None, and why, where there is none."""

    name: str | None
    reason: str


def read_node_types(path: Path) -> tuple[NodeType, ...]:
    """The node types of a ``cluster.yaml``, those with fewer GPUs first.

    Raises:
        SpecError: no such file, or a type with GPUs that does not say how much memory they have.
    """
    if not path.is_file():
        raise SpecError(f"no launcher's file at {path}; the node types stand in it")
    types = []
    for name, content in yaml.safe_load(path.read_text(encoding="utf-8"))["available_node_types"].items():
        resources, label = content["resources"], content.get("labels", {}).get(GPU_MEMORY_LABEL)
        if resources.get("GPU") and label is None:
            raise SpecError(
                f"{path}: node type {name!r} has GPUs, but no label {GPU_MEMORY_LABEL}, their memory in GiB"
            )
        types.append(NodeType(name, resources, float(label or 0)))
    return tuple(sorted(types, key=lambda one: (one.resources.get("GPU", 0), one.resources.get("CPU", 0))))


def choose_node(asked: Mapping[str, float], gpu_bytes: float, types: Sequence[NodeType]) -> Chosen:
    """The smallest node type that holds a worker: by the cores and GPUs that it reserves, and their memory.

    Args:
        asked: what the worker reserves.
        gpu_bytes: that it takes of each of its GPUs.
        types: as ``read_node_types`` gives them.
    """
    wide = [one for one in types if all(one.resources.get(name, 0) >= amount for name, amount in asked.items())]
    if not wide:
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
        return Chosen(None, f"no node type has {amounts}")
    for one in wide:
        if gpu_bytes <= _USABLE * one.gpu_gib * _GIB or not asked.get("GPU"):
            return Chosen(one.name, "")
    most = max(one.gpu_gib for one in wide)
    return Chosen(None, f"takes {gpu_bytes / _GIB:.1f} GiB of a GPU, but none has more than {_USABLE:g} x {most:g}")
