"""What a step costs on a pair's own worker: verifications by size and context, look-ups, the scorer.

Everything that a replay needs to say how long a method would take; as a file, also to say it for another machine.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Literal, Protocol, runtime_checkable

from pydantic import Field, ValidationError, model_validator

from choicespec.decoding.step_cost import CONTEXT_TOKENS, Floor, StepCosts, sizes_up_to, step_costs
from choicespec.errors import RecordingError
from choicespec.records import Request, Trace
from choicespec.runtimes.runtime import Runtime
from choicespec.spec.frozen import Frozen
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram

LONGEST = 64  # tokens of a verification
_CONTEXTS = (128, CONTEXT_TOKENS, 1024, 2048)
_ROUNDS = 5
_TIMED_REQUESTS = 4


@runtime_checkable
class TimedRuntime(Runtime, Protocol):
    """A runtime whose loop is ours, so that its verifications can be timed one by one."""

    def time_verifications(self, sizes: Sequence[int], context_tokens: int, rounds: int) -> list[tuple[float, ...]]:
        """See ``decoding.step_cost.time_verifications``."""
        ...

    def floor(self) -> Floor | None:
        """The least that a verification can take here; None where that is not known."""
        ...

    def use_step_costs(self, costs: StepCosts) -> None:
        """Let methods decide by these costs, such as a recording's, instead of the runtime's own."""
        ...


class ProposerCost(Frozen):
    """Milliseconds of a proposer, on average over steps of the live loop.

    Attributes:
        first_ms: of a request's first step; what it prepares for the request is inside.
        step_ms: of every later step.
    """

    first_ms: float = Field(ge=0)
    step_ms: float = Field(ge=0)


class DrafterCost(Frozen):
    """Milliseconds of a drafter by the tokens that it drafts; what the target has taken in since is inside.

    Attributes:
        tokens: one number, or two ascending ones, that were timed.
        ms: of each.
    """

    tokens: tuple[int, ...] = Field(min_length=1, max_length=2)
    ms: tuple[ProposerCost, ...] = Field(min_length=1, max_length=2)

    def of(self, tokens: int) -> ProposerCost:
        """Between the two in proportion; no less than for the fewest."""
        if len(self.tokens) == 1:
            return self.ms[0]
        (few, many), (low, high) = self.tokens, self.ms
        share = max(0.0, (tokens - few) / (many - few))
        return ProposerCost(
            first_ms=max(0.0, low.first_ms + share * (high.first_ms - low.first_ms)),
            step_ms=max(0.0, low.step_ms + share * (high.step_ms - low.step_ms)),
        )


class Curve(Frozen):
    """Milliseconds of a verification at some context lengths: one row each, one column a number of tokens.

    Attributes:
        contexts: tokens in the cache, ascending.
        tokens: of a verification, the anchor among them; ascending from 1.
        ms: medians; never less for more tokens.
        low_ms, high_ms: the fastest and the slowest of the rounds.
    """

    contexts: tuple[int, ...] = Field(min_length=1)
    tokens: tuple[int, ...] = Field(min_length=1)
    ms: tuple[tuple[float, ...], ...]
    low_ms: tuple[tuple[float, ...], ...]
    high_ms: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> "Curve":
        for name in ("contexts", "tokens"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name}={values} must ascend")
        if self.tokens[0] != 1:
            raise ValueError(f"tokens={self.tokens} must begin with 1, which is plain decoding's step")
        for name in ("ms", "low_ms", "high_ms"):
            if [len(row) for row in getattr(self, name)] != [len(self.tokens)] * len(self.contexts):
                raise ValueError(f"{name} must have a row a context with a column a number of tokens")
        if any(list(row) != sorted(row) or row[0] <= 0 for row in self.ms):
            raise ValueError("ms must be positive, and never less for more tokens")
        return self

    def at(self, context_tokens: int) -> StepCosts:
        """The costs at a context length: between two that were measured in proportion, beyond them the nearest."""
        above = next((i for i, context in enumerate(self.contexts) if context >= context_tokens), None)
        if above is None:
            return StepCosts(self.tokens, self.ms[-1])
        if above == 0:
            return StepCosts(self.tokens, self.ms[0])
        low, high = self.contexts[above - 1 : above + 1]
        share = (context_tokens - low) / (high - low)
        rows = zip(self.ms[above - 1], self.ms[above], strict=True)
        return StepCosts(self.tokens, tuple(a + share * (b - a) for a, b in rows))


class Costs(Frozen):
    """What a pair's steps cost on one machine.

    Attributes:
        verification: of the target.
        rest_ms: what a step takes beside proposal and verification: acceptance, rollback, the stop rule.
        ngram: prompt lookup.
        candidates: the candidate sets with their prior.
        scorer: what ranking with the scorer adds; None where the pair has none.
        drafters: of the pair, by name; those that were asked for.
        rounds: timings behind each point of the curve.
        floor: the least that a verification can take on this machine, where that is known.
    """

    format: Literal[1] = 1
    device: str
    runtime_build: str
    precision: str
    threads: int
    measured_at: str
    rounds: int
    verification: Curve
    rest_ms: float = Field(ge=0)
    ngram: ProposerCost
    candidates: ProposerCost
    scorer: ProposerCost | None
    drafters: dict[str, DrafterCost] = {}  # noqa: RUF012  (a field's default)
    floor: Floor | None = None  # files of before have none

    @property
    def step_costs(self) -> StepCosts:
        """What methods decide by, whatever the context."""
        return self.verification.at(CONTEXT_TOKENS)

    def drafter(self, method: Draft) -> ProposerCost:
        """What drafting costs.

        Raises:
            RecordingError: that was not measured.
        """
        found = self.drafters.get(method.drafter)
        if found is None:
            raise RecordingError(
                f"the costs do not say what drafter {method.drafter!r} takes; measure them with: jobs.record --again"
            )
        return found.of(method.num_draft_tokens)

    def break_even(self, context_tokens: int, tokens: int) -> float:
        """The accepted tokens a step from which verifying ``tokens`` at once beats plain decoding."""
        costs = self.verification.at(context_tokens)
        return costs.of(tokens) / costs.of(1) - 1

    def save(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def load_costs(path: Path) -> Costs:
    """Read costs, of this machine or another.

    Raises:
        RecordingError: the file is missing, or is not one of costs.
    """
    try:
        return Costs.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordingError(f"no costs in {path}: {error.strerror}; measure them with jobs.record") from None
    except ValidationError as error:
        raise RecordingError(f"{path} does not hold costs of this version: {error}") from None


def measure_costs(
    runtime: TimedRuntime,
    requests: Sequence[Request],
    threads: int,
    scored_length: int | None,
    longest_drafts: Sequence[Draft] = (),
) -> Costs:
    """Measure a pair where it runs; methods of this runtime then decide by what was measured.

    Args:
        runtime: with the task's repository; what its proposers have learnt is not forgotten.
        requests: of the task; a few are decoded with each kind of proposer, in alternation.
        threads: of the runtime; kept with the figures.
        scored_length: L of the sets that the pair's scorer is timed on; None where it has no scorer.
        longest_drafts: the pair's drafters that are timed, each with its longest k.
    """
    sizes = sizes_up_to(LONGEST)
    most = max(1, runtime.context_tokens - LONGEST)
    contexts = tuple(context for context in _CONTEXTS if context <= most) or (most,)
    timed = [runtime.time_verifications(sizes, context, _ROUNDS) for context in contexts]
    curve = Curve(
        contexts=contexts,
        tokens=sizes,
        ms=tuple(step_costs(sizes, rows).ms for rows in timed),
        low_ms=tuple(tuple(map(min, rows)) for rows in timed),
        high_ms=tuple(tuple(map(max, rows)) for rows in timed),
    )
    runtime.use_step_costs(curve.at(CONTEXT_TOKENS))
    scored = Choice(selection="scorer", block_length=scored_length) if scored_length is not None else None
    drafts = {draft.drafter: _shortest_and(draft) for draft in longest_drafts}
    methods: list[MethodSpec] = [Autoregressive(), Ngram(), Choice(), *([scored] if scored is not None else [])]
    methods += [draft for some in drafts.values() for draft in some]
    traces: dict[MethodSpec, list[Trace]] = {method: [] for method in methods}
    for request in requests[: _TIMED_REQUESTS + 1]:
        for method in methods:
            traces[method].append(runtime.generate(request, method))
    kept = {method: found[1:] or found for method, found in traces.items()}  # the first request warms up
    cost = {method: _proposer_cost(found) for method, found in kept.items()}
    return Costs(
        device=runtime.device,
        runtime_build=runtime.build,
        precision=runtime.precision,
        threads=threads,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        rounds=_ROUNDS,
        verification=curve,
        floor=runtime.floor(),
        rest_ms=_rest_ms([found for traces in kept.values() for found in traces], curve),
        ngram=cost[Ngram()],
        candidates=cost[Choice()],
        scorer=_added(cost[scored], cost[Choice()]) if scored is not None else None,
        drafters={
            name: DrafterCost(
                tokens=tuple(draft.num_draft_tokens for draft in some), ms=tuple(cost[draft] for draft in some)
            )
            for name, some in drafts.items()
        },
    )


def _shortest_and(longest: Draft) -> list[Draft]:
    shortest = longest.model_copy(update={"num_draft_tokens": 1})
    return list(dict.fromkeys([shortest, longest]))


def _proposer_cost(traces: Sequence[Trace]) -> ProposerCost:
    first = [found.steps[0].propose_ms for found in traces if found.steps]
    later = [step.propose_ms for found in traces for step in found.steps[1:]]
    return ProposerCost(first_ms=mean(first or [0.0]), step_ms=mean(later or first or [0.0]))


def _added(whole: ProposerCost, part: ProposerCost) -> ProposerCost:
    return ProposerCost(
        first_ms=max(0.0, whole.first_ms - part.first_ms), step_ms=max(0.0, whole.step_ms - part.step_ms)
    )


def _rest_ms(traces: Sequence[Trace], curve: Curve) -> float:
    """What the loop's verifications took longer than the timed ones."""
    longer = []
    for found in traces:
        context = found.prompt_tokens
        for step in found.steps:
            longer.append(step.verify_ms - curve.at(context).of(step.proposed + 1))
            context += step.accepted + 1
    return max(0.0, median(longer)) if longer else 0.0
