"""What every task promises, whatever its prompts are. A task's test class inherits this and overrides the fixtures."""

from collections.abc import Callable
from typing import Protocol

import pytest
from choicespec.errors import TaskDataError
from choicespec.runtimes.scripted import ByteTokenizer
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import Prompts, Task, open_task

ROOMY = 10_000_000
MANY = 100_000


class PromptsOf(Protocol):
    """The prompts of a task opened anew, by changed values and the target's context."""

    def __call__(self, changes: dict[str, object], context: int = ROOMY) -> Prompts: ...


class TaskContract:
    """The properties. ``slack_tokens`` is the most that a filled prompt may lack: about one piece of material."""

    filled_tokens = 4000
    slack_tokens = 100

    @pytest.fixture
    def spec(self) -> TaskSpec:
        """A specification whose data has several prompts in each split."""
        raise NotImplementedError

    @pytest.fixture
    def broken(self) -> Task:
        """A task whose data is missing or broken."""
        raise NotImplementedError

    @pytest.fixture
    def open_with(self, spec: TaskSpec) -> Callable[[dict[str, object]], Task]:
        """Opens the task anew, with some values of its specification changed."""
        return lambda changes: open_task(spec.model_copy(update=changes))

    @pytest.fixture
    def prompts(self, open_with: Callable[[dict[str, object]], Task]) -> PromptsOf:
        """The prompts of a task opened anew, by changed values and the target's context."""

        def prompts_of(changes: dict[str, object], context: int = ROOMY) -> Prompts:
            return open_with(changes).prompts(ByteTokenizer(), context)

        return prompts_of

    def test_same_seed_gives_the_same_prompts(self, prompts: PromptsOf) -> None:
        """Fails if anything depends on a set's order, on the process's hash seed or on the global random state."""
        changes: tuple[dict[str, object], ...] = ({"limit": MANY}, {"context_tokens": self.filled_tokens})
        for settings in changes:
            first, second = prompts(settings), prompts(settings)
            assert first.requests == second.requests
            assert first.omitted == second.omitted
            assert list(first.repository()) == list(second.repository())

    def test_another_seed_gives_another_order(self, prompts: PromptsOf) -> None:
        """Fails if the seed is dropped on the way."""
        orders = [[r.request_id for r in prompts({"limit": MANY, "seed": seed}).requests] for seed in range(3)]
        assert orders[0] != orders[1] or orders[1] != orders[2]

    def test_splits_share_no_prompt(self, prompts: PromptsOf) -> None:
        """Fails if a prompt, under whatever id, is trained on and then tested with."""
        train, test = (prompts({"limit": MANY, "split": split}).requests for split in ("train", "test"))
        assert train
        assert test
        assert not {r.prompt_ids for r in train} & {r.prompt_ids for r in test}
        assert not {r.request_id for r in train} & {r.request_id for r in test}

    def test_no_prompt_comes_twice(self, prompts: PromptsOf) -> None:
        """Fails if duplicates in the data are kept, or if two prompts have one id."""
        requests = prompts({"limit": MANY}).requests
        assert len({r.request_id for r in requests}) == len({r.prompt_ids for r in requests}) == len(requests)

    def test_limit_takes_the_first_of_the_order(self, prompts: PromptsOf) -> None:
        """Fails if the limit is ignored, or if a smaller run measures other prompts than a larger one."""
        assert prompts({"limit": 2}).requests == prompts({"limit": MANY}).requests[:2]

    def test_requests_carry_the_specification(self, prompts: PromptsOf) -> None:
        """Fails if the length or the stop strings are lost."""
        for request in prompts({"max_new_tokens": 7, "stop": ("\n",)}).requests:
            assert (request.max_new_tokens, request.stop) == (7, ("\n",))

    def test_context_tokens_is_approached_and_never_exceeded(self, prompts: PromptsOf) -> None:
        """Fails if the estimate is trusted without rendering, or if filling gives up early."""
        requests = prompts({"context_tokens": self.filled_tokens}).requests
        assert requests
        for request in requests:
            assert self.filled_tokens - self.slack_tokens <= len(request.prompt_ids) <= self.filled_tokens

    def test_max_leaves_room_for_the_new_tokens_only(self, prompts: PromptsOf) -> None:
        """Fails if "max" forgets the new tokens, or stays far below what the target allows."""
        requests = prompts({"context_tokens": "max", "max_new_tokens": 50}, self.filled_tokens + 50).requests
        assert requests
        for request in requests:
            assert self.filled_tokens - self.slack_tokens <= len(request.prompt_ids) <= self.filled_tokens

    def test_an_int_leaves_room_for_the_new_tokens_too(self, prompts: PromptsOf) -> None:
        """Fails if a number of tokens is taken although the target has no room left to answer."""
        context = self.filled_tokens
        requests = prompts({"context_tokens": context, "max_new_tokens": 50}, context).requests
        assert requests
        assert all(len(request.prompt_ids) + 50 <= context for request in requests)

    def test_too_long_is_reported_and_does_not_use_up_the_limit(self, prompts: PromptsOf) -> None:
        """Fails if a long prompt is cut silently, dropped silently, or taken in place of one that fits."""
        every = prompts({"limit": MANY}).requests
        context = sorted(len(r.prompt_ids) for r in every)[len(every) // 2] + every[0].max_new_tokens
        fitting = [r for r in every if len(r.prompt_ids) + r.max_new_tokens <= context]
        found = prompts({"limit": len(fitting)}, context)
        assert list(found.requests) == fitting
        everything = prompts({"limit": MANY}, context)
        too_long = [r for r in every if r not in fitting]
        assert len(everything.omitted) == len(too_long) > 0
        for request, sentence in zip(too_long, everything.omitted, strict=True):
            assert request.request_id in sentence
            assert str(len(request.prompt_ids)) in sentence
            assert str(context) in sentence

    def test_nothing_fits_gives_nothing(self, prompts: PromptsOf) -> None:
        """Fails if a prompt that cannot be fitted raises or is sent all the same."""
        found = prompts({"context_tokens": 1})
        assert not found.requests
        assert found.omitted

    def test_check_passes_on_good_data(self, open_with: Callable[[dict[str, object]], Task]) -> None:
        """Fails if checking asks for more than prompting needs."""
        open_with({}).check()

    def test_check_refuses_broken_data(self, broken: Task) -> None:
        """Fails if broken data is found only once a model is loaded."""
        with pytest.raises(TaskDataError):
            broken.check()
        with pytest.raises(TaskDataError):
            broken.prompts(ByteTokenizer(), ROOMY)
