"""What a search may ask for: found wrong before anything starts."""

from typing import Any

import pytest
from choicespec.errors import SpecError
from choicespec.spec.method import Choice, Draft, MethodSpec, Ngram
from choicespec.spec.search import Value
from choicespec.spec.task import PythonRepo, ToolCall
from unit.searches import parsed


def spaces(path: str, dimension: Any, start: str = "prior") -> dict[str, Any]:
    return {"spaces": {"one": {"start": start, "vary": {path: dimension}}}}


def test_a_setting_is_the_start_with_values_changed() -> None:
    """Fails if a value lands elsewhere, or the rest of the trial is lost."""
    experiment = parsed()
    assert experiment.setting("searched", "prior", {"method.block_length": 3}).method == Choice(block_length=3)
    changes: dict[str, Value] = {"method.max_ngram": 5, "pair.target.dtype": "bfloat16", "runtime.threads": 1}
    found = experiment.setting("held_out", "ngram", changes)
    assert (found.method, found.pair.target.dtype) == (Ngram(max_ngram=5), "bfloat16")
    assert (found.runtime.threads, found.task.limit) == (1, 9)


def test_a_task_confirmed_on_the_same_split_lies_behind() -> None:
    """Fails if prompts behind those searched are refused, or those searched themselves are taken."""
    assert parsed(tasks={"searched": "behind"}).search is not None
    with pytest.raises(SpecError, match="take the same prompts of split 'train'"):
        parsed(tasks={"searched": "searched"})


@pytest.mark.parametrize(
    ("search", "reason"),
    [
        ({"pair": "q"}, r"search.pair: unknown name 'q'; known: p"),
        ({"tasks": {"searched": "nowhere"}}, r"search.tasks: unknown name 'nowhere'"),
        ({"default": "best"}, r"unknown name 'best'; known: ngram, prior"),
        ({"live": 2}, "live=2 leaves no room beside the 2 methods as they are"),
        (spaces("method.block_size", [4]), "has no field 'block_size'"),
        (spaces("task.limit", [4]), r"'task.limit' must begin with one of method\., pair\., runtime\."),
        (spaces("method.block_length", {"low": 0, "high": 8}), "'method.block_length': 0.*greater than or equal to 1"),
        (spaces("method.block_length", {"low": 8, "high": 8}), "low=8 must be less than high=8"),
        (spaces("method.selection", ["prior", "best"]), "'best'.*prior"),
        (spaces("method.selection", ["oracle"]), "it runs in a replay only"),
        (
            spaces("method.block_length", {"low": 1, "hihg": 8}),
            "block_length.hihg: unknown field; known.*low, high",
        ),
        (spaces("method.min_survival", {"low": 0.0, "high": 1.5, "or_none": True}), "less than or equal to 1"),
        (spaces("method.num_draft_tokens", {"low": 1, "high": 8}, "nobody"), "unknown name 'nobody'"),
    ],
)
def test_what_cannot_be_searched_is_said(search: dict[str, Any], reason: str) -> None:
    """Fails if it is found out after minutes, or the message does not name the place and the remedy."""
    with pytest.raises(SpecError, match=reason):
        parsed(**search)


def test_only_what_a_recording_tells_apart_is_replayed() -> None:
    """Fails if another precision or thread count is judged by a recording that knows nothing of it."""
    assert parsed().search is not None
    for path, values, replayed in (
        ("method.block_length", [4, 8], True),
        ("method.width", [1, 4], True),
        ("runtime.threads", [1, 2], False),
        ("method.pace", ["planned", "adaptive"], False),
        ("method.exact", [False, True], False),
        ("pair.target.dtype", ["float32", "bfloat16"], False),
    ):
        search = parsed(**spaces(path, values)).search
        assert search is not None
        assert search.replayed == replayed
    alone = parsed(settings=0).search
    assert alone is not None
    assert not alone.replayed


def test_an_idle_skip_changes_no_identity() -> None:
    """Fails if what was measured or recorded before there was a skip is not found again."""
    for task in (ToolCall(), PythonRepo(folder="f")):
        assert "skip" not in task.model_dump_json()
        assert task.model_copy(update={"skip": 3}).model_dump()["skip"] == 3
        assert type(task).model_validate_json(task.model_copy(update={"skip": 3}).model_dump_json()).skip == 3


def test_idle_settings_of_a_method_change_no_identity() -> None:
    """Fails if what was measured before there were any is not found again, or if one that is set is lost."""
    methods: list[MethodSpec] = [Ngram(), Choice(), Draft(drafter="d")]
    for method in methods:
        assert not {"exact", "pace"} & method.model_dump().keys()
        for change in ({"exact": True}, {"pace": "adaptive"}):
            changed = type(method).model_validate(method.model_dump() | change)
            assert change.items() <= changed.model_dump().items()
            assert type(method).model_validate_json(changed.model_dump_json()) == changed
            assert changed.label != method.label


def test_settings_that_are_left_out_of_a_trials_json_can_be_searched() -> None:
    """Fails if a search says that a method has no such field."""
    experiment = parsed(**spaces("method.pace", ["planned", "adaptive"]))
    assert experiment.setting("searched", "ngram", {"method.pace": "adaptive"}).method == Ngram(pace="adaptive")


def test_a_narrowed_experiment_searches_nothing() -> None:
    """Fails if fewer prompts make the search of an experiment that is only measured invalid."""
    assert parsed().narrowed(limit=1).search is None
