"""MTP heads on small random targets: the contract, the reference, both checkpoint formats."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.proposer import Proposer
from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.mtp import MtpCheckpoint, MtpDrafter
from choicespec.drafters.mtp_net import MtpNet, network_weights, read_mtp
from choicespec.errors import CheckpointError
from choicespec.records import Proposal, Request
from contracts.neural_drafter_contract import NeuralDrafterContract, same_draft
from integration.small_checkpoints import HIDDEN, LAYERS, small_llama
from integration.small_drafters import LAYER, NATIVE, VOCABULARY, mtp_net, renamed, save_drafter, scattered
from transformers.modeling_layers import MtpModel

TARGET = TargetShape(HIDDEN, VOCABULARY, LAYERS)
TEXT = (5, 80, 3, 200, 41, 6, 77, 130, 9)
net = cache(mtp_net)

SPECULATORS = {
    "fc.": "mtp_layers.0.input_proj.",
    "embedding_norm.": "mtp_layers.0.token_layernorm.",
    "hidden_norm.": "mtp_layers.0.hidden_layernorm.",
    "decoder.norm.": "mtp_layers.0.final_layernorm.",
    "decoder.layers.0.": "mtp_layers.0.",
}


class TestMtp(NeuralDrafterContract):
    def drafter(self, target: CausalLmTarget, num_draft_tokens: int) -> Proposer:
        return MtpDrafter(net(), target, LAYERS, num_draft_tokens)


def _draft(drafter: Proposer, target: CausalLmTarget) -> Proposal:
    target.prefill(TEXT[:-1])
    drafter.begin(Request("r", TEXT[:-1], 32))
    return drafter.propose(TEXT, 32)


def test_the_first_token_is_that_of_transformers_own_head() -> None:
    """The reference: transformers' MTP model on the same weights and states. Fails if embedding and state are swapped,
    if a token meets the state of its own position, or if the state is taken before the target's final norm."""
    main = small_llama(num_mtp_layers=1)
    reference = MtpModel(main, 1).eval()
    layer, ours = reference.layers[0], mtp_net()
    layer.enorm.load_state_dict(ours.embedding_norm.state_dict())
    layer.hnorm.load_state_dict(ours.hidden_norm.state_dict())
    layer.eh_proj.load_state_dict(ours.fc.state_dict())
    layer.post_norm.load_state_dict(ours.decoder.norm.state_dict())
    layer.mtp_block.load_state_dict(ours.decoder.layers[0].state_dict())
    ids = torch.tensor([TEXT])
    with torch.inference_mode():
        states = main.model(ids[:, :-1]).last_hidden_state  # after the norm
        expected, logits, _ = reference(ids[:, 1:], states, None, torch.arange(len(TEXT) - 1)[None], None)
    target = CausalLmTarget(main)
    found = _draft(MtpDrafter(ours, target, LAYERS, 1), target)
    assert found.token_ids == (int(expected[0, 0]),)
    assert found.probabilities[0] == pytest.approx(float(logits[0, 0].softmax(dim=-1).max()), rel=1e-4)


def test_further_tokens_come_from_the_heads_own_states() -> None:
    """A second writing, without a cache: the whole sequence anew for each token. Fails if a draft token is given
    another position, or if drafting reads or leaves entries that are not its own."""
    model = small_llama()
    target = CausalLmTarget(model)
    found = _draft(MtpDrafter(net(), target, LAYERS, 4), target)
    ids = list(TEXT)
    with torch.inference_mode():
        states = model.model(torch.tensor([TEXT[:-1]])).last_hidden_state[0]
        for _ in range(4):
            positions = torch.arange(len(ids) - 1)
            new = net()(target.embed(ids[1:]), states, positions, RollbackCache(net().decoder))[-1:]
            ids.append(int(target.lm_head(new)[0].argmax()))
            states = torch.cat([states, new])
    assert found.token_ids == tuple(ids[len(TEXT) :])


def _native(folder: Path, **changes: Any) -> Path:
    config = {"model_type": "llama", **LAYER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, **changes}
    return save_drafter(folder, config, renamed(net(), NATIVE) | {"model.norm.weight": torch.ones(HIDDEN)})


def _speculators(folder: Path, **changes: Any) -> Path:
    layer = {"model_type": "llama", **LAYER, "vocab_size": VOCABULARY}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer, **changes}
    return save_drafter(folder, config, renamed(net(), SPECULATORS))


@pytest.mark.parametrize("save", [_native, _speculators])
def test_both_formats_load_as_they_were_saved(save: Any, tmp_path: Path) -> None:
    """Fails if a tensor is lost or renamed wrongly, or if the target's own tensors are taken for the head's."""
    target = CausalLmTarget(small_llama())
    found = MtpCheckpoint(str(save(tmp_path)), TARGET).drafter(target, 3)
    assert same_draft(_draft(found, target), _draft(MtpDrafter(net(), target, LAYERS, 3), target))


@pytest.mark.parametrize("save", [_native, _speculators])
def test_a_head_for_another_target_is_refused(save: Any, tmp_path: Path) -> None:
    """Fails if a head that can only draft nonsense is loaded."""
    path = str(save(tmp_path))
    with pytest.raises(CheckpointError, match="reads hidden states of 64 numbers, but the target's have 96"):
        MtpCheckpoint(path, TARGET._replace(hidden_size=96))
    with pytest.raises(CheckpointError, match="was made for 512 tokens, but the target has 600"):
        MtpCheckpoint(path, TARGET._replace(vocab_size=600))


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    """Fails if a target without the head's tensors, which most releases lack, is found out in the first step."""
    small_llama().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no safetensors of a head"):
        MtpCheckpoint(str(tmp_path), TARGET)
    with pytest.raises(CheckpointError, match="has 3 layers"):
        MtpCheckpoint(str(_native(tmp_path, mtp_num_hidden_layers=3)), TARGET)


def test_experts_that_lie_singly_are_stacked() -> None:
    """Fails if an expert's projections are joined in another order than the layer reads them in."""
    parts = {
        f"mtp.layers.0.mlp.experts.{number}.{part}_proj.weight": torch.full((2, 2), 10.0 * number + index)
        for number in (1, 0)
        for index, part in enumerate(("gate", "up", "down"))
    }
    found = network_weights(parts)
    assert found["decoder.layers.0.mlp.experts.gate_up_proj"][:, :, 0].tolist() == [[0, 0, 1, 1], [10, 10, 11, 11]]
    assert found["decoder.layers.0.mlp.experts.down_proj"][:, 0, 0].tolist() == [2, 12]


GATED = {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@pytest.mark.parametrize("kind", [GATED, EXPERTS], ids=lambda kind: kind["model_type"])
def test_heads_of_targets_with_linear_attention_have_a_cache_that_grows(kind: dict[str, Any], tmp_path: Path) -> None:
    """Fails if such a target's head, whose only layer is one of full attention, cannot be built or be run in parts."""
    config = {**kind, **LAYER, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    path = save_drafter(tmp_path, config, {"mtp.norm.weight": torch.ones(HIDDEN)})
    head = scattered(MtpNet(read_mtp(str(path), TARGET, None)))
    embedded, states, positions = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN), torch.arange(9)
    cache = RollbackCache(head.decoder)
    with torch.inference_mode():
        whole = head(embedded, states, positions, RollbackCache(head.decoder))
        parts = [head(embedded[part], states[part], positions[part], cache) for part in (slice(0, 6), slice(6, 9))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-3, atol=1e-3)
