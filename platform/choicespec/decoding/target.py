"""What the decoding loop asks of a target: prefill, verify a block, keep what was accepted."""

from collections.abc import Sequence
from typing import Protocol


class Target(Protocol):
    """A target with a cache, whose choices depend on the text alone. One request at a time."""

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Start a request: fill an empty cache with the prompt; return the first token of the output."""
        ...

    def verify(self, block_ids: Sequence[int]) -> list[int]:
        """Run the anchor and a draft, q tokens, through the target in one pass.

        Returns:
            q token ids: the target's own choice after each token of the block.
        """
        ...

    def keep(self, num_tokens: int) -> None:
        """Roll the cache back to the first ``num_tokens`` tokens of the block just verified."""
        ...


class TreeTarget(Target, Protocol):
    """A target that verifies trees as well."""

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        """See ``Target.verify``.

        Args:
            block_ids: the anchor, and the draft after it.
            parents: see ``Proposal.parents``; a token of a tree sees its ancestors, and nothing else of the block.
        """
        ...

    def gather(self, places: Sequence[int]) -> None:
        """Move some tokens of the block just verified to its front, in this order, as if it had begun with them."""
        ...
