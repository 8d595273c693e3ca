"""The scorer table, with the published row that each of ours corresponds to."""

from collections.abc import Sequence

from rich.table import Table

from choicespec.reports.published_rows import PublishedScorerRow, scorer_candidates, scorer_rows
from choicespec.reports.tables import figure
from choicespec.scorer.table import Row

_LAST_LAYER, _EARLIER_LAYER = "bf16 (layer 64)", "bf16 (layer 48)"  # of 64
_SCORER, _LARGER = ("Qwen3-4B", "bf16"), ("Qwen3.8-27B", "bf16")
_FOUR_BITS = ("q4_0", "nf4", "awq")  # transfer to these stands beside NF4's, to any other precision beside FP8's
_EARLIER = (0.7, 0.9)  # of the depth: what three quarters is compared with


def counterpart(row: Row, num_layers: int) -> PublishedScorerRow | None:
    """The published row that a row of ours corresponds to; None where nothing like it was published."""
    variant = row.variant
    if (
        variant.split_by != "prompt"
        or not (variant.hidden_states and variant.prior)
        or variant.name.startswith(("seed", "without"))
    ):
        return None
    wanted = _code_row(row) if row.task == "python_repo" else _tool_call_row(row, max(variant.layers) / num_layers)
    candidates = scorer_candidates(variant.drafters.values())
    known = {(one.target, one.hidden): one for one in scorer_rows() if one.candidates == candidates}
    if wanted == _SCORER and wanted not in known:  # over other drafters than DFlash, another target's were published
        wanted = _LARGER
    return known.get(wanted) if wanted is not None else None


def _code_row(row: Row) -> tuple[str, str] | None:
    return ("Qwen3-4B (Python)", "bf16") if row.variant.name == "scorer" and not row.transferred else None


def _tool_call_row(row: Row, depth: float) -> tuple[str, str] | None:
    """Target and hidden state of the published row."""
    if row.transferred:
        fewer_bits = "NF4" if row.precision.startswith(_FOUR_BITS) else "FP8"
        return "Qwen3.8-27B", f"{fewer_bits}, scorer trained on bf16"
    if row.variant.name == "scorer":
        return _SCORER
    if depth == 1:
        return "Qwen3.8-27B", _LAST_LAYER
    return ("Qwen3.8-27B", _EARLIER_LAYER) if _EARLIER[0] <= depth <= _EARLIER[1] else None


def scorer_table(rows: Sequence[Row], num_layers: int, title: str) -> Table:
    """Prior, scorer and oracle on held-out prompts, over all positions and over the decode path."""
    table = Table(
        title=title,
        caption="prior -> scorer (oracle), 95% intervals of the scorer's figure over n held-out prompts; 'gap' is the "
        "share of the way from prior to oracle; each one's decode path is its own; in a union the prior takes drafters "
        "at their word",
    )
    for name in ("task", "candidates", "scorer", "target", "n"):
        table.add_column(name, overflow="fold")
    for name in ("top-1 %", "accepted, all positions", "gap %", "accepted, decode path", "gap %", "calibration"):
        table.add_column(name, justify="right")
    table.add_column("published: top-1 %; accepted, all positions", overflow="fold")
    for row in rows:
        found, published = row.found, counterpart(row, num_layers)
        table.add_row(
            row.task,
            row.variant.candidates,
            row.variant.name,
            row.precision,
            str(found.scorer.accepted.n),
            f"{100 * found.prior.top1.value:.1f} -> {figure(found.scorer.top1, 1, 100)}",
            _accepted(found.prior.accepted.value, figure(found.scorer.accepted, 2), found.oracle.accepted.value),
            f"{100 * found.gap_closed:.0f}",
            _accepted(
                found.prior.accepted_on_path.value,
                figure(found.scorer.accepted_on_path, 2),
                found.oracle.accepted_on_path.value,
            ),
            f"{100 * found.gap_closed_on_path:.0f}",
            f"{found.calibration_error_tokens:.2f}",
            _said(published) if published else "",
        )
    return table


def _accepted(prior: float, scorer: str, oracle: float) -> str:
    return f"{prior:.2f} -> {scorer} ({oracle:.2f})"


def _said(published: PublishedScorerRow) -> str:
    return f"{published.target} {published.hidden}, {published.candidates}: {published.figures}"
