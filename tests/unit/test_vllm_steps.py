"""Steps of vLLM's engine: what was accepted, and whose time a draft is."""

import pytest
from choicespec.decoding.loop import Block, trace
from choicespec.decoding.stopping import StopRule
from choicespec.records import Request
from choicespec.runtimes.vllm_steps import Drafted, RunningRequest

END_ID = 0
NGRAM = Drafted("ngram", 0.0)  # vLLM says no more of its own


def running(max_new_tokens: int = 16, stop: tuple[str, ...] = ()) -> RunningRequest:
    rule = StopRule({END_ID}, max_new_tokens, stop, lambda token_ids: bytes(token_ids).decode())
    return RunningRequest(Request("r", (1, 2), max_new_tokens), "0-internal", rule)


def counts(blocks: list[Block]) -> list[tuple[int, int, str]]:
    steps = [block.step for block in blocks if block.step is not None]
    return [(step.proposed, step.accepted, step.source) for step in steps]


def test_accepted_are_the_draft_tokens_that_the_output_has() -> None:
    """Fails if the bonus token is counted, or a step without a draft is left out."""
    one = running(max_new_tokens=8)
    settled = [([5], []), ([6, 7, 9], [6, 7, 8]), ([3], []), ([4, 5], [9, 9]), ([8], [8])]
    blocks = [one.take(token_ids, draft_ids, NGRAM, 1.0) for token_ids, draft_ids in settled]
    assert [block.token_ids for block in blocks] == [(5,), (6, 7, 9), (3,), (4, 5), (8,)]
    assert [block.finish_reason for block in blocks] == [None, None, None, None, "length"]
    assert blocks[0].step is None
    assert counts(blocks) == [(3, 2, "ngram"), (0, 0, ""), (2, 0, "ngram"), (1, 1, "ngram")]


def test_an_end_inside_a_draft_cuts_what_follows() -> None:
    """Fails if tokens behind the end are kept or counted, or if the end itself, drafted and right, is not counted."""
    one = running()
    blocks = [one.take([5], [], NGRAM, 1.0), one.take([6, END_ID, 7], [6, END_ID], NGRAM, 2.0)]
    assert (one.output_ids, blocks[-1].finish_reason) == ([5, 6, END_ID], "eos")
    assert counts(blocks) == [(2, 2, "ngram")]


def test_a_stop_string_ends_the_output_at_its_last_token() -> None:
    """Fails if vLLM, which is not told of stop strings, decides where an output ends."""
    one = running(stop=("bc",))
    one.take(list(b"a"), [], NGRAM, 1.0)
    last = one.take(list(b"bcd"), list(b"bc"), NGRAM, 2.0)
    assert (bytes(one.output_ids), last.finish_reason) == (b"abc", "stop")


def test_the_first_draft_is_the_first_steps_time_and_nothing_is_lost() -> None:
    """Fails if a draft made in the prefill's time is left out of the decode time, or counted twice."""
    one = running(max_new_tokens=4)
    started = one._last_s
    found = trace(
        one.request,
        iter(
            [
                one.take([5], [], Drafted("prompt", 20.0), started + 0.100),
                one.take([6, 7], [6], Drafted("schema", 5.0), started + 0.130),
                one.take([8], [9], Drafted("nobody's", 7.0), started + 0.170),  # drafted behind the end
            ]
        ),
    )
    assert [step.propose_ms for step in found.steps] == [20.0, 5.0]
    assert [step.verify_ms for step in found.steps] == pytest.approx([25.0, 40.0])
    assert found.prefill_ms == pytest.approx(80.0)
    assert found.decode_ms == pytest.approx(90.0)
    assert [step.source for step in found.steps] == ["prompt", "schema"]
