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


class LlamaCppRuntimeSpec(Frozen):
    """llama.cpp's own server and decoding loop, on GGUF files.

    Attributes:
        threads: CPU threads of a pass, and the cores that a worker reserves.
        server: the path of a ``llama-server`` binary, such as one built for CUDA; None takes the package xllamacpp.
        context_tokens: prompt and output together; None is what the target was trained for. Each method's server keeps
            a cache of this length.
    """

    kind: Literal["llamacpp"] = "llamacpp"
    threads: int = Field(default=2, ge=1)
    server: str | None = Field(default=None, min_length=1)
    context_tokens: int | None = Field(default=None, ge=1)


class VllmRuntimeSpec(Frozen):
    """vLLM's engine and decoding loop, one engine a method.

    Attributes:
        threads: CPU threads of a pass, and the cores that a worker reserves.
        context_tokens: prompt and output together; None is what the target was trained for.
        kv_cache_gib: of each engine's KV cache, on each GPU.
        concurrent_requests: the most requests that an engine decodes at a time.
        engines: the most engines that are up at a time. Where a measurement compares more methods (plain decoding is
            one), they take turns in blocks, ABAB, and an engine is started for each block.
    """

    kind: Literal["vllm"] = "vllm"
    threads: int = Field(default=2, ge=1)
    context_tokens: int | None = Field(default=None, ge=1)
    kv_cache_gib: float = Field(default=1.0, gt=0.0)
    concurrent_requests: int = Field(default=4, ge=1)
    engines: int = Field(default=4, ge=1)


RuntimeSpec = Annotated[
    HfRuntimeSpec | LlamaCppRuntimeSpec | ScriptedRuntimeSpec | VllmRuntimeSpec, Field(discriminator="kind")
]
