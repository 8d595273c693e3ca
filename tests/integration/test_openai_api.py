"""The API over real HTTP, with OpenAI's own client, in front of a replica of the scripted runtime in this process."""

import json
import threading
from collections.abc import Generator, Iterator
from typing import Any

import openai
import pytest
import requests
from choicespec.decoding.loop import Block
from choicespec.records import Request, Sampling, Step
from choicespec.runtimes.runtime import RUNTIMES
from choicespec.runtimes.scripted import EOS_ID, ByteTokenizer, ScriptedRuntime
from choicespec.serving.endpoints import digest
from choicespec.serving.replica import Replica
from choicespec.serving.source import Versioned
from choicespec.spec.method import Autoregressive, MethodSpec
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.serving import LimitsSpec
from choicespec.tasks.tool_prompt import conversation_ids
from integration.local_api import serving, table_champion
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

_MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "count"}]
_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
_LIMITS = LimitsSpec(new_tokens=600, body_bytes=20_000, waiting=0)
_EXTENDED = {"choicespec": {"usage": True}}


def _replica(limits: LimitsSpec = _LIMITS) -> Replica:
    return Replica(Versioned(table_champion(), "7"), limits)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving({"table": _replica()}, _LIMITS) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def _plain(prompt_ids: list[int], new_tokens: int) -> list[int]:
    """What plain decoding outputs."""
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec.model_validate({"target": {"model": "table"}}))
    return list(runtime.generate(Request("plain", tuple(prompt_ids), new_tokens), Autoregressive()).output_ids)


def _text(output_ids: list[int]) -> str:
    return ByteTokenizer().decode(output_ids)


_EXPECTED = _plain(conversation_ids(ByteTokenizer(), [{"role": "user", "content": "count"}], ()), 600)


def test_an_answer_is_plain_decodings(client: openai.OpenAI) -> None:
    """Fails if text is lost between the loop and the client, or usage counts anything but ids."""
    found = client.chat.completions.create(model="table", messages=_MESSAGES, extra_body=_EXTENDED)
    assert found.choices[0].message.content == _text(_EXPECTED)
    assert found.choices[0].finish_reason == ("stop" if _EXPECTED[-1] == EOS_ID else "length")
    assert found.usage is not None
    assert found.usage.completion_tokens == len(_EXPECTED)
    extension: dict[str, Any] = found.usage.model_dump()["choicespec"]
    assert (extension["method"], extension["version"]) == ("ngram k=8", "7")
    assert extension["accepted_per_step"] > 1
    assert extension["decode_tokens_per_s"] > 0


def test_a_stream_is_the_same_answer_in_blocks(client: openai.OpenAI) -> None:
    """Fails if a stream differs from the whole, comes a token at a time, or in one part."""
    chunks = list(
        client.chat.completions.create(
            model="table", messages=_MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == _text(_EXPECTED)
    assert 2 < len(texts) < len(_EXPECTED) / 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(_EXPECTED)
    assert "choicespec" not in usage.model_dump()


def test_blocks_say_who_proposed_them(address: str) -> None:
    """Fails if the page has nothing to colour, or its pieces are not the answer."""
    body = {"model": "table", "messages": _MESSAGES, "stream": True, "choicespec": {"blocks": True}}
    chunks = _events(requests.post(f"{address}/v1/chat/completions", json=body, timeout=60))
    pieces = [piece for chunk in chunks for piece in chunk.get("choicespec", {}).get("pieces", ())]
    assert "".join(piece["text"] for piece in pieces) == _text(_EXPECTED)
    assert {piece["source"] for piece in pieces} == {"ngram", "target"}
    plain = _events(requests.post(f"{address}/v1/chat/completions", json=body | _plain_and_blocks(), timeout=60))
    pieces = [piece for chunk in plain for piece in chunk.get("choicespec", {}).get("pieces", ())]
    assert "".join(piece["text"] for piece in pieces) == _text(_EXPECTED)
    assert {piece["source"] for piece in pieces} == {"target"}


def _plain_and_blocks() -> dict[str, Any]:
    return {"choicespec": {"blocks": True, "plain": True}}


def _events(response: requests.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stop_string_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    """Fails if the client sees the stop string, a part of it, or what follows."""
    whole = _text(_EXPECTED)
    stop = whole[40:44]
    found = client.completions.create(model="table", prompt=_prompt_text(), stop=[stop], max_tokens=600)
    assert found.choices[0].text == whole.partition(stop)[0]
    assert found.choices[0].finish_reason == "stop"
    chunks = client.completions.create(model="table", prompt=_prompt_text(), stop=stop, max_tokens=600, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.partition(stop)[0]


def _prompt_text() -> str:
    return _text(conversation_ids(ByteTokenizer(), [{"role": "user", "content": "count"}], ()))


def test_max_tokens_cuts_exactly(client: openai.OpenAI) -> None:
    """Fails if a block goes beyond the length that was asked for."""
    for size in (1, 13):
        found = client.chat.completions.create(model="table", messages=_MESSAGES, max_tokens=size)
        assert found.choices[0].message.content == _text(_EXPECTED[:size])
        assert found.choices[0].finish_reason == "length"


def test_models_say_what_is_served(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "table"
    served = model.model_dump()["choicespec"]
    assert (served["method"], served["version"], served["refused"]) == ("ngram k=8", "7", None)
    assert served["speedup"]["n"] == 20


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"n": 2}, "n", "1"),
        ({"logprobs": True}, "logprobs", "False"),
        ({"logprobz": True}, "logprobz", "supported are: model, max_tokens"),
        ({"temperature": 0.7}, "temperature", "greedily"),
        ({"max_tokens": 601}, "max_tokens", "601 new tokens are asked for, but at most 600"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text"),
        ({"tools": [_TOOL], "messages": [{"role": "system", "content": "x"}]}, "messages", "role 'user'"),
        ({"tools": [_TOOL], "tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
    ],
)
def test_what_is_not_supported_is_a_400_that_says_so(
    address: str, changes: dict[str, Any], param: str | None, said: str
) -> None:
    """Fails if a field is silently dropped, so that the client gets something else than it asked for."""
    body = {"model": "table", "messages": _MESSAGES, **changes}
    response = requests.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert param is None or error["param"] == param


def test_errors_never_repeat_what_was_sent(address: str) -> None:
    """Fails if a private prompt gets into an error, and from there into somebody's log."""
    body = {"model": "table", "messages": [{"role": "user", "content": {"secret": "SECRET"}}]}
    response = requests.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert "SECRET" not in response.text


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(address: str) -> None:
    """Fails if a prompt is cut silently, or the client is not told by how much it is too long."""
    with serving({"table": _replica()}) as roomy:
        body = {"model": "table", "prompt": "x" * 32_760, "max_tokens": 20}
        response = requests.post(f"{roomy}/v1/completions", json=body, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "32760 prompt tokens + 20 new tokens exceed the model's context of 32768" in error["message"]


def test_a_body_that_is_too_long_is_not_read(address: str) -> None:
    body = {"model": "table", "prompt": "x" * 30_000}
    response = requests.post(f"{address}/v1/completions", json=body, timeout=60)
    assert response.status_code == 413
    assert "20000 bytes" in response.json()["error"]["message"]


def test_other_sites_pages_cannot_send_requests(address: str) -> None:
    """Fails if a web page of another site can use the endpoint without asking the browser's leave (CORS)."""
    body = json.dumps({"model": "table", "messages": _MESSAGES})
    response = requests.post(f"{address}/v1/chat/completions", data=body, headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


def test_an_unknown_model_or_path_is_a_404_in_the_apis_shape(client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.NotFoundError, match="served are: table"):
        client.chat.completions.create(model="tabel", messages=_MESSAGES)
    response = requests.get(f"{address}/v1/embeddings", timeout=60)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


def test_a_token_is_asked_for_where_one_is_set() -> None:
    """Fails if a request without the token, or with another, is answered; or if health needs it."""
    with serving({"table": _replica()}, token_digest=digest("right")) as address:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            for method, path in (("GET", "models"), ("POST", "chat/completions"), ("POST", "completions")):
                response = requests.request(method, f"{address}/v1/{path}", headers=headers, json={}, timeout=60)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert openai.OpenAI(base_url=f"{address}/v1", api_key="right").models.list().data[0].id == "table"
        assert requests.get(f"{address}/healthz", timeout=60).json()["models"] == {"table": "ok"}


_NOTHING_YET = Block((), Step(0, 0, "", 0.0, 0.0), None, 0.0)


class _HeldRuntime(ScriptedRuntime):
    """Gives empty blocks after the first one until it is let go on, and says whether a stream was closed meanwhile."""

    let = threading.Event()
    left = threading.Event()

    def stream(self, request: Request, method: MethodSpec, sampling: Sampling | None) -> Generator[Block, None, None]:
        blocks = super().stream(request, method, sampling)
        yield next(blocks)
        try:
            while not self.let.wait(0.01):
                yield _NOTHING_YET
        except GeneratorExit:
            self.left.set()
            raise
        yield from blocks


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[_HeldRuntime]:
    monkeypatch.setitem(RUNTIMES, "scripted", f"{__name__}:_HeldRuntime")
    _HeldRuntime.let, _HeldRuntime.left = threading.Event(), threading.Event()
    return _HeldRuntime


def test_plain_decoding_is_refused_where_it_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a client who compares makes a runtime that keeps one method ready stop the champion's for it."""
    monkeypatch.setattr(ScriptedRuntime, "warm_methods", 1)
    with serving({"table": _replica()}, _LIMITS) as address:
        body = {"model": "table", "messages": _MESSAGES}
        url = f"{address}/v1/chat/completions"
        refused = requests.post(url, json=body | {"choicespec": {"plain": True}}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "choicespec.plain")
        assert requests.post(url, json=body, timeout=60).status_code == 200


def test_a_full_queue_is_a_429_with_the_time_to_come_back(held: type[_HeldRuntime]) -> None:
    """Fails if requests pile up without bound, or a client is not told when to try again."""
    with serving({"table": _replica()}, _LIMITS) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = iter(client.chat.completions.create(model="table", messages=_MESSAGES, stream=True))
        next(stream)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model="table", messages=_MESSAGES)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        held.let.set()
        assert len(list(stream)) > 2
        assert client.chat.completions.create(model="table", messages=_MESSAGES).usage


def test_a_client_that_goes_away_frees_the_slot(held: type[_HeldRuntime]) -> None:
    """Fails if an answer that nobody reads is decoded to its end while others wait."""
    limits = LimitsSpec(waiting=4)
    with serving({"table": _replica(limits)}, limits) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="table", messages=_MESSAGES, stream=True)
        next(iter(stream))
        stream.close()
        assert held.left.wait(60)
        held.let.set()
        assert client.chat.completions.create(model="table", messages=_MESSAGES).usage


def test_an_answer_that_is_late_is_a_504(held: type[_HeldRuntime]) -> None:
    """Fails if a hanging target hangs its clients."""
    limits = LimitsSpec(timeout_s=0.2)
    with serving({"table": _replica(limits)}, limits) as address:
        body = {"model": "table", "messages": _MESSAGES}
        response = requests.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        held.let.set()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
