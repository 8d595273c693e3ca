"""Plain decoding: the proposer that never proposes."""

from collections.abc import Sequence

from choicespec.records import Proposal, Request
from choicespec.spec.method import Autoregressive

_NOTHING = Proposal((), "")


class AutoregressiveDrafter:
    """Leaves every step to the target alone."""

    def __init__(self, method: Autoregressive) -> None:
        del method  # it has no settings

    def begin(self, request: Request) -> None:
        """Nothing to prepare."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """An empty draft."""
        return _NOTHING

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""
