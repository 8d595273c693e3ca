"""Every published row as settings that the installed libraries' own classes accept: from configurations alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xllamacpp
from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.dflash_net import read_dflash
from choicespec.drafters.mtp_net import read_mtp
from choicespec.errors import Unsupported
from choicespec.runtimes.gpu_memory import known_checkpoints
from choicespec.runtimes.hf_target import layers_refusal
from choicespec.runtimes.llamacpp import LlamaCppRuntime
from choicespec.runtimes.llamacpp_server import read_parameters
from choicespec.runtimes.quantized import loading_settings, stored_as
from choicespec.runtimes.vllm_methods import engine_arguments, speculation
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Draft, Ngram
from choicespec.spec.runtime import LlamaCppRuntimeSpec, VllmRuntimeSpec
from integration.small_published import SmallPublished, published_trials
from transformers import AutoConfig
from transformers.quantizers.auto import AutoQuantizationConfig

STAND_INS = Path(__file__).parent / "stand_ins"
ASK_VLLM = """
import json, sys
import vllm.model_executor.models.registry as registry
registry._run_in_subprocess = lambda ask: ask()  # a process a model takes a minute for all of them
from vllm.engine.arg_utils import EngineArgs

def asked(said):
    try:
        config = EngineArgs(**said).create_engine_config()
    except ValueError as error:
        return str(error)
    speculation = config.speculative_config
    return [
        config.model_config.quantization,
        config.parallel_config.tensor_parallel_size,
        speculation and [speculation.method, speculation.num_speculative_tokens],
    ]

print(json.dumps([asked(said) for said in json.load(sys.stdin)]))
"""
NEEDS_A_GPU = "Model Runner V1 does not support: DFlash candidate-head drafts"


@pytest.fixture(scope="module")
def stated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a published checkpoint, with nothing but its configuration."""
    folder = tmp_path_factory.mktemp("stated")
    for name, found in known_checkpoints().items():
        place = _place(folder, name)
        place.mkdir()
        (place / "config.json").write_text(json.dumps(found["config"]), encoding="utf-8")
    return folder


def _place(folder: Path, model: str) -> Path:
    return folder / model.replace("/", "--")


def _trials(folder: Path, kind: str) -> list[TrialSpec]:
    """The catalogue's trials on a runtime, with the stated configurations in the checkpoints' places."""
    trials = []
    for trial in published_trials():
        if trial.runtime.kind == kind:
            content = trial.model_dump()
            content["pair"]["target"]["model"] = str(_place(folder, trial.pair.target.model))
            for drafter in content["pair"]["drafters"].values():
                drafter["model"] = drafter["model"] and str(_place(folder, drafter["model"]))
            trials.append(TrialSpec.model_validate(content))
    return trials


def _arguments(trial: TrialSpec) -> dict[str, Any] | None:
    """What vLLM is told for a trial; None where choicespec refuses it."""
    assert isinstance(trial.runtime, VllmRuntimeSpec)
    assert trial.runtime.context_tokens is not None
    pair, model = trial.pair, trial.pair.target.model
    if isinstance(trial.method, Ngram) and "Qwen3.8-27B" in model:
        with pytest.raises(Unsupported, match="linear attention"):
            speculation(pair, trial.method)
        return None
    return engine_arguments(trial.runtime, pair, trial.method, model, trial.runtime.context_tokens)


def _with_two_heads(folder: Path, trials: list[TrialSpec]) -> list[TrialSpec]:
    """One of the trials by multi-token prediction of each target, with two layers for it, which draft twice in turn."""
    found = {}
    for trial in trials:
        if isinstance(trial.method, Draft) and trial.method.drafter == "mtp":
            place = Path(trial.pair.target.model)
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
            (config.get("text_config") or config)["mtp_num_hidden_layers"] = 2
            two = folder / f"{place.name}-two"
            two.mkdir(exist_ok=True)
            (two / "config.json").write_text(json.dumps(config), encoding="utf-8")
            content = trial.model_dump() | {"method": trial.method.model_dump() | {"num_draft_tokens": 4}}
            content["pair"]["target"]["model"] = str(two)
            found[place] = TrialSpec.model_validate(content)
    return list(found.values())


def _expected(trial: TrialSpec, arguments: dict[str, Any]) -> list[Any]:
    """What vLLM should make of it."""
    quantization = {"awq": "compressed-tensors", "nvfp4": "compressed-tensors"}.get(
        trial.pair.target.quantization or "", trial.pair.target.quantization
    )
    said = arguments["speculative_config"]
    return [
        quantization,
        trial.pair.target.tensor_parallel,
        said and [said["method"], said["num_speculative_tokens"]],
    ]


def test_vllm_takes_every_row(stated: Path) -> None:
    """Fails if a setting's name, a checkpoint's format or an architecture is not one of the installed vLLM's.

    The three rows of its prompt lookup on a target with linear attention are refused by choicespec itself. DFlash2
    comes as far as the choice of a model runner, which only a GPU's build can make. Beside the rows: targets with two
    layers for multi-token prediction.
    """
    trials = _trials(stated, "vllm")
    trials += _with_two_heads(stated, trials)
    told = {json.dumps(said): (one, said) for one in trials if (said := _arguments(one))}
    refused = [one for one in trials if _arguments(one) is None]
    assert (len(refused), len(told)) == (3, 19 + 4)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(STAND_INS), os.environ.get("PYTHONPATH", "")))}
    answer = subprocess.run(
        [sys.executable, "-c", ASK_VLLM],
        input=json.dumps([said for _, said in told.values()]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    for (trial, said), found in zip(told.values(), json.loads(answer.stdout.splitlines()[-1]), strict=True):
        if isinstance(trial.method, Draft) and trial.pair.drafters[trial.method.drafter].kind == "dflash2":
            assert NEEDS_A_GPU in found
        else:
            assert found == _expected(trial, said), trial.label


def test_transformers_takes_every_row(stated: Path) -> None:
    """Fails if a target's family, its quantisation or a drafter's description is not known to what is installed."""
    for trial in {(one.pair, one.method): one for one in _trials(stated, "hf")}.values():
        target = trial.pair.target
        config = AutoConfig.from_pretrained(target.model)
        assert layers_refusal(config) is None
        settings = loading_settings(target, config)
        assert bool(settings) == (target.quantization is not None)
        if stored_as(config) is not None:
            assert AutoQuantizationConfig.from_dict(config.quantization_config).quant_method == target.quantization
        elif settings:
            assert settings["quantization_config"].bnb_4bit_quant_type == target.quantization
        text = config.get_text_config()
        shape = TargetShape(text.hidden_size, text.vocab_size, text.num_hidden_layers)
        for drafter in trial.pair.drafters.values():
            if drafter.model is None:
                assert read_mtp(target.model, shape, None).num_hidden_layers == 1
            else:
                assert read_dflash(drafter.model, drafter.kind, shape, None)[0].block_length == 16


def test_llama_cpp_takes_every_row(tmp_path: Path) -> None:
    """Fails if a flag is not one of the server's own parameters, or says something else to it.

    GGUFs are told by their headers, so small ones stand in the published ones' places.
    """
    small = SmallPublished(tmp_path)
    found = {}
    for trial in published_trials():
        if trial.runtime.kind == "llamacpp":
            changed = small.of(trial)
            assert isinstance(changed.runtime, LlamaCppRuntimeSpec)
            flags = LlamaCppRuntime(changed.runtime, changed.pair).engine_settings(changed.method)["flags"]
            speculative = read_parameters(xllamacpp, flags.split()).speculative
            said = speculative.ngram_simple.size_m if isinstance(trial.method, Ngram) else speculative.draft.n_max
            kinds = [kind.name.removeprefix("COMMON_SPECULATIVE_TYPE_") for kind in speculative.types]
            found[trial.method.label] = (kinds, said)
    assert {label: kind for label, (kind, _) in found.items()} == {
        "autoregressive": ["NONE"],
        "ngram k=48": ["NGRAM_SIMPLE"],
        "draft mtp k=3": ["DRAFT_MTP"],
        "draft mtp k=7": ["DRAFT_MTP"],
        "draft dflash2 k=7": ["DRAFT_DFLASH"],
    }
    assert all(label.endswith(f"k={said}") for label, (_, said) in found.items() if label != "autoregressive")
