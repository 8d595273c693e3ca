"""Errors say what a person needs, also after Ray has carried them from another process."""

import pickle

import pytest
from choicespec.errors import ChoiceSpecError, PromptTooLong, SpecError, Unsupported

ERRORS = [
    SpecError("no such field"),
    PromptTooLong("r7", prompt_tokens=8000, max_new_tokens=500, context_tokens=8192),
    Unsupported("vllm", "choice", "it has no scorer", supported_by=["hf", "scripted"]),
    Unsupported("vllm", "choice", "it has no scorer"),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_an_error_survives_pickling(error: ChoiceSpecError) -> None:
    """Fails if an error of several parts cannot be made anew from its message: Ray then reports that instead of it."""
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_a_prompt_too_long_names_every_number() -> None:
    """Fails if a person cannot tell by how much the prompt is too long."""
    assert all(part in str(ERRORS[1]) for part in ("r7", "8000", "500", "8192"))


def test_unsupported_names_the_runtimes_that_can() -> None:
    """Fails if a person must guess where else the method runs; or if nothing is said to be supported by nobody."""
    assert str(ERRORS[2]).endswith("it has no scorer; supported by: hf, scripted")
    assert str(ERRORS[3]).endswith("it has no scorer")
