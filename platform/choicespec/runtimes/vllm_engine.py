"""A vLLM engine in a process of its own, which ends with its owner: when its standard input is closed.

    python -P -m choicespec.runtimes.vllm_engine

The owner sends an ``EngineSpec``, then calls (see ``vllm_process``): a stream is told a block a step until its output
ends or it is cancelled, all else is a method of ``Engine`` and gets one answer. Streams run side by side, batched by
vLLM's own scheduler. The engine's core runs in this process, so that a call of ``step`` is one step of vLLM's loop, and
steps are counted here.
"""

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import IO, Any

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.distributed.parallel_state import destroy_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from choicespec.decoding.step_cost import measure_step_costs
from choicespec.decoding.stopping import StopRule
from choicespec.errors import ChoiceSpecError
from choicespec.records import Document, Request
from choicespec.runtimes import vllm_proposer
from choicespec.runtimes.hf_tokenizer import HfTokenizer
from choicespec.runtimes.vllm_methods import EngineSpec
from choicespec.runtimes.vllm_process import CANCEL, STARTED, STREAM, Call, Told
from choicespec.runtimes.vllm_steps import Drafted, RunningRequest

_CALIBRATION_CONTEXT_TOKENS = 400


class Engine:
    """One engine: one target, one way of drafting.

    Args:
        spec: what the owner asks for.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._llm = LLMEngine.from_engine_args(EngineArgs(**spec.arguments))
        self._core: Any = self._llm.engine_core.engine_core  # it is in this process
        self._running: dict[int, RunningRequest] = {}
        if spec.choice is not None:
            self._on_workers(vllm_proposer.attach)
            if spec.choice.min_survival is None:
                self._calibrate(spec.choice.block_length)

    def facts(self) -> dict[str, str]:
        """What the engine has made of its settings."""
        config = self._llm.vllm_config
        blocks = config.cache_config.num_gpu_blocks or 0
        speculation = config.speculative_config
        return {
            "executor": str(config.parallel_config.distributed_executor_backend),
            "v2_runner": str(config.use_v2_model_runner),
            "cuda_graphs": str(not config.model_config.enforce_eager),
            "quantization": str(config.model_config.quantization),
            "tensor_parallel": str(config.parallel_config.tensor_parallel_size),
            "kv_cache_tokens": str(blocks * config.cache_config.block_size),
            "concurrent_requests": str(config.scheduler_config.max_num_seqs),
            "speculation": "none" if speculation is None else repr(speculation),
        }

    @property
    def busy(self) -> bool:
        """Whether there are requests to step."""
        return bool(self._running)

    def begin(self, number: int, request: Request) -> None:
        """Take a request in, to be decoded greedily beside those that run; as many at a time as the engine takes."""
        internal_id = self._add(str(number), request, self._greedy(request))
        self._running[number] = RunningRequest(request, internal_id, self._stop_rule(request))

    def cancel(self, number: int) -> None:
        """Take a request out; what it has decoded is not learnt. Nothing, where it has ended."""
        if self._running.pop(number, None) is not None:
            self._llm.abort_request([str(number)])

    def step(self) -> list[Told]:
        """One step of vLLM's loop: the blocks that it settles."""
        drafts = {number: self._draft_of(one.internal_id) for number, one in self._running.items()}
        outputs = self._llm.step()
        ended_s = perf_counter()
        drafted = self._drafted()
        told = []
        for output in outputs:
            number = int(output.request_id)
            one = self._running[number]
            said = drafted.get(one.internal_id, Drafted(self._spec.source, 0.0))
            told.append(Told(number, one.take(output.outputs[0].token_ids, drafts[number], said, ended_s)))
            if one.finish_reason is not None:
                self._end(number, one, output.finished)
        return told

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The target's largest logit minus its second largest after ``token_ids``; only while no request runs."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, detokenize=False, ignore_eos=True)
        self._add("margin", Request("margin", tuple(token_ids), 1), params)
        (output,) = self._llm.step()
        (found,) = output.outputs[0].logprobs
        second, first = sorted(one.logprob for one in found.values())[-2:]
        return float(first - second)

    def use_repository(self, documents: Sequence[Document]) -> None:
        """Start a task: the proposer may look into its documents, and forgets what it learnt from the last task."""
        self._on_workers(vllm_proposer.use_repository, list(documents))

    def close(self) -> None:
        """Stop the executor's processes, where it has some, and take its files away."""
        self._core.model_executor.shutdown()
        destroy_distributed_environment()

    def _add(self, number: str, request: Request, params: SamplingParams) -> str:
        """The engine's own name of a request that it now has."""
        internal_id: str = self._llm.add_request(number, {"prompt_token_ids": list(request.prompt_ids)}, params)
        return internal_id

    def _greedy(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,  # the checkpoint's own end-of-sequence tokens are the stop tokens, on every runtime
            stop_token_ids=list(self._spec.eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=vllm_proposer.request_arguments(request) if self._spec.choice is not None else None,
        )

    def _draft_of(self, internal_id: str) -> list[int]:
        """The draft that the next step verifies."""
        return list(self._core.scheduler.requests[internal_id].spec_token_ids)

    def _drafted(self) -> dict[str, Drafted]:
        """What choicespec's proposer says of each request's latest draft, by the engine's own name of the request."""
        if self._spec.choice is None:
            return {}
        found: dict[str, Drafted] = self._on_workers(vllm_proposer.drafted)
        return found

    def _end(self, number: int, one: RunningRequest, known: bool) -> None:
        """Forget a request whose output has ended; ``known`` says whether vLLM knows that it has."""
        if not known:  # it ends at a stop string, which vLLM was not told of
            self._llm.abort_request([str(number)])
        if self._spec.choice is not None:
            self._on_workers(vllm_proposer.finish, one.internal_id, tuple(one.output_ids))
        del self._running[number]

    def _calibrate(self, block_length: int) -> None:
        """Measure what verifications cost, of one request alone and of as many as the engine takes.

        All of them at once must find room in the cache, whose first block vLLM keeps to itself.
        """
        config = self._llm.vllm_config
        most, cache = config.scheduler_config.max_num_seqs, config.cache_config
        share = ((cache.num_gpu_blocks or 0) - 1) // most * cache.block_size
        context_tokens = min(_CALIBRATION_CONTEXT_TOKENS, config.model_config.max_model_len // 2, share // 4)
        costs = []
        for requests in (1, most):
            target = _ForcedDrafts(self, requests)
            costs.append(measure_step_costs(target, block_length + 1, context_tokens))
            target.end()
        self._on_workers(vllm_proposer.use_step_costs, costs[0], costs[1], most)

    def _on_workers(self, function: Any, *values: object) -> Any:
        """Call a function of the engine's workers on each of them; the first one's answer."""
        return self._core.model_executor.collective_rpc(function, args=values)[0]

    def _stop_rule(self, request: Request) -> StopRule:
        return StopRule(self._spec.eos_ids, request.max_new_tokens, request.stop, self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        arguments = self._spec.arguments
        return HfTokenizer(AutoTokenizer.from_pretrained(arguments["model"], revision=arguments["revision"]), {})


class _ForcedDrafts:
    """The engine as a target whose drafts are given: some requests at a time, alike. For measuring what steps cost."""

    def __init__(self, engine: Engine, requests: int) -> None:
        self._engine, self._requests = engine, requests
        self._ids: dict[str, str] = {}

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """See ``Target.prefill``; the first token is not looked at."""
        engine = self._engine
        longest = engine._llm.vllm_config.model_config.max_model_len - len(prompt_ids)
        params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True, detokenize=False)
        for index in range(self._requests):
            number = f"forced {index}"
            self._ids[number] = engine._add(number, Request(number, tuple(prompt_ids), longest), params)
        started: set[str] = set()
        while len(started) < self._requests:
            started |= {output.request_id for output in engine._llm.step()}
        return 0

    def verify(self, block_ids: Sequence[int]) -> list[int]:
        """See ``Target.verify``; one block of such a length for each of the requests, and what is accepted is kept.

        That is next to nothing, so that no request comes to its end: of two tokens, that which was not said is drafted.
        """
        for internal_id in self._ids.values():
            request = self._engine._core.scheduler.requests[internal_id]
            request.spec_token_ids = [2 if request.all_token_ids[-1] == 1 else 1] * (len(block_ids) - 1)
        self._engine._llm.step()
        return []

    def keep(self, num_tokens: int) -> None:
        """See ``Target.keep``; the engine rolls back by itself."""

    def end(self) -> None:
        """Take the requests out of the engine."""
        self._engine._llm.abort_request(list(self._ids))


def main() -> None:
    """Serve until standard input is closed."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what vLLM prints belongs into the log
    asked = os.fdopen(os.dup(0), "rb")
    engine = Engine(pickle.load(asked))

    def reply(answer: Told) -> None:
        pickle.dump(answer, replies)
        replies.flush()

    reply(Told(STARTED, engine.facts()))
    calls: SimpleQueue[Call | None] = SimpleQueue()
    Thread(target=_read, args=(asked, calls), daemon=True).start()
    status = 1
    try:
        _serve(engine, calls, reply)
        engine.close()
        status = 0
    except Exception:
        traceback.print_exc()  # the end of the log is to be the reason
    # What is left ends with the process: to take it down piece by piece takes seconds, and would trip over the reader.
    os._exit(status)


def _read(asked: IO[bytes], calls: "SimpleQueue[Call | None]") -> None:
    """Queue the owner's calls, and None once there is no owner."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            calls.put(pickle.load(asked))
    calls.put(None)


def _serve(engine: Engine, calls: "SimpleQueue[Call | None]", reply: Callable[[Told], None]) -> None:
    """Answer calls as they come, and while none has come, step the requests that run."""
    while True:
        try:
            call = calls.get(block=not engine.busy)
        except Empty:
            for told in engine.step():
                reply(told)
            continue
        if call is None:
            return
        number, what, values = call
        if what == STREAM:
            engine.begin(number, *values)
        elif what == CANCEL:
            engine.cancel(number)
        else:
            reply(Told(number, _answer(engine, what, values)))


def _answer(engine: Engine, what: str, values: tuple[Any, ...]) -> object:
    try:
        return getattr(engine, what)(*values)
    except ChoiceSpecError as error:
        return error


if __name__ == "__main__":
    main()
