"""Schemas as texts of the calls that answer them."""

import json
from typing import Any

import pytest
from choicespec.candidates.schemas import answer_texts, json_array

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            "days": {"type": "integer"},
        },
        "required": ["city"],
    },
}


def test_texts_are_what_stands_between_unknown_values() -> None:
    """Fails if a name, a key, an enum value or the punctuation is not written as the answer would be."""
    assert answer_texts([WEATHER]) == (
        (
            '[{"name": "weather", "arguments": {"city": "',
            '", "unit": "celsius", "days": ',
            '}}, {"name": "weather", "arguments": {"city": "',
            "}}]",
            '", "unit": "kelvin", "days": ',
            '"}}, {"name": "weather", "arguments": {"city": "',
            '"}}]',
        ),
        (),
    )


def test_a_call_without_unknown_values_is_one_text() -> None:
    """Fails if a function without parameters has no text, or if what is known is cut."""
    [text] = answer_texts([{"name": "now"}]).texts
    assert json.loads(text) == [{"name": "now", "arguments": {}}] * 2
    [on, _off] = answer_texts([_function({"lamp": {"const": "red"}, "on": {"type": "boolean"}})]).texts[:2]
    assert json.loads(on)[0]["arguments"] == {"lamp": "red", "on": True}


def test_nested_schemas_are_written_out() -> None:
    """Fails if objects and arrays inside are passed over."""
    texts = answer_texts(
        [
            _function(
                {
                    "at": {"properties": {"lat": {"type": "number"}, "lon": {"type": ["null", "number"]}}},
                    "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
                    "any": {},
                }
            )
        ]
    ).texts
    assert '[{"name": "f", "arguments": {"at": {"lat": ' in texts
    assert '}, "tags": ["a", "a"], "any": ' in texts
    assert '}, "tags": ["b", "b"], "any": ' in texts


def test_the_form_is_the_callers() -> None:
    """Fails if another way of writing calls needs another renderer."""
    texts = answer_texts([WEATHER], form=lambda calls: "".join(f"<call>{n} {a}</call>" for n, a in calls)).texts
    assert texts[0] == '<call>weather {"city": "'


def test_tools_may_be_wrapped_as_openai_writes_them() -> None:
    """Fails if the wrapping is taken for a function without a name."""
    assert answer_texts([{"type": "function", "function": WEATHER}]) == answer_texts([WEATHER])


def test_quotes_and_letters_are_written_as_json() -> None:
    """Fails if a name is pasted in without being quoted, or letters are escaped that a model writes plainly."""
    [text, *_] = answer_texts([_function({'a"b': {"const": "Zürich\0"}})]).texts
    assert json.loads(text)[0]["arguments"] == {'a"b': "Zürich\0"}
    assert "Zürich" in text


@pytest.mark.parametrize(
    "broken",
    [
        "not a tool",
        {},
        {"name": 3},
        {"name": "f", "parameters": {"type": "string"}},
        {"name": "f", "parameters": [1]},
        {"name": "f", "parameters": {"properties": [1]}},
        {"name": "f", "parameters": {"properties": {"a": "string"}}},
        {"name": "f", "parameters": {"properties": {"a": {"enum": "x"}}}},
        {"name": "f", "parameters": {"properties": {"a": {"type": "array", "items": 3}}}},
        {"name": "f", "parameters": {"properties": {"a": {}}, "required": 3}},
    ],
)
def test_what_is_not_json_schema_is_passed_over_with_the_reason(broken: Any) -> None:
    """Fails if a bad schema raises in the middle of a request, vanishes silently, or takes the others with it."""
    texts, [sentence] = answer_texts([broken, WEATHER])
    assert texts == answer_texts([WEATHER]).texts
    assert sentence.startswith("tool 0: ")


def test_a_schema_that_holds_itself_ends() -> None:
    """Fails if recursion is followed for ever."""
    node: dict[str, Any] = {"type": "object", "properties": {}}
    node["properties"]["next"] = node
    rows: dict[str, Any] = {"type": "array"}
    rows["items"] = rows
    texts, passed_over = answer_texts([{"name": "f", "parameters": node}, _function({"rows": rows})])
    assert texts
    assert not passed_over


def test_json_array_is_json() -> None:
    """Fails if the default form is not what a parser of calls reads."""
    assert json.loads(json_array([("f", "{}"), ("g", '{"a": 1}')])) == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {"a": 1}},
    ]


def _function(properties: dict[str, Any]) -> dict[str, Any]:
    return {"name": "f", "parameters": {"type": "object", "properties": properties, "required": list(properties)}}
