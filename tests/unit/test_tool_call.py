"""BFCL questions: the package's own data, and small broken copies of it."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from choicespec.errors import TaskDataError
from choicespec.runtimes.scripted import ByteTokenizer
from choicespec.spec.task import TaskSpec, ToolCall
from choicespec.tasks.prompts import Task, open_task
from choicespec.tasks.tool_call import ToolCallTask, json_schema, question_files
from choicespec.tasks.tool_prompt import conversation_ids
from contracts.task_contract import MANY, ROOMY, TaskContract

EVERY = [
    *("irrelevance", "live_irrelevance", "live_multiple", "live_parallel", "live_parallel_multiple", "live_relevance"),
    *("live_simple", "multiple", "parallel", "parallel_multiple", "simple_java", "simple_javascript", "simple_python"),
]


class Plain(ByteTokenizer):
    """A tokenizer whose chat template has no place for tools; it keeps what it was asked to render."""

    renders_tools = False

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        assert tools is None
        self.messages = messages
        return super().chat_ids(messages, None)


class Keeping(ByteTokenizer):
    """A tokenizer that keeps the tools of its last conversation."""

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        self.tools = tools or []
        return super().chat_ids(messages, tools)


def question(number: int, **changes: object) -> str:
    row = {
        "id": f"simple_{number}",
        "question": [[{"role": "user", "content": f"Question {number}?"}]],
        "function": [{"name": f"f{number}", "description": "", "parameters": {"type": "dict", "properties": {}}}],
    }
    return json.dumps(row | changes)


def written(folder: Path, *lines: str) -> ToolCallTask:
    (folder / "BFCL_v4_simple.json").write_text("\n".join(lines), encoding="utf-8")
    return ToolCallTask(ToolCall(categories=("simple",)), folder)


class TestToolCall(TaskContract):
    """The contract, on the questions that the package ships."""

    slack_tokens = 350  # about one schema, in bytes

    @pytest.fixture
    def spec(self) -> TaskSpec:
        return ToolCall(categories=("simple_python", "parallel"))

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Task:
        return written(tmp_path, question(1), "{not json")


def test_categories_are_found_in_the_data() -> None:
    """Fails if files of other kinds (multi-turn, memory, an index) are taken for questions with functions."""
    assert sorted(question_files(ToolCallTask(ToolCall())._data)) == EVERY


def test_an_unknown_category_lists_the_others() -> None:
    """Fails if a misspelt category gives an empty run, or an error that does not help."""
    with pytest.raises(TaskDataError, match=r"\['simple'\]; name some of: irrelevance, .*simple_python"):
        open_task(ToolCall(categories=("simple", "parallel"))).check()


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a person without bfcl-eval sees an ImportError."""
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(TaskDataError, match="pip install --no-deps bfcl-eval"):
        open_task(ToolCall()).check()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "not a JSON object"),
        (question(2, question=[]), "'question' \\(one turn"),
        (question(2, question=[[{"role": "user"}]]), "KeyError\\('content'\\)"),
        (question(2, function=[{"name": "f"}]), "KeyError\\('parameters'\\)"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    """Fails if a damaged package gives a traceback, or fewer prompts than it should."""
    with pytest.raises(TaskDataError, match=f"BFCL_v4_simple.json, line 2: .*{reason}"):
        written(tmp_path, question(1), line).check()


def test_a_question_asked_again_is_in_one_split(tmp_path: Path) -> None:
    """Fails if a question is trained on and then tested with, only because other functions are on offer."""
    again = json.loads(question(7))["question"]
    lines = [question(number) for number in range(40)] + [question(100 + n, question=again) for n in range(10)]
    task = written(tmp_path, *lines)
    test = {q.question_id for q in task._questions}
    assert "simple_7" in test or not test & {f"simple_{100 + n}" for n in range(10)}
    assert "simple_7" not in test or {f"simple_{100 + n}" for n in range(10)} <= test


def test_identical_questions_are_one_prompt(tmp_path: Path) -> None:
    """Fails if duplicates count as more evidence than there is."""
    task = written(tmp_path, *[question(number) for number in range(40)], *[question(number) for number in range(40)])
    requests = task.prompts(ByteTokenizer(), ROOMY).requests
    assert len({request.request_id for request in requests}) == len(requests)


def test_reference_is_the_ground_truth() -> None:
    """Fails if answers are taken from another question, or are shown in the prompt's place."""
    task = open_task(ToolCall(limit=MANY, categories=("simple_python",)))
    [found] = [r for r in task.prompts(ByteTokenizer(), ROOMY).requests if r.request_id == "simple_python_225"]
    [answer] = json.loads(found.reference or "")
    assert list(answer) == ["psych_research.get_preference"]
    [irrelevant] = open_task(ToolCall(limit=1, categories=("irrelevance",))).prompts(ByteTokenizer(), ROOMY).requests
    assert irrelevant.reference is None


def test_distractors_are_other_functions_and_the_own_are_not_always_first() -> None:
    """Fails if filling repeats a name, loses the question's own functions, or gives their place away."""
    places = []
    for limit in range(1, 9):
        tokenizer = Keeping()
        task = ToolCallTask(ToolCall(categories=("multiple",), limit=limit, context_tokens=6000))
        task.prompts(tokenizer, ROOMY)  # keeps the last rendering of the last question
        own = {json.loads(function)["name"] for function in task._questions[limit - 1].functions}
        names = [tool["function"]["name"] for tool in tokenizer.tools]
        assert len(names) == len(set(names)) > len(own)
        assert own <= set(names)
        places.append(min(names.index(name) for name in own))
    assert len(set(places)) > 1


def test_distractors_come_from_the_same_split() -> None:
    """Fails if a test prompt shows schemas that only training questions have, or the other way round."""
    tokenizer = Keeping()
    task = ToolCallTask(ToolCall(categories=("simple_python",), limit=1, context_tokens=9000))
    task.prompts(tokenizer, ROOMY)
    offered = {json.loads(function)["name"] for q in task._questions for function in q.functions}
    assert {tool["function"]["name"] for tool in tokenizer.tools} <= offered


def types(schema: Any) -> set[str]:
    """Every type in a schema, found along its structure."""
    if not isinstance(schema, dict):
        return set()
    inner = [*schema.get("properties", {}).values(), schema.get("items")]
    return {schema["type"] for _ in "x" if "type" in schema}.union(*map(types, inner))


def test_every_schema_is_json_schema() -> None:
    """Fails if a type of Python, Java or JavaScript reaches a chat template or a grammar."""
    task = ToolCallTask(ToolCall(categories=tuple(EVERY), split="train"))
    schemas = [json.loads(function)["parameters"] for q in task._questions for function in q.functions]
    assert set().union(*map(types, schemas)) == {"object", "array", "string", "integer", "number", "boolean"}


def test_a_parameter_named_type_stays_a_parameter() -> None:
    """Fails if conversion looks at keys without knowing where it is."""
    schema = {
        "type": "dict",
        "properties": {
            "type": {"type": "float"},
            "optional": {"type": "tuple", "items": {"type": "any"}, "default": "dict"},
        },
        "required": ["type"],
    }
    assert json_schema(schema) == {
        "type": "object",
        "properties": {"type": {"type": "number"}, "optional": {"type": "array", "items": {}, "default": "dict"}},
        "required": ["type"],
    }


def test_a_template_without_tools_gets_them_in_the_system_prompt() -> None:
    """Fails if schemas are lost, if there are two system prompts, or if no example turn is given."""
    tokenizer = Plain()
    tools = [{"type": "function", "function": {"name": "area", "parameters": {"type": "object"}}}]
    conversation_ids(tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], tools)
    roles = [message["role"] for message in tokenizer.messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert tokenizer.messages[0]["content"].startswith("Be brief.\n")
    assert '{"name": "area"' in tokenizer.messages[0]["content"]
    assert json.loads(tokenizer.messages[2]["content"])
    assert tokenizer.messages[-1]["content"] == "Hi"


def test_a_template_without_tools_gets_calls_and_results_as_text() -> None:
    """Fails if a template that knows neither drops them from the conversation."""
    tokenizer = Plain()
    call = {"type": "function", "function": {"name": "area", "arguments": {"base": 3}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Area?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4.5"},
    ]
    conversation_ids(tokenizer, messages, [])
    assert [message["role"] for message in tokenizer.messages] == ["user", "assistant", "user"]
    assert json.loads(tokenizer.messages[1]["content"]) == [{"name": "area", "arguments": {"base": 3}}]
    assert "4.5" in tokenizer.messages[2]["content"]
