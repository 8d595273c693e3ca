"""An output as text, a block at a time: whole characters, nothing at or after a stop string, and who proposed what."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_INCOMPLETE = "\ufffd"  # what a part of a character decodes to
_WINDOW_TOKENS = 32  # decoded again with each block; what comes before is settled
_CONTEXT_TOKENS = 8  # of a window that begins anew: a tokenizer may write a token otherwise at the start of a text


class Piece(NamedTuple):
    """A part of an output, and who proposed it; the target's own tokens have the source ``target``."""

    text: str
    source: str


class TextStream:
    """The text of one output.

    Args:
        decode: token ids to text.
        stop: strings, none of which is part of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        self._window_ids: list[int] = []
        self._said = ""  # of the window's text, what has been made pieces of
        self._held: list[Piece] = []  # may still turn out to be a stop string

    def add(self, token_ids: Sequence[int], source: str) -> None:
        """Tokens that follow, of one source."""
        self._window_ids += token_ids
        text = self._decode(self._window_ids)
        if text.endswith(_INCOMPLETE):
            return
        self._hold(text, source)
        if len(self._window_ids) > _WINDOW_TOKENS:
            del self._window_ids[:-_CONTEXT_TOKENS]
            self._said = self._decode(self._window_ids)

    def take(self) -> tuple[Piece, ...]:
        """What is certain by now and has not been taken."""
        text = "".join(piece.text for piece in self._held)
        return self._cut(len(text) - max((_overlap(text, stop) for stop in self._stop), default=0))

    def end(self) -> tuple[Piece, ...]:
        """The rest, up to the first stop string."""
        self._hold(self._decode(self._window_ids), "target")  # half a character: the model's own fault
        text = "".join(piece.text for piece in self._held)
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return self._cut(min(places, default=len(text)))

    def _hold(self, text: str, source: str) -> None:
        if len(text) > len(self._said):
            self._held.append(Piece(text[len(self._said) :], source))
        self._said = text

    def _cut(self, size: int) -> tuple[Piece, ...]:
        """The first ``size`` characters of what is held."""
        taken, kept = [], []
        for text, source in self._held:
            inside = max(min(len(text), size), 0)
            size -= inside
            taken.append(Piece(text[:inside], source))
            kept.append(Piece(text[inside:], source))
        self._held = [piece for piece in kept if piece.text]
        return tuple(piece for piece in taken if piece.text)


def _overlap(text: str, stop: str) -> int:
    """Characters at the text's end that are, or may become, the stop string."""
    place = text.find(stop)
    if place >= 0:
        return len(text) - place
    return max((size for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
