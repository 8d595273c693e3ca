"""What a runtime is, and the table of those there are."""

import importlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from choicespec.decoding.loop import Block
from choicespec.errors import Unsupported
from choicespec.records import Document, Request, Sampling, Trace
from choicespec.spec.method import MethodSpec
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import RuntimeSpec
from choicespec.tasks.tokenizer import Tokenizer

RUNTIMES = {
    "hf": "choicespec.runtimes.hf:HfRuntime",
    "llamacpp": "choicespec.runtimes.llamacpp:LlamaCppRuntime",
    "scripted": "choicespec.runtimes.scripted:ScriptedRuntime",
    "vllm": "choicespec.runtimes.vllm:VllmRuntime",
}


class Runtime(Protocol):
    """A pair, opened somewhere. Opening reads the tokenizer and the limits; ``load`` reads the weights.

    Attributes:
        context_tokens: the most tokens, prompt and output together, of one request.
        build: the runtime's own name and version.
        precision: what the weights are stored and computed in.
        warm_methods: the most methods that stay ready at a time; None is all of them. Beyond it, a method that was
            asked for earlier has to be made ready again.
        knows_steps: whether a trace's steps are what happened in each, rather than a total shared out.
    """

    context_tokens: int
    build: str
    precision: str
    warm_methods: int | None
    knows_steps: bool

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        ...

    @property
    def device(self) -> str:
        """The hardware's name."""
        ...

    def load(self) -> None:
        """Load the weights, once; a second call does nothing.

        Raises:
            CheckpointError: the weights are missing or unreadable.
        """
        ...

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        """Start a task: proposers may look into its documents, and forget what they learnt from the last task."""
        ...

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode one request greedily.

        Raises:
            PromptTooLong: before the target runs.
        """
        ...

    def engine_settings(self, method: MethodSpec) -> dict[str, str]:
        """What a runtime with a loop of its own was told, or has made of it, for a method; else nothing."""
        ...

    def memory_bytes(self, method: MethodSpec) -> int | None:
        """What decoding with a method that has run takes in memory; None where it cannot be told.

        In a process of its own: the most that the process has had. Beside other methods: the target with its cache, and
        all that the method's proposer holds, as if it were alone.
        """
        ...

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The target's largest logit minus its second largest after ``token_ids``."""
        ...


class StreamingRuntime(Runtime, Protocol):
    """A runtime that can be served: it gives the blocks of a request as they are verified.

    Attributes:
        slots: how many streams may be open at a time, each in a thread of its own; a runtime with a scheduler of its
            own batches them.
        samples: whether it can draw tokens rather than take the likeliest.
    """

    slots: int
    samples: bool

    @staticmethod
    def stream_refusal(method: MethodSpec) -> str | None:
        """Why a method's blocks cannot be streamed, or None."""
        ...

    def prepare(self, method: MethodSpec, scorer: ScorerSpec) -> None:
        """Make a method, with this scorer, ready before a request needs it; only while no stream is open.

        What an earlier method has learnt is forgotten. Where this raises, all is as it was.

        Raises:
            ChoiceSpecError: the method is not supported, or its scorer is missing, broken or for another target.
        """
        ...

    def stream(self, request: Request, method: MethodSpec, sampling: Sampling | None) -> Generator[Block, None, None]:
        """Decode one request, a verified block at a time, greedily where ``sampling`` is None.

        Closing it early frees its slot, and what it decoded is not learnt.

        Raises:
            PromptTooLong: before the target runs.
            Unsupported: it cannot sample.
        """
        ...


def runtime_class(kind: str) -> Any:
    """The class of a kind of runtime; also has ``refusal(pair, method)``: why it cannot run, or None."""
    module, name = RUNTIMES[kind].split(":")
    return getattr(importlib.import_module(module), name)


def open_runtime(spec: RuntimeSpec, pair: PairSpec) -> Runtime:
    """Open a pair on a runtime, without its weights.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    runtime: Runtime = runtime_class(spec.kind)(spec, pair)
    return runtime


def check_supported(spec: RuntimeSpec, pair: PairSpec, method: MethodSpec) -> None:
    """Ask a runtime, before anything is loaded, whether it can run a method on a pair.

    Raises:
        Unsupported: with the reason, and the runtimes that can.
    """
    reason = runtime_class(spec.kind).refusal(pair, method)
    if reason is not None:
        others = [kind for kind in RUNTIMES if runtime_class(kind).refusal(pair, method) is None]
        raise Unsupported(spec.kind, method.label, reason, others)


def check_streams(spec: RuntimeSpec, pair: PairSpec, method: MethodSpec) -> None:
    """Ask a runtime, before anything is loaded, whether it can serve a method on a pair.

    Raises:
        Unsupported: with the reason.
    """
    check_supported(spec, pair, method)
    reason = runtime_class(spec.kind).stream_refusal(method)
    if reason is not None:
        raise Unsupported(spec.kind, method.label, reason)


def open_streaming(spec: RuntimeSpec, pair: PairSpec) -> StreamingRuntime:
    """Open a pair for serving; ``check_streams`` has been asked.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    runtime: StreamingRuntime = runtime_class(spec.kind)(spec, pair)
    return runtime
