"""HTML of what the report says: everything from outside is escaped here, and words stand in both languages."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from choicespec.reports.words import LANGUAGES, Label, said


class Sheet(NamedTuple):
    """A plain table: of data behind a plot, or of the environment. What follows a line break in a cell is smaller."""

    head: tuple[Label, ...]
    rows: tuple[tuple[Label, ...], ...]


def text(label: Label, element: str = "span") -> str:
    """A label as HTML; a word is there in both languages, of which the page shows one.

    Args:
        label: data, or a word.
        element: what holds each language; ``tspan`` inside SVG.
    """
    if isinstance(label, str):
        return escape(label)
    if label.en == label.ja:
        return escape(label.en)
    return "".join(f'<{element} lang="{one}">{escape(said(label, one))}</{element}>' for one in LANGUAGES)


def sheet(table: Sheet) -> str:
    """A plain table that scrolls sideways where it does not fit."""
    return scrolling(_row(table.head, "th"), [_row(row, "td") for row in table.rows])


def scrolling(head: str, body: Sequence[str], kind: str = "plain") -> str:
    """A table of ready rows in a box of its own, so that the page never scrolls sideways."""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead>{head}</thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def code(command: str) -> str:
    """A command to type."""
    return f"<code>{escape(command)}</code>"


def _row(cells: Sequence[Label], element: str) -> str:
    return "<tr>" + "".join(f"<{element}>{_lines(cell)}</{element}>" for cell in cells) + "</tr>"


def _lines(cell: Label) -> str:
    if not isinstance(cell, str):
        return text(cell)
    first, *others = cell.split("\n")
    return text(first) + "".join(f"<small>{text(line)}</small>" for line in others)
