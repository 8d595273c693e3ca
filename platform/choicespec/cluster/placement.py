"""Where a pair's worker goes: one bundle of a pair's GPUs and cores, which one node must hold."""

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from choicespec.spec.pair import PairSpec
from choicespec.spec.resources import bundle
from choicespec.spec.runtime import RuntimeSpec


def request_placement(pair: PairSpec, runtime: RuntimeSpec) -> PlacementGroup:
    """Ask for a worker's bundle; ``ready()`` of what comes back resolves when a node holds it."""
    return placement_group([bundle(pair, runtime)], strategy="STRICT_PACK")


def options_in(group: PlacementGroup, pair: PairSpec, runtime: RuntimeSpec) -> dict[str, Any]:
    """The options that put an actor onto a placement group's bundle."""
    return {
        "num_cpus": runtime.threads,
        "num_gpus": pair.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }


def fits_a_node(asked: dict[str, float]) -> bool:
    """Whether some node of the cluster as it is now could ever hold a bundle."""
    return any(all(node["Resources"].get(k, 0.0) >= v for k, v in asked.items()) for node in _alive_nodes())


def describe_shortage(asked: dict[str, float]) -> str:
    """A message that names what was asked for and what each node has."""
    nodes = "; ".join(
        f"{node['NodeManagerAddress']}: {_amounts({k: node['Resources'].get(k, 0.0) for k in ('CPU', 'GPU')})}"
        for node in _alive_nodes()
    )
    return (
        f"no node can give a worker {_amounts(asked)} (the cluster has {nodes}); "
        "lower the pair's gpus or runtime.threads, or add such a node"
    )


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
