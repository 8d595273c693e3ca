"""Conversations with tools as token ids, also where the chat template has no place for tools."""

import json
from collections.abc import Iterator, Sequence

from choicespec.tasks.tokenizer import Message, Tokenizer, Tool

# A small model answers in prose unless one example turn shows how to call, laid out as its own turn is, and unless it
# is reminded of the form last of all (docs/lab-notes.md, 8). The example's function stands in the example's turn alone:
# it is not on offer.
_SYSTEM = "You call functions. Answer with a JSON array of calls and nothing else."
_TURN = """\
{question}

Functions:
{schemas}

Answer with a JSON array of calls: [{{"name": "function_name", "arguments": {{"parameter": "value"}}}}]"""
_CLOCK = {
    "name": "clock",
    "description": "The time in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city."}},
        "required": ["city"],
    },
}
_EXAMPLE_CALLS = [{"name": "clock", "arguments": {"city": city}} for city in ("Oslo", "Lima")]


def conversation_ids(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
    """The ids of a conversation with tools on offer.

    The chat template renders the tools. Where it has no place for them, the user's last turn holds the schemas and says
    how to call, and one example turn before shows it.

    Args:
        tokenizer: the target's.
        messages: calls and their results are written as text where they must be.
        tools: as OpenAI writes them; may be empty.
    """
    if tokenizer.renders_tools:
        return tokenizer.chat_ids(messages, list(tools) or None)
    turns = list(_as_text(messages))
    if not tools:
        return tokenizer.chat_ids(turns, None)
    own = [turn["content"] for turn in turns if turn["role"] == "system"]
    rest = [turn for turn in turns if turn["role"] != "system"]
    last = max(index for index, turn in enumerate(rest) if turn["role"] == "user")
    rest[last] = _asking(rest[last]["content"], tools)
    example = [
        _asking("What time is it in Oslo and in Lima?", [_CLOCK]),
        {"role": "assistant", "content": json.dumps(_EXAMPLE_CALLS)},
    ]
    return tokenizer.chat_ids([{"role": "system", "content": "\n\n".join([*own, _SYSTEM])}, *example, *rest], None)


def _asking(question: str, tools: Sequence[Tool]) -> Message:
    schemas = "\n".join(compact(tool.get("function", tool)) for tool in tools)
    return {"role": "user", "content": _TURN.format(question=question, schemas=schemas)}


def compact(value: object) -> str:
    """JSON on one line, as models write it."""
    return json.dumps(value, ensure_ascii=False)


def _as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls and their results as ordinary turns: a template without tools would drop them or fail."""
    for message in messages:
        if message["role"] == "tool":
            yield {"role": "user", "content": f"Result of the call:\n{message['content']}"}
        elif message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            written = compact([{"name": call["name"], "arguments": call["arguments"]} for call in calls])
            yield {"role": "assistant", "content": "\n".join(filter(None, [message["content"], written]))}
        else:
            yield {"role": message["role"], "content": message["content"]}
