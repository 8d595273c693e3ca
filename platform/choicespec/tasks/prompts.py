"""What a task is: where prompts come from, which of them a split holds, and in what order they are taken."""

import hashlib
import importlib
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar, cast

from choicespec.errors import TaskDataError
from choicespec.records import Document, Request
from choicespec.spec.task import Split, TaskSpec
from choicespec.tasks.tokenizer import Tokenizer

TEST_SHARE = 0.25
TASKS = {
    "tool_call": "choicespec.tasks.tool_call:ToolCallTask",
    "python_repo": "choicespec.tasks.python_repo:PythonRepoTask",
    "chat_log": "choicespec.tasks.chat_log:ChatLogTask",
}

Item = TypeVar("Item")


class Prompts(NamedTuple):
    """The prompts of a task's split.

    Attributes:
        requests: at most ``limit`` behind ``skip``, in the seed's order.
        omitted: a sentence for each prompt that was left out, saying why; these do not use up the limit.
        repository: reads the documents that the prompts are cut from, and that candidates may come from.
    """

    requests: tuple[Request, ...]
    omitted: tuple[str, ...]
    repository: Callable[[], Iterable[Document]] = tuple


class Task(Protocol):
    """A source of prompts."""

    def check(self) -> None:
        """Reads the data without a tokenizer or a model.

        Raises:
            TaskDataError: the data is missing or broken, or the split is empty.
        """
        ...

    def prompts(self, tokenizer: Tokenizer, context_limit_tokens: int) -> Prompts:
        """The split's prompts, each of which leaves room for its new tokens within the target's context.

        Args:
            tokenizer: the target's.
            context_limit_tokens: prompt and new tokens together, as the target allows.

        Raises:
            TaskDataError: the data is missing or broken, or the split is empty.
        """
        ...


def open_task(spec: TaskSpec) -> Task:
    """The task that a specification describes; its data is read on use."""
    module, _, name = TASKS[spec.kind].partition(":")
    task_class = cast(Callable[[TaskSpec], Task], getattr(importlib.import_module(module), name))
    return task_class(spec)


def split_of(seed: int, group: str) -> Split:
    """The split of a group. It depends on nothing else, so more data never moves a prompt to the other split."""
    return "test" if _fraction("split", seed, group) < TEST_SHARE else "train"


def take_split(
    items: Iterable[Item], spec: TaskSpec, group: Callable[[Item], str], name: Callable[[Item], str]
) -> list[Item]:
    """The items of the specification's split, in the seed's order.

    Args:
        items: all that the task has, of both splits.
        spec: says which split, and the seed.
        group: what stays together: the items of one group are all in one split.
        name: unique; decides the place in the order.

    Raises:
        TaskDataError: there are no items, or none of them in this split.
    """
    every = list(items)
    mine = [item for item in every if split_of(spec.seed, group(item)) == spec.split]
    if not mine:
        raise TaskDataError(
            f"task {spec.kind!r}: none of its {len(every)} entries is in split {spec.split!r} at seed {spec.seed}; "
            f"give more data, or set another task.split or task.seed"
        )
    return sorted(mine, key=lambda item: _fraction("order", spec.seed, name(item)))


def gather(attempts: Iterable[Request | str], spec: TaskSpec, omitted: Iterable[str] = ()) -> Prompts:
    """The specification's ``limit`` of requests behind its ``skip``; a sentence among the attempts is one left out."""
    left_out = list(omitted)

    def kept() -> Iterable[Request]:
        for attempt in attempts:
            if isinstance(attempt, Request):
                yield attempt
            else:
                left_out.append(attempt)

    requests = tuple(islice(kept(), spec.skip, spec.skip + spec.limit))
    return Prompts(requests, tuple(left_out))


def _fraction(purpose: str, seed: int, key: str) -> float:
    digest = hashlib.sha256(f"{purpose}:{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
