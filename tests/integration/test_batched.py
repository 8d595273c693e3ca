"""A batch records what the loop decodes and sees request by request."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from choicespec.decoding import batched
from choicespec.decoding.batched import record_batch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.loop import decode
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.recordings import Recorded
from choicespec.records import FinishReason, Request
from choicespec.spec.method import Autoregressive
from integration.small_checkpoints import LAYERS, SPREAD, small_hybrid, small_llama
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, OPTConfig

KEPT = (1, LAYERS)
_VOCABULARY = 512


def _requests(*sizes: tuple[int, int]) -> list[Request]:
    """Requests of random tokens, by prompt tokens and new tokens."""
    dice = np.random.default_rng(0)
    return [
        Request(f"r{index}", tuple(dice.integers(0, _VOCABULARY, prompt_tokens).tolist()), new_tokens)
        for index, (prompt_tokens, new_tokens) in enumerate(sizes)
    ]


# Of different lengths, with the longest in the midst; some end before the others.
WIDE = _requests((5, 12), (40, 12), (17, 3), (1, 12), (9, 7))
NARROW = _requests((5, 12), (17, 3), (1, 12), (9, 7))  # a prompt's pass of these is a small block itself


Fault = Callable[[batched._Prompts], batched._Prompts]


class Single(NamedTuple):
    """What the loop, one request at a time, decodes and has at hand.

    Attributes:
        hidden_states: of each layer, a row a token of output: the state that is there when that token is the anchor.
    """

    output_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    margins: list[float]
    hidden_states: dict[int, NDArray[np.float32]]


def _llama() -> Any:
    return small_llama(vocab_size=_VOCABULARY)


def _llama_with_small_blocks() -> Any:
    """As the runtime runs it on the CPU."""
    model = _llama()
    use_small_blocks(model)
    return model


def _opt() -> Any:
    """Has absolute positions. Of rotary ones only differences matter: they are the same wherever a prompt starts."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_attention_heads": 4}
    config = OPTConfig(
        vocab_size=_VOCABULARY, num_hidden_layers=LAYERS, max_position_embeddings=128, init_std=SPREAD, **sizes, **ends
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _rule(request: Request, eos_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> StopRule:
    return StopRule(eos_ids, request.max_new_tokens, stop, _spelt)


def _spelt(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def _single(model: Any, request: Request, rule: StopRule) -> Single:
    target = CausalLmTarget(model)
    for layer in KEPT:
        target.watch(layer)
    token_ids: list[int] = []
    states: dict[int, list[torch.Tensor]] = {layer: [] for layer in KEPT}
    finish_reason = None
    for block in decode(target, AutoregressiveDrafter(Autoregressive()), request, rule):
        token_ids += block.token_ids
        finish_reason = block.finish_reason
        for layer in KEPT:
            states[layer].append(target.hidden_states(layer).clone())
    margins = [target.top2_margin([*request.prompt_ids, *token_ids[:count]]) for count in range(len(token_ids))]
    hidden_states = {layer: torch.stack(rows).numpy() for layer, rows in states.items()}
    return Single(tuple(token_ids), finish_reason, margins, hidden_states)


def _assert_same_states(found: Recorded, expected: Single) -> None:
    """Equal but for float16's rounding, and for sums in another order."""
    for layer in KEPT:
        states = found.hidden_states[layer]
        assert states.dtype == np.float16
        np.testing.assert_allclose(states.astype(np.float32), expected.hidden_states[layer], rtol=1e-3, atol=5e-3)


def _assert_same(found: Recorded, expected: Single) -> None:
    assert (found.output_ids, found.finish_reason) == (expected.output_ids, expected.finish_reason)
    np.testing.assert_allclose(found.margins, expected.margins, rtol=1e-3, atol=1e-3)
    _assert_same_states(found, expected)


class Compared(NamedTuple):
    """A batch, and each of its requests alone."""

    requests: list[Request]
    recorded: list[Recorded]
    singles: list[Single]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((_llama, WIDE), id="llama"),
        pytest.param((_opt, WIDE), id="opt"),
        pytest.param((_llama_with_small_blocks, WIDE), id="small-blocks"),
        pytest.param((_llama_with_small_blocks, NARROW), id="small-blocks-narrow"),
        pytest.param((small_hybrid, WIDE), id="linear-attention"),
    ],
)
def compared(request: pytest.FixtureRequest) -> Compared:
    make, requests = request.param
    recorded = record_batch(make(), requests, [_rule(r) for r in requests], KEPT)
    model = make()  # a target's hooks stay with its model
    return Compared(requests, recorded, [_single(model, r, _rule(r)) for r in requests])


def test_outputs_are_the_single_loops(compared: Compared) -> None:
    """Fails if padding is attended to, if a prompt's positions start elsewhere, or if a request that has ended, or has
    not yet, changes another one's tokens."""
    assert [found.request for found in compared.recorded] == compared.requests
    for found, expected in zip(compared.recorded, compared.singles, strict=True):
        assert found.output_ids == expected.output_ids
        assert found.finish_reason == expected.finish_reason == "length"
        assert len(found.output_ids) == found.request.max_new_tokens
    assert len({found.output_ids[:3] for found in compared.recorded}) == len(compared.requests)  # nor one for all


def test_states_are_those_a_live_loop_has_at_each_anchor(compared: Compared) -> None:
    """Fails if a scorer is trained on states that it never sees: of the anchor itself, or of another request's row."""
    for found, expected in zip(compared.recorded, compared.singles, strict=True):
        assert list(found.hidden_states) == list(KEPT)
        _assert_same_states(found, expected)


def test_states_of_the_token_before_or_after_would_be_caught(compared: Compared) -> None:
    """The planted fault: rows that are one token off. Fails if neighbours are too alike for the test above to tell."""
    found, expected = compared.recorded[0], compared.singles[0]
    for shift in (1, -1):
        shifted = {layer: np.roll(states, shift, axis=0) for layer, states in found.hidden_states.items()}
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            _assert_same_states(found._replace(hidden_states=shifted), expected)


def test_states_of_prompts_are_those_of_the_whole_text() -> None:
    """Fails if padding counts among a prompt's tokens, or if its last one is kept twice or not at all."""
    model = _llama()
    for found in record_batch(model, WIDE, [_rule(r) for r in WIDE], KEPT, prompt_states=True):
        ids = [*found.request.prompt_ids, *found.output_ids[:-1]]
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1][0]
        states = np.concatenate([found.prompt_states[1], found.hidden_states[1]]).astype(np.float32)
        np.testing.assert_allclose(states, expected.numpy(), rtol=1e-3, atol=5e-3)


def test_margins_are_the_targets(compared: Compared) -> None:
    """Fails if a near-tie cannot be told in a recording, or if margins are another token's or another request's."""
    for found, expected in zip(compared.recorded, compared.singles, strict=True):
        np.testing.assert_allclose(found.margins, expected.margins, rtol=1e-3, atol=1e-3)


def test_recording_again_gives_the_same() -> None:
    """Fails if a batch leaves its cache, its mask or its hooks to the next one."""
    model = _llama()
    rules = [_rule(request) for request in WIDE]
    first = record_batch(model, WIDE, rules, KEPT)
    alone = record_batch(model, WIDE[1:2], rules[1:2], (2,))
    again = record_batch(model, WIDE, rules, KEPT)
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)
    assert list(alone[0].hidden_states) == [2]
    assert alone[0].output_ids == first[1].output_ids
    for found, expected in zip(again, first, strict=True):
        assert found.output_ids == expected.output_ids
        for layer in KEPT:
            np.testing.assert_array_equal(found.hidden_states[layer], expected.hidden_states[layer])


def test_an_end_of_one_request_is_no_end_of_the_others() -> None:
    """Fails if a batch ends with its first request, goes on after an end, or loses the last token's states."""
    requests = [request._replace(max_new_tokens=12) for request in WIDE]
    free = [_single(_llama(), request, _rule(request)) for request in requests]
    rules = [_rule(request) for request in requests]
    eos, first_of_stop, second_of_stop = free[0].output_ids[2], *free[1].output_ids[4:6]
    rules[0] = _rule(requests[0], eos_ids=[eos])
    rules[1] = _rule(requests[1], stop=[_spelt([first_of_stop, second_of_stop])])
    rules[2] = _rule(requests[2], eos_ids=[free[2].output_ids[0]])
    recorded = record_batch(_llama(), requests, rules, KEPT)
    assert [(len(found.output_ids), found.finish_reason) for found in recorded] == [
        (3, "eos"),
        (6, "stop"),
        (1, "eos"),
        (12, "length"),
        (12, "length"),
    ]
    for found, rule in zip(recorded, rules, strict=True):
        _assert_same(found, _single(_llama(), found.request, rule))


def _plain_positions(padded: batched._Prompts) -> batched._Prompts:
    """Counted from the padding's start."""
    return padded._replace(positions_BP=torch.arange(padded.ids_BP.shape[1]).expand_as(padded.ids_BP))


def _no_mask(padded: batched._Prompts) -> batched._Prompts:
    """The padding passes for text."""
    return padded._replace(mask_BP=torch.ones_like(padded.mask_BP))


@pytest.mark.parametrize(
    ("make", "fault"),
    [(_opt, _plain_positions), (_opt, _no_mask), (_llama, _no_mask), (small_hybrid, _no_mask)],
    ids=lambda f: f.__name__,
)
def test_wrong_padding_is_caught(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], fault: Fault) -> None:
    """The planted faults: the tests above must see them in every padded request, and in no other.

    Plain positions are no fault of a rotary target: it is the same wherever a prompt starts.
    """
    right = batched._padded
    monkeypatch.setattr(batched, "_padded", lambda prompts, device: fault(right(prompts, device)))
    recorded = record_batch(make(), WIDE, [_rule(request) for request in WIDE], KEPT)
    for found in recorded:
        expected = _single(make(), found.request, _rule(found.request))
        if found.request == WIDE[1]:  # the longest, which is not padded
            _assert_same(found, expected)
        else:
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                _assert_same_states(found._replace(output_ids=expected.output_ids), expected)
