"""MTP: the target's own head for the token after next, iterated on its own output. The network and its source are in
``mtp_net``.

Shapes: T tokens, F and H hidden size.
"""

from collections.abc import Sequence

import torch

from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.drafters.checkpoint import TargetShape, fill, read_tensors, tensor_files
from choicespec.drafters.head import OWN_TOKENS, fill_head, most_likely
from choicespec.drafters.mtp_net import MtpNet, is_head, network_weights, read_mtp
from choicespec.errors import CheckpointError
from choicespec.records import Proposal, Request

_NOTHING = Proposal((), "")


class MtpCheckpoint:
    """The ``mtp.*`` tensors of a target's own checkpoint, or a head in the format of speculators; the weights are read
    when the first drafter is made.

    Args:
        checkpoint: a folder, or a hub id.
        target: what it drafts for.
        revision: the hub revision.

    Raises:
        CheckpointError: it is missing, of another kind, or made for another target.
    """

    def __init__(self, checkpoint: str, target: TargetShape, revision: str | None = None) -> None:
        self._checkpoint, self._revision = checkpoint, revision
        self._decoder = read_mtp(checkpoint, target, revision)
        self._num_layers = target.num_layers
        if not any(map(is_head, tensor_files(checkpoint, revision))):
            raise CheckpointError(f"{checkpoint} holds no safetensors of a head for multi-token prediction ('mtp.*')")
        self._net: MtpNet | None = None

    trained_tokens = None  # whatever k is, the first tokens are the same

    def drafter(self, target: CausalLmTarget, num_draft_tokens: int) -> "MtpDrafter":
        """A drafter of k tokens; its network is shared with the others."""
        if self._net is None:
            weights = network_weights(read_tensors(self._checkpoint, is_head, self._revision))
            fill_head(weights, target)
            net = MtpNet(self._decoder, len(weights[OWN_TOKENS]) if OWN_TOKENS in weights else None)
            net = fill(net, weights, self._checkpoint).to(device=target.device, dtype=target.dtype).eval()
            use_small_blocks(net)
            use_small_blocks(net.decoder)
            self._net = net
        return MtpDrafter(self._net, target, self._num_layers, num_draft_tokens)


class MtpDrafter:
    """Drafts a token at a time, each from the head's own state at the token before.

    Its cache holds the positions for which the target's state and the token after are known: those the target has
    kept. What drafting appends is cut off again.

    Args:
        net: the head.
        target: whose last layer's states it reads, and whose embedding, final norm and LM head it shares.
        last_layer: of the target.
        num_draft_tokens: k.
    """

    def __init__(self, net: MtpNet, target: CausalLmTarget, last_layer: int, num_draft_tokens: int) -> None:
        self._net, self._target = net, target
        self._num_draft_tokens = num_draft_tokens
        self._tap = target.tap([last_layer])
        self._cache = RollbackCache(net.decoder)
        self._known = 0  # positions in the cache

    def begin(self, request: Request) -> None:
        """Empty the cache; the prompt's states are taken in by the first draft."""
        self._known = 0
        self._cache.keep(0)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """Take in what the target has kept since the last draft, and draft token by token after the anchor."""
        count = min(self._num_draft_tokens, limit)
        if count <= 0:
            return _NOTHING
        ids: list[int] = []
        probabilities: list[float] = []
        with torch.inference_mode():
            hidden_TH = self._take_in(token_ids)
            while True:
                logits_1V = self._net.logits(hidden_TH[-1:], self._target.lm_head)
                next_ids, next_probabilities = most_likely(logits_1V, self._net.own)
                ids += next_ids
                probabilities += next_probabilities
                if len(ids) == count:
                    break
                hidden_TH = self._run(ids[-1:], hidden_TH[-1:], self._known + len(ids) - 1)
        self._cache.keep(self._known)
        return Proposal(tuple(ids), "mtp", tuple(probabilities))

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def _take_in(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The head's states at the positions since the last draft, up to the one before the anchor."""
        tapped_TF = self._target.final_norm(self._tap.read())
        start, self._known = self._known, self._known + len(tapped_TF)
        return self._run(token_ids[start + 1 : self._known + 1], tapped_TF, start)

    def _run(self, ids: Sequence[int], hidden_TH: torch.Tensor, start: int) -> torch.Tensor:
        positions_T = torch.arange(start, start + len(ids), device=self._target.device)
        states: torch.Tensor = self._net(self._target.embed(ids), hidden_TH, positions_T, self._cache)
        return states
