"""A drafter's checkpoint on disk, or on the hub: its config.json, and its weights as safetensors and nothing else."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from choicespec.errors import CheckpointError

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SPECULATORS_TYPE = "speculators_model_type"  # a checkpoint of the package speculators says its kind here


Net = TypeVar("Net", bound=torch.nn.Module)


class TargetShape(NamedTuple):
    """What a drafter must agree with its target on."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def read_config(checkpoint: str, revision: str | None = None) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        CheckpointError: it is missing or not JSON.
    """
    try:
        path = cached_file(checkpoint, "config.json", revision=revision)
        config: dict[str, Any] = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} has no config.json that can be read: {error}") from None
    return config


def tensor_files(checkpoint: str, revision: str | None = None) -> dict[str, str]:
    """The tensors of a checkpoint: name to safetensors file; empty where it has none. Nothing is loaded.

    Raises:
        CheckpointError: the file is broken.
    """

    def found(name: str) -> str | None:
        path: str | None = cached_file(checkpoint, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        return path

    if index := found(_INDEX):
        names: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        return names
    if single := found(_WEIGHTS):
        try:
            with safe_open(single, framework="pt") as weights:
                return dict.fromkeys(weights.keys(), _WEIGHTS)
        except SafetensorError as error:
            raise CheckpointError(f"{single} is broken: {error}") from None
    return {}


def check_weights(checkpoint: str, name: str, revision: str | None = None) -> None:
    """Whether a checkpoint holds a tensor; nothing is loaded.

    Raises:
        CheckpointError: it does not.
    """
    if name not in tensor_files(checkpoint, revision):
        raise CheckpointError(f"{checkpoint} holds no safetensors with {name!r}, so it has no drafter's weights")


def read_tensors(
    checkpoint: str, wanted: Callable[[str], bool], revision: str | None = None
) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint, chosen by name.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    files = {name: file for name, file in tensor_files(checkpoint, revision).items() if wanted(name)}
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in dict.fromkeys(files.values()):
            with safe_open(str(cached_file(checkpoint, file, revision=revision)), framework="pt") as weights:
                tensors |= {name: weights.get_tensor(name) for name in files if files[name] == file}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint}: cannot read the weights: {error}") from None
    return tensors


def fill(net: Net, weights: dict[str, torch.Tensor], checkpoint: str) -> Net:
    """Load a net, every tensor of it and with nothing left over.

    Raises:
        CheckpointError: names the first few tensors that are missing, left over or of another shape.
    """
    own = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
    if wrong:
        said = [f"{name} is {found.get(name, 'missing')}, not {own.get(name, 'expected')}" for name in wrong[:3]]
        raise CheckpointError(f"{checkpoint}: {len(wrong)} tensors do not fit its config.json: {'; '.join(said)}")
    net.load_state_dict(weights)
    return net


def check_fits(checkpoint: str, hidden_size: int, vocab_size: int, layers: Iterable[int], target: TargetShape) -> None:
    """Whether a drafter was made for a target like this one.

    Args:
        checkpoint: of the drafter.
        hidden_size, vocab_size: what the drafter reads.
        layers: those that it taps, counted from 1.
        target: what there is.

    Raises:
        CheckpointError: names both numbers.
    """
    remedy = "give a drafter made for this target"
    if hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{checkpoint} reads hidden states of {hidden_size} numbers, but the target's have {target.hidden_size}; "
            f"{remedy}"
        )
    if vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{checkpoint} was made for {vocab_size} tokens, but the target has {target.vocab_size}; {remedy}"
        )
    lacking = [layer for layer in layers if not 1 <= layer <= target.num_layers]
    if lacking:
        raise CheckpointError(
            f"{checkpoint} taps layers {lacking}, but the target's are 1 to {target.num_layers}; {remedy}"
        )


def field(config: dict[str, Any], name: str, checkpoint: str) -> Any:
    """A field that a config.json must have.

    Raises:
        CheckpointError: it has not.
    """
    value = config.get(name)
    if value is None:
        raise CheckpointError(f"{checkpoint}: config.json has no {name!r}")
    return value
