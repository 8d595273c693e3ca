"""Calls in a target's answer."""

import json

import pytest
from choicespec.candidates.schemas import json_array
from choicespec.serving.tool_calls import Call, may_be_calls, parse_calls

_NAMES = frozenset({"clock", "weather"})
_OSLO = Call("clock", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    "text",
    [
        json_array([("clock", '{"city": "Oslo"}')]),
        '{"name": "clock", "arguments": {"city": "Oslo"}}',
        ' [{"name": "clock", "parameters": {"city": "Oslo"}}]\n',
        '<tool_call>\n{"name": "clock", "arguments": {"city": "Oslo"}}\n</tool_call>',
    ],
)
def test_each_form_is_understood(text: str) -> None:
    """Fails if a target's own form of a call reaches the client as text."""
    assert parse_calls(text, _NAMES) == (_OSLO,)
    assert all(may_be_calls(text[:size]) for size in range(len(text) + 1))


def test_several_calls_keep_their_order() -> None:
    calls = json_array([("clock", '{"city": "Oslo"}'), ("weather", "{}")])
    assert parse_calls(calls, _NAMES) == (_OSLO, Call("weather", "{}"))
    tagged = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in json.loads(calls))
    assert parse_calls(tagged, _NAMES) == (_OSLO, Call("weather", "{}"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is noon.",
        "[]",
        "[1, 2]",
        '[{"name": "clock"}]',
        '[{"name": "clock", "arguments": "Oslo"}]',
        '[{"name": "rm", "arguments": {}}]',
        '[{"name": "clock", "description": "The time.", "parameters": {"type": "object"}}]',
        '[{"name": "clock", "arguments": {"city": "Os',
        'Sure: <tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    ],
)
def test_anything_else_is_text(text: str) -> None:
    """Fails if a client is handed a call that nobody made, of a function that it never offered, or half of one."""
    assert parse_calls(text, _NAMES) == ()


def test_prose_is_known_from_its_first_letters() -> None:
    """Fails if an answer in prose is held back to its end."""
    assert not may_be_calls("It")
    assert not may_be_calls("<b>")
