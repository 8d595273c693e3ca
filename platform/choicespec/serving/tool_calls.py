"""Calls in a target's answer, in the forms that chat templates teach."""

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OPENINGS = ("[", "{", "<tool_call>")


class Call(NamedTuple):
    """A call of a function; ``arguments`` is JSON text, as the API writes it."""

    name: str
    arguments: str


def parse_calls(text: str, names: Collection[str]) -> tuple[Call, ...]:
    """The calls that an answer consists of; none where it is anything else, or calls a function that is not on offer.

    Understood are a JSON array of calls or a single one (what ``tasks.tool_prompt`` asks for, and Llama's form, which
    says ``parameters`` for ``arguments``), and such calls in ``<tool_call>`` tags (Hermes and Qwen).

    Args:
        text: the whole answer.
        names: of the functions on offer.
    """
    stripped = text.strip()
    tagged = _TAGGED.findall(stripped)
    if tagged and _TAGGED.sub("", stripped).strip():
        return ()  # prose around the tags would be lost
    try:
        values = [json.loads(part) for part in tagged] if tagged else json.loads(stripped)
        return tuple(_call(value, names) for value in (values if isinstance(values, list) else [values]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return ()


def may_be_calls(text: str) -> bool:
    """Whether an answer that begins with this text may still turn out to be calls."""
    begun = text.lstrip()
    return any(begun.startswith(opening) or opening.startswith(begun) for opening in _OPENINGS)


def _call(value: dict[str, Any], names: Collection[str]) -> Call:
    (key,) = value.keys() - {"name"}  # a schema that the target repeats has a description beside
    name, arguments = value["name"], value[key]
    if key not in ("arguments", "parameters") or name not in names or not isinstance(arguments, dict):
        raise ValueError(f"no call of a function on offer: {value}")
    return Call(name, json.dumps(arguments, ensure_ascii=False))
