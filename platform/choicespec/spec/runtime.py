"""A runtime: where a pair runs."""

from typing import Annotated, Literal

from pydantic import Field

from choicespec.spec.frozen import Frozen


class HfRuntimeSpec(Frozen):
    """transformers' models under choicespec's own decoding loop.

    Attributes:
        threads: CPU threads of a forward pass, and the cores that a worker reserves.
    """

    kind: Literal["hf"] = "hf"
    threads: int = Field(default=2, ge=1)


class ScriptedRuntimeSpec(Frozen):
    """A deterministic table model, for tests of everything around a model."""

    kind: Literal["scripted"] = "scripted"
    threads: int = Field(default=1, ge=1)


RuntimeSpec = Annotated[HfRuntimeSpec | ScriptedRuntimeSpec, Field(discriminator="kind")]
