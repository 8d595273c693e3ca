"""A union at the seam to vLLM's model runner: drafts as it hands them over, logits as its drafter computes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from choicespec.runtimes.vllm_drafter import VllmDrafter
from choicespec.runtimes.vllm_proposer import ChoiceProposer
from choicespec.spec.method import Choice
from integration.small_checkpoints import save_checkpoint, small_llama
from integration.test_vllm_proposer import CYCLE, Runner, asked, made

UNION = Choice(block_length=8, drafters=("d",), min_survival=0.0)
NEW = tuple(range(60, 100))  # of which no candidate knows anything
DRAFT = tuple(range(200, 208))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), small_llama())


class Drafting:
    """The model of vLLM's drafter: in every pass each row's likeliest token has the probability that it is told."""

    def __init__(self) -> None:
        self.passes_KN: list[list[float]] = []

    def compute_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        probabilities_N = torch.tensor(self.passes_KN.pop(0))
        rest_N = (1 - probabilities_N) / 3
        return torch.stack([rest_N, probabilities_N, rest_N, rest_N], dim=-1).log() + 5.0


class Union(NamedTuple):
    """A proposer beside a drafter, in a runner."""

    proposer: ChoiceProposer
    runner: Runner
    model: Drafting

    def step(self, texts: Mapping[str, Sequence[int]], sure: Mapping[str, float]) -> list[list[int]]:
        """End a step: vLLM's drafter has drafted ``DRAFT`` for each request, a pass a token, so sure of each."""
        batch = self.runner.input_batch = SimpleNamespace(
            req_ids=list(texts),
            num_computed_tokens_cpu=np.zeros(8, np.int32),
            token_ids_cpu=np.zeros((len(texts), 256), np.int32),
            num_tokens_no_spec=np.array([len(text) for text in texts.values()]),
        )
        for row, text in enumerate(texts.values()):
            batch.token_ids_cpu[row, : len(text)] = text
        self.model.passes_KN += [[sure[name] for name in texts] for _ in DRAFT]
        for _ in DRAFT:
            self.model.compute_logits(torch.zeros(len(texts), 4))
        return self.proposer.improve([list(DRAFT) for _ in texts])


@pytest.fixture
def union(checkpoint: Path) -> Union:
    proposer, runner, model = made(checkpoint, UNION), Runner(), Drafting()
    proposer.attach(runner)
    proposer.drafter.watch(model)
    return Union(proposer, runner, model)


def test_each_request_gets_the_better_of_its_candidate_and_its_draft(union: Union) -> None:
    """Fails if one of the two is always taken, or a row is given another's draft, probabilities or text."""
    union.runner.add("known", asked("known", CYCLE * 3))
    union.runner.add("new", asked("new", NEW))
    union.runner.add("sure", asked("sure", CYCLE * 3))
    texts = {"known": (*CYCLE * 3, CYCLE[0]), "new": (*NEW, 7), "sure": (*CYCLE * 3, CYCLE[0])}
    found = union.step(texts, {"known": 0.3, "new": 0.6, "sure": 0.999})
    assert found == [list(CYCLE[1:9]), list(DRAFT), list(DRAFT)]
    sources = {name: drafted.source for name, drafted in union.proposer.drafted().items()}
    assert sources == {"known": "prompt", "new": "d", "sure": "d"}


def test_a_prompt_that_is_not_done_gets_no_draft(union: Union) -> None:
    """Fails if what vLLM drafts behind a chunk of a prompt is taken for a draft behind the whole, at any step.

    The same where a request that was preempted is computed anew: its text has not grown.
    """
    union.runner.add("r", asked("r", NEW))
    assert union.step({"r": NEW}, {"r": 0.9}) == [[]]
    assert union.step({"r": (*NEW, 7)}, {"r": 0.9}) == [list(DRAFT)]
    assert union.step({"r": (*NEW, 7)}, {"r": 0.9}) == [[]]
    assert union.step({"r": (*NEW, 7, 8)}, {"r": 0.9}) == [list(DRAFT)]


def test_a_drafter_that_was_wrong_is_trusted_less_in_every_request(union: Union) -> None:
    """Fails if a request's view keeps to itself what it has seen of the drafter, or nothing is seen at all."""
    text = (*CYCLE * 3, CYCLE[0])
    for name in ("first", "second"):
        union.runner.add(name, asked(name, CYCLE * 3))
    assert union.step({"first": text, "second": text}, {"first": 0.9, "second": 0.999})[1] == list(DRAFT)
    for number in range(12):
        name = f"wrong {number}"
        union.runner.add(name, asked(name, CYCLE * 3))
        union.step({name: text}, {name: 0.999})
        union.proposer.finish(name, [CYCLE[0], *CYCLE[1:9]])
    assert union.step({"second": (*text, CYCLE[1])}, {"second": 0.999}) == [list(CYCLE[2:10])]


def test_never_beyond_the_output(union: Union) -> None:
    """Fails if time goes into draft tokens that cannot be accepted."""
    union.runner.add("r", asked("r", NEW, max_new_tokens=4))
    assert union.step({"r": (*NEW, 7)}, {"r": 0.9}) == [list(DRAFT[:2])]


def test_one_pass_may_draft_all() -> None:
    """Fails if the probabilities of a drafter such as DFlash go to other tokens or requests."""
    drafter, model = VllmDrafter(), Drafting()
    drafter.watch(model)
    model.passes_KN = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]]
    model.compute_logits(torch.zeros(6, 4))
    first, second = drafter.take([[1, 2, 3], [4, 5, 6]])
    assert first.probabilities == pytest.approx((0.9, 0.8, 0.7))
    assert second.probabilities == pytest.approx((0.6, 0.5, 0.4))


def test_drafts_of_no_pass_have_no_probabilities() -> None:
    """Fails if an earlier step's, or a warm-up's, are given to what vLLM drafts, zeros, without running the drafter."""
    drafter, model = VllmDrafter(), Drafting()
    drafter.watch(model)
    model.passes_KN = [[0.9], [0.8, 0.7]]
    model.compute_logits(torch.zeros(1, 4))
    assert drafter.take([[1]])[0].probabilities == pytest.approx((0.9,))
    assert drafter.take([[0]])[0].probabilities == ()
    model.compute_logits(torch.zeros(2, 4))
    assert drafter.take([[1]])[0].probabilities == ()
