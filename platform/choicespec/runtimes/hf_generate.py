"""transformers' own ``generate``, timed the way choicespec's loop is: a peer to compare with."""

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from choicespec.decoding.small_blocks import library_kernels
from choicespec.decoding.stopping import StopRule
from choicespec.records import Request, Step, Trace
from choicespec.runtimes.hf_generate_dflash import DFlashPeer
from choicespec.spec.method import TransformersGenerate


class _Clock(BaseStreamer):
    """Notes when each round's tokens arrive. The first call is the prompt itself."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, float]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.rounds.append((value.numel(), perf_counter()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class _StopStrings(StoppingCriteria):
    """Stop strings by choicespec's own rule, so that peer and loop end in the same place."""

    def __init__(self, prompt_tokens: int, stop: StopRule) -> None:
        self._prompt_tokens, self._stop = prompt_tokens, stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        output_ids = input_ids[0, self._prompt_tokens :].tolist()
        ended = self._stop.cut((), output_ids).finish_reason is not None
        return torch.full((1,), ended, dtype=torch.bool, device=input_ids.device)


def generate_with_transformers(
    model: Any,
    eos_ids: Sequence[int],
    request: Request,
    method: TransformersGenerate,
    stop: StopRule,
    peer: DFlashPeer | None,
) -> Trace:
    """Decode one request with ``model.generate`` on the model's own linear layers.

    The pass over the prompt is the prefill, as everywhere; with prompt lookup it settles several tokens.
    """
    clock = _Clock()
    block_tokens: list[int] = []
    counter = model.register_forward_pre_hook(
        lambda module, args, kwargs: block_tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    criteria = StoppingCriteriaList([_StopStrings(len(request.prompt_ids), stop)] if request.stop else [])
    config = GenerationConfig(
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=eos_ids[0] if eos_ids else None,
        prompt_lookup_num_tokens=method.prompt_lookup_num_tokens,
        cache_implementation=method.cache,
        speculation_type="dflash" if peer is not None else None,
    )
    drafting = {"assistant_model": peer.model} if peer is not None else {}
    prompt = torch.tensor([request.prompt_ids], dtype=torch.long, device=model.device)
    started = perf_counter()
    try:
        with library_kernels(model), peer.drafting_for(model) if peer is not None else nullcontext():
            sequence = model.generate(
                prompt, generation_config=config, streamer=clock, stopping_criteria=criteria, **drafting
            )
    finally:
        counter.remove()
    cut = stop.cut((), sequence[0, len(request.prompt_ids) :].tolist())
    assert cut.finish_reason is not None, "generate ends by the same rules"
    (prefill_tokens, prefilled), *rounds = clock.rounds
    starts = [prefilled, *(ended for _, ended in rounds)]
    steps = tuple(
        Step(proposed - 1, tokens - 1, "transformers" if proposed > 1 else "", 0.0, (ended - began) * 1e3)
        for (tokens, ended), began, proposed in zip(rounds, starts, block_tokens[1:], strict=False)
    )
    return Trace(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        output_ids=cut.token_ids,
        prefill_tokens=prefill_tokens,
        finish_reason=cut.finish_reason,
        prefill_ms=(prefilled - started) * 1e3,
        decode_ms=(starts[-1] - prefilled) * 1e3,
        steps=steps,
    )
