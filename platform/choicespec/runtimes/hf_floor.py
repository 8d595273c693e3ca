"""How fast a device reads and multiplies at best, which bounds a target's passes on it."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from choicespec.decoding.step_cost import Floor

_READ_BYTES = 2**28  # far more than a processor's cache
_SIDE = 2048  # of the matrices that are multiplied
_ROUNDS = 5


def measure_floor(model: Any) -> Floor:
    """Measure on the model's device, in its type."""
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight  # a pass reads some of its rows, unless it is the LM head too
    weights = [weight for weight in model.parameters() if weight is head or weight is not embedding]
    large = torch.ones(_READ_BYTES // model.dtype.itemsize, dtype=model.dtype, device=model.device)
    square = torch.ones(_SIDE, _SIDE, dtype=model.dtype, device=model.device)
    return Floor(
        weights=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        read_bytes_per_s=_READ_BYTES / _least_s(large.sum, model.device),
        flops_per_s=2 * _SIDE**3 / _least_s(lambda: square @ square, model.device),
    )


def _least_s(compute: Callable[[], torch.Tensor], device: torch.device) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(_ROUNDS + 1):  # the first warms up
            started = perf_counter()
            compute()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(perf_counter() - started)
    return min(times[1:])
