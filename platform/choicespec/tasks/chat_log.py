"""A person's own conversations: JSON lines with OpenAI chat messages and, optionally, tools."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from choicespec.errors import TaskDataError
from choicespec.records import Request
from choicespec.spec.task import ChatLog
from choicespec.tasks.context import Material, Window
from choicespec.tasks.prompts import Prompts, gather, take_split
from choicespec.tasks.tokenizer import Tokenizer
from choicespec.tasks.tool_prompt import compact, conversation_ids

MOST_NAMED = 20  # broken lines in one error
_ROLES = ("system", "developer", "user", "assistant", "tool")


class _Conversation(NamedTuple):
    """One line of the log; messages and tools are JSON, so that equal ones compare equal.

    Attributes:
        opening: the messages up to the first of the user: what all requests of one growing conversation share.
        earlier: the messages as earlier turns of another conversation, without a system prompt; None where they do
            not end with the assistant, because many templates insist on alternating turns.
        uses_tools: some turn is a call or its result, which needs the tools.
    """

    request_id: str
    messages: str
    tools: str
    opening: str
    earlier: str | None
    uses_tools: bool
    reference: str | None


class _Broken(NamedTuple):
    """Why a line cannot be used."""

    line: int
    reason: str


class ChatLogTask:
    """A log's conversations as prompts, fitted with other conversations of the log as earlier turns."""

    def __init__(self, spec: ChatLog) -> None:
        self._spec = spec
        self._path = Path(spec.path).expanduser()

    def check(self) -> None:
        """Reads every line. See ``Task.check``."""
        _ = self._conversations

    def prompts(self, tokenizer: Tokenizer, context_limit_tokens: int) -> Prompts:
        """See ``Task.prompts``."""
        window = Window(self._spec, context_limit_tokens)
        return gather(self._attempts(tokenizer, window), self._spec, self._omitted)

    def _attempts(self, tokenizer: Tokenizer, window: Window) -> Iterator[Request | str]:
        material = Material[str](lambda earlier: conversation_ids(tokenizer, _joined(earlier), []))
        for conversation in self._conversations:
            others = self._others(conversation) if window.fills else []
            random.Random(f"{self._spec.seed}:{conversation.request_id}").shuffle(others)

            def select(budget: int, others: list[str] = others) -> list[str]:
                return material.selection(others, budget)

            def render(earlier: Sequence[str], own: _Conversation = conversation) -> list[int]:
                messages = json.loads(own.messages)
                start = 1 if messages[0]["role"] == "system" else 0
                turns = [*messages[:start], *_joined(earlier), *messages[start:]]
                return conversation_ids(tokenizer, turns, json.loads(own.tools))

            tools = [compact(tool) for tool in json.loads(conversation.tools)]
            yield window.request(conversation.request_id, select, render, conversation.reference, tools=tools)

    def _others(self, own: _Conversation) -> list[str]:
        """The split's conversations that may come before this one."""
        return [other.earlier for other in self._conversations if other.earlier and _may_precede(other, own)]

    @cached_property
    def _conversations(self) -> list[_Conversation]:
        """The split's conversations in the seed's order, identical ones once.

        Grouped by their opening: a log of requests holds each conversation again at every turn.
        """
        read, broken = self._lines
        if broken and self._spec.broken_lines == "stop":
            named = "\n".join(f"  line {line}: {reason}" for line, reason in broken[:MOST_NAMED])
            more = f"\n  and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
            raise TaskDataError(
                f"{self._path}: {len(broken)} broken line(s)\n{named}{more}\n"
                f"mend them, or set task.broken_lines to 'omit' to run the others"
            )
        first: dict[tuple[str, str], _Conversation] = {}
        for conversation in read:
            first.setdefault((conversation.messages, conversation.tools), conversation)
        return take_split(first.values(), self._spec, lambda c: c.opening, lambda c: c.request_id)

    @property
    def _omitted(self) -> list[str]:
        return [f"{self._path.name}:{line}: broken line: {reason}" for line, reason in self._lines[1]]

    @cached_property
    def _lines(self) -> tuple[list[_Conversation], list[_Broken]]:
        return self._read(self._bytes())

    def _read(self, content: bytes) -> tuple[list[_Conversation], list[_Broken]]:
        read: list[_Conversation] = []
        broken: list[_Broken] = []
        # split at newlines only: JSON strings may hold other line separators
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                read.append(_conversation(f"{self._path.name}:{number}", line))
            except (ValueError, RecursionError) as reason:
                broken.append(_Broken(number, str(reason)))
        return read, broken

    def _bytes(self) -> bytes:
        try:
            content = self._path.read_bytes()
        except OSError as cause:
            raise TaskDataError(
                f"task.path {self._path}: {cause.strerror}; give a file of JSON lines, each with 'messages'"
            ) from cause
        if self._spec.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise TaskDataError(f"{self._path}: changed since the experiment was read; start the job again")
        return content.removeprefix(b"\xef\xbb\xbf")


def _joined(conversations: Sequence[str]) -> list[dict[str, Any]]:
    return [turn for conversation in conversations for turn in json.loads(conversation)]


def _may_precede(other: _Conversation, own: _Conversation) -> bool:
    """Not a turn of the same conversation, which would give the answer away; calls only with their tools."""
    return other.opening != own.opening and (not other.uses_tools or other.tools == own.tools)


def _conversation(request_id: str, line: bytes) -> _Conversation:
    """One line, read and validated.

    Raises:
        ValueError: why the line cannot be used.
    """
    row = json.loads(_text(line))
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError("not an object with a list of 'messages'")
    turns = [_turn(number, message) for number, message in enumerate(row["messages"])]
    answered = bool(turns) and turns[-1]["role"] == "assistant"
    prompt = turns[:-1] if answered else turns
    users = [number for number, turn in enumerate(prompt) if turn["role"] == "user"]
    if not users:
        raise ValueError("no message of the user to answer")
    return _Conversation(
        request_id=request_id,
        messages=_encodable(prompt),
        tools=_encodable(_tools(row.get("tools"))),
        opening=_encodable(prompt[: users[0] + 1]),
        earlier=_encodable([turn for turn in turns if turn["role"] != "system"]) if answered else None,
        uses_tools=any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns),
        reference=_encodable(turns[-1]) if answered else None,
    )


def _turn(number: int, message: Any) -> dict[str, Any]:
    """A message with its content as text and its calls' arguments as objects, as chat templates expect them."""
    place = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ValueError(f"{place} has no 'role' of {', '.join(_ROLES)}")
    turn = {**message, "content": _content(place, message)}
    if message["role"] == "developer":
        turn["role"] = "system"  # OpenAI's newer name, which templates do not know
    calls = _list(f"{place}.tool_calls", turn.pop("tool_calls", None))
    if calls:
        turn["tool_calls"] = [_call(f"{place}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return turn


def _content(place: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError(f"{place}.content is neither text nor a list of text parts")


def _call(place: str, call: Any) -> dict[str, Any]:
    function = _function(place, call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as broken:
            raise ValueError(f"{place}.function.arguments is not JSON ({broken})") from broken
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(tools: Any) -> list[Any]:
    offered = _list("tools", tools)
    for index, tool in enumerate(offered):
        _function(f"tools[{index}]", tool)
    return offered


def _list(place: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{place} is not a list")
    return value or []


def _function(place: str, holder: Any) -> dict[str, Any]:
    function = holder.get("function") if isinstance(holder, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} has no 'function' with a 'name'")
    return function


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as broken:
        raise ValueError(f"not UTF-8 at byte {broken.start}") from broken


def _encodable(value: object) -> str:
    text = compact(value)
    try:
        text.encode()
    except UnicodeEncodeError as broken:
        raise ValueError("holds half of a surrogate pair, which is no text") from broken
    return text
