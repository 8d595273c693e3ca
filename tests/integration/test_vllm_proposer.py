"""ChoiceSpec's proposer at the seam to vLLM's model runner: rows, requests that come and go, hidden states."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from choicespec.decoding.step_cost import BatchCosts, StepCosts
from choicespec.records import Document, Request
from choicespec.runtimes.vllm_methods import SETTINGS
from choicespec.runtimes.vllm_proposer import ChoiceProposer, request_arguments
from choicespec.spec.method import Choice
from choicespec.spec.pair import PairSpec
from integration.small_checkpoints import save_checkpoint, small_llama
from transformers import AutoTokenizer

END_ID = 511
CYCLE = tuple(b"the cat sat. ")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), small_llama())


class Runner:
    """The part of vLLM's model runner that a proposer looks at, with one step's batch."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(8, np.int32))
        self.query_start_loc = SimpleNamespace(np=np.zeros(9, np.int32))

    def add(self, name: str, request: Request, ours: bool = True) -> None:
        params = SimpleNamespace(
            extra_args=request_arguments(request) if ours else None,
            max_tokens=request.max_new_tokens,
            stop_token_ids=[END_ID],
        )
        self.requests[name] = SimpleNamespace(sampling_params=params, prompt_token_ids=list(request.prompt_ids))

    def step(self, proposer: ChoiceProposer, texts: Mapping[str, Sequence[int]], new: int = 1) -> list[list[int]]:
        """Propose for a batch of requests, each with its tokens so far, of which the last ``new`` were just settled."""
        self.input_batch.req_ids = list(texts)
        tokens = np.zeros((len(texts), 256), np.int32)
        for row, text in enumerate(texts.values()):
            tokens[row, : len(text)] = text
        lengths = np.array([len(text) for text in texts.values()])
        return proposer.propose([list(text[-new:]) for text in texts.values()], lengths, tokens)


def made(checkpoint: Path, method: Choice, most: int = 8, gpus: int = 0, **config: Any) -> ChoiceProposer:
    pair = PairSpec.model_validate({"target": {"model": str(checkpoint)}, "gpus": gpus})
    asked = {"pair": pair.model_dump(mode="json"), "method": method.model_dump(mode="json")}
    return ChoiceProposer(
        SimpleNamespace(
            additional_config={SETTINGS: asked},
            speculative_config=SimpleNamespace(num_speculative_tokens=most),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            model_config=SimpleNamespace(
                model=str(checkpoint), dtype=torch.float32, hf_config=SimpleNamespace(to_dict=lambda: config)
            ),
        )
    )


WHOLE = Choice(block_length=8, min_survival=0.0)


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def proposer(checkpoint: Path, runner: Runner) -> ChoiceProposer:
    found = made(checkpoint, WHOLE)
    found.attach(runner)
    return found


def asked(name: str, prompt: Sequence[int], max_new_tokens: int = 64) -> Request:
    return Request(name, tuple(prompt), max_new_tokens)


def test_requests_of_a_batch_do_not_see_each_other(proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if one view serves all rows, or rows are mixed up where the batch is reordered."""
    cat, dog = CYCLE * 3, tuple(b"a dog ran off; ") * 3
    runner.add("c", asked("c", cat))
    runner.add("d", asked("d", dog))
    assert runner.step(proposer, {"c": cat, "d": dog}) == [list(CYCLE[:8]), list(b"a dog ra")]
    more = {"d": (*dog, *b"a "), "c": (*cat, *b"the")}
    assert runner.step(proposer, more, new=2) == [list(b"dog ran "), list(b" cat sat")]


def test_a_preempted_request_goes_on_where_it_was(proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if a request that is out of the batch for a while is forgotten, or takes tokens twice."""
    cat, dog = CYCLE * 3, tuple(b"a dog ran off; ") * 3
    runner.add("c", asked("c", cat))
    runner.add("d", asked("d", dog))
    runner.step(proposer, {"c": cat, "d": dog})
    runner.step(proposer, {"d": (*dog, ord("a"))})
    assert runner.step(proposer, {"c": (*cat, ord("t"))}) == [list(CYCLE[1:9])]
    assert proposer.drafted()["c"].source == "prompt"


def test_a_request_that_is_aborted_is_forgotten(proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if state grows with every request that nobody waits for."""
    runner.add("c", asked("c", CYCLE * 3))
    runner.step(proposer, {"c": CYCLE * 3})
    del runner.requests["c"]
    runner.step(proposer, {})
    assert proposer.drafted() == {}


def test_an_output_helps_later_requests_and_those_beside(proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if what is learnt stays in the view of the request that it was learnt from."""
    first, second = tuple(b"?? the"), tuple(b"!! the")
    runner.add("1", asked("1", first))
    runner.add("2", asked("2", second))
    assert runner.step(proposer, {"1": first, "2": second}) == [[], []]
    proposer.finish("1", tuple(b"!! the cat sat on"))
    del runner.requests["1"]
    assert runner.step(proposer, {"2": (*second, ord(" "))}) == [list(b"cat sat ")]


def test_the_repository_is_looked_into(checkpoint: Path, proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if a task's documents do not reach the engine."""
    proposer.use_repository([Document("a.py", "def area(width, height):")])
    encode = AutoTokenizer.from_pretrained(checkpoint).encode
    prompt = encode("x = 1; def area(")
    runner.add("1", asked("1", prompt))
    assert runner.step(proposer, {"1": prompt}) == [encode("width, h")]


def test_never_more_than_k_nor_beyond_the_length(checkpoint: Path, runner: Runner) -> None:
    """Fails if vLLM is given more than its buffers hold, or time goes into tokens that cannot be accepted."""
    proposer = made(checkpoint, Choice(block_length=16, min_survival=0.0), most=5)
    proposer.attach(runner)
    runner.add("long", asked("long", CYCLE * 3))
    runner.add("short", asked("short", CYCLE * 3, max_new_tokens=4))
    runner.add("last", asked("last", CYCLE * 3, max_new_tokens=1))
    text = (*CYCLE * 3, ord("t"))
    drafts = runner.step(proposer, {"long": text, "short": text, "last": text})
    assert [len(draft) for draft in drafts] == [5, 2, 0]


def test_nothing_is_drafted_behind_an_end_nor_for_strangers(proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if a finished output costs a search, or a request without our settings ends the engine."""
    runner.add("ended", asked("ended", CYCLE * 3))
    runner.add("other", asked("other", CYCLE * 3), ours=False)
    assert runner.step(proposer, {"ended": (*CYCLE * 3, END_ID), "other": CYCLE * 3}) == [[], []]


def test_a_prompt_that_is_not_done_gets_no_draft(proposer: ChoiceProposer, runner: Runner) -> None:
    """Fails if a chunk of a prompt is taken for the whole."""
    runner.add("c", asked("c", CYCLE * 3))
    runner.input_batch.req_ids = ["c"]
    assert proposer.propose([[]], np.array([5]), np.zeros((1, 256), np.int32)) == [[]]


@pytest.mark.parametrize(("gpus", "fewest"), [(0, 8), (1, 1)])
def test_linear_attention_is_never_left_without_a_draft(
    checkpoint: Path, runner: Runner, gpus: int, fewest: int
) -> None:
    """Fails if a step that leaves such a target's state wrong can come about, before the last token too."""
    proposer = made(checkpoint, WHOLE, gpus=gpus, layer_types=["linear_attention", "full_attention"])
    proposer.attach(runner)
    nothing_known = tuple(range(60, 80))
    runner.add("r", asked("r", nothing_known))
    assert runner.step(proposer, {"r": nothing_known}) == [[nothing_known[-1]] * fewest]
    assert proposer.drafted()["r"].source == "guard"
    runner.add("last", asked("last", CYCLE * 3, max_new_tokens=4))
    drafts = [runner.step(proposer, {"last": (*CYCLE * 3, *CYCLE[:settled])})[0] for settled in (1, 2, 3, 4)]
    assert [len(draft) for draft in drafts] == [max(2, fewest), max(1, fewest), fewest, 0]
    assert drafts[0][:2] == list(CYCLE[1:3])


def test_drafts_are_shorter_where_a_full_pass_is_dear(checkpoint: Path, runner: Runner) -> None:
    """Fails if a batch drafts as a request alone does, or the number of requests does not reach the costs."""
    alone, dear = StepCosts((1, 9), (10.0, 11.0)), StepCosts((1, 9), (11.0, 400.0))
    proposer = made(checkpoint, Choice(block_length=8))
    proposer.attach(runner)
    proposer.use_step_costs(BatchCosts(alone, dear, 2))
    for name in ("a", "b"):
        runner.add(name, asked(name, CYCLE * 3))
    (single,) = runner.step(proposer, {"a": CYCLE * 3})
    _, shared = runner.step(proposer, {"a": (*CYCLE * 3, ord("t")), "b": CYCLE * 3})
    assert len(single) > len(shared)
