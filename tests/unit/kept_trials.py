"""Trials with figures made up, kept as a job keeps them."""

from pathlib import Path
from typing import Any

from choicespec.intervals import share
from choicespec.measuring.measure import TrialResult
from choicespec.records import Divergence, Environment, Estimate, Measurement, Step, Trace
from choicespec.results import ResultsFolder
from choicespec.spec.experiment import TrialSpec

PUBLISHED_PAIR = {"target": {"model": "Qwen/Qwen3-4B", "dtype": "bfloat16"}, "gpus": 1}
STEPS = (
    Step(8, 3, "prompt", 2.0, 10.0, score_ms=1.0, settle_ms=0.5),
    Step(8, 0, "schema", 2.0, 10.0, score_ms=1.0, settle_ms=0.5),
    Step(0, 0, "", 2.0, 6.0, settle_ms=0.5),
)


def trial(**changes: Any) -> TrialSpec:
    """The published choice of Qwen3-4B on tool calls, with parts of it changed."""
    content: dict[str, Any] = {
        "pair": PUBLISHED_PAIR,
        "runtime": {"kind": "hf"},
        "task": {"kind": "tool_call", "context_tokens": 300},
        "method": {"kind": "choice", "selection": "scorer"},
    }
    return TrialSpec.model_validate(content | changes)


def measurement(speedup: float = 4.0, matching: int = 24, day: int = 1, **changes: Any) -> Measurement:
    """Figures whose intervals are easily told."""
    margins = [0.0003 * 10**number for number in range(24 - matching)]
    content = Measurement(
        decode_tokens_per_s=_estimate(10 * speedup),
        baseline_tokens_per_s=_estimate(10),
        speedup=_estimate(speedup),
        accepted_per_step=_estimate(4.5),
        acceptance_by_position=(0.75, 0.5, 0.25),
        match=share(matching, 24),
        prefill_ms=_estimate(12),
        propose_share=0.2,
        never_proposed=False,
        divergences=tuple(
            Divergence(request_id="r7", position=31, expected_id=105, found_id=None, top2_margin=margin)
            for margin in margins
        ),
        measured_at=f"2030-01-{day:02}T00:00:00.000+00:00",
        environment=Environment(
            choicespec="0",
            git_revision="abc",
            python="3.11",
            packages={},
            runtime_build="a build",
            device="cpu",
            cpu="a cpu",
            threads=2,
            dtype="bfloat16",
        ),
    )
    return content.model_copy(update=changes)


def keep(results: Path, experiment: str, trial: TrialSpec, found: Measurement) -> None:
    """As the job does."""
    trace = Trace(
        "r1", 5, tuple(range(9)), 1, "length", 3.0, sum(step.propose_ms + step.verify_ms for step in STEPS), STEPS
    )
    ResultsFolder(results / experiment).keep(TrialResult(trial, found, (trace,), (trace,)))


def _estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value / 2, high=2 * value, n=24)
