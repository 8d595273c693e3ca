"""DFlash: a block of draft tokens in one pass of a few layers over the target's hidden states. The network and its
source are in ``dflash_net``.

Shapes: Q places of a block, K drafted places, H hidden size, C keys.
"""

import warnings
from collections.abc import Sequence

import torch

from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.drafters.checkpoint import TargetShape, check_weights, fill, read_tensors
from choicespec.drafters.dflash_net import DFlashNet, read_dflash
from choicespec.drafters.head import fill_head
from choicespec.records import Proposal, Request

_NOTHING = Proposal((), "")
# Copies of the target's own, which checkpoints of speculators may hold beside the drafter's tensors.
_COPIES = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")


class DFlashCheckpoint:
    """A checkpoint in z-lab's format or that of speculators; the weights are read when the first drafter is made.

    Args:
        checkpoint: a folder, or a hub id.
        target: what it drafts for.
        revision: the hub revision.

    Raises:
        CheckpointError: it is missing, of another kind, or made for another target.
    """

    kind = "dflash"

    def __init__(self, checkpoint: str, target: TargetShape, revision: str | None = None) -> None:
        self._checkpoint, self._revision = checkpoint, revision
        self._shape, self._settings = read_dflash(checkpoint, self.kind, target, revision)
        check_weights(checkpoint, "fc.weight", revision)
        self._net: DFlashNet | None = None

    @property
    def trained_tokens(self) -> int:
        """The longest k that leaves what shorter ones draft as it is."""
        return self._shape.block_length - 1

    def drafter(self, target: CausalLmTarget, num_draft_tokens: int) -> "DFlashDrafter":
        """A drafter of k tokens; its network is shared with the others."""
        return DFlashDrafter(self.network(target), target, num_draft_tokens, self.kind)

    def network(self, target: CausalLmTarget) -> DFlashNet:
        """The network with its weights, read once."""
        if self._net is None:
            weights = self._weights()
            fill_head(weights, target)
            net = fill(self._empty(), weights, self._checkpoint).to(device=target.device, dtype=target.dtype).eval()
            use_small_blocks(net)
            use_small_blocks(net.decoder)
            self._net = net
        return self._net

    def _empty(self) -> DFlashNet:
        return DFlashNet(self._shape)

    def _weights(self) -> dict[str, torch.Tensor]:
        copies = (*_COPIES, *(("lm_head.weight", "d2t") if self._shape.draft_vocab_size is None else ()))
        weights = read_tensors(self._checkpoint, lambda name: name not in copies, self._revision)
        return {_network_name(name): tensor for name, tensor in weights.items()}


def _network_name(name: str) -> str:
    if name.startswith(("layers.", "norm.")):
        return f"decoder.{name}"
    return f"own.{name}" if name in ("lm_head.weight", "d2t") else name


class DFlashDrafter:
    """Drafts a block a step.

    The block always has its trained length, so that a draft does not depend on what is asked of it; the first k tokens
    are proposed. A k beyond that is allowed, and warned of: the masks past the trained length are new to the network.

    Args:
        net: the drafter's network.
        target: whose tapped states are the context, and whose embedding and LM head the drafter shares.
        num_draft_tokens: k.
        source: what its drafts are booked on.
    """

    def __init__(self, net: DFlashNet, target: CausalLmTarget, num_draft_tokens: int, source: str) -> None:
        shape = net.shape
        if num_draft_tokens >= shape.block_length:
            warnings.warn(
                f"{source}: num_draft_tokens={num_draft_tokens}, but it was trained for {shape.block_length - 1}; "
                "tokens beyond that are drafted, and seldom right",
                stacklevel=2,
            )
        self._net, self._target, self._source = net, target, source
        self._num_draft_tokens = num_draft_tokens
        self._masks = [shape.mask_token_id] * (max(shape.block_length, num_draft_tokens + 1) - 1)
        self._tap = target.tap(shape.layers)
        self._cache = RollbackCache(net.decoder)
        self._context = 0  # positions in the cache

    def begin(self, request: Request) -> None:
        """Empty the cache; the prompt's states are taken in by the first draft."""
        self._context = 0
        self._cache.keep(0)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """Take in what the target has kept since the last draft, and draft a block after the anchor."""
        count = min(self._num_draft_tokens, limit)
        if count <= 0:
            return _NOTHING
        with torch.inference_mode():
            hidden_KH = self._drafted(token_ids[-1])
            ids, probabilities = self._net.choose(hidden_KH, self._target.lm_head, token_ids[-1])
        return Proposal(tuple(ids[:count]), self._source, tuple(probabilities[:count]))

    def marginals(self, token_ids: Sequence[int], limit: int, most: int) -> list[list[tuple[int, float]]]:
        """See ``BlockDrafter.marginals``; of DFlash alone."""
        if limit <= 0:
            return []
        with torch.inference_mode():
            hidden_KH = self._drafted(token_ids[-1])
            ids_KM, probabilities_KM = self._net.likely(hidden_KH[:limit], self._target.lm_head, most)
        return [list(zip(*place, strict=True)) for place in zip(ids_KM, probabilities_KM, strict=True)]

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def _take_in(self) -> None:
        tapped_TF = self._tap.read()
        end = self._context + len(tapped_TF)
        self._net.write_context(tapped_TF, self._positions(self._context, end), self._cache)
        self._context = end

    def _drafted(self, anchor: int) -> torch.Tensor:
        """The (K, H) states at the drafted places, once all is taken in that the target has kept."""
        self._take_in()
        block = [anchor, *self._masks]
        positions_C = self._positions(0, self._context + len(block))
        positions_Q = positions_C[self._context :]
        masks = self._net.masks(positions_Q, positions_C)
        hidden_QH: torch.Tensor = self._net(self._target.embed(block), positions_Q, masks, self._cache)
        self._cache.keep(self._context)
        return hidden_QH[1 : self._num_draft_tokens + 1]

    def _positions(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, device=self._target.device)
