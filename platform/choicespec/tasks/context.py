"""Fitting prompts to a number of tokens with real surrounding material, which each task brings."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from choicespec.errors import PromptTooLong
from choicespec.records import Request
from choicespec.spec.task import TaskSpec

Piece = TypeVar("Piece", bound=Hashable)

TRIES = 10  # a prompt; the estimate is within 2% after the second
CLOSE_SHARE = 1 / 256
CHOICES = 64  # for the last places; more would measure a large log to its end


class Window(NamedTuple):
    """How long a task's prompts may be on one target.

    Attributes:
        limit_tokens: prompt and new tokens together, as the target allows.
    """

    spec: TaskSpec
    limit_tokens: int

    @property
    def fills(self) -> bool:
        """Whether prompts are filled up rather than left as they are."""
        return self.spec.context_tokens is not None

    @property
    def most_tokens(self) -> int:
        """The most prompt tokens; negative where the new tokens alone exceed the target's context."""
        room = self.limit_tokens - self.spec.max_new_tokens
        return min(self.spec.context_tokens, room) if isinstance(self.spec.context_tokens, int) else room

    def request(
        self,
        request_id: str,
        select: Callable[[int], list[Piece]],
        render: Callable[[Sequence[Piece]], list[int]],
        reference: str | None,
        tools: Sequence[str] = (),
        document: str | None = None,
    ) -> Request | str:
        """The request, or a sentence that says why its prompt is left out.

        Args:
            request_id: unique within the task.
            select: surrounding pieces for a budget, in any unit that grows with tokens.
            render: the prompt's ids among these pieces; with none of them, the shortest that the prompt can be.
            reference: what the task knows of the right answer, as JSON.
            tools: the functions on offer, as JSON.
            document: the document of the repository that the prompt is cut from.
        """
        ids = render(())
        if self.fills and len(ids) <= self.most_tokens:
            ids = fill(ids, self.most_tokens, select, render)
        spec = self.spec
        return self._complaint(request_id, len(ids)) or Request(
            request_id, tuple(ids), spec.max_new_tokens, spec.stop, reference, tuple(tools), document
        )

    def _complaint(self, request_id: str, prompt_tokens: int) -> str | None:
        if prompt_tokens + self.spec.max_new_tokens > self.limit_tokens:
            return str(PromptTooLong(request_id, prompt_tokens, self.spec.max_new_tokens, self.limit_tokens))
        if prompt_tokens > self.most_tokens:
            return (
                f"{request_id}: {prompt_tokens} prompt tokens, without anything added, exceed task.context_tokens of "
                f"{self.most_tokens}; shorten the prompt or raise task.context_tokens"
            )
        return None


def fill(
    shortest: list[int],
    most_tokens: int,
    select: Callable[[int], list[Piece]],
    render: Callable[[Sequence[Piece]], list[int]],
) -> list[int]:
    """The longest rendering found that has at most ``most_tokens``.

    Selection goes by estimate, and only rendering knows the truth (a template indents, tokens merge across pieces).
    So the next budget is interpolated between the largest that fitted and the smallest that did not.
    """
    enough = most_tokens - int(most_tokens * CLOSE_SHARE)
    aim = (enough + most_tokens) // 2 - len(shortest)
    longest = ids = shortest
    chosen: list[Piece] = []
    budget, fits, exceeds = aim, _Tried(0, 0), None
    for _ in range(TRIES):
        previous, chosen = chosen, select(budget)
        again = chosen == previous
        if len(longest) >= enough or (again and exceeds is None):
            break  # close enough, or the material is exhausted
        ids = ids if again else render(chosen)
        tried = _Tried(budget, len(ids) - len(shortest))
        if len(ids) <= most_tokens:
            fits, longest = tried, max(longest, ids, key=len)
        else:
            exceeds = tried
        budget = _next_budget(fits, exceeds, aim, halve=again)
    return longest


class _Tried(NamedTuple):
    """A budget, and how many tokens the pieces selected for it added."""

    budget: int
    added: int


def _next_budget(fits: _Tried, exceeds: _Tried | None, aim: int, *, halve: bool) -> int:
    if exceeds is None:
        return fits.budget * aim // max(fits.added, 1)
    if halve:  # interpolation has come to a standstill
        return (fits.budget + exceeds.budget) // 2
    return fits.budget + (exceeds.budget - fits.budget) * (aim - fits.added) // (exceeds.added - fits.added)


class Material(Generic[Piece]):
    """Pieces to fill with; each is measured once, and only when it is first considered."""

    def __init__(self, render: Callable[[Sequence[Piece]], list[int]]) -> None:
        """Opens a store of measures; ``render`` gives the ids of a prompt that holds little but the pieces."""
        self._render = render
        self._sizes: dict[Piece, int] = {}

    def selection(self, pieces: Iterable[Piece], budget: int) -> list[Piece]:
        """Pieces in their order while they fit; the last places go to the largest that still do."""
        chosen: list[Piece] = []
        following = iter(pieces)
        for piece in following:
            if self._size(piece) > budget:
                break
            budget -= self._size(piece)
            chosen.append(piece)
        else:
            return chosen  # all of them fit
        last = chosen[-1:]
        budget += sum(map(self._size, last))
        del chosen[-1:]
        for piece in sorted([*last, *islice(following, CHOICES)], key=self._size, reverse=True):
            if self._size(piece) <= budget:
                budget -= self._size(piece)
                chosen.append(piece)
        return chosen

    def _size(self, piece: Piece) -> int:
        if piece not in self._sizes:
            # twice less once: a template says some things once, and others with each piece
            self._sizes[piece] = len(self._render([piece, piece])) - len(self._render([piece]))
        return self._sizes[piece]
