"""A handle on one vLLM engine: started, asked, stopped. Its requests are streams, and run side by side."""

import pickle
import sys
from collections.abc import Generator, Mapping
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO, Any, NamedTuple

from choicespec.decoding.loop import Block
from choicespec.errors import ChoiceSpecError, ServerError
from choicespec.records import Request
from choicespec.runtimes.owned_process import OwnedProcess
from choicespec.runtimes.vllm_methods import EngineSpec

STARTED = 0  # the number under which the engine says that it is ready
STREAM, CANCEL = "stream", "cancel"


class Call(NamedTuple):
    """What is asked: a stream, the end of one (under its number), or one of ``vllm_engine.Engine``'s methods."""

    number: int
    what: str
    values: tuple[Any, ...]


class Told(NamedTuple):
    """An answer to a call: a block of a stream, a method's value, or an error."""

    number: int
    answer: Any


class VllmEngineProcess:
    """An engine that has its weights. It may be asked from several threads.

    Args:
        spec: what the engine is to be.
        environment: the process's environment variables.

    Raises:
        ServerError: it ended before it was ready.
        ChoiceSpecError: what the engine itself says is wrong.
    """

    def __init__(self, spec: EngineSpec, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "choicespec.runtimes.vllm_engine"]
        self._process = OwnedProcess("vLLM's engine", command, environment, replies=True)
        self._answers = _Answers(self._process.stdout)
        self._numbers = count(STARTED + 1)
        self._sending, self._losing = Lock(), Lock()
        self._loss: ServerError | None = None
        started = self._answers.expect(STARTED)
        self._send(spec)
        self.facts: dict[str, str] = self._next(started, "before it was ready")

    @property
    def process_id(self) -> int:
        """The process to look for in the system's tables."""
        return self._process.process_id

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.alive

    def ask(self, what: str, *values: object) -> Any:
        """Call one of ``vllm_engine.Engine``'s methods; waits as long as the engine lives.

        Raises:
            ServerError: the engine died.
            ChoiceSpecError: as the method raises it.
        """
        number = next(self._numbers)
        answers = self._answers.expect(number)
        try:
            self._send(Call(number, what, values))
            return self._next(answers, f"while it was asked to {what}")
        finally:
            self._answers.forget(number)

    def stream(self, request: Request) -> Generator[Block, None, None]:
        """Decode a request greedily, a block a step. It is on its way when this returns; closing it early ends it.

        Raises:
            ServerError: the engine died.
        """
        number = next(self._numbers)
        answers = self._answers.expect(number)
        self._send(Call(number, STREAM, (request,)))
        return self._blocks(number, answers)

    def stop(self) -> None:
        """End the process and wait for it; a second call does nothing."""
        self._process.stop()

    def _blocks(self, number: int, answers: "SimpleQueue[Any]") -> Generator[Block, None, None]:
        block: Block | None = None
        try:
            while block is None or block.finish_reason is None:
                block = self._next(answers, "while it decoded")
                yield block
        except GeneratorExit:
            if self.alive:
                self._send(Call(number, CANCEL, ()))
            raise
        finally:
            self._answers.forget(number)

    def _send(self, message: object) -> None:
        try:
            with self._sending:
                pickle.dump(message, self._process.stdin)
                self._process.stdin.flush()
        except OSError:
            raise self._lost("while it was asked") from None

    def _next(self, answers: "SimpleQueue[Any]", when: str) -> Any:
        answer = answers.get()
        if isinstance(answer, _Ended):
            raise self._lost(when)
        if isinstance(answer, ChoiceSpecError):
            raise answer
        return answer

    def _lost(self, when: str) -> ServerError:
        """One error for all who wait: the log can be read once."""
        with self._losing:
            self._loss = self._loss or self._process.lost(when)
            return self._loss


class _Ended:
    """Told to whoever waits for an answer that will not come."""


class _Answers:
    """An engine's answers, each queued for the call that it belongs to, by a thread that ends with the engine.

    The thread holds nothing but this, so that a handle which nobody holds still stops its engine.
    """

    def __init__(self, replies: IO[bytes]) -> None:
        self._queues: dict[int, SimpleQueue[Any]] = {}
        self._ended, self._changing = False, Lock()
        Thread(target=self._read, args=(replies,), daemon=True).start()

    def expect(self, number: int) -> "SimpleQueue[Any]":
        """Where the answers to a call will be."""
        answers: SimpleQueue[Any] = SimpleQueue()
        with self._changing:
            self._queues[number] = answers
            if self._ended:
                answers.put(_Ended())
        return answers

    def forget(self, number: int) -> None:
        """Let go of a call; what still comes for it is dropped."""
        with self._changing:
            del self._queues[number]

    def _read(self, replies: IO[bytes]) -> None:
        try:
            while True:
                number, answer = pickle.load(replies)
                with self._changing:
                    if number in self._queues:
                        self._queues[number].put(answer)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            pass  # it ended, perhaps in the middle of an answer
        with self._changing:
            self._ended = True
            for answers in self._queues.values():
                answers.put(_Ended())
