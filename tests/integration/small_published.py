"""The catalogue's own trials on small random models: the same architecture, runtime and method, on the CPU."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from choicespec.candidates.sets import Features
from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.mtp_net import MtpNet, read_mtp
from choicespec.runtimes.hf import HfRuntime
from choicespec.scorer.files import Scorer, save_scorer
from choicespec.scorer.model import Reads, ScorerNet, Shape
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.experiment_files import load_experiments
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from integration.small_checkpoints import HIDDEN, LAYERS, SPREAD, save_checkpoint, small_hybrid
from integration.small_drafters import (
    LAYER,
    MASK,
    NATIVE,
    SIZES,
    TAPPED,
    VOCABULARY,
    WINDOW,
    checkpoint_weights,
    dflash2_net,
    dflash_net,
    renamed,
    save_drafter,
    scattered,
    zlab_config,
)
from integration.small_ggufs import CONTEXT, write_dflash, write_qwen35
from integration.small_scorers import small_scorer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
SHAPE = TargetShape(HIDDEN, VOCABULARY, LAYERS)
_BLOCK = 16  # of the published drafters


@cache
def published_trials() -> tuple[TrialSpec, ...]:
    """All of the catalogue."""
    return tuple(trial for experiment in load_experiments("published", EXPERIMENTS) for trial in experiment.trials())


class SmallPublished:
    """Small checkpoints in a folder, in the places of the published ones.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, trial: TrialSpec) -> TrialSpec:
        """The trial on the CPU, on small checkpoints, in float32 or as a GGUF: its method is its own."""
        content = trial.model_dump()
        small = self._gguf() if trial.runtime.kind == "llamacpp" else self._pair(trial.pair.target.model)
        content["pair"]["target"] |= {"quantization": None, "tensor_parallel": 1, **small["target"]}
        for name, drafter in content["pair"]["drafters"].items():
            drafter["model"] = small["drafters"][name]
        content["pair"] |= {"gpus": 0, "scorer": small.get("scorer", {})}
        content["runtime"] |= {"threads": 1}
        if trial.runtime.kind == "llamacpp":
            content["runtime"] |= {"server": None, "context_tokens": CONTEXT // 2}
        return TrialSpec.model_validate(content)

    def _pair(self, model: str) -> dict[str, Any]:
        return self._qwen3() if model == "Qwen/Qwen3-4B" else self._qwen3_5()

    @cache  # noqa: B019 - as long as the test
    def _qwen3(self) -> dict[str, Any]:
        torch.manual_seed(0)
        settings = LAYER | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "initializer_range": SPREAD}
        config = AutoConfig.for_model("qwen3", **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        target = save_checkpoint(self._folder / "qwen3", model)
        config_of = zlab_config(block_size=_BLOCK, **WINDOW)
        dflash = save_drafter(self._folder / "dflash", config_of, checkpoint_weights(dflash_net(block_length=_BLOCK)))
        return self._with_scorer({"target": _target(target), "drafters": {"dflash": str(dflash)}})

    @cache  # noqa: B019 - as long as the test
    def _qwen3_5(self) -> dict[str, Any]:
        target = save_checkpoint(self._folder / "qwen3_5", small_hybrid("qwen3_5_text"))
        head = scattered(MtpNet(read_mtp(str(target), SHAPE, None)))
        weights = load_file(target / "model.safetensors") | renamed(head, NATIVE)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        reads = {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in TAPPED], **SIZES}
        config = zlab_config(block_size=_BLOCK, dflash_config=reads, **WINDOW)
        dflash2 = save_drafter(self._folder / "dflash2", config, checkpoint_weights(dflash2_net(block_length=_BLOCK)))
        return self._with_scorer({"target": _target(target), "drafters": {"dflash2": str(dflash2), "mtp": None}})

    @cache  # noqa: B019 - as long as the test
    def _gguf(self) -> dict[str, Any]:
        folder = self._folder
        return {
            "target": {"model": str(write_qwen35(folder / "qwen35.gguf"))},
            "drafters": {
                "dflash2": str(write_dflash(folder / "dflash2.gguf", second=True)),
                "mtp": str(write_qwen35(folder / "head.gguf", head_only=True)),
            },
        }

    def _with_scorer(self, small: dict[str, Any]) -> dict[str, Any]:
        identity = HfRuntime(HfRuntimeSpec(threads=1), PairSpec.model_validate({"target": small["target"]})).identity
        shape = Shape(HIDDEN, HIDDEN, len(Features._fields), _BLOCK)
        net = ScorerNet(shape, lambda token_ids: torch.zeros(*token_ids.shape, HIDDEN), Reads())
        manifest = small_scorer().manifest.model_copy(
            update={
                "target": identity,
                "layers": (LAYERS,),
                "block_length": _BLOCK,
                "embedding_size": HIDDEN,
                "width": shape.width,
            }
        )
        folder = Path(f"{small['target']['model']}-scorer")
        save_scorer(folder, Scorer(net, manifest))
        return small | {"scorer": {"folder": str(folder)}}


def _target(folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "dtype": "float32"}
