"""What passes between the HTTP side and a pair's replica: a question, and the events that answer it."""

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, Protocol

from choicespec.records import FinishReason, Sampling
from choicespec.serving.text import Piece


class Question(NamedTuple):
    """One request of a client.

    Attributes:
        question_id: unique; also what its output is remembered by.
        prompt: text to go on with; None where there are messages.
        messages: a conversation, as OpenAI writes it; contents are text.
        tools: functions on offer, as OpenAI writes them.
        new_tokens: the most tokens of the answer; None is as many as the limits allow.
        sampling: None is greedy.
        plain: decode it plainly, whatever the champion's method; to compare with.
    """

    question_id: str
    prompt: str | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    new_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling | None
    plain: bool


class Progress(NamedTuple):
    """How far an answer is.

    Attributes:
        prefill_ms: of the prompt's own pass.
        output_tokens: of which ``decode_tokens`` came after the prompt's own pass and took ``decode_ms``.
        steps: rounds after the prompt's own pass; in ``drafted_steps`` of them something was proposed.
        accepted: draft tokens kept, in all of them.
    """

    prompt_tokens: int
    prefill_ms: float = 0.0
    output_tokens: int = 0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    steps: int = 0
    drafted_steps: int = 0
    accepted: int = 0


class Part(NamedTuple):
    """The text that a verified block adds; may be empty."""

    pieces: tuple[Piece, ...]
    progress: Progress


class Finished(NamedTuple):
    """The last event of an answer, with the rest of its text; ``method`` and ``version`` say what decoded it."""

    pieces: tuple[Piece, ...]
    progress: Progress
    finish_reason: FinishReason
    method: str
    version: str


class Refused(NamedTuple):
    """The only or last event of a question without a (whole) answer, in the API's terms.

    Attributes:
        status: of HTTP.
        code: for programs.
        param: the field at fault.
        retry_after_s: when to come back.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None


Event = Part | Finished | Refused


class Refusal(Exception):
    """Ends the reading of a question that gets no answer."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused)
        self.refused = refused


class Status(NamedTuple):
    """What a replica serves.

    Attributes:
        version: of the champion.
        speedup, match: as they were measured, each with n and interval.
        refused: why a newer champion is not served, or None.
        waiting: questions that wait for a slot.
    """

    pair: str
    method: str
    task: str
    version: str
    speedup: dict[str, float]
    match: dict[str, float]
    context_tokens: int
    refused: str | None
    waiting: int


class Model(Protocol):
    """A served name, as the HTTP side sees it."""

    def answer(self, question: Question) -> AsyncGenerator[Event, None]:
        """Events up to and with a Finished or a Refused; who stops reading ends the decoding."""
        ...

    async def status(self) -> Status:
        """Raises TimeoutError where no replica answers."""
        ...
