"""The steps of a request in vLLM, told as its engine is stepped."""

from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter
from typing import NamedTuple

from choicespec.decoding.loop import Block
from choicespec.decoding.stopping import StopRule
from choicespec.records import FinishReason, Request, Step


class Drafted(NamedTuple):
    """What a proposer says of one draft."""

    source: str
    propose_ms: float


class RunningRequest:
    """A request in the engine, and what has come of it.

    A step's draft is made at the end of the step before it. So the first one is made in the prefill's time; it is moved
    to the first step, where every runtime counts it. What is drafted after the last step stays in that step's time.

    Args:
        request: as it was asked for.
        internal_id: what the engine calls it.
        stop: where its output ends.
    """

    def __init__(self, request: Request, internal_id: str, stop: StopRule) -> None:
        self.request, self.internal_id, self._stop = request, internal_id, stop
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._drafted = Drafted("", 0.0)  # of the draft that the next step verifies
        self._last_s = perf_counter()

    def take(self, token_ids: Sequence[int], draft_ids: Sequence[int], drafted: Drafted, ended_s: float) -> Block:
        """The block of one step.

        Args:
            token_ids: what it settled.
            draft_ids: what it verified.
            drafted: of the draft that was made at its end.
            ended_s: when, on the clock of ``perf_counter``.
        """
        kept, self.finish_reason = self._stop.cut(self.output_ids, tuple(token_ids))
        drafting_ms = 0.0 if self.finish_reason is not None else drafted.propose_ms
        verify_ms = (ended_s - self._last_s) * 1e3 - drafting_ms
        step = self._step(kept, draft_ids, verify_ms) if self.output_ids else None
        self.output_ids += kept
        self._drafted, self._last_s = drafted, ended_s
        return Block(kept, step, self.finish_reason, verify_ms + (step.propose_ms if step else 0.0))

    def _step(self, kept: Sequence[int], draft_ids: Sequence[int], verify_ms: float) -> Step:
        agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(kept, draft_ids, strict=False))
        return Step(
            proposed=len(draft_ids),
            accepted=sum(1 for _ in agreeing),
            source=self._drafted.source if draft_ids else "",
            propose_ms=self._drafted.propose_ms,
            verify_ms=verify_ms,
        )
