"""Targets with Gated DeltaNet layers: a rejected draft leaves nothing behind, and the checks see it where it does."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.decoding import linear_attention
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.linear_attention import GatedDeltaState
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.errors import Unsupported
from choicespec.records import Proposal, Request, Trace
from choicespec.runtimes.checkpoints import identify
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.runtime import check_supported
from choicespec.spec.method import Autoregressive, Choice, Ngram, TransformersGenerate
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from contracts.lossless import assert_lossless
from integration.small_checkpoints import HYBRIDS, hybrid_settings, save_checkpoint, small_hybrid, with_memory
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_VOCABULARY = 512
_REQUESTS = [
    Request(f"r{index}", tuple(random.Random(index).choices(range(_VOCABULARY), k=tokens)), max_new_tokens=40)
    for index, tokens in enumerate((2, 30, 90))  # shorter than the convolution's window; longer than a chunk
]


class KnowingDrafter:
    """Drafts k tokens of an output that it knows, each of them right with the same probability."""

    def __init__(self, outputs: dict[str, tuple[int, ...]], k: int, probability: float) -> None:
        self._outputs, self._k, self._probability = outputs, k, probability

    def begin(self, request: Request) -> None:
        self._random = random.Random(0)
        self._text = (*request.prompt_ids, *self._outputs[request.request_id])

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        known = self._text[len(token_ids) :][: min(self._k, limit)]
        drafted = [i if self._random.random() < self._probability else (i + 1) % _VOCABULARY for i in known]
        return Proposal(tuple(drafted), "known" if drafted else "")

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


def _run(target: CausalLmTarget, request: Request, proposer: Proposer) -> Trace:
    return trace(request, decode(target, proposer, request, StopRule((), request.max_new_tokens, (), str)))


def _assert_lossless(model: Any, probability: float) -> list[Trace]:
    """The check of every test of outputs: several requests after each other on one target."""
    target = CausalLmTarget(model)
    plain = {r: _run(target, r, AutoregressiveDrafter(Autoregressive())) for r in _REQUESTS}
    drafter = KnowingDrafter({r.request_id: t.output_ids for r, t in plain.items()}, k=8, probability=probability)
    found = {r: _run(target, r, drafter) for r in _REQUESTS}
    assert_lossless(_REQUESTS, plain.__getitem__, found.__getitem__)
    return list(found.values())


@pytest.fixture(scope="module", params=list(HYBRIDS))
def model(request: pytest.FixtureRequest) -> Any:
    """One of each family, as the runtime runs it on the CPU."""
    made = small_hybrid(request.param)
    use_small_blocks(made)
    return made


@pytest.mark.parametrize("probability", [0.0, 0.5, 0.8, 1.0])
def test_every_output_is_plain_decodings(model: Any, probability: float) -> None:
    """Fails if a state keeps anything of a rejected token, loses a kept one, or if a block decides otherwise than its
    tokens one by one."""
    traces = _assert_lossless(model, probability)
    steps = [step for found in traces for step in found.steps]
    rate = sum(step.accepted for step in steps) / sum(step.proposed for step in steps)
    assert rate == 0 if probability == 0 else rate > probability / 4  # the drafts are as good as they should be


def test_plain_decoding_is_what_the_whole_text_gives(model: Any) -> None:
    """Fails if baseline and method share a fault: the model, given all of the text and no cache, decides alike."""
    target = CausalLmTarget(model)
    for request in _REQUESTS:
        output_ids = _run(target, request, AutoregressiveDrafter(Autoregressive())).output_ids
        text = torch.tensor([[*request.prompt_ids, *output_ids]])
        with torch.inference_mode():
            logits_TV = model(text, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
        assert logits_TV.argmax(dim=-1).tolist() == list(output_ids)
        assert len(set(output_ids)) > 10  # not one token for ever


@pytest.mark.parametrize("kept", range(7))
def test_the_state_after_a_rollback_is_that_of_the_kept_tokens_one_by_one(model: Any, kept: int) -> None:
    """Fails if a state is wrong by less than what turns a choice; 0 tokens are kept where costs are measured."""
    prompt, block = _REQUESTS[1].prompt_ids, (5, 4, 3, 2, 1, 0)
    found, expected = CausalLmTarget(model), CausalLmTarget(model)
    found.prefill(prompt)
    found.verify(block)
    found.keep(kept)
    expected.prefill(prompt)
    for token_id in block[:kept]:
        expected.verify([token_id])
        expected.keep(1)
    for ours, theirs in zip(_states(found), _states(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found.verify([7, 8]) == expected.verify([7, 8])


def _states(target: CausalLmTarget) -> list[torch.Tensor]:
    """Windows and recurrent states of all layers."""
    layers = [layer for layer in target._cache.layers if isinstance(layer, GatedDeltaState)]
    assert len(layers) == 2
    return [state for layer in layers for state in (layer.conv_states[0], layer.recurrent_states[0].state_BHDE)]


def _crop_only(states: Sequence[GatedDeltaState], length: int, rule: Any) -> None:
    """Planted fault: keys and values are cut, the states stay as the block left them."""
    if length == 0:
        for state in states:
            state.clear()


def _window_only(befores: Sequence[Any], tokens: int, rule: Any) -> list[torch.Tensor]:
    """Planted fault: the window is taken back, the recurrence stays where the block began."""
    return [before.state_BHDE for before in befores]


def _old_window(state: GatedDeltaState, tokens: int, state_BHDE: torch.Tensor) -> None:
    """Planted fault: the recurrence is taken back, the window is not."""
    state.tokens = tokens
    state.recurrent_states[0] = linear_attention._Recurrence(state_BHDE)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        ("choicespec.decoding.cache", "roll_back", _crop_only),
        ("choicespec.decoding.linear_attention", "_replay", _window_only),
        ("choicespec.decoding.linear_attention.GatedDeltaState", "restore", _old_window),
    ],
)
def test_a_rollback_that_leaves_something_is_caught(
    model: Any, monkeypatch: pytest.MonkeyPatch, place: str, name: str, fault: Callable[..., Any]
) -> None:
    """The planted faults: the test of outputs must see each of them, at drafts of any quality but perfect ones."""
    monkeypatch.setattr(f"{place}.{name}", fault)
    for probability in (0.0, 0.5, 0.8):
        with pytest.raises(AssertionError, match="not lossless"):
            _assert_lossless(model, probability)


def test_only_a_verified_block_is_taken_back(model: Any) -> None:
    """Fails if a state of which nothing was kept is silently taken for another one."""
    target = CausalLmTarget(model)
    target.prefill([1, 2, 3])
    for _ in range(2):
        with pytest.raises(ValueError, match="only a verified block"):
            target._cache.keep(2)
        target.verify([4])
        target.keep(1)


class TestOnTheRuntime:
    """A checkpoint as Qwen3.5's are published: with a tower for images, of which the runtime takes the text model."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
        config = AutoConfig.for_model(
            "qwen3_5",
            text_config=hybrid_settings("qwen3_5_text"),
            vision_config=vision | {"num_position_embeddings": 16},
        )
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        return save_checkpoint(tmp_path_factory.mktemp("qwen3_5"), with_memory(model))

    @pytest.fixture(scope="class")
    def runtime(self, folder: Path) -> HfRuntime:
        return HfRuntime(HfRuntimeSpec(threads=2), _pair(folder))

    def test_every_method_decodes_as_plain_decoding_does(self, runtime: HfRuntime) -> None:
        """Fails if a proposer of the runtime, or the measuring of its costs, leaves something in a state."""
        requests = [request._replace(request_id=f"{request.request_id}-{i}") for request in _REQUESTS for i in "ab"]
        plain = {request: runtime.generate(request, Autoregressive()) for request in requests}
        for method in (Ngram(), Choice(min_survival=0.0), Choice()):
            found = {request: runtime.generate(request, method) for request in requests}
            assert_lossless(requests, plain.__getitem__, found.__getitem__)
            assert any(step.proposed > step.accepted for t in found.values() for step in t.steps)
            if isinstance(method, Choice):  # it knows the output of the same prompt before
                assert any(step.accepted for t in found.values() for step in t.steps)

    def test_the_text_model_is_the_checkpoints(self, runtime: HfRuntime, folder: Path) -> None:
        """Fails if weights are left at random because their names in the file have another prefix."""
        runtime.load()
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        text = torch.tensor([_REQUESTS[1].prompt_ids])
        with torch.inference_mode():
            torch.testing.assert_close(runtime.model(text).logits, whole(text).logits, rtol=1e-4, atol=1e-4)

    def test_its_identity_is_that_of_its_text_model(self, runtime: HfRuntime, tmp_path: Path) -> None:
        """Fails if a scorer trained beside one copy of the language model is refused beside the other."""
        runtime.load()
        alone = save_checkpoint(tmp_path, AutoModelForCausalLM.from_pretrained(runtime._checkpoint))
        assert identify(str(alone), TargetSpec(model=str(alone))) == runtime.identity
        assert (runtime.identity.hidden_size, runtime.identity.num_layers) == (64, 3)

    def test_transformers_own_verification_is_refused_before_anything_is_loaded(self, folder: Path) -> None:
        """Fails if a peer that cannot run is found out at its first request; plain generate can run."""
        check_supported(HfRuntimeSpec(), _pair(folder), TransformersGenerate())
        with pytest.raises(Unsupported, match="verifies no drafts on a target with linear attention"):
            check_supported(HfRuntimeSpec(), _pair(folder), TransformersGenerate(prompt_lookup_num_tokens=8))

    def test_transformers_generate_says_the_same(self, runtime: HfRuntime) -> None:
        """Fails if the loop's plain decoding is an invention, or if noting what the rules read changes the library."""
        for request in _REQUESTS:
            peer = runtime.generate(request, TransformersGenerate())
            assert peer.output_ids == runtime.generate(request, Autoregressive()).output_ids


def _pair(folder: Path) -> PairSpec:
    return PairSpec(target=TargetSpec(model=str(folder)))


def test_a_layer_that_cannot_be_rolled_back_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Fails if a target of another linear attention passes for one of these, or if only loading finds it out."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    settings = {"num_hidden_layers": 3, "layer_types": kinds, "hidden_size": 64, "num_attention_heads": 4}
    AutoConfig.for_model("minimax", **settings).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=r"a minimax that has linear_attention layers.*qwen3_5_text"):
        check_supported(HfRuntimeSpec(), _pair(tmp_path), Ngram())
