"""Which target a checkpoint is: the same however it is stored, another one where it would decode otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.errors import CheckpointError
from choicespec.records import TargetIdentity
from choicespec.runtimes.checkpoints import identify
from choicespec.spec.pair import TargetSpec
from integration.small_checkpoints import HIDDEN, LAYERS, save_checkpoint, small_llama


def _model(seed: int = 0) -> Any:
    """Of a vocabulary large enough for several rows of its embedding to be looked at."""
    return small_llama(seed, vocab_size=2100)


def _identity(folder: Path, **target: object) -> TargetIdentity:
    return identify(str(folder), TargetSpec.model_validate({"model": str(folder), **target}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, in one file."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), _model())


def test_the_precision_it_is_stored_in_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Fails if a scorer trained beside a float32 copy is refused beside the bfloat16 original."""
    half = save_checkpoint(tmp_path, _model().to(torch.bfloat16))
    assert (half / "model.safetensors").stat().st_size < (checkpoint / "model.safetensors").stat().st_size
    assert _identity(half) == _identity(checkpoint)


def test_the_files_it_is_stored_in_change_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Fails if a checkpoint of several files cannot be identified, or is another target than the same in one file."""
    several = save_checkpoint(tmp_path, _model(), max_shard_size="100KB")
    assert len(list(several.glob("*.safetensors"))) > 1
    assert _identity(several) == _identity(checkpoint)


def test_other_weights_are_another_target(checkpoint: Path, tmp_path: Path) -> None:
    """Fails if a scorer reads hidden states of a target that it was not trained for."""
    other = _identity(save_checkpoint(tmp_path, _model(seed=1)))
    assert other.weights != _identity(checkpoint).weights
    assert other.tokenizer == _identity(checkpoint).tokenizer


def test_one_layer_that_was_tuned_is_another_target(checkpoint: Path, tmp_path: Path) -> None:
    """Fails if a fine-tune whose embedding was frozen passes for the model that it was tuned from."""
    tuned = _model()
    with torch.no_grad():
        tuned.model.layers[-1].mlp.down_proj.weight.mul_(1.5)
    assert _identity(save_checkpoint(tmp_path, tuned)).weights != _identity(checkpoint).weights


def test_another_configuration_is_another_target(checkpoint: Path, tmp_path: Path) -> None:
    """Fails if weights that are read in another way pass for the same target."""
    save_checkpoint(tmp_path, _model())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    for change in ({"num_attention_heads": 8}, {"num_hidden_layers": 2}, {"rope_parameters": rope}):
        (tmp_path / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        assert _identity(tmp_path).weights != _identity(checkpoint).weights
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert _identity(tmp_path) == _identity(checkpoint)


def test_another_vocabulary_is_another_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    """Fails if token ids of a recording are read with a tokenizer in which they mean something else."""
    identities = [_identity(checkpoint)]
    for index, words in enumerate([("one", "two"), ("two", "one"), ("one",)]):
        identities.append(_identity(save_checkpoint(tmp_path / str(index), _model(), words=words)))
    assert len({identity.tokenizer for identity in identities}) == 4
    assert len({identity.weights for identity in identities}) == 1


def test_the_rest_is_what_the_target_says(checkpoint: Path) -> None:
    """Fails if a quantised target is taken for the one it was rounded from, or if the sizes are others."""
    plain, rounded = _identity(checkpoint), _identity(checkpoint, dtype="bfloat16", quantization="q4_0")
    assert (plain.precision, rounded.precision) == ("float32", "q4_0 bfloat16")
    assert (plain.hidden_size, plain.num_layers) == (HIDDEN, LAYERS)
    assert rounded.model_copy(update={"precision": "float32"}) == plain


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path) -> None:
    """Fails if a download that was cut short gives a traceback."""
    several = save_checkpoint(tmp_path, _model(), max_shard_size="100KB")
    file = sorted(several.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{file.name} is broken"):
        _identity(several)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"has no file {file.name}, which its index names"):
        _identity(several)


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    """Fails if weights that can run code when they are read are read, or if a traceback hides what is missing."""
    model = _model()
    save_checkpoint(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*has no safetensors with an input embedding"):
        _identity(tmp_path)
