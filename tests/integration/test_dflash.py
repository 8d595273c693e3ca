"""DFlash on small random targets and drafters: the contract, the reference, both checkpoint formats."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.proposer import Proposer
from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.dflash import DFlashCheckpoint, DFlashDrafter
from choicespec.errors import CheckpointError
from choicespec.records import Proposal, Request
from contracts.neural_drafter_contract import NeuralDrafterContract, same_draft
from integration.small_checkpoints import HIDDEN, LAYERS, small_llama
from integration.small_drafters import (
    BLOCK,
    LAYER,
    MASK,
    VOCABULARY,
    WINDOW,
    checkpoint_weights,
    dflash_net,
    save_drafter,
    speculators_config,
    zlab_config,
)
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config

TARGET = TargetShape(HIDDEN, VOCABULARY, LAYERS)
TEXT = (5, 80, 3, 200, 41, 6, 77, 130, 9)

net = cache(dflash_net)


@pytest.mark.filterwarnings("ignore:dflash. num_draft_tokens")
class TestDFlash(NeuralDrafterContract):
    def drafter(self, target: CausalLmTarget, num_draft_tokens: int) -> Proposer:
        return DFlashDrafter(net(), target, num_draft_tokens, "dflash")


def _draft(drafter: Proposer, target: CausalLmTarget) -> Proposal:
    target.prefill(TEXT[:-1])
    drafter.begin(Request("r", TEXT[:-1], 32))
    return drafter.propose(TEXT, 32)


def test_the_network_is_transformers_own() -> None:
    """The reference: transformers' DFlash model on the same weights. Fails if context and block meet otherwise, if a
    position is off by one, or if the block is causal."""
    config = MuseGlimmerAssistantConfig(
        **LAYER, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=1e-6,
        layer_types=["full_attention"] * 2,
        block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 2], attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    ours = dflash_net(decoder=Qwen3Config(**LAYER, vocab_size=1))
    reference = MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    reference.load_state_dict({names.get(n, n): tensor for n, tensor in checkpoint_weights(ours).items()})
    tapped, block = torch.randn(9, 2 * HIDDEN), torch.randn(BLOCK, HIDDEN)
    positions = torch.arange(9 + BLOCK)
    cache = RollbackCache(ours.decoder)
    with torch.inference_mode():
        ours.write_context(tapped[:4], positions[:4], cache)
        ours.write_context(tapped[4:], positions[4:9], cache)
        found = ours(block, positions[9:], ours.masks(positions[9:], positions), cache)
        expected = reference(
            noise_embeds=block[None], context_hidden_states=tapped[None], position_ids=positions[None]
        ).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_window_hides_what_is_farther(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a sliding layer sees beyond its window, or places after its own; or if a full one does not."""
    masks = net().masks(torch.arange(9, 12), torch.arange(12))
    assert masks["full_attention"].all()
    assert masks["sliding_attention"][0, 0].int().tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
    ]


def test_the_tapped_states_are_those_of_every_kept_position() -> None:
    """Fails if a tap takes the embedding for layer 1, mixes up its layers, or holds a rejected token's state."""
    model = small_llama()
    target = CausalLmTarget(model)
    tap = target.tap((3, 1))
    target.prefill(TEXT[:3])
    target.verify((*TEXT[3:6], 11, 12))
    target.keep(3)
    found = tap.read()
    with torch.inference_mode():
        states = model(torch.tensor([TEXT[:6]]), output_hidden_states=True).hidden_states
        last = torch.empty(0)
        handle = model.model.layers[2].register_forward_hook(lambda m, i, o: last.set_(o.clone()))
        model(torch.tensor([TEXT[:6]]))
        handle.remove()
    torch.testing.assert_close(found, torch.cat([last[0], states[1][0]], dim=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:dflash. num_draft_tokens")
def test_a_draft_beyond_the_trained_block_is_allowed_and_warned_of() -> None:
    """Fails if k is cut silently, or lengthened without a word."""
    target = CausalLmTarget(small_llama())
    with pytest.warns(UserWarning, match=f"num_draft_tokens={BLOCK + 2}, but it was trained for {BLOCK - 1}"):
        drafter = DFlashDrafter(net(), target, BLOCK + 2, "dflash")
    assert len(_draft(drafter, target).token_ids) == BLOCK + 2


def _zlab(folder: Path, **changes: Any) -> Path:
    return save_drafter(folder, zlab_config(**WINDOW, **changes), checkpoint_weights(net()))


def _speculators(folder: Path, **changes: Any) -> Path:
    config = speculators_config(**changes)
    config["transformer_layer_config"] |= WINDOW
    # as that package saves some of its models: with what is the target's
    copies = {"embed_tokens.weight": torch.zeros(2, 2), "verifier_norm.weight": torch.zeros(2)}
    return save_drafter(folder, config, checkpoint_weights(net()) | copies)


@pytest.mark.parametrize("save", [_zlab, _speculators])
def test_both_formats_load_as_they_were_saved(save: Any, tmp_path: Path) -> None:
    """Fails if the formats' layers, counted from 0 in one and from 1 in the other, are confused, or a tensor lost."""
    target = CausalLmTarget(small_llama())
    checkpoint = DFlashCheckpoint(str(save(tmp_path)), TARGET)
    expected = _draft(DFlashDrafter(net(), target, 4, "dflash"), target)
    assert same_draft(_draft(checkpoint.drafter(target, 4), target), expected)


def test_a_reduced_vocabulary_is_mapped_to_the_targets(tmp_path: Path) -> None:
    """Fails if the drafter's own token ids are taken for the target's."""
    own = dflash_net(draft_vocab_size=64)
    assert own.own is not None
    own.own.d2t.copy_(torch.arange(64) * 6)
    weights = checkpoint_weights(own)
    config = speculators_config(draft_vocab_size=64)
    config["transformer_layer_config"] |= WINDOW
    target = CausalLmTarget(small_llama())
    drafter = DFlashCheckpoint(str(save_drafter(tmp_path, config, weights)), TARGET).drafter(target, 4)
    ids = _draft(drafter, target).token_ids
    assert len(set(ids)) > 1
    assert all(token_id % 7 == 0 for token_id in ids)


def test_drafters_of_one_checkpoint_share_its_weights(tmp_path: Path) -> None:
    """Fails if each k of an experiment loads the network once more."""
    target = CausalLmTarget(small_llama())
    checkpoint = DFlashCheckpoint(str(_zlab(tmp_path)), TARGET)
    two, four = checkpoint.drafter(target, 2), checkpoint.drafter(target, 4)
    assert two._net is four._net
    assert _draft(two, target).token_ids == _draft(four, target).token_ids[:2]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TARGET._replace(hidden_size=96), "reads hidden states of 64 numbers, but the target's have 96"),
        (TARGET._replace(vocab_size=600), "was made for 512 tokens, but the target has 600"),
        (TARGET._replace(num_layers=2), r"taps layers \[3\], but the target's are 1 to 2"),
    ],
)
@pytest.mark.parametrize("save", [_zlab, _speculators])
def test_a_drafter_for_another_target_is_refused(save: Any, target: TargetShape, message: str, tmp_path: Path) -> None:
    """Fails if a drafter that can only draft nonsense, or crash in the first step, is loaded."""
    with pytest.raises(CheckpointError, match=message):
        DFlashCheckpoint(str(save(tmp_path)), target)


def test_what_is_no_dflash_checkpoint_is_refused(tmp_path: Path) -> None:
    """Fails with a traceback of a missing key, or after minutes of loading."""
    weights = checkpoint_weights(net())
    for name, config, message in [
        ("llama", {"model_type": "llama"}, "neither 'dflash_config'"),
        ("two", zlab_config(selector_rank=8), "of kind 'dflash2', not 'dflash'"),
        ("eagle", speculators_config(speculators_model_type="eagle3"), "of kind 'eagle3'"),
        ("anchor", speculators_config(sample_from_anchor=True), "from the anchor's own place"),
        ("maskless", speculators_config(mask_token_id=None), "no 'mask_token_id'"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            DFlashCheckpoint(str(save_drafter(tmp_path / name, config, weights)), TARGET)
    empty = save_drafter(tmp_path / "empty", zlab_config(), {"fc.bias": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="holds no safetensors with"):
        DFlashCheckpoint(str(empty), TARGET)


def test_weights_that_do_not_fit_their_config_are_refused(tmp_path: Path) -> None:
    """Fails if a missing tensor stays at random weights, or one left over is dropped silently."""
    weights = checkpoint_weights(net())
    weights["layers.0.extra.weight"] = weights.pop("norm.weight")
    checkpoint = DFlashCheckpoint(str(save_drafter(tmp_path, zlab_config(), weights)), TARGET)
    with pytest.raises(CheckpointError, match=r"2 tensors do not fit .* not expected.* is missing, not"):
        checkpoint.drafter(CausalLmTarget(small_llama()), 4)
