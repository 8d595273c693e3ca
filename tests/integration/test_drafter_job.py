"""``jobs.train drafter`` on a real Ray with a small random target: what it saves drafts, what it did is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from choicespec.cluster.connect import ADDRESS_VARIABLE
from choicespec.errors import SpecError
from choicespec.recordings import RecordingManifest
from choicespec.records import Request
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.experiment import ExperimentSpec, parse_experiment
from choicespec.spec.method import Autoregressive, Draft
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.tracking.connection import URI_VARIABLE
from integration.small_checkpoints import save_checkpoint, small_llama
from ray.cluster_utils import Cluster

from jobs.drafters import DrafterJob
from jobs.recorded import RecordedTasks
from jobs.terminal import HOME_VARIABLE

_FUNCTION = """def total_{n}(first, second):
    both = first + second * {n}
    if both > first:
        both -= {n}
    return both
"""
_FIT = {"epochs": 1, "batch_size": 2, "anchors": 4}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for results, and a cluster of one node."""
    folder, nodes = tmp_path_factory.mktemp("home"), Cluster()
    try:
        nodes.add_node(num_cpus=2, num_gpus=0, include_dashboard=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ADDRESS_VARIABLE, nodes.address)
            patch.setenv(HOME_VARIABLE, str(folder))
            patch.setenv(URI_VARIABLE, "http://127.0.0.1:9")  # nobody is there
            yield folder
    finally:
        nodes.shutdown()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("target"), small_llama())
    repo = tmp_path_factory.mktemp("repo")
    for number in range(30):
        (repo / f"module_{number}.py").write_text(_FUNCTION.format(n=number), encoding="utf-8")
    code = {"kind": "python_repo", "folder": str(repo), "limit": 3, "max_new_tokens": 8}
    return {
        "name": "tiny",
        "pairs": {"small": {"target": {"model": str(checkpoint)}}},
        "runtimes": {"here": {"kind": "hf", "threads": 1}},
        "tasks": {"code": code},
        "methods": {"plain": {"kind": "autoregressive"}},
        "drafter": {
            "pair": "small",
            "runtime": "here",
            "train_limits": {"code": 6},
            "batch_size": 3,
            "draft_vocab_size": 64,
            "dflash": {
                "layers": [1, 3],
                "block_length": 4,
                "mask_token_id": 500,
                "intermediate_size": 32,
                "fit": _FIT,
            },
            "mtp": {"num_draft_tokens": 2, "intermediate_size": 32, "fit": _FIT},
        },
    }


def _experiment(content: dict[str, Any]) -> ExperimentSpec:
    return parse_experiment(content, "the test")


def test_what_is_trained_drafts_and_nothing_is_done_twice(
    home: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if what is saved is not what the runtime loads, if an MLflow that cannot be reached loses it, or if the
    same command begins anew."""
    DrafterJob(_experiment(content)).run(None)
    said = capsys.readouterr().out
    assert said.count("saved in") >= 2
    results = home / "results" / "tiny"
    kept = (home / "results" / "recordings", results / "fits")
    done = {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*.*")}
    assert len(done) == 3 + 2 + 2  # chunks, manifests, fits
    DrafterJob(_experiment(content)).run(None)
    assert {path: path.stat().st_mtime_ns for path in done} == done

    pair = content["pairs"]["small"] | {
        "drafters": {kind: {"kind": kind, "model": str(results / kind)} for kind in ("dflash", "mtp")}
    }
    runtime = HfRuntime(HfRuntimeSpec(threads=1), PairSpec.model_validate(pair))
    request = Request("r", tuple(b"def total_3(first, second):"), 12)
    plain = runtime.generate(request, Autoregressive())
    for kind in ("dflash", "mtp"):
        found = runtime.generate(request, Draft(drafter=kind, num_draft_tokens=2))
        assert found.output_ids == plain.output_ids
        assert all(step.proposed == 2 for step in found.steps[:-2])


def test_what_one_job_has_recorded_another_reads(home: Path, content: dict[str, Any]) -> None:
    """Fails if a job that wants less than was recorded records it again, or if one that wants more takes it."""
    experiment = _experiment(content)
    task = experiment.tasks["code"].model_copy(update={"limit": 5})  # which no other test records
    runtime, pair = HfRuntimeSpec(threads=1), experiment.pairs["small"]
    opened = HfRuntime(runtime, pair)
    there = RecordedTasks(runtime, opened, pair, (1, 3), 3, prompt_states=True).of(task)
    there.begin(
        RecordingManifest(
            target=opened.identity, task=task, layers=(1, 3), prompt_states=True, chunks=(), request_ids=()
        )
    )
    assert RecordedTasks(runtime, opened, pair, (3,), 2).of(task).path == there.path
    assert RecordedTasks(runtime, opened, pair, (2, 3), 2).of(task).path != there.path
    fewer = task.model_copy(update={"limit": 4})
    assert RecordedTasks(runtime, opened, pair, (3,), 2).of(fewer).path != there.path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": None}, "no field 'drafter'"),
        ({"tasks": {"code": {"kind": "python_repo", "split": "train"}}}, "they are judged on 'test'"),
        ({"runtimes": {"here": {"kind": "scripted"}}}, "'here' has no hidden states"),
    ],
)
def test_what_cannot_be_trained_is_said_first(content: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """Fails if a wrong experiment is found out after an hour of recording."""
    with pytest.raises(SpecError, match=message):
        DrafterJob(_experiment({**content, **changes}))


def test_a_layer_that_the_target_lacks_is_refused(content: dict[str, Any]) -> None:
    """Fails if it is found out by a worker."""
    drafter = {**content["drafter"], "dflash": {**content["drafter"]["dflash"], "layers": [4]}}
    with pytest.raises(SpecError, match=r"drafter.dflash.layers: \(4,\); the target has 1 to 3"):
        DrafterJob(_experiment({**content, "drafter": drafter}))
