"""Champions in a real MLflow registry: what is promoted, what is refused, and what comes back."""

import shutil
from pathlib import Path

import pytest
from choicespec.errors import ChampionError, TrackingError
from choicespec.serving.champion import (
    SHIPPED,
    check_champion,
    promote,
    promote_best,
    read_champion,
    registered_name,
    write_champion,
)
from choicespec.serving.source import Registered, Shipped
from choicespec.spec.experiment import TrialSpec
from choicespec.tracking.registry import ChampionRegistry
from integration.local_api import TABLE, measurement, table_champion


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def registry(uri: str) -> ChampionRegistry:
    return ChampionRegistry(uri)


def _trial(model: str, **method: object) -> TrialSpec:
    return TrialSpec.model_validate(
        {**TABLE, "pair": {"target": {"model": model}}, "method": method or TABLE["method"]}
    )


_PLAIN = {"kind": "autoregressive"}
_CHOICE = {"kind": "choice"}


def test_the_best_trial_with_full_match_is_promoted(registry: ChampionRegistry, tmp_path: Path) -> None:
    """Fails if a faster trial that changes outputs, or one that never drafted, becomes what is served."""
    results = [
        (_trial("best", **_PLAIN), measurement(1.0)),
        (_trial("best", kind="ngram"), measurement(2.0)),
        (_trial("best", kind="ngram", num_draft_tokens=2), measurement(1.5)),
        (_trial("best", **_CHOICE), measurement(3.0, match=0.95)),
        (_trial("best", **_CHOICE, block_length=4), measurement(2.5, never_proposed=True)),
        (_trial("alone", **_CHOICE), measurement(3.0, match=0.5)),
    ]
    lines = list(promote_best(registry, results))
    assert "95.0% of 20 prompts, not on all" in lines[0]
    assert "never proposed" in lines[1]
    assert (
        lines[2]
        == "champion of best-float32-scripted-tool-call: version 1, ngram k=8, 2.00x, match on all of 20 prompts"
    )
    assert lines[4] == "no champion of alone-float32-scripted-tool-call: no trial can be one"
    champion = read_champion(registry.fetch("best-float32-scripted-tool-call", 1, tmp_path))
    assert (champion.trial, champion.measurement) == results[1]


def test_promoting_again_gives_the_alias_back_to_the_same_version(registry: ChampionRegistry) -> None:
    """Fails if each run of a job adds a version, or if an earlier champion cannot be put back."""
    trial, name = _trial("again"), registered_name(_trial("again"))
    assert promote(registry, trial, measurement(2.0)).version == 1
    assert promote(registry, trial, measurement(2.5)).version == 2
    assert registry.reigning(name) == 2
    assert promote(registry, trial, measurement(2.0)).version == 1
    assert (registry.reigning(name), registry.versions(name)) == (1, [2, 1])


def test_a_champion_is_never_a_pickle(registry: ChampionRegistry, tmp_path: Path) -> None:
    """Fails if what a server reads from a registry could run code."""
    trial = TrialSpec.model_validate({**read_champion(SHIPPED).trial.model_dump()})
    promoted = promote(registry, trial, read_champion(SHIPPED).measurement)
    folder = registry.fetch(promoted.name, promoted.version, tmp_path)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == ["champion.json", "scorer/scorer.json", "scorer/scorer.safetensors"]
    assert read_champion(folder).trial.pair.scorer.folder == str(folder / "scorer")
    check_champion(read_champion(folder), read_champion(SHIPPED).trial)
    (folder / "scorer" / "scorer.json").unlink()
    with pytest.raises(ChampionError, match=r"scorer\.json"):
        check_champion(read_champion(folder), None)


def test_the_shipped_champion_can_be_served() -> None:
    """Fails if `make serve` would refuse what the package brings."""
    champion, version = Shipped().first(None)
    assert version == "shipped"
    assert champion.measurement.match.value == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pair": {"target": {"model": "other"}}}, "its target is model='other'.* but model='table'.* is served"),
        ({"runtime": {"kind": "scripted", "threads": 2}}, "its runtime is"),
        ({"pair": {"target": {"model": "table"}, "gpus": 1}}, "its number of gpus is 1, but 0 is served"),
        ({"method": {"kind": "choice", "selection": "scorer"}}, "hidden states"),
    ],
)
def test_a_champion_that_cannot_take_over_is_refused(changes: dict[str, object], said: str) -> None:
    """Fails if a replica would load other weights, or notice only at its first request."""
    with pytest.raises(ChampionError, match=said):
        check_champion(table_champion(**changes), table_champion().trial)


def test_a_replica_starts_with_the_latest_champion_that_can_be_served(registry: ChampionRegistry, uri: str) -> None:
    """Fails if a replica that is restarted after a broken promotion cannot come back."""
    trial = _trial("restart")
    promoted = [promote(registry, trial, measurement(speedup)) for speedup in (2.0, 2.5, 3.0)]
    name = promoted[0].name
    _lose_files(uri, registry, name, 3)
    source = Registered(uri, name)
    assert source.first(None).version == "2"
    with pytest.raises(TrackingError):
        source.read("3", trial)
    with pytest.raises(ChampionError, match="its target"):
        source.first(_trial("another"))
    for version in (1, 2):
        _lose_files(uri, registry, name, version)
    with pytest.raises(ChampionError, match="no version of restart-float32-scripted-tool-call can be served"):
        Registered(uri, name).first(None)


def test_a_champion_of_another_version_is_refused(tmp_path: Path) -> None:
    """Fails if a field that this version does not know is dropped, and something else is served."""
    write_champion(tmp_path, table_champion())
    file = tmp_path / "champion.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"num_draft_tokens"', '"num_drafts"'), encoding="utf-8")
    with pytest.raises(ChampionError, match="not a champion of this version"):
        read_champion(tmp_path)


def _lose_files(uri: str, registry: ChampionRegistry, name: str, version: int) -> None:
    """What a person does who cleans up the artifacts of a run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    run = client.get_run(client.get_model_version(name, str(version)).run_id)
    shutil.rmtree(Path(run.info.artifact_uri.removeprefix("file://")) / "champion")


def test_an_unknown_name_is_said(uri: str) -> None:
    with pytest.raises(TrackingError, match="nobody"):
        Registered(uri, "nobody").first(None)
