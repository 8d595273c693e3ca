"""How a pair and a method are said to vLLM, and why some cannot be: found without vLLM, from configurations alone."""

from collections.abc import Mapping
from importlib import util
from typing import Any, NamedTuple

from choicespec.errors import CheckpointError, Unsupported
from choicespec.runtimes.checkpoints import locate
from choicespec.runtimes.pair_parts import scorer_refusal
from choicespec.runtimes.vllm_target import RUNTIME, CannotBe, check_target, loses_state, read_config, told_quantization
from choicespec.spec.method import (
    NO_TREES,
    Autoregressive,
    Choice,
    Draft,
    MethodSpec,
    Ngram,
    Suffix,
    decided_live,
    is_tree,
    uses_scorer,
)
from choicespec.spec.pair import DrafterSpec, PairSpec
from choicespec.spec.runtime import VllmRuntimeSpec

SETTINGS = "choicespec"  # the name of what is ours in vLLM's free-form settings
_PROPOSER = "choicespec.runtimes.vllm_proposer.ChoiceProposer"
_UNION_WORKER = "choicespec.runtimes.vllm_worker.UnionWorker"
_DRAFTER_METHODS = {
    "draft_model": "draft_model",
    "mtp": "mtp",
    "dflash": "dflash",
    "dflash2": "dflash",
    "eagle3": "eagle3",
}
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")
_GIB = 2**30


class EngineSpec(NamedTuple):
    """What an engine's process is told.

    Attributes:
        arguments: the keywords of vLLM's ``EngineArgs``.
        eos_ids: the tokens that end an output.
        source: who proposes, where it is vLLM itself.
        choice: the method, where choicespec's own proposer runs in the engine.
    """

    arguments: dict[str, Any]
    eos_ids: tuple[int, ...]
    source: str
    choice: Choice | None


def speculation(pair: PairSpec, method: MethodSpec) -> dict[str, Any] | None:
    """vLLM's ``speculative_config`` for a method; None for plain decoding.

    Raises:
        Unsupported: vLLM cannot run the method, or not on this pair or device.
        CheckpointError: a checkpoint is missing.
    """
    try:
        check_target(pair)
        return _speculation(pair, method)
    except CannotBe as error:
        raise Unsupported(RUNTIME, method.label, str(error)) from None


def engine_arguments(
    spec: VllmRuntimeSpec, pair: PairSpec, method: MethodSpec, checkpoint: str, context_tokens: int
) -> dict[str, Any]:
    """The keywords of vLLM's ``EngineArgs`` for a pair and a method.

    Raises:
        Unsupported, CheckpointError: as ``speculation``.
    """
    target = pair.target
    ours = {"pair": pair.model_dump(mode="json"), "method": method.model_dump(mode="json")}
    return {
        "model": checkpoint,
        "revision": target.revision,
        "tokenizer_revision": target.revision,
        "dtype": target.dtype,
        "quantization": told_quantization(target),
        "tensor_parallel_size": target.tensor_parallel,
        "worker_cls": _UNION_WORKER if isinstance(method, Choice) and method.drafters else "auto",
        "distributed_executor_backend": "mp" if target.tensor_parallel > 1 else "uni",
        "max_model_len": context_tokens,
        "max_num_seqs": spec.concurrent_requests,
        "kv_cache_memory_bytes": int(spec.kv_cache_gib * _GIB),
        "gpu_memory_utilization": 0.01,  # the cache's size is given; a share of all memory would be asked for beside it
        "speculative_config": speculation(pair, method),
        "additional_config": {SETTINGS: ours} if isinstance(method, Choice) else {},
        "enforce_eager": pair.gpus == 0,  # compiling for the CPU takes a C++ compiler; on GPUs CUDA graphs are on
        "enable_prefix_caching": False,  # a prompt that was seen before would have no prefill
        "async_scheduling": False,  # a step's tokens are known when it ends, and counted then
        "skip_tokenizer_init": True,  # token ids go in and come out
        "disable_log_stats": True,
        "seed": 0,
    }


def _speculation(pair: PairSpec, method: MethodSpec) -> dict[str, Any] | None:
    if isinstance(method, Autoregressive):
        return None
    if is_tree(method):
        raise CannotBe(NO_TREES)
    if decided_live(method):
        raise CannotBe("exact and pace=adaptive are settings of choicespec's own loop; leave them out, or use hf")
    if isinstance(method, Choice):
        if uses_scorer(method) and (reason := scorer_refusal(pair, method)):
            raise CannotBe(reason)
        if method.drafters:
            return _union(pair, method)
        return {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": method.block_length}
    if isinstance(method, Draft):
        return _draft(pair, method)
    if not isinstance(method, Ngram | Suffix):
        raise CannotBe("it decodes in a loop of its own")
    if loses_state(read_config(pair.target.model, pair.target.revision)):
        raise CannotBe(
            "this target has linear attention, and a step without a draft after accepted ones leaves its state wrong; "
            "use a drafter that drafts in every step, or choice"
        )
    if isinstance(method, Suffix):
        if util.find_spec("arctic_inference") is None:
            raise CannotBe("suffix decoding is in a package that is missing; run: pip install arctic-inference==0.1.1")
        return {"method": "suffix", "num_speculative_tokens": method.num_draft_tokens}
    return {
        "method": "ngram",
        "num_speculative_tokens": method.num_draft_tokens,
        "prompt_lookup_min": method.min_ngram,
        "prompt_lookup_max": method.max_ngram,
    }


def _union(pair: PairSpec, method: Choice) -> dict[str, Any]:
    """vLLM's own drafter, whose drafts our worker weighs with the candidates."""
    if len(method.drafters) > 1:
        raise CannotBe(f"an engine has one drafter, and method.drafters names {len(method.drafters)}; name one of them")
    if method.gate is not None:
        raise CannotBe("its drafter drafts in every step, so that a gate spares no call; leave method.gate out")
    (draft,) = method.calls
    said = _draft(pair, draft)
    if pair.drafters[draft.drafter].kind == "dflash2":
        raise CannotBe("DFlash2 runs in vLLM's second model runner, and a union weighs the drafts of the first")
    return said


def _draft(pair: PairSpec, method: Draft) -> dict[str, Any]:
    drafter = pair.drafters.get(method.drafter)
    if drafter is None:
        raise CannotBe(f"the pair has no drafter {method.drafter!r}; known: {', '.join(pair.drafters) or 'none'}")
    if drafter.kind == "dflash2" and pair.gpus == 0:
        raise CannotBe("DFlash2 runs in vLLM's second model runner, which needs a GPU; gpus=0")
    target = read_config(pair.target.model, pair.target.revision)
    said: dict[str, Any] = {
        "method": _DRAFTER_METHODS[drafter.kind],
        "num_speculative_tokens": method.num_draft_tokens,
    }
    config = target  # MTP layers may be the target's own
    if drafter.model is not None:
        try:
            config = read_config(drafter.model, None)
        except CheckpointError as error:
            raise CannotBe(f"drafter {method.drafter!r}: {error}") from None
        said["model"] = locate(drafter.model, None)
    if drafter.kind == "mtp":
        _check_mtp(config, method)
    else:
        _check_drafter(target, config, drafter, method)
    if drafter.kind == "dflash" and pair.gpus == 0 and _num_layers(config) > 1:
        raise CannotBe(
            "on the CPU it norms the context's keys in every layer of a DFlash drafter with the first layer's weights, "
            "so that drafts are worse than they should be; give one of one layer, or a GPU"
        )
    return said


def _num_layers(config: Mapping[str, Any]) -> int:
    return int((config.get("transformer_layer_config") or config).get("num_hidden_layers") or 1)


def _check_mtp(config: Mapping[str, Any], method: Draft) -> None:
    text = config.get("text_config") or config
    layers = next((text[name] for name in _MTP_LAYERS if text.get(name)), 0)
    if not layers:
        raise CannotBe(f"the checkpoint has no layers for multi-token prediction ({' or '.join(_MTP_LAYERS)})")
    if method.num_draft_tokens > layers and method.num_draft_tokens % layers:
        raise CannotBe(
            f"its {layers} MTP layers run in turn, but num_draft_tokens={method.num_draft_tokens} is no multiple of "
            f"{layers}"
        )


def _check_drafter(target: Mapping[str, Any], config: Mapping[str, Any], drafter: DrafterSpec, method: Draft) -> None:
    architecture = "".join(config.get("architectures") or ())
    wanted = {"dflash": "DFlash", "dflash2": "DFlash2", "eagle3": "Eagle3"}.get(drafter.kind, "")
    if wanted not in architecture or (drafter.kind == "dflash" and "DFlash2" in architecture):
        raise CannotBe(
            f"drafter {method.drafter!r} is of kind {drafter.kind!r}, but its checkpoint is of architecture "
            f"{architecture or 'none'!r}"
        )
    own, other = ((one.get("text_config") or one).get("vocab_size") for one in (target, config))
    if own != other:
        raise CannotBe(
            f"the drafter's vocabulary has {other} tokens, but the target's {own}; give a drafter made for this target"
        )
    most = config.get("block_size")
    if drafter.kind in ("dflash", "dflash2") and most and method.num_draft_tokens > most - 1:
        raise CannotBe(f"the drafter drafts at most {most - 1} tokens, but num_draft_tokens={method.num_draft_tokens}")
