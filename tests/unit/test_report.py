"""The report: figures beside the published ones, both languages, and nothing from outside in its HTML."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from choicespec.errors import ChoiceSpecError
from choicespec.measuring.cost import Costs, Curve, ProposerCost
from choicespec.replay.predicted import Predicted, keep_predicted
from choicespec.replay.sweep import Tried
from choicespec.reports import words
from choicespec.reports.collected import collect
from choicespec.reports.comparison import DecodeRow, published_table
from choicespec.reports.content import Report, report_of
from choicespec.reports.drawing import Scale
from choicespec.reports.markdown import render_markdown
from choicespec.reports.page import render_page
from choicespec.reports.plot import Plot
from choicespec.reports.replay_plots import pareto_front
from choicespec.reports.words import LANGUAGES, Word
from unit.kept_trials import keep, measurement, trial

HOSTILE = "<img src=x onerror=alert(1)>|*x*"
OWN = {"target": {"model": "mine"}}
COSTS = Costs(
    device="a device",
    runtime_build="a build",
    precision="float32",
    threads=2,
    measured_at="2030-01-01",
    rounds=5,
    verification=Curve(
        contexts=(128,), tokens=(1, 2, 4), ms=((10, 15, 20),), low_ms=((9, 14, 19),), high_ms=((11, 16, 21),)
    ),
    rest_ms=1,
    ngram=ProposerCost(first_ms=1, step_ms=1),
    candidates=ProposerCost(first_ms=1, step_ms=1),
    scorer=None,
)


def report(results: Path, *experiments: str) -> Report:
    return report_of(collect(results, experiments))


def by_title(found: Report) -> dict[str, Plot]:
    return {plot.title.en: plot for plot in found.plots}


def measured_rows(found: Report) -> list[DecodeRow]:
    return [row for row in found.published if row.measured is not None]


def test_every_published_row_is_there_measured_or_not(tmp_path: Path) -> None:
    """Fails if a row that was not measured is left out, or looks as if it were."""
    rows = published_table([])
    assert len(rows) == 92
    assert all(row.prompts == words.NOT_MEASURED for row in rows)
    assert all(cell[1:] == ("", "", "") for row in rows for cell in row.cells)
    assert [cell.published for cell in rows[1].cells] == ["3.77", "293.9", "4.10", "100.0"]
    keep(tmp_path, "mine", trial(), measurement())
    assert len(report(tmp_path).published) == 92


def test_a_measured_row_has_its_interval_n_and_the_difference(tmp_path: Path) -> None:
    """Fails if a figure stands beside another row's, without its interval, or the difference has the wrong sign."""
    keep(tmp_path, "mine", trial(), measurement(speedup=3.5, matching=12))
    (row,) = measured_rows(report(tmp_path))
    assert (row.place[0], row.method, row.prompts) == ("Qwen3-4B", "choice", "24")
    assert row.cells[0] == ("3.77", "3.50", "[1.75, 7.00]", "-0.27")
    assert row.cells[2] == ("4.10", "4.50", "[2.25, 9.00]", "+0.40")
    assert row.cells[3].measured == "50.0"
    assert row.cells[3].difference == "-50.0"


def test_a_figure_that_was_not_published_has_no_difference(tmp_path: Path) -> None:
    """Fails if nothing is taken for 0."""
    vllm = trial(runtime={"kind": "vllm"}, method={"kind": "ngram", "num_draft_tokens": 8})
    keep(tmp_path, "mine", vllm, measurement())
    (row,) = measured_rows(report(tmp_path))
    assert row.cells[2] == ("", "4.50", "[2.25, 9.00]", "")


def test_the_latest_measurement_of_a_row_counts(tmp_path: Path) -> None:
    """Fails if an older figure, or one of fewer prompts, stands in for what was measured last."""
    keep(tmp_path, "first", trial(), measurement(speedup=3.0, day=2))
    keep(tmp_path, "second", trial(task={"kind": "tool_call", "context_tokens": 300, "limit": 8}), measurement(day=1))
    (row,) = measured_rows(report(tmp_path))
    assert row.cells[0].measured == "3.00"


def test_what_was_never_published_has_a_table_of_its_own(tmp_path: Path) -> None:
    """Fails if a person's own model is lost beside the published ones, or is compared with another model."""
    keep(tmp_path, "mine", trial(pair=OWN), measurement())
    found = report(tmp_path)
    assert measured_rows(found) == []
    ((experiment, (row,)),) = found.own
    assert experiment == "mine"
    assert row.place == ("mine", "float32", "hf", "300", "tool_call", "")
    assert row.cells[0] == ("", "4.00", "[2.00, 8.00]", "")


def test_a_method_that_drafted_nothing_is_marked(tmp_path: Path) -> None:
    """Fails if plain decoding under another name looks like a method, or like the fastest."""
    keep(tmp_path, "mine", trial(pair=OWN), measurement(never_proposed=True))
    found = report(tmp_path)
    assert found.own[0][1][0].remark == words.NEVER_PROPOSED
    assert words.NEVER_PROPOSED.ja in render_page(found)
    assert found.best == []


def test_the_fastest_of_the_lossless_is_named(tmp_path: Path) -> None:
    """Fails if speed is bought with other outputs."""
    keep(tmp_path, "mine", trial(pair=OWN), measurement(speedup=9.0, matching=23))
    keep(tmp_path, "mine", trial(pair=OWN, method={"kind": "ngram"}), measurement(speedup=2.0))
    (best,) = report(tmp_path).best
    assert best.kept is not None
    assert best.kept.trial.method.kind == "ngram"


def test_a_plot_without_data_says_what_makes_it(tmp_path: Path) -> None:
    """Fails if a person looks at empty axes."""
    found = report(tmp_path)
    page = render_page(found)
    empty = [plot for plot in found.plots if not plot.facets]
    assert {"Speed-up by method", "What a verification costs", "Predicted against live"} <= {p.title.en for p in empty}
    for plot in empty:
        assert plot.command in page
    drawn = [plot for plot in found.plots if plot.facets]
    assert [plot.title.en for plot in drawn] == ["Speed-up against context"]  # of the published rows
    assert page.count('class="plane"') == len(drawn[0].facets)


def test_every_plot_is_drawn_from_what_is_kept(tmp_path: Path) -> None:
    """Fails if a plot does not find its data where the jobs keep it."""
    keep(tmp_path, "mine", trial(pair=OWN), measurement(matching=22))
    keep(tmp_path, "mine/search/tool_call-0123/live", trial(), measurement())
    keep_predicted(
        tmp_path / "mine", [Predicted(trial=trial(pair=OWN), tokens_per_s=39, accepted_per_step=4, requests=24)]
    )
    COSTS.save(tmp_path / "mine" / "recordings" / "costs-0123.json")
    keep_sweep(tmp_path / "mine" / "search" / "tool_call-0123" / "sweep.parquet", [setting(40, 10), setting(30, 2)])
    plots = by_title(report(tmp_path))
    assert all(plot.facets for plot in plots.values())
    assert plots["Predicted against live"].sheet.rows[0][-2:] == ("-2.5", "24")
    assert ("mine", "128", "4", "20.0", "1.00") in plots["What a verification costs"].sheet.rows
    assert [row[4] for row in plots["Match, and margins where outputs part"].sheet.rows] == ["0.0003", "0.003"]
    assert plots["Where a step's time goes"].sheet.rows[0][2:] == ("1.33", "0.67", "8.17", "0.50", "10.67")
    lengths = {row[2:] for row in plots["Accepted length by source"].sheet.rows}
    assert lengths == {("prompt", "3", "1"), ("schema", "0", "1"), (words.NO_DRAFT, "0", "1")}
    assert len(report(tmp_path).own[0][1]) == 1, "a race's trial, which may have ended early, is in no table"
    assert measured_rows(report(tmp_path)) == []


def test_a_prediction_of_other_requests_is_not_compared(tmp_path: Path) -> None:
    """Fails if a replay of all prompts stands beside a measurement of some."""
    keep(tmp_path, "mine", trial(), measurement())
    keep_predicted(tmp_path / "mine", [Predicted(trial=trial(), tokens_per_s=39, accepted_per_step=4, requests=8)])
    assert not by_title(report(tmp_path))["Predicted against live"].facets


def test_full_match_is_an_answer(tmp_path: Path) -> None:
    """Fails if no divergence looks like no data."""
    keep(tmp_path, "mine", trial(pair=OWN), measurement())
    page = render_page(report(tmp_path))
    assert "All 24 outputs of the 1 methods measured are plain decoding&#x27;s" in page


def test_published_and_measured_contexts_are_on_one_plot(tmp_path: Path) -> None:
    """Fails if what was measured at two lengths is not laid beside what was published of them."""
    for context in (300, 16384):
        keep(tmp_path, "mine", trial(task={"kind": "tool_call", "context_tokens": context}), measurement())
    rows = by_title(report(tmp_path))["Speed-up against context"].sheet.rows
    own = [row for row in rows if row[:2] == ("Qwen3-4B bf16 · transformers (eager) · Tool Call", "choice L=8")]
    assert [(row[2], row[3], row[4]) for row in own] == [
        ("300", words.MEASURED, "4.00"),
        ("16384", words.MEASURED, "4.00"),
        ("300", words.PUBLISHED, "3.77"),
        ("16384", words.PUBLISHED, "0.98"),
    ]


class Elements(HTMLParser):
    """Every element of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_comes_from_outside_is_text(tmp_path: Path) -> None:
    """Fails if a model's, a task's or an experiment's name becomes a part of the page or breaks a table."""
    hostile = trial(pair={"target": {"model": HOSTILE}, "drafters": {HOSTILE: {"kind": "mtp"}}})
    hostile = hostile.model_copy(update={"method": trial(method={"kind": "draft", "drafter": HOSTILE}).method})
    keep(tmp_path, "mine", hostile, measurement(matching=23, measured_at=f"2030-01-01{HOSTILE}"))
    found = report(tmp_path)
    elements = Elements(render_page(found))
    assert "img" not in elements.names
    assert not [one for one in elements.attributes if one[1].startswith("on")]
    assert any(HOSTILE in text for text in elements.texts)
    for language in LANGUAGES:
        document = render_markdown(found, language)
        assert HOSTILE not in document
        tables = [block.splitlines() for block in document.split("\n\n") if block.startswith("|")]
        assert tables
        for table in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Fails if the page cannot be read without a network."""
    keep(tmp_path, "mine", trial(), measurement())
    page = render_page(report(tmp_path))
    elements = Elements(page)
    addresses = [value for _, name, value in elements.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert addresses
    assert all(value.startswith("#") or value == "data:," for value in addresses)
    assert not re.search(r"https?:|@import|url\(|fetch\(", page)


def test_both_languages_are_whole() -> None:
    """Fails if a word is missing in a language, or has a placeholder that the other lacks."""
    table = {name: word for name, word in vars(words).items() if isinstance(word, Word)}
    assert len(table) > 50
    for name, word in table.items():
        assert all(text.strip() for text in word), name
        placeholders = [sorted(re.findall(r"\{(\w*)\}", text)) for text in word]
        assert placeholders[0] == placeholders[1], name
    japanese = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
    untranslated = {name for name, word in table.items() if word.en != word.ja and not japanese.search(word.ja)}
    assert untranslated == {"LANGUAGE_SWITCH"}  # which is written in the other language


def test_the_page_holds_every_word_in_both_languages(tmp_path: Path) -> None:
    """Fails if what is English on the page has no Japanese beside it."""
    keep(tmp_path, "mine", trial(), measurement(matching=23))
    spans = [value for _, name, value in Elements(render_page(report(tmp_path))).attributes if name == "lang"]
    assert spans[0] == "en"  # of the page itself
    assert spans.count("ja") == spans.count("en") - 1 > 100


def test_an_experiment_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Fails if a misspelt name gives an empty report."""
    keep(tmp_path, "mine", trial(), measurement())
    with pytest.raises(ChoiceSpecError, match=r"nothing is kept of 'mnie'.*kept: mine"):
        report(tmp_path, "mnie")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Fails if one damaged file costs the whole report, or is passed over in silence."""
    keep(tmp_path, "mine", trial(), measurement())
    for name in ("predicted.json", "costs-0.json", "scorer.json", "sweep.parquet"):
        (tmp_path / "mine" / name).write_text("{}")
    damaged = tmp_path / "mine" / "0123"
    damaged.mkdir()
    (damaged / "measurement.json").write_text("{}")
    found = report(tmp_path)
    assert len(measured_rows(found)) == 1
    assert len(found.unreadable) == 5
    assert "costs-0.json" in render_page(found)


def setting(tokens_per_s: float, proposed: int) -> Tried:
    return Tried("space", "{}", tokens_per_s, 1.0, 1, proposed, 1.0, 1.0, 1.0, 0.0)


def keep_sweep(path: Path, tried: list[Tried]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([one._asdict() for one in tried]), path)


def test_the_front_holds_what_nothing_beats() -> None:
    """Fails if a setting is on the front although another is faster with less work."""
    good = [setting(10, 1), setting(20, 2), setting(30, 5)]
    beaten = [setting(9, 1), setting(15, 3), setting(30, 6), setting(29, 5)]
    assert pareto_front([*beaten, *good]) == good


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 4.2), [0, 1, 2, 3, 4]),
        (Scale(0, 260), [0, 50, 100, 150, 200, 250]),
        (Scale(0.0005, 2, log=True), [0.001, 0.01, 0.1, 1]),
        (Scale(1, 64, marked=(1, 8)), [1, 8]),
    ],
)
def test_an_axis_is_marked_at_round_values(scale: Scale, ticks: list[float]) -> None:
    """Fails if an axis has no marks, or more than a person can read."""
    assert scale.ticks == pytest.approx(ticks)
    assert [scale.at(scale.low), scale.at(scale.high), scale.at(2 * scale.high)] == [0, 100, 100]
