"""The hf runtime on the real embedded default: the outputs are plain decoding's, and the hidden states are right."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.errors import CheckpointError, PromptTooLong, Unsupported
from choicespec.measuring.lossless import first_divergence
from choicespec.records import Request
from choicespec.runtimes.checkpoints import locate
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Autoregressive, Ngram, TransformersGenerate
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import PythonRepo, ToolCall
from choicespec.tasks.prompts import open_task
from contracts.runtime_contract import RuntimeContract

# Repetitive enough for prompt lookup to be right often, and wrong at each number, so that rollback matters.
COUNTING = "".join(f"Item {i}: apple pie and cream\n" for i in range(1, 8)) + "Item"

# Drafts for this one are mostly wrong, so that what rejected tokens leave behind adds up.
WEIGHTS = "".join(f"    total += weights[{i}] * values[{i}]  # term {i}\n" for i in range(8))


def _open(dtype: str) -> HfRuntime:
    pair = PairSpec.model_validate({"target": {"model": "smollm2", "dtype": dtype}})
    return HfRuntime(HfRuntimeSpec(threads=2), pair)


@pytest.fixture(scope="module")
def smollm2() -> HfRuntime:
    runtime = _open("float32")
    runtime.load()
    return runtime


@pytest.fixture(scope="module")
def target(smollm2: HfRuntime) -> CausalLmTarget:
    """A second target on the same weights that keeps hidden states of two layers."""
    second = CausalLmTarget(smollm2.model)
    for layer in (12, 30):
        second.watch(layer)
    return second


def _request(runtime: HfRuntime, text: str, max_new_tokens: int) -> Request:
    return Request("counting", tuple(runtime.tokenizer.encode(text)), max_new_tokens)


class TestHfRuntime(RuntimeContract):
    @pytest.fixture(scope="class")
    def runtime(self, smollm2: HfRuntime) -> HfRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def prompts(self, smollm2: HfRuntime) -> list[tuple[int, ...]]:
        texts = (COUNTING, "The planets are Mercury, Venus, Earth, Mars,")
        return [tuple(smollm2.tokenizer.encode(text)) for text in texts]


@pytest.mark.parametrize("task", [ToolCall(limit=1, max_new_tokens=24), PythonRepo(limit=2, context_tokens=200)])
def test_ngram_output_is_plain_decodings_on_real_tasks(smollm2: HfRuntime, task: ToolCall | PythonRepo) -> None:
    """In float32 a block of tokens decides as single tokens do; a wrong rollback or mask would change some token."""
    for request in open_task(task).prompts(smollm2.tokenizer, smollm2.context_tokens).requests:
        short = request._replace(max_new_tokens=24)
        plain, ngram = smollm2.generate(short, Autoregressive()), smollm2.generate(short, Ngram())
        assert ngram.output_ids == plain.output_ids


def test_ngram_proposes_and_is_accepted(smollm2: HfRuntime) -> None:
    """Equal outputs say nothing about a drafter that never drafts."""
    found = smollm2.generate(_request(smollm2, COUNTING, 32), Ngram())
    assert sum(step.accepted for step in found.steps) > 8
    assert any(step.accepted < step.proposed for step in found.steps)


def test_the_loop_decides_as_transformers_generate_does(smollm2: HfRuntime) -> None:
    """The baseline is nobody's invention: transformers' own greedy generate, with either cache and with its prompt
    lookup."""
    request = _request(smollm2, COUNTING, 24)
    ours = smollm2.generate(request, Autoregressive())
    lookup = TransformersGenerate(prompt_lookup_num_tokens=8)
    for method in (TransformersGenerate(), TransformersGenerate(cache="static"), lookup):
        peer = smollm2.generate(request, method)
        assert peer.output_ids == ours.output_ids
        assert peer.finish_reason == ours.finish_reason
        assert peer.prefill_tokens + sum(step.accepted + 1 for step in peer.steps) == len(peer.output_ids)
        assert (sum(step.proposed for step in peer.steps) > 0) == (method is lookup)


def test_a_stop_string_ends_loop_and_peer_alike(smollm2: HfRuntime) -> None:
    """The peer is timed on the same output only if it ends at the same token."""
    request = _request(smollm2, COUNTING, 32)._replace(stop=("pie and",))
    traces = [smollm2.generate(request, m) for m in (Autoregressive(), Ngram(), TransformersGenerate())]
    assert {t.finish_reason for t in traces} == {"stop"}
    assert len({t.output_ids for t in traces}) == 1


def test_hidden_states_are_those_of_the_last_kept_position(smollm2: HfRuntime, target: CausalLmTarget) -> None:
    """After a partly accepted block, the hidden state must be the last accepted token's, not the block's last."""
    prompt = smollm2.tokenizer.encode(COUNTING)
    anchor = target.prefill(prompt)
    right = target.verify([anchor])[0]
    target.keep(1)
    target.verify([right, 7, 7, 7])
    target.keep(1)
    found = target.hidden_states(12)  # before the model runs again
    with torch.inference_mode():
        every_layer = smollm2.model(torch.tensor([[*prompt, anchor, right]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, every_layer[12][0, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layer", [-1, 0, 31])
def test_a_layer_that_the_target_lacks_is_refused(smollm2: HfRuntime, layer: int) -> None:
    """Fails if layers are counted from 0, or if -1 is the last one: a scorer would read another layer's states."""
    with pytest.raises(ValueError, match=f"hidden layer {layer} is not one of the target's layers 1 to 30"):
        CausalLmTarget(smollm2.model).watch(layer)


def test_a_cache_that_forgets_too_little_is_caught(smollm2: HfRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: one rejected token stays in the cache. The match check must see it."""
    request = _request(smollm2, WEIGHTS, 32)
    plain = smollm2.generate(request, Autoregressive())
    right = RollbackCache.keep
    monkeypatch.setattr(RollbackCache, "keep", lambda self, length: right(self, length + 1 if length else 0))
    faulty = smollm2.generate(request, Ngram())
    found = first_divergence(request, plain, faulty, smollm2.top2_margin)
    assert found is not None
    assert found.top2_margin > 0


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(smollm2: HfRuntime) -> None:
    """Otherwise positions beyond the trained ones would give nonsense silently."""
    request = Request("long", (1,) * 8190, 10)
    with pytest.raises(PromptTooLong, match=r"8190 prompt tokens \+ 10 new tokens exceed .* 8192"):
        smollm2.generate(request, Autoregressive())


def test_bfloat16_runs_and_its_rollback_is_right() -> None:
    """bfloat16 may differ in near-ties only: where the outputs part, the target's margin must be small."""
    runtime = _open("bfloat16")
    request = _request(runtime, COUNTING, 16)
    plain, ngram = runtime.generate(request, Autoregressive()), runtime.generate(request, Ngram())
    found = first_divergence(request, plain, ngram, runtime.top2_margin)
    assert found is None or found.top2_margin < 0.5


def _copy_without_weights(folder: Path, **config: object) -> HfRuntime:
    """A folder with the embedded default's tokenizer and configuration, some of it changed; opened."""
    source = Path(locate("smollm2", None))
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    content = json.loads((source / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return HfRuntime(HfRuntimeSpec(), PairSpec(target=TargetSpec(model=str(folder))))


def test_a_pickled_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    """Fails if weights that can run code when they are read are read at all."""
    runtime = _copy_without_weights(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        runtime.load()


def test_a_target_whose_cache_cannot_be_cut_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """Fails if such a target is decoded with a rollback that is silently wrong for it."""
    layers = ["full_attention"] * 29 + ["sliding_attention"]
    with pytest.raises(Unsupported, match="has sliding_attention layers"):
        _copy_without_weights(tmp_path, model_type="qwen3", layer_types=layers, sliding_window=64)
