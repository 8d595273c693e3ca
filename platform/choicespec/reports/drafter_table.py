"""What trained drafters yield on held-out prompts."""

from collections.abc import Sequence

from rich.table import Table

from choicespec.reports.tables import figure
from choicespec.training.evaluate import Acceptance


def drafter_table(name: str, num_draft_tokens: int, found: Sequence[Acceptance]) -> Table:
    """A drafter's accepted tokens, a row a task."""
    table = Table(
        title=f"{name}, k={num_draft_tokens}",
        caption="accepted draft tokens with 95% intervals over n held-out prompts, the bonus token excluded; 'known' "
        "is the share of the outputs' tokens that the drafter has",
    )
    for heading in ("task", "n"):
        table.add_column(heading)
    for heading in ("accepted, all positions", "accepted/step, decode path", "known %"):
        table.add_column(heading, justify="right")
    for one in found:
        figures = (figure(one.accepted, 2), figure(one.accepted_on_path, 2), f"{100 * one.known:.1f}")
        table.add_row(one.task, str(one.accepted.n), *figures)
    return table
