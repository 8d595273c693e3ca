"""Trees: which tokens are verified, which are kept, and that neither changes what is decoded."""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from choicespec.decoding import loop
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.step_cost import StepCosts
from choicespec.decoding.stopping import StopRule
from choicespec.decoding.verification import accepted_path, depths
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.drafters.choice import ByCost, Survival, proposal_of
from choicespec.drafters.tree import MOST_TREE_TOKENS, DraftTree
from choicespec.drafters.union import Weighed
from choicespec.records import Proposal, Request, Trace
from choicespec.runtimes.scripted import EOS_ID, ByteTokenizer, TableTarget
from choicespec.spec.method import Autoregressive, Choice, MethodSpec
from contracts.guided_trees import GuidedTrees
from contracts.lossless import assert_lossless
from contracts.proposer_contract import ProposerContract
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

PROMPTS = ('f(x=12, y="5"); f(x=1', 'f(x=20, y="', "f(x=99", 'f(x=39, y="')
# Few different tokens, so that drafts share prefixes; a draft's probabilities never rise.
Drafts = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 1.0)), min_size=1, max_size=4), min_size=1, max_size=5
)


class TestTrees(ProposerContract):
    """The contract, for trees of any width."""

    methods = st.builds(
        lambda length, width, survival: Choice(block_length=length, width=width, min_survival=survival),
        length=st.integers(1, 16),
        width=st.integers(2, 5),
        survival=st.sampled_from([0.0, 0.1, 0.5]),
    )

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Choice)
        return method.block_length


class Misplaced(TableTarget):
    """Planted fault: the tree is read as a chain."""

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        return super().verify(block_ids)


class KeepsTheFirst(TableTarget):
    """Planted fault: the first tokens of a block are kept, whichever were right."""

    def gather(self, places: Sequence[int]) -> None:
        """Nothing is moved."""


class GathersTheNext(TableTarget):
    """Planted fault: each token kept is the one after the right one."""

    def gather(self, places: Sequence[int]) -> None:
        super().gather([places[0], *(min(place + 1, self._block_tokens - 1) for place in places[1:])])


def run(request: Request, target: TableTarget, seed: int = 0) -> Trace:
    stop = StopRule({EOS_ID}, request.max_new_tokens, request.stop, ByteTokenizer().decode)
    return trace(request, decode(target, GuidedTrees(TableTarget().next_token, 9, EOS_ID, 0.6, seed), request, stop))


def plain(request: Request) -> Trace:
    """Plain decoding by the same loop, which other tests hold to its definition."""
    stop = StopRule({EOS_ID}, request.max_new_tokens, request.stop, ByteTokenizer().decode)
    return trace(request, decode(TableTarget(), AutoregressiveDrafter(Autoregressive()), request, stop))


def assert_target_lossless(target: TableTarget) -> None:
    requests = [Request(prompt, tuple(prompt.encode()), 30) for prompt in PROMPTS]
    assert_lossless(requests, plain, lambda request: run(request, target))


def test_trees_give_plain_decodings_output() -> None:
    """Fails if a token of another branch slips into the output or the cache."""
    assert_target_lossless(TableTarget())
    steps = run(Request("r", tuple(PROMPTS[0].encode()), 30), TableTarget()).steps
    assert any(step.accepted > 1 for step in steps), "or this says nothing"


@pytest.mark.parametrize("fault", [Misplaced, KeepsTheFirst, GathersTheNext])
def test_a_faulty_target_is_caught(fault: Callable[[], TableTarget]) -> None:
    """The planted faults of a target."""
    with pytest.raises(AssertionError, match="not lossless"):
        assert_target_lossless(fault())


def test_a_path_that_ignores_parents_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the loop: a token that is right after its parent is kept, whether its parent is or not."""

    def every_right_token(draft: Proposal, own_ids: Sequence[int]) -> list[int]:
        pairs = zip(draft.token_ids, draft.parents, strict=True)
        return [0, *(place for place, (one, parent) in enumerate(pairs, start=1) if one == own_ids[parent])]

    monkeypatch.setattr(loop, "accepted_path", every_right_token)
    with pytest.raises(AssertionError, match="not lossless"):
        assert_target_lossless(TableTarget())


@given(st.integers(0, 99), st.integers(1, 12), st.floats(0, 1))
def test_the_path_is_the_longest_right_one(seed: int, tokens: int, right: float) -> None:
    """Fails if a right token behind a wrong one counts, or if a right branch behind wrong ones is not found."""
    table, text = TableTarget(), list(b'f(x=12, y="')
    drafter = GuidedTrees(table.next_token, tokens, EOS_ID, right, seed)
    drafter.begin(Request("r", tuple(text), 64))
    draft = drafter.propose(text, 6)
    table.prefill(text[:-1])
    path = accepted_path(draft, table.verify((text[-1], *draft.token_ids), draft.parents))
    texts = [text]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        texts.append([*texts[parent], token_id])
    said = list(text)
    while len(said) < len(text) + 6:
        said.append(table.next_token(said))
    right_places = [place for place, one in enumerate(texts) if one == said[: len(one)]]
    assert path == right_places


def grown(drafts: Sequence[Sequence[tuple[int, float]]], width: int) -> Weighed:
    tree = DraftTree(Survival(0.0), width)
    for number, draft in enumerate(drafts):
        survival, probability = [], 1.0
        for _, given_those_before in draft:
            survival.append(probability := probability * given_those_before)
        tree.add([token_id for token_id, _ in draft], str(number), survival)
    return tree.weighed()


@given(Drafts, st.integers(1, 4))
def test_a_tree_is_made_of_its_drafts_likeliest_tokens(drafts: list[list[tuple[int, float]]], width: int) -> None:
    """Fails if a token stands behind another than in its draft, if it is there twice, if a likelier one comes later, or
    if there are more branches than asked for."""
    found = grown(drafts, width)
    prefixes = {tuple(token_id for token_id, _ in draft[:end]) for draft in drafts for end in range(1, 5)}
    texts: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(found.token_ids, found.parents, strict=True):
        texts.append((*texts[parent], token_id))
    assert len(set(texts)) == len(texts)
    assert set(texts[1:]) <= prefixes
    assert all(one >= after for one, after in pairwise([1.0, *found.survival]))
    leaves = set(range(1, len(texts))) - set(found.parents)
    assert 1 <= len(leaves) <= width


@given(Drafts, st.integers(1, 6))
def test_no_tree_of_as_many_tokens_is_expected_to_accept_more(drafts: list[list[tuple[int, float]]], size: int) -> None:
    """Fails if the heap takes another tree than the best: checked against all of them."""
    found = grown(drafts, width=99)
    places = range(1, len(found.token_ids) + 1)
    trees = [
        some
        for some in combinations(places[:9], min(size, len(places[:9])))
        if all(found.parents[place - 1] in (0, *some) for place in some)
    ]
    best = max(sum(found.survival[place - 1] for place in some) for some in trees)
    assert sum(found.survival[: min(size, 9)]) == pytest.approx(best)


def test_of_tokens_for_one_place_only_one_can_be_right() -> None:
    """Fails if drafts that were judged apart are together surer than certain: odds of 9 and 1 against 1 for none."""
    found = grown([[(1, 0.9), (5, 0.5)], [(2, 0.5)]], width=2)
    assert found.token_ids == [1, 5, 2]
    assert found.parents == [0, 1, 0]
    assert found.survival == pytest.approx([9 / 11, 4.5 / 11, 1 / 11])
    assert found.source == "0"


def test_a_drafters_draft_joins_the_tree() -> None:
    """Fails if a draft that gains less than the best is dropped, which could be right where that is wrong; or if the
    tree is cut where its tokens still pay."""
    tree = DraftTree(ByCost(StepCosts((1, 64), (1.0, 1.01))), 4)
    tree.add([1, 2, 3], "prompt", [0.6, 0.5, 0.4])
    best = tree.weighed()
    found = tree.join(best, Weighed([1, 7], "dflash", [0.8, 0.4], 2, 0.0))
    assert sorted(found.token_ids) == [1, 2, 3, 7]
    assert found.length == 4
    assert found.source == "dflash"
    assert found.gain > best.gain
    draft = proposal_of(found)
    assert [depths(draft.parents)[1:], draft.token_ids] == [[1, 2, 3, 2], (1, 2, 3, 7)]
    assert draft.probabilities[0] == found.survival[0]


def test_a_tree_ends_where_costs_do() -> None:
    """Fails if a verification is longer than any whose cost is measured."""
    tree = DraftTree(Survival(0.0), 99)
    for number in range(20):
        tree.add([number] * 8, "prompt", [0.5] * 8)
    assert tree.weighed().length == MOST_TREE_TOKENS


def test_a_chain_keeps_its_identity() -> None:
    """Fails if what was measured before there were trees is not found again, or if a tree passes for a chain."""
    assert "width" not in Choice().model_dump_json()
    assert '"width":3' in Choice(width=3).model_dump_json()
    assert Choice(width=3).label == "choice prior L=8 width=3"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"exact": True}, "exact takes tokens one by one, so that width=2 saves nothing"),
        ({"pace": "adaptive"}, "pace=adaptive judges one draft a step, not the 2 of width"),
        ({"selection": "oracle"}, "the oracle knows which candidate is right; leave width=2 out"),
    ],
)
def test_what_makes_no_sense_with_a_tree_is_refused(asked: dict[str, object], reason: str) -> None:
    """Fails if a setting is dropped in silence."""
    with pytest.raises(ValidationError, match=reason):
        Choice.model_validate({"width": 2, **asked})
