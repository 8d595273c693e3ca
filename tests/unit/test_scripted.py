"""The scripted runtime keeps the contract, and its table model is worth testing with."""

import pytest
from choicespec.records import Request
from choicespec.runtimes.runtime import Runtime, StreamingRuntime
from choicespec.runtimes.scripted import EOS_ID, ByteTokenizer, ScriptedRuntime
from choicespec.spec.method import Autoregressive, Choice, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from contracts.runtime_contract import RuntimeContract
from contracts.streaming_contract import StreamingContract


def scripted() -> ScriptedRuntime:
    return ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec(target=TargetSpec(model="none")))


class TestScripted(RuntimeContract):
    """The contract, on prompts from the script, beside it, and not of it at all."""

    max_new_tokens = 48

    @pytest.fixture(scope="class")
    def runtime(self) -> Runtime:
        return scripted()

    @pytest.fixture(scope="class")
    def prompts(self) -> list[tuple[int, ...]]:
        texts = ('f(x=12, y="5"); f(x=13, y="', 'f(x=39, y="', "f(x=99", "What is the weather in Zürich?")
        return [tuple(text.encode()) for text in texts]


class TestScriptedStreams(StreamingContract):
    @pytest.fixture(scope="class")
    def runtime(self) -> StreamingRuntime:
        return scripted()

    @pytest.fixture(scope="class")
    def requests(self) -> list[Request]:
        return [
            Request(text, tuple(text.encode()), 48) for text in ('f(x=12, y="5"); f(x=13, y="', "What is the time?")
        ]


def test_it_ends_a_sequence_by_itself() -> None:
    """Fails if no scripted test ever meets an end of sequence; it is part of the output, and of no text."""
    trace = scripted().generate(Request("r", tuple(b'f(x=39, y="'), 64), Ngram())
    assert trace.finish_reason == "eos"
    assert trace.output_ids == (*b'4"); ', EOS_ID)
    assert ByteTokenizer().decode(trace.output_ids) == '4"); '


def test_its_output_depends_on_the_whole_prompt() -> None:
    """Fails if a runtime that loses the prompt's beginning would pass unseen."""
    prompts = [bytes([first]) + b"#" * 40 for first in range(10)]
    outputs = {scripted().generate(Request("r", tuple(p), 16), Autoregressive()).output_ids for p in prompts}
    assert len(outputs) > 5


def test_the_parts_of_a_step_are_within_it() -> None:
    """Fails if ranking or settling is timed twice, or beside the step; ranking takes time only where there is a set."""
    request = Request("r", tuple(b'f(x=12, y="5"); f(x=13, y="'), 48)
    for method in (Autoregressive(), Ngram(), Choice()):
        steps = scripted().generate(request, method).steps
        assert all(0 <= step.score_ms <= step.propose_ms for step in steps)
        assert all(0 < step.settle_ms < step.verify_ms for step in steps)
        assert any(step.score_ms for step in steps) == isinstance(method, Choice)
