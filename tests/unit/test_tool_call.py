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
    test = {q.question_id for q in task.questions}
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
        own = {json.loads(function)["name"] for function in task.questions[limit - 1].functions}
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
    offered = {json.loads(function)["name"] for q in task.questions for function in q.functions}
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
    schemas = [json.loads(function)["parameters"] for q in task.questions for function in q.functions]
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


AREA = {"name": "area", "parameters": {"type": "object", "properties": {"größe": {"type": "number"}}}}
NOON = {"name": "noon", "description": "{no} place holder"}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": AREA}, {"type": "function", "function": NOON}]
FORM = '[{"name": "function_name", "arguments": {"parameter": "value"}}]'


def asked(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = TOOLS) -> list[Mapping[str, Any]]:
    """What a template without tools is given to render."""
    tokenizer = Plain()
    conversation_ids(tokenizer, messages, tools)
    return list(tokenizer.messages)


def test_a_template_without_tools_gets_them_in_the_users_last_turn() -> None:
    """Fails if the question or a schema is lost or rewritten, if the form of the answer is not what is read last, or if
    the function of the example is on offer as well."""
    question = "What {is} the área?"
    messages = [{"role": "user", "content": question}]
    bare: list[dict[str, Any]] = [AREA, NOON]
    for tools in (TOOLS, bare):  # TOOLS are wrapped as OpenAI does
        last = asked(messages, tools)[-1]
        assert last["role"] == "user"
        lines = last["content"].splitlines()
        assert lines[0] == question
        assert [json.loads(line) for line in lines if line.startswith("{")] == [AREA, NOON]
        assert '"größe"' in last["content"]
        assert lines[-1].endswith(FORM)
        assert "clock" not in last["content"]


def test_earlier_turns_stay_as_they_are() -> None:
    """Fails if schemas stand in an earlier turn, far from the answer, or in each of them."""
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Area?"},
    ]
    rendered = asked(turns)
    assert [message["role"] for message in rendered] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert rendered[3:5] == turns[:2]
    assert [number for number, message in enumerate(rendered) if '"area"' in message["content"]] == [5]


def test_the_example_is_a_question_of_the_same_form_with_its_answer() -> None:
    """Fails if a model is shown another layout than it is asked in, or an answer of another form."""
    _, example, answer, last = asked([{"role": "user", "content": "Area?"}])
    assert (example["role"], answer["role"]) == ("user", "assistant")
    calls = json.loads(answer["content"])
    assert {(call["name"], *call) for call in calls} == {("clock", "name", "arguments")}
    [offered] = [json.loads(line) for line in example["content"].splitlines() if line.startswith("{")]
    assert offered["name"] == "clock"
    assert all(set(call["arguments"]) == set(offered["parameters"]["properties"]) for call in calls)

    def layout(turn: Mapping[str, Any]) -> list[str]:
        """The lines that are the same for every question and every number of schemas."""
        return [line for line in turn["content"].splitlines()[1:] if not line.startswith("{")]

    assert layout(example) == layout(last)


def test_system_messages_stay_in_front() -> None:
    """Fails if what a conversation's own system prompts say is lost or comes after the example, or if there are two
    system turns, which many templates refuse."""
    system, *rest = asked(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "Be {kind}."},
            {"role": "user", "content": "Area?"},
        ]
    )
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\nBe {kind}.\n\n")
    assert "JSON array of calls" in system["content"]
    assert "system" not in {message["role"] for message in rest}
    assert not any("Be brief." in message["content"] for message in rest)


def test_the_result_of_a_call_may_be_the_last_turn() -> None:
    """Fails if a model that is to go on from a result has the schemas only before it."""
    call = {"type": "function", "function": {"name": "area", "arguments": {"größe": 3}}}
    last = asked(
        [
            {"role": "user", "content": "Area?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "4.5"},
        ]
    )[-1]
    assert last["role"] == "user"
    assert all(part in last["content"] for part in ("4.5", '"area"', '"noon"', FORM))


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
