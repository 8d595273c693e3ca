"""What vLLM is told of a method, and which methods are refused before it is imported."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.errors import Unsupported
from choicespec.runtimes.vllm_methods import engine_arguments, speculation
from choicespec.runtimes.vllm_target import check_device
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram, Suffix
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import VllmRuntimeSpec

CONFIGS: dict[str, dict[str, Any]] = {
    "target": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "num_nextn_predict_layers": 2},
    "plain": {"architectures": ["LlamaForCausalLM"], "vocab_size": 64},
    "linear": {"text_config": {"vocab_size": 64, "layer_types": ["linear_attention", "full_attention"]}},
    "qwen3_5": {"model_type": "qwen3_5", "vocab_size": 64, "full_attention_interval": 4},
    "awq": {"vocab_size": 64, "quantization_config": {"quant_method": "compressed-tensors"}},
    "bnb": {"vocab_size": 64, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "small": {"architectures": ["LlamaForCausalLM"], "vocab_size": 64},
    "stranger": {"architectures": ["LlamaForCausalLM"], "vocab_size": 65},
    "dflash": {"architectures": ["DFlashDraftModel"], "vocab_size": 64, "block_size": 8},
    "deep": {"architectures": ["DFlashDraftModel"], "vocab_size": 64, "block_size": 8, "num_hidden_layers": 2},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "vocab_size": 64, "block_size": 8},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of which only the configuration is there."""
    found = tmp_path_factory.mktemp("checkpoints")
    for name, config in CONFIGS.items():
        (found / name).mkdir()
        (found / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


def pair_of(
    folder: Path, drafter: str = "small", kind: str = "draft_model", target: str = "target", gpus: int = 0, **said: Any
) -> PairSpec:
    drafters = {"d": {"kind": kind, "model": str(folder / drafter) if drafter else None}}
    return PairSpec.model_validate(
        {"target": {"model": str(folder / target), **said}, "drafters": drafters, "gpus": gpus}
    )


def test_methods_without_a_model_of_their_own(folder: Path) -> None:
    """Fails if a method's own settings do not reach vLLM."""
    pair = pair_of(folder)
    assert speculation(pair, Autoregressive()) is None
    assert speculation(pair, Ngram(num_draft_tokens=5, min_ngram=2, max_ngram=4)) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    said = speculation(pair, Choice(block_length=6))
    assert said is not None
    assert (said["method"], said["num_speculative_tokens"]) == ("custom_class", 6)


@pytest.mark.parametrize(
    ("kind", "drafter", "k", "method"),
    [
        ("draft_model", "small", 4, "draft_model"),
        ("dflash", "dflash", 7, "dflash"),
        ("dflash2", "dflash2", 7, "dflash"),
        ("eagle3", "eagle3", 3, "eagle3"),
        ("mtp", "", 4, "mtp"),
    ],
)
def test_drafters_are_named_as_vllm_names_them(folder: Path, kind: str, drafter: str, k: int, method: str) -> None:
    """Fails if a drafter runs as another kind, or the target's own MTP layers are looked for elsewhere."""
    pair = pair_of(folder, drafter, kind, gpus=1)
    model = {"model": str(folder / drafter)} if drafter else {}
    assert speculation(pair, Draft(drafter="d", num_draft_tokens=k)) == {
        "method": method,
        "num_speculative_tokens": k,
        **model,
    }


def test_a_unions_drafter_is_vllms_and_its_worker_ours(folder: Path) -> None:
    """Fails if a union runs as its drafter alone, or a method without one in a worker of its own."""
    pair, union = pair_of(folder), Choice(block_length=6, drafters=("d",))
    assert speculation(pair, union) == speculation(pair, Draft(drafter="d", num_draft_tokens=6))
    workers = [
        engine_arguments(VllmRuntimeSpec(), pair, method, "there", 100)["worker_cls"]
        for method in (union, Choice(block_length=6), Draft(drafter="d", num_draft_tokens=6))
    ]
    assert workers == ["choicespec.runtimes.vllm_worker.UnionWorker", "auto", "auto"]


DRAFT = Draft(drafter="d", num_draft_tokens=3)


@pytest.mark.parametrize(
    ("said", "method", "reason"),
    [
        ({"kind": "dflash2", "drafter": "dflash2"}, DRAFT, "second model runner, which needs a GPU"),
        ({"kind": "dflash", "drafter": "dflash2"}, DRAFT, "of kind 'dflash', but .* 'DFlash2DraftModel'"),
        ({"kind": "dflash", "drafter": "deep"}, DRAFT, "with the first layer's weights"),
        ({"kind": "eagle3"}, DRAFT, "of architecture 'LlamaForCausalLM'"),
        ({"drafter": "stranger"}, DRAFT, "vocabulary has 65 tokens, but the target's 64"),
        ({"kind": "dflash", "drafter": "dflash"}, Draft(drafter="d", num_draft_tokens=8), "at most 7 tokens"),
        ({"kind": "mtp", "drafter": "", "target": "plain"}, DRAFT, "no layers for multi-token prediction"),
        ({"kind": "mtp", "drafter": ""}, DRAFT, "is no multiple of 2"),
        ({"drafter": "nowhere"}, DRAFT, "no folder"),
        ({}, Draft(drafter="other"), "no drafter 'other'; known: d"),
        ({}, Suffix(), "pip install arctic-inference"),
        ({"target": "linear", "gpus": 1}, Ngram(), "a step without a draft after accepted ones"),
        ({"target": "linear"}, Choice(), "for the CPU take bfloat16 alone"),
        ({"target": "qwen3_5", "dtype": "bfloat16"}, Choice(), "imports torchvision, which is missing"),
        ({}, Choice(drafters=("d", "e")), "names 2; name one"),
        ({}, Choice(drafters=("d",), gate="cost"), "leave method.gate out"),
        ({}, Choice(drafters=("e",)), "no drafter 'e'; known: d"),
        ({"kind": "dflash", "drafter": "dflash"}, Choice(drafters=("d",)), "at most 7 tokens"),
        ({"kind": "dflash2", "drafter": "dflash2", "gpus": 1}, Choice(block_length=7, drafters=("d",)), "of the first"),
        ({}, Ngram(exact=True), "leave them out, or use hf"),
        ({}, Choice(pace="adaptive"), "leave them out, or use hf"),
        ({}, Choice(width=2), "verifies chains, not trees; leave width out, or use hf"),
        ({"dtype": "gguf"}, Ngram(), "set target.dtype: float32"),
        ({"quantization": "q4_0"}, Ngram(), "known: fp8, awq, nvfp4"),
        ({"quantization": "nvfp4"}, Ngram(), "needs a GPU, but gpus=0"),
        ({"quantization": "awq"}, Ngram(), "set target.dtype: bfloat16"),
        ({"quantization": "nf4", "gpus": 1, "dtype": "bfloat16"}, Ngram(), "has no bitsandbytes for nf4; use fp8"),
        ({"gpus": 4, "tensor_parallel": 2}, Ngram(), "gpus=4 would be idle in part"),
        ({"quantization": "awq", "dtype": "bfloat16"}, Ngram(), "is stored plainly; give a checkpoint stored as awq"),
        ({"quantization": "awq", "dtype": "bfloat16", "target": "bnb"}, Ngram(), "bnb is stored by bitsandbytes"),
    ],
)
def test_what_cannot_be_is_said_beforehand(folder: Path, said: Any, method: MethodSpec, reason: str) -> None:
    """Fails if it is found out only by an engine that dies, or runs as something else."""
    with pytest.raises(Unsupported, match=reason):
        speculation(pair_of(folder, **said), method)


def test_a_linear_attention_target_takes_methods_that_always_draft(folder: Path) -> None:
    """Fails if the guard refuses more than what is at fault."""
    pair = pair_of(folder, target="linear", dtype="bfloat16")
    assert speculation(pair, Choice()) is not None
    assert speculation(pair, Choice(drafters=("d",))) is not None
    assert speculation(pair, Autoregressive()) is None


def test_a_checkpoint_that_is_stored_quantised_says_itself_how(folder: Path) -> None:
    """Fails if vLLM is told a format, by the name of the method that made it, which the checkpoint is not stored in."""
    pair = pair_of(folder, target="awq", quantization="awq", dtype="bfloat16", gpus=1)
    assert speculation(pair, Autoregressive()) is None
    assert engine_arguments(VllmRuntimeSpec(), pair, Autoregressive(), "there", 100)["quantization"] is None


@pytest.mark.parametrize(("capability", "runs"), [("AVX2", False), ("AVX512", True)])
def test_awq_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch, capability: str, runs: bool) -> None:
    """Fails if a kernel that the CPU lacks is found out by an engine that dies."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with nullcontext() if runs else pytest.raises(Unsupported, match="this one has AVX2"):
        speculation(pair_of(folder, target="awq", quantization="awq", dtype="bfloat16"), Autoregressive())


def test_the_package_is_the_devices(folder: Path) -> None:
    """Fails if a pair that was given a GPU decodes on the CPU, or a missing package is a traceback."""
    check_device(pair_of(folder))
    with pytest.raises(Unsupported, match=r"gpus=1 takes the package vllm, .* pip install 'choicespec\[vllm\]'"):
        check_device(pair_of(folder, gpus=1))


def test_the_engine_is_told_the_targets_settings(folder: Path) -> None:
    """Fails if quantisation, tensor parallelism or the cache's size is left to vLLM's defaults."""
    pair = pair_of(folder, gpus=4, tensor_parallel=4, quantization="fp8", dtype="bfloat16")
    said = engine_arguments(VllmRuntimeSpec(kv_cache_gib=2.5), pair, Autoregressive(), "there", 100)
    assert said["quantization"] == "fp8"
    assert (said["tensor_parallel_size"], said["distributed_executor_backend"]) == (4, "mp")
    assert said["kv_cache_memory_bytes"] == 2.5 * 2**30
    assert (said["dtype"], said["max_model_len"], said["enforce_eager"]) == ("bfloat16", 100, False)
    assert engine_arguments(VllmRuntimeSpec(), pair_of(folder), Autoregressive(), "there", 100)["enforce_eager"]
