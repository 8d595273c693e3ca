"""What a search compares settings by, and which of them no other beats."""

from collections.abc import Sequence

from choicespec.records import Estimate, Measurement
from choicespec.spec.search import SMALLER_IS_BETTER, Objective


def worth(measured: Measurement, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """The values of objectives, each turned so that larger is better."""
    return tuple(_value(getattr(measured, name)) * (-1 if name in SMALLER_IS_BETTER else 1) for name in objectives)


def _value(figure: Estimate | int | None) -> float:
    assert figure is not None, "an experiment whose search asks for what cannot be told is refused"
    return figure.value if isinstance(figure, Estimate) else float(figure)


def front(worths: Sequence[Sequence[float]]) -> list[int]:
    """The places of those that no other is at least as good as in all objectives, and better in one (Pareto)."""
    return [place for place, own in enumerate(worths) if not any(_beats(other, own) for other in worths)]


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(own >= theirs for own, theirs in zip(one, other, strict=True))
