"""The job as a person runs it: real processes, a real Ray, a real MLflow database."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from choicespec.cluster.connect import ADDRESS_VARIABLE
from choicespec.tracking.connection import URI_VARIABLE
from choicespec.tracking.registry import ChampionRegistry
from integration.processes import DEADLINE_S, await_from, free_port
from integration.scripted_experiments import scripted_experiment
from mlflow.tracking import MlflowClient

from jobs.bench import main
from jobs.terminal import HOME_VARIABLE

ROOT = Path(__file__).parents[2]
_LONG = 100  # prompts that take seconds, so that a driver can be killed among them


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the jobs' results and their MLflow database lie; a cluster or a server of the caller's is not used."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(folder))
        patch.setenv("COLUMNS", "160")
        for name in (ADDRESS_VARIABLE, URI_VARIABLE):
            patch.delenv(name, raising=False)
        yield folder


class Experiment:
    """An experiment of a test's own, in the common home."""

    def __init__(self, home: Path, name: str, content: dict[str, Any]) -> None:
        self.name, self.yaml = name, home / f"{name}.yaml"
        self._home = home
        self.yaml.write_text(yaml.safe_dump(content), encoding="utf-8")

    def kept(self) -> dict[str, str]:
        """When each kept trial was measured, by method and task."""
        kept = {}
        for file in (self._home / "results" / self.name).glob("[!.]*/measurement.json"):
            trial = json.loads((file.parent / "trial.json").read_text(encoding="utf-8"))
            label = f"{trial['method']['kind']} on {Path(trial['task']['path']).stem}"
            kept[label] = json.loads(file.read_text(encoding="utf-8"))["measured_at"]
        return kept

    def logged(self) -> list[str]:
        """When each trial in the MLflow database was measured; a killed driver leaves an unfinished run behind."""
        client = MlflowClient(tracking_uri=f"sqlite:///{self._home}/mlflow.db")
        found = client.get_experiment_by_name(self.name)
        runs = client.search_runs([found.experiment_id], "attributes.status = 'FINISHED'")
        return sorted(run.data.tags["measured_at"] for run in runs if "measured_at" in run.data.tags)


def _bench(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jobs.bench", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE_S
    )


def _bench_here(*arguments: str | Path) -> str:
    """What the job prints that runs in this process and succeeds: the imports of another one take seconds."""
    printed = StringIO()
    with redirect_stdout(printed):
        status = main([str(one) for one in arguments])
    assert status == 0, printed.getvalue()
    return printed.getvalue()


class Ran(NamedTuple):
    """An experiment that a job has measured while no MLflow server could be reached."""

    experiment: Experiment
    tracking_uri: str
    output: str
    kept: dict[str, str]


@pytest.fixture(scope="module")
def ran(home: Path) -> Ran:
    """One run of the job for the tests of what it says, keeps and logs."""
    experiment = Experiment(home, "unreachable", scripted_experiment(home, {"short": 4}))
    uri = f"http://127.0.0.1:{free_port()}"
    process = _bench(experiment.yaml, **{URI_VARIABLE: uri})
    assert process.returncode == 0, process.stdout + process.stderr
    return Ran(experiment, uri, process.stdout, experiment.kept())


def test_the_table_is_printed_and_the_results_are_kept(ran: Ran) -> None:
    """Fails if a person must open files or a browser to see the result, or a closed terminal takes it away."""
    for word in ("decode tok/s", "speed-up", "accepted/step", "match", "autoregressive", "ngram k=8"):
        assert word in ran.output
    assert set(ran.kept) == {"autoregressive on short", "ngram on short"}


def test_an_unreachable_server_is_said_at_the_start(ran: Ran) -> None:
    """Fails if its absence is said only after hours of measuring, or once a trial."""
    said = f"MLflow at {ran.tracking_uri} cannot be used"
    assert ran.output.count(said) == 1
    assert ran.output.index(said) < ran.output.index("4 prompts") < ran.output.index("speed-up")


def test_kept_results_are_logged_later_and_once(ran: Ran) -> None:
    """Fails if results of the time without a server stay out of MLflow, or a second run measures or logs them again."""
    _bench_here(ran.experiment.yaml, "--log-only")
    assert ran.experiment.logged() == sorted(ran.kept.values())
    second = _bench_here(ran.experiment.yaml)
    assert "2 of them measured already" in second
    assert "ngram k=8" in second
    assert ran.experiment.kept() == ran.kept
    assert ran.experiment.logged() == sorted(ran.kept.values())


def test_the_best_kept_trial_is_promoted(ran: Ran, home: Path) -> None:
    """Fails if what was measured cannot be served without measuring it again."""
    promoted = _bench_here(ran.experiment.yaml, "--log-only", "--promote")
    name = re.search(r"champion of (\S+): version 1, ", promoted)
    assert name, promoted
    assert ChampionRegistry(f"sqlite:///{home}/mlflow.db").reigning(name[1]) == 1


def test_a_killed_driver_goes_on(home: Path) -> None:
    """Fails if a driver that is killed midway loses or repeats what it had measured, or leaves it logged twice."""
    experiment = Experiment(home, "killed", scripted_experiment(home, {"first": 2, "then": _LONG}))
    with subprocess.Popen([sys.executable, "-m", "jobs.bench", str(experiment.yaml)], cwd=ROOT) as driver:
        await_from(driver, lambda: len(experiment.kept()) == 2)
        driver.kill()
    before = experiment.kept()
    assert set(before) == {"autoregressive on first", "ngram on first"}
    again = _bench(experiment.yaml)
    assert again.returncode == 0, again.stdout + again.stderr
    after = experiment.kept()
    assert set(after) == {*before, "autoregressive on then", "ngram on then"}
    assert before.items() <= after.items()
    assert experiment.logged() == sorted(after.values())


def _unknown_field(content: dict[str, Any]) -> None:
    content["methods"] = {"lookup": {"kind": "ngram", "num_drafts": 8}}


def _unknown_kind(content: dict[str, Any]) -> None:
    content["methods"] = {"lookup": {"kind": "n-gram"}}


def _unknown_task(content: dict[str, Any]) -> None:
    content["matrix"] = [{"tasks": ["shrot"]}]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_unknown_field, r"methods\.lookup\.num_drafts: unknown field; known fields: .*num_draft_tokens"),
        (_unknown_kind, r"methods\.lookup\.kind: unknown kind 'n-gram'; known kinds: .*'ngram'"),
        (_unknown_task, r"matrix\.0\.tasks: unknown name 'shrot'; known: short"),
    ],
)
def test_a_wrong_field_is_named(
    home: Path,
    plant: Callable[[dict[str, Any]], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if a misspelling is dropped silently, shown as a traceback, or noticed only after Ray has been started."""
    content = scripted_experiment(home, {"short": 4})
    plant(content)
    monkeypatch.setenv(ADDRESS_VARIABLE, "no-cluster-here:1")  # joining it would be another error
    assert main([str(Experiment(home, "wrong", content).yaml)]) == 2
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["smolm2"],
            r"no experiment at .*smolm2\.yaml; known names: beyond, drafters, llamacpp, peers, published/qwen3-4b, "
            r"published/qwen3\.8-27b, published/qwen3\.8-flash-next, scorer, scorer_union, scripted, "
            r"search, smollm2, vllm",
        ),
        (["smollm2", "--tasks", "chat"], r"--tasks: unknown name 'chat'; known: tool_call, python_repo"),
        (["smollm2", "--methods", "n-gram"], r"--methods: unknown name 'n-gram'; known: autoregressive, ngram"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a wrong name on the command line is answered without those that there are."""
    monkeypatch.setenv(ADDRESS_VARIABLE, "no-cluster-here:1")
    assert main(arguments) == 2
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


def test_a_dry_run_says_what_can_run(home: Path) -> None:
    """Fails if a trial's needs, or why it cannot run, are found out only by running it."""
    content = scripted_experiment(home, {"short": 4}, gpus=(0, 8))
    content["runtimes"]["hf"] = {"kind": "hf", "threads": 1}
    content["matrix"] = [
        {"pairs": ["pair0"], "runtimes": ["scripted"]},
        {"pairs": ["pair1"], "runtimes": ["scripted", "hf"], "methods": ["ngram"]},
    ]
    experiment = Experiment(home, "planned", content)
    planned = _bench_here(experiment.yaml, "--dry-run")
    words = " ".join(re.sub(r"[│┃]", " ", planned).split())
    assert "planned: 4 trials" in words
    assert words.count("1 CPU") >= 4
    assert "8 GPU" in words
    for verdict in ("yes", "no node can", "gpus=8"):
        assert verdict in words, planned
    assert experiment.kept() == {}
