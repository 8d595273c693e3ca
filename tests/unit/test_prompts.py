"""Splits, limits and the registry."""

from typing import get_args

import pytest
from choicespec.errors import TaskDataError
from choicespec.records import Request
from choicespec.spec.task import ChatLog, PythonRepo, TaskSpec, ToolCall
from choicespec.tasks.prompts import TASKS, TEST_SHARE, gather, open_task, split_of, take_split
from hypothesis import given
from hypothesis import strategies as st


def test_every_kind_of_specification_opens() -> None:
    """Fails if a kind is added to the specification and not to the registry, or its class is renamed."""
    union = get_args(get_args(TaskSpec)[0])
    assert {kind.model_fields["kind"].default for kind in union} == set(TASKS)
    for spec in (ToolCall(), PythonRepo(), ChatLog(path="chats.jsonl")):
        assert hasattr(open_task(spec), "prompts")


def test_share_of_the_test_split() -> None:
    """Fails if the hash is biased or the share is another one."""
    tests = sum(split_of(3, str(key)) == "test" for key in range(4000))
    assert tests / 4000 == pytest.approx(TEST_SHARE, abs=0.03)


@given(st.sets(st.text(), min_size=1), st.sets(st.text()))
def test_more_data_moves_nothing(data: set[str], more: set[str]) -> None:
    """Fails if split or order depend on what else there is: a scorer would have been trained on a later test prompt."""
    spec = ToolCall(split="train")
    fewer = [item for item in sorted(data) if split_of(spec.seed, item) == "train"]
    if fewer:
        taken = take_split(sorted(data), spec, str, str)
        assert set(taken) == set(fewer)
        assert [item for item in take_split(sorted(data | more), spec, str, str) if item in data] == taken


def test_an_empty_split_says_so() -> None:
    """Fails if a job runs on no prompts at all and reports nothing."""
    with pytest.raises(TaskDataError, match="none of its 0 entries is in split 'test' at seed 0"):
        take_split([], ToolCall(), str, str)


def test_gathering_stops_at_the_limit() -> None:
    """Fails if prompts are rendered, or reported, beyond the last one needed."""
    attempts: list[Request | str] = ["long", Request("a", (1,), 1), "longer", Request("b", (1,), 1), "never reached"]
    found = gather(iter(attempts), ToolCall(limit=2))
    assert [request.request_id for request in found.requests] == ["a", "b"]
    assert found.omitted == ("long", "longer")


@given(st.integers(0, 6), st.integers(1, 6), st.lists(st.booleans(), max_size=12))
def test_a_skip_and_a_limit_share_no_prompt(skip: int, limit: int, fits: list[bool]) -> None:
    """Fails if prompts are chosen by, and confirmed on, the same ones; or if one between them is lost."""
    attempts = [Request(str(n), (1,), 1) if good else str(n) for n, good in enumerate(fits)]
    before = gather(attempts, ToolCall(limit=skip)).requests if skip else ()
    after = gather(attempts, ToolCall(skip=skip, limit=limit)).requests
    both = gather(attempts, ToolCall(limit=skip + limit)).requests
    assert before + after == both
