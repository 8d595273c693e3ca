"""Quantised targets: weights rounded as they are loaded, checkpoints stored quantised, GGUFs that are dequantised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.errors import CheckpointError, Unsupported
from choicespec.records import Request
from choicespec.runtimes.checkpoints import check_checkpoint, locate
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.quantized import loading_settings, quantization_refusal, round_weights
from choicespec.runtimes.runtime import check_supported
from choicespec.spec.method import Autoregressive, Ngram
from choicespec.spec.pair import PairSpec, Rounding, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from gguf import GGUFReader
from integration.small_checkpoints import LAYERS, small_llama
from integration.small_ggufs import write_dflash, write_llama
from transformers import AutoConfig

# Half a step, of 16 and of 256 between -1 and 1, is what a weight of a normal distribution may be off at most.
_MOST_ERROR: dict[Rounding, float] = {"q4_0": 0.15, "q8_0": 0.01}
_LINEARS = LAYERS * 7  # of a Llama layer: four of attention, three of the MLP


def _rounded(quantization: Rounding, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = small_llama().to(dtype)
    round_weights(model, quantization)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def _errors(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each changed weight is off, relative to its size."""
    changed = {name for name in weights if not torch.equal(found[name], weights[name])}
    return {
        name: float((found[name] - weights[name]).float().norm() / weights[name].float().norm()) for name in changed
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoders_linear_layers_are_rounded_and_nothing_else(dtype: torch.dtype) -> None:
    """Fails if a layer is passed over, if embedding, norms or LM head are rounded too, if eight bits lose as much as
    four, or if the weights come back in another dtype."""
    weights = small_llama().to(dtype).state_dict()
    errors = {}
    for quantization, most in _MOST_ERROR.items():
        found = _rounded(quantization, dtype)
        assert {weight.dtype for weight in found.values()} == {dtype}
        errors[quantization] = _errors(found, weights)
        assert all(".layers." in name and "_proj." in name for name in errors[quantization])
        assert len(errors[quantization]) == _LINEARS
        assert max(errors[quantization].values()) < most
    assert all(errors["q8_0"][name] < errors["q4_0"][name] / 4 for name in errors["q4_0"])


def test_a_rounded_weight_has_sixteen_values_a_block() -> None:
    """Fails if the rounding is not the type's: 32 weights of q4_0 are a scale times -8 to 7."""
    for name, weight in _rounded("q4_0", torch.float32).items():
        if "_proj." in name:
            blocks = weight.reshape(-1, 32)
            steps = blocks / (blocks.abs().amax(dim=1, keepdim=True) / 8)
            torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)


def test_an_embedding_that_is_the_lm_head_too_stays() -> None:
    """Fails if tied weights are rounded by way of the LM head."""
    model = small_llama(tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.clone()
    round_weights(model, "q4_0")
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert model.lm_head.weight is model.get_input_embeddings().weight


_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def _pair(folder: Path, stored: dict[str, Any] | None, quantization: str | None, gpus: int) -> PairSpec:
    """A pair with a checkpoint of which only the configuration is there."""
    config = {"model_type": "llama"} | ({"quantization_config": stored} if stored else {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return PairSpec.model_validate({"target": {"model": str(folder), "quantization": quantization}, "gpus": gpus})


@pytest.mark.parametrize(
    ("stored", "quantization", "gpus", "said"),
    [
        (_NF4, None, 1, "stored as nf4, but target.quantization=None; set it to nf4"),
        (_FP8, "nf4", 1, "stored as fp8, but target.quantization=nf4; set it to fp8"),
        ({"quant_method": "gptq"}, None, 1, "stored as gptq, .*give a checkpoint stored plainly, or as nf4, fp8"),
        (_NVFP4, "nvfp4", 1, "does not compute with nvfp4 weights; vLLM does"),
        ({"quant_method": "awq"}, "awq", 1, "does not compute with awq weights; vLLM does"),
        (_FP8, "fp8", 0, "fp8 weights are computed with on a GPU, but gpus=0; set gpus: 1"),
        (None, "nf4", 0, "nf4 weights are computed with on a GPU, but gpus=0; set gpus: 1"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(
    tmp_path: Path, stored: dict[str, Any] | None, quantization: str | None, gpus: int, said: str
) -> None:
    """Fails if a dry run passes a target that a worker then cannot load, or that would run in another precision."""
    with pytest.raises(Unsupported, match=said):
        check_supported(HfRuntimeSpec(), _pair(tmp_path, stored, quantization, gpus), Ngram())


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if transformers' own error, on the worker, is the first word of it."""
    monkeypatch.setattr("choicespec.runtimes.quantized.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="package bitsandbytes, which is missing; run: pip install bitsandbytes"):
        check_supported(HfRuntimeSpec(), _pair(tmp_path, _NF4, "nf4", 1), Ngram())


@pytest.mark.parametrize(("stored", "quantization"), [(_NF4, "nf4"), (_FP8, "fp8"), (None, "nf4"), (None, "fp8")])
def test_a_quantised_checkpoint_loads_as_stored_and_a_plain_one_is_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any] | None, quantization: str
) -> None:
    """Fails if a stored quantisation is overruled, or if a plain checkpoint is loaded as it is under another name."""
    monkeypatch.setattr("choicespec.runtimes.quantized.find_spec", lambda name: object())
    pair = _pair(tmp_path, stored, quantization, gpus=1)
    config = AutoConfig.from_pretrained(tmp_path)
    assert quantization_refusal(pair, config) is None
    settings = loading_settings(pair.target, config)
    assert settings["device_map"] == "cuda"
    if stored is None:
        method = settings["quantization_config"].quant_method.value
        assert method == {"nf4": "bitsandbytes", "fp8": "fp8"}[quantization]
    else:
        assert "quantization_config" not in settings


def test_a_gguf_is_dequantised_once_and_anew_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a target's weights are not the file's, if each opening converts again, or if another file of the same
    name passes for the converted one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_llama(tmp_path / "small.gguf")
    pair = PairSpec(target=TargetSpec(model=str(file)))
    check_checkpoint(str(file), None)
    check_supported(HfRuntimeSpec(), pair, Ngram())
    assert not (tmp_path / "cache").exists()  # to look is not to convert
    runtime = HfRuntime(HfRuntimeSpec(threads=2), pair)
    [embedding] = [tensor for tensor in GGUFReader(file).tensors if tensor.name == "token_embd.weight"]
    torch.testing.assert_close(runtime.input_embedding(), torch.from_numpy(embedding.data.copy()))
    request = Request("r", tuple(runtime.tokenizer.encode("hello, hello, hello")), 16)
    assert runtime.generate(request, Ngram()).output_ids == runtime.generate(request, Autoregressive()).output_ids
    first = locate(str(file), None)
    made = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert (locate(str(file), None), (Path(first) / "model.safetensors").stat().st_mtime_ns) == (first, made)
    write_llama(file, seed=1)
    assert locate(str(file), None) != first


def test_a_gguf_of_a_family_that_transformers_cannot_read_is_refused_beforehand(tmp_path: Path) -> None:
    """Fails if only the conversion, on a worker, finds it out."""
    file = write_dflash(tmp_path / "drafter.gguf", second=False)
    with pytest.raises(Unsupported, match=r"cannot read .*drafter.gguf"):
        check_supported(HfRuntimeSpec(), PairSpec(target=TargetSpec(model=str(file))), Ngram())
    with pytest.raises(CheckpointError, match="no GGUF file"):
        check_checkpoint(str(tmp_path / "none.gguf"), None)
