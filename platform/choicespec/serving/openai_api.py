"""OpenAI's chat completions and completions: what a client may ask."""

import json
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from choicespec.records import Sampling
from choicespec.serving.answers import Question, Refusal, Refused

Json = dict[str, Any]
Body = TypeVar("Body", bound="_Asked")

_MOST_SEED = 2**63 - 1


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
            Refusal: tools without a user's turn to offer them in.
        """
        if self.offered and not any(message.role == "user" for message in self.messages):
            raise Refusal(Refused(400, "tools need a message of the role 'user'", "invalid_value", "messages"))
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
        Refusal: names a field at fault; never repeats what was sent, which may be private.
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
        raise Refusal(Refused(400, message, "invalid_value", field or None)) from None


def _parsed(call: MadeCall) -> Any:
    try:
        return json.loads(call.function.arguments)
    except ValueError:
        return call.function.arguments
