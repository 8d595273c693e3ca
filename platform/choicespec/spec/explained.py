"""What is wrong with a specification that was read from YAML, for people."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


def explained(error: ValidationError, schema: Mapping[str, Any]) -> list[str]:
    """A line for each wrong field: its path, and the known names there.

    Args:
        error: what pydantic found.
        schema: the JSON schema of the model that was validated.
    """
    return [_explain(e["type"], e["loc"], e["msg"], e.get("ctx", {}), schema) for e in error.errors()]


def _explain(
    kind: str, location: tuple[int | str, ...], message: str, context: dict[str, Any], root: Mapping[str, Any]
) -> str:
    path, schema = _place(location, root)
    if kind == "extra_forbidden":
        _, parent = _place(location[:-1], root)
        return f"{path}: unknown field; known fields: {', '.join(parent['properties'])}"
    if kind == "union_tag_invalid":
        return f"{path}.kind: unknown kind {context['tag']!r}; known kinds: {context['expected_tags']}"
    if kind == "union_tag_not_found":
        return f"{path}.kind: missing; known kinds: {', '.join(map(repr, schema['discriminator']['mapping']))}"
    return f"{path}: {message.removeprefix('Value error, ')}" if path else message.removeprefix("Value error, ")


def _place(location: tuple[int | str, ...], root: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The path in the YAML, and the JSON schema there, of a location of pydantic's.

    pydantic's location also holds the chosen member of each union, which no one has written; the path leaves it out.
    """
    definitions, node, path = root["$defs"], root, []
    for part in location:
        members = node.get("discriminator", {}).get("mapping", {})
        if part in members:
            node = {"$ref": members[part]}
        elif "anyOf" in node and not isinstance(part, int):  # the class that pydantic tried
            refs = [member for member in node["anyOf"] if "$ref" in member]
            node = next((ref for ref in refs if ref["$ref"].rsplit("/", 1)[-1] in part), node)
        elif "anyOf" not in node or isinstance(part, int):
            path.append(str(part))
            node = node.get("items") or node.get("properties", {}).get(part) or node.get("additionalProperties") or {}
        alternatives = [member for member in node.get("anyOf", ()) if member.get("type") != "null"]
        if len(alternatives) == 1:  # a field that may be left out
            node = alternatives[0]
        if "$ref" in node:
            node = definitions[node["$ref"].rsplit("/", 1)[-1]]
    return ".".join(path), node
