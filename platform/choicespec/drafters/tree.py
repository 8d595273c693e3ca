"""Several drafts at once: merged into a tree, of which the tokens likeliest to be accepted are verified in one pass.

The tokens accepted of a tree are expected to be as many as the sum, over its tokens, of the probability that each is
accepted. So the best tree of n tokens is the n likeliest ones, which a heap finds, since no token is likelier than the
one before it; and how many are worth verifying is the question that a chain has, answered by the same ``Payoff``.

Sources: Ringel and Romano, "Accelerating Speculative Decoding with Block Diffusion Draft Trees" (arXiv 2604.12989): the
best tree by a heap, for a fixed number of tokens. Zhang et al., "Cost-Aware Diffusion Draft Trees for Speculative
Decoding" (arXiv 2606.01813): its size by what verification costs. Both are over a drafter's marginals, as ``marginals``
is; here it is also over whole drafts, whoever proposed them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from choicespec.drafters.union import Payoff, Weighed

MOST_TREE_TOKENS = 63  # with the anchor, the most that costs are recorded for
_ROOT = 0
_SUREST = 0.999  # of a token given those before, so that its odds are finite

Node = TypeVar("Node")


class Child(NamedTuple, Generic[Node]):
    """A token that may come next, with its probability given those before it, and what stands for the text with it."""

    token_id: int
    probability: float
    node: Node


class Grown(NamedTuple):
    """A tree's tokens, likeliest first; see ``Proposal.parents``, and ``Weighed`` for the others."""

    token_ids: list[int]
    parents: list[int]
    survival: list[float]


def grow(root: Node, children: Callable[[Node], Iterable[Child[Node]]], width: int) -> Grown:
    """The likeliest tokens that follow a root, at most ``MOST_TREE_TOKENS``, in at most so many branches."""
    grown = Grown([], [], [])
    waiting: list[tuple[float, int, int, Child[Node]]] = []  # less its probability, a number, its parent's place
    numbers = count()

    def reach(node: Node, probability: float, place: int) -> None:
        for child in children(node):
            heappush(waiting, (-probability * child.probability, next(numbers), place, child))

    reach(root, 1.0, 0)
    childless, branches = {0}, 1
    while waiting and len(grown.token_ids) < MOST_TREE_TOKENS:
        less, _, parent, child = heappop(waiting)
        if parent not in childless:
            if branches == width:
                continue
            branches += 1
        childless.discard(parent)
        grown.token_ids.append(child.token_id)
        grown.parents.append(parent)
        grown.survival.append(-less)
        place = len(grown.token_ids)
        childless.add(place)
        reach(child.node, -less, place)
    return grown


class DraftTree:
    """The drafts of one step.

    Args:
        payoff: decides how much of the tree is verified.
        width: the most branches of the tree, 1 or more.
    """

    def __init__(self, payoff: Payoff, width: int) -> None:
        self._payoff, self._width = payoff, width
        self._places: dict[tuple[int, int], int] = {}  # from a node and the token after it to the node of both
        self._children: list[list[int]] = [[]]
        # By node, the anchor first. A token that several drafts have is as likely as the surest of them says.
        self._token_ids, self._survival, self._sources = [-1], [1.0], [""]

    def add(self, token_ids: Sequence[int], source: str, survival: Sequence[float]) -> None:
        """One more draft, with the probability that each of its prefixes is accepted, as far as that is known."""
        node = _ROOT
        for token_id, probability in zip(token_ids, survival, strict=False):
            before, node = node, self._places.setdefault((node, token_id), len(self._token_ids))
            if node == len(self._token_ids):
                self._children[before].append(node)
                self._children.append([])
                self._token_ids.append(token_id)
                self._survival.append(probability)
                self._sources.append(source)
            elif probability > self._survival[node]:
                self._survival[node], self._sources[node] = probability, source

    def join(self, best: Weighed, drafted: Weighed) -> Weighed:
        """The tree with a drafter's draft; see ``improve``."""
        self.add(drafted.token_ids, drafted.source, drafted.survival)
        return self.weighed()

    def weighed(self) -> Weighed:
        """All drafts so far as one, in the order in which their tokens are worth verifying."""
        grown = grow(_ROOT, self._after, self._width)
        first = self._places[_ROOT, grown.token_ids[0]] if grown.token_ids else _ROOT
        found = self._payoff.weigh(grown.token_ids, self._sources[first], grown.survival)
        return found._replace(parents=grown.parents)

    def _after(self, node: int) -> Iterator[Child[int]]:
        """A node's children.

        Each was judged apart, but only one of them can be right. Of independent events of which no more than one
        happens, one with the odds o does with the probability o / (1 + the sum of the odds of all).
        """
        children, reached = self._children[node], self._survival[node] or 1.0
        given = [min(self._survival[child] / reached, _SUREST) for child in children]
        odds = [one / (1 - one) for one in given]
        all_odds = 1 + sum(odds)
        for child, own_odds in zip(children, odds, strict=True):
            yield Child(self._token_ids[child], own_odds / all_odds, child)
