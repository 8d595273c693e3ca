"""The candidate sets of a stream of requests: what one request may see of the others, and never of itself."""

import json
from collections.abc import Sequence

from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate
from choicespec.candidates.sources import SOURCE_NAMES, SourceName, Store
from choicespec.records import Request

ANSWER = "the answer is 42, as ever"
_LONG = 6  # tokens; shorter matches may be chance
FILE = "def area(width, height):\n    return width * height\n"


def candidates_of(documents: dict[str, str] | None = None, block_length: int = 8, most: int = 16) -> RequestCandidates:
    """On byte tokens, with a repository."""
    repository = Store(10_000)
    for name, text in (documents or {}).items():
        repository.add(encode(text), name=name)
    return RequestCandidates(block_length, most, encode, repository)


def encode(text: str) -> list[int]:
    return list(text.encode())


def request(request_id: str, prompt: str = "?", document: str | None = None, tools: Sequence[str] = ()) -> Request:
    return Request(request_id, tuple(encode(prompt)), 64, tools=tuple(tools), document=document)


def found(candidates: RequestCandidates, asked: Request, output: str = "", limit: int = 64) -> list[Candidate]:
    """The set after a request's prompt and output."""
    candidates.begin(asked)
    return candidates.candidates([*asked.prompt_ids, *encode(output)], limit)


def seen(candidates: RequestCandidates, asked: Request, output: str, source: SourceName) -> set[str]:
    """The continuations of a set that follow a long match in a source."""
    number = SOURCE_NAMES.index(source)
    every = found(candidates, asked, output)
    return {bytes(one.token_ids).decode() for one in every if one.matches[number] >= _LONG}


def test_an_output_is_seen_by_later_requests_and_never_by_its_own() -> None:
    """Fails if a scorer is trained on sets that hold the answer, or if what earlier requests said is never offered."""
    candidates = candidates_of()
    first, second = request("first"), request("second")
    assert seen(candidates, second, "the answer is", "outputs") == set()
    candidates.finish(first, encode(ANSWER))
    assert seen(candidates, second, "the answer is", "outputs") == {" 42, as "}
    assert seen(candidates, first, "the answer is", "outputs") == set()
    candidates.finish(second, encode("the answer is yes, so"))
    assert seen(candidates, second, "the answer is", "outputs") == {" 42, as "}
    assert seen(candidates, first, "the answer is", "outputs") == {" yes, so"}
    assert seen(candidates, request("third"), "the answer is", "outputs") == {" 42, as ", " yes, so"}


def test_a_request_that_comes_again_never_sees_what_it_said() -> None:
    """Fails if the second run of a measurement, or the second epoch of a training, is given the first one's answers."""
    candidates = candidates_of()
    for _ in range(2):
        for request_id in ("a", "b"):
            asked = request(request_id)
            other = {" aaaaaaa", " bbbbbbb"} - {f" {request_id * 7}"}
            assert seen(candidates, asked, "the answer is", "outputs") <= other
            candidates.finish(asked, encode(f"the answer is {request_id * 9}"))
    assert seen(candidates, request("a"), "the answer is", "outputs") == {" bbbbbbb"}


def test_a_document_is_seen_by_others_requests_and_never_by_its_own() -> None:
    """Fails if a file that is being completed gives its own answer away, or if files are never offered at all."""
    candidates = candidates_of({"a.py": FILE, "b.py": "x = 1\n"})
    cut = FILE[:40]
    assert seen(candidates, request("b.py:1", cut, "b.py"), "", "repository") == {FILE[40:48]}
    assert seen(candidates, request("log:1", cut), "", "repository") == {FILE[40:48]}
    assert seen(candidates, request("a.py:2", cut, "a.py"), "", "repository") == set()


def test_another_cut_of_the_same_document_never_sees_the_output() -> None:
    """Fails if the completion of one function shows what stands in a file whose other function is completed."""
    candidates = candidates_of()
    candidates.finish(request("a.py:1", document="a.py"), encode(ANSWER))
    assert seen(candidates, request("a.py:9", document="a.py"), "the answer is", "outputs") == set()
    assert seen(candidates, request("b.py:1", document="b.py"), "the answer is", "outputs") == {" 42, as "}


def test_tools_are_calls_of_their_own_request_only() -> None:
    """Fails if a function that is not on offer any more is proposed, or if a broken tool ends a request."""
    tool = json.dumps({"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}})
    broken = json.dumps({"name": "f", "parameters": {"properties": [1]}})
    candidates = candidates_of()
    assert seen(candidates, request("a", tools=[broken, tool]), '[{"name": "get_', "schema") == {'weather"'}
    assert seen(candidates, request("b"), '[{"name": "get_', "schema") == set()


def test_the_settings_bound_a_set() -> None:
    """Fails if L, N or what is left of an output is not handed on."""
    candidates = candidates_of({str(number): f"abc{number}defgh" for number in range(9)}, block_length=4, most=3)
    sets = found(candidates, request("r"), "abc")
    assert [len(candidate.token_ids) for candidate in sets] == [4, 4, 4]
    assert [len(candidate.token_ids) for candidate in found(candidates, request("r"), "abc", limit=2)] == [2, 2, 2]
    assert found(candidates, request("r"), "abc", limit=0) == []


def test_requests_beside_each_other_share_what_is_learnt_and_nothing_else() -> None:
    """Fails if concurrent requests read each other's text, or each keeps its outputs to itself."""
    candidates = candidates_of({"area.py": FILE})
    first, second = candidates.beside(), candidates.beside()
    first.begin(request("first", "the cat sat on the mat; the cat"))
    asked = request("second", "a dog; the cat")
    second.begin(asked)
    own = first.candidates(encode("the cat sat on the mat; the cat"), 8)
    assert bytes(own[0].token_ids) == b" sat on "
    assert b" sat on " not in [bytes(one.token_ids) for one in second.candidates(asked.prompt_ids, 8)]
    first.finish(request("first"), encode(ANSWER))
    assert seen(second, asked, "the answer is", "outputs") == {" 42, as "}
    assert seen(second, asked, "def area(", "repository") == {"width, h"}
