"""What every runtime that can be served promises. Its test class inherits this and gives the fixtures."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from choicespec.decoding.loop import trace
from choicespec.errors import Unsupported
from choicespec.records import Request, Sampling, Trace
from choicespec.runtimes.runtime import StreamingRuntime
from choicespec.spec.method import Draft, MethodSpec, Ngram
from choicespec.spec.pair import ScorerSpec
from contracts.runtime_contract import PLAIN, without_times


def known(runtime: StreamingRuntime, found: Trace) -> Trace:
    """What must be the same in every run; of its steps, only where ``generate`` knows them as a stream does."""
    found = without_times(found)
    return found if runtime.knows_steps else found._replace(steps=())


class StreamingContract:
    """The properties. Outputs must have several blocks."""

    method: ClassVar[MethodSpec] = Ngram(num_draft_tokens=2)

    @pytest.fixture(scope="class")
    def runtime(self) -> StreamingRuntime:
        """An open runtime."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def requests(self) -> Sequence[Request]:
        """Two or more requests."""
        raise NotImplementedError

    def test_a_stream_is_what_generate_decodes(self, runtime: StreamingRuntime, requests: Sequence[Request]) -> None:
        """Fails if what is served is another loop than what is measured."""
        for request in requests:
            streamed = trace(request, runtime.stream(request, self.method, None))
            assert known(runtime, streamed) == known(runtime, runtime.generate(request, self.method))
            assert streamed.output_ids == runtime.generate(request, PLAIN).output_ids

    def test_a_stream_comes_in_blocks(self, runtime: StreamingRuntime, requests: Sequence[Request]) -> None:
        """Fails if a client would wait for the whole answer; only the last block says why it ends."""
        blocks = list(runtime.stream(requests[0], self.method, None))
        assert len(blocks) > 2
        assert [block.finish_reason is None for block in blocks] == [True] * (len(blocks) - 1) + [False]

    def test_a_stream_that_is_closed_early_spoils_nothing(
        self, runtime: StreamingRuntime, requests: Sequence[Request]
    ) -> None:
        """Fails if a client that goes away changes the next one's answer."""
        expected = known(runtime, runtime.generate(requests[1], self.method))
        left = runtime.stream(requests[0], self.method, None)
        next(left)
        next(left)
        left.close()
        assert known(runtime, trace(requests[1], runtime.stream(requests[1], self.method, None))) == expected

    def test_a_method_that_cannot_be_made_ready_leaves_the_old_one(
        self, runtime: StreamingRuntime, requests: Sequence[Request]
    ) -> None:
        """Fails if a broken champion takes the one before with it."""
        runtime.prepare(self.method, ScorerSpec())
        expected = without_times(runtime.generate(requests[0], self.method))
        with pytest.raises(Unsupported):
            runtime.prepare(Draft(drafter="nobody"), ScorerSpec())
        assert without_times(runtime.generate(requests[0], self.method)) == expected

    def test_sampling_is_never_silently_greedy(self, runtime: StreamingRuntime, requests: Sequence[Request]) -> None:
        """Fails if a temperature is ignored."""
        hot = Sampling(temperature=5.0, top_p=1.0, seed=0)
        if not runtime.samples:
            with pytest.raises(Unsupported):
                next(runtime.stream(requests[0], self.method, hot))
            return
        drawn = trace(requests[0], runtime.stream(requests[0], self.method, hot))
        assert drawn.output_ids != runtime.generate(requests[0], PLAIN).output_ids
