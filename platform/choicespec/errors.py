"""Errors that a person can act on: each says what was given, what is allowed and what to do next.

The jobs print these without a traceback; anything else that escapes is a fault of choicespec itself. Ray carries them
between processes, so an error of several parts keeps the parts as its ``args``, from which pickle makes it anew.
"""

from collections.abc import Sequence


class ChoiceSpecError(Exception):
    """The root of every error that a person can act on."""


class SpecError(ChoiceSpecError):
    """An experiment, or a value given on the command line, is not one that choicespec knows."""


class CheckpointError(ChoiceSpecError):
    """A checkpoint is missing, incomplete, or not the kind that was asked for."""


class TaskDataError(ChoiceSpecError):
    """A task's data is missing or broken; names the file and, where there is one, the line."""


class PromptTooLong(ChoiceSpecError):
    """A prompt with its new tokens does not fit into the target's context."""

    def __init__(self, request_id: str, prompt_tokens: int, max_new_tokens: int, context_tokens: int) -> None:
        super().__init__(request_id, prompt_tokens, max_new_tokens, context_tokens)

    def __str__(self) -> str:
        request_id, prompt_tokens, max_new_tokens, context_tokens = self.args
        return (
            f"{request_id}: {prompt_tokens} prompt tokens + {max_new_tokens} new tokens exceed the target's context of "
            f"{context_tokens} tokens; shorten the prompt or lower task.max_new_tokens"
        )


class Unsupported(ChoiceSpecError):
    """A runtime cannot express a method, or not on this pair; raised before anything is loaded."""

    def __init__(self, runtime: str, method: str, reason: str, supported_by: Sequence[str] = ()) -> None:
        super().__init__(runtime, method, reason, tuple(supported_by))

    def __str__(self) -> str:
        runtime, method, *_ = self.args
        return f"runtime {runtime!r} cannot run method {method!r}: {self.why}"

    @property
    def why(self) -> str:
        """The reason, and the runtimes that can."""
        _, _, reason, supported_by = self.args
        return f"{reason}; supported by: {', '.join(supported_by)}" if supported_by else str(reason)


class ServerError(ChoiceSpecError):
    """A runtime's server process refuses a request, or has died; then it carries the last lines of its log."""


class RecordingError(ChoiceSpecError):
    """A recording is missing, broken or of something else, or cannot be made."""


class ScorerError(ChoiceSpecError):
    """A scorer is missing or broken, or was trained for something else."""


class TrackingError(ChoiceSpecError):
    """The MLflow server cannot be reached, or refuses what is logged."""


class ChampionError(ChoiceSpecError):
    """A champion is missing or broken, is for another pair, or was not measured to match plain decoding."""
