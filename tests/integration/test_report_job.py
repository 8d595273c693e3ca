"""The report, from an experiment that was really measured and really kept: by the job, from MLflow, in a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from choicespec.measuring.measure import TrialResult, measure
from choicespec.results import ResultsFolder
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.experiment import ExperimentSpec, parse_experiment
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import URI_VARIABLE, tracking_uri
from choicespec.tracking.runs import ExperimentRun
from integration.chromium import NAMES, Page, find_chromium, open_page

from jobs.report import main
from jobs.terminal import HOME_VARIABLE

_PHONE, _LAPTOP = 390, 1280


@pytest.fixture(scope="module")
def experiment() -> ExperimentSpec:
    content = {
        "name": "looked at",
        "pairs": {"table": {"target": {"model": "a <b>table</b>"}}},
        "runtimes": {"scripted": {"kind": "scripted"}},
        "tasks": {"tool_call": {"kind": "tool_call", "limit": 3, "max_new_tokens": 40}},
        "methods": {
            "autoregressive": {"kind": "autoregressive"},
            "ngram": {"kind": "ngram"},
            "prior": {"kind": "choice", "min_survival": 0.0},
        },
    }
    return parse_experiment(content, "this test")


@pytest.fixture(scope="module")
def home(experiment: ExperimentSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the experiment has been measured, kept and logged."""
    folder = tmp_path_factory.mktemp("home")
    trials = experiment.trials()
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), trials[0].pair)
    prompts = open_task(trials[0].task).prompts(runtime.tokenizer, runtime.context_tokens)
    results = ResultsFolder(folder / "results" / experiment.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(folder))
        patch.delenv(URI_VARIABLE, raising=False)
        run = ExperimentRun(tracking_uri(folder), experiment)
        for event in measure(runtime, trials, prompts):
            if isinstance(event, TrialResult):
                results.keep(event)
                run.log(event.trial, event.measurement, results.path(event.trial))
        run.finish([])
        yield folder


@pytest.fixture(scope="module")
def written(home: Path) -> Path:
    """What the job wrote of the kept files."""
    assert main([]) == 0
    return home / "report"


def test_the_job_writes_a_page_and_both_documents(written: Path) -> None:
    """Fails if what was measured does not reach what people look at, or its traces do not."""
    page = (written / "report.html").read_text(encoding="utf-8")
    assert "choice prior L=8" in page
    assert "a &lt;b&gt;table&lt;/b&gt; float32 · scripted · tool_call (looked at)" in page
    assert "All 6 outputs of the 2 methods measured are plain decoding" in page
    for language, said in (("en", "Accepted length by source"), ("ja", "提案元別の採択長の分布")):
        document = (written / f"report.{language}.md").read_text(encoding="utf-8")
        assert "ngram k=8" in document
        assert said in document


def test_mlflow_gives_the_same_report(home: Path, written: Path, tmp_path: Path) -> None:
    """Fails if a run logged to MLflow lacks what the report needs, or what is copied is read otherwise."""
    assert main(["looked at", "--mlflow", "--output", str(tmp_path)]) == 0
    for name in ("report.html", "report.en.md", "report.ja.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (written / name).read_text(encoding="utf-8")


def test_an_unknown_experiment_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a misspelt name ends in a traceback or an empty page."""
    for arguments in (["loked at"], ["loked at", "--mlflow"]):
        assert main(arguments) == 2
        assert "nothing is kept of 'loked at'" in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def page(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The written page in a browser."""
    path = find_chromium()
    assert path is not None, f"the page is tested in a Chromium; install one, under one of the names {', '.join(NAMES)}"
    with open_page(path, tmp_path_factory.mktemp("profile"), (written / "report.html").as_uri()) as page:
        yield page


@pytest.mark.parametrize("width", [_PHONE, _LAPTOP])
@pytest.mark.parametrize("language", ["en", "ja"])
def test_the_page_fits(page: Page, width: int, language: str) -> None:
    """Fails if a person must scroll sideways, or cannot read the text of a plot."""
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width == _PHONE
    )
    page.run(f"document.documentElement.lang = '{language}'")
    assert page.run("document.documentElement.scrollWidth") <= width
    sizes = "[...document.querySelectorAll('svg text')].map((text) => parseFloat(getComputedStyle(text).fontSize))"
    assert min(page.run(sizes)) >= 11
    beyond = "[...document.querySelectorAll('.facet')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.run(beyond) == 0


def test_the_language_switch_works(page: Page) -> None:
    """Fails if a person sees both languages at once, or one only."""
    page.run("document.documentElement.lang = 'en'")
    heading = "document.querySelector('h1').innerText"
    shown = [page.run(heading)]
    page.run("document.getElementById('language').click()")
    shown.append(page.run(heading))
    page.run("document.getElementById('language').click()")
    shown.append(page.run(heading))
    assert shown == ["choicespec: what was measured", "choicespec 計測レポート", "choicespec: what was measured"]


def test_both_schemes_can_be_read(page: Page) -> None:
    """Fails if text or marks of a plot vanish in the dark, or in the light."""
    contrasts = """(() => {
        const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => part / 255)
                .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const between = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        const card = light(getComputedStyle(document.querySelector('.facet')).backgroundColor);
        const marks = [...document.querySelectorAll('.facet .mark:not(.hollow), .facet .area, .facet .tick')];
        return marks.map((mark) => between(light(getComputedStyle(mark).fill), card));
    })()"""
    for scheme in ("light", "dark"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert min(page.run(contrasts)) >= 3, scheme


def test_nothing_fails_in_the_console(page: Page) -> None:
    """Fails if the page's script has a fault, or the page loads what is not in it."""
    assert page.faults() == []
    names = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in names if not name.startswith("data:")] == []
