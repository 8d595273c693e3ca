"""What only a GPU can show of the hf runtime. Run by `make test-gpu`; measured figures go into docs/lab-notes.md."""

import pytest
import torch
from choicespec.measuring.lossless import first_divergence
from choicespec.records import Request
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Autoregressive, Ngram
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import open_task


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runtime(request: pytest.FixtureRequest) -> HfRuntime:
    assert torch.cuda.is_available(), "tests/gpu need a CUDA device"
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = PairSpec.model_validate({"target": {"model": "smollm2", "dtype": request.param}, "gpus": 1})
    opened = HfRuntime(HfRuntimeSpec(), pair)
    opened.load()
    return opened


def test_ngram_output_is_plain_decodings(runtime: HfRuntime) -> None:
    """In float32 every prompt must match; in bfloat16 outputs may part at near-ties only."""
    prompts = open_task(ToolCall(limit=32, max_new_tokens=96)).prompts(runtime.tokenizer, runtime.context_tokens)
    found = []
    for request in prompts.requests:
        plain, ngram = runtime.generate(request, Autoregressive()), runtime.generate(request, Ngram())
        found.append(first_divergence(request, plain, ngram, runtime.top2_margin))
    diverged = [d for d in found if d is not None]
    if runtime.model.dtype == torch.float32:
        assert diverged == []
    assert all(d.top2_margin < 0.5 for d in diverged)


def test_the_device_is_named(runtime: HfRuntime) -> None:
    """A figure without its GPU's name cannot be compared with anything."""
    assert runtime.device == torch.cuda.get_device_name()
    trace = runtime.generate(Request("r", tuple(runtime.tokenizer.encode("Hello")), 4), Autoregressive())
    assert len(trace.output_ids) <= 4
