"""OpenAI's chat completions and completions: what a client may ask, and the shapes of what comes back."""

import json
import secrets
from collections.abc import Sequence
from time import time
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from choicespec.records import FinishReason, Sampling
from choicespec.serving.answers import Finished, Part, Progress, Question, Refused, Status
from choicespec.serving.text import Piece
from choicespec.serving.tool_calls import Call

Json = dict[str, Any]
Body = TypeVar("Body", bound="_Asked")

_FINISH: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length"}
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MOST_SEED = 2**63 - 1


class ApiError(Exception):
    """A request that is answered with the API's own error shape."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused)
        self.refused = refused


class _Strict(BaseModel):
    """A part of a request; an unknown field is an error, since silently dropping it would change what was asked."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """``stream_options``."""

    include_usage: bool = False


class Extension(_Strict):
    """``choicespec``, choicespec's own field.

    Attributes:
        usage: adds accepted/step and the decode rate to the usage.
        blocks: adds to each chunk of a stream its pieces by who proposed them, and how far the answer is.
        plain: decodes plainly, to compare with.
    """

    usage: bool = False
    blocks: bool = False
    plain: bool = False


class _Asked(_Strict):
    """What both kinds of completions have.

    Fields with one allowed value are those that clients send by default and that cannot be had otherwise. ``user``,
    ``metadata``, ``store``, ``service_tier`` change no answer.
    """

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: Annotated[int, Field(ge=-_MOST_SEED, le=_MOST_SEED)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    choicespec: Extension = Extension()
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def sampling(self) -> Sampling | None:
        """None is greedy; a request without a seed gets a fresh one."""
        if self.temperature == 0:
            return None
        return Sampling(self.temperature, self.top_p, secrets.randbits(62) if self.seed is None else self.seed)


class TextPart(_Strict):
    """The only kind of content that a language model reads."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """A call as the API writes it: arguments are JSON text."""

    name: str
    arguments: str


class MadeCall(_Strict):
    """A call in a conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Strict):
    """A turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    def plain(self) -> Json:
        """As chat templates read it: content is text, arguments are objects where they are JSON."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        turn: Json = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": _parsed(call)}}
                for call in self.tool_calls
            ]
        return turn


class FunctionSchema(_Strict):
    """A function on offer."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Json | None = None
    strict: Literal[False] | None = None


class OfferedTool(_Strict):
    """A tool on offer."""

    type: Literal["function"]
    function: FunctionSchema


class ChatRequest(_Asked):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def offered(self) -> list[OfferedTool]:
        """The tools that the target is shown."""
        return [] if self.tool_choice == "none" else self.tools or []

    def question(self) -> Question:
        """What a replica is asked.

        Raises:
            ApiError: tools without a user's turn to offer them in.
        """
        if self.offered and not any(message.role == "user" for message in self.messages):
            raise ApiError(Refused(400, "tools need a message of the role 'user'", "invalid_value", "messages"))
        return Question(
            f"chatcmpl-{secrets.token_hex(12)}",
            None,
            tuple(message.plain() for message in self.messages),
            tuple(tool.model_dump(exclude_none=True) for tool in self.offered),
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            self.stops,
            self.sampling,
            self.choicespec.plain,
        )


class CompletionRequest(_Asked):
    """``POST /v1/completions``."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def offered(self) -> list[OfferedTool]:
        """No tools."""
        return []

    def question(self) -> Question:
        """What a replica is asked."""
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        question_id = f"cmpl-{secrets.token_hex(12)}"
        return Question(question_id, prompt, (), (), self.max_tokens, self.stops, self.sampling, self.choicespec.plain)


def parse(body: bytes, kind: type[Body]) -> Body:
    """A request's body.

    Raises:
        ApiError: names a field at fault; never repeats what was sent, which may be private.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # of the alternatives of a union, the one that went deepest is what was meant
        first = max(error.errors(include_input=False, include_url=False), key=lambda found: len(found["loc"]))
        field = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        if first["type"] == "extra_forbidden":
            message = f"{field} is not supported; supported are: {', '.join(kind.model_fields)}"
        else:
            message = f"{field}: {first['msg']}" if field else str(first["msg"])
        raise ApiError(Refused(400, message, "invalid_value", field or None)) from None


def error_body(refused: Refused) -> Json:
    """The API's error shape."""
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def model_body(name: str, status: Status) -> Json:
    """An entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "choicespec", "choicespec": status._asdict()}


class Shapes:
    """The bodies of one answer.

    Args:
        asked: the request.
        question_id: the answer's id.
    """

    def __init__(self, asked: ChatRequest | CompletionRequest, question_id: str) -> None:
        self._asked, self._chat = asked, isinstance(asked, ChatRequest)
        self._usage_asked = asked.stream_options is not None and asked.stream_options.include_usage
        self._common = {"id": question_id, "created": int(time()), "model": asked.model}

    def whole(self, text: str, calls: Sequence[Call], finished: Finished) -> Json:
        """The one body of an answer that is not streamed."""
        if self._chat:
            message: Json = {"role": "assistant", "content": None if calls else text}
            if calls:
                message["tool_calls"] = _made(calls)
            choice: Json = {"message": message}
        else:
            choice = {"text": text}
        choice |= {"index": 0, "logprobs": None, "finish_reason": _reason(finished, calls)}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": [choice], "usage": self._usage(finished)}

    def opening(self) -> list[Json]:
        """The first chunk of a stream of a conversation says who speaks."""
        return [self._chunk([self._choice({"role": "assistant", "content": ""})])] if self._chat else []

    def part(self, text: str, event: Part | Finished) -> list[Json]:
        """The chunk of a block; none where it adds nothing that was asked for."""
        if not text and not self._asked.choicespec.blocks:
            return []
        chunk = self._chunk([self._choice({"content": text} if self._chat else {"text": text})])
        if self._asked.choicespec.blocks:
            chunk["choicespec"] = _block(event.pieces, event.progress)
        return [chunk]

    def ending(self, calls: Sequence[Call], finished: Finished) -> list[Json]:
        """The last chunks: calls, the reason, and usage where it is asked for."""
        chunks = []
        if calls:
            delta = [{"index": index, **call} for index, call in enumerate(_made(calls))]
            chunks.append(self._chunk([self._choice({"tool_calls": delta})]))
        chunks.append(self._chunk([self._choice({} if self._chat else {"text": ""}, _reason(finished, calls))]))
        if self._usage_asked:
            chunks.append({**self._chunk([]), "usage": self._usage(finished)})
        return chunks

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices}

    def _choice(self, content: Json, reason: str | None = None) -> Json:
        return {"index": 0, "logprobs": None, "finish_reason": reason} | ({"delta": content} if self._chat else content)

    def _usage(self, finished: Finished) -> Json:
        progress = finished.progress
        usage: Json = {
            "prompt_tokens": progress.prompt_tokens,
            "completion_tokens": progress.output_tokens,
            "total_tokens": progress.prompt_tokens + progress.output_tokens,
        }
        if self._asked.choicespec.usage:
            usage["choicespec"] = {
                "method": finished.method,
                "version": finished.version,
                "steps": progress.steps,
                "drafted_steps": progress.drafted_steps,
                "accepted_per_step": progress.accepted / progress.steps if progress.steps else 0.0,
                "decode_tokens_per_s": progress.decode_tokens / progress.decode_ms * 1e3 if progress.decode_ms else 0.0,
            }
        return usage


def _block(pieces: Sequence[Piece], progress: Progress) -> Json:
    return {"pieces": [piece._asdict() for piece in pieces], "progress": progress._asdict()}


def _made(calls: Sequence[Call]) -> list[Json]:
    return [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call._asdict()} for call in calls]


def _reason(finished: Finished, calls: Sequence[Call]) -> str:
    return "tool_calls" if calls else _FINISH[finished.finish_reason]


def _parsed(call: MadeCall) -> Any:
    try:
        return json.loads(call.function.arguments)
    except ValueError:
        return call.function.arguments
