"""What only a GPU can show of the vLLM runtime: ChoiceSpec with CUDA graphs on. Run by `make test-gpu`."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from choicespec.measuring.lossless import first_divergence
from choicespec.records import Request, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.vllm import VllmRuntime
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, VllmRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import open_task

PLAIN, SCORER = Autoregressive(), Choice(selection="scorer")
WHOLE = Choice(selection="scorer", min_survival=0.0)
UNION = Choice(selection="scorer", drafters=("itself",))  # with the target itself as vLLM's drafter: never wrong
METHODS: tuple[MethodSpec, ...] = (Ngram(num_draft_tokens=8), Choice(), SCORER, UNION)
ITSELF = {"itself": {"kind": "draft_model", "model": "smollm2"}}
PAIR = PairSpec.model_validate({"target": {"model": "smollm2"}, "drafters": ITSELF, "gpus": 1})


@pytest.fixture(scope="module")
def runtime() -> Iterator[VllmRuntime]:
    assert torch.cuda.is_available(), "tests/gpu need a CUDA device"
    spec = VllmRuntimeSpec(context_tokens=4096, kv_cache_gib=2.0, engines=8)
    opened = VllmRuntime(spec, PAIR)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def hf() -> HfRuntime:
    torch.backends.cuda.matmul.allow_tf32 = False
    return HfRuntime(HfRuntimeSpec(), PAIR)


@pytest.fixture(scope="module")
def requests(hf: HfRuntime) -> tuple[Request, ...]:
    return open_task(ToolCall(limit=32, max_new_tokens=64)).prompts(hf.tokenizer, hf.context_tokens).requests


class Rate(NamedTuple):
    """Tokens after the first, and the time that they took."""

    tokens: int
    ms: float

    @property
    def per_s(self) -> float:
        return self.tokens / self.ms * 1e3


def rate_of(traces: list[Trace]) -> Rate:
    return Rate(sum(trace.decode_tokens for trace in traces), sum(trace.decode_ms for trace in traces))


def test_cuda_graphs_are_on(runtime: VllmRuntime) -> None:
    """A figure of eager steps says nothing of vLLM."""
    assert runtime.engine_settings(SCORER)["cuda_graphs"] == "True"
    assert runtime.device == torch.cuda.get_device_name()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_outputs_are_plain_decodings(runtime: VllmRuntime, requests: tuple[Request, ...], method: MethodSpec) -> None:
    """Blocks and single steps run in other kernels: outputs may part at near-ties only."""
    for request in requests:
        plain, found = runtime.generate(request, PLAIN), runtime.generate(request, method)
        parted = first_divergence(request, plain, found, runtime.top2_margin)
        assert parted is None or parted.top2_margin < 1e-3, parted


def test_hidden_states_reach_the_scorer_through_cuda_graphs(
    runtime: VllmRuntime, hf: HfRuntime, requests: tuple[Request, ...]
) -> None:
    """Fails if a replayed graph leaves an earlier step's hidden state where the scorer reads; drafts then differ."""
    same = total = 0
    for request in requests[:8]:
        expected, found = hf.generate(request, WHOLE), runtime.generate(request, WHOLE)
        pairs = list(zip(expected.steps, found.steps, strict=False))
        same += sum((a.proposed, a.accepted, a.source) == (b.proposed, b.accepted, b.source) for a, b in pairs)
        total += max(len(expected.steps), len(found.steps))
    assert same > 0.9 * total


def test_a_union_weighs_vllms_drafter(runtime: VllmRuntime, requests: tuple[Request, ...]) -> None:
    """Fails if its drafts, or the probabilities that its passes under CUDA graphs gave, do not reach ChoiceSpec.

    Then a drafter that is never wrong would be chosen in no step, or be wrong in some.
    """
    steps = [step for request in requests[:8] for step in runtime.generate(request, UNION).steps]
    own = [step for step in steps if step.source == "itself"]
    assert own
    assert sum(step.accepted for step in own) > 0.95 * sum(step.proposed for step in own)


@pytest.mark.parametrize("method", [SCORER, UNION], ids=lambda method: method.label)
def test_four_side_by_side_are_as_alone(
    runtime: VllmRuntime, requests: tuple[Request, ...], method: MethodSpec
) -> None:
    """Fails if rows of a batch are mixed up."""
    together = runtime.generate_together(requests[:8], method)
    for request, trace in zip(requests, together, strict=False):
        parted = first_divergence(request, runtime.generate(request, PLAIN), trace, runtime.top2_margin)
        assert parted is None or parted.top2_margin < 1e-3, parted


def test_choice_is_faster_than_ngram(runtime: VllmRuntime, requests: tuple[Request, ...]) -> None:
    """The issue's figure: at least 1.15 times vLLM's own prompt lookup at batch 1, in alternation."""
    ngram, choice = METHODS[0], SCORER
    traces: dict[MethodSpec, list[Trace]] = {ngram: [], choice: []}
    for request in requests:
        for method in traces:
            traces[method].append(runtime.generate(request, method))
    rates = {method.label: rate_of(found).per_s for method, found in traces.items()}
    assert rates[choice.label] >= 1.15 * rates[ngram.label], rates
