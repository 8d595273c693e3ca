"""A pair at work: its runtime with the champion's method, its slots, questions made answers. Knows no HTTP, no Ray."""

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic

from choicespec.decoding.loop import Block
from choicespec.errors import TaskDataError
from choicespec.records import Document, Estimate, Request
from choicespec.runtimes.runtime import open_streaming
from choicespec.serving.answers import Event, Finished, Part, Progress, Question, Refusal, Refused, Status
from choicespec.serving.slots import Busy, Slots
from choicespec.serving.source import Versioned
from choicespec.serving.text import TextStream
from choicespec.spec.method import Autoregressive, MethodSpec
from choicespec.spec.serving import LimitsSpec
from choicespec.tasks.tool_prompt import conversation_ids

_TARGET = "target"  # who proposed what no draft holds: the first token, and the bonus token of each step


class Replica:
    """One pair on one runtime, warm.

    Args:
        versioned: the champion, checked.
        limits: of a question.
        documents: a repository that may be proposed from.

    Raises:
        ChoiceSpecError: its target or its scorer cannot be loaded.
    """

    def __init__(
        self, versioned: Versioned, limits: LimitsSpec, documents: Callable[[], Iterable[Document]] = tuple
    ) -> None:
        self._served, self._limits = versioned, limits
        self._refused: str | None = None
        trial = versioned.champion.trial
        self._runtime = open_streaming(trial.runtime, trial.pair)
        self._runtime.use_repository(documents)
        self._runtime.prepare(trial.method, trial.pair.scorer)
        self._slots: Slots[Block] = Slots(self._runtime.slots, limits.waiting)

    @property
    def served(self) -> Versioned:
        """The champion that answers."""
        return self._served

    async def roll_out(self, newer: Versioned) -> None:
        """Let a checked champion take over, between questions; none is dropped.

        Raises:
            ChoiceSpecError: it cannot be made ready; the old one goes on.
        """
        trial = newer.champion.trial
        await self._slots.alone(partial(self._runtime.prepare, trial.method, trial.pair.scorer))
        self._served, self._refused = newer, None

    def refuse(self, version: str, reason: str) -> None:
        """Remember why a newer champion is not served."""
        self._refused = f"version {version}: {reason}"

    def status(self) -> Status:
        """What is served."""
        champion, version = self._served
        trial, measurement = champion.trial, champion.measurement
        return Status(
            pair=trial.pair.label,
            method=trial.method.label,
            task=trial.task.label,
            version=version,
            speedup=_figure(measurement.speedup),
            match=_figure(measurement.match),
            context_tokens=self._runtime.context_tokens,
            refused=self._refused,
            waiting=self._slots.waiting,
        )

    async def answer(self, question: Question) -> AsyncGenerator[Event, None]:
        """Decode a question; see ``Model.answer``."""
        until_s = monotonic() + self._limits.timeout_s
        try:
            request = self._request(question)
            answer = _Answer(request, TextStream(self._runtime.tokenizer.decode, question.stop))
            opened = partial(self._open, request, question, answer)
            async with aclosing(self._slots.stream(opened, until_s)) as blocks:
                async for block in blocks:
                    yield answer.add(block)
        except TimeoutError:
            yield Refused(504, f"no whole answer within {self._limits.timeout_s:g} s; ask for fewer tokens", "timeout")
        except Busy as busy:
            message = f"{busy.waiting} requests wait already; come back in {busy.retry_after_s} s"
            yield Refused(429, message, "queue_full", retry_after_s=busy.retry_after_s)
        except Refusal as refusal:
            yield refusal.refused

    def _open(self, request: Request, question: Question, answer: "_Answer") -> Generator[Block, None, None]:
        """Runs in a slot's thread, so that it is one champion that decodes the whole."""
        answer.method = Autoregressive() if question.plain else self._served.champion.trial.method
        answer.version = self._served.version
        return self._runtime.stream(request, answer.method, question.sampling)

    def _request(self, question: Question) -> Request:
        if question.sampling is not None and not self._runtime.samples:
            message = "this model is served greedily; temperature must be 0"
            raise Refusal(Refused(400, message, "unsupported_value", "temperature"))
        if question.plain and self._served.champion.trial.method.drafts and self._runtime.warm_methods == 1:
            message = "plain decoding is not ready beside this model's own method; leave choicespec.plain out"
            raise Refusal(Refused(400, message, "unsupported_value", "choicespec.plain"))
        prompt_ids = self._prompt_ids(question)
        if not prompt_ids:
            raise Refusal(Refused(400, "the prompt is empty; give at least one token", "invalid_value", "prompt"))
        context_tokens, most = self._runtime.context_tokens, self._limits.new_tokens
        room = context_tokens - len(prompt_ids)
        new_tokens = question.new_tokens if question.new_tokens is not None else max(min(room, most), 1)
        if new_tokens > most:
            message = f"{new_tokens} new tokens are asked for, but at most {most} are decoded for a request"
            raise Refusal(Refused(400, message, "invalid_value", "max_tokens"))
        if new_tokens > room:
            message = (
                f"{len(prompt_ids)} prompt tokens + {new_tokens} new tokens exceed the model's context of "
                f"{context_tokens} tokens; shorten the prompt or lower max_tokens"
            )
            raise Refusal(Refused(400, message, "context_length_exceeded"))
        tools = tuple(json.dumps(tool["function"], ensure_ascii=False) for tool in question.tools)
        return Request(question.question_id, tuple(prompt_ids), new_tokens, question.stop, tools=tools)

    def _prompt_ids(self, question: Question) -> Sequence[int]:
        if question.prompt is not None:
            return self._runtime.tokenizer.encode(question.prompt)
        try:
            return conversation_ids(self._runtime.tokenizer, question.messages, question.tools)
        except TaskDataError as error:
            raise Refusal(Refused(400, str(error), "invalid_value", "messages")) from None


class _Answer:
    """The events of one answer."""

    def __init__(self, request: Request, text: TextStream) -> None:
        self._text = text
        self._progress = Progress(len(request.prompt_ids))
        self.method: MethodSpec = Autoregressive()  # until its slot is there; then what decodes it, and its version
        self.version = ""

    def add(self, block: Block) -> Part | Finished:
        """The event of a block."""
        accepted = min(block.step.accepted, len(block.token_ids)) if block.step is not None else 0
        if block.step is not None and accepted:
            self._text.add(block.token_ids[:accepted], block.step.source)
        self._text.add(block.token_ids[accepted:], _TARGET)
        self._progress = _advanced(self._progress, block)
        if block.finish_reason is None:
            return Part(self._text.take(), self._progress)
        pieces = self._text.end()
        return Finished(pieces, self._progress, block.finish_reason, self.method.label, self.version)


def _advanced(progress: Progress, block: Block) -> Progress:
    if block.step is None:
        return progress._replace(prefill_ms=block.elapsed_ms, output_tokens=len(block.token_ids))
    return progress._replace(
        output_tokens=progress.output_tokens + len(block.token_ids),
        decode_tokens=progress.decode_tokens + len(block.token_ids),
        decode_ms=progress.decode_ms + block.elapsed_ms,
        steps=progress.steps + 1,
        drafted_steps=progress.drafted_steps + (block.step.proposed > 0),
        accepted=progress.accepted + block.step.accepted,
    )


def _figure(estimate: Estimate) -> dict[str, float]:
    return estimate.model_dump()
