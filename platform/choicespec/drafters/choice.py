"""Finite candidate sets: the best candidate is verified as a draft."""

import json
from collections.abc import Callable, Sequence
from itertools import takewhile

from choicespec.candidates.schemas import answer_texts
from choicespec.candidates.sets import CandidateSets
from choicespec.candidates.sources import Store
from choicespec.records import Proposal, Request
from choicespec.spec.method import Choice

MOST_OUTPUT_TOKENS = 10_000_000  # of the target's earlier outputs; about 84 MB
_NOTHING = Proposal((), "")


class ChoiceDrafter:
    """Proposes the candidate with the largest prior, up to where it is too unlikely to be accepted.

    The sets are drawn from the request's text, its tools rendered as calls, the repository without the request's own
    document, and the outputs of earlier requests.

    Args:
        method: the settings.
        encode: the target's tokenizer, for the tools.
        repository: the documents that a request's text may be taken from.
    """

    def __init__(self, method: Choice, encode: Callable[[str], list[int]], repository: Store) -> None:
        self._min_survival = method.min_survival
        self._encode = encode
        self._outputs = Store(MOST_OUTPUT_TOKENS)
        self._sets = CandidateSets(method.block_length, method.num_candidates, repository, self._outputs)

    def begin(self, request: Request) -> None:
        """Render the tools as calls; a tool that is not JSON Schema adds no candidates."""
        texts = answer_texts([json.loads(tool) for tool in request.tools]).texts
        self._sets.begin(request.prompt_ids, [self._encode(text) for text in texts], exclude=_own_name(request))

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """The best candidate's tokens, as far as each prefix survives with at least the method's probability."""
        best = next(iter(self._sets.candidates(token_ids, limit)), None)
        if best is None:
            return _NOTHING
        likely = sum(1 for _ in takewhile(lambda survival: survival >= self._min_survival, best.survival))
        return Proposal(best.token_ids[:likely], best.source) if likely else _NOTHING

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Keep the output for later requests; the same request never sees its own."""
        self._outputs.add(output_ids, name=_own_name(request))


def _own_name(request: Request) -> str:
    """What a request's own answer is called in repository and outputs."""
    return request.document or request.request_id
