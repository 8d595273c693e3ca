"""A search: which settings are tried, by which measure, and on which prompts the winner is confirmed."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from choicespec.spec.frozen import Frozen
from choicespec.spec.training import Count

Value = bool | int | float | str | None
Objective = Literal["decode_tokens_per_s", "prefill_ms", "memory_bytes"]
SMALLER_IS_BETTER: frozenset[Objective] = frozenset({"prefill_ms", "memory_bytes"})
VARIED = ("method.", "pair.", "runtime.")
_REPLAYED = "method."
_LIVE = ("method.exact", "method.pace")  # which a recording cannot tell apart


class Range(Frozen):
    """Numbers from ``low`` to ``high``, both included; whole ones where both are.

    Attributes:
        or_none: null is one more value.
    """

    low: int | float
    high: int | float
    or_none: bool = False

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be less than high={self.high}")
        return self

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values at its borders."""
        return (self.low, self.high, *((None,) if self.or_none else ()))


Dimension = Range | Annotated[tuple[Value, ...], Field(min_length=1)]


class Space(Frozen):
    """Settings around one method.

    Attributes:
        start: the name of the method that settings are changes of; it is measured as it is, too.
        vary: what is changed, by its dotted path in a trial, such as ``method.block_length``.
    """

    start: str
    vary: dict[str, Dimension] = Field(min_length=1)

    @model_validator(mode="after")
    def _paths_are_varied(self) -> Self:
        for path in self.vary:
            if not path.startswith(VARIED):
                raise ValueError(f"vary: {path!r} must begin with one of {', '.join(VARIED)}")
        return self

    def values(self, path: str) -> tuple[Value, ...]:
        """All that a path is varied over: the borders of numbers that are not whole, nothing where it is not varied."""
        dimension = self.vary.get(path, ())
        if not isinstance(dimension, Range):
            return dimension
        if isinstance(dimension.low, int) and isinstance(dimension.high, int):
            return tuple(range(dimension.low, dimension.high + 1))
        return dimension.ends

    def borders(self) -> list[dict[str, Value]]:
        """Settings with every value at its first border, at its second, and so on: valid before anything starts."""
        ends = {path: d.ends if isinstance(d, Range) else d for path, d in self.vary.items()}
        count = max(map(len, ends.values()))
        return [{path: values[min(i, len(values) - 1)] for path, values in ends.items()} for i in range(count)]


class SearchSpec(Frozen):
    """What ``jobs.tune`` searches for an experiment.

    Attributes:
        pair, runtime: the names of what settings run on, where they are not varied.
        tasks: for each task searched, by name, the task that the winner is confirmed on. They share no prompt.
        spaces: what is tried.
        default: the name of the method that the winner must beat.
        settings: how many are replayed, over all spaces; 0 measures live alone.
        shards: independent parts of that, which run side by side.
        live: how many are measured live, the spaces' starts among them.
        objectives: what is better; of several, the settings that no other beats in all are shown as a front, and the
            first decides.
        least_match: a setting whose outputs match plain decoding's less often cannot win.
    """

    pair: str
    runtime: str = "hf"
    tasks: dict[str, str] = Field(min_length=1)
    spaces: dict[str, Space] = Field(min_length=1)
    default: str
    settings: int = Field(default=10_000, ge=0)
    shards: Count = 4
    live: Count = 8
    objectives: tuple[Objective, ...] = Field(default=("decode_tokens_per_s",), min_length=1)
    least_match: float = Field(default=1.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0)

    @property
    def starts(self) -> tuple[str, ...]:
        """The methods measured as they are, the default first."""
        return tuple(dict.fromkeys([self.default, *(space.start for space in self.spaces.values())]))

    @model_validator(mode="after")
    def _room_for_the_starts(self) -> Self:
        if self.live <= len(self.starts):
            raise ValueError(f"live={self.live} leaves no room beside the {len(self.starts)} methods as they are")
        return self

    @property
    def replayed(self) -> bool:
        """Whether a recording can tell the settings apart: other paths change the target, its costs or its scorer."""
        paths = itertools.chain.from_iterable(space.vary for space in self.spaces.values())
        return self.settings > 0 and all(path.startswith(_REPLAYED) and path not in _LIVE for path in paths)


def changed(content: dict[str, Any], changes: Mapping[str, Value]) -> dict[str, Any]:
    """A trial's content with values set at dotted paths.

    Raises:
        KeyError: a path that the content does not have.
    """
    result = content
    for path, value in changes.items():
        result = _with(result, path.split("."), value)
    return result


def _with(content: dict[str, Any], path: Sequence[str], value: Value) -> dict[str, Any]:
    name, *rest = path
    if not isinstance(content, dict) or name not in content:
        raise KeyError(name)
    return {**content, name: _with(content[name], rest, value) if rest else value}
