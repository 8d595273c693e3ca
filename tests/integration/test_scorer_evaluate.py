"""How a ranking is judged: every figure of examples that can be counted by hand, and splits that share nothing."""

import json
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from choicespec.candidates.sets import Features
from choicespec.recordings import Recorded
from choicespec.records import Request
from choicespec.scorer.corpus import Corpus, RecordedTask, SplitBy, compared_with_sources, functions
from choicespec.scorer.evaluate import Comparison, compare, decode_path, expected_lengths
from choicespec.scorer.examples import Examples
from choicespec.scorer.fit import Dataset
from choicespec.scorer.model import Batch, Reads, ScorerNet, Shape
from choicespec.scorer.source_states import StateScale, cosines_along, num_source_features, source_features
from choicespec.scorer.table import Variant, fit_variant, rows_of
from choicespec.spec.training import FitSpec
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.small_scorers import EMBEDDING, embed, hand_made
from numpy.typing import NDArray

SURE = 12.0  # a logit
LAYER = 2


class Told(ScorerNet):
    """A scorer that says what it is told: its hidden states are the logits of each candidate's tokens."""

    def __init__(self) -> None:
        super().__init__(Shape(1, EMBEDDING, len(Features._fields), 1), embed, Reads())

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.hidden_PH.view(batch.token_ids_PNL.shape)


def told(examples: Examples, expected: Sequence[Sequence[float]] | NDArray[np.float64]) -> Comparison:
    """Compares where a scorer expects this many accepted tokens of each candidate, which must have at least as many."""
    expected_PN = np.array(expected, np.float64)
    place_L = np.arange(examples.sets.token_ids.shape[-1])
    survival_PNL = (expected_PN[..., None] - place_L).clip(0, 1)  # whole tokens, and a part of the last
    before_PNL = np.concatenate([np.ones((*expected_PN.shape, 1)), survival_PNL[..., :-1]], axis=-1)
    conditional_PNL = np.where(before_PNL > 0, survival_PNL / np.where(before_PNL > 0, before_PNL, 1), 0)
    with np.errstate(divide="ignore"):
        logits_PNL = (np.log(conditional_PNL) - np.log1p(-conditional_PNL)).clip(-SURE, SURE)
    return compare(Told(), Dataset(examples, logits_PNL.reshape(len(expected_PN), -1).astype(np.float16)))


@pytest.mark.parametrize(
    ("accepted", "path"),
    [
        ([], []),
        ([0, 0, 0], [0, 1, 2]),
        ([2, 9, 9, 1, 9], [0, 3]),
        ([0, 1, 9, 0], [0, 1, 3]),
        ([7, 9], [0]),
    ],
)
def test_a_decode_path_steps_over_what_was_accepted(accepted: list[int], path: list[int]) -> None:
    """Fails if the step's own token is not counted, or if positions inside an accepted draft are."""
    assert decode_path(accepted) == path


# Two requests. The prior takes the first candidate, the scorer below another at positions 0 and 5; there is none at 4.
#                    request 0                       request 1
ACCEPTED = [[1, 3, 0], [0, 0, 0], [2, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 3]]
LENGTHS = [[3, 3, 0], [2, 0, 0], [3, 3, 0], [2, 2, 0], [0, 0, 0], [3, 3, 3]]
OWNERS = [0, 0, 0, 0, 1, 1]
SCORER = [[1, 2, 0], [1, 0, 0], [2, 1, 0], [2, 1, 0], [0, 0, 0], [1, 2, 1]]


def test_figures_are_those_counted_by_hand() -> None:
    """Fails if a figure is divided by another count, if a position where nothing can be gained counts for top-1, or if
    a path is another's than its own ranking's."""
    found = told(hand_made(ACCEPTED, LENGTHS, OWNERS), SCORER)
    assert found.positions == 6
    assert found.candidates == pytest.approx((2 + 1 + 2 + 2 + 0 + 3) / 6)
    # Something can be gained at 0, 2, 3 of request 0 and at 5 of request 1.
    assert found.prior.top1.value == pytest.approx(1 / 4)
    assert found.scorer.top1.value == pytest.approx(2 / 4)
    assert found.oracle.top1.value == pytest.approx(1)
    assert found.prior.accepted.value == pytest.approx((1 + 0 + 2 + 0 + 0 + 0) / 6)
    assert found.scorer.accepted.value == pytest.approx((3 + 0 + 2 + 0 + 0 + 1) / 6)
    assert found.oracle.accepted.value == pytest.approx((3 + 0 + 2 + 1 + 0 + 3) / 6)
    # prior: 0 -> 2 and 4 -> 5; scorer and oracle: 0 and 4 -> 5.
    assert found.prior.accepted_on_path.value == pytest.approx((1 + 2 + 0 + 0) / 4)
    assert found.scorer.accepted_on_path.value == pytest.approx((3 + 0 + 1) / 3)
    assert found.oracle.accepted_on_path.value == pytest.approx((3 + 0 + 3) / 3)
    assert found.gap_closed == pytest.approx((6 - 3) / (9 - 3))
    assert found.gap_closed_on_path == pytest.approx((4 / 3 - 3 / 4) / (2 - 3 / 4))
    for ranking in (found.prior, found.scorer, found.oracle):
        assert {ranking.top1.n, ranking.accepted.n, ranking.accepted_on_path.n} == {2}


def test_figures_of_the_choice_are_of_positions_with_a_choice() -> None:
    """Fails if a position without candidates, where nothing is expected and nothing comes, makes a scorer look better
    calibrated than it is."""
    accepted, lengths = [[0], [0], [0]], [[2], [0], [0]]
    found = told(hand_made(accepted, lengths), [[1.5], [0], [0]])
    assert found.bias_tokens == pytest.approx(1.5, abs=0.01)
    assert found.calibration_error_tokens == pytest.approx(1.5, abs=0.01)


def test_padding_is_never_chosen() -> None:
    """Fails if a column without a candidate wins where every candidate is hopeless."""
    examples = hand_made([[0, 0, 0]], [[2, 1, 0]])
    expected = expected_lengths(Told(), Dataset(examples, np.full((1, 6), -SURE, np.float16)))
    assert expected[0, 2] == -1
    assert expected[0, :2].min() >= 0


def _random_examples(seed: int) -> Examples:
    dice = np.random.default_rng(seed)
    lengths = np.sort(dice.integers(0, 5, (30, 4)))[:, ::-1]
    accepted = np.minimum(dice.integers(0, 5, (30, 4)), lengths)
    return hand_made(accepted.tolist(), lengths.tolist(), np.sort(dice.integers(0, 4, 30)).tolist())


@settings(max_examples=10)
@given(st.integers(0, 2**20))
def test_the_priors_ranking_closes_no_gap_and_the_oracles_all_of_it(seed: int) -> None:
    """Fails if the share is of another gap, or is turned round; and if anything is better than the oracle."""
    examples = _random_examples(seed)
    as_prior = np.zeros(examples.accepted.shape)
    as_prior[:, 0] = examples.sets.lengths[:, 0]
    prior, oracle = told(examples, as_prior), told(examples, examples.accepted.astype(np.float64))
    assert prior.gap_closed == prior.gap_closed_on_path == 0
    assert prior.scorer == prior.prior
    if oracle.oracle.accepted.value > oracle.prior.accepted.value:
        assert oracle.gap_closed == 1
    assert oracle.scorer.accepted == oracle.oracle.accepted
    assert oracle.scorer.top1 == oracle.oracle.top1
    for found in (prior, oracle):
        assert found.prior.accepted.value <= found.oracle.accepted.value
        assert found.prior.top1.value <= found.oracle.top1.value


def test_where_there_is_no_gap_none_is_closed() -> None:
    """Fails if a division by 0 ends a table, or if a scorer that chooses worse than a perfect prior closes a gap."""
    found = told(hand_made([[2, 1]], [[2, 2]]), [[1, 2]])
    assert (found.gap_closed, found.gap_closed_on_path) == (0, 0)


def _tenths(expected: Sequence[float], actual: Sequence[float], of_each: int = 20) -> Comparison:
    """One candidate of one token a position: as many positions of each expectation, accepted as often as said."""
    accepted = [[int(number < round(share * of_each))] for share in actual for number in range(of_each)]
    examples = hand_made(accepted, [[1]] * len(accepted))
    return told(examples, [[share] for share in expected for _ in range(of_each)])


ACTUAL = [0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7]


def test_expectations_that_come_true_have_no_calibration_error() -> None:
    """Fails if expected and actual are of different positions, or if chance within a tenth counts as an error."""
    found = _tenths(ACTUAL, ACTUAL)
    assert found.calibration_error_tokens == pytest.approx(0, abs=0.002)
    assert found.bias_tokens == pytest.approx(0, abs=0.002)


@pytest.mark.parametrize("bias", [0.2, -0.04])
def test_expectations_that_are_off_are_off_by_that(bias: float) -> None:
    """Fails if a bias is scaled, or if its sign is turned: too much expected is positive."""
    found = _tenths([share + bias for share in ACTUAL], ACTUAL)
    assert found.bias_tokens == pytest.approx(bias, abs=0.002)
    assert found.calibration_error_tokens == pytest.approx(abs(bias), abs=0.002)


def test_errors_of_both_signs_do_not_cancel() -> None:
    """Fails if a scorer that expects too much of the good and too little of the bad looks calibrated."""
    expected = [share + (0.04 if number < 5 else -0.04) for number, share in enumerate(ACTUAL)]
    found = _tenths(expected, ACTUAL)
    assert found.bias_tokens == pytest.approx(0, abs=0.002)
    assert found.calibration_error_tokens == pytest.approx(0.04, abs=0.002)


def test_more_positions_than_a_batch_are_all_judged() -> None:
    """Fails if the last batch is lost, or if batches come in another order than the examples."""
    expected = np.arange(1100) % 7 / 10 + 0.1
    logits = np.log(expected) - np.log1p(-expected)
    examples = hand_made([[0]] * 1100, [[1]] * 1100)
    found = expected_lengths(Told(), Dataset(examples, logits[:, None].astype(np.float16)))
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-3)


def tool(name: str, wrapped: bool = False) -> str:
    function = {"name": name, "parameters": {"type": "object", "properties": {}}}
    return json.dumps({"type": "function", "function": function} if wrapped else function)


def task(offered: Sequence[Sequence[str]], first: float) -> RecordedTask:
    """A task whose prompts offer these functions, with two positions each.

    Args:
        offered: names, a prompt each; a name with a star is wrapped as OpenAI does.
        first: of the numbers in the hidden states, each of which says its prompt.
    """
    recorded = []
    for number, names in enumerate(offered):
        tools = tuple(tool(name.strip("*"), wrapped="*" in name) for name in names)
        states = np.full((3, 2), first + number, np.float16)
        request = Request(f"{first}-{number}", (1,), 8, tools=tools)
        recorded.append(Recorded(request, (1, 1, 1), "length", np.ones(3, np.float32), {LAYER: states, 9: states + 64}))
    owners = [number for number in range(len(offered)) for _ in range(2)]
    examples = hand_made([[1, 0]] * len(owners), [[2, 1]] * len(owners), owners)
    rows = np.array([number * 3 + known for number in range(len(offered)) for known in range(2)])
    return RecordedTask(recorded, examples._replace(rows=rows))


# Of the train prompts of calls, 1 and 3 offer what a held-out prompt offers: 1 beside another, 3 in the other form.
CORPUS = Corpus(
    train={
        "calls": task([["area"], ["noon", "clock"], ["sum"], ["noon*"], []], 0),
        "code": task([[], []], 16),
    },
    test={"calls": task([["noon", "tide*"], ["moon"]], 32), "code": task([[]], 48)},
)


def prompts_of(dataset: Dataset) -> list[int]:
    """The train prompts that positions are of, by their numbers in the hidden states."""
    return sorted({int(number) for number in dataset.hidden_RH[dataset.examples.rows, 0]})


def shared(split_by: SplitBy) -> set[str]:
    """The functions that a train prompt offers and a held-out prompt as well."""
    recorded = CORPUS._train["calls"].recorded
    used = [recorded[number] for number in prompts_of(CORPUS.training_set([LAYER], split_by)) if number < 16]
    return set(functions(used) & functions(CORPUS.test["calls"].recorded))


def test_the_split_by_function_leaves_no_function_of_a_held_out_prompt() -> None:
    """Fails if a scorer that knows the held-out functions is called one that does not. The split by prompt is the
    planted fault: it shares a function, and the same comparison must say so."""
    assert shared("function") == set()
    assert shared("prompt") == {"noon"}


def test_each_split_keeps_every_prompt_that_it_may() -> None:
    """Fails if prompts are lost beyond those with a shared function, or if a task without functions loses any."""
    assert prompts_of(CORPUS.training_set([LAYER], "prompt")) == [0, 1, 2, 3, 4, 16, 17]
    assert prompts_of(CORPUS.training_set([LAYER], "function")) == [0, 2, 4, 16, 17]
    assert CORPUS.train_prompts("prompt") == {"calls": 5, "code": 2}
    assert CORPUS.train_prompts("function") == {"calls": 3, "code": 2}
    for split_by in get_args(SplitBy):
        dataset = CORPUS.training_set([LAYER], split_by)
        assert len(dataset.examples.anchors) == 2 * sum(CORPUS.train_prompts(split_by).values())


def test_a_function_of_another_tasks_held_out_prompt_is_left_out_too() -> None:
    """Fails if one task teaches the functions that another is judged by."""
    corpus = Corpus(
        train={"a": task([["area"], ["noon"]], 0), "b": task([["sum"], ["area"]], 16)},
        test={"a": task([["sum"]], 32), "b": task([["noon"]], 48)},
    )
    assert prompts_of(corpus.training_set([LAYER], "function")) == [0, 17]
    assert corpus.train_prompts("function") == {"a": 1, "b": 1}


def test_layers_stand_side_by_side_in_the_order_asked_for() -> None:
    """Fails if a scorer of two layers reads them in another order than live, or one of them twice."""
    hidden_RH = CORPUS.training_set([9, LAYER], "prompt").hidden_RH
    assert hidden_RH.shape == (21, 4)
    np.testing.assert_array_equal(hidden_RH[:, 0], hidden_RH[:, 2] + 64)
    assert CORPUS.test["code"].dataset([LAYER]).hidden_RH.tolist() == [[48, 48]] * 3


def test_features_of_sources_are_each_requests_own() -> None:
    """Fails if a recording's order, which is not the examples', brings one request's states to another, or if a variant
    without sources still has their features."""
    scale = StateScale(np.zeros(2, np.float32), np.ones(2, np.float32))
    ids = [f"r{number}" for number in range(3)]
    recorded = [
        Recorded(
            Request(name, (1, 1), 3), (1, 1, 1), "length", np.ones(3, np.float32), {4: states[1:]}, {4: states[:1]}
        )
        for name, states in zip(ids, np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float16), strict=True)
    ]
    examples = hand_made([[1, 0]] * 6, [[2, 1]] * 6, [0, 0, 1, 1, 2, 2])
    ages = np.array([[1, 0]] * 6, np.int32)
    examples = examples._replace(sets=examples.sets._replace(own_ages=ages))
    with_them = compared_with_sources(examples, ids, reversed(recorded), (4,), scale)
    known = examples.sets.features.shape[-1]
    for number, one in enumerate(recorded):
        own = examples.requests == number
        expected = source_features(cosines_along(one, ages[own], (4,), scale), ages[own])
        np.testing.assert_array_equal(with_them.sets.features[own][..., known:], expected)
    task = RecordedTask(recorded, with_them)
    assert task.dataset([4]).examples.sets.features.shape[-1] == known
    assert task.dataset([4], sources=True).examples.sets.features.shape[-1] == known + num_source_features(1)


def test_a_row_is_a_task_with_what_it_was_fitted_to() -> None:
    """Fails if a row says other prompts than its variant's split, or is judged on train prompts."""
    variant = Variant(name="mine", layers=(LAYER,), split_by="function", fit=FitSpec(epochs=1))
    net = fit_variant(CORPUS, variant, embed, lambda done, loss: None)
    rows = rows_of(CORPUS, variant, net, "float32")
    assert [row.task for row in rows] == ["calls", "code"]
    assert {row.train_prompts for row in rows} == {5}
    assert [row.found.positions for row in rows] == [4, 2]
    assert [row.found.scorer.accepted.n for row in rows] == [2, 1]
