"""What a verification costs by its number of tokens, measured on the target that will run it."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

from pydantic import Field

from choicespec.decoding.target import Target
from choicespec.spec.frozen import Frozen

CONTEXT_TOKENS = 400  # in the cache while the costs that a method decides by are measured
FAR_TOKENS = 2048  # in the cache while the costs of long contexts are measured
_ROUNDS = 4
_LEARNT = 0.1  # of a step's surprise, by its own kind of step
_DRIFT = 0.02  # of the same, by the kind that was not taken
_DOUBTED = 1.2  # times what plain steps took when one was last seen, or this part of it
_OUTLIER = 2.0  # times what was expected, beyond which nothing more is learnt
_SIZES = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 64)


class Costs(Protocol):
    """What a verification costs, of one request."""

    def of(self, tokens: int) -> float:
        """Milliseconds of a verification; the anchor counts as one of its tokens."""
        ...


class StepCosts(NamedTuple):
    """Milliseconds of a verification; the anchor counts as one of its tokens.

    Attributes:
        tokens: the numbers of tokens that were measured, ascending from 1.
        ms: for each of them, never less than for fewer tokens.
    """

    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    def of(self, tokens: int) -> float:
        """The time of a verification, interpolated; beyond the largest that was measured, in proportion."""
        for index, size in enumerate(self.tokens):
            if size == tokens:
                return self.ms[index]
            if size > tokens:
                below, share = index - 1, (tokens - self.tokens[index - 1]) / (size - self.tokens[index - 1])
                return self.ms[below] + share * (self.ms[index] - self.ms[below])
        return self.ms[-1] * tokens / self.tokens[-1]


class Floor(Frozen):
    """The least that a verification can take where it runs: each weight read once, and each token multiplied with it.

    Keys and values are left out, so it is a bound for short contexts.

    Attributes:
        weights: that a pass multiplies each token with; of a mixture of experts all, which is more than it takes.
        weight_bytes: of those weights.
        read_bytes_per_s: at which the device adds up a large tensor; the fastest of some rounds.
        flops_per_s: of a product of large matrices in the target's type; the fastest of some rounds.
    """

    weights: int = Field(gt=0)
    weight_bytes: int = Field(gt=0)
    read_bytes_per_s: float = Field(gt=0)
    flops_per_s: float = Field(gt=0)

    def ms(self, tokens: int) -> float:
        """Of a verification of some tokens, whose reading and computing overlap.

        Source: S. Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures"
        (2009), the bound of section 3.
        """
        return 1e3 * max(self.weight_bytes / self.read_bytes_per_s, 2 * self.weights * tokens / self.flops_per_s)


class LiveCosts:
    """What a verification costs at the current context: measured at two, and corrected by what steps take.

    Between the contexts, and beyond the longer one, a cost is linear in the context, as attention's is. Steps without a
    draft and verifications are corrected apart; one that is not seen for long is taken to have changed like the other.
    Whether the machine or the measured curve is what changed, a step without a draft tells: see ``plain_is_doubted``.

    Args:
        near: at ``CONTEXT_TOKENS``.
        far: at ``far_tokens``.
        far_tokens: a longer context.

    Attributes:
        context_tokens: in the cache; set before each step.
    """

    def __init__(self, near: StepCosts, far: StepCosts, far_tokens: int) -> None:
        self._near, self._far, self._far_tokens = near, far, far_tokens
        self._ratios = [1.0, 1.0]  # of what steps took to what was measured: without a draft, and with one
        self._plain_seen = 1.0  # the first of them, when a step without a draft was last seen
        self.context_tokens = CONTEXT_TOKENS

    @property
    def plain_is_doubted(self) -> bool:
        """Whether plain steps are believed to have become faster or slower, but none was seen since."""
        return not 1 / _DOUBTED < self._ratios[0] / self._plain_seen < _DOUBTED

    def of(self, tokens: int) -> float:
        """See ``Costs.of``."""
        return self._measured(tokens) * self._ratios[tokens > 1]

    def learn(self, tokens: int, ms: float) -> None:
        """Note what a verification took."""
        kind = int(tokens > 1)
        ratio = min(ms / self._measured(tokens), _OUTLIER * self._ratios[kind])
        learnt = 1.0 if kind == 0 and self.plain_is_doubted else _LEARNT
        self._ratios[kind] += learnt * (ratio - self._ratios[kind])
        if kind == 0:
            self._plain_seen = self._ratios[0]
        self._ratios[1 - kind] += _DRIFT * (self._ratios[kind] - self._ratios[1 - kind])

    def _measured(self, tokens: int) -> float:
        near, far = self._near.of(tokens), self._far.of(tokens)
        share = max(0.0, (self.context_tokens - CONTEXT_TOKENS) / (self._far_tokens - CONTEXT_TOKENS))
        return near + share * max(0.0, far - near)


class BatchCosts:
    """What a verification costs a request that shares its pass with others: its part of the pass.

    Args:
        one: of a request alone.
        full: passes of ``most`` requests, by the tokens of each.
        most: the most requests of a pass.
    """

    def __init__(self, one: StepCosts, full: StepCosts, most: int) -> None:
        self._one, self._full, self._most = one, full, most
        self.requests = 1  # of the pass to come, this one included

    def of(self, tokens: int) -> float:
        """See ``Costs.of``; between one request and ``most``, in proportion to their number."""
        alone = self._one.of(tokens)
        if self._most == 1:
            return alone
        share = (self.requests - 1) / (self._most - 1)
        return (alone + share * (self._full.of(tokens) - alone)) / self.requests


def sizes_up_to(longest: int) -> tuple[int, ...]:
    """The numbers of tokens that are timed, ascending from 1 to ``longest``."""
    return (*(size for size in _SIZES if size < longest), longest)


def measure_step_costs(target: Target, longest: int, context_tokens: int = CONTEXT_TOKENS) -> StepCosts:
    """Time verifications in alternation: the median of some rounds.

    Args:
        target: runs a prompt of its own; what it held is lost.
        longest: the most tokens of a verification that will be asked for.
        context_tokens: the tokens in the cache meanwhile.
    """
    sizes = sizes_up_to(longest)
    return step_costs(sizes, time_verifications(target, sizes, context_tokens, _ROUNDS))


def time_verifications(
    target: Target, sizes: Sequence[int], context_tokens: int, rounds: int
) -> list[tuple[float, ...]]:
    """Milliseconds of verifications of some sizes behind the same context: of each size, those of all rounds."""
    target.prefill([1] * context_tokens)
    timed = [[_time_ms(target, size) for size in sizes] for _ in range(rounds + 1)][1:]  # the first warms up
    return list(zip(*timed, strict=True))


def step_costs(sizes: Sequence[int], timed_ms: Iterable[Sequence[float]]) -> StepCosts:
    """The medians; noise never makes more tokens cheaper."""
    return StepCosts(tuple(sizes), tuple(accumulate(map(median, timed_ms), max)))


def _time_ms(target: Target, size: int) -> float:
    started = perf_counter()
    target.verify([1] * size)
    target.keep(0)
    return (perf_counter() - started) * 1e3


def best_length(survival: Sequence[float], costs: Costs, rate_tokens_per_ms: float) -> int:
    """How many draft tokens to verify so that a step gains most over spending its time at the usual rate.

    The rate of a long run is largest when each step maximises what it yields less what its time is worth: the
    renewal-reward argument (S. Ross, "Introduction to Probability Models", section 7.4).

    Args:
        survival: the probability that the first 1, 2, ... draft tokens are accepted.
        costs: of this target.
        rate_tokens_per_ms: what a millisecond is worth elsewhere.
    """
    best, best_gain, tokens = 0, 1 - rate_tokens_per_ms * costs.of(1), 1.0
    for length, probability in enumerate(survival, start=1):
        tokens += probability
        gain = tokens - rate_tokens_per_ms * costs.of(length + 1)
        if gain > best_gain:
            best, best_gain = length, gain
    return best
