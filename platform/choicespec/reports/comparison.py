"""The decode table in the published form: every published row beside what was measured of it, and our own rows."""

from collections.abc import Sequence
from typing import NamedTuple

from choicespec.records import Estimate, Measurement
from choicespec.reports import words
from choicespec.reports.collected import Group
from choicespec.reports.published_rows import PublishedRow, counterparts, decode_rows
from choicespec.reports.words import Label, Word
from choicespec.results import Kept

PLACE = (words.MODEL, words.QUANTIZATION, words.RUNTIME, words.CONTEXT, words.TASK, words.BLOCK_LENGTH)


class Column(NamedTuple):
    """A figure of the table.

    Attributes:
        measured, published: its name in a measurement and in a published row.
        scale: from the measurement's unit to the table's.
        digits: that are written behind the point.
    """

    word: Word
    measured: str
    published: str
    scale: float
    digits: int


COLUMNS = (
    Column(words.SPEEDUP, "speedup", "speedup", 1, 2),
    Column(words.DECODE_RATE, "decode_tokens_per_s", "decode_tokens_per_s", 1, 1),
    Column(words.ACCEPTED, "accepted_per_step", "accepted_per_step", 1, 2),
    Column(words.MATCH, "match", "match_percent", 100, 1),
)


class Cell(NamedTuple):
    """A figure as it is written; empty where there is none."""

    published: str
    measured: str
    interval: str
    difference: str


class DecodeRow(NamedTuple):
    """A row of the table.

    Attributes:
        place: the cells that ``PLACE`` names.
        published: None where nothing like it was published.
        measured: None where it has not been measured.
    """

    place: tuple[str, ...]
    method: str
    published: PublishedRow | None
    measured: Measurement | None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Its figures, in the order of ``COLUMNS``."""
        return tuple(_cell(column, self.published, self.measured) for column in COLUMNS)

    @property
    def prompts(self) -> Label:
        """The number of prompts, or that there is no measurement."""
        return words.NOT_MEASURED if self.measured is None else str(self.measured.match.n)

    @property
    def remark(self) -> Label | None:
        """What must be known of a measurement before it is believed."""
        if self.measured is None:
            return None
        if self.measured.never_proposed:
            return words.NEVER_PROPOSED
        omitted = len(self.measured.omitted)
        return words.OMITTED.fill(count=omitted) if omitted else None


def published_table(kept: Sequence[Kept]) -> list[DecodeRow]:
    """All published rows, in their order, each with the latest measurement of it."""
    latest: dict[PublishedRow, Measurement] = {}
    for one in sorted(kept, key=lambda one: one.measurement.measured_at):
        latest |= dict.fromkeys(counterparts(one.trial), one.measurement)
    return [DecodeRow(_published_place(row), row.method, row, latest.get(row)) for row in decode_rows()]


def own_table(groups: Sequence[Group]) -> list[tuple[str, list[DecodeRow]]]:
    """For each experiment, what was measured that no published row is of."""
    found: dict[str, list[DecodeRow]] = {}
    for group in groups:
        for one in group.kept:
            if not counterparts(one.trial):
                row = DecodeRow(_place(one), one.trial.method.label, None, one.measurement)
                found.setdefault(group.experiment, []).append(row)
    return list(found.items())


def interval(estimate: Estimate, column: Column) -> str:
    """``[low, high]`` in the table's unit."""
    low, high = (f"{column.scale * value:.{column.digits}f}" for value in (estimate.low, estimate.high))
    return f"[{low}, {high}]"


def _cell(column: Column, published: PublishedRow | None, measured: Measurement | None) -> Cell:
    theirs: float | None = getattr(published, column.published) if published is not None else None
    said = "" if theirs is None else f"{theirs:.{column.digits}f}"
    if measured is None:
        return Cell(said, "", "", "")
    own: Estimate = getattr(measured, column.measured)
    value = column.scale * own.value
    difference = "" if theirs is None else f"{value - theirs:+.{column.digits}f}"
    return Cell(said, f"{value:.{column.digits}f}", interval(own, column), difference)


def _published_place(row: PublishedRow) -> tuple[str, ...]:
    quantization = f"{row.quantization}, MTP loaded" if row.mtp_loaded else row.quantization
    length = str(row.block_length) if row.block_length else ""
    return row.target, quantization, row.runtime, str(row.context_tokens), row.task, length


def _place(kept: Kept) -> tuple[str, ...]:
    trial = kept.trial
    context = str(trial.task.context_tokens or "")
    target = trial.pair.target
    return (
        target.model,
        target.precision,
        trial.runtime.kind,
        context,
        trial.task.kind,
        "",
    )  # a method's label has its L
