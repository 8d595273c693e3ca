"""Step costs as a curve, and as a file that another machine may have written."""

import json
from pathlib import Path

import pytest
from choicespec.decoding.step_cost import Floor, StepCosts
from choicespec.errors import RecordingError
from choicespec.measuring.cost import Costs, Curve, TimedRuntime, load_costs, measure_costs
from choicespec.records import Request
from choicespec.reports.replay_tables import cost_table
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from contracts.replay_equality import costs_of
from pydantic import ValidationError

ROWS = ((1.0, 2.0, 4.0), (3.0, 6.0, 8.0))
CURVE = Curve(contexts=(100, 300), tokens=(1, 4, 64), ms=ROWS, low_ms=ROWS, high_ms=ROWS)
REQUESTS = [Request(f"r{x}", tuple(f'f(x={x}, y="'.encode()), 24) for x in range(12, 15)]


@pytest.fixture(scope="module")
def measured() -> Costs:
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec(target=TargetSpec(model="none")))
    return measure_costs(runtime, REQUESTS, threads=1, scored_length=None)


@pytest.mark.parametrize(
    ("context", "ms"), [(1, ROWS[0]), (100, ROWS[0]), (150, (1.5, 3.0, 5.0)), (300, ROWS[1]), (9000, ROWS[1])]
)
def test_between_two_contexts_a_cost_lies_between_theirs(context: int, ms: tuple[float, ...]) -> None:
    """Fails if a context is charged for the wrong neighbour, or one beyond the last is extrapolated."""
    assert CURVE.at(context) == StepCosts((1, 4, 64), ms)


def test_what_must_be_accepted_to_pay() -> None:
    """Fails if the price of plain decoding at that context is not what it is compared with."""
    costs = costs_of(StepCosts((1, 64), (1.0, 1.0)), verification=CURVE)
    assert costs.break_even(100, 4) == 1.0
    assert costs.break_even(300, 64) == pytest.approx(8 / 3 - 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"contexts": (300, 100)},
        {"tokens": (2, 4, 64)},
        {"tokens": (1, 4)},
        {"ms": ((2.0, 1.0, 4.0), ROWS[1])},
        {"ms": ((0.0, 1.0, 4.0), ROWS[1])},
        {"low_ms": ROWS[:1]},
    ],
)
def test_what_is_no_curve_is_refused(wrong: dict[str, object]) -> None:
    """Fails if a hand-made what-if is read as something else, such as a draft that gets cheaper as it grows."""
    with pytest.raises(ValidationError):
        Curve.model_validate({**CURVE.model_dump(), **wrong})


def test_a_runtime_with_our_loop_is_measured(measured: Costs) -> None:
    """Fails if a size or context is left out, or the spread does not hold the median."""
    curve = measured.verification
    assert curve.tokens[0] == 1
    assert curve.tokens[-1] == 64
    assert len(curve.contexts) > 1
    for name, compare in (("low_ms", "at most"), ("high_ms", "at least")):
        for ms, bound in zip(curve.ms, getattr(curve, name), strict=True):
            assert (bound[0] <= ms[0]) if compare == "at most" else (bound[0] >= ms[0])
    assert measured.ngram.step_ms > 0
    assert measured.candidates.step_ms > measured.ngram.step_ms, "a candidate set is dearer than a dictionary"
    assert measured.scorer is None


def test_costs_come_back_from_their_file(measured: Costs, tmp_path: Path) -> None:
    """Fails if a what-if on another machine loses a digit."""
    path = tmp_path / "of this" / "costs.json"
    measured.save(path)
    assert load_costs(path) == measured


def test_a_file_that_holds_no_costs_is_said(measured: Costs, tmp_path: Path) -> None:
    """Fails if a person sees a traceback, or a misspelt field is dropped."""
    with pytest.raises(RecordingError, match=r"measure them with jobs\.record"):
        load_costs(tmp_path / "nowhere.json")
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**json.loads(measured.model_dump_json()), "rest_mss": 1}), encoding="utf-8")
    with pytest.raises(RecordingError, match="rest_mss"):
        load_costs(path)


def test_the_scripted_runtime_can_be_timed() -> None:
    """Fails if a runtime whose loop is ours no longer offers what costs are measured by."""
    assert isinstance(ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec(target=TargetSpec(model="none"))), TimedRuntime)


FLOOR = Floor(weights=10**8, weight_bytes=4 * 10**8, read_bytes_per_s=2e10, flops_per_s=1e11)


def test_the_floor_is_reading_until_computing_takes_longer() -> None:
    """Fails if the weights are read again for each token, or if two operations a weight and token are taken for one."""
    assert [FLOOR.ms(tokens) for tokens in (1, 8, 20)] == [pytest.approx(ms) for ms in (20, 20, 40)]


def test_the_table_says_how_far_verifications_are_from_the_floor() -> None:
    """Fails if a verification is divided by the floor of another number of tokens; or where none is known."""
    known = costs_of(StepCosts((1, 9, 64), (30.0, 50.0, 200.0)))
    caption = cost_table(known.model_copy(update={"floor": FLOOR}), "pair").caption
    assert "1.50 times the floor with 1 (20.0 ms), 2.50 times the floor with 9 (20.0 ms)" in str(caption)
    assert "floor" not in str(cost_table(known, "pair").caption)
