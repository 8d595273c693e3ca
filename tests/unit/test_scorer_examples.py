"""A scorer's examples are what a live loop has at hand: the same sets, the same anchor, the same hidden state."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Features, Ranked
from choicespec.candidates.sources import Store
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.choice import ChoiceDrafter, PriorRanker, Survival
from choicespec.drafters.union import Weighed
from choicespec.recordings import Recorded
from choicespec.records import Proposal, Request
from choicespec.runtimes.scripted import ByteTokenizer
from choicespec.scorer.examples import NO_TOKEN, Examples, SetArrays, build_examples, set_arrays, with_drafts_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

LENGTH, MOST = 4, 5
LAYER = 3
TOOL = json.dumps({"name": "area", "parameters": {"type": "object", "properties": {"width": {}, "height": {}}}})


def recorded(request: Request, output_ids: Sequence[int], number: int) -> Recorded:
    """A recorded request; the hidden state of a row says whose it is, and of which token."""
    states = np.array([[number, token] for token in range(len(output_ids))], np.float16)
    return Recorded(request, tuple(output_ids), "length", np.ones(len(output_ids), np.float32), {LAYER: states})


def sources() -> RequestCandidates:
    """With a repository, and no outputs yet."""
    repository = Store(10_000)
    for number in range(3):
        repository.add(list(b"abcab" * 3 + bytes([97 + number] * 4)), name=f"file-{number}")
    return RequestCandidates(LENGTH, MOST, lambda text: list(text.encode()), repository)


def examples_of(requests: Sequence[Recorded]) -> Examples:
    return build_examples(requests, sources(), MOST, LENGTH)


def stream(outputs: Sequence[Sequence[int]], spare: int = 0) -> list[Recorded]:
    """Requests that draw on every source, with these outputs.

    Args:
        outputs: of at least one token each.
        spare: what each output fell short of its length.
    """
    found = []
    for number, output_ids in enumerate(outputs):
        prompt = tuple(b"abca"[: number % 4 + 1])
        request = Request(f"r{number}", prompt, len(output_ids) + spare, tools=(TOOL,), document=f"file-{number}")
        found.append(recorded(request, output_ids, number))
    return found


OUTPUTS = st.lists(st.lists(st.sampled_from(b"abc"), min_size=1, max_size=14), min_size=1, max_size=4)
FIXED = stream([b"abcabcabb", b"abcabcabcc", b"a", b"cabcab", b"aaaaaaaabc"])


def hidden_rows(requests: Sequence[Recorded]) -> NDArray[np.float16]:
    """The hidden states of all requests, one below the other: what ``Examples.rows`` counts."""
    return np.concatenate([one.hidden_states[LAYER] for one in requests])


def positions(requests: Sequence[Recorded]) -> Iterator[tuple[int, int]]:
    """The requests' numbers, with the tokens of output that a live loop has there: 1 or more, and never all."""
    for number, one in enumerate(requests):
        for known in range(1, len(one.output_ids)):
            yield number, known


@given(OUTPUTS, st.integers(0, 9))
def test_every_place_where_a_loop_can_stand_is_an_example(outputs: list[list[int]], spare: int) -> None:
    """Fails if a position is lost, comes twice or out of order, or if its anchor or its hidden state is another's."""
    requests = stream(outputs, spare)
    examples = examples_of(requests)
    states = hidden_rows(requests)
    expected = list(positions(requests))
    assert examples.requests.tolist() == [number for number, _ in expected]
    assert examples.anchors.tolist() == [requests[number].output_ids[known - 1] for number, known in expected]
    assert states[examples.rows].tolist() == [[number, known - 1] for number, known in expected]


@given(OUTPUTS, st.integers(0, 9))
def test_accepted_is_what_the_target_said(outputs: list[list[int]], spare: int) -> None:
    """Fails if a candidate is credited with a token that the target did not say, said elsewhere, or said after another
    that the candidate lacks; or if it is denied one."""
    requests = stream(outputs, spare)
    examples = examples_of(requests)
    for row, (number, known) in enumerate(positions(requests)):
        said = requests[number].output_ids[known:]
        for column in range(MOST):
            length = examples.sets.lengths[row, column]
            candidate = examples.sets.token_ids[row, column, :length].tolist()
            prefixes = [candidate[:end] for end in range(1, length + 1)]
            right = sum(list(said[: len(prefix)]) == prefix for prefix in prefixes)
            assert examples.accepted[row, column] == right


@given(OUTPUTS, st.integers(0, 9))
def test_padding_holds_nothing(outputs: list[list[int]], spare: int) -> None:
    """Fails if a token or a probability of one set can be read in the place of another's padding."""
    sets, accepted, *_ = examples_of(stream(outputs, spare))
    assert sets.token_ids.shape[1:] == (MOST, LENGTH)
    there = np.arange(LENGTH) < sets.lengths[..., None]
    assert (sets.token_ids[there] != NO_TOKEN).all()
    assert (sets.token_ids[~there] == NO_TOKEN).all()
    assert (sets.survivals[there] <= 0).all()
    assert (sets.survivals[~there] == 0).all()
    missing = sets.lengths == 0
    assert (sets.features[missing] == 0).all()
    assert (accepted[missing] == 0).all()
    assert (np.diff(missing.astype(int), axis=1) >= 0).all(), "candidates come first, padding after them"


@given(OUTPUTS, st.integers(0, 9))
def test_no_candidate_is_longer_than_what_a_loop_may_still_propose(outputs: list[list[int]], spare: int) -> None:
    """Fails if a scorer learns from tokens that no live loop is offered: the last token of an output is never drafted,
    since the step's own token is it."""
    requests = stream(outputs, spare)
    sets = examples_of(requests).sets
    for row, (number, known) in enumerate(positions(requests)):
        left = requests[number].request.max_new_tokens - known - 1
        assert sets.lengths[row].max(initial=0) <= min(LENGTH, left)
        if left == 0:
            assert sets.lengths[row].tolist() == [0] * MOST


def drafts_of(requests: Sequence[Recorded], wrong: int, longest: int = LENGTH) -> list[Proposal]:
    """What a drafter drafts at each position: the output, but for every so many-th token, with no certainty at all."""
    found = []
    for number, known in positions(requests):
        request, said, *_ = requests[number]
        limit = min(longest, request.max_new_tokens - known - 1)
        ids = tuple(ord("x") if (known + place) % wrong == 0 else token for place, token in enumerate(said[known:]))
        found.append(Proposal(ids[:limit], "kind", (0.5,) * len(ids[:limit])))
    return found


def arrays_of(examples: Examples) -> list[NDArray[Any]]:
    """Those of the sets first, then what is accepted."""
    return [*examples.sets, *examples[1:]]


@given(OUTPUTS, st.integers(0, 9), st.sampled_from([("a", "b"), ("b", "a")]))
def test_drafts_are_candidates_beside_the_finite_ones(
    outputs: list[list[int]], spare: int, names: tuple[str, str]
) -> None:
    """Fails if a finite candidate or what is known of it changes because of a draft, if a draft is credited with tokens
    of another position, or if whose it is is lost."""
    requests = stream(outputs, spare)
    drafted = {names[0]: drafts_of(requests, 3, LENGTH), names[1]: drafts_of(requests, 2, longest=2)}
    alone, found = examples_of(requests), build_examples(requests, sources(), MOST, LENGTH, drafted)
    for before, after in list(zip(arrays_of(alone), arrays_of(found), strict=True))[:5]:
        assert np.array_equal(before, after[:, :MOST][..., : before.shape[-1]] if before.ndim > 2 else after[:, :MOST])
    assert not found.sets.features[:, :MOST, len(Features._fields) :].any()
    for column, (drafts, whose) in enumerate(zip(drafted.values(), np.eye(2), strict=True), start=MOST):
        for row, (draft, (number, known)) in enumerate(zip(drafts, positions(requests), strict=True)):
            length = len(draft.token_ids)
            assert found.sets.lengths[row, column] == length
            assert found.sets.token_ids[row, column, :length].tolist() == list(draft.token_ids)
            assert found.sets.features[row, column, len(Features._fields) :].tolist() == (whose * (length > 0)).tolist()
            said = requests[number].output_ids[known:]
            right = [own == token for own, token in zip(draft.token_ids, said, strict=False)]
            assert found.accepted[row, column] == [*right, False].index(False)


@pytest.mark.parametrize("wanted", [(), ("b",), ("a",), ("b", "a")])
def test_sets_of_fewer_drafters_are_those_that_were_never_drafted_for_by_others(wanted: tuple[str, ...]) -> None:
    """Fails if a scorer over one drafter's drafts learns from another's, or of another's places."""
    drafted = {name: drafts_of(FIXED, wrong) for name, wrong in (("a", 3), ("b", 2))}
    every = build_examples(FIXED, sources(), MOST, LENGTH, drafted)
    expected = build_examples(FIXED, sources(), MOST, LENGTH, {name: drafted[name] for name in wanted})
    found = with_drafts_of(every, list(drafted), wanted)
    for own, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert np.array_equal(own, other)


def test_the_prior_ranks_drafts_with_the_finite_candidates() -> None:
    """Fails if the first column, the best finite candidate, passes for the best of a union."""
    sure = [one._replace(probabilities=(1.0,) * len(one.token_ids)) for one in drafts_of(FIXED, 1_000)]
    found = build_examples(FIXED, sources(), MOST, LENGTH, {"sure": sure})
    drafted = found.sets.lengths[:, MOST] > 0
    assert drafted.any()
    assert set(found.sets.best_prior[drafted].tolist()) == {MOST}
    assert not examples_of(FIXED).sets.best_prior.any()


def test_nothing_recorded_gives_no_examples() -> None:
    """Fails if an empty task, or an output of one token, which leaves nothing to choose, raises."""
    for requests in ([], stream([b"a", b"b"])):
        examples = examples_of(requests)
        assert examples.sets.token_ids.shape == (0, MOST, LENGTH)
        assert [len(each) for each in examples[1:]] == [0, 0, 0, 0]


LOW = Candidate((1,), (0, 0, 0, 0), times=1, age_tokens=1, prior=0.01, survival=(0.01,))
HIGH = Candidate((1,) * 8, (32, 32, 32, 32), times=24, age_tokens=1_000_000, prior=8.0, survival=(1.0,) * 8)


def test_features_stay_near_1() -> None:
    """Fails if one of them drowns the others: networks read numbers near 1."""
    (features,) = set_arrays([[LOW, HIGH]], 2, 8).features
    assert features.shape == (2, len(Features._fields))
    assert np.abs(features).max() < 5


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("prior", LOW._replace(prior=9.0)),
        ("length", LOW._replace(token_ids=(1, 2, 3), survival=(0.01,) * 3)),
        ("log_times", LOW._replace(times=9)),
        ("log_age", LOW._replace(age_tokens=9_000)),
        ("prompt_match", LOW._replace(matches=(9, 0, 0, 0))),
        ("outputs_match", LOW._replace(matches=(0, 0, 0, 9))),
    ],
)
def test_features_keep_their_order(name: str, other: Candidate) -> None:
    """Fails if two features change places, and a scorer that was saved reads one for the other."""
    (features,) = set_arrays([[LOW, other]], 2, 8).features
    assert np.flatnonzero(features[0] != features[1]).tolist() == [Features._fields.index(name)]


def test_a_probability_of_0_has_a_finite_logarithm() -> None:
    """Fails if one impossible token makes every sum of a batch infinite."""
    impossible = Candidate((1, 2), (1, 0, 0, 0), times=1, age_tokens=1, prior=0.5, survival=(0.5, 0.0))
    arrays = set_arrays([[impossible]], 1, 2)
    assert np.isfinite(arrays.survivals).all()
    assert np.isfinite(arrays.features).all()
    assert arrays.survivals[0, 0, 0] == pytest.approx(np.log(0.5))


class Seen(NamedTuple):
    """What a live loop had at hand at one position."""

    number: int
    known: int
    candidates: Sequence[Candidate]
    anchor: int
    hidden_state: list[float]


class Replay:
    """A target that says what was recorded, and has the hidden state of the last token in its cache."""

    def __init__(self) -> None:
        self._cache: list[int] = []
        self._block = 0

    def replay(self, one: Recorded) -> None:
        self._one = one

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        self._cache = list(prompt_ids)
        return self._one.output_ids[0]

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        self._block = len(block_ids)
        own = []
        for token_id in block_ids:
            self._cache.append(token_id)
            outputs = self._one.output_ids
            number = len(self._cache) - len(self._one.request.prompt_ids)
            own.append(outputs[number] if number < len(outputs) else NO_TOKEN)
        return own

    def gather(self, places: Sequence[int]) -> None:
        """Only chains are verified here."""

    def keep(self, num_tokens: int) -> None:
        del self._cache[len(self._cache) - self._block + num_tokens :]

    def hidden_state(self) -> list[float]:
        """Of the last token in the cache, which lacks the anchor; the prompt's own last token has row 0."""
        row = len(self._cache) - len(self._one.request.prompt_ids)
        state: list[float] = self._one.hidden_states[LAYER][row].tolist()
        return state


class Noting(PriorRanker):
    """A ranker that takes the prior's choice and notes what it was shown."""

    def __init__(self, target: Replay) -> None:
        self._target = target
        self.shown: tuple[Sequence[Candidate], int, list[float]] | None = None

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        self.shown = (candidates, anchor, self._target.hidden_state())
        return Ranked(candidates[0], candidates[0].survival)


class AtMost(Survival):
    """Verifies so many tokens where there are as many."""

    def __init__(self, drafted: int) -> None:
        super().__init__(0.0)
        self._drafted = drafted

    def weigh(self, token_ids: Sequence[int], source: str, survival: Sequence[float]) -> Weighed:
        return super().weigh(token_ids, source, survival)._replace(length=min(self._drafted, len(survival)))


class Counting:
    """A choice drafter that notes where it was asked."""

    def __init__(self, target: Replay, drafted: int) -> None:
        self.number = 0
        self.seen: list[Seen] = []
        self._target, self._ranker = target, Noting(target)
        self._drafter = ChoiceDrafter(sources(), self._ranker, AtMost(drafted), block_length=8)

    def begin(self, request: Request) -> None:
        self._prompt_tokens = len(request.prompt_ids)
        self._drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        self._ranker.shown = None
        found = self._drafter.propose(token_ids, limit)
        shown = self._ranker.shown or ((), token_ids[-1], self._target.hidden_state())
        self.seen.append(Seen(self.number, len(token_ids) - self._prompt_tokens, *shown))
        return found

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        self._drafter.finish(request, output_ids)


def live(requests: Sequence[Recorded], drafted: int) -> list[Seen]:
    """Decodes requests with a choice drafter, in order.

    Args:
        requests: what the target says.
        drafted: tokens of each draft; none lets the loop stand at every position.
    """
    target = Replay()
    proposer = Counting(target, drafted)
    for number, one in enumerate(requests):
        target.replay(one)
        proposer.number = number
        stop = StopRule((), len(one.output_ids), (), ByteTokenizer().decode)
        found = trace(one.request, decode(target, proposer, one.request, stop))
        assert found.output_ids == one.output_ids, "the replay itself"
        proposer.finish(one.request, found.output_ids)
    return proposer.seen


def assert_as_live(examples: Examples, requests: Sequence[Recorded], seen: Sequence[Seen]) -> None:
    """At each live position, the example has the set, the anchor and the hidden state that the loop had."""
    states = hidden_rows(requests)
    row_of = {place: row for row, place in enumerate(positions(requests))}
    assert seen
    for one in seen:
        row = row_of[one.number, one.known]
        expected = set_arrays([one.candidates], MOST, LENGTH)
        for name in SetArrays._fields:
            np.testing.assert_array_equal(getattr(examples.sets, name)[row], getattr(expected, name)[0], name)
        assert examples.anchors[row] == one.anchor
        assert states[examples.rows[row]].tolist() == one.hidden_state


@pytest.mark.parametrize("drafted", [0, LENGTH])
def test_examples_are_what_a_live_loop_sees(drafted: int) -> None:
    """Fails if a scorer is trained on other sets, anchors or hidden states than it is asked with."""
    seen = live(FIXED, drafted)
    assert any(len(one.candidates) > 1 for one in seen)
    assert_as_live(examples_of(FIXED), FIXED, seen)
    every = list(positions(FIXED))
    assert len(seen) < len(every) if drafted else [(one.number, one.known) for one in seen] == every


@given(OUTPUTS, st.integers(0, LENGTH))
def test_examples_are_what_any_live_loop_sees(outputs: list[list[int]], drafted: int) -> None:
    """The same for any output, and wherever drafts of another length let the loop stand."""
    requests = stream([[*output, 0] for output in outputs])
    assert_as_live(examples_of(requests), requests, live(requests, drafted))


def _next_row(examples: Examples) -> Examples:
    return examples._replace(rows=examples.rows + 1)


def _row_before(examples: Examples) -> Examples:
    return examples._replace(rows=np.maximum(examples.rows - 1, 0))


def _next_anchor(examples: Examples) -> Examples:
    return examples._replace(anchors=np.roll(examples.anchors, -1))


def _next_set(examples: Examples) -> Examples:
    return examples._replace(sets=SetArrays._make(np.roll(array, -1, axis=0) for array in examples.sets))


@pytest.mark.parametrize("fault", [_next_row, _row_before, _next_anchor, _next_set], ids=lambda fault: fault.__name__)
def test_a_shift_by_one_is_caught(fault: Callable[[Examples], Examples]) -> None:
    """The planted faults: what belongs to the neighbouring position, for the comparison above to tell."""
    with pytest.raises(AssertionError):
        assert_as_live(fault(examples_of(FIXED)), FIXED, live(FIXED, 0))


def test_the_limit_is_what_the_request_allows_and_not_what_was_said() -> None:
    """Fails if the end of an output, which a live loop cannot know, cuts the candidates before it."""
    said = b"abcabcab"
    long, short = stream([said], spare=20), stream([said])
    assert examples_of(long).sets.lengths[-1].max() == LENGTH
    assert examples_of(short).sets.lengths[-1].max() == 0


def test_a_request_never_sees_its_own_answer() -> None:
    """Fails if an output is among the sources of its own examples: a scorer would learn to trust what live is not
    there."""
    unheard = stream([b"ZYXWVUTSRQ"])
    assert not examples_of(unheard).accepted.any()
    again = stream([b"ZYXWVUTSRQ", b"ZYXWVUTSRQ"])
    first, second = (examples_of(again).accepted[examples_of(again).requests == number] for number in (0, 1))
    assert not first.any()
    assert second.any()
