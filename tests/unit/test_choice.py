"""Finite candidate sets as a proposer: where a draft may come from, and where it must not."""

import json
from collections.abc import Sequence

from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.candidates.sources import Store
from choicespec.decoding.proposer import Proposer
from choicespec.drafters.choice import ChoiceDrafter, PriorRanker, Survival
from choicespec.records import Document, Proposal, Request
from choicespec.spec.method import Choice, MethodSpec
from contracts.proposer_contract import Limits, ProposerContract, Texts, fresh, request_of
from hypothesis import given
from hypothesis import strategies as st

WHOLE = Choice(block_length=8, min_survival=0.0)
FILE = Document("a.py", "def area(width, height):\n    return width * height\n")


def request(prompt: str, tools: Sequence[str] = (), document: str | None = None, request_id: str = "r") -> Request:
    return Request(request_id, tuple(prompt.encode()), 64, tools=tuple(tools), document=document)


def draft(proposer: Proposer, asked: Request, output: str = "", limit: int = 64) -> tuple[str, str]:
    """What is proposed after prompt and output, and its source."""
    proposer.begin(asked)
    found = proposer.propose([*asked.prompt_ids, *output.encode()], limit)
    return bytes(found.token_ids).decode(), found.source


class TestChoice(ProposerContract):
    """The contract, for any L and any fixed threshold."""

    methods = st.builds(
        lambda length, survival: Choice(block_length=length, min_survival=survival),
        length=st.integers(1, 16),
        survival=st.sampled_from([0.0, 0.1, 0.5]),
    )

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Choice)
        return method.block_length


class TestChoiceByCost(ProposerContract):
    """The contract, for drafts as long as pays. What pays depends on the request's steps before: so does a draft's
    length, and nothing else of it."""

    methods = st.builds(lambda length: Choice(block_length=length), length=st.integers(1, 16))

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Choice)
        return method.block_length

    @given(st.data(), Texts, Limits)
    def test_a_growing_text_gives_what_the_whole_text_gives(
        self, data: st.DataObject, text: list[int], limit: int
    ) -> None:
        """Fails if an index that grows with the text misses, repeats or misplaces a part of it."""
        method = data.draw(self.methods)
        lengths = data.draw(st.sets(st.integers(1, len(text))))
        proposer = fresh(method)
        proposer.begin(request_of(text[: min(lengths, default=1)]))
        for length in sorted(lengths):
            found = proposer.propose(text[:length], limit)
            assert_same_but_for_the_length(found, self.draft(method, text[:length], limit))


def assert_same_but_for_the_length(found: Proposal, other: Proposal) -> None:
    """One draft is the other's beginning, or no draft."""
    shared = min(len(found.token_ids), len(other.token_ids))
    assert found.token_ids[:shared] == other.token_ids[:shared]
    assert not shared or found.source == other.source


def test_a_tool_on_offer_is_proposed_as_a_call() -> None:
    """Fails if the names of functions and arguments are not found before the output has used them once."""
    tool = json.dumps({"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}})
    assert draft(fresh(WHOLE), request("?", tools=[tool]), output='[{"name": "get_') == ('weather"', "schema")


def test_a_tool_that_is_not_json_schema_costs_no_request() -> None:
    """Fails if one broken tool of a user's request ends the request."""
    broken = json.dumps({"name": "f", "parameters": {"properties": [1]}})
    assert draft(fresh(WHOLE), request("abcabc", tools=[broken])) == ("abcabcab", "prompt")


def test_another_document_of_the_repository_is_proposed_and_the_own_one_never() -> None:
    """Fails if a file that is being completed gives its own answer away."""
    cut = FILE.text[:40]
    assert draft(fresh(WHOLE, [FILE]), request(cut, document="b.py")) == (FILE.text[40:48], "repository")
    assert draft(fresh(WHOLE, [FILE]), request(cut, document="a.py"))[1] != "repository"


def test_an_earlier_output_is_proposed_and_the_own_one_never() -> None:
    """Fails if a request that is decoded twice, as in every measurement, is given its own answer."""
    proposer = fresh(WHOLE)
    earlier = request("first", request_id="earlier")
    proposer.finish(earlier, list(b"the answer is 42, as ever"))
    assert draft(proposer, request("second"), output="the answer is") == (" 42, as ", "outputs")
    assert draft(proposer, earlier, output="the answer is")[1] != "outputs"


def test_an_unlikely_token_is_not_verified() -> None:
    """Fails if a draft costs a verification that cannot pay."""
    text = request("ab" + "".join(f"{a}{b}" for a in "xyzuvw" for b in "ab"))
    always, likely = draft(fresh(WHOLE), text), draft(fresh(Choice(block_length=8, min_survival=0.9)), text)
    assert len(always[0]) == 8
    assert len(likely[0]) < 8


def test_a_candidate_longer_than_what_is_left_is_cut() -> None:
    """Fails if L near the end of an output asks for more than can be accepted."""
    assert draft(fresh(WHOLE), request("abcabc"), limit=3) == ("abc", "prompt")
    assert fresh(WHOLE).propose([], 8) == Proposal((), "")


class Last(PriorRanker):
    """A ranker that takes the last of a set, sure of its first tokens only."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        self.asked.append((len(candidates), anchor))
        return Ranked(candidates[-1], [0.9, 0.8] + [0.1] * (len(candidates[-1].token_ids) - 2))


def test_what_the_ranker_chooses_is_proposed_as_far_as_it_is_sure() -> None:
    """Fails if a scorer's choice, or its probabilities, is dropped for the prior's; or if it sees another anchor."""
    text = list(b"abcd1 abcd2 abce3 ab")
    drafts = []
    ranker = Last()
    for each in (PriorRanker(), ranker):
        candidates = RequestCandidates(8, 16, lambda text: list(text.encode()), Store(10))
        proposer = ChoiceDrafter(candidates, each, Survival(0.5), block_length=8)
        proposer.begin(request_of(text))
        drafts.append(bytes(proposer.propose(text, 64).token_ids).decode())
    [(count, anchor)] = ranker.asked
    assert count > 1
    assert anchor == ord("b")
    assert len(drafts[1]) == 2
    assert not drafts[0].startswith(drafts[1])


def test_a_set_of_none_is_not_ranked() -> None:
    """Fails if a ranker, which chooses one of a set, is asked where there is none."""
    ranker = Last()
    candidates = RequestCandidates(8, 16, lambda text: list(text.encode()), Store(10))
    proposer = ChoiceDrafter(candidates, ranker, Survival(0.0), block_length=8)
    for text, limit in ((b"abcdef", 64), (b"abcabc", 0)):
        proposer.begin(request_of(list(text)))
        assert proposer.propose(list(text), limit) == Proposal((), "")
    assert ranker.asked == []


def test_what_the_last_steps_yielded_decides_how_much_is_verified() -> None:
    """Fails if a draft costs a verification that would settle more elsewhere: after long drafts, a doubtful one of the
    same length is cut shorter than at first."""
    sure = "abcdefgh" * 40
    doubtful = "abcdefgh. abcdefgh. ab"
    asked = request(sure)
    at_first = draft(fresh(Choice(block_length=8)), asked, output=doubtful)[0]
    proposer = fresh(Choice(block_length=8))
    proposer.begin(asked)
    for _ in range(60):
        proposer.propose(asked.prompt_ids, 64)
    later = bytes(proposer.propose([*asked.prompt_ids, *doubtful.encode()], 64).token_ids).decode()
    assert at_first.startswith(later)
    assert len(later) < len(at_first)
