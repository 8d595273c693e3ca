"""A task: where the prompts come from, how many, and how long."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from choicespec.spec.frozen import Frozen

Split = Literal["train", "test"]
ContextTokens = Annotated[int, Field(ge=1)] | Literal["max"] | None


class _Prompts(Frozen):
    """What every task has.

    Attributes:
        limit: the most prompts taken from the split.
        skip: prompts of the split that are passed over first, such as those that a scorer was fitted to.
        context_tokens: prompts are fitted to this many tokens with real surrounding material; ``max`` is the
            largest that the target allows; None leaves each prompt as it is.
        max_new_tokens: the most tokens decoded for a prompt.
        split: train and test never share a prompt (nor, for code, a file).
        seed: decides the split and which prompts are taken.
        stop: strings that end an output; the token that completes one is kept.
    """

    kind: str
    limit: int = Field(default=24, ge=1)
    context_tokens: ContextTokens = None
    max_new_tokens: int = Field(default=64, ge=1)
    split: Split = "test"
    seed: int = 0
    stop: tuple[str, ...] = ()
    skip: int = Field(default=0, ge=0)

    @model_serializer(mode="wrap")
    def _without_an_idle_skip(self, content: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """So that what was measured and recorded before there was a skip keeps its identity."""
        found: dict[str, Any] = content(self)
        return found if self.skip else {name: value for name, value in found.items() if name != "skip"}

    @property
    def label(self) -> str:
        return self.kind if self.context_tokens is None else f"{self.kind} @{self.context_tokens}"


class ToolCall(_Prompts):
    """Function calls: BFCL questions with the schemas of the functions on offer.

    Attributes:
        categories: BFCL categories, as the package ``bfcl-eval`` names its files.
    """

    kind: Literal["tool_call"] = "tool_call"
    categories: tuple[str, ...] = ("simple_python", "multiple", "parallel", "parallel_multiple")


class PythonRepo(_Prompts):
    """Completions of real Python files, cut inside function bodies.

    Attributes:
        folder: the repository; None is the standard library of the running Python.
    """

    kind: Literal["python_repo"] = "python_repo"
    folder: str | None = None


class ChatLog(_Prompts):
    """A person's own JSONL: a line is an object with OpenAI chat ``messages`` and, optionally, ``tools``.

    Attributes:
        path: the JSONL file.
        broken_lines: ``stop`` ends the job at a broken line, ``omit`` reports it and runs the others.
        sha256: of the file's bytes; filled in when the experiment is read, so that a changed file is a new trial.
    """

    kind: Literal["chat_log"] = "chat_log"
    path: str
    broken_lines: Literal["stop", "omit"] = "stop"
    sha256: str | None = None


TaskSpec = Annotated[ToolCall | PythonRepo | ChatLog, Field(discriminator="kind")]
