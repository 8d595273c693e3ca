"""A scorer on disk: weights as safetensors, and a JSON file that says what they are for."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from choicespec.candidates.sets import Features
from choicespec.errors import ScorerError
from choicespec.records import TargetIdentity
from choicespec.scorer.model import Embed, ScorerNet, Shape
from choicespec.scorer.source_states import OFFSETS, num_source_features
from choicespec.scorer.table import Row
from choicespec.spec.frozen import Frozen
from choicespec.spec.pair import SCORER_WEIGHTS, DrafterSpec, ScorerSpec
from choicespec.spec.training import Count

SHIPPED = Path(__file__).parent / "shipped"  # a folder a target, named by the digest of its weights
_MANIFEST = "scorer.json"
_TRANSFER = "set pair.scorer.transfer to true to use it all the same"
_TRAIN = "train one with: python -m jobs.train scorer EXPERIMENT"


class ScorerManifest(Frozen):
    """What a scorer is for, and where it comes from.

    Attributes:
        target: the target on whose outputs it was trained.
        layers: the decoder layers that it reads, counted from 1.
        block_length: the most tokens of a candidate.
        features: the names of what it reads of the prior.
        drafters: those whose drafts it judges, in the order of the features that say whose a candidate is.
        source_layers: the decoder layers whose states here it compares with those at a candidate's source.
        source_offsets: the tokens whose states are compared, see ``source_states``.
        embedding_size, width: of its layers.
        trained_on: for each task, the prompts.
        held_out: what it was saved with: its figures on prompts that it was not trained on, a row a task.
    """

    format: Literal[1] = 1
    target: TargetIdentity
    layers: tuple[Count, ...] = Field(min_length=1)
    block_length: Count
    features: tuple[str, ...] = Features._fields
    drafters: dict[str, DrafterSpec] = {}  # noqa: RUF012  (a field's default)
    source_layers: tuple[Count, ...] = ()
    source_offsets: tuple[int, ...] = OFFSETS
    embedding_size: Count
    width: Count
    trained_on: dict[str, int]
    held_out: tuple[Row, ...]

    @property
    def shape(self) -> Shape:
        """Of the network."""
        hidden_size = self.target.hidden_size * len(self.layers)
        num_features = len(self.features) + len(self.drafters) + num_source_features(len(self.source_layers))
        source_size = self.target.hidden_size * len(self.source_layers)
        return Shape(
            hidden_size,
            self.embedding_size,
            num_features,
            self.block_length,
            self.width,
            source_size=source_size,
        )

    def draft_refusal(self, drafters: Mapping[str, DrafterSpec], transfer: bool) -> str | None:
        """Why it cannot judge the drafts of these drafters, or None; one that was trained beside none judges no drafts,
        and is not asked.

        Args:
            drafters: of a method, by name.
            transfer: drafters of other weights will do, as long as their kinds are the same.
        """
        for name, spec in drafters.items() if self.drafters else ():
            own = self.drafters.get(name)
            if own is None:
                return f"its scorer was trained beside the drafters {', '.join(self.drafters)}, not {name!r}; {_TRAIN}"
            if own.kind != spec.kind:
                return f"its scorer was trained beside {name!r} of kind {own.kind!r}, not {spec.kind!r}; {_TRAIN}"
            if (own.sha256, own.sha256 or own.model) != (spec.sha256, spec.sha256 or spec.model) and not transfer:
                return f"its scorer was trained beside {name!r} of other weights; {_TRANSFER}, or {_TRAIN}"
        return None


class Scorer(NamedTuple):
    """A network with what it is for."""

    net: ScorerNet
    manifest: ScorerManifest


def save_scorer(folder: Path, scorer: Scorer) -> None:
    """Write a scorer; what the folder held of an earlier one is replaced, and stays until the new one is written."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as name:
        partial = Path(name)
        weights = {name: value.contiguous() for name, value in scorer.net.state_dict().items()}
        save_file(weights, partial / SCORER_WEIGHTS)
        content = scorer.manifest.model_dump(mode="json")
        (partial / _MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for file in (SCORER_WEIGHTS, _MANIFEST):
            os.replace(partial / file, folder / file)


def find_scorer(spec: ScorerSpec, target: TargetIdentity) -> Path:
    """The folder that a pair's scorer lies in.

    Raises:
        ScorerError: no scorer ships for this target.
    """
    if spec.folder is not None:
        return Path(spec.folder).expanduser()
    folder = SHIPPED / target.weights
    if not folder.is_dir():
        raise ScorerError(f"pair.scorer: no scorer ships for this target; {_TRAIN}, and name its folder")
    return folder


def check_scorer(folder: Path, target: TargetIdentity, transfer: bool) -> ScorerManifest:
    """Read what a scorer is for, without its weights.

    Args:
        folder: as ``find_scorer`` gives it.
        target: what it would score for.
        transfer: another model or precision is wanted.

    Raises:
        ScorerError: it is missing or broken, or does not fit.
    """
    path = folder / _MANIFEST
    try:
        manifest = ScorerManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ScorerError(f"pair.scorer.folder: cannot read {path}: {error.strerror}; {_TRAIN}") from None
    except ValidationError as error:
        raise ScorerError(f"pair.scorer.folder: {path} is not a scorer's description: {error}; {_TRAIN}") from None
    trained = manifest.target
    if trained.tokenizer != target.tokenizer:
        _refuse(folder, "tokenizer", trained.tokenizer, target.tokenizer)
    layers = manifest.layers + manifest.source_layers
    if trained.hidden_size != target.hidden_size or max(layers) > target.num_layers:
        own, other = f"{trained.hidden_size}, {layers}", f"{target.hidden_size}, {target.num_layers} layers"
        _refuse(folder, "hidden size and layers", own, other)
    if manifest.features != Features._fields:
        _refuse(folder, "features of the prior", ", ".join(manifest.features), ", ".join(Features._fields))
    if manifest.source_layers and manifest.source_offsets != OFFSETS:
        _refuse(folder, "states at offsets", str(manifest.source_offsets), str(OFFSETS))
    for name in ("weights", "precision"):
        own, other = getattr(trained, name), getattr(target, name)
        if own != other and not transfer:
            _refuse(folder, name, own, other, f"; {_TRANSFER}")
    return manifest


def load_scorer(folder: Path, manifest: ScorerManifest, embed: Embed) -> Scorer:
    """Read a scorer that has been checked.

    Raises:
        ScorerError: its weights are missing or broken.
    """
    path = folder / SCORER_WEIGHTS
    net = ScorerNet(manifest.shape, embed)
    try:
        net.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ScorerError(f"pair.scorer.folder: cannot read {path}: {error}; {_TRAIN}") from None
    for name, value in net.state_dict().items():
        if not torch.isfinite(value).all():
            raise ScorerError(f"pair.scorer.folder: {path}: {name} is not finite; {_TRAIN}")
    return Scorer(net.eval(), manifest)


def _refuse(folder: Path, what: str, own: str, other: str, remedy: str = f"; {_TRAIN}") -> None:
    raise ScorerError(f"pair.scorer: {folder} was trained for {what} {own}, but this pair has {other}{remedy}")
