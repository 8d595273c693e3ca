"""The champion that ships, on the real embedded default, over HTTP: what `make serve` answers."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from choicespec.records import Request
from choicespec.runtimes.hf import HfRuntime
from choicespec.serving.replica import Replica
from choicespec.serving.source import Shipped
from choicespec.spec.method import Autoregressive
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.serving import LimitsSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.tool_call import ToolCallTask
from choicespec.tasks.tool_prompt import conversation_ids
from integration.local_api import serving

_NEW_TOKENS = 40
_PROMPTS = 3


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving({"smollm2": Replica(Shipped().first(None), LimitsSpec())}) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    """Held-out questions with the functions on offer, as a client sends them."""
    return [
        {
            "messages": json.loads(question.messages),
            "tools": [{"type": "function", "function": json.loads(function)} for function in question.functions],
            "max_tokens": _NEW_TOKENS,
        }
        for question in ToolCallTask(ToolCall()).questions[:_PROMPTS]
    ]


def _text(client: openai.OpenAI, request: dict[str, Any], **extension: bool) -> str:
    """An answer as the target wrote it, calls included."""
    stream = client.chat.completions.create(
        model="smollm2", stream=True, extra_body={"choicespec": {"blocks": True, **extension}}, **request
    )
    blocks = [chunk.model_extra["choicespec"] for chunk in stream if chunk.model_extra]
    return "".join(piece["text"] for block in blocks for piece in block["pieces"])


def test_answers_are_plain_decodings(client: openai.OpenAI, asked: list[dict[str, Any]]) -> None:
    """Fails if what is served differs from what is measured: prompts, method, or output."""
    runtime = HfRuntime(HfRuntimeSpec(threads=2), PairSpec.model_validate({"target": {"model": "smollm2"}}))
    for number, request in enumerate(asked):
        prompt_ids = conversation_ids(runtime.tokenizer, request["messages"], request["tools"])
        plain = runtime.generate(Request(str(number), tuple(prompt_ids), _NEW_TOKENS), Autoregressive())
        assert _text(client, request) == runtime.tokenizer.decode(plain.output_ids)


def test_drafts_are_accepted_and_calls_come_out(client: openai.OpenAI, asked: list[dict[str, Any]]) -> None:
    """Fails if the champion is plain decoding under another name, or if no answer becomes calls."""
    calls = []
    for request in asked:
        request = {**request, "max_tokens": 2 * _NEW_TOKENS}
        found = client.chat.completions.create(model="smollm2", extra_body={"choicespec": {"usage": True}}, **request)
        assert found.usage is not None
        assert found.usage.model_dump()["choicespec"]["accepted_per_step"] > 1
        if found.choices[0].finish_reason == "tool_calls":
            offered = {tool["function"]["name"] for tool in request["tools"]}
            assert found.choices[0].message.tool_calls
            calls += [call.function for call in found.choices[0].message.tool_calls if call.type == "function"]
            assert {call.name for call in calls[-1:]} <= offered
    assert calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_a_temperature_draws_what_plain_sampling_draws(client: openai.OpenAI, asked: list[dict[str, Any]]) -> None:
    """Fails if drafts change the distribution, or if a temperature is silently greedy."""
    warm = {**asked[0], "max_tokens": 24, "temperature": 1.0, "seed": 5}
    assert _text(client, warm) == _text(client, warm, plain=True)
    assert _text(client, warm) != _text(client, {**warm, "temperature": 0.0})
