"""Function calls: BFCL questions, each with the schemas of the functions on offer."""

import importlib.util
import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from choicespec.errors import TaskDataError
from choicespec.records import Request
from choicespec.spec.task import ToolCall
from choicespec.tasks.context import Material, Window
from choicespec.tasks.prompts import Prompts, gather, take_split
from choicespec.tasks.tokenizer import Tokenizer
from choicespec.tasks.tool_prompt import compact, conversation_ids

_INSTALL = "pip install --no-deps bfcl-eval==2026.3.23"
_FILE = re.compile(r"BFCL_v\d+_(?P<category>\w+)\.json")

# BFCL names types as Python, Java or JavaScript do. A type that is not here ("any") becomes no type: anything is valid.
_JSON_TYPES = {
    **{name: name for name in ("object", "array", "string", "integer", "number", "boolean", "null")},
    **dict.fromkeys(("dict", "HashMap"), "object"),
    **dict.fromkeys(("tuple", "Array", "ArrayList"), "array"),
    **dict.fromkeys(("String", "char"), "string"),
    **dict.fromkeys(("float", "double"), "number"),
    "long": "integer",
    "Boolean": "boolean",
}


class Question(NamedTuple):
    """One question; messages and functions are canonical JSON, so that equal ones compare equal."""

    question_id: str
    messages: str
    functions: tuple[str, ...]
    reference: str | None


class ToolCallTask:
    """BFCL questions as prompts, fitted with the functions of other questions as distractors."""

    def __init__(self, spec: ToolCall, data: Path | None = None) -> None:
        """Opens the questions; ``data`` is their folder, None the one in the package ``bfcl-eval``."""
        self._spec = spec
        self._given = data

    def check(self) -> None:
        """Reads every question. See ``Task.check``."""
        _ = self.questions

    def prompts(self, tokenizer: Tokenizer, context_limit_tokens: int) -> Prompts:
        """See ``Task.prompts``."""
        window = Window(self._spec, context_limit_tokens)
        return gather(self._attempts(tokenizer, window), self._spec)

    def _attempts(self, tokenizer: Tokenizer, window: Window) -> Iterator[Request | str]:
        # one function a name: a prompt never offers two functions of the same name
        pool = {_name(function): function for question in self.questions for function in question.functions}
        short = [{"role": "user", "content": "?"}]
        material = Material[str](lambda functions: conversation_ids(tokenizer, short, _tools(functions)))
        for question in self.questions:
            own = {_name(function) for function in question.functions}
            others = [function for name, function in pool.items() if name not in own] if window.fills else []
            random.Random(f"{self._spec.seed}:{question.question_id}").shuffle(others)

            def select(budget: int, others: list[str] = others) -> list[str]:
                return material.selection(others, budget)

            def render(distractors: Sequence[str], question: Question = question) -> list[int]:
                functions = [*question.functions, *distractors]
                if distractors:
                    random.Random(f"{self._spec.seed}:{question.question_id}").shuffle(functions)
                return conversation_ids(tokenizer, json.loads(question.messages), _tools(functions))

            yield window.request(question.question_id, select, render, question.reference, tools=question.functions)

    @cached_property
    def questions(self) -> list[Question]:
        """All of the split's questions in the seed's order, identical ones once."""
        files = question_files(self._data)
        unknown = [category for category in self._spec.categories if category not in files]
        if unknown or not self._spec.categories:
            raise TaskDataError(
                f"task.categories: {unknown or 'empty'}; name some of: {', '.join(files)} (found in {self._data})"
            )
        first: dict[tuple[str, tuple[str, ...]], Question] = {}
        for category in dict.fromkeys(self._spec.categories):
            for question in _read(files[category]):
                first.setdefault((question.messages, tuple(sorted(question.functions))), question)
        # grouped by the question alone: BFCL asks some questions again with other functions
        return take_split(first.values(), self._spec, lambda q: q.messages, lambda q: q.question_id)

    @property
    def _data(self) -> Path:
        if self._given is not None:
            return self._given
        package = importlib.util.find_spec("bfcl_eval")  # found, not imported: its dependencies are not needed here
        if package is None or not package.submodule_search_locations:
            raise TaskDataError(f"task 'tool_call' reads the package bfcl-eval, which is not installed; {_INSTALL}")
        return Path(package.submodule_search_locations[0]) / "data"


def question_files(data: Path) -> dict[str, Path]:
    """The files of single-turn questions that come with functions, by category."""
    named = {path: _FILE.fullmatch(path.name) for path in sorted(data.glob("BFCL_v*.json"))}
    return {match["category"]: path for path, match in named.items() if match and _asks_for_functions(path)}


def json_schema(schema: Any) -> Any:
    """A BFCL parameter schema in JSON Schema's own types."""
    if not isinstance(schema, dict):
        return schema
    converted = {key: value for key, value in schema.items() if key not in ("type", "optional")}
    if schema.get("type") in _JSON_TYPES:
        converted = {"type": _JSON_TYPES[schema["type"]], **converted}
    if isinstance(schema.get("properties"), dict):  # names of parameters, of which one may well be "type"
        converted["properties"] = {name: json_schema(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        converted["items"] = json_schema(schema["items"])
    return converted


def _asks_for_functions(path: Path) -> bool:
    with path.open(encoding="utf-8") as lines:
        try:
            first = json.loads(lines.readline())
        except ValueError:
            return False  # an index of other files, which is not JSON lines
    return "function" in first and len(first.get("question", ())) == 1


def _read(path: Path) -> Iterator[Question]:
    answers = path.parent / "possible_answer" / path.name
    # irrelevance and relevance have no answers
    truths = {row.get("id"): compact(row.get("ground_truth")) for _, row in _rows(answers)} if answers.exists() else {}
    for place, row in _rows(path):
        try:
            [messages] = row["question"]
            turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
            functions = tuple(
                compact({**function, "parameters": json_schema(function["parameters"])}) for function in row["function"]
            )
            yield Question(row["id"], compact(turns), functions, truths.get(row["id"]))
        except (KeyError, TypeError, ValueError) as broken:
            raise TaskDataError(
                f"{place}: {broken!r}; a line needs 'id', 'question' (one turn of role and content) and 'function' "
                f"(each with 'parameters'); reinstall the data: {_INSTALL}"
            ) from broken


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            try:
                row = dict(json.loads(line))
            except (TypeError, ValueError) as broken:
                raise TaskDataError(
                    f"{place}: not a JSON object ({broken}); reinstall the data: {_INSTALL}"
                ) from broken
            yield place, row


def _tools(functions: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": json.loads(function)} for function in functions]


def _name(function: str) -> str:
    return str(json.loads(function)["name"])
