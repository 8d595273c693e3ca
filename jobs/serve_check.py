"""Check what is served, over HTTP, on the embedded default: ``python -m jobs.serve_check``.

Starts a Ray and the application, then checks, in this order: that answers are plain decoding's on held-out prompts;
what HTTP and Ray Serve add to the decode time; and that under many clients, of which some go away, with a replica
killed and a champion exchanged meanwhile, every answer is whole and right, or a clean error.
"""

import argparse
import json
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import openai
import psutil
from choicespec.cluster.connect import ray_session
from choicespec.errors import ChoiceSpecError
from choicespec.intervals import ratio_of_sums, share
from choicespec.records import Estimate
from choicespec.serving.app import build
from choicespec.serving.champion import SHIPPED, Champion, promote, read_champion
from choicespec.spec.method import Choice
from choicespec.spec.serving import LimitsSpec, ServedSpec, ServingSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.tool_call import ToolCallTask
from choicespec.tracking.registry import ChampionRegistry
from ray import serve

from jobs.terminal import ProgressLines, say

_MODEL = "smollm2"
_CLIENTS = 8
_SHORT_TOKENS = 16
_LONG_TOKENS = 1000  # take half a minute and more
_MOST_FREED_S = 10.0
_MOST_OVERHEAD = 0.1
_LEAVE_SHARE = 0.1  # of the clients' requests
_RETRY_S = 0.5


class Outcome(NamedTuple):
    """How many requests ended in which way."""

    right: int
    left: int
    errors: int
    wrong: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; 0 where everything held, 1 where something did not, 2 when it could not be run."""
    parser = argparse.ArgumentParser(prog="jobs.serve_check", description=__doc__)
    parser.add_argument("--prompts", type=int, default=50, help="held-out prompts compared with plain decoding")
    parser.add_argument("--new-tokens", type=int, default=32, help="decoded for each of them")
    parser.add_argument("--requests", type=int, default=200, help="requests of the clients under faults")
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args(arguments)
    try:
        with TemporaryDirectory() as folder, _served(Path(folder), args.port) as (client, registry):
            match, overhead = _compare(client, args.prompts, args.new_tokens)
            say(f"match with plain decoding: {_shown(match, 100)}%")
            say(f"HTTP and Serve add {_shown(overhead, 100)}% to the decode time, one client")
            freed_s = _free_again_s(client)
            say(f"after a client left an answer of {_LONG_TOKENS} tokens, the next took {freed_s:.1f} s")
            outcome = _under_faults(client, registry, args.requests)
    except ChoiceSpecError as error:
        say(f"error: {error}", "red")
        return 2
    say(f"under faults: {outcome}")
    held = match.value == 1 and overhead.value < _MOST_OVERHEAD and freed_s < _MOST_FREED_S
    held = held and not outcome.wrong and sum(outcome) == args.requests
    return 0 if held else 1


@contextmanager
def _served(folder: Path, port: int) -> Iterator[tuple[openai.OpenAI, ChampionRegistry]]:
    """The application with the shipped champion in a registry of its own."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    registry, shipped = ChampionRegistry(uri), read_champion(SHIPPED)
    name = promote(registry, shipped.trial, shipped.measurement).name
    with ray_session():
        serve.start(http_options={"port": port})
        limits = LimitsSpec(waiting=2 * _CLIENTS)
        spec = ServingSpec(models={_MODEL: ServedSpec(champion=name)}, limits=limits, tracking_uri=uri, follow_s=1.0)
        try:
            serve.run(build(spec))
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0), registry
        finally:
            serve.shutdown()


class Streamed(NamedTuple):
    """A streamed answer: from the request to its last block, here; and how much of that was prefill and decode."""

    text: str
    total_ms: float
    prefill_ms: float
    decode_ms: float


def _stream(client: openai.OpenAI, request: dict[str, Any], plain: bool) -> Streamed:
    """Streams an answer, as the target wrote it."""
    started_s, found = perf_counter(), Streamed("", 0.0, 0.0, 0.0)
    extension = {"choicespec": {"blocks": True, "plain": plain}}
    for chunk in client.chat.completions.create(model=_MODEL, stream=True, extra_body=extension, **request):
        block = (chunk.model_extra or {}).get("choicespec")
        if block is None:
            continue
        text = found.text + "".join(piece["text"] for piece in block["pieces"])
        progress = block["progress"]
        found = Streamed(text, (perf_counter() - started_s) * 1e3, progress["prefill_ms"], progress["decode_ms"])
    return found


def _compare(client: openai.OpenAI, prompts: int, new_tokens: int) -> tuple[Estimate, Estimate]:
    """The share of held-out prompts with plain decoding's answer; and all that is neither prefill nor decode (prompt
    rendering, HTTP, Ray Serve, text), as a share of decode time."""
    progress, same, found = ProgressLines(), 0, list[Streamed]()
    questions = ToolCallTask(ToolCall()).questions[:prompts]
    for done, question in enumerate(questions, start=1):
        tools = [{"type": "function", "function": json.loads(function)} for function in question.functions]
        request = {"messages": json.loads(question.messages), "tools": tools, "max_tokens": new_tokens}
        found.append(_stream(client, request, plain=False))
        same += found[-1].text == _stream(client, request, plain=True).text
        progress(f"compared {done}/{len(questions)}")
    added = ratio_of_sums([s.total_ms - s.prefill_ms - s.decode_ms for s in found], [s.decode_ms for s in found])
    return share(same, len(questions)), added


def _free_again_s(client: openai.OpenAI) -> float:
    """How long a short answer takes after a client went away from a long one."""
    stream = client.completions.create(model=_MODEL, prompt="1, 2, 3, 4,", max_tokens=_LONG_TOKENS, stream=True)
    next(iter(stream))
    stream.close()
    started_s = perf_counter()
    _stream(client, _short("Hello"), plain=False)
    return perf_counter() - started_s


def _under_faults(client: openai.OpenAI, registry: ChampionRegistry, requests: int) -> Outcome:
    """Many clients; after a third of the requests a replica is killed, after two thirds the champion is exchanged."""
    prompts = [f"Count from {start} to {start + 9}." for start in range(10)]
    expected = {prompt: _stream(client, _short(prompt), plain=True).text for prompt in prompts}
    choose, ended, lock = random.Random(0), list[str](), threading.Lock()
    plans = [(choose.choice(prompts), choose.random() < _LEAVE_SHARE) for _ in range(requests)]

    def one(plan: tuple[str, bool]) -> None:
        prompt, leaves = plan
        how = _leave(client, prompt) if leaves else _answer(client, prompt, expected[prompt])
        with lock:
            ended.append(how)
            if len(ended) == requests // 3:
                _kill_a_replica()
            if len(ended) == requests * 2 // 3:
                _exchange(registry)

    with ThreadPoolExecutor(_CLIENTS) as clients:
        list(clients.map(one, plans))
    return Outcome(*(ended.count(how) for how in Outcome._fields))


def _short(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": _SHORT_TOKENS}


def _leave(client: openai.OpenAI, prompt: str) -> str:
    """Goes away after the first chunk."""
    try:
        stream = client.chat.completions.create(model=_MODEL, stream=True, **_short(prompt))
        next(iter(stream))
        stream.close()
    except openai.APIError:
        return "errors"
    return "left"


def _answer(client: openai.OpenAI, prompt: str, expected: str) -> str:
    try:
        return "right" if _stream(client, _short(prompt), plain=False).text == expected else "wrong"
    except openai.APIError:
        threading.Event().wait(_RETRY_S)  # a client that is told to come back does not at once
        return "errors"


def _kill_a_replica() -> None:
    """A replica of the model, of this process's own Ray."""
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        if title.startswith("ray::ServeReplica") and _MODEL in title:
            process.kill()
            return


def _exchange(registry: ChampionRegistry) -> None:
    """Promotes another method; its figures play no part here."""
    shipped: Champion = read_champion(SHIPPED)
    promote(registry, shipped.trial.model_copy(update={"method": Choice(block_length=4)}), shipped.measurement)


def _shown(estimate: Estimate, scale: float) -> str:
    return f"{estimate.value * scale:.1f} [{estimate.low * scale:.1f}, {estimate.high * scale:.1f}] (n={estimate.n})"


if __name__ == "__main__":
    sys.exit(main())
