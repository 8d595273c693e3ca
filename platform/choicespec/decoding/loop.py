"""The decoding loop that every method of the ``hf`` and ``scripted`` runtimes runs through."""

from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

from choicespec.decoding.proposer import Proposer
from choicespec.decoding.stopping import StopRule
from choicespec.decoding.target import TreeTarget
from choicespec.decoding.verification import accepted_path
from choicespec.records import FinishReason, Request, Step, Trace


class Block(NamedTuple):
    """Tokens that one pass of the target settled; ``step`` is None for the prefill's first token."""

    token_ids: tuple[int, ...]
    step: Step | None
    finish_reason: FinishReason | None
    elapsed_ms: float


def decode(target: TreeTarget, proposer: Proposer, request: Request, stop: StopRule) -> Iterator[Block]:
    """Decode a request by the target's own choices, a verified block at a time; the output equals plain decoding's."""
    started = perf_counter()
    first, finish = stop.cut((), (target.prefill(request.prompt_ids),))
    yield Block(first, None, finish, (perf_counter() - started) * 1e3)

    token_ids = [*request.prompt_ids, *first]
    started = perf_counter()
    proposer.begin(request)
    while finish is None:
        # Invariant: the cache lacks exactly the anchor.
        output_ids = token_ids[len(request.prompt_ids) :]
        draft = proposer.propose(token_ids, request.max_new_tokens - len(output_ids) - 1)
        proposed = perf_counter()
        own_ids = target.verify((token_ids[-1], *draft.token_ids), draft.parents)
        verified = perf_counter()
        path = accepted_path(draft, own_ids)
        if draft.parents:
            target.gather(path)
        target.keep(len(path))
        kept, finish = stop.cut(output_ids, [own_ids[place] for place in path])
        token_ids += kept
        ended = perf_counter()
        step = Step(
            proposed=len(draft.token_ids),
            accepted=min(len(path) - 1, len(kept)),
            source=draft.source,
            propose_ms=(proposed - started) * 1e3,
            verify_ms=(ended - proposed) * 1e3,
            score_ms=draft.score_ms,
            settle_ms=(ended - verified) * 1e3,
        )
        yield Block(kept, step, finish, (ended - started) * 1e3)
        started = perf_counter()


def trace(request: Request, blocks: Iterator[Block]) -> Trace:
    """Run a decode to its end."""
    prefill, *rounds = blocks
    finish_reason = (rounds[-1] if rounds else prefill).finish_reason
    assert finish_reason is not None, "decode ends only when a stop rule says why"
    return Trace(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        output_ids=tuple(i for block in (prefill, *rounds) for i in block.token_ids),
        prefill_tokens=len(prefill.token_ids),
        finish_reason=finish_reason,
        prefill_ms=prefill.elapsed_ms,
        decode_ms=sum(block.elapsed_ms for block in rounds),
        steps=tuple(block.step for block in rounds if block.step is not None),
    )
