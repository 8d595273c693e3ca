"""States at candidates' sources inside vLLM: by request and position whatever a step is of, and the hf runtime's."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from choicespec.records import Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.vllm import VllmRuntime
from choicespec.runtimes.vllm_texts import VllmTexts
from choicespec.scorer.files import save_scorer
from choicespec.scorer.ranker import ScorerRanker
from choicespec.scorer.source_states import StateScale, TextStates
from choicespec.spec.method import Choice
from choicespec.spec.pair import PairSpec, ScorerSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec, VllmRuntimeSpec
from choicespec.spec.task import PythonRepo
from choicespec.tasks.prompts import Prompts, open_task
from integration.job_homes import write_repository
from integration.small_checkpoints import save_checkpoint, small_llama
from integration.test_replay_sources_hf import random_scorer
from integration.test_vllm_proposer import Runner

LAYERS, HIDDEN = 2, 3
SCALE = StateScale(np.full(LAYERS * HIDDEN, 0.25, np.float32), np.full(LAYERS * HIDDEN, 2.0, np.float32))
AGES = np.array([1, 0, 4, 9], np.int32)
SCORED = Choice(selection="scorer", min_survival=0.0)  # verified whole: nothing depends on what a verification costs


class Part(NamedTuple):
    """Of a step: a request's tokens from one position on; those after the first so many are rejected."""

    name: str
    first: int
    tokens: int
    kept: int


STEPS: tuple[tuple[Part, ...], ...] = (
    (Part("a", 0, 6, 6),),
    (Part("b", 0, 11, 11), Part("a", 6, 5, 5)),  # the rest of a prompt, beside another one
    (Part("a", 11, 4, 2), Part("b", 11, 1, 1)),
    (Part("b", 12, 3, 3),),  # a is preempted
    (Part("b", 15, 2, 1), Part("a", 0, 13, 13)),
    (Part("a", 13, 3, 3), Part("b", 16, 1, 1)),
)


def test_states_are_a_requests_own_at_each_place() -> None:
    """Fails if rows of a batch are mixed up, chunks of a prompt or what was preempted do not join, the states of
    rejected tokens stay, or a request that is gone is remembered."""
    dice = torch.Generator().manual_seed(0)
    of_texts = {name: torch.randn(20, LAYERS * HIDDEN, generator=dice) for name in ("a", "b")}
    step_TH = [torch.zeros(64, HIDDEN) for _ in range(LAYERS)]
    runner, texts = Runner(), VllmTexts(step_TH, SCALE)
    runner.requests = dict.fromkeys(of_texts)
    for parts in STEPS:
        at = 0
        runner.input_batch.req_ids = [part.name for part in parts]
        for row, (name, first, count, kept) in enumerate(parts):
            rows_TS = of_texts[name][first : first + count].clone()
            rows_TS[kept:] *= -1  # what is rejected has other states than what takes its place
            for layer, states_TH in enumerate(step_TH):
                states_TH[at : at + count] = rows_TS[:, layer * HIDDEN : (layer + 1) * HIDDEN]
            runner.input_batch.num_computed_tokens_cpu[row] = first
            runner.query_start_loc.np[row : row + 2] = (at, at + count)
            at += count
        texts.take_in(runner)
        for name, first, _, kept in parts:
            whole = TextStates(LAYERS, SCALE)
            whole.put(0, of_texts[name][: first + kept])
            texts.asked = (name, first + kept + 1)
            np.testing.assert_array_equal(texts.cosines(AGES), whole.cosines(AGES, first + kept + 1))
    runner.requests = {}
    runner.input_batch.req_ids = []
    texts.take_in(runner)
    assert not texts._texts


class Served(NamedTuple):
    """A pair with a scorer whose choices hang on the states at candidates' sources, on both runtimes."""

    hf: HfRuntime
    vllm: VllmRuntime
    prompts: Prompts

    def on_hf(self) -> list[list[tuple[int, int, str]]]:
        self.hf.use_repository(self.prompts.repository)
        return [_steps(self.hf.generate(request, SCORED)) for request in self.prompts.requests]


def _steps(trace: Trace) -> list[tuple[int, int, str]]:
    return [(step.proposed, step.accepted, step.source) for step in trace.steps]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pair")
    model = small_llama(vocab_size=256, initializer_range=0.15, head_dim=64)  # it repeats itself; vLLM knows few sizes
    pair = PairSpec(target=TargetSpec(model=str(save_checkpoint(folder / "target", model))))
    save_scorer(folder / "scorer", random_scorer(HfRuntime(HfRuntimeSpec(), pair).identity))
    pair = pair.model_copy(update={"scorer": ScorerSpec(folder=str(folder / "scorer"))})
    hf = HfRuntime(HfRuntimeSpec(threads=1), pair)
    vllm = VllmRuntime(VllmRuntimeSpec(threads=1, context_tokens=1024, kv_cache_gib=0.25, engines=1), pair)
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=20)
    task = PythonRepo(folder=str(repo), limit=4, max_new_tokens=40)
    yield Served(hf, vllm, open_task(task).prompts(hf.tokenizer, hf.context_tokens))
    vllm.close()


def test_the_engine_takes_the_steps_of_the_hf_runtime(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the engine compares other states than the hf runtime; one that compares none, the planted fault, takes
    other steps."""
    expected = served.on_hf()
    served.vllm.use_repository(served.prompts.repository)
    assert [_steps(served.vllm.generate(request, SCORED)) for request in served.prompts.requests] == expected
    made = ScorerRanker.__init__
    monkeypatch.setattr(ScorerRanker, "__init__", lambda self, scorer, state, cosines: made(self, scorer, state))
    assert served.on_hf() != expected
