"""Suffix matching in token ids: where did the last tokens of a text occur before, and what followed them?

Two ways of looking: a scan of a text that is short and may grow, and the suffix array of one that never changes. The
longest matches are always among what is found.

Shapes: M occurrences; D tokens of context; L tokens of a continuation; W = D + 1 + L; N tokens of a text.
Tokens are stored as their ids plus one: 0 separates documents.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydivsufsort import divsufsort  # type: ignore[import-untyped]

Ints = NDArray[np.int64]
Tokens = NDArray[np.uint32]

SEPARATOR = 0
_NO_TOKEN = 2**32 - 1
MOST_MATCH_TOKENS = 16
_FRONT = MOST_MATCH_TOKENS + 1  # places before a text's first token, for rows that reach back
_GUIDE_STEP = 256
_BIG_ENDIAN = np.dtype(">u4")  # bytes that sort as the tokens do


class Query(NamedTuple):
    """What is looked for.

    Attributes:
        context: the last D tokens of a text as stored, the last of them first, then a token that no text holds, so that
            every row differs somewhere; D is 1 to MOST_MATCH_TOKENS.
        key: the D tokens in big-endian bytes.
        span: places of the wanted tokens, relative to the place after a match: D + 1 backwards from it, L from it on.
        span_after: the same plus one, as a segment counts.
        most: how many of the longest matches must be found, 1 or more; others may be found too.
    """

    context: Tokens
    key: bytes
    span: Ints
    span_after: Ints
    most: int


class Rows(NamedTuple):
    """Stored tokens around the places after matches, in the order of the query's span."""

    tokens: NDArray[np.unsignedinteger]  # shape (M, W)
    places: Ints  # shape (M,)


def make_query(token_ids: Sequence[int], length: int, most: int) -> Query:
    """The query for the ``length`` tokens that follow ``token_ids`` (1 or more), of which only the end counts."""
    last = token_ids[-MOST_MATCH_TOKENS:]
    context = np.array([*(token_id + 1 for token_id in reversed(last)), _NO_TOKEN], np.uint32)
    span = np.concatenate([np.arange(-1, -len(context) - 1, -1), np.arange(length)])
    return Query(context, context[:-1].astype(_BIG_ENDIAN).tobytes(), span, span + 1, most)


def match_lengths(tokens_MW: NDArray[np.unsignedinteger], query: Query) -> Ints:
    """How many tokens before each row's place are the context's: 0 to D."""
    lengths_M: Ints = (tokens_MW[:, : len(query.context)] != query.context).argmax(axis=1)
    return lengths_M


def continuations(tokens_MW: NDArray[np.unsignedinteger], query: Query) -> list[list[int]]:
    """The token ids from each row's place on; fewer than L of them at the end of a document."""
    following = (tokens_MW[:, len(query.context) :].astype(np.int64) - 1).tolist()
    return [ids[: ids.index(-1)] if -1 in ids else ids for ids in following]


class Text:
    """A text that grows and is scanned whole at each look-up."""

    def __init__(self, start: int = 0) -> None:
        """Empty; ``start`` is the place of the first token in the source."""
        self.start = start
        self._stored = np.full(_FRONT + 1024, SEPARATOR, np.uint32)
        self._end = _FRONT  # all separators in front

    def __len__(self) -> int:
        """Tokens held, separators included."""
        return self._end - _FRONT

    @property
    def end(self) -> int:
        """The place after the last token."""
        return self.start + len(self)

    @property
    def tokens(self) -> Tokens:
        """The stored tokens."""
        return self._stored[_FRONT : self._end]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._append(np.array(token_ids, np.uint32) + np.uint32(1))

    def close(self) -> None:
        """End a document: neither a match nor a continuation goes across."""
        self._append(np.array([SEPARATOR], np.uint32))

    def _append(self, tokens: Tokens) -> None:
        end = self._end + len(tokens)
        if end >= len(self._stored):  # one separator always stays behind the end
            self._stored = np.concatenate([self._stored, np.full(end, SEPARATOR, np.uint32)])
        self._stored[self._end : end] = tokens
        self._end = end

    def find(self, query: Query, periodic: bool = False) -> Rows:
        """Rows around the best occurrences, the latest among equally long ones; the text's own end is none.

        Args:
            query: what is looked for.
            periodic: a continuation that reaches the text's end goes on from its own start.
        """
        places_M = self._places(self._stored[: self._end], query)
        span = query.span
        if periodic and len(places_M) and self._end - places_M[-1] <= span[-1]:
            span = np.where(span < 0, span, span % (self._end - places_M)[:, None])
        tokens_MW = self._stored.take(places_M[:, None] + span, mode="clip")
        return Rows(tokens_MW, places_M + (self.start - _FRONT))

    @staticmethod
    def _places(text: Tokens, query: Query) -> Ints:
        places: Ints = (text[:-1] == query.context[0]).nonzero()[0] + 1
        places = places[text[places] != SEPARATOR]
        for back in range(2, len(query.context)):
            if len(places) <= query.most:
                break
            longer = text[places - back] == query.context[back - 1]
            few = np.count_nonzero(longer) < query.most
            if few:
                longer[-2 * query.most :] = True  # with the latest of those that are no longer
            places = places[longer]
            if few:
                return places
        return places[-query.most :]


class Segment:
    """A text that never changes, with its suffix array and a guide into it: 8.4 bytes a token.

    The text is kept backwards, so that a suffix begins with the context of a place, its last token first: the longest
    matches of a context are the neighbours of where it would be sorted in.
    """

    def __init__(self, tokens_N: Tokens, start: int) -> None:
        """Sorts a text.

        Args:
            tokens_N: stored tokens, the last of them a separator.
            start: the place of the first token in the source.
        """
        self.start = start
        backwards_N = tokens_N[::-1]
        # with a separator before the first token, which places out of range are clipped to
        self._bytes = np.append(backwards_N, np.uint32(SEPARATOR)).astype(_BIG_ENDIAN).tobytes()
        self._tokens = np.frombuffer(self._bytes, _BIG_ENDIAN)
        # a place counts where a token stands on both of its sides
        followed_N = (backwards_N != SEPARATOR) & (np.append(SEPARATOR, backwards_N[:-1]) != SEPARATOR)
        order_N = divsufsort(backwards_N)
        self._order = order_N[followed_N[order_N]].astype(np.intc)
        self._sorted = memoryview(self._order)  # its items come as Python integers, which bisect wants
        size = MOST_MATCH_TOKENS * _BIG_ENDIAN.itemsize
        self._guide = [self._context(i, size) for i in self._sorted[::_GUIDE_STEP]]  # most of a search stays in here

    def __len__(self) -> int:
        """Tokens held, separators included."""
        return len(self._tokens) - 1

    @property
    def end(self) -> int:
        """The place after the last token."""
        return self.start + len(self)

    @property
    def tokens(self) -> Tokens:
        """The stored tokens, oldest first."""
        return self._tokens[-2::-1].astype(np.uint32)

    def find(self, query: Query) -> Rows:
        """Rows around the ``query.most`` neighbours on each side of where the context would be sorted in."""
        step = bisect_left(self._guide, query.key)
        low, high = max(step - 1, 0) * _GUIDE_STEP, min(step * _GUIDE_STEP, len(self._order))
        at = bisect_left(self._sorted, query.key, low, high, key=lambda i: self._context(i, len(query.key)))
        found_M = self._order[max(at - query.most, 0) : at + query.most]
        tokens_MW = self._tokens.take(found_M[:, None] - query.span_after, mode="clip")
        return Rows(tokens_MW, np.int64(self.end) - found_M)

    def _context(self, i: int, size: int) -> bytes:
        """The first ``size`` bytes of the suffix at ``i``."""
        begin = i * _BIG_ENDIAN.itemsize
        return self._bytes[begin : begin + size]
