"""Drafters beside a finite set: their drafts are weighed with its best candidate, and a gate may spare the call."""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter, mul
from statistics import mean
from time import perf_counter
from typing import NamedTuple

from choicespec.decoding.proposer import Proposer
from choicespec.drafters.payoff import Payoff, Weighed
from choicespec.records import Proposal, Request

_EDGES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99)  # of probabilities that are judged together
_OWN_WORD = 8.0  # tokens seen, that a drafter's own probability counts for
_UNSURE = 0.5  # of a token of which its drafter says nothing
_REMEMBERED_CALLS = 32
_CALLS_TO_JUDGE = 8  # before a gate trusts what it has seen of a drafter
_STEPS_UNTIL_A_LOOK = 64  # without a call, after which a drafter is called to see whether it has improved


class Calibration:
    """How often a drafter's tokens are right, by the probability that it gives them itself.

    The share of right tokens among those of about the same probability, with the drafter's own word as a few tokens
    seen before: the mean of a beta posterior (Gelman et al., "Bayesian Data Analysis", section 2.4).
    """

    def __init__(self) -> None:
        self._seen, self._right = [0] * (len(_EDGES) + 1), [0] * (len(_EDGES) + 1)

    def survival(self, probabilities: Sequence[float]) -> list[float]:
        """The probability that each prefix is accepted, from that of each token given those before."""
        return list(accumulate(map(self._calibrated, probabilities), mul))

    def learn(self, drafted: Proposal, said: Sequence[int]) -> None:
        """Compare a draft with how the output went on; beyond the first wrong token nothing is known."""
        for token_id, probability, own_id in zip(drafted.token_ids, drafted.probabilities, said, strict=False):
            place = bisect(_EDGES, probability)
            self._seen[place] += 1
            if token_id != own_id:
                break
            self._right[place] += 1

    def _calibrated(self, probability: float) -> float:
        place = bisect(_EDGES, probability)
        return (self._right[place] + _OWN_WORD * probability) / (self._seen[place] + _OWN_WORD)


class CalledDrafter:
    """A drafter, and what is known of it: how right it is, what its drafts yielded, and how long they took.

    Args:
        name: what the pair calls it.
        proposer: the drafter; it catches up by itself after steps at which it was not called.
        payoff: weighs its drafts.
        gate: what calling it promises.
        clock: seconds.
    """

    def __init__(
        self, name: str, proposer: Proposer, payoff: Payoff, gate: "Gate", clock: Callable[[], float] = perf_counter
    ) -> None:
        self.proposer = proposer
        self._name, self._payoff, self._gate, self._clock = name, payoff, gate, clock
        self._calibration = Calibration()
        self._last: tuple[int, Proposal] | None = None  # a draft, and how long the text was
        self.gains: deque[float] = deque(maxlen=_REMEMBERED_CALLS)
        self.calls_ms: deque[float] = deque(maxlen=_REMEMBERED_CALLS)
        self.idle_steps = 0

    def begin(self, request: Request) -> None:
        """Start a request."""
        self._last = None
        self.proposer.begin(request)

    def look(self, token_ids: Sequence[int]) -> None:
        """Begin a step: learn from what became of the last draft, verified or not."""
        self.idle_steps += 1
        if self._last is not None:
            length, drafted = self._last
            self._calibration.learn(drafted, token_ids[length : length + len(drafted.token_ids)])
            self._last = None

    def promise(self, best: Weighed) -> float:
        """What a call would add to the best draft so far, in tokens; only a positive promise is worth it."""
        return self._gate(self, best)

    def draft(self, token_ids: Sequence[int], limit: int) -> Weighed:
        """Call it."""
        started = self._clock()
        drafted = self.proposer.propose(token_ids, limit)
        self.calls_ms.append((self._clock() - started) * 1e3)
        drafted = drafted._replace(probabilities=drafted.probabilities or (_UNSURE,) * len(drafted.token_ids))
        found = self._payoff.weigh(drafted.token_ids, self._name, self._calibration.survival(drafted.probabilities))
        self.gains.append(found.gain)
        self._last, self.idle_steps = (len(token_ids), drafted), 0
        return found


Gate = Callable[[CalledDrafter, Weighed], float]


def always(drafter: CalledDrafter, best: Weighed) -> float:
    """The gate of a union: every drafter is called at every step."""
    return inf


class Below:
    """The gate of a hybrid: a drafter is called where the best expected accepted length is below a threshold."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def __call__(self, drafter: CalledDrafter, best: Weighed) -> float:
        """How far the best draft is below the threshold."""
        return self._threshold - best.expected_accepted


class ByGain:
    """The gate of a hybrid by measured costs: a drafter is called where its drafts of late would have been so much
    better than the best of this step that its time is worth it."""

    def __init__(self, payoff: Payoff) -> None:
        self._payoff = payoff

    def __call__(self, drafter: CalledDrafter, best: Weighed) -> float:
        """The mean of what the drafts of late would add, less the price of a call."""
        if len(drafter.gains) < _CALLS_TO_JUDGE or drafter.idle_steps > _STEPS_UNTIL_A_LOOK:
            return inf
        added = mean(max(gain - best.gain, 0.0) for gain in drafter.gains)
        return added - self._payoff.price(mean(drafter.calls_ms))


class Improved(NamedTuple):
    """The best draft after some drafters were called, and the time that they took."""

    best: Weighed
    drafting_ms: float


def improve(best: Weighed, drafters: Sequence[CalledDrafter], token_ids: Sequence[int], limit: int) -> Improved:
    """Call the most promising drafter, as long as one promises anything.

    Args:
        best: the set's best candidate, or an empty draft.
        drafters: the first one among equals is called first.
        token_ids, limit: as ``Proposer.propose`` takes them.
    """
    waiting, drafting_ms = list(drafters), 0.0
    while waiting:
        promises = [drafter.promise(best) for drafter in waiting]
        if max(promises) <= 0:
            break
        drafter = waiting.pop(promises.index(max(promises)))
        best = max(best, drafter.draft(token_ids, limit), key=attrgetter("gain"))
        drafting_ms += drafter.calls_ms[-1]
    return Improved(best, drafting_ms)
