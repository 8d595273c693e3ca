"""What a task needs of a tokenizer; each runtime brings its own."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text to token ids and back, with the target's chat template.

    Attributes:
        renders_tools: the chat template has a place for tools; where it has none, ``tools`` must be None.
    """

    renders_tools: bool

    def encode(self, text: str) -> list[int]:
        """The ids of raw text, with the special tokens that the model expects at its start."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        ...

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int]:
        """The ids of a rendered conversation, up to and with the opening of the model's turn.

        Raises:
            TaskDataError: there is no chat template, or it refuses these messages.
        """
        ...
