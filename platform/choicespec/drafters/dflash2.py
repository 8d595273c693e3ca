"""DFlash2: DFlash with short convolutions around attention and MLP, and a walk through the best tokens of each place.

Source: z-lab's DFlash2 and its port in the package speculators; names of tensors as there.

Shapes: Q places of a block, K drafted places, H hidden size, G groups of channels, S taps of a convolution, N best
tokens of a place, R rank.
"""

from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from choicespec.drafters.checkpoint import TargetShape, field
from choicespec.drafters.dflash import DFlashCheckpoint
from choicespec.drafters.dflash_net import DFlashNet, DFlashShape
from choicespec.drafters.head import LmHead


class DynamicConvolution(torch.nn.Module):
    """A causal convolution over a block before a sublayer and one after it. Their kernels, one a group of channels,
    are a fixed part and one that is projected from the sublayer's input.

    Args:
        hidden_size: H.
        taps: S, a place and those before it.
        group_size: H / G channels share a kernel's projected part.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self._taps, self._groups = taps, hidden_size // group_size
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = torch.nn.Linear(hidden_size, 2 * taps * self._groups, bias=False)

    def before(self, hidden_1QH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sublayer's input, convolved, and the projected kernels (1, Q, S, G) for its output."""
        projected = self.kernel_projection(hidden_1QH).unflatten(-1, (2, self._taps, self._groups))
        return self._convolve(hidden_1QH, projected[..., 0, :, :], self.base_kernel[0]), projected[..., 1, :, :]

    def after(self, hidden_1QH: torch.Tensor, projected_1QSG: torch.Tensor) -> torch.Tensor:
        """The sublayer's output, convolved."""
        return self._convolve(hidden_1QH, projected_1QSG, self.base_kernel[1])

    def _convolve(self, hidden_1QH: torch.Tensor, projected_1QSG: torch.Tensor, base_SH: torch.Tensor) -> torch.Tensor:
        channels = hidden_1QH.unflatten(-1, (self._groups, -1))
        kernels = base_SH.unflatten(-1, (self._groups, -1)) + projected_1QSG[..., None]
        output = kernels[:, :, 0] * channels
        for tap in range(1, self._taps):  # the places before the block count as zeros
            output[:, tap:] += kernels[:, tap:, tap] * channels[:, :-tap]
        return output.flatten(-2)


class ConvolvedLayer(Qwen3DecoderLayer):
    """A Qwen3 layer with a convolution around each of its sublayers."""

    def __init__(self, config: Qwen3Config, index: int, taps: int, group_size: int) -> None:
        super().__init__(config, index)
        self.attention_conv = DynamicConvolution(config.hidden_size, taps, group_size)
        self.mlp_conv = DynamicConvolution(config.hidden_size, taps, group_size)

    def forward(self, hidden_states: torch.Tensor, **attention: Any) -> torch.Tensor:
        """The layer on one block; the arguments are transformers' own."""
        convolved, kernels = self.attention_conv.before(self.input_layernorm(hidden_states))
        attended, _ = self.self_attn(hidden_states=convolved, **attention)
        hidden_states = hidden_states + self.attention_conv.after(attended, kernels)
        convolved, kernels = self.mlp_conv.before(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.mlp_conv.after(self.mlp(convolved), kernels)


class CandidateSelector(torch.nn.Module):
    """How well a token follows another at a place: the product of both tokens' codes and the place's own state."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = torch.nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = torch.nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = torch.nn.Linear(hidden_size, rank, bias=False)

    def walk(
        self, hidden_KH: torch.Tensor, logits_KN: torch.Tensor, ids_KN: torch.Tensor, anchor: int
    ) -> tuple[list[int], list[float]]:
        """From the anchor, at each place the best of N tokens after the one before; and its probability among them."""
        projected_KR = self.hidden_projection(hidden_KH)
        chosen, probabilities, previous = [], [], anchor
        for projected_R, logits_N, ids_N in zip(projected_KR, logits_KN, ids_KN, strict=True):
            context_R = self.predecessor_codebook[previous] * projected_R
            scores_N = logits_N + (self.successor_codebook[ids_N] @ context_R).float()
            probability, best = scores_N.softmax(dim=-1).max(dim=-1)
            previous = int(ids_N[best])
            chosen.append(previous)
            probabilities.append(float(probability))
        return chosen, probabilities


class DFlash2Net(DFlashNet):
    """DFlash's network with convolved layers and a selector.

    Args:
        shape: of DFlash's part.
        vocab_size: tokens of the target.
        settings: ``conv_kernel_size``, ``conv_group_size``, ``selector_rank``, ``selector_top_k``.
    """

    def __init__(self, shape: DFlashShape, vocab_size: int, settings: dict[str, int]) -> None:
        super().__init__(shape)
        config, taps, group_size = shape.decoder, settings["conv_kernel_size"], settings["conv_group_size"]
        layers = [ConvolvedLayer(config, index, taps, group_size) for index in range(config.num_hidden_layers)]
        self.decoder.layers = torch.nn.ModuleList(layers)
        self.candidate_selector = CandidateSelector(vocab_size, config.hidden_size, settings["selector_rank"])
        self._most = settings["selector_top_k"]

    def choose(self, hidden_KH: torch.Tensor, lm_head: LmHead, anchor: int) -> tuple[list[int], list[float]]:
        """See ``DFlashNet.choose``; here each token depends on the one before."""
        best = self.logits(hidden_KH, lm_head).topk(self._most, dim=-1)
        return self.candidate_selector.walk(hidden_KH, best.values, best.indices, anchor)


class DFlash2Checkpoint(DFlashCheckpoint):
    """A DFlash2 checkpoint; see ``DFlashCheckpoint``."""

    kind = "dflash2"

    def __init__(self, checkpoint: str, target: TargetShape, revision: str | None = None) -> None:
        super().__init__(checkpoint, target, revision)
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        self._sizes = {name: int(field(self._settings, name, checkpoint)) for name in names}
        self._vocab_size = target.vocab_size

    def _empty(self) -> DFlashNet:
        return DFlash2Net(self._shape, self._vocab_size, self._sizes)
