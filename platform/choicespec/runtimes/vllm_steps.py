"""The steps of a request in vLLM, counted as its engine is stepped."""

from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter
from typing import NamedTuple

from choicespec.decoding.stopping import StopRule
from choicespec.records import FinishReason, Request, Step, Trace


class Drafted(NamedTuple):
    """What a proposer says of one draft."""

    source: str
    propose_ms: float


class RunningRequest:
    """A request in the engine, and what has come of it.

    Args:
        request: as it was asked for.
        internal_id: what the engine calls it.
        stop: where its output ends.
    """

    def __init__(self, request: Request, internal_id: str, stop: StopRule) -> None:
        self.request, self.internal_id, self._stop = request, internal_id, stop
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._prefill_ms = 0.0
        self._steps: list[Step] = []
        self._last_s = perf_counter()

    def take(self, token_ids: Sequence[int], draft_ids: Sequence[int], ended_s: float) -> None:
        """Note the tokens of one step, which verified a draft."""
        kept, self.finish_reason = self._stop.cut(self.output_ids, tuple(token_ids))
        elapsed_ms = (ended_s - self._last_s) * 1e3
        self._last_s = ended_s
        if self.output_ids:
            agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(kept, draft_ids, strict=False))
            self._steps.append(Step(len(draft_ids), sum(1 for _ in agreeing), "", 0.0, elapsed_ms))
        else:
            self._prefill_ms = elapsed_ms
        self.output_ids += kept

    def trace(self, source: str, drafted: Sequence[Drafted]) -> Trace:
        """The whole.

        A step's draft is made at the end of the step before it. So the first one is made in the prefill's time; it is
        moved to the first step, where every runtime counts it. What is spent after the last step stays in its time.

        Args:
            source: who proposes, where the proposer says nothing of it.
            drafted: what the proposer says of its drafts, the first one first; fewer, or none, where it says nothing.
        """
        assert self.finish_reason is not None
        silent = Drafted(source, 0.0)
        said = [*drafted, *[silent] * len(self._steps)][: len(self._steps)]
        next_ms = [*(one.propose_ms for one in said[1:]), 0.0]
        steps = tuple(
            step._replace(
                source=one.source if step.proposed else "",
                propose_ms=one.propose_ms,
                verify_ms=step.verify_ms - spent_ms,
            )
            for step, one, spent_ms in zip(self._steps, said, next_ms, strict=False)
        )
        return Trace(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_ids),
            output_ids=tuple(self.output_ids),
            prefill_tokens=1,
            finish_reason=self.finish_reason,
            prefill_ms=self._prefill_ms - (steps[0].propose_ms if steps else 0.0),
            decode_ms=sum(step.propose_ms + step.verify_ms for step in steps),
            steps=steps,
        )
