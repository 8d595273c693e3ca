"""What a plot of the report consists of."""

from typing import NamedTuple

from choicespec.reports.markup import Sheet
from choicespec.reports.words import Label, Word


class Facet(NamedTuple):
    """One of a plot's drawings, as HTML."""

    title: Label
    drawing: str


class Plot(NamedTuple):
    """What a person looks at.

    Attributes:
        facets: the drawings; none where there is no data.
        keys: the legend, as HTML.
        sheet: the numbers behind the drawings.
        command: what makes the data.
        finding: said in place of drawings where there is nothing to draw and that is the answer.
    """

    title: Word
    note: Word
    facets: tuple[Facet, ...]
    keys: tuple[str, ...]
    sheet: Sheet
    command: str
    finding: Word | None = None
