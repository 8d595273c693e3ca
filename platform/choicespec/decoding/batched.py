"""Plain greedy decoding of several requests at once: for recordings, where throughput counts and not latency.

Shapes: B requests, P prompt tokens (padded on the left), T output tokens, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.stopping import StopRule
from choicespec.recordings import Recorded, as_stored
from choicespec.records import FinishReason, Request


class _Prompts(NamedTuple):
    ids_BP: torch.Tensor
    mask_BP: torch.Tensor
    positions_BP: torch.Tensor


def record_batch(
    model: Any,
    requests: Sequence[Request],
    stops: Sequence[StopRule],
    layers: Sequence[int],
    prompt_states: bool = False,
) -> list[Recorded]:
    """The target's greedy outputs with its hidden states.

    A batch is not bit-equal to single requests, so an output may part from the live loop's at a numeric tie.

    Args:
        model: an ``AutoModelForCausalLM`` of full-attention and Gated DeltaNet layers, in evaluation mode.
        requests: one batch.
        stops: the rule of each request.
        layers: the decoder layers to keep, counted from 1.
        prompt_states: keep them at the prompts' tokens too.
    """
    ids_BP, mask, positions_BP = _padded([request.prompt_ids for request in requests], model.device)
    cache = RollbackCache(model)
    finishes: list[FinishReason | None] = [None] * len(requests)
    outputs: list[list[int]] = [[] for _ in requests]
    margins: list[torch.Tensor] = []
    with torch.inference_mode(), _hidden_states(model, layers, prompt_states) as hidden:
        next_ids, next_positions = ids_BP, positions_BP
        while None in finishes:
            logits_BV = model(
                next_ids,
                attention_mask=mask,
                position_ids=next_positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            top = logits_BV.float().topk(2)
            margins.append((top.values[:, 0] - top.values[:, 1]).cpu())
            for row, token_id in enumerate(top.indices[:, 0].tolist()):
                if finishes[row] is None:
                    finishes[row] = stops[row].cut(outputs[row], (token_id,)).finish_reason
                    outputs[row].append(token_id)
            next_ids, next_positions = top.indices[:, :1], next_positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
    margins_BT = torch.stack(margins, dim=1).numpy()
    states_BTH = {layer: torch.cat(states, dim=1).numpy() for layer, states in hidden.items()}
    width = ids_BP.shape[1] - 1 if prompt_states else 0  # the states before the outputs'
    return [
        Recorded(
            request,
            tuple(output_ids),
            finish,
            margins_BT[row, : len(output_ids)],
            {layer: as_stored(states[row, width : width + len(output_ids)]) for layer, states in states_BTH.items()},
            {
                layer: as_stored(states[row, width + 1 - len(request.prompt_ids) : width])
                for layer, states in states_BTH.items()
                if prompt_states
            },
        )
        for row, (request, output_ids, finish) in enumerate(zip(requests, outputs, finishes, strict=True))
        if finish is not None
    ]


def _padded(prompts: Sequence[Sequence[int]], device: Any) -> _Prompts:
    width = max(map(len, prompts))
    ids = np.array([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(axis=1) - 1).clip(min=0)
    return _Prompts(*(torch.from_numpy(array).to(device) for array in (ids, mask, positions)))


@contextmanager
def _hidden_states(model: Any, layers: Sequence[int], every: bool) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Collects each layer's (B, T, H) output at the last token, or at every token, of each pass."""
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def hook(layer: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            found[layer].append((states if every else states[:, -1:]).float().cpu())

        return keep

    decoder = model.get_decoder().layers
    handles = [decoder[layer - 1].register_forward_hook(hook(layer)) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
