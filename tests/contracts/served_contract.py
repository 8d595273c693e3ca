"""What every runtime that can be served promises over HTTP. Its test class inherits this and gives the fixtures.

Ray Serve, which adds nothing of a runtime's, has tests of its own.
"""

from collections.abc import Sequence
from typing import Any

import openai
import pytest
from choicespec.records import Request
from choicespec.runtimes.runtime import StreamingRuntime
from contracts.runtime_contract import PLAIN
from openai.types import Completion

MODEL, VERSION = "served", "7"
_NEW_TOKENS = 24


def ask(client: openai.OpenAI, prompt: str, **asked: Any) -> openai.Stream[Completion]:
    """A stream that is on its way."""
    return client.completions.create(
        model=MODEL,
        prompt=prompt,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"choicespec": {"usage": True}},
        **({"max_tokens": _NEW_TOKENS} | asked),
    )


class ServedContract:
    """The properties. The champion drafts, and all prompts may be asked at a time."""

    @pytest.fixture(scope="class")
    def runtime(self) -> StreamingRuntime:
        """That, or one like that, which answers."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def client(self) -> openai.OpenAI:
        """Of a server that serves ``MODEL`` with a champion of version ``VERSION``."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def prompts(self) -> Sequence[str]:
        """Up to four, the answers to which have several blocks."""
        raise NotImplementedError

    def test_a_champion_answers_several_clients_at_a_time(
        self, runtime: StreamingRuntime, client: openai.OpenAI, prompts: Sequence[str]
    ) -> None:
        """Fails if answers are mixed up, differ from plain decoding, come in one part, or are counted wrongly."""
        accepted = 0.0
        streams = [ask(client, prompt) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            *parts, last = list(stream)
            request = Request(prompt, tuple(runtime.tokenizer.encode(prompt)), _NEW_TOKENS)
            plain = runtime.generate(request, PLAIN)
            assert "".join(part.choices[0].text for part in parts) == runtime.tokenizer.decode(plain.output_ids)
            assert len(parts) > 2
            assert last.usage is not None
            assert last.usage.prompt_tokens == len(request.prompt_ids)
            assert last.usage.completion_tokens == len(plain.output_ids)
            extension = last.usage.model_dump()["choicespec"]
            assert extension["version"] == VERSION
            accepted += extension["accepted_per_step"]
        assert accepted > 0

    def test_a_temperature_is_refused_where_it_cannot_be_had(
        self, runtime: StreamingRuntime, client: openai.OpenAI, prompts: Sequence[str]
    ) -> None:
        """Fails if it is silently greedy, or drawn otherwise than plain decoding draws with the same seed."""
        assert not runtime.samples
        with pytest.raises(openai.BadRequestError, match="greedily"):
            ask(client, prompts[0], temperature=0.7)
