"""Finite candidate sets as a proposer: where a draft may come from, and where it must not."""

import json
from collections.abc import Sequence

from choicespec.decoding.proposer import Proposer
from choicespec.drafters.registry import Proposers
from choicespec.records import Document, Proposal, Request
from choicespec.spec.method import Choice, MethodSpec
from contracts.proposer_contract import ProposerContract
from hypothesis import strategies as st

WHOLE = Choice(block_length=8, min_survival=0.0)
FILE = Document("a.py", "def area(width, height):\n    return width * height\n")


def drafter(method: Choice = WHOLE, documents: Sequence[Document] = ()) -> Proposer:
    """A proposer on byte tokens."""
    return Proposers(lambda text: list(text.encode()), lambda: documents).of(method)


def request(prompt: str, tools: Sequence[str] = (), document: str | None = None, request_id: str = "r") -> Request:
    return Request(request_id, tuple(prompt.encode()), 64, tools=tuple(tools), document=document)


def draft(proposer: Proposer, asked: Request, output: str = "", limit: int = 64) -> tuple[str, str]:
    """What is proposed after prompt and output, and its source."""
    proposer.begin(asked)
    found = proposer.propose([*asked.prompt_ids, *output.encode()], limit)
    return bytes(found.token_ids).decode(), found.source


class TestChoice(ProposerContract):
    """The contract, for any L and any threshold."""

    methods = st.builds(
        lambda length, survival: Choice(block_length=length, min_survival=survival),
        length=st.integers(1, 16),
        survival=st.sampled_from([0.0, 0.1, 0.5]),
    )

    def most_tokens(self, method: MethodSpec) -> int:
        assert isinstance(method, Choice)
        return method.block_length


def test_a_tool_on_offer_is_proposed_as_a_call() -> None:
    """Fails if the names of functions and arguments are not found before the output has used them once."""
    tool = json.dumps({"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}})
    assert draft(drafter(), request("?", tools=[tool]), output='[{"name": "get_') == ('weather"', "schema")


def test_a_tool_that_is_not_json_schema_costs_no_request() -> None:
    """Fails if one broken tool of a user's request ends the request."""
    broken = json.dumps({"name": "f", "parameters": {"properties": [1]}})
    assert draft(drafter(), request("abcabc", tools=[broken])) == ("abcabcab", "prompt")


def test_another_document_of_the_repository_is_proposed_and_the_own_one_never() -> None:
    """Fails if a file that is being completed gives its own answer away."""
    cut = FILE.text[:40]
    assert draft(drafter(documents=[FILE]), request(cut, document="b.py")) == (FILE.text[40:48], "repository")
    assert draft(drafter(documents=[FILE]), request(cut, document="a.py"))[1] != "repository"


def test_an_earlier_output_is_proposed_and_the_own_one_never() -> None:
    """Fails if a request that is decoded twice, as in every measurement, is given its own answer."""
    proposer = drafter()
    earlier = request("first", request_id="earlier")
    proposer.finish(earlier, list(b"the answer is 42, as ever"))
    assert draft(proposer, request("second"), output="the answer is") == (" 42, as ", "outputs")
    assert draft(proposer, earlier, output="the answer is")[1] != "outputs"


def test_an_unlikely_token_is_not_verified() -> None:
    """Fails if a draft costs a verification that cannot pay."""
    text = request("ab" + "".join(f"{a}{b}" for a in "xyzuvw" for b in "ab"))
    always, likely = draft(drafter(), text), draft(drafter(Choice(block_length=8, min_survival=0.9)), text)
    assert len(always[0]) == 8
    assert len(likely[0]) < 8


def test_a_candidate_longer_than_what_is_left_is_cut() -> None:
    """Fails if L near the end of an output asks for more than can be accepted."""
    assert draft(drafter(), request("abcabc"), limit=3) == ("abc", "prompt")
    assert drafter().propose([], 8) == Proposal((), "")
