"""Which tokens a drafter may draft: all of the target's, or some of them with an LM head of its own.

On a small target the LM head over the whole vocabulary is most of what a small drafter would read, and train with.

Shapes: K places, H hidden size, D tokens of the drafter.
"""

from collections.abc import Callable, MutableMapping

import torch

from choicespec.decoding.causal_lm import CausalLmTarget

LmHead = Callable[[torch.Tensor], torch.Tensor]
OWN_HEAD, OWN_TOKENS = "own.lm_head.weight", "own.d2t"  # in a network; without "own." in a checkpoint of speculators


class DraftHead(torch.nn.Module):
    """An LM head over D of the target's tokens.

    Attributes:
        lm_head: their rows.
        d2t: (D,) a token's id in the target less its id here.
    """

    d2t: torch.Tensor

    def __init__(self, hidden_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(hidden_size, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))

    def target_ids(self, draft_ids_K: torch.Tensor) -> torch.Tensor:
        """The (K,) ids that tokens have in the target."""
        return draft_ids_K + self.d2t[draft_ids_K]


def fill_head(weights: MutableMapping[str, torch.Tensor], target: CausalLmTarget) -> None:
    """The target's own rows, where a checkpoint says which tokens it drafts but leaves their rows out."""
    if OWN_TOKENS in weights and OWN_HEAD not in weights:
        offsets = weights[OWN_TOKENS]
        weights[OWN_HEAD] = target.lm_head_rows(torch.arange(len(offsets)) + offsets.cpu()).cpu()


def most_likely(logits_KD: torch.Tensor, own: DraftHead | None) -> tuple[list[int], list[float]]:
    """The most likely token of each place, by its id in the target, and its probability."""
    probabilities_K, ids_K = logits_KD.float().softmax(dim=-1).max(dim=-1)
    ids_K = ids_K if own is None else own.target_ids(ids_K)
    return ids_K.tolist(), probabilities_K.tolist()


def likeliest(logits_KD: torch.Tensor, own: DraftHead | None, most: int) -> tuple[list[list[int]], list[list[float]]]:
    """The most likely tokens of each place, likeliest first, by their ids in the target, and their probabilities."""
    probabilities_KM, ids_KM = logits_KD.float().softmax(dim=-1).topk(min(most, logits_KD.shape[-1]), dim=-1)
    ids_KM = ids_KM if own is None else own.target_ids(ids_KM)
    return ids_KM.tolist(), probabilities_KM.tolist()
