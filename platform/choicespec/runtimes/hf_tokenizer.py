"""A checkpoint's tokenizer, chat template and end-of-sequence tokens, as transformers reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig

from choicespec.errors import TaskDataError
from choicespec.tasks.tokenizer import Message, Tool


class HfTokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        tokenizer: transformers' own.
        template_settings: what the chat template is told beside the conversation.
    """

    def __init__(self, tokenizer: Any, template_settings: Mapping[str, bool]) -> None:
        self._tokenizer, self._template_settings = tokenizer, template_settings
        self.renders_tools = "tools" in str(tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise TaskDataError("the target has no chat template; name an instruct checkpoint, or the task python_repo")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **self._template_settings,
            )
        except TemplateError as error:
            raise TaskDataError(f"the target's chat template refuses a conversation: {error}") from error
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids


def read_eos_ids(checkpoint: str, revision: str | None, config: Any) -> list[int]:
    """The end-of-sequence tokens of a checkpoint: its generation configuration's, or else its configuration's."""
    try:
        eos = GenerationConfig.from_pretrained(checkpoint, revision=revision).eos_token_id
    except OSError:
        eos = config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or ())
