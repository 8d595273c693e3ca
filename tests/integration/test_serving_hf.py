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
from choicespec.tasks.tool_call import Question, ToolCallTask
from choicespec.tasks.tool_prompt import conversation_ids
from integration.local_api import serving

_NEW_TOKENS = 32
_PROMPTS = 2
_CALLS = "simple_python_301"  # SmolLM2 answers this one with a call


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving({"smollm2": Replica(Shipped().first(None), LimitsSpec())}) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def _as_sent(question: Question) -> dict[str, Any]:
    """A question with the functions on offer, as a client sends it."""
    tools = [{"type": "function", "function": json.loads(function)} for function in question.functions]
    return {"messages": json.loads(question.messages), "tools": tools, "max_tokens": _NEW_TOKENS}


@pytest.fixture(scope="module")
def questions() -> dict[str, Question]:
    """Held out from the scorer's training."""
    return {question.question_id: question for question in ToolCallTask(ToolCall()).questions}


@pytest.fixture(scope="module")
def asked(questions: dict[str, Question]) -> list[dict[str, Any]]:
    return [_as_sent(question) for question in list(questions.values())[:_PROMPTS]]


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


def test_calls_come_out(client: openai.OpenAI, questions: dict[str, Question]) -> None:
    """Fails if calls reach the client as text, or if the champion is plain decoding under another name."""
    request = _as_sent(questions[_CALLS])
    found = client.chat.completions.create(model="smollm2", extra_body={"choicespec": {"usage": True}}, **request)
    (choice,), usage = found.choices, found.usage
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    (call,) = [call.function for call in choice.message.tool_calls if call.type == "function"]
    assert (call.name, json.loads(call.arguments)) == ("get_third_chord", {"key": "key"})
    assert usage is not None
    assert usage.model_dump()["choicespec"]["accepted_per_step"] > 0
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(model="smollm2", stream=True, **request)]
    assert "".join(delta.delta.content or "" for delta in deltas) == ""
    assert [c.function.name for d in deltas for c in d.delta.tool_calls or () if c.function] == ["get_third_chord"]
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_temperature_draws_what_plain_sampling_draws(client: openai.OpenAI, asked: list[dict[str, Any]]) -> None:
    """Fails if drafts change the distribution, or if a temperature is silently greedy."""
    warm = {**asked[0], "max_tokens": 12, "temperature": 1.0, "seed": 5}
    assert _text(client, warm) == _text(client, warm, plain=True)
    assert _text(client, warm) != _text(client, {**warm, "temperature": 0.0})
