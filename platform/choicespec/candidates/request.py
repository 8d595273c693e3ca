"""The candidate sets of a stream of requests: the same for drafting, for training a scorer, and for evaluating one."""

import json
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial

from choicespec.candidates.schemas import answer_texts
from choicespec.candidates.sets import Candidate, CandidateSets, Votes
from choicespec.candidates.sources import Store
from choicespec.records import Document, Request

MOST_REPOSITORY_TOKENS = 50_000_000  # about 420 MB
MOST_OUTPUT_TOKENS = 10_000_000  # of the target's earlier outputs; about 84 MB


class RequestCandidates:
    """Sets from a request's text, its tools as calls, the repository, and the outputs of earlier requests.

    A request never sees its own document, nor its own earlier output.

    Args:
        block_length: L, tokens of a candidate.
        num_candidates: N, the most candidates of a set.
        encode: the target's tokenizer, for the tools.
        repository: the documents that a request's text may be taken from.
    """

    def __init__(
        self, block_length: int, num_candidates: int, encode: Callable[[str], list[int]], repository: Store
    ) -> None:
        self._encode = encode
        self._outputs = Store(MOST_OUTPUT_TOKENS)
        self._new_sets = partial(CandidateSets, block_length, num_candidates, repository, self._outputs)
        self._sets = self._new_sets()

    def beside(self) -> "RequestCandidates":
        """The sets of a request that runs beside others: over the same repository and outputs."""
        other = copy(self)
        other._sets = self._new_sets()
        return other

    def begin(self, request: Request) -> None:
        """Render the tools as calls; a tool that is not JSON Schema adds no candidates."""
        texts = answer_texts([json.loads(tool) for tool in request.tools]).texts
        self._sets.begin(request.prompt_ids, [self._encode(text) for text in texts], exclude=_own_name(request))

    def candidates(self, token_ids: Sequence[int], limit: int) -> list[Candidate]:
        """See ``CandidateSets.candidates``."""
        return self._sets.candidates(token_ids, limit)

    def votes(self, token_ids: Sequence[int], length: int) -> Votes:
        """See ``CandidateSets.votes``."""
        return self._sets.votes(token_ids, length)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Keep an output for later requests."""
        self._outputs.add(output_ids, name=_own_name(request))


def repository_of(documents: Iterable[Document], encode: Callable[[str], list[int]]) -> Store:
    """A task's documents, indexed."""
    store = Store(MOST_REPOSITORY_TOKENS)
    for document in documents:
        store.add(encode(document.text), name=document.name)
    return store


def _own_name(request: Request) -> str:
    """What a request's own answer is called in repository and outputs."""
    return request.document or request.request_id
