"""A scorer learns what the prior cannot know, the same for the same seed, and padding means nothing to it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from choicespec.candidates.sets import Features
from choicespec.errors import ChoiceSpecError
from choicespec.scorer.corpus import positions_of
from choicespec.scorer.evaluate import expected_lengths
from choicespec.scorer.examples import Examples, SetArrays
from choicespec.scorer.fit import Dataset, batch_of, fit, joined
from choicespec.scorer.model import Batch, Reads, ScorerNet, survivals
from choicespec.spec.training import FitSpec
from hypothesis import given
from hypothesis import strategies as st
from integration.small_scorers import HIDDEN, LENGTH, embed, hand_made, random_batch, small_net

QUICK = FitSpec(epochs=6, batch_size=32, learning_rate=1e-2)
TRAIN, TEST = 960, 400
_HALF = 3  # tokens of a candidate
_OF_A_REQUEST = 8  # positions
ROUNDING = 1e-6
SEEDS = st.integers(0, 2**20)


def toy(positions: int, seed: int, by_features: bool = False) -> Dataset:
    """Two candidates of equal prior a position, in random order, of which one is right.

    Args:
        positions: how many.
        seed: of the order, the tokens, and which one is right.
        by_features: what tells which one: the prior's features, or nothing but the hidden state, as usual. The right
            candidate has its tokens from one half of the vocabulary or the other, as the hidden state says.
    """
    dice = np.random.default_rng(seed)
    high_is_right = dice.random(positions) < 0.5
    high_first = dice.random(positions) < 0.5
    halves = np.stack([high_first, ~high_first], axis=1)
    tokens = dice.integers(1, 19, (positions, 2, _HALF)) + 20 * halves[..., None]
    right = halves == high_is_right[:, None]
    hidden = dice.normal(0, 0.3, (positions, HIDDEN))
    features = dice.normal(0, 0.3, (positions, 2, len(Features._fields)))
    if by_features:
        features[..., 0] += np.where(right, 1, -1)
    else:
        hidden[:, :4] += np.where(high_is_right, 1, -1)[:, None]
    prior = np.broadcast_to(np.log([0.5, 0.4, 0.3]), (positions, 2, _HALF))
    sets = SetArrays(
        tokens.astype(np.int32),
        prior.astype(np.float32),
        features.astype(np.float32),
        np.full((positions, 2), _HALF, np.int8),
        np.zeros((positions, 2), np.int32),
    )
    accepted = np.where(right, _HALF, 0).astype(np.int8)
    anchors, rows = np.zeros(positions, np.int32), np.arange(positions)
    requests = (rows // _OF_A_REQUEST).astype(np.int32)
    return Dataset(Examples(sets, accepted, anchors, rows, requests), hidden.astype(np.float16))


def fitted(dataset: Dataset, reads: Reads = Reads(), spec: FitSpec = QUICK) -> ScorerNet:  # noqa: B008  (immutable)
    return fit(dataset, embed, reads, spec, lambda done, loss: None)


def right_choices(net: ScorerNet, dataset: Dataset) -> float:
    """The share of positions with the right candidate on top; the prior's is a half."""
    chosen = expected_lengths(net, dataset).argmax(axis=1)
    return float((dataset.examples.accepted[np.arange(len(chosen)), chosen] > 0).mean())


def test_the_hidden_state_tells_what_the_prior_cannot_know() -> None:
    """Fails if hidden states do not reach the choice, are another position's, or what is learnt is the train set by
    heart. The second half is the planted fault: a network that ignores them is no better than the prior."""
    train, test = toy(TRAIN, seed=1), toy(TEST, seed=2)
    assert right_choices(fitted(train), test) > 0.9
    assert 0.4 < right_choices(fitted(train, Reads(hidden_states=False)), test) < 0.6


def test_the_priors_features_tell_what_the_hidden_state_does_not() -> None:
    """Fails if what the prior knows does not reach the choice, or if the ablation still sees it."""
    train, test = toy(TRAIN, seed=3, by_features=True), toy(TEST, seed=4, by_features=True)
    assert right_choices(fitted(train), test) > 0.9
    assert 0.4 < right_choices(fitted(train, Reads(prior=False)), test) < 0.6


def test_states_of_other_positions_teach_nothing() -> None:
    """Fails if the first test passes without the states that belong to each position: here they are shuffled."""
    train = toy(TRAIN, seed=1)
    shuffled = train._replace(hidden_RH=np.random.default_rng(0).permutation(train.hidden_RH))
    assert 0.35 < right_choices(fitted(shuffled), toy(TEST, seed=2)) < 0.65


def test_probabilities_are_learnt_as_well_as_the_choice() -> None:
    """Fails if the expected length is only good for comparing: how much is verified depends on its size."""
    train, test = toy(TRAIN, seed=1), toy(TEST, seed=2)
    expected = expected_lengths(fitted(train), test)
    right = test.examples.accepted > 0
    assert expected[right].mean() > 2.5
    assert expected[~right].mean() < 0.5


@pytest.mark.parametrize("reads", [Reads(), Reads(hidden_states=False)], ids=str)
def test_what_is_expected_comes_true_on_average(reads: Reads) -> None:
    """Fails if the choice of the best looking candidate makes the expectation of it too large or too small, whether it
    is a good choice or a blind one: the drafts would be too long or too short."""
    train, test = (_with_surprises(toy(positions, seed), seed) for positions, seed in ((2 * TRAIN, 1), (4 * TEST, 2)))
    expected = expected_lengths(fitted(train, reads), test)
    chosen = expected.argmax(axis=1)
    every = np.arange(len(chosen))
    bias = expected[every, chosen].mean() - test.examples.accepted[every, chosen].mean()
    assert abs(bias) < 0.2  # of 3 tokens; 1600 choices


def _with_surprises(dataset: Dataset, seed: int) -> Dataset:
    """Three of ten candidates that should be right end early."""
    dice = np.random.default_rng(seed)
    accepted = dataset.examples.accepted
    ended = np.minimum(accepted, dice.integers(0, _HALF, accepted.shape))
    surprising = dice.random(accepted.shape) < 0.3
    return dataset._replace(
        examples=dataset.examples._replace(accepted=np.where(surprising, ended, accepted).astype(np.int8))
    )


def test_rows_and_not_positions_say_which_state_is_read() -> None:
    """Fails if the states are taken in the order of the positions, of which there are fewer than recorded tokens."""
    train, test = (
        dataset._replace(
            examples=dataset.examples._replace(rows=dataset.examples.rows * 2 + 1),
            hidden_RH=np.repeat(dataset.hidden_RH, 2, axis=0) * np.tile([[-1], [1]], (len(dataset.hidden_RH), 1)),
        )
        for dataset in (toy(TRAIN, seed=1), toy(TEST, seed=2))
    )
    assert right_choices(fitted(train), test) > 0.9


def weights(net: ScorerNet) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_the_same_seed_gives_the_same_weights() -> None:
    """Fails if a fit depends on the clock, on the process or on what was drawn before; or not on the seed at all."""
    train = toy(96, seed=1)
    short = QUICK.model_copy(update={"epochs": 2})
    first = weights(fitted(train, spec=short))
    torch.rand(5)
    second = weights(fitted(train, spec=short))
    other = weights(fitted(train, spec=short.model_copy(update={"seed": 1})))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)
    assert any(not torch.equal(other[name], value) for name, value in first.items())


def test_every_epoch_is_reported_and_the_loss_falls() -> None:
    """Fails if progress is silent, numbered from 0, or of another epoch; or if nothing is learnt."""
    found: list[tuple[int, float]] = []
    spec = QUICK.model_copy(update={"epochs": 4})
    net = fit(toy(TRAIN, seed=1), embed, Reads(), spec, lambda done, loss: found.append((done, loss)))
    assert [done for done, _ in found] == [1, 2, 3, 4]
    assert found[-1][1] < found[0][1]
    assert not net.training


@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (2, 1), (3, 3), (9, 1), (1, 9), (4, 5)])
def test_any_number_of_steps_can_be_taken(epochs: int, steps: int) -> None:
    """Fails if a fit of few positions, or of an unlucky number of them, ends in a division by 0 of its schedule."""
    spec = QUICK.model_copy(update={"epochs": epochs, "batch_size": 8})
    train = numbered([0] + [8] * steps, 0, rows=80)
    for value in weights(fitted(train, spec=spec)).values():
        assert torch.isfinite(value).all()


def test_positions_without_a_candidate_change_nothing() -> None:
    """Fails if a position where nothing can be chosen moves the weights."""
    train = toy(96, seed=1)
    short = QUICK.model_copy(update={"epochs": 1})
    sets = train.examples.sets
    empty = SetArrays._make(np.zeros_like(array) for array in sets)._replace(token_ids=np.full_like(sets.token_ids, -1))
    nothing = train.examples._replace(sets=empty, accepted=np.zeros_like(train.examples.accepted))
    with_nothing = joined([train, Dataset(nothing, train.hidden_RH)])
    expected = weights(fitted(train, spec=short))
    for name, value in weights(fitted(with_nothing, spec=short)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


@given(SEEDS)
def test_survivals_are_probabilities_that_never_rise(seed: int) -> None:
    """Fails if a longer prefix looks likelier than the shorter one in it, or if padding adds to an expected length."""
    dice = torch.Generator().manual_seed(seed)
    lengths_PN = torch.randint(0, LENGTH + 1, (3, 4), generator=dice)
    found = survivals(torch.randn(3, 4, LENGTH, generator=dice) * 10, lengths_PN)
    assert ((found >= 0) & (found <= 1 + ROUNDING)).all()
    assert (found.diff(dim=-1) <= ROUNDING).all()
    there = torch.arange(LENGTH) < lengths_PN[..., None]
    assert (found[~there] == 0).all()
    assert (found.sum(dim=-1) <= lengths_PN + LENGTH * ROUNDING).all()


def test_survivals_multiply_what_each_token_adds() -> None:
    """Fails if a token's own probability is taken for its prefix's."""
    logits = torch.logit(torch.tensor([[[0.5, 0.25, 0.5]]], dtype=torch.float64))
    torch.testing.assert_close(
        survivals(logits, torch.tensor([[3]])), torch.tensor([[[0.5, 0.125, 0.0625]]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        survivals(logits, torch.tensor([[1]])), torch.tensor([[[0.5, 0.0, 0.0]]], dtype=torch.float64)
    )


def padded(batch: Batch, columns: int, tokens: int) -> Batch:
    """The same sets with more padding."""

    def more(tensor: torch.Tensor, value: float, sizes: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, sizes, value=value)

    return batch._replace(
        token_ids_PNL=more(batch.token_ids_PNL, -1, (0, tokens, 0, columns)),
        survivals_PNL=more(batch.survivals_PNL, 0, (0, tokens, 0, columns)),
        features_PNF=more(batch.features_PNF, 0, (0, 0, 0, columns)),
        lengths_PN=more(batch.lengths_PN, 0, (0, columns)),
    )


@given(SEEDS, st.integers(0, 3), st.integers(0, LENGTH - 3))
def test_padding_never_changes_the_logits_of_real_candidates(seed: int, columns: int, tokens: int) -> None:
    """Fails if a candidate scores otherwise live, where a set is as wide as it is, than in training, where it is padded
    to the widest."""
    net, batch = small_net(), random_batch(seed, positions=3, candidates=4, length=3)
    wider = padded(batch, columns, tokens)
    there = torch.arange(3) < batch.lengths_PN[..., None]
    with torch.inference_mode():
        expected, found = net(batch), net(wider)
    torch.testing.assert_close(found[:, :4, :3][there], expected[there], rtol=1e-4, atol=1e-5)
    expected_lengths_PN = survivals(expected, batch.lengths_PN).sum(dim=-1)
    found_lengths_PN = survivals(found, wider.lengths_PN).sum(dim=-1)
    torch.testing.assert_close(found_lengths_PN[:, :4], expected_lengths_PN, rtol=1e-4, atol=1e-5)
    assert (found_lengths_PN[:, 4:] == 0).all()


@given(SEEDS)
def test_a_position_scores_the_same_in_any_company(seed: int) -> None:
    """Fails if positions of a batch, or candidates of a set, are mixed up: the live loop asks for one position."""
    net, batch = small_net(), random_batch(seed, positions=4, candidates=3, length=LENGTH)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    turned = Batch(*(tensor[order] for tensor in batch))
    flipped = batch._replace(
        **{
            name: getattr(batch, name).flip(1)
            for name in ("token_ids_PNL", "survivals_PNL", "features_PNF", "lengths_PN")
        }
    )
    there = torch.arange(LENGTH) < batch.lengths_PN[..., None]
    with torch.inference_mode():
        expected, found, mirrored = net(batch), net(turned), net(flipped).flip(1)
        alone = torch.cat([net(Batch(*(tensor[row : row + 1] for tensor in batch))) for row in range(4)])
    torch.testing.assert_close(found[there[order]], expected[order][there[order]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone[there], expected[there], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mirrored[there], expected[there], rtol=1e-4, atol=1e-5)


@given(SEEDS)
def test_a_token_is_judged_without_those_behind_it(seed: int) -> None:
    """Fails if a prefix's probability depends on what follows it: two candidates with the same beginning, and the same
    features, would survive it with different probabilities."""
    net, batch = small_net(), random_batch(seed, positions=2, candidates=3, length=LENGTH)
    cut = LENGTH // 2
    tokens_PNL, survivals_PNL = batch.token_ids_PNL.clone(), batch.survivals_PNL.clone()
    tokens_PNL[..., cut:] = 5
    survivals_PNL[..., cut:] -= 1
    with torch.inference_mode():
        expected = net(batch)
        found = net(batch._replace(token_ids_PNL=tokens_PNL, survivals_PNL=survivals_PNL))
    torch.testing.assert_close(found[..., :cut], expected[..., :cut], rtol=1e-4, atol=1e-5)


def numbered(counts: Sequence[int], first: float, rows: int) -> Dataset:
    """As many positions of each request; each position's state says which it is.

    Args:
        counts: positions, a request each; 0 is a request without any.
        first: of the numbers in the states.
        rows: recorded tokens, of which the last positions take the last.
    """
    requests = [number for number, count in enumerate(counts) for _ in range(count)]
    total = len(requests)
    examples = hand_made([[1, 0]] * total, [[2, 1]] * total, requests) if total else _no_positions()
    states = np.arange(first, first + rows, dtype=np.float16)[:, None].repeat(HIDDEN, axis=1)
    return Dataset(examples._replace(rows=np.arange(rows - total, rows)), states)


def _no_positions() -> Examples:
    some = hand_made([[1, 0]], [[2, 1]])
    return positions_of(some, np.zeros(len(some.anchors), bool))


def test_joined_tasks_keep_their_own_states_and_requests() -> None:
    """Fails if a task's positions read another task's states, or if two tasks' requests are taken for one."""
    parts = [numbered([2, 1], 0, rows=5), numbered([], 100, rows=2), numbered([1, 3], 200, rows=6)]
    both = joined(parts)
    own = np.concatenate([part.hidden_RH[part.examples.rows] for part in parts])
    np.testing.assert_array_equal(both.hidden_RH[both.examples.rows], own)
    assert both.examples.requests.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert len(both.examples.accepted) == len(both.examples.sets.lengths) == len(both.examples.anchors) == 7
    batch = batch_of(both, np.array([0, 3, 6]))
    assert batch.hidden_PH[:, 0].tolist() == [2.0, 202.0, 205.0]


def test_joined_one_is_itself() -> None:
    """Fails if joining changes what it need not."""
    alone = numbered([2, 1], 0, rows=5)
    found = joined([alone])
    np.testing.assert_array_equal(found.examples.rows, alone.examples.rows)
    np.testing.assert_array_equal(found.hidden_RH, alone.hidden_RH)
    for array, expected in zip(found.examples.sets, alone.examples.sets, strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("counts", [[], [9], [0, 2]], ids=["no positions", "one request", "a second request"])
def test_little_to_learn_from_gives_no_scorer_of_nan(counts: list[int]) -> None:
    """Fails if weights that are not numbers are saved where few prompts or none are left, and are found out only when
    they are loaded."""
    try:
        net = fitted(numbered(counts, 0, rows=12))
    except ChoiceSpecError:
        return  # a refusal is as good
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
