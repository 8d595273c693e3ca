"""Every published trial's path through vLLM, on a small random model of the same architecture, on the CPU.

Beside `make test`, by `make test-vllm-paths`: a method is an engine, and an engine some ten seconds of two cores.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from choicespec.errors import Unsupported
from choicespec.measuring.lossless import first_divergence
from choicespec.records import Request
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.vllm import VllmRuntime
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec, VllmRuntimeSpec
from integration.small_published import published_trials
from vllm_paths.small_pairs import qwen3, qwen3_5

STAND_INS = Path(__file__).parents[1] / "integration" / "stand_ins"
REQUEST = Request("r", (*range(40, 90), *range(40, 60)), 40)
WHOLE = Choice(block_length=7, min_survival=0.0)  # ChoiceSpec inside vLLM, of which nothing is published
# The largest margin between two logits that rounding may turn: in bfloat16, those from 16 to 32 are an eighth apart.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}


def _methods(model: str) -> list[MethodSpec]:
    """Those of a target's published trials on vLLM, in all its precisions."""
    found = {t.method for t in published_trials() if t.runtime.kind == "vllm" and model in t.pair.target.model}
    return sorted(found - {Autoregressive()}, key=lambda method: method.label)


@contextmanager
def _opened(pair: PairSpec) -> Iterator[VllmRuntime]:
    runtime = VllmRuntime(VllmRuntimeSpec(threads=2, context_tokens=1024, kv_cache_gib=0.05, engines=2), pair)
    try:
        yield runtime
    finally:
        runtime.close()


def _check(pair: PairSpec, methods: list[MethodSpec], refused: dict[str, str]) -> None:
    """Every method runs, drafts and keeps the output, or is refused beforehand for the reason given."""
    margin = NEAR_TIE[pair.target.dtype]
    with _opened(pair) as runtime:
        plain = runtime.generate(REQUEST, Autoregressive())
        theirs = HfRuntime(HfRuntimeSpec(threads=2), pair).generate(REQUEST, Autoregressive())
        parted = first_divergence(REQUEST, theirs, plain, runtime.top2_margin)
        assert parted is None or parted.top2_margin < margin, f"not the model that transformers reads: {parted}"
        for method in methods:
            reason = runtime.refusal(pair, method)
            if method.label in refused:
                assert refused[method.label] in str(reason)
                continue
            assert reason is None
            found = runtime.generate(REQUEST, method)
            parted = first_divergence(REQUEST, plain, found, runtime.top2_margin)
            assert parted is None or parted.top2_margin < margin, f"{method.label}: {parted}"
            assert any(step.proposed for step in found.steps), method.label


def test_qwen3(tmp_path: Path) -> None:
    """Fails if a published method of the dense target, or a union with its drafter, cannot run or changes outputs."""
    methods = _methods("Qwen3-4B")
    assert {method.kind for method in methods} == {"ngram", "draft"}
    union = WHOLE.model_copy(update={"block_length": 15, "drafters": ("dflash",)})
    _check(qwen3(tmp_path), [*methods, WHOLE, union], {})


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_qwen3_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """The same of the hybrid targets; their images are not looked at, so that a stand-in of torchvision will do."""
    pair = qwen3_5(tmp_path, model_type)
    assert "imports torchvision" in str(VllmRuntime.refusal(pair, Autoregressive()))
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(STAND_INS), os.environ.get("PYTHONPATH", ""))))
    methods = _methods("Qwen3.8-27B" if model_type == "qwen3_5_text" else "Qwen3.8-Flash-Next")
    refused = {method.label: "linear attention" for method in methods if isinstance(method, Ngram)}
    refused |= {m.label: "needs a GPU" for m in methods if isinstance(m, Draft) and m.drafter == "dflash2"}
    union = WHOLE.model_copy(update={"drafters": ("mtp",)})
    _check(pair, [*methods, WHOLE, union], refused)


def test_float32_is_refused_on_linear_attention(tmp_path: Path) -> None:
    """Fails if it is found out by an engine that dies at its first request."""
    pair = qwen3_5(tmp_path, "qwen3_5_text")
    with pytest.raises(Unsupported, match="take bfloat16 alone"), _opened(_in_float32(pair)):
        pass


def _in_float32(pair: PairSpec) -> PairSpec:
    return pair.model_copy(update={"target": pair.target.model_copy(update={"dtype": "float32"})})
