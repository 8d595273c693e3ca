"""A model verifies a tree as it would verify each of its paths, and keeps what a chain would have left behind."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.sampling import Sampler, greedy
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.records import Request, Sampling, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Autoregressive, Choice
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from contracts.guided_trees import GuidedTrees
from contracts.lossless import assert_lossless
from integration.small_checkpoints import save_checkpoint, small_hybrid, small_llama

PROMPT = (5, 9, 2, 7, 7, 1)
# anchor - 30 - 80 - 40
#        |    - 60
#        - 31 - 81
TREE, PARENTS = (30, 31, 80, 60, 81, 40), (0, 0, 1, 1, 2, 3)
PATHS = ((1,), (2,), (1, 3), (1, 4), (2, 5), (1, 3, 6))
REQUESTS = [Request(f"r{i}", (i, 3 * i + 1, 17, 17, i), 24) for i in range(4)]


class _WithAChains(CausalLmTarget):
    """Planted faults: what one argument says of a chain of as many tokens."""

    argument: ClassVar[str]

    def _tree(self, parents: Sequence[int]) -> dict[str, torch.Tensor]:
        found, chain = super()._tree(parents), super()._tree(range(len(parents)))
        return found | {name: chain[name] for name in found if name == self.argument}


class SeesSiblings(_WithAChains):
    """Planted fault: a token sees all that come before it in the block."""

    argument = "attention_mask"


class PositionsByPlace(_WithAChains):
    """Planted fault: a token's position is its place in the block."""

    argument = "position_ids"


class CompactsWrongRows(CausalLmTarget):
    """Planted fault: the cache keeps the first tokens of the block, whichever were right."""

    def gather(self, places: Sequence[int]) -> None:
        """Nothing is moved."""


def model_with(attention: str) -> Any:
    model = small_llama(initializer_range=0.3)
    if attention == "grouped":
        use_small_blocks(model)
    else:
        model.set_attn_implementation(attention)
    return model


def run(target: CausalLmTarget, request: Request, proposer: Proposer) -> Trace:
    return trace(request, decode(target, proposer, request, StopRule((), request.max_new_tokens, (), str)))


def assert_target_lossless(target: CausalLmTarget) -> None:
    """The check of the tests below; trees of nine tokens, about half of which are right after their parent."""
    plain = {one: run(target, one, AutoregressiveDrafter(Autoregressive())) for one in REQUESTS}

    def by_trees(request: Request) -> Trace:
        said = [*request.prompt_ids, *plain[request].output_ids, 0]
        return run(target, request, GuidedTrees(lambda text: said[min(len(text), len(said) - 1)], 9, 512, 0.6))

    assert_lossless(REQUESTS, lambda request: plain[request], by_trees)
    assert max(step.accepted for step in by_trees(REQUESTS[0]).steps) > 1, "or this says nothing"


@pytest.mark.parametrize("attention", ["grouped", "sdpa", "eager"])
def test_trees_give_plain_decodings_output(attention: str) -> None:
    """Fails if any way of attention reads the mask otherwise."""
    assert_target_lossless(CausalLmTarget(model_with(attention)))


def test_trees_draw_the_tokens_that_plain_decoding_draws() -> None:
    """Fails if a token of a tree is drawn for its place in the block, not for its place in the text."""
    target = CausalLmTarget(model_with("grouped"))
    target.choose = Sampler(Sampling(1.0, 0.9, 3))
    assert_target_lossless(target)


@pytest.mark.parametrize("fault", [SeesSiblings, PositionsByPlace, CompactsWrongRows])
def test_a_faulty_target_is_caught(fault: Callable[[Any], CausalLmTarget]) -> None:
    """The planted faults."""
    with pytest.raises(AssertionError, match="not lossless"):
        assert_target_lossless(fault(model_with("grouped")))


@pytest.mark.parametrize("path", PATHS)
def test_what_stays_is_what_a_chain_leaves_behind(path: tuple[int, ...]) -> None:
    """Fails if logits, cache entries or hidden states of a path are those of another, or of another position."""
    found, expected = (CausalLmTarget(small_llama().double()) for _ in range(2))
    logits: list[torch.Tensor] = []

    def choose(logits_TV: torch.Tensor, positions: Sequence[int]) -> list[int]:
        logits.append(logits_TV)
        return greedy(logits_TV, positions)

    taps = []
    for target in (found, expected):
        target.choose = choose
        target.watch(2)
        taps.append(target.tap([1, 3]))
        target.prefill(PROMPT)
    places = [0, *path]
    block = (11, *TREE)
    found.verify(block, PARENTS)
    found.gather(places)
    expected.verify([block[place] for place in places])
    for target in (found, expected):
        target.keep(len(places))
    torch.testing.assert_close(logits[2][places], logits[3])
    torch.testing.assert_close(found.hidden_states(2), expected.hidden_states(2))
    torch.testing.assert_close(taps[0].read(), taps[1].read())
    for one, other in zip(found._cache.layers, expected._cache.layers, strict=True):
        assert one.length == other.length == len(PROMPT) + len(places)
        torch.testing.assert_close(one.keys[:, :, : one.length], other.keys[:, :, : one.length])
        torch.testing.assert_close(one.values[:, :, : one.length], other.values[:, :, : one.length])
    for target in (found, expected):
        target.verify([7, 8])
    torch.testing.assert_close(logits[4], logits[5])


def test_a_runtime_runs_trees(tmp_path: Path) -> None:
    """Fails if a method's width does not reach its proposer, or if costs are not known for as many tokens as a tree
    may have."""
    pair = PairSpec(target=TargetSpec(model=str(save_checkpoint(tmp_path, small_llama()))))
    runtime = HfRuntime(HfRuntimeSpec(threads=1), pair)
    requests = [Request(name, tuple(b"one two three one two four one two"), 24) for name in ("first", "second")]
    runtime.generate(requests[0], Choice())
    for method in (Choice(width=3), Choice(width=3, min_survival=0.0)):
        for request in requests:  # the second finds the first one's output, which is its own
            found = runtime.generate(request, method)
            assert found.output_ids == runtime.generate(request, Autoregressive()).output_ids
        assert any(step.accepted for step in found.steps)
    assert [costs.tokens[-1] for costs in runtime._costs.values()] == [33]


def test_a_target_with_one_state_refuses(tmp_path: Path) -> None:
    """Fails if linear attention, whose state follows one path, is run wrong; or a tree's row measured of a chain."""
    pair = PairSpec(target=TargetSpec(model=str(save_checkpoint(tmp_path, small_hybrid()))))
    assert "leave width out, and the best draft is verified as a chain" in str(HfRuntime.refusal(pair, Choice(width=2)))
    assert HfRuntime.refusal(pair, Choice()) is None
