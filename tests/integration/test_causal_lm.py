"""A model as the loop's target: a prompt that comes again is not computed again, and nothing can tell."""

from typing import Any

import pytest
import torch
from choicespec.decoding.causal_lm import CausalLmTarget
from integration.small_checkpoints import small_hybrid, small_llama

PROMPT, OTHER = (5, 9, 2, 7, 7, 1), (5, 9, 2)
BLOCK = (3, 8, 8)


class Counted:
    """A target of a small model, and the passes that the model has made."""

    def __init__(self, model: Any) -> None:
        self.passes = 0
        self.target = CausalLmTarget(model)
        model.register_forward_hook(self._count)

    def _count(self, *hooked: object) -> None:
        self.passes += 1


@pytest.fixture
def counted() -> Counted:
    return Counted(small_llama())


def _decoded(target: CausalLmTarget, prompt: tuple[int, ...]) -> tuple[int, torch.Tensor, list[int], list[int]]:
    """What the target says of a prompt, of a block of which one token is kept, and of a token after it."""
    first, states = target.prefill(prompt), target.hidden_states(2).clone()
    block = target.verify((first, *BLOCK))
    target.keep(2)
    return first, states, block, target.verify((block[1],))


def test_the_same_prompt_again_takes_no_pass_and_decodes_the_same(counted: Counted) -> None:
    """Fails if something of the decode between is left, or if the pass is repeated."""
    counted.target.watch(2)
    tap = counted.target.tap([1, 2])
    one = _decoded(counted.target, PROMPT)
    assert (counted.passes, counted.target.spared_ms) == (3, 0)
    tapped = tap.read()
    two = _decoded(counted.target, PROMPT)
    assert counted.passes == 5
    assert counted.target.spared_ms > 0
    for expected, found in zip(one, two, strict=True):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=0)
    torch.testing.assert_close(tap.read(), tapped, rtol=0, atol=0)


def test_another_prompt_and_another_layer_take_a_pass(counted: Counted) -> None:
    """Fails if a prompt's beginning passes for it, or if a layer that nobody watched before has no states."""
    counted.target.watch(2)
    for prompt in (PROMPT, OTHER, PROMPT):
        counted.target.prefill(prompt)
    assert counted.passes == 3
    counted.target.watch(1)
    counted.target.prefill(PROMPT)
    assert counted.passes == 4
    assert counted.target.hidden_states(1).shape == counted.target.hidden_states(2).shape


def test_a_pass_that_failed_leaves_no_prompt_behind(counted: Counted) -> None:
    """Fails if the prompt before is taken for the cache's content after another one has overwritten it."""
    counted.target.watch(2)
    one = _decoded(counted.target, PROMPT)
    broken = counted.target._model.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="planted"):
        counted.target.prefill(OTHER)
    broken.remove()
    passes = counted.passes
    two = _decoded(counted.target, PROMPT)
    assert counted.passes == passes + 3
    assert two[2:] == one[2:]


def _fail(*hooked: object) -> None:
    raise RuntimeError("planted")


def test_a_recurrent_state_is_computed_again() -> None:
    """Fails if a state that cannot be cut back to the prompt passes for the prompt's."""
    counted = Counted(small_hybrid())
    counted.target.watch(2)
    one, two = (_decoded(counted.target, PROMPT) for _ in range(2))
    assert (counted.passes, counted.target.spared_ms) == (6, 0)
    assert two[2:] == one[2:]
