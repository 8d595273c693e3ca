"""A person's own log, good and broken."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from choicespec.errors import TaskDataError
from choicespec.runtimes.scripted import ByteTokenizer
from choicespec.spec.task import ChatLog, TaskSpec
from choicespec.tasks.chat_log import MOST_NAMED, ChatLogTask
from choicespec.tasks.prompts import Prompts, Task
from contracts.task_contract import MANY, ROOMY, TaskContract
from hypothesis import given
from hypothesis import strategies as st

TOOL = {"type": "function", "function": {"name": "area", "parameters": {"type": "object", "properties": {}}}}


class Keeping(ByteTokenizer):
    """A tokenizer that keeps the messages of its last conversation."""

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        self.messages = list(messages)
        return super().chat_ids(messages, tools)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def answer(content: object) -> dict[str, object]:
    return {"role": "assistant", "content": content}


def chat(number: int) -> dict[str, object]:
    return {"messages": [user(f"Question {number}, please? " + "word " * (number % 5)), answer(f"Answer {number}.")]}


def log(folder: Path, *rows: object) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def both_splits(path: Path, tokenizer: ByteTokenizer | None = None, **changes: object) -> list[Prompts]:
    specs = [ChatLog(path=str(path), limit=MANY, split=split).model_copy(update=changes) for split in ("train", "test")]
    return [ChatLogTask(spec).prompts(tokenizer or ByteTokenizer(), ROOMY) for spec in specs]


def reason_of(path: Path) -> str:
    with pytest.raises(TaskDataError) as caught:
        ChatLogTask(ChatLog(path=str(path))).check()
    return str(caught.value)


class TestChatLog(TaskContract):
    """The contract, on a log of 400 conversations."""

    @pytest.fixture
    def spec(self, tmp_path: Path) -> TaskSpec:
        return ChatLog(path=str(log(tmp_path, *map(chat, range(400)))))

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Task:
        return ChatLogTask(ChatLog(path=str(log(tmp_path, chat(1), "{not json"))))


def test_the_last_answer_is_the_reference(tmp_path: Path) -> None:
    """Fails if a prompt holds its own answer, or an earlier answer is dropped too."""
    turns = [user("a"), answer("b"), user("c"), answer("d")]
    rows = [{"messages": [user(f"{number}"), *turns[1:]]} for number in range(20)]
    for found in both_splits(log(tmp_path, *rows)):
        for request in found.requests:
            assert ByteTokenizer().decode(request.prompt_ids).endswith("<assistant>b\n<user>c\n<assistant>")
            assert json.loads(request.reference or "") == answer("d")


def test_requests_are_named_by_line(tmp_path: Path) -> None:
    """Fails if empty lines shift the numbers, so that a person looks at another conversation."""
    path = log(tmp_path, "", chat(0), "  ", *map(chat, range(1, 20)))
    for found in both_splits(path):
        for request in found.requests:
            name, _, line = request.request_id.rpartition(":")
            assert name == "chats.jsonl"
            first = json.loads(path.read_text().split("\n")[int(line) - 1])["messages"][0]["content"]
            assert first in ByteTokenizer().decode(request.prompt_ids)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "Expecting property name"),
        ("[]", "not an object with a list of 'messages'"),
        ({"prompt": "x"}, "not an object with a list of 'messages'"),
        ({"messages": []}, "no message of the user to answer"),
        ({"messages": [answer("a")]}, "no message of the user to answer"),
        ({"messages": [{"role": "human", "content": "a"}]}, r"messages\[0\] has no 'role' of system, developer, user"),
        ({"messages": [user(None)]}, r"messages\[0\].content is neither text nor a list of text parts"),
        ({"messages": [user([{"type": "image_url"}])]}, r"messages\[0\].content is neither"),
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\] has no 'function'"),
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": 5}]}, r"tool_calls is not a list"),
        ({"messages": [user("a")], "tools": [{"name": "f"}]}, r"tools\[0\] has no 'function' with a 'name'"),
        ({"messages": [user("a")], "tools": 5}, "tools is not a list"),
        ({"messages": [user("\ud83d")]}, "half of a surrogate pair"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_broken_line_is_named_with_its_reason(tmp_path: Path, row: object, reason: str) -> None:
    """Fails if a line is skipped silently, or breaks the tokenizer or the template later."""
    path = log(tmp_path, chat(0), "", row)
    with pytest.raises(TaskDataError, match=f"(?s)1 broken line.*line 3: .*{reason}.*'omit'"):
        ChatLogTask(ChatLog(path=str(path))).check()


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    """Fails if one bad byte makes the whole file unreadable."""
    path = log(tmp_path, chat(0))
    path.write_bytes(path.read_bytes() + b'\n{"messages": "\xff"}')
    assert "line 2: not UTF-8 at byte 14" in reason_of(path)


def test_all_broken_lines_are_named_up_to_a_number(tmp_path: Path) -> None:
    """Fails if a person mends one line a run, or drowns in thousands."""
    found = reason_of(log(tmp_path, *["{"] * (MOST_NAMED + 5), chat(0)))
    assert f"line {MOST_NAMED}: " in found
    assert f"line {MOST_NAMED + 1}: " not in found
    assert "and 5 more" in found


def test_broken_lines_can_be_omitted(tmp_path: Path) -> None:
    """Fails if they are omitted without a word, or take the good ones with them."""
    good = sum(len(found.requests) for found in both_splits(log(tmp_path, *map(chat, range(20)))))
    for found in both_splits(log(tmp_path, "{", *map(chat, range(20))), broken_lines="omit"):
        assert found.omitted[0].startswith("chats.jsonl:1: broken line: ")
        good -= len(found.requests)
    assert good == 0


def test_a_missing_file_and_a_changed_one_say_so(tmp_path: Path) -> None:
    """Fails if a trial's fingerprint says one file and its figures come from another."""
    with pytest.raises(TaskDataError, match=r"task.path .*No such file"):
        ChatLogTask(ChatLog(path=str(tmp_path / "none.jsonl"))).check()
    path = log(tmp_path, *map(chat, range(20)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    ChatLogTask(ChatLog(path=str(path), sha256=digest)).check()
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(TaskDataError, match="changed since the experiment was read"):
        ChatLogTask(ChatLog(path=str(path), sha256=digest)).check()


def test_a_growing_conversation_is_in_one_split_and_never_fills_itself(tmp_path: Path) -> None:
    """Fails if a later turn of the conversation, which holds the answer, comes before the prompt or in training."""
    rows = []
    for number in range(30):
        turns = [user(f"{number}: start"), answer(f"{number}: one"), user("go on"), answer(f"{number}: two")]
        rows += [{"messages": turns[:2]}, {"messages": turns}]
    path = log(tmp_path, *rows)
    openings = [
        {ByteTokenizer().decode(r.prompt_ids).split(":")[0] for r in found.requests} for found in both_splits(path)
    ]
    assert not openings[0] & openings[1]
    for found in both_splits(path, context_tokens=400):
        for request in found.requests:
            text = ByteTokenizer().decode(request.prompt_ids)
            own = text.split("<user>")[-1].split(":")[0] if "start" in text.split("<user>")[-1] else None
            assert own is None or text.count(f"<user>{own}: start") == 1


def test_filling_keeps_one_system_prompt_and_alternating_turns(tmp_path: Path) -> None:
    """Fails if a strict template (system first, then user and assistant in turn) would refuse a filled prompt."""
    rows = [
        {"messages": [{"role": "system", "content": f"System {number}."}, *chat(number)["messages"]]}  # type: ignore[misc]
        for number in range(60)
    ] + [{"messages": [user(f"unanswered {number}")]} for number in range(20)]
    tokenizer = Keeping()
    for found in both_splits(log(tmp_path, *rows), tokenizer, context_tokens=800):
        assert found.requests
        roles = [message["role"] for message in tokenizer.messages]
        start = 1 if roles[0] == "system" else 0
        assert len(roles) > 5
        assert roles[start:] == [("user", "assistant")[place % 2] for place in range(len(roles) - start)]


def test_messages_are_as_templates_expect_them(tmp_path: Path) -> None:
    """Fails if OpenAI's own forms (text parts, arguments as a string, no content, developer) reach a template."""
    call = {"id": "1", "type": "function", "function": {"name": "area", "arguments": '{"base": 3}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        user([{"type": "text", "text": "Are"}, {"type": "text", "text": "a?"}]),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4.5"},
    ]
    path = log(tmp_path, {"messages": messages, "tools": [TOOL]}, *map(chat, range(30)))
    tokenizer = Keeping()
    kept = []
    for spec in (ChatLog(path=str(path), split=split, limit=MANY) for split in ("train", "test")):
        task = ChatLogTask(spec)
        kept += [json.loads(c.messages) for c in task._conversations if c.request_id == "chats.jsonl:1"]
        task.prompts(tokenizer, ROOMY)
    [(system, question, calling, result)] = kept
    assert (system["role"], question["content"], calling["content"], result["content"]) == (
        "system",
        "Area?",
        "",
        "4.5",
    )
    assert calling["tool_calls"][0]["function"]["arguments"] == {"base": 3}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=8))
def test_any_text_survives(contents: list[str]) -> None:
    """Fails if some character (a line separator, a NUL, half an escape) splits a line or is lost."""
    rows = [json.dumps({"messages": [user(text), answer(text)]}, ensure_ascii=False) for text in contents]
    task = ChatLogTask(ChatLog(path="unused.jsonl"))
    read, broken = task._read("\n".join(rows).encode())
    assert not broken
    assert [json.loads(c.messages)[0]["content"] for c in read] == contents
