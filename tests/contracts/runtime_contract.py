"""What every runtime promises, whatever model it runs. A runtime's test class inherits this and gives the fixtures."""

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

import pytest
from choicespec.errors import PromptTooLong
from choicespec.records import Request, Trace
from choicespec.runtimes.runtime import Runtime
from choicespec.spec.method import Autoregressive, MethodSpec, Ngram
from contracts.lossless import assert_lossless

PLAIN = Autoregressive()
Decoded = dict[MethodSpec, dict[Request, Trace]]


def decode_all(runtime: Runtime, methods: Iterable[MethodSpec], requests: Sequence[Request]) -> Decoded:
    """The trace of each request, by method."""
    return {method: {request: runtime.generate(request, method) for request in requests} for method in methods}


def assert_all_lossless(requests: Sequence[Request], decoded: Decoded) -> None:
    """Each method's output ids and finish reasons are plain decoding's."""
    for traces in decoded.values():
        assert_lossless(requests, decoded[PLAIN].__getitem__, traces.__getitem__)


def without_times(trace: Trace) -> Trace:
    """What must be the same in every run."""
    steps = tuple(step._replace(propose_ms=0, verify_ms=0, score_ms=0, settle_ms=0) for step in trace.steps)
    return trace._replace(prefill_ms=0, decode_ms=0, steps=steps)


class RuntimeContract:
    """The properties. ``methods`` are compared with plain decoding, on outputs of ``max_new_tokens``."""

    methods: ClassVar[Sequence[MethodSpec]] = (Ngram(num_draft_tokens=2, min_ngram=2), Ngram(num_draft_tokens=8))
    max_new_tokens: ClassVar[int] = 16

    @pytest.fixture(scope="class")
    def runtime(self) -> Runtime:
        """An open runtime."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def prompts(self) -> Sequence[tuple[int, ...]]:
        """Token ids of at least two prompts, the outputs of which hold readable text."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def requests(self, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
        """The prompts, to be decoded."""
        return [Request(f"r{i}", tuple(ids), self.max_new_tokens) for i, ids in enumerate(prompts)]

    @pytest.fixture(scope="class")
    def decoded(self, runtime: Runtime, requests: list[Request]) -> Decoded:
        """Every request, decoded by every method once: a model's time is dear."""
        return decode_all(runtime, (PLAIN, *self.methods), requests)

    def test_every_output_is_plain_decodings(self, requests: list[Request], decoded: Decoded) -> None:
        """Fails if verification, acceptance or rollback is wrong."""
        assert_all_lossless(requests, decoded)

    def test_something_is_proposed_and_something_is_accepted(self, decoded: Decoded) -> None:
        """Fails if the other tests compare plain decoding with itself."""
        steps = [step for traces in decoded.values() for trace in traces.values() for step in trace.steps]
        assert any(step.proposed for step in steps)
        assert any(step.accepted for step in steps)

    @pytest.mark.parametrize("max_new_tokens", [1, 7])
    def test_max_new_tokens_cuts_exactly(
        self, runtime: Runtime, requests: list[Request], decoded: Decoded, max_new_tokens: int
    ) -> None:
        """Fails if a block is kept beyond the length, or if another length changes the tokens before it."""
        for request in requests:
            whole = decoded[PLAIN][request].output_ids
            for method in decoded:
                short = runtime.generate(request._replace(max_new_tokens=max_new_tokens), method)
                assert short.output_ids == whole[:max_new_tokens]

    def test_length_is_the_reason_exactly_where_the_length_is_reached(self, decoded: Decoded) -> None:
        """Fails if an output that was cut passes for a finished one."""
        for traces in decoded.values():
            for trace in traces.values():
                assert trace.finish_reason in ("eos", "length")
                assert len(trace.output_ids) == self.max_new_tokens or trace.finish_reason == "eos"

    def test_steps_account_for_every_token(self, decoded: Decoded) -> None:
        """Fails if accepted counts the bonus token, or tokens that were cut; the last step may end inside its draft."""
        for traces in decoded.values():
            for trace in traces.values():
                assert all(0 <= step.accepted <= step.proposed for step in trace.steps)
                counted = trace.prefill_tokens + sum(step.accepted + 1 for step in trace.steps)
                assert counted - len(trace.output_ids) in ((0, 1) if trace.steps else (0,))

    def test_plain_decoding_takes_a_step_a_token(self, decoded: Decoded) -> None:
        """Fails if the baseline is helped, or if its prefill is counted as a step."""
        for trace in decoded[PLAIN].values():
            assert [(s.proposed, s.accepted, s.source) for s in trace.steps] == [(0, 0, "")] * trace.decode_tokens
            assert trace.prefill_tokens == 1

    def test_a_trace_is_its_requests(self, decoded: Decoded) -> None:
        """Fails if traces are mixed up, or if a time is missing where there were tokens."""
        for traces in decoded.values():
            for request, trace in traces.items():
                assert (trace.request_id, trace.prompt_tokens) == (request.request_id, len(request.prompt_ids))
                assert trace.prefill_ms > 0
                assert trace.decode_ms > 0

    def test_a_request_decodes_the_same_after_others(
        self, runtime: Runtime, requests: list[Request], decoded: Decoded
    ) -> None:
        """Fails if a cache or a proposer keeps something of the requests before."""
        for method in reversed(decoded):
            again = runtime.generate(requests[0], method)
            assert without_times(again) == without_times(decoded[method][requests[0]])

    def test_a_stop_string_ends_every_output_at_the_same_token(
        self, runtime: Runtime, requests: list[Request], decoded: Decoded
    ) -> None:
        """Fails if a stop string inside a block is found late, never, or without its last token."""
        for request in requests:
            words = re.findall(r"[!-~]{2,}", runtime.tokenizer.decode(decoded[PLAIN][request].output_ids))
            stop = words[len(words) // 2][-2:]
            stopped = request._replace(stop=(stop,))
            found = decode_all(runtime, decoded, [stopped])
            assert_all_lossless([stopped], found)
            trace = found[PLAIN][stopped]
            assert trace.finish_reason == "stop"
            assert stop in runtime.tokenizer.decode(trace.output_ids)
            assert stop not in runtime.tokenizer.decode(trace.output_ids[:-1])

    def test_a_prompt_without_room_for_its_new_tokens_is_refused(
        self, runtime: Runtime, requests: list[Request]
    ) -> None:
        """Fails if a prompt is cut silently, or positions beyond the trained ones give nonsense."""
        filled = requests[0].prompt_ids[:1] * runtime.context_tokens
        for method in (PLAIN, *self.methods):
            with pytest.raises(PromptTooLong, match=str(runtime.context_tokens)):
                runtime.generate(Request("long", filled, max_new_tokens=1), method)
