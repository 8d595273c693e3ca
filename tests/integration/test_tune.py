"""Recording, replaying and tuning as a person runs them, on a small random target: real Ray, Tune and MLflow."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import yaml
from choicespec.measuring.cost import load_costs
from choicespec.records import Measurement
from choicespec.reports.collected import collect
from choicespec.serving.champion import read_champion
from choicespec.tracking.registry import ChampionRegistry
from integration.job_homes import job_home, write_repository
from integration.processes import await_from
from integration.small_checkpoints import save_checkpoint, small_llama
from mlflow.tracking import MlflowClient

from jobs import bench, record, tune

NAME = "small"
SETTINGS, LIVE = 240, 4
ROOT = Path(__file__).parents[2]
FINISHED = (
    "recordings/*/*.safetensors",
    "recordings/costs-*.json",
    "search/*/sweep.parquet",
    "search/*/live/*/measurement.json",
)
_SPREAD = 0.15  # the target repeats itself now and then, so that drafts are right in part


class Tuned(NamedTuple):
    """What the jobs printed, and where they keep things.

    Attributes:
        kept: what there was when the search's first driver was killed, and when it was written.
    """

    home: Path
    yaml: str
    kept: dict[Path, int]
    recorded: str
    replayed: str
    tuned: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where results and the MLflow database lie; jobs join a cluster of one node."""
    with job_home(tmp_path_factory.mktemp("home"), cpus=1) as folder:  # so that shards share a process
        yield folder


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The experiment."""
    model = small_llama(vocab_size=256, initializer_range=_SPREAD)
    target = {"model": str(save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model))}
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=40)
    code = {"kind": "python_repo", "folder": str(repo), "max_new_tokens": 16}
    return {
        "pairs": {"small": {"target": target}},
        "runtimes": {"hf": {"kind": "hf", "threads": 1}},
        "tasks": {"searched": {**code, "split": "train", "limit": 3}, "held_out": {**code, "limit": 3}},
        "methods": {"ngram": {"kind": "ngram", "num_draft_tokens": 4}, "prior": {"kind": "choice", "block_length": 4}},
        "matrix": [{"tasks": ["searched"]}],
        "search": {
            "pair": "small",
            "tasks": {"searched": "held_out"},
            "default": "ngram",
            "settings": SETTINGS,
            "shards": 2,
            "live": LIVE,
            "objectives": ["decode_tokens_per_s", "prefill_ms", "memory_bytes"],
            "spaces": {
                "ngram": {"start": "ngram", "vary": {"method.num_draft_tokens": {"low": 1, "high": 8}}},
                "prior": {"start": "prior", "vary": {"method.block_length": {"low": 2, "high": 5}}},
            },
        },
    }


@pytest.fixture(scope="module")
def tuned(home: Path, content: dict[str, Any]) -> Tuned:
    """A search whose driver is killed once it has replayed, then the other jobs on what it has recorded."""
    path = home / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    kept = kill_tune(path, home / "results" / NAME, "search/*/sweep.parquet")
    tuned = run(tune, str(path))
    return Tuned(home, str(path), kept, run(record, str(path)), run(bench, str(path), "--replay"), tuned)


def kill_tune(path: Path, results: Path, stage: str) -> dict[Path, int]:
    """Kill a driver once a file of a stage is there; returns all that is finished, and when it was written."""
    with subprocess.Popen([sys.executable, "-m", "jobs.tune", str(path)], cwd=ROOT) as driver:
        await_from(driver, lambda: any(finished(results, stage)))
        driver.kill()
    return {file: file.stat().st_mtime_ns for kind in FINISHED for file in finished(results, kind)}


def finished(results: Path, pattern: str) -> Iterator[Path]:
    """Files of finished parts: what is being written has a name that begins with a dot, or ends otherwise."""
    return (file for file in results.glob(pattern) if not file.parent.name.startswith("."))


def run(job: Any, *arguments: str, status: int = 0) -> str:
    """What a job prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        found: int = job.main(arguments)
    assert found == status, printed.getvalue()
    return printed.getvalue()


def measurement_of(file: Path) -> Measurement:
    return Measurement.model_validate_json(file.read_text(encoding="utf-8"))


def measurements(folder: Path) -> list[Measurement]:
    return [measurement_of(file) for file in finished(folder, "*/measurement.json")]


def search_folder(tuned: Tuned) -> Path:
    [folder] = (tuned.home / "results" / NAME / "search").iterdir()
    return folder


def test_a_recording_says_what_a_token_takes(tuned: Tuned) -> None:
    """Fails if a person cannot tell how large a recording will be, or whether speculation can pay."""
    assert "a token of output takes" in tuned.recorded
    assert "ms of a verification" in tuned.recorded
    [costs_file] = (tuned.home / "results" / NAME / "recordings").glob("costs-*.json")
    assert costs_file.with_suffix(".png").stat().st_size > 1000
    assert load_costs(costs_file).verification.tokens[-1] == 64
    assert "times the floor" in " ".join(tuned.recorded.split())


def test_costs_alone_are_shown_without_a_recording(tuned: Tuned) -> None:
    """Fails if whoever wants to know how far a machine is from its floor must record the experiment's tasks first."""
    shown = run(record, tuned.yaml, "--only-costs")
    assert "times the floor" in " ".join(shown.split())
    assert "what proposers say" in tuned.recorded
    assert "what proposers say" not in shown


def test_a_replay_shows_every_method_and_the_bound(tuned: Tuned) -> None:
    """Fails if a method of the experiment, or the oracle, is left out of the prediction."""
    for label in ("ngram k=4", "choice prior L=4", "choice oracle L=4"):
        assert label in tuned.replayed


def test_another_machines_costs_change_the_prediction(tuned: Tuned) -> None:
    """Fails if a what-if prints this machine's figures."""
    [costs_file] = (tuned.home / "results" / NAME / "recordings").glob("costs-*.json")
    costs = load_costs(costs_file)
    flat = tuple(tuple(row[0] for _ in row) for row in costs.verification.ms)
    other = costs.verification.model_copy(update={"ms": flat, "low_ms": flat, "high_ms": flat})
    path = tuned.home / "gpu.json"
    costs.model_copy(update={"verification": other}).save(path)
    assert run(bench, tuned.yaml, "--replay", "--costs", str(path)) != tuned.replayed


def test_every_setting_of_the_sweep_is_kept_once(tuned: Tuned) -> None:
    """Fails if a shard is lost or counted twice."""
    table = pq.read_table(search_folder(tuned) / "sweep.parquet")
    assert table.num_rows == SETTINGS
    assert set(table["space"].to_pylist()) == {"ngram", "prior"}
    assert min(table["tokens_per_s"].to_pylist()) > 0


def test_the_best_and_the_methods_as_they_are_run_live(tuned: Tuned) -> None:
    """Fails if the default is not measured beside what was found, or replay and live loop part."""
    found = measurements(search_folder(tuned) / "live")
    assert len(found) == LIVE
    assert all(one.match.value == 1 for one in found)
    for name in ("ngram, as it is", "prior, as it is", "ngram: ", "prior: "):
        assert name in tuned.tuned
    lines = [line for line in tuned.tuned.splitlines() if "as it is" in line or "num_draft_tokens=" in line]
    live = [[cell.strip() for cell in line.split("│")] for line in lines if line.count("│") == 12]
    assert live
    for cells in live:
        assert cells[5] == cells[6], f"accepted/step predicted {cells[5]}, live {cells[6]}"


def test_the_report_shows_predictions_beside_what_was_measured(tuned: Tuned) -> None:
    """Fails if costs, sweep or predictions do not reach the report, or what replay and live loop accept parts."""
    found = collect(tuned.home / "results", [NAME])
    assert found.unreadable == ()
    assert (len(found.costs), len(found.sweeps)) == (1, 1)
    assert found.foretold
    for one in found.foretold:
        assert one.predicted.accepted_per_step == pytest.approx(one.measured.accepted_per_step.value)


def test_the_winner_is_confirmed_on_held_out_prompts(tuned: Tuned) -> None:
    """Fails if the answer rests on the prompts that it was chosen by, or is given without an interval."""
    trials = [json.loads(f.read_text()) for f in (search_folder(tuned) / "held_out").glob("[!.]*/trial.json")]
    assert trials
    assert {trial["task"]["split"] for trial in trials} == {"test"}
    assert "the winner on the held-out prompts" in tuned.tuned
    assert any(verdict in tuned.tuned for verdict in ("no difference shown", "faster", "slower"))


def test_the_search_is_in_mlflow(tuned: Tuned) -> None:
    """Fails if the parent lacks the sweep's table, or a live trial is no child of it."""
    client = MlflowClient(tracking_uri=f"sqlite:///{tuned.home}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name(NAME).experiment_id])
    [parent] = [one for one in runs if "mlflow.parentRunId" not in one.data.tags]
    children = [one for one in runs if one.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    kept = [len(measurements(search_folder(tuned) / stage)) for stage in ("live", "held_out")]
    assert len(children) == sum(kept)
    paths = {file.path for file in client.list_artifacts(parent.info.run_id, "search/searched")}
    assert paths == {f"search/searched/{name}" for name in ("sweep.parquet", "sweep.png", "predicted.json")}


def test_a_killed_driver_goes_on(tuned: Tuned) -> None:
    """Fails if what had been recorded or replayed when the driver was killed is lost, or done again."""
    assert {file.name for file in tuned.kept} >= {"chunk-00000.safetensors", "proposals.safetensors", "sweep.parquet"}
    assert {file: file.stat().st_mtime_ns for file in tuned.kept} == tuned.kept


def test_memory_is_measured_of_each_setting(tuned: Tuned, content: dict[str, Any]) -> None:
    """Fails if a front is drawn over a figure that is the same for all, or leaves the target out."""
    [weights] = Path(content["pairs"]["small"]["target"]["model"]).glob("*.safetensors")
    found = [one.memory_bytes or 0 for one in measurements(search_folder(tuned) / "live")]
    assert len(set(found)) > 1
    assert min(found) > weights.stat().st_size
    assert " *" in tuned.tuned


def test_run_again_nothing_is_done_again_but_the_winner_is_promoted(tuned: Tuned) -> None:
    """Fails if a finished search costs its time again to be served, or another setting than the winner is."""
    folder = search_folder(tuned)
    times = {f: f.stat().st_mtime_ns for f in folder.rglob("*") if f.suffix in (".json", ".parquet")}
    printed = run(tune, tuned.yaml, "--promote")
    assert {file: file.stat().st_mtime_ns for file in times} == times
    promoted = re.search(r"champion of (\S+): version (\d+), ", printed)
    assert promoted, printed
    registry = ChampionRegistry(f"sqlite:///{tuned.home}/mlflow.db")
    files = registry.fetch(promoted[1], registry.reigning(promoted[1]), tuned.home)
    champion = read_champion(files)
    assert (folder / "held_out" / champion.trial.fingerprint()).is_dir()
    rates = {
        measurement_of(file).decode_tokens_per_s.value: json.loads(file.with_name("trial.json").read_text())["method"]
        for file in finished(folder, "live/*/measurement.json")
    }
    assert champion.trial.method.model_dump(mode="json") == rates[max(rates)]


def test_a_runtime_that_is_not_recorded_is_searched_live(tuned: Tuned, content: dict[str, Any], tmp_path: Path) -> None:
    """Fails if a search needs a recording that cannot be made, or repeats one setting; or if the next driver measures
    again what one that was killed had measured."""
    code = {**content["tasks"]["searched"], "limit": 2, "context_tokens": 200}
    changed = {
        **content,
        "runtimes": {"table": {"kind": "scripted"}},
        "tasks": {"searched": code, "held_out": {**code, "split": "test"}},
        "search": {**content["search"], "runtime": "table"},
    }
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump(changed), encoding="utf-8")
    results = tuned.home / "results" / "alone"
    kept = kill_tune(path, results, "search/*/live/*/measurement.json")
    assert kept
    printed = run(tune, str(path))
    [folder] = (results / "search").iterdir()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert len(measurements(folder / "live")) == LIVE
    assert "the winner on the held-out prompts" in printed
    assert run(record, str(path), status=2).count("no runtime of kind hf, whose loop can be recorded") == 1


def test_a_replay_before_the_recording_is_said(home: Path, content: dict[str, Any], tmp_path: Path) -> None:
    """Fails if a person sees a traceback instead of what to do."""
    path = tmp_path / "unrecorded.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "jobs.record" in run(bench, str(path), "--replay", status=2)
    assert "no field 'search'" in run(tune, "smollm2", status=2)
