"""The printed tables: every figure with its interval and n, and nothing that looks better than it is."""

from io import StringIO

import pytest
from choicespec.intervals import share
from choicespec.records import Divergence, Environment, Estimate, Measurement
from choicespec.reports.tables import divergence_table, figure, result_table
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Choice, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.task import ToolCall
from rich.console import Console
from rich.table import Table

TRIAL = TrialSpec(
    pair=PairSpec(target=TargetSpec(model="tiny")),
    runtime=ScriptedRuntimeSpec(),
    task=ToolCall(context_tokens=300),
    method=Ngram(num_draft_tokens=4),
)
DIVERGENCE = Divergence(request_id="r7", position=31, expected_id=105, found_id=None, top2_margin=0.0003)
MEASUREMENT = Measurement(
    decode_tokens_per_s=Estimate(value=50.04, low=41.26, high=60, n=24),
    baseline_tokens_per_s=Estimate(value=25, low=20, high=30, n=24),
    speedup=Estimate(value=2.004, low=1.5, high=2.716, n=24),
    accepted_per_step=Estimate(value=1.25, low=1, high=1.5, n=24),
    match=share(23, 24),
    prefill_ms=Estimate(value=12, low=10, high=14, n=24),
    propose_share=0.01,
    never_proposed=False,
    measured_at="2030-01-01T00:00:00.000+00:00",
    environment=Environment(
        choicespec="0",
        git_revision="abc",
        python="3.11",
        packages={},
        runtime_build="scripted 1",
        device="none",
        cpu="a cpu",
        threads=1,
        dtype="float32",
    ),
)


def printed(table: Table) -> str:
    text = StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


def only_row(table: Table) -> dict[str, str]:
    """The cells of a table of one row, by heading."""
    return {str(column.header): str(cell) for column in table.columns for cell in column.cells}


def test_a_row_holds_every_figure_with_its_interval_and_n() -> None:
    """Fails if a figure is printed without its interval, under another heading, or without what it was measured on."""
    table = result_table([(TRIAL, MEASUREMENT)], "mine")
    assert only_row(table) == {
        "pair": "tiny float32",
        "runtime": "scripted",
        "task": "tool_call @300",
        "method": "ngram k=4",
        "decode tok/s": "50.0 [41.3, 60.0]",
        "speed-up": "2.00 [1.50, 2.72]",
        "accepted/step": "1.25 [1.00, 1.50]",
        "match %": "95.8 [79.8, 99.3]",
        "n": "24",
    }


def test_brackets_survive_printing() -> None:
    """Fails if rich takes an interval, or a method's drafters, for markup and prints nothing in its place."""
    union = TRIAL.model_copy(update={"method": Choice(drafters=("mtp",))})
    text = printed(result_table([(union, MEASUREMENT)], "mine"))
    assert all(part in text for part in ("union[mtp]", "50.0 [41.3, 60.0]", "2.00 [1.50, 2.72]", "1.25 [1.00, 1.50]"))


def test_a_method_that_never_proposed_is_marked() -> None:
    """Fails if plain decoding under another name looks like a method."""
    silent = MEASUREMENT.model_copy(update={"never_proposed": True})
    assert "never proposed!" in printed(result_table([(TRIAL, silent)], "mine"))
    assert "never proposed" not in printed(result_table([(TRIAL, MEASUREMENT)], "mine"))


@pytest.mark.parametrize("n", [24, 201, 999])
def test_one_mismatch_never_looks_like_a_full_match(n: int) -> None:
    """Fails if rounding says 100% of an output that is not lossless."""
    almost = MEASUREMENT.model_copy(update={"match": share(n - 1, n)})
    assert not only_row(result_table([(TRIAL, almost)], "mine"))["match %"].startswith("100")
    assert figure(share(n, n), digits=1, scale=100).startswith("100.0")


def test_there_is_no_table_of_divergences_where_every_output_matches() -> None:
    """Fails if an empty table suggests that something was found."""
    assert divergence_table([(TRIAL, MEASUREMENT)]) is None
    assert divergence_table([]) is None


def test_a_divergence_is_shown_with_its_place_and_margin() -> None:
    """Fails if a numeric tie cannot be told from a bug, or if an output that ended early looks like a token."""
    table = divergence_table([(TRIAL, MEASUREMENT.model_copy(update={"divergences": (DIVERGENCE,)}))])
    assert table is not None
    assert list(only_row(table).values()) == ["tiny float32", "ngram k=4", "r7", "31", "105", "None", "0.0003"]
