"""Where candidates come from: the request's own text, its schemas as answers, and stores that outlive a request."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Literal, Protocol, get_args

import numpy as np

from choicespec.candidates.index import Query, Rows, Segment, Text

SourceName = Literal["prompt", "schema", "repository", "outputs"]
SOURCE_NAMES: tuple[SourceName, ...] = get_args(SourceName)

_SCANNED_TOKENS = 8_192  # a scan of more costs more than one more segment
_SEGMENTS_AT_BOUND = 4  # what one eviction forgets is a quarter at most
_GROWTH = 8  # segments shrink by this factor towards the newest: few to look into, few sorted again
_WIDER = 8  # beside an excluded document: of its neighbours in the order, many are its own


class Source(Protocol):
    """Texts to look into; a place is a token's number, counted through all that the source ever held."""

    @property
    def end(self) -> int:
        """The place after the last token."""
        ...

    def find(self, query: Query) -> list[Rows]:
        """Rows among which are the ``query.most`` longest matches; some may match nothing."""
        ...


class RequestText:
    """The prompt and the output so far. A continuation that reaches the text's end goes on from its own start."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = Text()
        self._text.extend(token_ids)

    @property
    def end(self) -> int:
        """See ``Source.end``: the number of tokens held."""
        return self._text.end

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add what was decoded."""
        self._text.extend(token_ids)

    def find(self, query: Query) -> list[Rows]:
        """See ``Source.find``; the text's own end is no occurrence."""
        return [self._text.find(query, periodic=True)]


class ShortTexts:
    """A few short texts, each on its own: the schemas of a request, rendered as answers."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._text = Text()
        for token_ids in texts:
            self._text.extend(token_ids)
            self._text.close()

    @property
    def end(self) -> int:
        """See ``Source.end``."""
        return self._text.end

    def find(self, query: Query) -> list[Rows]:
        """See ``Source.find``."""
        return [self._text.find(query)]


class Store:
    """Documents that outlive a request: the files of a repository, the target's earlier outputs.

    The newest tokens are scanned; the others lie in segments that are merged as they age, the way of a log-structured
    merge tree. At the bound, the oldest segment is forgotten. 8.4 bytes a token, and the names.

    Adding sorts up to a quarter of the bound again (0.3 s a million tokens; 2 us a token on average): add between
    requests. Not for several threads.
    """

    def __init__(self, most_tokens: int) -> None:
        """Empty.

        Args:
            most_tokens: the bound; each document counts one token more than it has.
        """
        self._most_tokens = most_tokens
        self._segment_tokens = most_tokens // _SEGMENTS_AT_BOUND
        self._scanned_tokens = min(_SCANNED_TOKENS, self._segment_tokens)
        self._segments: list[Segment] = []
        self._newest = Text()
        self._named: dict[str, range] = {}

    def __len__(self) -> int:
        """Tokens held, with one a document."""
        return sum(map(len, self._segments)) + len(self._newest)

    def add(self, token_ids: Sequence[int], name: str | None = None) -> None:
        """Add a document; of one that is longer than the bound, its end. A name that is held is not added again."""
        token_ids = token_ids[-(self._most_tokens - 1) :] if self._most_tokens > 1 else ()
        if not token_ids or name in self._named:
            return
        if len(self._newest) + len(token_ids) >= self._scanned_tokens:
            self._settle()
        start = self.end
        self._newest.extend(token_ids)
        self._newest.close()
        if name is not None:
            self._named[name] = range(start, self.end)
        if len(self._newest) >= self._scanned_tokens:
            self._settle()
        self._evict()

    @property
    def end(self) -> int:
        """See ``Source.end``; what was forgotten counts too."""
        return self._newest.end

    def find(self, query: Query, exclude: str | None = None) -> list[Rows]:
        """See ``Source.find``; passes over the document named ``exclude``.

        Where that document itself holds very many of the longest matches, they hide some of the others.
        """
        passed_over = self._named.get(exclude, range(0)) if exclude is not None else range(0)
        parts: list[Segment | Text] = [*self._segments, self._newest]
        return [self._outside(part, query, passed_over) for part in parts]

    @staticmethod
    def _outside(part: Segment | Text, query: Query, passed_over: range) -> Rows:
        if passed_over.stop <= part.start or part.end <= passed_over.start:
            return part.find(query)
        tokens, places = part.find(query._replace(most=query.most * _WIDER))
        keep = (places < passed_over.start) | (places >= passed_over.stop)
        return Rows(tokens[keep], places[keep])

    def _settle(self) -> None:
        """Sort the newest tokens into a segment, together with segments that are not much larger."""
        tokens_N, end = self._newest.tokens, self.end
        if not len(tokens_N):
            return
        while self._segments and self._joins(len(self._segments[-1]), len(tokens_N)):
            tokens_N = np.concatenate([self._segments.pop().tokens, tokens_N])
        self._segments.append(Segment(tokens_N, end - len(tokens_N)))
        self._newest = Text(end)

    def _joins(self, older: int, newer: int) -> bool:
        return older <= _GROWTH * newer and older + newer <= self._segment_tokens

    def _evict(self) -> None:
        """Forget the oldest segments, down to the bound; the newest text alone never exceeds it."""
        if len(self) <= self._most_tokens:
            return
        while len(self) > self._most_tokens:
            self._segments.pop(0)
        oldest = self.end - len(self)
        for name in list(takewhile(lambda name: self._named[name].start < oldest, self._named)):
            del self._named[name]
