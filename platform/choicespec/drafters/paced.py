"""What pays is proposed, and nothing while nothing does: by the acceptance and the times seen so far."""

from collections.abc import Sequence
from itertools import takewhile

from choicespec.decoding.proposer import Proposer
from choicespec.decoding.step_cost import LiveCosts, best_length
from choicespec.drafters.union import Calibration
from choicespec.records import Proposal, Request, Step

_NOTHING = Proposal((), "")
_UNSPOKEN = (0.5, 0.8)  # of a proposer that gives no probabilities: its first token, and those after a right one
_REMEMBERED_DRAFT = 0.99  # of what earlier drafts of a source showed, a draft
_OWN_WORD = 2.0  # tokens seen, that a proposer's own probability counts for
_LEAST_SEEN = 6.0  # tokens, before any is verified: to see them takes no verification
_REMEMBERED_STEP = 0.95  # of the running rate, a step
_EARNED = 0.005  # plain steps that may be lost, a token decoded
_MOST = 4.0  # plain steps that may be lost at once


class Allowance:
    """What may be lost against plain decoding, in plain steps: a small share of all that is decoded, and a few at once.

    Over any n tokens no more than ``_EARNED * n + _MOST`` is lost, and what the last settled step overdrew. What one
    step loses beyond ``_MOST`` counts once the next one that gains or loses confirms it by doing so too: alone, it is a
    machine that was interrupted, for which nothing would be proposed for thousands of tokens.
    """

    def __init__(self) -> None:
        self.left = _MOST
        self._unconfirmed = 0.0

    def settle(self, tokens: int, gained: float) -> None:
        """End a step of so many tokens that gained, or lost, so many plain steps."""
        beyond = max(0.0, -gained - _MOST)
        if beyond and not self._unconfirmed:
            gained, self._unconfirmed = -_MOST, beyond
        elif gained:
            gained, self._unconfirmed = gained - (self._unconfirmed if beyond else 0.0), 0.0
        self.left = min(_MOST, self.left + _EARNED * tokens + gained)


class PacedDrafter:
    """Proposes of another proposer's drafts what gains most over the rate of late, where it can afford to be wrong.

    What a source's drafts were worth is seen from how the text went on, whether they were verified or not. So none is
    verified before some were seen, and while nothing pays, looking for drafts is all that is spent. That has an
    allowance of its own; with it used up, the proposer is asked only as often as the share pays for that tokens earn.

    Args:
        proposer: is asked for whole drafts; it catches up by itself after steps at which it was not asked.
        costs: of this method's verifications; they learn from its steps.
    """

    def __init__(self, proposer: Proposer, costs: LiveCosts) -> None:
        self._proposer, self._costs = proposer, costs
        self._calibrations: dict[str, Calibration] = {}
        self._looks, self._verifications = Allowance(), Allowance()
        self._tokens, self._ms = 0.0, 0.0  # of the steps of late
        self._begun: Request | None = None
        self._drafted: list[tuple[int, Proposal]] = []  # not yet judged, each with the length of the text before it

    def begin(self, request: Request) -> None:
        """Start a request; the proposer does so when it is first asked."""
        self._request, self._begun, self._drafted = request, None, []

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        """The first tokens of a draft, as many as pay and can be afforded."""
        self._costs.context_tokens = len(token_ids) - 1  # all but the anchor
        self._judge(token_ids, to_the_end=False)
        if limit <= 0 or self._looks.left <= 0:
            return _NOTHING
        if self._begun is None:
            self._begun = self._request
            self._proposer.begin(self._request)
        drafted = _spoken(self._proposer.propose(token_ids, limit))
        length = 0
        if drafted.token_ids:
            self._drafted.append((len(token_ids), drafted))
            length = 0 if self._costs.plain_is_doubted else self._length(drafted)
        return Proposal(drafted.token_ids[:length], drafted.source if length else "", score_ms=drafted.score_ms)

    def observe(self, step: Step) -> None:
        """Learn what the step that was just proposed for took, and yielded."""
        plain_ms, tokens = self._costs.of(1), step.accepted + 1
        ms = step.propose_ms + step.verify_ms
        if step.proposed:
            self._looks.settle(tokens, 0.0)
            self._verifications.settle(tokens, tokens - ms / plain_ms)
        else:
            self._looks.settle(tokens, -step.propose_ms / plain_ms)
            self._verifications.settle(tokens, 0.0)
        self._tokens = _REMEMBERED_STEP * self._tokens + tokens
        self._ms = _REMEMBERED_STEP * self._ms + ms
        self._costs.learn(step.proposed + 1, step.verify_ms)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Learn from the output; the proposer does so where it was asked."""
        self._judge([*request.prompt_ids, *output_ids], to_the_end=True)
        if self._begun is not None:
            self._proposer.finish(request, output_ids)

    def _length(self, drafted: Proposal) -> int:
        """How many tokens of a draft are verified: what one that is all wrong loses must be allowed."""
        plain_ms = self._costs.of(1)
        survival = self._calibration(drafted.source).survival(drafted.probabilities)
        allowed_ms = plain_ms * (1 + self._verifications.left)
        allowed = list(takewhile(lambda count: self._costs.of(count + 1) <= allowed_ms, range(1, len(survival) + 1)))
        rate = max(1 / plain_ms, self._tokens / self._ms if self._ms else 0.0)
        return best_length(survival[: len(allowed)], self._costs, rate)

    def _calibration(self, source: str) -> Calibration:
        return self._calibrations.setdefault(source, Calibration(_REMEMBERED_DRAFT, _OWN_WORD, _LEAST_SEEN))

    def _judge(self, token_ids: Sequence[int], to_the_end: bool) -> None:
        """Compare drafts with the text, once it has gone on for as long; or as far as it goes, at its end."""
        waiting = []
        for length, drafted in self._drafted:
            if to_the_end or len(token_ids) - length >= len(drafted.token_ids):
                self._calibration(drafted.source).learn(drafted, token_ids[length:])
            else:
                waiting.append((length, drafted))
        self._drafted = waiting


def _spoken(drafted: Proposal) -> Proposal:
    """A draft with a probability a token; those of a proposer that gives none are as good as its calibration."""
    first, later = _UNSPOKEN
    return drafted._replace(probabilities=drafted.probabilities or (first, *[later] * (len(drafted.token_ids) - 1)))
