"""Scorers on disk: what comes back scores the same, and what does not fit is refused with what to do."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.candidates.drafts import as_candidate
from choicespec.candidates.sets import Candidate
from choicespec.decoding.tap import Tap
from choicespec.errors import ScorerError
from choicespec.records import Proposal, TargetIdentity
from choicespec.scorer.files import SHIPPED, Scorer, check_scorer, find_scorer, load_scorer, save_scorer
from choicespec.scorer.ranker import ScorerRanker
from choicespec.scorer.source_states import TappedText
from choicespec.spec.pair import DrafterSpec, ScorerSpec
from integration.small_scorers import EMBEDDING, HIDDEN, LENGTH, TARGET, VOCABULARY, embed, random_batch, small_scorer
from safetensors.torch import load_file, save_file

SHIPPED_FOLDERS = sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else []
MOST_SHIPPED_BYTES = 4_000_000
TRAIN = "python -m jobs.train scorer"
MANIFEST, WEIGHTS = "scorer.json", "scorer.safetensors"
EVERYTHING = (False, True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved scorer."""
    save_scorer(tmp_path / "new" / "scorer", small_scorer())
    return tmp_path / "new" / "scorer"


def read(folder: Path, target: TargetIdentity = TARGET, transfer: bool = False) -> Scorer:
    """As a runtime does."""
    return load_scorer(folder, check_scorer(folder, target, transfer), embed)


def scores(scorer: Scorer, layers: int = 1) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = scorer.net(random_batch(5, positions=6, candidates=4, length=LENGTH, layers=layers))
    return logits


def refused(folder: Path, target: TargetIdentity = TARGET, transfer: bool = False) -> str:
    """What is said of a scorer that cannot be used; it names the folder."""
    with pytest.raises(ScorerError, match=re.escape(str(folder))) as caught:
        read(folder, target, transfer)
    return str(caught.value)


def edit(folder: Path, **changes: object) -> None:
    """Changes fields of the description."""
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    (folder / MANIFEST).write_text(json.dumps(content | changes), encoding="utf-8")


@pytest.mark.parametrize("layers", [(2,), (1, 4)])
def test_what_was_saved_scores_the_same(tmp_path: Path, layers: tuple[int, ...]) -> None:
    """Fails if a weight is lost, rounded or read into another place, or if the description is not what was written."""
    saved = small_scorer(layers=layers)
    save_scorer(tmp_path, saved)
    found = read(tmp_path)
    torch.testing.assert_close(scores(found, len(layers)), scores(saved, len(layers)), rtol=0, atol=0)
    assert found.manifest == saved.manifest
    assert not found.net.training


def test_the_normalisation_is_part_of_the_weights(tmp_path: Path) -> None:
    """Fails if a scorer reads hidden states on another scale than it was fitted on."""
    saved = small_scorer()
    saved.net.mean_H.fill_(0.5)
    saved.net.deviation_H.fill_(3.0)
    save_scorer(tmp_path, saved)
    torch.testing.assert_close(scores(read(tmp_path)), scores(saved), rtol=0, atol=0)


SOURCE_LAYERS = (1, 3)
COPIES = tuple(
    Candidate((1, 2, 3), (2, 0, 0, 0), times=1, age_tokens=4, prior=1.0, survival=(0.5, 0.3, 0.2), own_age_tokens=age)
    for age in (4, 7)
)


def tapped() -> Tap:
    """Has taken in a text of a dozen tokens."""
    tap = Tap(SOURCE_LAYERS)
    tap.restart()
    dice = torch.Generator().manual_seed(3)
    tap.keep({layer: torch.randn(12, HIDDEN, generator=dice) for layer in SOURCE_LAYERS}, 12)
    return tap


def said(scorer: Scorer, tap: Tap | None, *candidates: Candidate) -> list[float]:
    """What is expected of each candidate of a set."""
    cosines = None
    if tap is not None and scorer.manifest.source_layers:
        cosines = TappedText(tap, len(SOURCE_LAYERS), scorer.net.source_scale).cosines
    ranker = ScorerRanker(scorer, lambda layer: torch.linspace(-1, 1, HIDDEN), cosines)
    return [sum(ranked.survival) for ranked in ranker.every(candidates, 9)]


def test_states_at_sources_are_read_as_they_were_saved(tmp_path: Path) -> None:
    """Fails if the scale of the states is lost, or if what is compared does not reach the choice."""
    saved = small_scorer(source_layers=SOURCE_LAYERS)
    saved.net.source_mean_S.fill_(0.5)
    saved.net.source_deviation_S.copy_(torch.linspace(0.5, 3, 2 * HIDDEN))
    save_scorer(tmp_path, saved)
    found = read(tmp_path)
    assert found.manifest == saved.manifest
    expected = said(saved, tapped(), *COPIES)
    assert said(found, tapped(), *COPIES) == pytest.approx(expected)
    assert said(small_scorer(source_layers=SOURCE_LAYERS), tapped(), *COPIES) != pytest.approx(expected)
    assert expected[0] != pytest.approx(expected[1])


def test_without_a_tap_candidates_have_no_source() -> None:
    """Fails if a runtime that does not keep a text's states cannot rank, or ranks by states that are not there."""
    scorer = small_scorer(source_layers=SOURCE_LAYERS)
    elsewhere = [candidate._replace(own_age_tokens=0) for candidate in COPIES]
    assert said(scorer, None, *COPIES) == pytest.approx(said(scorer, tapped(), *elsewhere))
    assert said(scorer, None, *COPIES) != pytest.approx(said(scorer, tapped(), *COPIES))


def test_a_scorer_of_before_reads_no_sources(folder: Path) -> None:
    """Fails if a description that says nothing of sources, as those that ship, is refused or read otherwise."""
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for field in ("source_layers", "source_offsets"):
        del content[field]
    (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    found = read(folder)
    assert found.manifest == small_scorer().manifest
    torch.testing.assert_close(scores(found), scores(small_scorer()), rtol=0, atol=0)
    assert said(found, tapped(), *COPIES) == pytest.approx(said(found, None, *COPIES))


@pytest.mark.parametrize(("field", "value"), [("source_layers", [1, 9]), ("source_offsets", [0, 1])])
def test_other_states_at_sources_are_refused(tmp_path: Path, field: str, value: list[int]) -> None:
    """Fails if a layer that the target lacks, or states of other tokens, meet the network in the middle of a decode."""
    save_scorer(tmp_path, small_scorer(source_layers=SOURCE_LAYERS))
    edit(tmp_path, **{field: value})
    assert TRAIN in refused(tmp_path, transfer=True)


def test_the_targets_embedding_is_no_part_of_it(folder: Path) -> None:
    """Fails if a scorer ships the largest matrix of its target, which the target has already."""
    shapes = [value.shape for value in load_file(folder / WEIGHTS).values()]
    assert any(EMBEDDING in shape for shape in shapes)
    assert not any(VOCABULARY in shape for shape in shapes)


def test_an_earlier_scorer_is_replaced(folder: Path) -> None:
    """Fails if one scorer's description stands beside another's weights."""
    other = small_scorer(seed=1, layers=(1, 3), precision="bfloat16")
    save_scorer(folder, other)
    found = read(folder, TARGET.model_copy(update={"precision": "bfloat16"}))
    assert found.manifest == other.manifest
    torch.testing.assert_close(scores(found, 2), scores(other, 2), rtol=0, atol=0)


@pytest.mark.parametrize("transfer", EVERYTHING)
def test_another_tokenizer_is_refused_always(folder: Path, transfer: bool) -> None:
    """Fails if token ids are looked up in an embedding where they mean something else."""
    said = refused(folder, TARGET.model_copy(update={"tokenizer": "other-tokenizer"}), transfer)
    assert f"tokenizer {TARGET.tokenizer}," in said
    assert "other-tokenizer" in said
    assert TRAIN in said


@pytest.mark.parametrize(("field", "other"), [("weights", "other-weights"), ("precision", "q4_0 float32")])
def test_another_target_is_refused_unless_transfer_is_wanted(folder: Path, field: str, other: str) -> None:
    """Fails if a scorer silently reads hidden states that it was not trained on, or if a person who wants just that is
    not told how."""
    target = TARGET.model_copy(update={field: other})
    said = refused(folder, target)
    assert f"{field} {getattr(TARGET, field)}," in said
    assert other in said
    assert "pair.scorer.transfer to true" in said
    torch.testing.assert_close(scores(read(folder, target, transfer=True)), scores(small_scorer()), rtol=0, atol=0)


@pytest.mark.parametrize("transfer", EVERYTHING)
def test_another_hidden_size_is_refused_always(folder: Path, transfer: bool) -> None:
    """Fails if matrices that do not fit meet in the middle of a decode."""
    said = refused(folder, TARGET.model_copy(update={"hidden_size": 777}), transfer)
    assert str(TARGET.hidden_size) in said
    assert "777" in said
    assert TRAIN in said


@pytest.mark.parametrize("transfer", EVERYTHING)
def test_a_layer_that_the_target_lacks_is_refused_always(tmp_path: Path, transfer: bool) -> None:
    """Fails if a scorer of the last layer meets a shallower target in the middle of a decode, or if the sentence leaves
    out how many layers there are."""
    save_scorer(tmp_path, small_scorer(layers=(4,)))
    said = refused(tmp_path, TARGET.model_copy(update={"num_layers": 3}), transfer)
    before, after = said.split("but this pair has")
    assert "4" in before
    assert "3" in after
    assert TRAIN in said


def test_other_features_are_refused(folder: Path) -> None:
    """Fails if a scorer of an earlier version reads one feature for another."""
    names = list(small_scorer().manifest.features)
    names[0], names[1] = names[1], names[0]
    edit(folder, features=names)
    said = refused(folder, transfer=True)
    assert "first, prior, last" in said
    assert "prior, first, last" in said
    assert TRAIN in said


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    """Fails if a mistyped path gives a traceback, or the scorer that ships."""
    said = refused(tmp_path / "nowhere")
    assert "pair.scorer.folder" in said
    assert TRAIN in said


def _broken(content: str | bytes) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        (folder / MANIFEST).write_bytes(content.encode() if isinstance(content, str) else content)

    return break_it


def _edited(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


def _without(field: str) -> Callable[[Path], None]:
    def leave_out(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        del content[field]
        (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")

    return leave_out


DESCRIPTIONS: dict[str, Callable[[Path], None]] = {
    "missing": lambda folder: (folder / MANIFEST).unlink(),
    "empty": _broken(""),
    "cut": _broken('{"format": 1, "target": {'),
    "not text": _broken(b"\xff\xfe\x00"),
    "a list": _broken("[1, 2]"),
    "an unknown field": _edited(secret=1),
    "a missing field": _without("block_length"),
    "another format": _edited(format=2),
    "no layers": _edited(layers=[]),
    "layer 0": _edited(layers=[0]),
    "a negative width": _edited(width=-1),
    "no block": _edited(block_length=0),
}


@pytest.mark.parametrize("damage", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_broken_description_is_named(folder: Path, damage: Callable[[Path], None]) -> None:
    """Fails if a broken file gives a traceback instead of its path, or is taken for a good one."""
    damage(folder)
    said = refused(folder)
    assert MANIFEST in said or WEIGHTS in said
    assert TRAIN in said


def _cut_weights(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Rewrites the tensors."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def _poison(value: float) -> Callable[[Path], None]:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        next(value for value in tensors.values() if value.dim() == 2)[-1, -1] = value

    return _tensors(damage)


def _lose_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[sorted(tensors)[0]]


def _add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more"] = torch.zeros(1)


def _reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    name = sorted(name for name, value in tensors.items() if value.dim() == 2)[0]
    tensors[name] = tensors[name][:, :-1].contiguous()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut_weights,
    "NaN": _poison(float("nan")),
    "infinite": _poison(float("inf")),
    "a tensor is missing": _tensors(_lose_one),
    "a tensor too many": _tensors(_add_one),
    "another shape": _tensors(_reshape_one),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_broken_weights_are_named(folder: Path, damage: Callable[[Path], Any]) -> None:
    """Fails if weights that were half written, or are another scorer's, score all the same."""
    damage(folder / WEIGHTS)
    said = refused(folder)
    assert str(folder / WEIGHTS) in said
    assert TRAIN in said


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self._sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._sprung),)


@pytest.mark.parametrize("name", ["scorer.pt", "scorer.bin", "pytorch_model.bin", "scorer.pkl", WEIGHTS])
def test_a_pickle_is_never_read(folder: Path, tmp_path: Path, name: str) -> None:
    """Fails if weights that can run code when they are read are read at all, whatever they are called."""
    (folder / WEIGHTS).unlink()
    sprung = tmp_path / "sprung"
    torch.save({"state": _Trap(sprung)}, folder / name)
    assert str(folder / WEIGHTS) in refused(folder)
    assert not sprung.exists()
    (folder / name).rename(tmp_path / "trap.pt")
    torch.load(tmp_path / "trap.pt", weights_only=False)
    assert sprung.exists(), "the trap itself"


def test_the_folder_that_a_person_names_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a person's own scorer is passed over for the one that ships, or if ~ is not their home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_scorer(ScorerSpec(folder=str(tmp_path / "mine")), TARGET) == tmp_path / "mine"
    assert find_scorer(ScorerSpec(folder="~/mine"), TARGET) == tmp_path / "mine"


def test_a_target_for_which_none_ships_is_said(tmp_path: Path) -> None:
    """Fails if a person is given another target's scorer, or a traceback, instead of the way to their own."""
    target = TARGET.model_copy(update={"weights": "of-nobody"})
    with pytest.raises(ScorerError, match=f"no scorer ships for this target; .*{TRAIN}"):
        find_scorer(ScorerSpec(), target)


DRAFTERS = {
    "flash": DrafterSpec(kind="dflash", model="here", sha256="1"),
    "head": DrafterSpec(kind="mtp"),
}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flash", {"model": "elsewhere"}, None),
        ("flash", {"sha256": "2"}, "of other weights; set pair.scorer.transfer to true"),
        ("flash", {"kind": "dflash2"}, "of kind 'dflash', not 'dflash2'"),
        ("head", {"model": "a-head-of-its-own"}, "of other weights"),
        ("other", {}, "beside the drafters flash, head, not 'other'"),
    ],
)
def test_drafts_of_other_drafters_are_not_judged(name: str, changes: dict[str, str], message: str | None) -> None:
    """Fails if drafts are scored by what was learnt of another drafter's, or if a drafter that was moved is another."""
    manifest = small_scorer(drafters=DRAFTERS).manifest
    asked = {name: DRAFTERS.get(name, DRAFTERS["flash"]).model_copy(update=changes)}
    said = manifest.draft_refusal(asked, transfer=False)
    assert said is None if message is None else said is not None and message in said
    transferred = manifest.draft_refusal(asked, transfer=True)
    assert (transferred is None) == (message is None or "other weights" in message)
    assert small_scorer().manifest.draft_refusal(asked, transfer=False) is None, "it judges no drafts at all"


def test_a_draft_is_judged_as_in_one_set_with_the_candidates(tmp_path: Path) -> None:
    """Fails if a draft that comes after its gate is judged otherwise than beside the finite candidates, which is how
    the scorer was trained; whose draft it is must matter, or the scorer knows nothing of drafters."""
    save_scorer(tmp_path, small_scorer(drafters=DRAFTERS))
    manifest = check_scorer(tmp_path, TARGET, transfer=False)
    ranker = ScorerRanker(load_scorer(tmp_path, manifest, embed), lambda layer: torch.linspace(-1, 1, HIDDEN))
    finite = Candidate((1, 2, 3), (2, 0, 0, 0), times=1, age_tokens=4, prior=1.0, survival=(0.5, 0.3, 0.2))
    drafted = Proposal((4, 5), "kind", (0.9, 0.8))
    said = {}
    for name in DRAFTERS:
        judge = ranker.judge(name)
        assert judge is not None
        said[name] = judge(drafted, [8, 9])
        candidate = as_candidate(name, drafted)
        assert candidate is not None
        best = ranker.best([finite, candidate], 9)
        expected = said[name] if best.candidate == candidate else ranker.best([finite], 9).survival
        assert best.survival == pytest.approx(expected)
        assert sum(best.survival) >= sum(said[name]) - 1e-6
        assert judge(Proposal((), "kind"), [9]) == ()
    assert said["flash"] != pytest.approx(said["head"])
    assert ranker.judge("other") is None


@pytest.mark.parametrize("folder", SHIPPED_FOLDERS, ids=lambda folder: folder.name)
def test_a_shipped_scorer_loads_for_its_target(folder: Path) -> None:
    """Fails if what ships is broken, of an earlier version, or lies where its target does not look for it."""
    manifest = check_scorer(folder, json_target(folder), transfer=False)
    assert find_scorer(ScorerSpec(), manifest.target) == folder
    dice = torch.Generator().manual_seed(0)
    table = torch.randn(64, manifest.embedding_size, generator=dice)
    scorer = load_scorer(folder, manifest, lambda token_ids: table[token_ids])
    shape = manifest.shape
    batch = random_batch(1, positions=3, candidates=4, length=shape.block_length, features=shape.num_features)
    states = torch.randn(3, manifest.target.hidden_size * len(manifest.layers), generator=dice)
    with torch.inference_mode():
        assert torch.isfinite(scorer.net(batch._replace(hidden_PH=states))).all()
    assert manifest.held_out
    assert sum(manifest.trained_on.values()) > 0
    for row in manifest.held_out:
        assert row.variant.layers == manifest.layers
        assert row.precision == manifest.target.precision


def json_target(folder: Path) -> TargetIdentity:
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return TargetIdentity.model_validate(content["target"])


def test_what_ships_is_small_and_nothing_else() -> None:
    """Fails if a file beside the scorers ships with every installation, or if they outgrow a package."""
    files = [file for folder in SHIPPED_FOLDERS for file in folder.rglob("*") if file.is_file()]
    assert {file.name for file in files} <= {MANIFEST, WEIGHTS}
    assert sum(file.stat().st_size for file in files) < MOST_SHIPPED_BYTES
