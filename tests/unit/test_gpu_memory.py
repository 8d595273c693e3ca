"""What trials take of a GPU, against the sizes of published files and against counts by hand."""

from typing import Any

import pytest
from choicespec.errors import CheckpointError
from choicespec.runtimes.gpu_memory import describe, trial_memory, worker_bytes
from choicespec.spec.experiment import TrialSpec

GB = 1e9
DFLASH2 = {"kind": "dflash2", "model": "z-lab/Qwen3.8-27B-DFlash2"}


def trial(method: dict[str, Any], **changes: Any) -> TrialSpec:
    """A trial of Qwen3.8-27B, with parts of it changed."""
    target = {"model": "Qwen/Qwen3.8-27B", "dtype": "bfloat16", **changes.pop("target", {})}
    content = {
        "pair": {"target": target, "drafters": {"block": DFLASH2, "mtp": {"kind": "mtp"}}, "gpus": 4},
        "runtime": {"kind": "hf"},
        "task": {"kind": "tool_call", "context_tokens": 16384 - 64, "max_new_tokens": 64},
        "method": method,
    }
    return TrialSpec.model_validate(content | changes)


PLAIN = {"kind": "autoregressive"}
BLOCK = {"kind": "draft", "drafter": "block", "num_draft_tokens": 7}
MTP = {"kind": "draft", "drafter": "mtp", "num_draft_tokens": 3}
UNION = {"kind": "choice", "drafters": ["mtp", "block"]}


def test_weights_are_those_of_the_published_files() -> None:
    """The bf16 GGUF of the same model, its MTP layer included, has 54.66 GB. Fails if a part of the model is left out,
    or counted twice."""
    weights = trial_memory(trial(PLAIN)).target_bytes + trial_memory(trial(MTP)).drafter_bytes
    assert weights / GB == pytest.approx(54.66, abs=0.05)


def test_quantisation_leaves_embedding_and_head() -> None:
    """The official FP8 checkpoint has 30.9 GB, 0.9 of them for images. Fails if everything is taken for eight bits."""
    fp8 = trial_memory(trial(PLAIN, target={"model": "Qwen/Qwen3.8-27B-FP8", "quantization": "fp8"}))
    assert fp8.target_bytes / GB == pytest.approx(29.7, abs=0.5)
    nf4 = trial_memory(trial(PLAIN, target={"quantization": "nf4"}))
    ends = 2 * 248320 * 5120 * 2
    assert nf4.target_bytes == pytest.approx(ends + (fp8.target_bytes - ends) * 4.5 / 8)


def test_the_cache_is_that_of_the_layers_that_keep_one() -> None:
    """By hand: 16 of 64 layers keep 4 heads of 256 numbers twice in 16 bits, 48 keep a state of 48 x 128 x 128."""
    states = 48 * 48 * 128 * 128 * 4
    assert trial_memory(trial(PLAIN)).cache_bytes == 16 * 4 * 256 * 2 * 2 * 16384 + states


def test_a_tensor_parallel_target_is_split_and_a_given_cache_is_not() -> None:
    """Fails if a row of four GPUs is said to need all of its weights on each, or vLLM's cache is counted by tokens."""
    runtime = {"kind": "vllm", "kv_cache_gib": 3.0}
    whole, split = (trial_memory(trial(BLOCK, target={"tensor_parallel": n}, runtime=runtime)) for n in (1, 4))
    assert split.target_bytes == whole.target_bytes / 4
    assert split.cache_bytes == whole.cache_bytes == 3 * 2**30
    assert split.total_bytes == sum(split)


def test_a_worker_holds_what_stays_up() -> None:
    """Fails if transformers is said to hold its target twice, or a runtime with a process a method holds it once."""
    hf = [trial(BLOCK), trial(UNION)]
    one = trial_memory(trial(UNION))
    assert worker_bytes(hf) == pytest.approx(one.total_bytes)
    plain, block, mtp = (trial(method, runtime={"kind": "vllm", "engines": 2}) for method in (PLAIN, BLOCK, MTP))
    assert trial_memory(mtp).total_bytes < trial_memory(block).total_bytes
    assert worker_bytes([block]) == trial_memory(plain).total_bytes + trial_memory(block).total_bytes
    assert worker_bytes([block, mtp]) == trial_memory(mtp).total_bytes + trial_memory(block).total_bytes
    alone = trial(BLOCK, runtime={"kind": "vllm", "engines": 1})
    assert worker_bytes([alone]) == trial_memory(alone).total_bytes


def test_what_is_not_known_is_said() -> None:
    """Fails if a checkpoint that nobody described counts as nothing."""
    with pytest.raises(CheckpointError, match="'a/b' is not at hand, so what it takes is not known"):
        describe("a/b")
