"""What a pair reserves on a node."""

from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import RuntimeSpec


def bundle(pair: PairSpec, runtime: RuntimeSpec) -> dict[str, float]:
    """What a worker reserves. A tensor-parallel group is one bundle, so that it is never split over nodes."""
    return {"CPU": float(runtime.threads)} | ({"GPU": float(pair.gpus)} if pair.gpus else {})
