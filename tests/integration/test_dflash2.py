"""DFlash2 on small random targets and drafters: the contract, and a second writing of its convolution and its walk."""

from functools import cache
from pathlib import Path

import pytest
import torch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.proposer import Proposer
from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.dflash import DFlashDrafter
from choicespec.drafters.dflash2 import DFlash2Checkpoint, DynamicConvolution
from choicespec.errors import CheckpointError
from choicespec.records import Request
from contracts.neural_drafter_contract import NeuralDrafterContract, same_draft
from integration.small_checkpoints import HIDDEN, LAYERS, small_llama
from integration.small_drafters import (
    LAYER,
    MASK,
    SIZES,
    TAPPED,
    VOCABULARY,
    checkpoint_weights,
    dflash2_net,
    save_drafter,
    scattered,
    speculators_config,
    zlab_config,
)
from transformers import Qwen3Config

TARGET = TargetShape(HIDDEN, VOCABULARY, LAYERS)
net = cache(dflash2_net)


@pytest.mark.filterwarnings("ignore:dflash2. num_draft_tokens")
class TestDFlash2(NeuralDrafterContract):
    def drafter(self, target: CausalLmTarget, num_draft_tokens: int) -> Proposer:
        return DFlashDrafter(net(), target, num_draft_tokens, "dflash2")


def test_a_convolution_reads_each_place_and_the_one_before() -> None:
    """Fails if taps, groups or the two kernels are confused, or if the first place reads beyond the block's edge."""
    conv = scattered(DynamicConvolution(hidden_size=6, taps=2, group_size=3)).requires_grad_(False)
    hidden = torch.randn(1, 4, 6)
    before, kernels = conv.before(hidden)
    after = conv.after(before, kernels)
    projected = conv.kernel_projection(hidden).view(4, 2, 2, 2)
    for side, read, found in ((0, hidden, before), (1, before, after)):
        for place in range(4):
            for channel in range(6):
                expected = sum(
                    (conv.base_kernel[side, tap, channel] + projected[place, side, tap, channel // 3])
                    * read[0, place - tap, channel]
                    for tap in range(2)
                    if place >= tap
                )
                torch.testing.assert_close(found[0, place, channel], torch.as_tensor(expected))


def test_the_walk_weighs_each_token_with_the_one_before() -> None:
    """Fails if a place is scored after the anchor instead of the token just chosen, or out of its best N tokens."""
    selector = net().candidate_selector
    hidden, logits = torch.randn(3, HIDDEN), torch.randn(3, VOCABULARY)
    best = logits.topk(4, dim=-1)
    with torch.inference_mode():
        found, probabilities = selector.walk(hidden, best.values, best.indices, anchor=7)
        previous = 7
        for place in range(3):
            scores = {
                int(token): float(
                    logits[place, token]
                    + (
                        selector.predecessor_codebook[previous]
                        * selector.hidden_projection(hidden[place])
                        * selector.successor_codebook[token]
                    ).sum()
                )
                for token in best.indices[place]
            }
            assert found[place] == max(scores, key=lambda token: scores[token])
            share = torch.tensor(list(scores.values())).softmax(dim=0).max()
            assert probabilities[place] == pytest.approx(float(share), rel=1e-4)
            previous = found[place]
    assert found != best.indices[:, 0].tolist()


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_both_formats_load_as_they_were_saved(form: str, tmp_path: Path) -> None:
    """Fails if a setting is looked for in the other format's place."""
    plain = dflash2_net(decoder=Qwen3Config(**LAYER, vocab_size=1))
    config = (
        zlab_config(dflash_config={"mask_token_id": MASK, "target_layer_ids": [t - 1 for t in TAPPED], **SIZES})
        if form == "zlab"
        else speculators_config(speculators_model_type="dflash2", **SIZES)
    )
    target = CausalLmTarget(small_llama())
    path = str(save_drafter(tmp_path, config, checkpoint_weights(plain)))
    found = DFlash2Checkpoint(path, TARGET).drafter(target, 4)
    drafts = []
    for drafter in (found, DFlashDrafter(plain, target, 4, "dflash2")):
        target.prefill((5, 6, 7))
        drafter.begin(Request("r", (5, 6, 7), 8))
        drafts.append(drafter.propose((5, 6, 7, 8), 8))
    assert same_draft(*drafts)


def test_a_dflash_checkpoint_is_no_dflash2(tmp_path: Path) -> None:
    """Fails if the missing parts stay at random weights."""
    path = save_drafter(tmp_path, zlab_config(), checkpoint_weights(net()))
    with pytest.raises(CheckpointError, match="of kind 'dflash', not 'dflash2'"):
        DFlash2Checkpoint(str(path), TARGET)
