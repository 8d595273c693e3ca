"""The scorer table: its rows, and the published rows beside them."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from choicespec.records import Estimate
from choicespec.reports import words
from choicespec.reports.collected import ScorerRows
from choicespec.reports.published_rows import PublishedScorerRow, scorer_rows
from choicespec.reports.scorer_rows import scorer_sheet
from choicespec.reports.scorer_table import counterpart, scorer_table
from choicespec.scorer.evaluate import Comparison, Ranking
from choicespec.scorer.table import Row, Variant, variants
from choicespec.spec.experiment_files import load_experiment
from choicespec.spec.pair import DrafterSpec
from choicespec.spec.training import FitSpec, ScorerTraining
from rich.console import Console

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
NUM_LAYERS = 30  # of the embedded default, which the experiment is about
UNION = ("union", "union_mtp", "union_all")  # with drafters' drafts among the candidates
KNOWN = {name: DrafterSpec(kind=kind, model="m") for name, kind in (("flash", "dflash"), ("head", "mtp"))}
TRAINING = ScorerTraining(pair="p", layers=(24,), other_layers=(8, 30), train_limits={"tool_call": 8})


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.125, high=value + 0.125, n=64)


def ranking(top1: float, accepted: float, on_path: float) -> Ranking:
    return Ranking(top1=estimate(top1), accepted=estimate(accepted), accepted_on_path=estimate(on_path))


FOUND = Comparison(
    prior=ranking(0.5, 2.0, 3.0),
    scorer=ranking(0.75, 2.5, 3.75),
    oracle=ranking(1.0, 3.0, 4.0),
    candidates=8.5,
    positions=640,
    calibration_error_tokens=0.25,
    bias_tokens=-0.0625,
)


def row(
    variant: Variant | None = None, task: str = "tool_call", fitted_to: str = "", precision: str = "float32"
) -> Row:
    """A row with figures made up, of a scorer fitted to the target in its own precision unless another is given."""
    chosen, transferred = variant or next(variants(TRAINING, {})), fitted_to not in ("", precision)
    return Row(variant=chosen, task=task, precision=precision, train_prompts=96, found=FOUND, transferred=transferred)


def rows_of_the_experiment() -> Iterator[Row]:
    """Every row that ``jobs.train evaluate scorer`` makes."""
    experiment = load_experiment("scorer", EXPERIMENTS)
    assert experiment.scorer is not None
    training = experiment.scorer
    main = experiment.pairs[training.pair].target.precision
    for task in training.train_limits:
        yield from (row(variant, task, precision=main) for variant in variants(training, {}))
        for name in training.transfer:
            yield row(next(variants(training, {})), task, main, experiment.pairs[name].target.precision)


def published(target: str, hidden: str) -> PublishedScorerRow:
    (found,) = [one for one in scorer_rows() if (one.target, one.hidden, one.candidates) == (target, hidden, "finite")]
    return found


def cells(*rows: Row) -> list[dict[str, str]]:
    """A dictionary from heading to cell, a row each."""
    table = scorer_table(rows, NUM_LAYERS, "mine")
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    return [{heading: column[number] for heading, column in columns.items()} for number in range(len(rows))]


def test_every_published_finite_row_has_a_counterpart() -> None:
    """Fails if the experiment that stands beside the published table leaves a row of it without one of ours."""
    found = {counterpart(one, NUM_LAYERS) for one in rows_of_the_experiment()}
    missing = [one for one in scorer_rows() if one.candidates == "finite" and one not in found]
    assert not missing


UNIONS = TRAINING.model_copy(update={"drafters": ("flash", "head"), "other_sets": ((), ("head",), ("flash",))})


def test_each_set_has_a_scorer_of_its_own_and_layers_are_compared_on_finite_ones() -> None:
    """Fails if a set is left out or comes twice, or if the scorer itself is not the first."""
    found = [(variant.name, variant.candidates) for variant in variants(UNIONS, KNOWN)]
    sets = ("union[flash,head]", "finite", "union[head]", "union[flash]")
    assert found[:4] == [("scorer", one) for one in sets]
    assert found[4:6] == [("layer 8", "finite"), ("layer 30", "finite")]
    assert {candidates for _, candidates in found[6:]} == {sets[0]}
    bare = UNIONS.model_copy(update={"ablations": False})
    assert [(variant.name, variant.candidates) for variant in variants(bare, KNOWN)] == found[:6]


def test_a_union_stands_beside_the_published_union_of_its_drafters() -> None:
    """Fails if a union's figure is compared with that of finite sets, of other drafters or of another task."""
    (all_of, finite, head, flash), tool = list(variants(UNIONS, KNOWN))[:4], ("Qwen3-4B", "Qwen3.8-27B")
    code = [counterpart(row(one, "python_repo"), NUM_LAYERS) for one in (finite, flash, head, all_of)]
    assert [one and (one.target, one.candidates) for one in code] == [
        ("Qwen3-4B (Python)", "finite"),
        ("Qwen3-4B (Python)", "union"),
        None,
        None,
    ]
    calls = [counterpart(row(one), NUM_LAYERS) for one in (finite, flash, head, all_of)]
    assert [one and (one.target, one.hidden, one.candidates) for one in calls] == [
        (tool[0], "bf16", "finite"),
        (tool[0], "bf16", "union"),
        (tool[1], "bf16", "union_mtp"),
        (tool[1], "bf16", "union_all"),
    ]
    other = counterpart(row(flash, fitted_to="float32", precision="q4_0 float32"), NUM_LAYERS)
    assert other is not None
    assert (other.hidden, other.candidates) == ("NF4, scorer trained on bf16", "union")


def test_a_scorer_over_no_drafts_stays_the_row_that_it_was() -> None:
    """Fails if every row that was kept before there were unions is fitted again."""
    kept = next(variants(TRAINING, {})).model_dump_json()
    assert "drafters" not in kept


def test_published_rows_with_a_drafters_proposals_have_none() -> None:
    """Fails if a row of finite candidates stands beside one whose sets also hold what a drafter proposed."""
    found = {counterpart(one, NUM_LAYERS) for one in rows_of_the_experiment()} - {None}
    assert {one.candidates for one in found if one} == {"finite"}
    assert {one.candidates for one in scorer_rows()} == {"finite", *UNION}


def test_a_row_stands_beside_the_published_one_of_its_kind() -> None:
    """Fails if a figure is compared with that of another precision, layer or task."""
    main, last = (variant for variant in variants(TRAINING, {}) if variant.name in ("scorer", "layer 30"))
    assert counterpart(row(main), NUM_LAYERS) == published("Qwen3-4B", "bf16")
    assert counterpart(row(main, "python_repo"), NUM_LAYERS) == published("Qwen3-4B (Python)", "bf16")
    assert counterpart(row(last), NUM_LAYERS) == published("Qwen3.8-27B", "bf16 (layer 64)")
    nf4 = published("Qwen3.8-27B", "NF4, scorer trained on bf16")
    assert counterpart(row(main, fitted_to="float32", precision="q4_0 float32"), NUM_LAYERS) == nf4
    fp8 = published("Qwen3.8-27B", "FP8, scorer trained on bf16")
    assert counterpart(row(main, fitted_to="float32", precision="bfloat16"), NUM_LAYERS) == fp8


def test_only_a_transferred_scorer_stands_beside_a_transferred_one() -> None:
    """Fails if a scorer that was fitted to a bfloat16 target, as those published were, counts as a transfer."""
    assert counterpart(row(precision="bfloat16"), NUM_LAYERS) == published("Qwen3-4B", "bf16")
    assert counterpart(row(task="python_repo", precision="bfloat16"), NUM_LAYERS) == published(
        "Qwen3-4B (Python)", "bf16"
    )


def test_three_quarters_of_the_layers_are_the_published_earlier_layer() -> None:
    """Fails if the published layer 48 of 64 stands beside a layer of another depth."""
    earlier = published("Qwen3.8-27B", "bf16 (layer 48)")
    for layer, num_layers in ((24, 32), (27, 36), (48, 64)):
        variant = Variant(name=f"layer {layer}", layers=(layer,), fit=FitSpec())
        assert counterpart(row(variant), num_layers) == earlier
        assert counterpart(row(variant), 2 * num_layers) is None


@pytest.mark.parametrize("precision", ["q4_0 float32", "bfloat16"])
def test_code_transferred_to_another_precision_was_not_published(precision: str) -> None:
    """Fails if a quantised target's figures on code stand beside those of one that was not."""
    assert counterpart(row(task="python_repo", fitted_to="float32", precision=precision), NUM_LAYERS) is None


def test_ablations_were_not_published() -> None:
    """Fails if a scorer without hidden states, of another split or of another seed stands beside a published one."""
    ablations = [variant for variant in variants(TRAINING, {}) if not variant.name.startswith(("layer", "scorer"))]
    assert ablations
    for variant in ablations:
        for task in ("tool_call", "python_repo"):
            assert counterpart(row(variant, task), NUM_LAYERS) is None


def test_variants_differ_from_the_scorer_in_what_they_are_named_for() -> None:
    """Fails if an ablation is the scorer itself under another name, changes two things at once, or comes twice."""
    main, *others = variants(TRAINING, {})
    assert (main.layers, main.split_by, main.hidden_states, main.prior) == ((24,), "prompt", True, True)
    assert main.fit == TRAINING.fit
    every = [variant.model_dump(exclude={"name"}) for variant in (main, *others)]
    assert all(one not in every[:number] for number, one in enumerate(every))
    named_for = {
        "split by function": "split_by",
        "layer": "layers",
        "without hidden state": "hidden_states",
        "without prior features": "prior",
        "seed": "fit",
    }
    for variant in others:
        changed = {field for field, value in variant if value != getattr(main, field)} - {"name"}
        assert {named_for[name] for name in named_for if variant.name.startswith(name)} == changed


def test_states_at_sources_are_blanked_where_the_hidden_state_is() -> None:
    """Fails if an ablation that is to read no hidden state still reads some, if there is no row that reads the others
    alone, or if layers that are read for this have rows as if a scorer read nothing else."""
    training = TRAINING.model_copy(update={"source_layers": (4, 24)})
    main, *others = variants(training, {})
    assert main.source_layers == (4, 24)
    by_name = {variant.name: variant for variant in others}
    assert by_name["without source states"] == main.model_copy(
        update={"name": "without source states", "source_layers": ()}
    )
    assert by_name["without hidden state"].source_layers == by_name["without prior features"].source_layers == ()
    assert "without source states" not in {variant.name for variant in variants(TRAINING, {})}
    assert "layer 4" not in by_name
    assert training.recorded_layers == (4, 8, 24, 30)
    assert "source_layers" not in next(variants(TRAINING, {})).model_dump(), "or rows made before are made again"
    assert counterpart(row(by_name["without source states"]), NUM_LAYERS) is None


@pytest.mark.parametrize(("layers", "others"), [((24,), (8, 30)), ((24, 30), (8,))])
def test_each_recorded_layer_has_a_row_of_its_own(layers: tuple[int, ...], others: tuple[int, ...]) -> None:
    """Fails if a layer that a scorer reads beside others is never judged alone, or a scorer of one layer twice."""
    training = TRAINING.model_copy(update={"layers": layers, "other_layers": others})
    alone = [variant.layers for variant in variants(training, {}) if variant.hidden_states and len(variant.layers) == 1]
    for layer in (8, 24, 30):
        assert (layer,) in alone
    names = [variant.name for variant in variants(training, {})]
    assert len(set(names)) == len(names)


def test_another_first_seed_still_gives_other_seeds() -> None:
    """Fails if a scorer that was fitted with seed 1 is compared with itself."""
    training = TRAINING.model_copy(update={"fit": FitSpec(seed=1)})
    seeds = [variant.fit.seed for variant in variants(training, {}) if variant.name.startswith(("scorer", "seed"))]
    assert len(set(seeds)) == len(seeds) == 3


def test_a_row_holds_every_figure_with_its_interval_and_n() -> None:
    """Fails if a figure is printed without its interval, under another heading, or without what it was measured on."""
    (found,) = cells(row())
    (last,) = [heading for heading in found if heading.startswith("published")]
    assert found.pop(last) == "Qwen3-4B bf16, finite: 60.3 -> 80.3; 3.84 -> 4.73 (5.48)"
    assert found == {
        "task": "tool_call",
        "candidates": "finite",
        "scorer": "scorer",
        "target": "float32",
        "n": "64",
        "top-1 %": "50.0 -> 75.0 [62.5, 87.5]",
        "accepted, all positions": "2.00 -> 2.50 [2.38, 2.62] (3.00)",
        "gap %": "75",
        "accepted, decode path": "3.00 -> 3.75 [3.62, 3.88] (4.00)",
        "calibration": "0.25",
    }


def test_both_shares_of_the_gap_are_printed() -> None:
    """Fails if one column of the two is printed twice."""
    table = scorer_table([row()], NUM_LAYERS, "mine")
    assert [list(column.cells) for column in table.columns if column.header == "gap %"] == [["50"], ["75"]]


def test_the_table_prints() -> None:
    """Fails if rich takes an interval for markup, or if a row without a counterpart cannot be printed."""
    text = StringIO()
    rows = [
        row(),
        row(task="python_repo"),
        row(next(variants(TRAINING, {})).model_copy(update={"hidden_states": False})),
    ]
    Console(file=text, width=240).print(scorer_table(rows, NUM_LAYERS, "mine"))
    for part in (
        "mine",
        "50.0 -> 75.0 [62.5, 87.5]",
        "3.75 [3.62, 3.88]",
        "Qwen3-4B (Python) bf16, finite: 63.0 -> 70.8",
    ):
        assert part in text.getvalue()


def test_the_report_has_every_published_row_and_every_own() -> None:
    """Fails if a published row is left out or a difference has the wrong sign, or an ablation is not shown."""
    main, ablation = (
        variant for variant in variants(TRAINING, {}) if variant.name in ("scorer", "without hidden state")
    )
    rows = scorer_sheet([ScorerRows("mine", NUM_LAYERS, (row(ablation), row(main)))]).rows
    assert len(rows) == 13 + 1
    assert [line[1] for line in rows].count(words.NOT_MEASURED) == 12
    first, *_, last = rows
    assert first == (
        "Qwen3-4B\nbf16, finite",
        "tool_call, scorer\nfloat32 (mine)",
        "64",
        "60.3 → 80.3",
        "50.0 → 75.0\n[62.5, 87.5]",
        "-5.3",
        "3.84 → 4.73 (5.48)",
        "2.00 → 2.50 (3.00)\n[2.38, 2.62]",
        "-2.23",
        "50",
        "3.00 → 3.75 (4.00)\n[3.62, 3.88]",
    )
    assert last[:2] == ("", "tool_call, without hidden state\nfloat32 (mine)")
    assert (last[5], last[8]) == ("", "")
