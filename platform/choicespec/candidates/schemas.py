"""Tool schemas as texts of the calls that answer them: names, argument keys, enum values, punctuation."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# A call's name and its arguments, as text; holes included. Several calls are one answer.
CallForm = Callable[[Sequence[tuple[str, str]]], str]

_HOLE = "\0"  # where a value stands that no schema knows; JSON text never holds it
_MOST_VALUES = 16  # of an enumeration
_MOST_DEPTH = 8  # a schema may hold itself


class AnswerTexts(NamedTuple):
    """The texts, and for each schema that was passed over a sentence that names it and says why."""

    texts: tuple[str, ...]
    passed_over: tuple[str, ...]


def json_array(calls: Sequence[tuple[str, str]]) -> str:
    """``[{"name": "f", "arguments": {"a": 1}}]``: the form that the task ``tool_call`` shows in its example."""
    return "[" + ", ".join(f'{{"name": {_quoted(name)}, "arguments": {arguments}}}' for name, arguments in calls) + "]"


def answer_texts(tools: Sequence[Mapping[str, Any]], form: CallForm = json_array) -> AnswerTexts:
    """The distinct texts between the values of possible answers.

    Each function is called twice in one answer, once with all its parameters and once with the required ones, and again
    with each further value of its enumerations. What no schema tells (a string, a number) cuts an answer into texts.

    A schema that is not JSON Schema costs speed, never the request: it is passed over, with the reason.

    Args:
        tools: as OpenAI writes them, or only their functions.
        form: how the target writes calls.
    """
    texts: dict[str, None] = {}
    passed_over = []
    for number, tool in enumerate(tools):
        try:
            function = tool.get("function", tool)
            name, parameters = function["name"], function.get("parameters") or {"type": "object"}
            if not isinstance(name, str):
                raise TypeError(f"'name' is {name!r}, not a string")
            answers = [form([(name, arguments)] * 2) for arguments in _arguments(parameters)]
        except (AttributeError, KeyError, TypeError) as broken:
            passed_over.append(f"tool {number}: not a function with a JSON Schema ({broken!r}); no candidates from it")
            continue
        texts.update(dict.fromkeys(text for answer in answers for text in answer.split(_HOLE) if text))
    return AnswerTexts(tuple(texts), tuple(passed_over))


def _arguments(schema: Mapping[str, Any]) -> list[str]:
    if schema.get("type", "object") != "object":
        raise TypeError(f"'parameters' has type {schema['type']!r}, not 'object'")
    written = [_value(schema, turn, required_only=False, depth=0) for turn in range(_turns(schema, 0))]
    return list(dict.fromkeys([*written, _value(schema, 0, required_only=True, depth=0)]))


def _value(schema: Any, turn: int, required_only: bool, depth: int) -> str:
    """A value of a schema as JSON with holes; ``turn`` counts through enumerations."""
    known = _known_values(schema)
    if known:
        return known[turn % len(known)]
    match _type(schema):
        case "object":
            properties, required = _properties(schema), schema.get("required") or ()
            members = [
                f"{_quoted(key)}: {_value(value, turn, required_only, depth + 1)}"
                for key, value in (properties.items() if depth < _MOST_DEPTH else ())
                if key in required or not required_only
            ]
            return "{" + (", ".join(members) if members or depth == 0 else _HOLE) + "}"
        case "array":
            item = _value(schema.get("items", {}), turn, required_only, depth + 1) if depth < _MOST_DEPTH else _HOLE
            return f"[{item}, {item}]"
        case "string":
            return f'"{_HOLE}"'
        case _:
            return _HOLE


def _turns(schema: Any, depth: int) -> int:
    """The size of the largest enumeration in a schema."""
    known = _known_values(schema)
    if known or depth >= _MOST_DEPTH:
        return max(len(known), 1)
    inner = [*_properties(schema).values()] if _type(schema) == "object" else []
    inner += [schema["items"]] if _type(schema) == "array" and "items" in schema else []
    return max((_turns(value, depth + 1) for value in inner), default=1)


def _known_values(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        raise TypeError(f"a schema is {schema!r}, not an object")
    if _type(schema) == "boolean":
        return ["true", "false"]
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    if not isinstance(values, list):
        raise TypeError(f"'enum' is {values!r}, not a list")
    return [json.dumps(value, ensure_ascii=False) for value in values[:_MOST_VALUES]]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise TypeError(f"'properties' is {properties!r}, not an object")
    return properties


def _type(schema: Mapping[str, Any]) -> object:
    """The first type that is not null; an object where only properties are given."""
    given = schema.get("type", "object" if "properties" in schema else None)
    kinds = [kind for kind in given if kind != "null"] if isinstance(given, list) else [given]
    return kinds[0] if kinds else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
