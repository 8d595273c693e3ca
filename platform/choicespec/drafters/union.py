"""Drafters beside a finite set: their drafts are weighed with its best candidate, and a gate may spare the call."""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from heapq import nsmallest
from itertools import accumulate
from math import inf
from operator import attrgetter, mul
from statistics import mean
from time import perf_counter
from typing import NamedTuple, Protocol

from choicespec.candidates.drafts import spoken
from choicespec.decoding.proposer import Proposer
from choicespec.records import Proposal, Request

_EDGES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99)  # of probabilities that are judged together
_OWN_WORD = 8.0
_REMEMBERED_CALLS = 32
_ALIKE = 8  # calls by which the next one is judged: those at which the best draft was most like this step's
_HOPED = 2  # tokens, that a drafter is hoped to have accepted, as long as fewer calls than that were made
_STEPS_UNTIL_A_LOOK = 256  # without a call, after which a drafter is called to see whether it has improved


class Weighed(NamedTuple):
    """A draft that could be verified.

    Attributes:
        token_ids: all of its tokens.
        source: who proposes it.
        survival: the probability that each of them is accepted: of a chain, that each prefix is, shortest first.
        length: how many of its tokens, from the first on, are worth verifying.
        gain: tokens that a step with so many of them is expected to yield, less what its time is worth in tokens; to
            be compared with other drafts of the same step.
        parents: see ``Proposal.parents``.
    """

    token_ids: Sequence[int]
    source: str
    survival: Sequence[float]
    length: int
    gain: float
    parents: Sequence[int] = ()

    @property
    def expected_accepted(self) -> float:
        """The expected accepted length, were all of it verified."""
        return sum(self.survival)


class Payoff(Protocol):
    """Weighs the drafts of a step. One request at a time."""

    def begin(self) -> None:
        """Start a request; nothing of an earlier one is remembered, so that the order of requests changes no draft."""
        ...

    def weigh(self, token_ids: Sequence[int], source: str, survival: Sequence[float]) -> Weighed:
        """A draft with what it yields."""
        ...

    def price(self, ms: float) -> float:
        """What time is worth, in tokens."""
        ...

    def take(self, chosen: Weighed, drafting_ms: float) -> None:
        """End each step: what is verified, an empty draft where nothing is, and the time that drafters took."""
        ...


class Calibration:
    """How often a drafter's tokens are right, by the probability that it gives them itself.

    The share of right tokens among those of about the same probability, with the drafter's own word as a few tokens
    seen before: the mean of a beta posterior (Gelman et al., "Bayesian Data Analysis", section 2.4).

    Args:
        remembered: how much of what was seen before counts after one more draft.
        own_word: tokens seen, that a drafter's own probability counts for.
        least_seen: tokens of about the same probability that must have been seen before any is believed.
    """

    def __init__(self, remembered: float = 1.0, own_word: float = _OWN_WORD, least_seen: float = 0.0) -> None:
        self._remembered, self._own_word, self._least_seen = remembered, own_word, least_seen
        self._seen, self._right = [0.0] * (len(_EDGES) + 1), [0.0] * (len(_EDGES) + 1)

    def survival(self, probabilities: Sequence[float]) -> list[float]:
        """The probability that each prefix is accepted, from that of each token given those before."""
        return list(accumulate(map(self._calibrated, probabilities), mul))

    def learn(self, drafted: Proposal, said: Sequence[int]) -> None:
        """Compare a draft with how the output went on; beyond the first wrong token nothing is known."""
        if self._remembered < 1:
            self._seen = [self._remembered * count for count in self._seen]
            self._right = [self._remembered * count for count in self._right]
        for token_id, probability, own_id in zip(drafted.token_ids, drafted.probabilities, said, strict=False):
            place = bisect(_EDGES, probability)
            self._seen[place] += 1
            if token_id != own_id:
                break
            self._right[place] += 1

    def _calibrated(self, probability: float) -> float:
        place = bisect(_EDGES, probability)
        if self._seen[place] < self._least_seen:
            return 0.0
        return (self._right[place] + self._own_word * probability) / (self._seen[place] + self._own_word)


# A draft with a probability a token, and the text that it follows, to the probability that each prefix is accepted.
Judge = Callable[[Proposal, Sequence[int]], Sequence[float]]


class Call(NamedTuple):
    """What a call of a drafter came to.

    Attributes:
        best_gain: of the best draft before it; see ``Weighed.gain``.
        gain: of its own draft.
        ms: that it took.
    """

    best_gain: float
    gain: float
    ms: float


class CalledDrafter:
    """A drafter, and what is known of it: how right it is, what its drafts yielded, and how long they took.

    Args:
        name: what the pair calls it.
        proposer: the drafter; it catches up by itself after steps at which it was not called.
        payoff: weighs its drafts.
        gate: what calling it promises.
        clock: seconds.
        judge: says how good its drafts are; None goes by its own word, as far as that was kept.

    Attributes:
        calls: the last ones, oldest first.
        idle_steps: since the last one.
    """

    def __init__(
        self,
        name: str,
        proposer: Proposer,
        payoff: Payoff,
        gate: "Gate",
        clock: Callable[[], float] = perf_counter,
        judge: Judge | None = None,
    ) -> None:
        self._name, self._proposer, self._payoff, self._gate, self._clock = name, proposer, payoff, gate, clock
        self._calibration = Calibration()
        self._judge = judge or (lambda drafted, _: self._calibration.survival(drafted.probabilities))
        self._drafted: list[tuple[int, Proposal]] = []  # in this request, each with the length of the text before it
        self.calls: deque[Call] = deque(maxlen=_REMEMBERED_CALLS)
        self.idle_steps = 0

    def beside(self, payoff: Payoff) -> "CalledDrafter":
        """One for a request that runs beside others, of a proposer that follows none: what is known of it is shared."""
        one = copy(self)
        one._payoff, one._drafted = payoff, []
        return one

    def begin(self, request: Request) -> None:
        """Start a request."""
        self._drafted = []
        self._proposer.begin(request)

    def promise(self, best: Weighed) -> float:
        """What a call would add to the best draft so far, in tokens; only a positive promise is worth it."""
        return self._gate(self, best)

    def draft(self, best: Weighed, token_ids: Sequence[int], limit: int) -> Weighed:
        """Call it, beside the best draft so far."""
        started = self._clock()
        drafted = spoken(self._proposer.propose(token_ids, limit))
        survival = self._judge(drafted, token_ids)
        ms = (self._clock() - started) * 1e3
        self._drafted.append((len(token_ids), drafted))
        found = self._payoff.weigh(drafted.token_ids, self._name, survival)
        self.calls.append(Call(best.gain, found.gain, ms))
        self.idle_steps = 0
        return found

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Learn from what became of the request's drafts, verified or not."""
        for length, drafted in self._drafted:
            self._calibration.learn(drafted, output_ids[length - len(request.prompt_ids) :])
        self._proposer.finish(request, output_ids)


Gate = Callable[[CalledDrafter, Weighed], float]
Join = Callable[[Weighed, Weighed], Weighed]


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
    """The gate of a hybrid by measured costs: a drafter is called where what it adds is expected to be worth its time.

    What it adds is judged by calls beside drafts that gained about as much as the best of this step: where candidates
    are good a text is easy, and drafts are good as well, so that the mean of all calls says too much of a hard place.
    """

    def __init__(self, payoff: Payoff) -> None:
        self._payoff = payoff

    def __call__(self, drafter: CalledDrafter, best: Weighed) -> float:
        """The mean of what such drafts would add, less the price of a call."""
        if drafter.idle_steps > _STEPS_UNTIL_A_LOOK:
            return inf
        alike = nsmallest(_ALIKE, drafter.calls, key=lambda call: abs(call.best_gain - best.gain))
        hoped = self._payoff.weigh((0,) * _HOPED, "", (1.0,) * _HOPED).gain
        gains = [*(call.gain for call in alike), *[hoped] * (_ALIKE - len(alike))]
        added = mean(max(gain - best.gain, 0.0) for gain in gains)
        return added - self._payoff.price(mean(call.ms for call in drafter.calls) if drafter.calls else 0.0)


class Improved(NamedTuple):
    """The best draft after some drafters were called, and the time that they took."""

    best: Weighed
    drafting_ms: float


def better(best: Weighed, drafted: Weighed) -> Weighed:
    """Of two drafts, the one that gains more."""
    return max(best, drafted, key=attrgetter("gain"))


def improve(
    best: Weighed, drafters: Sequence[CalledDrafter], token_ids: Sequence[int], limit: int, join: Join = better
) -> Improved:
    """Call the most promising drafter, as long as one promises anything.

    Args:
        best: the set's best candidate, or an empty draft.
        drafters: the first one among equals is called first.
        token_ids, limit: as ``Proposer.propose`` takes them.
        join: what becomes of the best so far and one more draft.
    """
    waiting, drafting_ms = list(drafters), 0.0
    while waiting:
        promises = [drafter.promise(best) for drafter in waiting]
        if max(promises) <= 0:
            break
        drafter = waiting.pop(promises.index(max(promises)))
        best = join(best, drafter.draft(best, token_ids, limit))
        drafting_ms += drafter.calls[-1].ms
    for drafter in waiting:
        drafter.idle_steps += 1
    return Improved(best, drafting_ms)
