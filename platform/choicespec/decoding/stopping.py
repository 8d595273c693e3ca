"""Where an output ends: the same cut, token by token, whether tokens come singly or as a block."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from choicespec.records import FinishReason


class Cut(NamedTuple):
    """The tokens of a block that belong to the output, and why it ends there (None: it goes on)."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class StopRule:
    """Ends an output at an end-of-sequence token, at a stop string, or at its length.

    Args:
        eos_ids: end-of-sequence tokens; the first one ends the output and is part of it.
        max_new_tokens: the most tokens of the output.
        stop: strings; the token that completes one ends the output and is part of it.
        detokenize: token ids to text; only called where there are stop strings.
    """

    def __init__(
        self,
        eos_ids: Collection[int],
        max_new_tokens: int,
        stop: Sequence[str],
        detokenize: Callable[[Sequence[int]], str],
    ) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._max_new_tokens = max_new_tokens
        self._stop = tuple(stop)
        self._detokenize = detokenize
        # A token is at least one byte, so a stop string ends in the last token of a window of this many tokens; the
        # spare ones let a character that several tokens share begin before it.
        self._window_tokens = max((len(s.encode()) for s in self._stop), default=0) + 4

    def cut(self, output_ids: Sequence[int], block_ids: Sequence[int]) -> Cut:
        """Keep the tokens of ``block_ids`` up to where the output, ``output_ids`` so far, ends."""
        for count in range(1, len(block_ids) + 1):
            reason = self._reason(output_ids, block_ids[:count])
            if reason is not None:
                return Cut(tuple(block_ids[:count]), reason)
        return Cut(tuple(block_ids), None)

    def _reason(self, output_ids: Sequence[int], block_ids: Sequence[int]) -> FinishReason | None:
        if block_ids[-1] in self._eos_ids:
            return "eos"
        if self._stop:
            text = self._detokenize([*output_ids, *block_ids][-self._window_tokens :])
            if any(stop in text for stop in self._stop):
                return "stop"
        return "length" if len(output_ids) + len(block_ids) >= self._max_new_tokens else None
