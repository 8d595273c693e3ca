"""Steps from a server's totals."""

from typing import NamedTuple

from choicespec.records import Request
from choicespec.runtimes.llamacpp import count_steps, trace_of
from choicespec.spec.method import Draft
from hypothesis import given
from hypothesis import strategies as st


class Drawn(NamedTuple):
    """A decode whose steps are known: (proposed, accepted) of each, at most k proposed."""

    k: int
    steps: list[tuple[int, int]]

    @property
    def proposed(self) -> int:
        return sum(proposed for proposed, _ in self.steps)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.steps)

    @property
    def tokens(self) -> int:
        return self.accepted + len(self.steps)


@st.composite
def decodes(draw: st.DrawFn) -> Drawn:
    k = draw(st.integers(1, 8))
    step = st.integers(0, k).flatmap(lambda proposed: st.tuples(st.just(proposed), st.integers(0, proposed)))
    return Drawn(k, draw(st.lists(step, min_size=1, max_size=20)))


@given(decodes())
def test_a_whole_decode_is_counted_exactly(drawn: Drawn) -> None:
    """Fails if the bonus token counts as accepted, or a step without a draft is forgotten."""
    found = count_steps(drawn.tokens, drawn.proposed, drawn.accepted, drawn.k)
    assert found == (len(drawn.steps), drawn.accepted)


@given(decodes(), st.data())
def test_an_end_inside_a_draft_is_nearly_counted(drawn: Drawn, data: st.DataObject) -> None:
    """The server still counts what was cut. Fails if more is accepted than there are tokens, or steps vanish."""
    last = drawn.steps[-1][1]
    cut = data.draw(st.integers(0, last))  # the bonus token, and this much of the last draft
    tokens = drawn.tokens - 1 - cut
    found = count_steps(tokens, drawn.proposed, drawn.accepted, drawn.k)
    assert tokens <= found.accepted + found.steps <= tokens + 1
    assert found.accepted <= drawn.accepted
    assert len(drawn.steps) - drawn.k - 1 <= found.steps <= len(drawn.steps)
    assert (found.steps > 0) == (tokens > 0 or drawn.proposed > 0)


def test_a_request_without_drafts_has_no_counts() -> None:
    """Fails if the keys that the server leaves out then are needed."""
    timings = {"prompt_ms": 2.0, "predicted_ms": 9.0, "predicted_n": 4}
    answer = {"tokens": [5, 6, 7, 8], "stop_type": "limit", "timings": timings}
    found = trace_of(Request("r", (1, 2), 4), Draft(drafter="mtp"), answer)
    assert [(step.proposed, step.accepted, step.source) for step in found.steps] == [(0, 0, "")] * 3
    assert (found.decode_tokens, found.prefill_ms, found.decode_ms) == (3, 2.0, 9.0)


def test_one_token_takes_no_time_to_decode() -> None:
    """Fails if the thousandth of a millisecond that the server then reports makes a rate."""
    timings = {"prompt_ms": 2.0, "predicted_ms": 0.001, "predicted_n": 1}
    answer = {"tokens": [5], "stop_type": "eos", "timings": timings}
    found = trace_of(Request("r", (1, 2), 4), Draft(drafter="mtp"), answer)
    assert (found.decode_tokens, found.decode_ms, found.steps) == (0, 0.0, ())
