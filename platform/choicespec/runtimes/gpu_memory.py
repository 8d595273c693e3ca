"""What trials take of each GPU: weights, cache, drafters, computed from configurations; nothing is loaded or fetched.

Activations, CUDA's own context and a checkpoint's tower for images are not in it: leave a tenth of a GPU for them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from choicespec.errors import CheckpointError
from choicespec.runtimes.checkpoints import EMBEDDED, SHIPPED_DRAFTERS, locate
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, MethodSpec, drafters_of
from choicespec.spec.pair import DrafterSpec, PairSpec, TargetSpec
from choicespec.spec.runtime import LlamaCppRuntimeSpec, VllmRuntimeSpec

_KNOWN = resources.files("choicespec.runtimes") / "known_checkpoints.yaml"
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
# Of a weight of the decoder, with the scales of its block: 4 bits and a scale of 32 bits for 64 weights, or 8 bits.
_QUANTIZED_BYTES = {"nf4": 4.5 / 8, "fp8": 1.0}
_CACHE_BYTES, _STATE_BYTES = 2.0, 4.0  # keys and values are kept in 16 bits, recurrent states in 32
_GIB = 2**30


class Memory(NamedTuple):
    """Bytes on each of the GPUs that a trial is split over.

    Attributes:
        target_bytes: the target's weights.
        cache_bytes: keys, values and recurrent states of the longest request, or what the runtime sets aside.
        drafter_bytes: the weights of the drafters that the method calls.
    """

    target_bytes: float
    cache_bytes: float
    drafter_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return sum(self)


class Described(NamedTuple):
    """What is known of a checkpoint without its weights.

    Attributes:
        config: its config.json.
        stored_bytes: of its weights; None follows from the configuration.
    """

    config: dict[str, Any]
    stored_bytes: float | None


def describe(model: str, revision: str | None = None) -> Described:
    """A checkpoint's own configuration where it is at hand, or else what is stated here.

    Raises:
        CheckpointError: it is neither.
    """
    found, stated = _config_at_hand(model, revision), known_checkpoints().get(model, {})
    if found is None and not stated:
        raise CheckpointError(f"{model!r} is not at hand, so what it takes is not known; fetch its config.json first")
    config = stated["config"] if found is None else json.loads(found.read_text(encoding="utf-8"))
    return Described(config, stated.get("stored_bytes"))


@cache
def known_checkpoints() -> dict[str, dict[str, Any]]:
    """The checkpoints of the published rows by name: a ``config``, and ``stored_bytes`` where they are quantised."""
    content: dict[str, dict[str, Any]] = yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))
    return {name: found for name, found in content.items() if not name.startswith("_")}


def trial_memory(trial: TrialSpec) -> Memory:
    """What a trial takes of each GPU while it runs alone.

    Raises:
        CheckpointError: a checkpoint is neither at hand nor stated.
    """
    pair = trial.pair
    drafters = [pair.drafters[name] for name in drafters_of(trial.method)]
    return Memory(
        _target_bytes(pair.target) / pair.target.tensor_parallel,
        _cache_bytes(trial),
        sum(_drafter_bytes(pair, drafter) for drafter in drafters) / pair.target.tensor_parallel,
    )


def worker_bytes(trials: Sequence[TrialSpec]) -> float:
    """What a worker holds on each GPU that measures trials of one pair and runtime, plain decoding among them.

    transformers holds the target once and the drafters of all methods; a runtime with a process a method holds as many
    whole as are up at a time.

    Raises:
        CheckpointError: as ``trial_memory``.
    """
    runtime = trials[0].runtime
    plain = [trial.model_copy(update={"method": Autoregressive()}) for trial in trials]
    needs: dict[MethodSpec, Memory] = {}
    for trial in (*plain, *trials):
        found = trial_memory(trial)
        if trial.method not in needs or found.total_bytes > needs[trial.method].total_bytes:
            needs[trial.method] = found
    totals = sorted((found.total_bytes for found in needs.values()), reverse=True)
    if isinstance(runtime, VllmRuntimeSpec):
        return sum(totals[: runtime.engines])
    if isinstance(runtime, LlamaCppRuntimeSpec):
        return sum(totals)
    pair = trials[0].pair
    called = {name for trial in trials for name in drafters_of(trial.method)}
    drafters = sum(_drafter_bytes(pair, pair.drafters[name]) for name in called)
    return max(found.target_bytes + found.cache_bytes for found in needs.values()) + drafters


def _config_at_hand(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if model == EMBEDDED or model in SHIPPED_DRAFTERS or Path(model).is_dir():
        return Path(locate(model, revision)) / "config.json"
    if model.count("/") != 1:
        return None
    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


def _target_bytes(target: TargetSpec) -> float:
    found = describe(target.model, target.revision)
    if found.stored_bytes is not None:
        return found.stored_bytes
    parameters = _parameters(json.dumps(_text(found.config)))
    dtype_bytes = _DTYPE_BYTES[target.dtype]
    decoder_bytes = _QUANTIZED_BYTES.get(target.quantization or "", dtype_bytes)
    return parameters.embeddings * dtype_bytes + parameters.decoder * decoder_bytes


def _drafter_bytes(pair: PairSpec, drafter: DrafterSpec) -> float:
    if drafter.model is None:
        return _own_head_bytes(pair.target)
    found = describe(drafter.model)
    if found.stored_bytes is not None:
        return found.stored_bytes
    parameters = _parameters(json.dumps(_text(found.config)))
    return sum(parameters) * _DTYPE_BYTES[pair.target.dtype]


def _own_head_bytes(target: TargetSpec) -> float:
    """A layer of the target's with full attention, and the projection before it."""
    text = dict(_text(describe(target.model, target.revision).config))
    text |= {"num_hidden_layers": 1, "full_attention_interval": 1, "layer_types": None, "ple_layer_ids": []}
    projection = 2 * int(text["hidden_size"]) ** 2
    return (_parameters(json.dumps(text)).decoder + projection) * _DTYPE_BYTES[target.dtype]


def _cache_bytes(trial: TrialSpec) -> float:
    runtime = trial.runtime
    if isinstance(runtime, VllmRuntimeSpec):
        return runtime.kv_cache_gib * _GIB  # of each engine on each GPU
    target, task = trial.pair.target, trial.task
    text = _text(describe(target.model, target.revision).config)
    tokens = int(text["max_position_embeddings"])
    if isinstance(runtime, LlamaCppRuntimeSpec):
        tokens = runtime.context_tokens or tokens
    elif isinstance(task.context_tokens, int):
        tokens = task.context_tokens + task.max_new_tokens
    drafters = [trial.pair.drafters[name].model for name in drafters_of(trial.method)]
    configs = [text, *(_text(describe(model).config) for model in drafters if model is not None)]
    return sum(tokens * _token_bytes(config) + _recurrent_bytes(config) for config in configs)


def _token_bytes(text: Mapping[str, Any]) -> float:
    """Keys and values of a token, in all layers that keep them."""
    head_size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return _CACHE_BYTES * 2 * int(text["num_key_value_heads"] * head_size) * _full_layers(text)


def _recurrent_bytes(text: Mapping[str, Any]) -> float:
    """States of the layers with linear attention, of which there is one a request."""
    linear = int(text["num_hidden_layers"]) - _full_layers(text)
    if not linear:
        return 0.0
    numbers = text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"]
    return _STATE_BYTES * linear * int(numbers)


def _full_layers(text: Mapping[str, Any]) -> int:
    kinds = text.get("layer_types")
    if kinds:
        return sum(kind != "linear_attention" for kind in kinds)
    return int(text["num_hidden_layers"]) // int(text.get("full_attention_interval") or 1)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


class _Parameters(NamedTuple):
    embeddings: int  # the input embedding and the LM head, which quantisation leaves
    decoder: int


@cache
def _parameters(text_config: str) -> _Parameters:
    """Counted on a model without storage, so that every architecture that transformers knows counts itself."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    content = json.loads(text_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    embeddings = sum(weight.numel() for weight in ends)
    return _Parameters(embeddings, sum(weight.numel() for weight in model.parameters()) - embeddings)
